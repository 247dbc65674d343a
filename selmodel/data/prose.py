"""English prose out of Python documentation strings.

A documentation string mixes sentences with parameter tables, examples and markup. It is cut into blocks
(paragraphs, list items, field descriptions), and the blocks that read like sentences are kept.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

MIN_WORDS = 6  # in a block
MIN_PROSE = 0.85  # share of a block's characters that are letters of words, or spaces
ENDS = ".!?:\"')"  # what a sentence, or a line before a list, ends with

WORD = re.compile(r"[A-Za-z]{2,}|\b[aAI]\b")
# Lines that are not sentences: examples, directives, fields, rules, tables, code fences.
MARKUP = re.compile(r">>>|```|::\s*$|^\s*(\.\. |:\w+|@\w+|[-=~^*#]{3,}|\|)")
BULLET = re.compile(r"\s*([-*+•]|\d+[.)])\s+")
# "name (type, optional): " and "name: " before a description
FIELD = re.compile(r"\*{0,2}[\w.,`*\\/ -]{1,40}?\s*(\([^()]*(\([^()]*\))?[^()]*\))?\s*:\s+(?=[A-Z])")
ROLE = re.compile(r":[\w:+-]+:`~?\.?([^`<]*?)(?:\s*<[^`>]*>)?`")  # :class:`~torch.Tensor` and the like
QUOTED = re.compile(r"``?([^`]+)``?_*")

SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(code: bytes) -> Iterator[str]:
    """Documentation strings of a module, its classes and functions, in order; none where it does not parse."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, SCOPES):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str(text))), *_]:
                    yield text
            stack.extend(reversed(node.body))
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            stack.extend(reversed(node.body))


def prose_blocks(docstring: str) -> Iterator[str]:
    """The blocks of `docstring` that read like sentences, each on one line."""
    for lines in _blocks(inspect.cleandoc(docstring)):
        if any(MARKUP.search(line) for line in lines):
            continue
        text = " ".join(" ".join(lines).split())
        text = QUOTED.sub(r"\1", ROLE.sub(r"\1", text))
        if text[:1].isupper() and text[-1] in ENDS:
            words = WORD.findall(text)
            if len(words) >= MIN_WORDS and sum(map(len, words)) + text.count(" ") >= MIN_PROSE * len(text):
                yield text


def _blocks(docstring: str) -> Iterator[list[str]]:
    """Lines that belong together, without bullets and field names. A change of indentation begins a block,
    unless it is the hanging indentation of an item or field."""
    block: list[str] = []
    hanging = False  # the block's first line began with a bullet or field name
    begin = indent = 0  # indentation of the block's first and last line
    for line in docstring.split("\n"):
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        bullet = BULLET.match(line)
        if block:
            goes_on = depth == indent or (hanging and len(block) == 1 and depth > indent)
            if not text or bullet or not goes_on or (depth <= begin and FIELD.match(text)):
                yield block
                block = []
        if not text:
            continue
        if not block:
            text = line[bullet.end() :].strip() if bullet else text
            field = FIELD.match(text)
            text = text[field.end() :] if field else text
            hanging = bool(bullet or field)
            begin = depth
        block.append(text)
        indent = depth
    if block:
        yield block
