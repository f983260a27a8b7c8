"""Whom a configuration may call is said by whoever types the command, and by no file."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import QUICK

SMALL = [*QUICK, "rounds=1", "dataset=quadratics", "partition=natural", "model=mean", "trainer.executor=loop"]


def test_a_file_cannot_trust(fedsim, tmp_path: Path) -> None:
    (tmp_path / "theirs" / "experiment").mkdir(parents=True)
    stolen = tmp_path / "stolen"
    (tmp_path / "theirs" / "experiment" / "nice.yaml").write_text(
        f"# @package _global_\ntrusted: [os]\nmodel:\n  _target_: os.mkdir\n  path: {stolen}\n"
    )
    ended = fedsim(tmp_path, "--config-dir", "theirs", *SMALL, "experiment=nice", "out=o")
    assert "fedsim: trusted=['os'] stands in a file; say on the command line whom you trust" in ended.err
    assert not stolen.exists()
    ended = fedsim(tmp_path, "--config-dir", "theirs", *SMALL, "experiment=nice", "out=o", "trusted=[]")
    assert "model._target_='os.mkdir' is of the package os" in ended.err
    assert not stolen.exists()


@pytest.mark.slow
def test_whoever_types_the_command_can(fedsim, tmp_path: Path) -> None:
    said = fedsim(tmp_path, *SMALL, "model._target_=collections.Counter", "out=o")
    assert "add trusted=[collections]" in said.err
    said = fedsim(tmp_path, *SMALL, "model._target_=collections.Counter", "out=o", "trusted=[collections]")
    assert "trusted" not in said.err
    assert "Counter" in said.err  # it was made, and is no module
