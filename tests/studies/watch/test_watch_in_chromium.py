"""The page of `fedsim watch` in headless Chromium, where one is installed: it is driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from watched_runs import write_run

pytest.importorskip("bokeh")
from tornado.websocket import websocket_connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = '<img src=x onerror="document.title=`pwned`">'
VISIBLE = """(() => {
  const texts = [], images = [];
  const walk = node => { for (const child of node.childNodes) {
    if (child.nodeType === 3) texts.push(child.data);
    if (child.tagName === 'IMG') images.push(child.outerHTML);
    if (child.shadowRoot) walk(child.shadowRoot);
    if (child.tagName !== 'STYLE' && child.tagName !== 'SCRIPT') walk(child);
  } };
  walk(document.body);
  return {title: document.title, text: texts.join('\\n'), images};
})()"""
METRIC = "Bokeh.documents[0].get_model_by_name('metric')"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
Evaluate = Callable[[str], Awaitable[Any]]


@pytest.fixture(name="page")
def page_fixture(tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """The page's address, that of the browser's protocol, and the folder that is watched."""
    assert CHROMIUM is not None
    folder = tmp_path / "watched"
    columns = {"test_accuracy": [0.1, 0.5], HOSTILE: [1, 3]}
    write_run(folder / "a", columns, {"note": HOSTILE})
    write_run(folder / "b", columns, {"note": r"$$\sqrt{2}$$"})
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    served = [sys.executable, "-m", "fedsim", "watch", str(folder), "--port", "0", "--no-browser", "--every", "0.3"]
    with (
        subprocess.Popen(served, stdout=subprocess.PIPE, text=True) as server,
        subprocess.Popen(
            [*browser, "--remote-debugging-port=0", "about:blank"], stderr=subprocess.PIPE, text=True
        ) as chromium,
    ):
        assert server.stdout is not None
        assert chromium.stderr is not None
        try:
            protocol = next(line for line in chromium.stderr if line.startswith("DevTools listening")).split()[-1]
            match = re.search(r"http://\S+", server.stdout.readline())
            assert match
            yield match[0], protocol, folder
        finally:
            server.kill()
            chromium.kill()


async def driven(address: str, protocol: str, use: Callable[[Evaluate], Awaitable[None]]) -> None:
    """Open the page in a tab and do something with it."""
    connection = await websocket_connect(protocol, max_message_size=1 << 26)
    count = 0

    async def call(method: str, session: str | None = None, **parameters: Any) -> Any:
        nonlocal count
        count += 1
        message = {"id": count, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        await connection.write_message(json.dumps(message))
        while True:
            answer = json.loads(await asyncio.wait_for(connection.read_message(), 60))
            if answer.get("id") == count:
                return answer["result"]

    target = (await call("Target.createTarget", url=address))["targetId"]
    session = (await call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]

    async def evaluate(script: str) -> Any:
        answer = await call("Runtime.evaluate", session, expression=script, returnByValue=True)
        return answer["result"].get("value")

    await use(evaluate)
    connection.close()


async def until(evaluate: Evaluate, fact: Callable[[Any], bool]) -> Any:
    """What is visible, once the fact holds of it."""
    for _ in range(100):
        visible = await evaluate(VISIBLE)
        if visible and fact(visible):
            return visible
        await asyncio.sleep(0.2)
    raise AssertionError(visible)


def test_the_page_shows_text_of_strangers_as_text_and_follows_the_folder(page: tuple[str, str, Path]) -> None:
    address, protocol, folder = page

    async def use(evaluate: Evaluate) -> None:
        first = await until(evaluate, lambda visible: "51.0 ± 1.0 %" in visible["text"])
        assert r"note=$$\sqrt{2}$$" in first["text"]
        await evaluate(f"{METRIC}.value = {METRIC}.options[1][0]")
        second = await until(evaluate, lambda visible: "3.01 ± 0.01" in visible["text"])
        assert "51.0 ± 1.0 %" not in second["text"]
        write_run(folder / "c", {HOSTILE: [1, 7]}, {"note": "third"})
        third = await until(evaluate, lambda visible: "7.01 ± 0.01" in visible["text"])
        for visible in (first, second, third):
            assert (visible["title"], visible["images"]) == ("fedsim watch", [])

    asyncio.run(driven(address, protocol, use))
