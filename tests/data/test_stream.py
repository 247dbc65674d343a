"""Streams: what each of them reads, and that four integers are enough to go on."""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from corpus import EOS, NumberSource, NumberTokenizer, number_source, oracle_tokens

from selmodel.data import reader
from selmodel.data.documents import TextDocuments
from selmodel.data.sources import LocalSource
from selmodel.data.stream import Order, Stream, StreamState, assignment, permutation
from selmodel.errors import UserError


def text_documents(source) -> TextDocuments:
    return TextDocuments(source, NumberTokenizer())


def number_corpus(*shards: list[str | None]) -> TextDocuments:
    return text_documents(NumberSource({"train": list(shards), "validation": [["2"]]}))


def take(stream: Stream, n: int) -> list[int]:
    tokens = np.zeros(n, dtype=np.int32)
    stream.fill(tokens)
    return tokens.tolist()


def test_permutation_depends_on_seed_and_epoch_and_nothing_else():
    seen = {tuple(permutation(16, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(seen) == 16
    assert all(sorted(order) == list(range(16)) for order in seen)
    # Written down, because a run must be resumable with any later version of the package and of NumPy.
    assert permutation(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert permutation(8, 1, 2).tolist() == [5, 6, 3, 2, 1, 0, 4, 7]


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 8, 9, 20])
@pytest.mark.parametrize("streams", [1, 2, 3, 8])
def test_assignment_covers_every_row_once_in_each_epoch(shards, streams):
    for epoch in range(3 * streams):
        rows = Counter(
            (shard, row)
            for stream in range(streams)
            for shard, first, step in assignment(stream, streams, shards, seed=5, epoch=epoch)
            for row in range(first, 11, step)
        )
        assert rows == Counter((shard, row) for shard in range(shards) for row in range(11))


def test_a_worked_stream_and_its_states():
    stream = Stream(number_corpus(["10 11", "", "12"]), 0, streams=1, seed=0)
    assert stream.state == (0, 0, 0, 0)
    read = [(take(stream, 1)[0], tuple(stream.state)) for _ in range(8)]
    assert read == [
        (10, (0, 0, 0, 1)),
        (11, (0, 0, 0, 2)),
        (EOS, (0, 0, 1, 0)),  # the row is over: the place is the start of the next one
        (EOS, (0, 0, 2, 0)),  # an empty document is an EOS
        (12, (0, 0, 2, 1)),
        (EOS, (0, 0, 3, 0)),  # whether the shard is over shows when the next token is wanted
        (10, (1, 0, 0, 1)),
        (11, (1, 0, 0, 2)),
    ]


@pytest.mark.parametrize("shards", [1, 3, 10])
def test_streams_equal_the_oracle(shards):
    source = number_source(shards, rows=50)
    for index in range(4):
        expected = [token for token, _ in islice(oracle_tokens(source, index, 4, seed=9), 500)]
        assert take(Stream(text_documents(source), index, 4, seed=9), 500) == expected


@pytest.mark.parametrize("shards", [1, 3, 10])
def test_a_stream_goes_on_from_any_of_its_states(shards):
    source = number_source(shards, rows=30)
    for index in range(4):
        stream = Stream(text_documents(source), index, 4, seed=9)
        states, tokens = [stream.state], []
        for _ in range(150):
            tokens += take(stream, 1)
            states.append(stream.state)
        for n, state in enumerate(states[:-10]):
            resumed = Stream(text_documents(source), index, 4, seed=9, state=state)
            assert take(resumed, 10) == tokens[n : n + 10]
            assert resumed.state == states[n + 10]  # equal places have equal states, whatever led there


def test_state_of_an_untouched_stream_is_the_one_it_was_given():
    state = StreamState(3, 0, 4, 0)
    assert Stream(number_corpus(["2 3"] * 9), 0, 1, seed=0, state=state).state == state


@pytest.mark.parametrize("shards", [1, 4, 16])
def test_rows_are_read_once_per_epoch_in_another_order(shards):
    source = number_source(shards, rows=60)
    everything = Counter(
        int(token) for texts in source.splits["train"] for text in texts for token in [*text.split(), EOS]
    )
    epochs: list[list[int]] = [[], []]
    for index in range(8):
        stream = Stream(text_documents(source), index, 8, seed=2)
        while True:
            token = take(stream, 1)[0]
            if stream.state.epoch > 1:
                break
            epochs[stream.state.epoch].append(token)
    assert Counter(epochs[0]) == everything
    assert Counter(epochs[1]) == everything
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("shards", [[1], [5], [1, 0], [0, 1], [0, 0, 3, 0], [0] * 20 + [1]])
def test_fewer_rows_than_streams(shards):
    rows = iter(range(2, 100))
    corpus = number_corpus(*([str(next(rows)) for _ in range(n)] for n in shards))
    found = Counter()
    for index in range(16):
        found.update(take(Stream(corpus, index, 16, seed=0), 20)[::2])
    assert set(found) == set(range(2, 2 + sum(shards)))  # no stream hangs, and every row is read by some stream


@pytest.mark.parametrize("shards", [[[]], [[], [], []], [[None, None]], [[]] * 40])
def test_an_empty_corpus_is_an_error_in_bounded_time(shards):
    began = time.monotonic()
    with pytest.raises(UserError, match=r"no usable row in any of its \d+ shard.*train-00000"):
        take(Stream(number_corpus(*shards), 0, 16, seed=0), 1)
    assert time.monotonic() - began < 5


def test_a_row_that_is_gone_or_shorter_is_not_passed_over():
    state = StreamState(0, 0, 1, 2)
    assert take(Stream(number_corpus(["2", "3 4 5"]), 0, 1, seed=0, state=state), 2) == [5, EOS]
    for texts in (["2", None, "3"], ["2"], ["2", "3"]):
        with pytest.raises(UserError, match="token 2 of row 1 of shard train-00000"):
            take(Stream(number_corpus(texts), 0, 1, seed=0, state=state), 1)


@pytest.mark.parametrize("shards", [2, 40])
def test_resuming_late_reads_and_tokenizes_no_more_than_early(shards):
    """Steps of 8 streams by 16 tokens; 40 shards are read whole, 2 are shared by the streams."""
    source = number_source(shards, rows=30_000)
    documents = text_documents(source)
    streams = [Stream(documents, index, 8, seed=0) for index in range(8)]
    states = {}
    for step in range(10_000):
        if step in (10, 9_999):
            states[step] = [stream.state for stream in streams]
        for stream in streams:
            stream.fill(np.empty(16, dtype=np.int32))
    costs = {}
    for step, recorded in states.items():
        source.read = documents.tokenizer.encoded = 0
        for index, state in enumerate(recorded):
            take(Stream(documents, index, 8, seed=0, state=state), 16)
        costs[step] = (source.read, documents.tokenizer.encoded)
    assert states[9_999][0].epoch > states[10][0].epoch
    for late, early in zip(costs[9_999], costs[10], strict=True):
        assert late <= 2 * early


def test_seeking_in_a_file_parses_only_rows_from_the_recorded_one_on(tmp_path, monkeypatch):
    rows = [f'{{"text": "{row + 2}"}}\n' for row in range(5_000)]
    (tmp_path / "c4-train.00000-of-00001.json").write_text("".join(rows))
    (tmp_path / "c4-validation.00000-of-00001.json").write_text(rows[0])
    documents = text_documents(LocalSource(str(tmp_path)))
    parsed = []
    monkeypatch.setattr(reader, "parse", lambda line, parse=reader.parse: parsed.append(line) or parse(line))
    counts = []
    for row in (10, 4_500):
        parsed.clear()
        assert take(Stream(documents, 0, 1, seed=0, state=StreamState(0, 0, row, 0)), 2) == [row + 2, EOS]
        counts.append(len(parsed))
    assert counts[0] == counts[1] <= 2


def test_batch_and_streams_that_do_not_fit_are_named_with_near_choices():
    with pytest.raises(UserError) as error:
        Order(seed=0, streams=64, context_length=8, batch_size=10)
    message = str(error.value)
    assert message.startswith("data.batch_size=10 with data.streams=64")
    # 8 and 16 are the divisors of 64 around 10; 60 and 70 the multiples of 10 around 64.
    assert "data.batch_size=8 or data.batch_size=16" in message
    assert "data.streams=60 or data.streams=70" in message


@pytest.mark.parametrize(("batch_size", "streams"), [(64, 64), (128, 64), (16, 64), (1, 64), (64, 1), (6, 3)])
def test_batch_and_streams_that_fit(batch_size, streams):
    Order(seed=0, streams=streams, context_length=8, batch_size=batch_size)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"streams": 0}, "data.streams=0: expected an integer of at least 1"),
        ({"batch_size": -4}, "data.batch_size=-4: expected an integer of at least 1"),
        ({"context_length": 0}, "model.context_length=0: expected an integer of at least 1"),
        ({"seed": -1}, "data.seed=-1: expected an integer of at least 0"),
        ({"batch_size": 8.0}, "data.batch_size=8.0: expected an integer of at least 1"),
        ({"streams": True}, "data.streams=True: expected an integer of at least 1"),
    ],
)
def test_values_out_of_range(changed, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        Order(**{"seed": 0, "streams": 64, "context_length": 8, "batch_size": 64, **changed})


def test_all_values_out_of_range_are_reported_at_once():
    with pytest.raises(UserError, match=r"data\.streams=0.*data\.batch_size=0"):
        Order(seed=0, streams=0, context_length=8, batch_size=0)


def test_a_world_that_does_not_divide_is_an_error_with_what_would_work():
    order = Order(seed=0, streams=64, context_length=8, batch_size=64)
    for world_size in (1, 2, 4, 64):
        order.check_world(world_size)
    with pytest.raises(UserError) as error:
        order.check_world(3)
    message = str(error.value)
    assert message.startswith("data.batch_size=64 and data.streams=64 on 3 devices")
    assert "run on 1, 2, 4, 8, 16, 32, 64 device(s)" in message
    for settings in (part for part in message.split(" run with ")[1].rstrip(".").split(" or ")):
        batch_size, streams = (int(setting.split("=")[1]) for setting in settings.split())
        Order(seed=0, streams=streams, context_length=8, batch_size=batch_size).check_world(3)
    with pytest.raises(UserError):
        order.check_world(128)
