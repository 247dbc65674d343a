"""Documents tokenized while they are read: blocks that join to the rows, and cheap seeking."""

from __future__ import annotations

import numpy as np
import pytest
from corpus import EOS, NumberSource, NumberTokenizer

from selmodel.data.documents import CHARS_PER_BLOCK, ROWS_PER_BLOCK, TextDocuments


def documents(texts: list[str | None]) -> TextDocuments:
    return TextDocuments(NumberSource({"train": [texts], "validation": [["5"]]}), NumberTokenizer())


def read(blocks) -> list[tuple[int, list[int]]]:
    """(row, tokens with EOS) of every document."""
    found = []
    for block in blocks:
        starts = [0, *block.ends[:-1]]
        assert block.ends[-1] == len(block.tokens)
        found += [
            (int(row), block.tokens[start:end].tolist())
            for row, start, end in zip(block.rows, starts, block.ends, strict=True)
        ]
    return found


@pytest.mark.parametrize(("start", "step"), [(0, 1), (3, 1), (0, 4), (2, 7), (99, 1), (100, 1), (250, 3)])
def test_blocks_hold_every_row_asked_for(start, step):
    texts = [" ".join(str(100 * row + i + 2) for i in range(row % 5)) for row in range(100)]
    expected = [(row, [*map(int, texts[row].split()), EOS]) for row in range(start, 100, step)]
    assert read(documents(texts).blocks("train", 0, start, step)) == expected


def test_skipped_rows_keep_the_numbers_of_the_others():
    assert read(documents(["2", None, "", None, "3 4"]).blocks("train", 0)) == [
        (0, [2, EOS]),
        (2, [EOS]),
        (4, [3, 4, EOS]),
    ]


def test_bytes_are_those_of_the_text_and_none_for_eos():
    (first, second) = documents(["12 3", "456"]).blocks("train", 0, with_bytes=True)
    assert first.token_bytes.tolist() == [3, 1, 0]
    assert second.token_bytes.tolist() == [3, 0]
    assert next(documents(["12"]).blocks("train", 0)).token_bytes is None


def test_seeking_tokenizes_one_row_and_blocks_grow():
    corpus = documents(["2"] * 1000)
    blocks = corpus.blocks("train", 0, start=700)
    next(blocks)
    assert corpus.tokenizer.encoded == 1
    sizes = [len(block.rows) for block in blocks]
    assert sizes[:4] == [2, 4, 8, 16]
    assert set(sizes[4:-1]) == {ROWS_PER_BLOCK}


def test_long_documents_make_short_blocks():
    text = " ".join(["12345"] * (CHARS_PER_BLOCK // 6))
    sizes = [len(block.rows) for block in documents([text] * 10).blocks("train", 0)]
    assert max(sizes) <= 2  # without the bound on characters they would double


def test_dtypes():
    (block,) = documents(["2 3"]).blocks("train", 0, with_bytes=True)
    assert (block.rows.dtype, block.ends.dtype, block.tokens.dtype) == (np.int64, np.int64, np.int32)
