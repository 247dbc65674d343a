"""Text from tokens as they come, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence

from selmodel.data.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into pieces of text that together are the decoding of all of them.

    A character may take several tokens (bytes of its UTF-8 form). Until it is whole its bytes decode to U+FFFD, so
    what ends in one is held back until more tokens come, or ``flush``. Pieces are cut where the text so far ends in a
    whole character, so bytes never move from one piece to another.

    Args:
        tokenizer: of the tokens.
        ids: tokens that come first; their text is part of the first piece.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(ids)
        self._shown_ids = 0  # tokens whose text has been given
        # Decoding begins at the tokens of the last piece, which a tokenizer of words needs to know where to put spaces.
        self._context = 0

    def push(self, *ids: int) -> str:
        """The text that ``ids`` complete; empty while they end inside a character."""
        self._ids += ids
        text = self._pending()
        if text.endswith(REPLACEMENT):
            return ""
        if text:
            # Tokens without a text of their own (<BOS>, bytes held back) do not say where a space belongs.
            self._context = self._shown_ids
        self._shown_ids = len(self._ids)
        return text

    def flush(self) -> str:
        """What is held back, bytes that are no character as U+FFFD."""
        text = self._pending()
        self._context = self._shown_ids = len(self._ids)
        return text

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._shown_ids])
        return self._tokenizer.decode(self._ids[self._context :])[len(known) :]
