"""Commands as processes of their own: streams that know ASCII alone, and folders whose names hold terminal escape
sequences or Markdown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import fedsim

ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TINY = ("rounds=2", "clients=3", "tracking.tensorboard=false")
RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # C0, C1 and bidirectional
ESCAPES = "e\x1b[31mvil\x1b]0;title\x07\u202ed"
MARKDOWN = "![x](http:a.b) *b* <i>h\x1b[2J"


def command(
    folder: Path, *words: str, program: str = "fedsim", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    (entry,) = entry_points(group="console_scripts", name=program)
    code = f"import sys; sys.argv[0] = {program!r}; from {entry.module} import {entry.attr} as main; main()"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    variables |= {"PYTHONPATH": str(Path(fedsim.__file__).parents[1]), "OMP_NUM_THREADS": "1"} | environment
    line = [sys.executable, "-c", code, *words]
    return subprocess.run(line, cwd=folder, env=variables, capture_output=True, timeout=300)


SAYS: dict[str, tuple[tuple[str, ...], int, bytes]] = {
    "a run": (("out=run", *TINY), 0, b"round 2/2"),
    "the help": (("--help",), 0, b"strategy"),
    "an error in Greek": (("strategy.\u03b8=1",), 1, rb"strategy.\u"),
    "a formula": (("algorithms", "fedavgm"), 0, rb"\u03b2"),
}
QUICK = ("an error in Greek", "ASCII")  # each starts a process
CASES = [
    pytest.param(name, streams, id=f"{name}, {label}", marks=[] if (name, label) == QUICK else [pytest.mark.slow])
    for name in SAYS
    for label, streams in (("ASCII", ASCII), ("the C locale", C_LOCALE))
]


@pytest.mark.parametrize(("name", "streams"), CASES)
def test_streams_of_ascii_are_written_to(name: str, streams: dict[str, str], tmp_path: Path) -> None:
    words, code, said = SAYS[name]
    ended = command(tmp_path, *words, **streams)
    output = ended.stdout + ended.stderr
    assert ended.returncode == code, output.decode()
    assert output.isascii()
    assert said in output
    assert b"Traceback" not in output


def clean(ended: subprocess.CompletedProcess[bytes]) -> str:
    """What a command printed, which has no control characters."""
    printed = (ended.stdout + ended.stderr).decode()
    assert "Traceback" not in printed
    assert not RAW.search(printed), repr(RAW.search(printed))
    return printed


@pytest.mark.slow
def test_folders_with_escape_sequences_print_none(tmp_path: Path) -> None:
    """A run, its table, its pictures and refusals, in a folder whose name would colour, rename and reorder."""
    folder = tmp_path / ESCAPES
    folder.mkdir()
    assert "round 2/2" in clean(command(folder, "out=run", *TINY))
    strange = folder / MARKDOWN
    (folder / "run").rename(strange)
    shown = str(folder).encode("unicode_escape").decode()
    for words, said in (
        (("out=run", *TINY, "rounds=3"), "round 3/3"),
        (("out=run", *TINY), f"out={shown}/run already holds a run"),
        (("table", str(strange)), r"<i>h\x1b[2J"),
        (("table", "--latex", str(strange)), "x1b"),
        (("table", str(folder / "nothing")), "holds no run"),
        (("--config-dir", str(folder / "nothing"), *TINY), "nothing"),
    ):
        assert said in clean(command(folder, *words)), words
    table = clean(command(folder, "table", "--markdown", str(strange)))
    assert r"!\[x\](http\:a.b) \*b\* &lt;i&gt;h\\x1b\[2J" in table
    clean(command(folder, str(folder), "--out", str(folder), program="fedsim-plot"))
