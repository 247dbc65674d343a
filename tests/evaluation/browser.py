"""A headless Chromium, spoken to by its own protocol over loopback: opens a page, types, tells what was fetched."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "End": 35,
    "Home": 36,
    "Escape": 27,
    "Tab": 9,
}


def find_browser() -> str | None:
    """The path of an installed Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. Used as ``async with Browser(folder) as page``; ``folder`` holds its profile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []  # addresses that the page asked for, its own included
        self.faults: list[str] = []  # errors of its script
        self._number = 0
        self._answers: dict[int, asyncio.Future] = {}

    async def __aenter__(self) -> Browser:
        command = [
            find_browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={self.folder}", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        mark = self.folder / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (mark.exists() and len(mark.read_text().splitlines()) == 2):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError("the browser did not start")
            await asyncio.sleep(0.05)
        port = mark.read_text().splitlines()[0]
        self.session = aiohttp.ClientSession()
        async with self.session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(one for one in await answer.json() if one["type"] == "page")
        self.socket = await self.session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        self.reader = asyncio.create_task(self._read())
        for domain in ("Page", "Network", "Runtime"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reader.cancel()
        await self.session.close()
        self.process.kill()
        self.process.wait()

    async def _read(self) -> None:
        async for message in self.socket:
            content = json.loads(message.data)
            if content.get("id") in self._answers:
                self._answers.pop(content["id"]).set_result(content)
            elif content.get("method") == "Network.requestWillBeSent":
                self.requests.append(content["params"]["request"]["url"])
            elif content.get("method") == "Runtime.exceptionThrown":
                self.faults.append(content["params"]["exceptionDetails"]["text"])

    async def call(self, method: str, **parameters: object) -> dict:
        """The result of one call of the protocol."""
        self._number += 1
        future = asyncio.get_running_loop().create_future()
        self._answers[self._number] = future
        await self.socket.send_json({"id": self._number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(future, 30)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def open(self, path: Path, *, width: int = 1280, height: int = 900) -> None:
        """Open a file in a window of that size, and wait until it is there."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 30
        while await self.value("document.readyState + location.href") != f"complete{path.as_uri()}":
            if time.monotonic() > deadline:
                raise RuntimeError(f"{path} was not there in time")
            await asyncio.sleep(0.05)

    async def value(self, expression: str) -> object:
        """What a script expression gives in the page."""
        with contextlib.suppress(KeyError):
            return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"]["value"]

    async def press(self, key: str) -> None:
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    async def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page."""
        picture = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))
