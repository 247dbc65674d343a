"""Made-up prose, and texts that are hard on tokenizers."""

from __future__ import annotations

import random
from collections.abc import Iterator

SYLLABLES = ["ba", "ce", "di", "fo", "gu", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "xu"]
SYLLABLES += ["an", "er", "in", "or", "us", "th", "st", "ing", "ed", "ly"]


def prose(documents: int, *, seed: int = 0, words: int = 60) -> Iterator[str]:
    """Documents of invented words, some of them frequent, with digits, line ends and punctuation."""
    generator = random.Random(seed)
    lexicon = ["".join(generator.choices(SYLLABLES, k=generator.randint(1, 4))) for _ in range(800)]
    weights = [1 / (k + 1) for k in range(len(lexicon))]
    for _ in range(documents):
        chosen = generator.choices(lexicon, weights, k=generator.randint(words // 2, words * 2))
        marks = generator.choices([" ", " ", " ", ", ", ". ", ".\n", " 12 "], k=len(chosen))
        yield "".join(word + mark for word, mark in zip(chosen, marks, strict=True))


HARD = {
    "empty": "",
    "leading space": " a",
    "trailing space": "a ",
    "spaces alone": "   ",
    "double spaces": "  two   words    here  ",
    "tabs": "\ta\t\tb\t",
    "line ends": "\n\na\nb\r\nc\rd\n",
    "all kinds of space": " \u00a0\u2003\u200b\u2028\u2029\u0085\u3000\ufeff ",
    "combining accents": "e\u0301 o\u0302\u0323 \u0301alone",
    "composed and not": "\u00e9e\u0301\u00c5\u212b\u0041\u030a",
    "ligatures and compatibility": "\ufb01\ufb03 \u00bd \u2460 \u33a7 \uff21",
    "emoji": "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "NUL": "\x00a\x00\x00b\x00",
    "scripts": "Привет мир 你好 שלום مرحبا हिन्दी ไทย",
    "SentencePiece's space sign": "\u2581",
    "space signs in text": "\u2581a \u2581 b\u2581\u2581 \u2581",
    "SentencePiece's unknown signs": "\u2585 \u2047",
    "special pieces spelled out": "<s>a</s><unk> <s> </s><pad><0x41><0xE2>",
    "special piece first": "<s>",
    "replacement character": "\ufffd\ufffd",
    "private and unassigned": "\ue000\U000f0000\U0010ffff\u0378",
    "100 KB without a space": "".join(chr(97 + i * i * 7 % 26) for i in range(100_000)),
    "100 KB of one letter": "a" * 100_000,
    "100 KB of spaces": " " * 100_000,
    "100 KB of line ends": "\n" * 100_000,
    "100 KB of an unknown character": "\U0001f600" * 25_000,
    "code": "def f(x):\n    if x:\n\treturn {'a': [1, 2.5e-3]}\n",
}
