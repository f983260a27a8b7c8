"""The page of `fedsim watch`: choices, colours, updates, text of strangers; and its server: who may speak to it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watched_runs import finish, write_run

from fedsim.app.cli import main

pytest.importorskip("bokeh")
from bokeh.document import Document
from bokeh.models import CellFormatter, CustomJS, Div, HTMLTemplateFormatter, StringFormatter, TextAnnotation

from fedsim.studies.watch.folder import WatchedFolder
from fedsim.studies.watch.page import WatchPage

HOSTILE = '<img src=x onerror="document.title=`pwned`">'
FORMULA = r"$$\sqrt{2}$$"


def page_of(folder: Path) -> WatchPage:
    return WatchPage(Document(), WatchedFolder(folder, seconds=0))


def drawn(page: WatchPage) -> list[str]:
    return list(page.line_source.data["run"])


def test_the_page_grows_with_the_folder(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert drawn(page) == []
    write_run(tmp_path / "a", {"test_loss": [2, 1], "test_accuracy": [0.1, 0.5]}, {"lr": 0.1})
    page.refresh()
    assert page.metric_select.value == "test_accuracy"
    write_run(tmp_path / "b", {"test_loss": [2, 1.5], "test_accuracy": [0.1, 0.4]}, {"lr": 0.2})
    finish(tmp_path / "b")
    page.refresh()
    assert drawn(page) == ["lr=0.1", "lr=0.2"]
    assert page.table_source.data["state"] == ["stopped", "finished"]
    assert page.table_source.data["round"] == ["10/40", "10/40"]
    assert page.table_source.data["value"] == ["51.0 ± 1.0 %", "41.0 ± 1.0 %"]
    assert "2 runs (1 finished, 1 stopped)" in page.status_text.text
    assert len(page.band_source.data["xs"]) == 2


def test_an_empty_folder_has_no_runs_of_none(tmp_path: Path) -> None:
    assert ": 0 runs (none yet); read at" in page_of(tmp_path).status_text.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [("[6, 0.0]", "1 of 6 runs"), ("[1, 0.0]", "1 runs"), ("", "1 runs"), ("{}", "1 runs"), ('["6"]', "1 runs")],
)
def test_the_page_says_how_many_runs_the_sweep_will_have(tmp_path: Path, content: str, expected: str) -> None:
    write_run(tmp_path / "a", {"test_loss": [2, 1]})
    (tmp_path / ".runs").mkdir()
    (tmp_path / ".runs" / "total").write_text(content)
    assert f": {expected} (1 stopped)" in page_of(tmp_path).status_text.text


def test_metric_band_and_runs_are_chosen_and_a_run_keeps_its_colour(tmp_path: Path) -> None:
    for name, rate in (("b", 0.1), ("c", 0.2)):
        write_run(tmp_path / name, {"test_loss": [2, 1], "distance_to_optimum": [1, rate]}, {"lr": rate})
    page = page_of(tmp_path)
    assert [option[0] for option in page.metric_select.options] == ["test_loss", "distance_to_optimum"]
    page.metric_select.value = "distance_to_optimum"
    assert page.line_source.data["ys"][1] == pytest.approx([1.01, 0.21])
    assert page.logarithmic_checkbox.active
    page.band_select.value = "no band"
    assert page.band_source.data["xs"] == []
    page.table_source.selected.indices = [1]
    assert drawn(page) == ["lr=0.2"]
    colour = page.line_source.data["colour"]
    write_run(tmp_path / "a", {"test_loss": [2, 1], "distance_to_optimum": [1, 0.3]}, {"lr": 0.3})  # now first in order
    page.refresh()
    assert (drawn(page), page.line_source.data["colour"]) == (["lr=0.2"], colour)
    assert page.table_source.selected.indices == [2]
    assert page.metric_select.value == "distance_to_optimum"
    page.table_source.selected.indices = []
    assert len(drawn(page)) == 3


def test_the_page_is_refreshed_as_often_as_asked(tmp_path: Path) -> None:
    document = Document()
    WatchPage(document, WatchedFolder(tmp_path, seconds=1.5))
    (repeated,) = document.session_callbacks
    assert repeated.period == 1500
    assert callable(repeated.callback)


def test_runs_beyond_the_colours_are_dashed(tmp_path: Path) -> None:
    """The first ten curves are solid and differ in colour; the next ten repeat the colours with dashes."""
    for number in range(12):
        write_run(tmp_path / f"{number:02}", {"test_loss": [2, 1]}, {"lr": number}, seeds=(0,))
    looks = page_of(tmp_path).line_source.data
    assert looks["dash"][:10] == [[]] * 10
    assert len(set(looks["colour"][:10])) == 10
    assert looks["colour"][10:] == looks["colour"][:2]
    assert looks["dash"][10:] == [[6], [6]]


def test_what_has_not_changed_is_not_sent_again(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"test_loss": [2, float("nan"), 1]}, seeds=(0,))
    page = page_of(tmp_path)
    sent: list[Any] = []
    for source in (page.table_source, page.line_source, page.band_source):
        source.on_change("data", lambda attr, old, new: sent.append(attr))
    page.refresh()
    assert sent == []
    write_run(tmp_path / "a", {"test_loss": [2, float("nan"), 1, 0.5]}, seeds=(0,))
    page.refresh()
    assert sent == ["data", "data"]  # the table and the line


def test_text_of_strangers_meets_nothing_that_would_run_it(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"test_loss": [2, 1], HOSTILE: [1, 2], FORMULA: [1, 2]}, {"note": HOSTILE})
    write_run(tmp_path / "b", {"test_loss": [2, 1]}, {"note": FORMULA})
    page = page_of(tmp_path)
    document = page.metric_select.document
    assert document is not None
    for name in (HOSTILE, FORMULA):
        page.metric_select.value = name
        for plot in page._plots.values():
            label = plot.yaxis[0].axis_label
            assert (type(label).__name__, label.text) == ("PlainText", name)
    formatters = list(document.select({"type": CellFormatter}))
    assert len(formatters) == len(page.table_source.data) - 2  # all but colour and folder are shown
    assert {type(formatter) for formatter in formatters} == {StringFormatter}
    assert not list(document.select({"type": HTMLTemplateFormatter}))
    assert not any(annotation.text for annotation in document.select({"type": TextAnnotation}))
    assert all(div.render_as_text for div in document.select({"type": Div}))
    assert [script.code for script in document.select({"type": CustomJS})] == ["table.view.change.emit()"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server in a process of its own, and its folder; Ctrl-C ends it."""
    folder = tmp_path_factory.mktemp("watched")
    write_run(folder / "a", {"test_accuracy": [0.1, 0.5]}, {"note": HOSTILE})
    write_run(folder / "b", {"test_accuracy": [0.1, 0.4]}, {"note": FORMULA})
    command = [sys.executable, "-m", "fedsim", "watch", str(folder), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    match = re.search(r"http://127\.0\.0\.1:\d+/", first)
    assert match, first
    yield match[0], folder
    if sys.platform == "win32":  # where Ctrl-C reaches this process too
        process.kill()
        return
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="there a process is ended without being asked")
def test_a_signal_to_terminate_ends_it_as_ctrl_c_does(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"test_accuracy": [0.1, 0.5]}, {"note": "-"})
    command = [sys.executable, "-m", "fedsim", "watch", str(tmp_path), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "http://" in process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 0
        assert process.stdout.read() == "no longer watching\n"


def page_source(address: str) -> str:
    with urllib.request.urlopen(address) as answer:
        return str(answer.read().decode())


def test_the_page_asks_nothing_of_the_network(served: tuple[str, Path]) -> None:
    source = page_source(served[0])
    addresses = re.findall(r"""(?:src|href)=["']([^"']*)""", source)
    assert len(addresses) >= 3
    assert all(address.startswith("/static/") for address in addresses), addresses
    assert "cdn." not in source


def test_a_visitor_is_shown_the_runs_over_the_websocket(served: tuple[str, Path]) -> None:
    from bokeh.client import pull_session

    session = pull_session(url=served[0])
    lines = session.document.get_model_by_name("lines")
    assert sorted(lines.data["run"]) == sorted([f"note={FORMULA}", 'note=<img src=x oner…pwned`">'])
    session.close()


@pytest.mark.parametrize(
    ("origin", "welcome"),
    [("self", True), ("http://evil.example", False), ("http://127.0.0.1:1", False), ("null", False)],
)
def test_pages_of_another_origin_are_refused(served: tuple[str, Path], origin: str, welcome: bool) -> None:
    import asyncio

    from tornado.httpclient import HTTPClientError, HTTPRequest
    from tornado.websocket import websocket_connect

    address = served[0].rstrip("/")
    token = re.search(r'"token":"([^"]+)"', page_source(served[0]))
    assert token
    headers = {"Origin": address if origin == "self" else origin}
    request = HTTPRequest(f"{address.replace('http', 'ws')}/ws", headers=headers)

    async def connect() -> bool:
        try:
            connection = await websocket_connect(request, subprotocols=["bokeh", token[1]])
        except HTTPClientError as error:
            return error.code != 403
        answer = await connection.read_message()
        connection.close()
        return answer is not None

    assert asyncio.run(connect()) is welcome


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux lists open ports there")
def test_only_the_loopback_address_is_bound(served: tuple[str, Path]) -> None:
    port = int(served[0].rstrip("/").rpartition(":")[2])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    bound = {
        local for _, local, _, state, *_ in listening if state == "0A" and int(local.rpartition(":")[2], 16) == port
    }
    assert bound == {f"0100007F:{port:04X}"}


def test_one_sentence_where_bokeh_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fedsim.studies.watch.server", raising=False)
    monkeypatch.setitem(sys.modules, "bokeh.server.server", None)
    assert problem_of(monkeypatch, str(tmp_path)) == (
        "fedsim watch: the page needs Bokeh, an extra; pip install 'fedsim-torch[watch]'"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "70000"], "--port 70000 must lie between 0 and 65535"),
        (["--every", "0"], "--every 0 must be at least 0.1 seconds"),
        (["--every", "nan"], "--every"),
    ],
)
def test_bad_options_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    assert problem in problem_of(monkeypatch, str(tmp_path), *arguments)


def test_a_port_that_is_taken_is_one_sentence(
    served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = served[0].rstrip("/").rpartition(":")[2]
    said = problem_of(monkeypatch, str(tmp_path), "--port", port)
    assert said == f"fedsim watch: --port {port} is taken; choose another, or --port 0 for a free one"


def problem_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["fedsim", "watch", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return str(left.value.code)
