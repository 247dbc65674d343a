"""Packing: taking consecutive tokens out of blocks, and numbering documents."""

from __future__ import annotations

import numpy as np

from selmodel.data.documents import Block
from selmodel.data.packing import BlockCursor, document_ids

EOS = 1


def blocks():
    # Rows 3 and 5 with two and no ids, then row 7 with three.
    yield Block(np.array([3, 5]), np.array([3, 4]), np.array([10, 11, EOS, EOS]), np.array([2, 1, 0, 0]))
    yield Block(np.array([7]), np.array([4]), np.array([20, 21, 22, EOS]), np.array([3, 3, 3, 0]))


def test_take_joins_blocks_and_stops_at_the_end():
    cursor = BlockCursor(blocks())
    tokens, token_bytes = np.zeros(5, dtype=np.int32), np.zeros(5, dtype=np.int64)
    assert cursor.take(tokens, token_bytes) == 5
    assert tokens.tolist() == [10, 11, EOS, EOS, 20]
    assert token_bytes.tolist() == [2, 1, 0, 0, 3]
    assert cursor.take(tokens) == 3
    assert tokens[:3].tolist() == [21, 22, EOS]
    assert cursor.take(tokens) == 0


def test_document_is_the_one_of_the_next_token():
    cursor = BlockCursor(blocks())
    places = []
    for _ in range(8):
        cursor.take(np.zeros(1, dtype=np.int32))
        places.append(cursor.document())
    # (index in the block, offset): the EOS of an empty row is its token 0.
    assert places == [(0, 1), (0, 2), (1, 0), None, (0, 1), (0, 2), (0, 3), None]


def test_no_blocks_gives_no_tokens():
    assert BlockCursor(iter(())).take(np.zeros(3, dtype=np.int32)) == 0


def test_document_ids_count_the_eos_before_a_token():
    tokens = np.array([
        [0, 5, 6, EOS, 7, EOS, EOS, 8],  # the EOS belongs to what it ends, also the one of an empty document
        [0, EOS, 5, 5, 5, 5, 5, EOS],  # starts with the last token of an earlier sequence's document
        [0, 5, 5, 5, 5, 5, 5, 5],
    ])  # fmt: skip
    expected = [[0, 0, 0, 0, 1, 1, 2, 3], [0, 0, 1, 1, 1, 1, 1, 1], [0] * 8]
    ids = document_ids(tokens, EOS)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected
