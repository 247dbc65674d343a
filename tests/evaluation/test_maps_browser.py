"""The page of mask maps in a real browser, headless: by keyboard alone, at the width of a phone, without a network."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import torch

from selmodel.evaluation.map_page import page
from selmodel.evaluation.maps import STAYS, LayerMap, TextMap
from tests.evaluation.browser import Browser, find_browser

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")

LABELS = ["⟨BOS⟩", "The", " fox", " <script>document.title='bad'</script>", "\n", " jumps", "."]
PICTURES = os.environ.get("SELMODEL_TEST_PICTURES")  # a folder to look at what was seen


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    S = torch.zeros(7, 7)
    S[3, 1], S[5, 1], S[5, 2], S[6, 2] = 2.0, 3.5, 0.5, 20.0
    other = torch.zeros(7, 7)
    other[4, 3] = 1.25
    leaves = torch.full((7,), STAYS)
    leaves[2] = 6
    facts = {
        "checkpoint": "run/last.ckpt", "step": 10, "n_layers": 2, "selection_head": 0, "budgets": [6, 7],
        "rule": "selective",
    }  # fmt: skip
    layers = [LayerMap(S, S.sum(0), leaves), LayerMap(other, other.sum(0), torch.full((7,), STAYS))]
    path = tmp_path_factory.mktemp("page") / "map.html"
    path.write_text(page(TextMap(list(range(7)), LABELS, layers, facts)), encoding="utf-8")
    return path


def in_browser(tmp_path, path, use, **size):
    async def run():
        async with Browser(tmp_path / "profile") as browser:
            await browser.open(path, **size)
            await use(browser)
            assert browser.faults == []
            outside = [one for one in browser.requests if not one.startswith(("file:", "data:", "about:"))]
            assert outside == []
            assert await browser.value("document.title") == "Mask map, run/last.ckpt"

    asyncio.run(run())


async def listed(browser, name):
    """(text, number) of the entries of one of the two lists."""
    spans = "[...li.querySelectorAll('span')].map(span => span.textContent)"
    script = f"[...document.querySelectorAll('#{name} li')].map(li => {spans})"
    return [tuple(entry[:2]) for entry in await browser.value(script)]


def test_by_keyboard_alone_everything_is_told(tmp_path, path):
    async def use(browser):
        assert await browser.value("document.querySelectorAll('.token[role=button]').length") == len(LABELS)
        for _ in range(2):  # the layers, then the text
            await browser.press("Tab")
        assert await browser.value("document.activeElement.textContent") == "⟨BOS⟩"
        for _ in range(5):
            await browser.press("ArrowRight")
        assert await browser.value("document.activeElement.getAttribute('aria-label')") == "␣jumps, token 5, F 0.00"
        assert await browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert await listed(browser, "masks") == [("1 The", "3.50"), ("2 ␣fox", "0.50")]
        assert await listed(browser, "by") == []
        for _ in range(3):
            await browser.press("ArrowLeft")
        assert await listed(browser, "by") == [("6 .", "20.0"), ("5 ␣jumps", "0.50")]
        about = await browser.value("document.getElementById('about').innerText")
        assert about.splitlines() == ["Layer 0", "F at the end: 20.5", "Leaves with token 6: ."]
        await browser.press("ArrowDown")  # the next layer, the same token
        assert await browser.value("document.querySelector('[aria-selected=true]').textContent") == "1"
        assert await listed(browser, "by") == []
        about = await browser.value("document.getElementById('about').innerText")
        assert about.splitlines()[-1] == "Held in the end, under a budget of 7 keys"
        await browser.press("End")
        assert await browser.value("document.activeElement.textContent") == "."
        await browser.press("Escape")
        assert await browser.value("document.getElementById('chosen').textContent") == "No token chosen"

    in_browser(tmp_path, path, use)


def test_how_masked_a_token_is_shows_without_colour(tmp_path, path):
    """By the line below it; and what has left is struck through."""

    async def use(browser):
        lines = await browser.value(
            "[...document.querySelectorAll('#text .token')].map(s => getComputedStyle(s).borderBottomWidth)"
        )
        assert lines == ["0px", "3px", "4px", "0px", "0px", "0px", "0px"]  # F 0, 5.5, 20.5, 0 ...
        struck = await browser.value("[...document.querySelectorAll('#text .gone')].map(s => s.textContent)")
        assert struck == [" fox"]

    in_browser(tmp_path, path, use)


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_its_window_and_shows_the_text_as_text(tmp_path, path, width):
    async def use(browser):
        assert await browser.value("document.documentElement.scrollWidth") <= width
        text = await browser.value("document.getElementById('text').textContent")
        assert text == "".join(LABELS).replace("\n", "↵\n")
        heights = await browser.value("[...document.querySelectorAll('button')].map(button => button.offsetHeight)")
        assert min(heights) >= 44  # large enough for a finger
        dark = await browser.value(
            "(() => { const c = document.getElementById('votes');"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i] < 250; return n / (c.width * c.width); })()"
        )
        assert dark == pytest.approx(4 / 49)  # four votes of 7 x 7
        if PICTURES:
            for _ in range(7):
                await browser.press("Tab" if _ < 2 else "ArrowRight")
            await browser.screenshot(Path(PICTURES) / f"map-{width}.png")

    in_browser(tmp_path, path, use, width=width)
