"""What the command line answers to bad input, and files that are none of what they should be."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from fedsim.app.cli import main
from fedsim.trainer import Trainer

QUIET = ["rounds=2", "clients=12", "tracking.tensorboard=false", "tracking.progress=none", "out=out"]
MEAN = ["dataset=gaussian_mean", "partition=natural", "model=mean"]


class RoundStartedError(AssertionError):
    """Nothing bad may come so far."""


def started(*_, **__) -> NoReturn:
    raise RoundStartedError


def answer(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | None:
    """What the command line says to it; None where it would run."""

    monkeypatch.setattr(Trainer, "generate_round_tasks", started)
    monkeypatch.setattr(sys, "argv", ["fedsim", *QUIET, *arguments])
    try:
        main()
    except RoundStartedError:
        return None
    except SystemExit as left:
        said = str(left.code)
        assert said.startswith("fedsim: "), said
        assert "\n" not in said
        assert "Traceback" not in said
        return said
    raise AssertionError("it ran to its end")


class Trap:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("trapped",)


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    """A file of this content."""

    def write(path: Path) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write
