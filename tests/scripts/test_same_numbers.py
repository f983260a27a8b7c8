"""scripts/same_numbers.py: runs that are repeated agree, and another number is found."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "same_numbers.py"
SMALL = ["rounds=2", "clients=3", "dataset=quadratics", "partition=natural", "model=mean"]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("same_numbers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def same_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = loaded()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(
        module, "compositions", lambda count: {"runs": SMALL, "is refused": [*SMALL, "strategy=p_fedavg"]}
    )
    yield module
    logging.disable(logging.NOTSET)


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["same_numbers.py", *arguments])
    code: int = module.main()
    return code


@pytest.mark.slow
def test_what_was_recorded_is_found_again(
    same_numbers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "before.json"
    assert call(same_numbers, monkeypatch, "record", str(file)) == 0
    assert call(same_numbers, monkeypatch, "compare", str(file)) == 0
    assert "2 compositions, 1 refused, 0 different" in capsys.readouterr().out
    recorded = json.loads(file.read_text())
    recorded["runs"]["columns"]["train_loss"][-1] += "1"
    file.write_text(json.dumps(recorded))
    assert call(same_numbers, monkeypatch, "compare", str(file)) == 1
    assert "runs: other numbers: ['train_loss']" in capsys.readouterr().out
    recorded["is refused"] = recorded["runs"]
    file.write_text(json.dumps(recorded))
    assert call(same_numbers, monkeypatch, "compare", str(file)) == 1
    assert "is refused: " in capsys.readouterr().out


def test_more_compositions_than_sixty_are_compared() -> None:
    module = loaded()
    sys.path.insert(0, str(SCRIPT.parents[1] / "tests" / "app"))
    try:
        found = module.compositions(120)
    finally:
        sys.path.pop(0)
    assert len(found) > 240
    assert sum(name.startswith("random ") for name in found) == 120
