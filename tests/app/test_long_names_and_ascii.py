"""Folders that no file system takes are refused in one sentence; streams that know ASCII alone are written to."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from fedsim.app.folders import checked_folder_name
from fedsim.core import ConfigError
from fedsim.core.speaking import tolerate_broken_pipes
from fedsim.studies.results.differences import load_runs

LONG = "x" * 256


@pytest.mark.parametrize("text", [LONG, f"a/{LONG}/b", "ä" * 128, "a/" * 2000])
def test_a_folder_with_too_long_a_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^out=.{41} is longer than file systems allow"):
        checked_folder_name("out", text)


def test_a_run_with_too_long_a_name_ends_in_one_sentence(fedsim, tmp_path: Path) -> None:
    ended = fedsim(tmp_path, "rounds=1", "clients=2", f"out={LONG}")
    assert ended.code == 1
    assert ended.err.count("\n") <= 1
    assert "is longer than file systems allow" in ended.err


def test_the_longest_name_is_taken() -> None:
    assert checked_folder_name("out", "x" * 255) == "x" * 255


def test_runs_of_such_a_folder_are_not_found() -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        load_runs([Path(LONG)])


def test_letters_that_a_stream_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="strict"))
    with tolerate_broken_pipes():
        print("0.5 ± 0.1 θ")
    assert written.getvalue() == b"0.5 \\xb1 0.1 \\u03b8\n"
