"""The validation set: fixed sequences, the same sums for every batch size and number of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from corpus import BOS, EOS, NumberSource, NumberTokenizer, number_source

from selmodel.data.documents import TextDocuments
from selmodel.data.validation import ValidationLoader, read_validation_set
from selmodel.errors import UserError


def validation_set(texts: list[list[str | None]], context_length: int, sequences: int):
    documents = TextDocuments(NumberSource({"train": [["2"]], "validation": texts}), NumberTokenizer())
    return read_validation_set(documents, context_length, sequences)


def loss_of(tokens: torch.Tensor) -> torch.Tensor:
    """A made-up loss per target, [batch, position], that depends on the target and on what came before it."""
    history = torch.cumsum(tokens, 1)[:, :-1]
    return torch.log1p((history * 7 + tokens[:, 1:] * 13) % 101).double()


def sums(loader: ValidationLoader) -> tuple[float, float, int]:
    """(loss, number of targets, bytes) over the batches of one rank."""
    loss, targets, n_bytes = 0.0, 0.0, 0
    for batch in loader:
        weight = batch["weight"].double()
        loss += float((loss_of(batch["tokens"]) * weight[:, None]).sum())
        targets += float(weight.sum()) * batch["bytes"].shape[1]
        n_bytes += int(batch["bytes"].sum())
    return loss, targets, n_bytes


def test_worked_sequences_and_bytes():
    data = validation_set([["10 11 120", ""], [None, "13 14"]], context_length=3, sequences=9)
    assert data.tokens.tolist() == [[BOS, 10, 11, 120], [BOS, EOS, EOS, 13]]
    # Two digits and the space after them, two and one, three digits; 13 with its space; EOS stands for no bytes.
    assert data.token_bytes.tolist() == [[3, 3, 3], [0, 0, 3]]
    assert (data.n_sequences, data.n_tokens, data.n_bytes) == (2, 6, 12)


def test_bytes_of_a_whole_split_are_those_of_its_texts():
    texts = number_source(1, 1, validation=30).splits["validation"]
    n_tokens = sum(len(text.split()) + 1 for text in texts[0])
    data = validation_set(texts, context_length=n_tokens, sequences=1)
    assert data.n_bytes == sum(len(text.encode()) for text in texts[0])


def test_first_sequences_do_not_depend_on_how_many_are_asked_for():
    texts = number_source(1, 1, validation=60).splits["validation"]
    few, many = validation_set(texts, 7, 3), validation_set(texts, 7, 20)
    np.testing.assert_array_equal(few.tokens, many.tokens[:3])
    np.testing.assert_array_equal(few.token_bytes, many.token_bytes[:3])


def test_a_small_split_is_used_as_far_as_it_fills_sequences(caplog):
    data = validation_set([["2 3 4", "5 6 7 8"]], context_length=4, sequences=10)  # 4 + 5 tokens
    assert data.n_sequences == 2
    assert "fills 2 of data.validation_sequences=10" in caplog.text


@pytest.mark.parametrize("texts", [[[]], [[None]], [["2 3"]], [[""], [""]]])
def test_a_split_that_fills_no_sequence_is_an_error(texts):
    with pytest.raises(UserError, match=r"fewer than model.context_length=4 tokens .* validation-00000"):
        validation_set(texts, context_length=4, sequences=10)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_sums_are_equal_for_every_batch_size_and_number_of_ranks(world_size, batch_size):
    texts = number_source(1, 1, validation=40).splits["validation"]
    data = validation_set(texts, context_length=7, sequences=23)
    loaders = [ValidationLoader(data, batch_size, rank=r, world_size=world_size) for r in range(world_size)]
    shapes = [[tuple(batch["tokens"].shape) for batch in loader] for loader in loaders]
    assert all(shape == shapes[0] for shape in shapes)  # no rank runs a step that another lacks
    assert len(shapes[0]) == len(loaders[0])
    loss, targets, n_bytes = map(sum, zip(*map(sums, loaders), strict=True))
    assert targets == 23 * 7
    assert n_bytes == data.n_bytes
    # The same numbers added in another order: float64 rounds in the 16th digit.
    assert math.isclose(loss, float(loss_of(torch.from_numpy(data.tokens.astype(np.int64))).sum()), rel_tol=1e-12)


def test_every_sequence_comes_once_and_in_order():
    data = validation_set(number_source(1, 1, validation=40).splits["validation"], 7, 23)
    for world_size in (1, 2, 3):
        rows = [[] for _ in range(world_size)]
        for rank in range(world_size):
            for batch in ValidationLoader(data, 4, rank=rank, world_size=world_size):
                rows[rank] += batch["tokens"][batch["weight"] > 0].tolist()
        for rank in range(world_size):
            assert rows[rank] == data.tokens[rank::world_size].tolist()


def test_short_and_long_documents_weigh_by_their_tokens_in_any_batch():
    """Documents of 2 and of 200 tokens: the mean over batches would depend on how they are batched, sums do not."""
    short, long = "7 8", " ".join(["9"] * 200)
    data = validation_set([[long, *[short] * 80, long, *[short] * 50]], context_length=20, sequences=30)
    reference = sums(ValidationLoader(data, 30))
    for batch_size in (1, 2, 7):
        for world_size in (1, 2, 4):  # 30 sequences on 4 ranks: two padding rows
            ranks = [ValidationLoader(data, batch_size, rank=r, world_size=world_size) for r in range(world_size)]
            total = [sum(values) for values in zip(*map(sums, ranks), strict=True)]
            assert total[1:] == list(reference[1:])
            assert math.isclose(total[0], reference[0], rel_tol=1e-12)


def test_batch_contents():
    data = validation_set(number_source(1, 1, validation=40).splits["validation"], 7, 5)
    (batch,) = ValidationLoader(data, 8, rank=1, world_size=2, document_mask=True)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()} == {
        "tokens": (torch.int64, (3, 8)),
        "bytes": (torch.int64, (3, 7)),
        "weight": (torch.float32, (3,)),
        "document_ids": (torch.int32, (3, 8)),
    }
    assert batch["weight"].tolist() == [1, 1, 0]
    assert batch["bytes"][2].sum() == 0
    assert (batch["tokens"][:, 0] == BOS).all()
