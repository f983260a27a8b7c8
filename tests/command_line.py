"""The command line in this process: each start of a new one takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsim.app import sweep
from fedsim.app.cli import main


@dataclass
class Ended:
    """How a command ended, and what it said: on stdout, on stderr, and in its log."""

    code: int
    out: str
    err: str
    log: str


@pytest.fixture(autouse=True)
def quickly(composed_once: None) -> None:
    """All of these tests compose, most of them little else."""


@pytest.fixture
def fedsim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Callable[..., Ended]:
    """`fedsim(folder, *arguments)`: the command in a folder."""

    def call(folder: Path, *arguments: str) -> Ended:
        capsys.readouterr()
        caplog.clear()
        problem = ""
        with monkeypatch.context() as patched:
            patched.chdir(folder)
            patched.setattr(sys, "argv", ["fedsim", *arguments])
            patched.setattr(sys, "path", list(sys.path))
            patched.setattr(sweep.SweepCallback, "records", None)  # a sweep's, which a process has one of
            try:
                main()
                code = 0
            except SystemExit as left:  # as Python does at its end
                code = left.code if isinstance(left.code, int) else int(left.code is not None)
                problem = left.code if isinstance(left.code, str) else ""
        said = capsys.readouterr()
        return Ended(code, said.out, said.err + problem, caplog.text)

    return call
