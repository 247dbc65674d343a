"""Sentences are kept, markup and code are not."""

from __future__ import annotations

import sys

import pytest

from selmodel.data.prose import docstrings, prose_blocks


def blocks(docstring: str) -> list[str]:
    return list(prose_blocks(docstring))


def test_docstrings_of_all_scopes_in_order():
    code = '''
"""Module."""
import os
class A:
    """Class."""
    def f(self):
        """Method."""
        def g():
            "Nested."
    """Not a docstring."""
if os.name:
    async def h():
        r"""Under if\\."""
else:
    def i(): """After else."""
try:
    def j(): """In try."""
except ImportError:
    pass
def k():
    return """Not one either."""
def l(): b"""Bytes are none."""
'''
    assert list(docstrings(code.encode())) == ["Module.", "Class.", "Method.", "Nested.", "Under if\\.", "In try."]


@pytest.mark.parametrize("code", [b"def f(:", b"\x00", b"\xff\xfe", b"x = " + b"(" * 5000, b"", b"1"])
def test_code_that_does_not_parse_has_none(code):
    assert list(docstrings(code)) == []


def test_nothing_is_imported_or_run():
    code = b'"""Text."""\nraise SystemExit\nimport antigravity\n'
    assert list(docstrings(code)) == ["Text."]
    assert "antigravity" not in sys.modules


def test_paragraphs_are_unwrapped():
    assert blocks("""Return the first of all the things that were
        found in the given place.

        The others are left where they are, and may be asked for later.
        """) == [
        "Return the first of all the things that were found in the given place.",
        "The others are left where they are, and may be asked for later.",
    ]


def test_descriptions_of_parameters_lose_their_names():
    google = """
    Args:
        first (`int`, *optional*, defaults to 3): The number of things to look
            at before the search is given up.
        second: Whether the others are looked at after the first was found.
    """
    numpy = """
    Parameters
    ----------
    first : int
        The number of things to look at before the search is given up.
    second : bool
        Whether the others are looked at after the first was found.
    """
    expected = [
        "The number of things to look at before the search is given up.",
        "Whether the others are looked at after the first was found.",
    ]
    assert blocks(google) == expected
    assert blocks(numpy) == expected


def test_items_of_lists_stand_alone():
    assert blocks("""
    - The first item of the list is a whole sentence,
      which goes on in the next line.
    * The second item has another kind of bullet before it.
    2. The third item has a number before it, and ends here.
    """) == [
        "The first item of the list is a whole sentence, which goes on in the next line.",
        "The second item has another kind of bullet before it.",
        "The third item has a number before it, and ends here.",
    ]


@pytest.mark.parametrize(
    "docstring",
    [
        ">>> This is an example of the thing that is shown.",
        "```\nThis is code in a fence that looks like a sentence.\n```",
        ".. note:: This is a directive of the markup and no sentence.",
        ":param x: This describes a parameter in the old way of doing it.",
        "=====  =====\nThis is a table with some words in it.\n=====  =====",
        "| This is a line block | of a table with some words in it.",
        "too lowercase to be the beginning of a sentence here.",
        "This has no end and so it is no sentence of its own",
        "Too few words.",
        "X1 = y_2[3] + foo(4, 5) % bar{6} / 7 and 8 or 9 in 10, 11.",
        "",
        "   \n\n  ",
    ],
)
def test_what_is_no_prose(docstring):
    assert blocks(docstring) == []


def test_markup_inside_a_sentence_is_taken_off():
    text = "Return a :class:`~torch.Tensor` of ``n`` numbers, see :func:`the other <torch.other>` or `that`_ for more."
    assert blocks(text) == ["Return a torch.Tensor of n numbers, see the other or that for more."]
