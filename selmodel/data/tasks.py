"""Synthetic tasks whose answers are known: variable assignment, running parity, copying.

A task makes examples of any length from a generator of random numbers. An example is a sequence of symbols of
which some are answers; a model is trained and measured on the answers alone. Symbols are words, so that an example
can be read: ``a = 7`` is written ``a 7``.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np

from selmodel.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from selmodel.errors import UserError

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
SPECIALS = (BOS, EOS, PAD)  # their ids are 0, 1, 2


class Task(ABC):
    """Examples of one kind. Takes a source's place in a run's configuration (``data.source``).

    Attributes:
        symbols: the words of the task; word i has the id ``len(SPECIALS) + i``.
    """

    symbols: list[str]

    @abstractmethod
    def example(self, length: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """An example of ``length``: the numbers of its symbols, int64 [n], and which are answers, bool [n].

        n is ``n_symbols(length)``.
        """

    @abstractmethod
    def n_symbols(self, length: int) -> int:
        """Symbols of an example of ``length``."""

    def options(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {name: value for name, value in vars(self).items() if name != "symbols"}

    def prepare(self) -> None:  # noqa: B027 - not abstract: there is nothing to prepare
        """Nothing: examples are made as they are asked for."""

    def describe(self) -> dict[str, Any]:
        """What a run records of its data: task, options, and a fingerprint of both."""
        record = {"kind": type(self).__name__, **self.options()}
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        return record | {"fingerprint": digest}


class VariableAssignment(Task):
    """Names are given values, again and again and in any order; the answer is a name's last value.

    ``a 7 c 3 a 1 ? a 1 ? c 3``: after each ``? name`` its last value is the answer. Selective attention can mask a
    value once its name is given another (arXiv 2410.02703, section 2).

    Args:
        n_names, n_values: how many names and values there are.
        n_queries: questions at the end, each about one of the names that were given a value.
    """

    def __init__(self, n_names: int = 8, n_values: int = 16, n_queries: int = 4) -> None:
        _check_at_least(1, n_names=n_names, n_queries=n_queries)
        _check_at_least(2, n_values=n_values)
        self.n_names = n_names
        self.n_values = n_values
        self.n_queries = n_queries
        self.symbols = ["?", *(f"x{i}" for i in range(n_names)), *(str(i) for i in range(n_values))]

    def n_symbols(self, length: int) -> int:
        return 2 * length + 3 * self.n_queries

    def example(self, length: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        names = random.integers(self.n_names, size=length)
        values = random.integers(self.n_values, size=length)
        # The last value that each name was given; -1 for one that was given none.
        last = np.full(self.n_names, -1)
        for name, value in zip(names, values, strict=True):
            last[name] = value
        asked = random.choice(np.flatnonzero(last >= 0), size=self.n_queries)
        assignments = np.stack([1 + names, 1 + self.n_names + values], axis=1)
        questions = np.stack([np.zeros_like(asked), 1 + asked, 1 + self.n_names + last[asked]], axis=1)
        is_answer = np.zeros(self.n_symbols(length), dtype=bool)
        is_answer[2 * length + 2 :: 3] = True
        return np.concatenate([assignments.ravel(), questions.ravel()]), is_answer


class Parity(Task):
    """Bits, each followed by whether the number of ones so far is odd: ``1 odd 0 odd 1 even``.

    The parity before and the bit are all that an answer needs; a model that forgets the rest can go on for any length.
    """

    def __init__(self) -> None:
        self.symbols = ["0", "1", "even", "odd"]

    def n_symbols(self, length: int) -> int:
        return 2 * length

    def example(self, length: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        bits = random.integers(2, size=length)
        parity = np.cumsum(bits) % 2
        return np.stack([bits, 2 + parity], axis=1).ravel(), np.arange(2 * length) % 2 == 1


class Copy(Task):
    """Symbols, a mark, and the symbols again: ``a b a | a b a``. Nothing may be forgotten before it is copied.

    Args:
        n_symbol_kinds: how many different symbols there are to copy.
    """

    def __init__(self, n_symbol_kinds: int = 16) -> None:
        _check_at_least(2, n_symbol_kinds=n_symbol_kinds)
        self.n_symbol_kinds = n_symbol_kinds
        self.symbols = ["|", *(f"s{i}" for i in range(n_symbol_kinds))]

    def n_symbols(self, length: int) -> int:
        return 2 * length + 1

    def example(self, length: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        text = 1 + random.integers(self.n_symbol_kinds, size=length)
        return np.concatenate([text, [0], text]), np.arange(2 * length + 1) > length


class TaskTokenizer:
    """Option group ``tokenizer=task``: one token per symbol of the task, words parted by spaces."""

    def build(self, source: Task | None, cache_dir: object = None) -> Tokenizer:
        """The tokenizer of the task ``source``.

        Raises:
            UserError: the data is not a task's.
        """
        import tokenizers

        if not isinstance(source, Task):
            raise UserError(
                "tokenizer=task: has a token for each symbol of a task, and the data is none; expected tokenizer="
                "sentencepiece or huggingface"
            )
        vocabulary = {word: index for index, word in enumerate([*SPECIALS, *source.symbols])}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=PAD))
        model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        model.add_special_tokens(list(SPECIALS))
        return HuggingFaceTokenizer(content=model.to_str().encode(), bos_token=BOS, eos_token=EOS)


def batch_of_examples(
    task: Task, lengths: Iterable[int], randoms: Iterable[np.random.Generator], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int64 [b, width + 1], BOS first, and which targets are answers, bool [b, width].

    An example ends with EOS and is filled up with PAD; neither counts as an answer.
    """
    rows = [task.example(length, random) for length, random in zip(lengths, randoms, strict=True)]
    tokens = np.full((len(rows), width + 1), SPECIALS.index(PAD), dtype=np.int64)
    is_answer = np.zeros((len(rows), width), dtype=bool)
    tokens[:, 0] = SPECIALS.index(BOS)
    for row, (symbols, answers) in enumerate(rows):
        n = len(symbols)
        tokens[row, 1 : n + 1] = symbols + len(SPECIALS)
        if n < width:
            tokens[row, n + 1] = SPECIALS.index(EOS)
        is_answer[row, :n] = answers
    return tokens, is_answer


def _check_at_least(least: int, **options: int) -> None:
    faults = [
        f"data.source.{name}={value!r}: expected a whole number of at least {least}"
        for name, value in options.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < least
    ]
    if faults:
        raise UserError("; ".join(faults))
