"""The SentencePiece tokenizer of an exported model, with exactly the ids of training."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedTokenizer

from selmodel.data.tokenizer import SentencePieceTokenizer

VOCABULARY_FILE = "tokenizer.model"


class SelModelTokenizer(PreTrainedTokenizer):
    """`selmodel.data.tokenizer.SentencePieceTokenizer` as Hugging Face tokenizers are used.

    ``tokenizer(text)`` gives ``<BOS>`` and then the ids of training; ``add_special_tokens=False`` leaves out the
    ``<BOS>``. Special tokens spelled out in a text are encoded as text (``split_special_tokens=False`` makes tokens of
    them). Decoding gives back the text unchanged. It is no fast tokenizer: those rebuild the segmentation with code of
    their own, which agrees on most texts but not on all.

    vocab_file: the SentencePiece model; or content: its bytes. Padding is on the left, with ``</s>``.
    """

    vocab_files_names = {"vocab_file": VOCABULARY_FILE}  # noqa: RUF012  transformers reads it from the class
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str | os.PathLike | None = None, *, content: bytes | None = None, **options) -> None:
        self.vocab_file = vocab_file
        self._tokenizer = SentencePieceTokenizer(vocab_file, content=content)
        self._piece = self._tokenizer.piece
        options.setdefault("bos_token", self._piece(self._tokenizer.bos_id))
        options.setdefault("eos_token", self._piece(self._tokenizer.eos_id))
        options.setdefault("pad_token", options["eos_token"])
        options.setdefault("padding_side", "left")
        options.setdefault("split_special_tokens", True)
        options.setdefault("special_tokens_pattern", "bos")
        options.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(**options)

    @property
    def training_tokenizer(self) -> SentencePieceTokenizer:
        """The tokenizer as training has it."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids, without tokens added later."""
        return self._tokenizer.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Piece to id, with tokens added later."""
        return {self._piece(i): i for i in range(self.vocab_size)} | self._added_tokens_encoder

    def _tokenize(self, text: str, **options) -> list[str]:
        return [self._piece(i) for i in self._tokenizer.encode(text).tolist()]

    def _convert_token_to_id(self, token: str) -> int:
        return self._tokenizer.piece_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._piece(int(index))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces that are no special tokens."""
        return self._tokenizer.decode([self._tokenizer.piece_id(token) for token in tokens])

    def _decode(
        self, token_ids, skip_special_tokens: bool = False, clean_up_tokenization_spaces=None, **options
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        special = set(self.all_special_ids)
        text, pending = [], []
        for i in [*map(int, ids), None]:
            if i is None or i in special or i >= self.vocab_size:
                text.append(self._tokenizer.decode(pending))
                pending = []
                if i is not None and not (skip_special_tokens and i in special):
                    text.append(self.convert_ids_to_tokens(i))
            else:
                pending.append(i)
        return "".join(text)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Write the SentencePiece model into a folder."""
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        path = Path(save_directory) / f"{prefix}{VOCABULARY_FILE}"
        path.write_bytes(self._tokenizer.content)
        return (str(path),)
