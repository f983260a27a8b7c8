"""The numbers that tutorials tell are those of their commands, at full size."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

import fedsim
from fedsim.app import cli

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "tutorial_shift.md").read_text(encoding="utf-8")


def run(folder: str) -> None:
    """The command of the page whose run folder this is."""
    commands = [one.replace("\\\n", " ") for one in re.findall(r"^fedsim (?:[^\n]*\\\n)*[^\n]*", PAGE, re.M)]
    (command,) = (one for one in commands if one.endswith(f" out={folder}"))
    sys.argv[:] = [*shlex.split(command), "tracking.progress=none", "tracking.tensorboard=false"]
    cli.main()


@pytest.mark.slow
@pytest.mark.usefixtures("composed_once")
def test_retrained_prices_sell_nothing_and_learned_ones_are_near_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shift,) = re.findall(r"<!-- file: markets.py -->\n```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "markets.py").write_text(shift)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedsim"])
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = {}
    for folder in ("retrained", "learned"):
        run(folder)
        summary = fedsim.load(folder).summary
        assert "under shift=Leaving diverges" in summary["references"]["stable"]["verdict"][0]
        best = summary["references"]["optimal"]
        ended[folder] = summary["final"]["performative_risk"]["mean"], best["distance"][0]["last"]
    assert ended["retrained"] == pytest.approx((0.0, 3.4), abs=0.1)
    assert ended["learned"][0] == pytest.approx(-45.9, abs=0.1)
    assert ended["learned"][1] < 0.1
    for told in ("within 0.1 of it", "revenue of 45.9", "3.4 away", "under shift=Leaving diverges"):
        assert told in " ".join(PAGE.split())
    monkeypatch.delitem(sys.modules, "markets", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize("strategy", ["fedavg", "fedau", "mifa"])
def test_the_table_on_dropout_is_that_of_its_experiment(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "tutorial_dropout.md").read_text(encoding="utf-8")
    (file, text) = re.search(r"<!-- file: (\S+) -->\n```yaml\n(.*?)```", page, re.S).groups()  # type: ignore[union-attr]
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    (row,) = re.findall(rf"^{strategy} +([\d.]+) +([\d.]+) ± [\d.]+ % +([\d.]+) ±", page, re.M)
    lr, accuracy, worst = row
    settings = ["experiment=dropout", f"strategy={strategy}", f"lr={lr}", "out=run"]
    quiet = ["tracking.progress=none", "tracking.tensorboard=false"]
    monkeypatch.setattr(sys, "argv", ["fedsim", "--config-dir", "study", *settings, *quiet])
    cli.main()
    final = fedsim.load("run").summary["final"]
    assert 100 * final["test_accuracy"]["mean"] == pytest.approx(float(accuracy), abs=0.5)
    assert 100 * final["client_accuracy_worst10"]["mean"] == pytest.approx(float(worst), abs=2)
