"""`fedsim plan`: what it extrapolates, from a run of which nothing is left, and what it refuses."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsim.app.cli import main
from fedsim.app.commands.plan import bytes_text, report
from fedsim.run import plan as planning
from fedsim.run.plan import TimingObserver, extrapolate_plan
from fedsim.run.tracking import EvaluationEvent, Observer, RunStarted

RUN = [
    "dataset=quadratics", "model=mean", "partition=natural", "clients=6", "availability=full", "seeds=[0,1]",
    "tracking.tensorboard=false", "tracking.progress=none",
]  # fmt: skip


def fedsim(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["fedsim", *words])
    main()


def event(completed_rounds: int, sent: float) -> EvaluationEvent:
    rows: list[Any] = [
        {"total_bytes_up": sent, "total_bytes_down": 3 * sent},
        {"total_bytes_up": 0, "total_bytes_down": 0},
    ]
    return EvaluationEvent(completed_rounds, rows, {}, lambda r: {})


def test_the_extrapolation_is_that_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 5, 1, 1 and 1 s and evaluations of 0.5 s, 20 of 100 rounds apart: with 4 s of one-time work."""
    now = [0.0]
    monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    stopwatch = TimingObserver(seconds=8)
    now[0] = 10.0
    assert stopwatch.evaluated(event(0, 0)) is None
    for completed_rounds, duration in enumerate([5.0, 1.0, 1.0, 1.0], start=1):
        now[0] += duration
        stopwatch.round_completed(completed_rounds)
        if completed_rounds % 2 == 0:
            now[0] += 0.5
            ends = stopwatch.evaluated(event(completed_rounds, 40.0 * completed_rounds))
            assert (ends is not None) == (completed_rounds == 4)
    run: Any = SimpleNamespace(rounds=100, device=SimpleNamespace(type="cpu"), stop=SimpleNamespace(active=False))
    plan = extrapolate_plan(run, stopwatch, eval_every=30, start=2.0, end=now[0] + 0.25)
    assert (plan.measured_rounds, plan.seconds_per_round, plan.seconds_per_evaluation) == (4, 1.0, 0.5)
    assert (plan.seconds_before, plan.evaluations, plan.seconds_after) == (8 + 4, 4, 0.25)
    assert plan.seconds == 12 + 100 + 4 * 0.5 + 0.25
    assert (plan.total_bytes_up, plan.total_bytes_down) == (100 * 20, 100 * 60)


@pytest.mark.usefixtures("composed_once")
def test_a_plan_of_some_rounds_and_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Bytes are those of the run, since all take part; nothing is written but the plan; own observers are left out."""
    monkeypatch.chdir(tmp_path)
    observers = "tracking.observers=[{_target_: test_plan.Reporter}]"
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    fedsim(monkeypatch, "plan", *RUN, "rounds=5000", observers, "--seconds", "0.05", "--json", "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    printed = capsys.readouterr().out
    plan = json.loads(Path("plan.json").read_text())
    assert 2 <= plan["measured_rounds"] < 5000
    assert f"measured  the first {plan['measured_rounds']} of 5000 rounds" in printed
    assert (plan["rounds"], plan["evaluations"]) == (5000, 500)
    fedsim(monkeypatch, *RUN, "rounds=20", "out=run", observers)
    assert Path("reported").exists()
    lines = Path("run/metrics.csv").read_text().splitlines()
    last_row = list(csv.DictReader(line for line in lines if not line.startswith("#")))[-1]
    for name in ("total_bytes_up", "total_bytes_down"):
        assert plan[name] == pytest.approx(float(last_row[name]) * 5000 / 20)


class Reporter(Observer):
    """Leaves a file, by which one sees that it was called."""

    def begin(self, run: RunStarted) -> None:
        Path("reported").touch()


@pytest.mark.usefixtures("composed_once")
def test_a_short_run_is_measured_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.perf_counter()
    fedsim(monkeypatch, "plan", *RUN, "rounds=3", "stop.seconds=100")
    assert "measured  all rounds; stop may end the run earlier\n" in capsys.readouterr().out
    assert time.perf_counter() - start < 10  # and not the default of ten seconds of rounds


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=0.1,0.2"], "fedsim plan: lr=0.1,0.2 are several runs; plan one of them"),
        (["--seconds", "0"], "fedsim plan: --seconds 0 must be above 0"),
        (["rounds=0"], "fedsim plan: rounds=0 must be"),
        (["eval_every=often"], "fedsim plan: eval_every="),
        (["nothing=1"], "fedsim plan: nothing is not a setting"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as left:
        fedsim(monkeypatch, "plan", *RUN, *words)
    assert str(left.value).startswith(message)
    assert "\n" not in str(left.value)


def test_units() -> None:
    assert [bytes_text(n) for n in (12, 1234, 5e6, 7.25e9, 2e12)] == ["12 bytes", "1.23 kB", "5 MB", "7.25 GB", "2 TB"]
    plan = planning.RunCostEstimate(10, 2, 4, False, 200.0, 1.0, 2.0, 0.004, 0.5, None, 1.5, 1.0, 2.0)
    lines = report(plan)
    assert lines[1].startswith(
        "time      3.3 min: 1.0 s before the first round, rounds 10 × 2 s, evaluations 2 × 4 ms, "
    )
    assert lines[2] == "memory    unknown, 1.50 GiB of tensors on the GPU"
