"""Packing: documents laid end to end and cut into sequences of context_length + 1 tokens, BOS first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from selmodel.data.documents import Block


class BlockCursor:
    """A place in an iterator of blocks, from which consecutive tokens are taken.

    `block` is the block the place lies in (None before the first), `position` the tokens of it already taken.
    """

    def __init__(self, blocks: Iterator[Block]) -> None:
        self.blocks = blocks
        self.block: Block | None = None
        self.position = 0

    def next_block(self) -> bool:
        """Moves to the start of the next block; False at the end."""
        block = next(self.blocks, None)
        if block is None:
            return False
        self.block, self.position = block, 0
        return True

    def take(self, tokens: np.ndarray, token_bytes: np.ndarray | None = None) -> int:
        """Fills `tokens` [m] (and `token_bytes` [m]) with the next m tokens; returns how many there were.

        Fewer than m are returned only at the end of the blocks.
        """
        filled, wanted = 0, len(tokens)
        while filled < wanted:
            if self.block is None or self.position == len(self.block.tokens):
                if not self.next_block():
                    break
                continue
            n = min(wanted - filled, len(self.block.tokens) - self.position)
            piece = slice(self.position, self.position + n)
            tokens[filled : filled + n] = self.block.tokens[piece]
            if token_bytes is not None:
                token_bytes[filled : filled + n] = self.block.token_bytes[piece]
            filled += n
            self.position += n
        return filled

    def document(self) -> tuple[int, int] | None:
        """(index in the block, offset) of the next token; None at the end of the block."""
        if self.position == len(self.block.tokens):
            return None
        index = int(np.searchsorted(self.block.ends, self.position, side="right"))
        first = int(self.block.ends[index - 1]) if index else 0
        return index, self.position - first


def document_ids(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Number of the document each token belongs to, counted from 0 at the BOS: int32, same shape as `tokens`.

    tokens [..., n]. An EOS belongs to the document it ends; the token after it starts the next one. The BOS
    belongs to document 0, which may be the rest of a document that began in an earlier sequence.
    """
    ids = np.zeros(tokens.shape, dtype=np.int32)
    np.cumsum(tokens[..., :-1] == eos_id, axis=-1, out=ids[..., 1:])
    return ids
