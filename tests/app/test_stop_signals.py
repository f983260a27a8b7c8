"""A stop signal is acted on whenever it arrives: a sweep starts no further run, keeps what is done, exits with 1."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_runs import QUICK

from fedsim.app import sweep
from fedsim.core import DivergenceError
from fedsim.run import tracker as tracking
from fedsim.run.checkpoint import Checkpointer
from fedsim.run.divergence import DivergenceGuard
from fedsim.run.folder import RunFolder
from fedsim.run.tracker import Tracker
from fedsim.run.tracking.observer import Observers
from fedsim.trainer import Trainer

SMALL = [*QUICK, "dataset=quadratics", "partition=natural", "model=mean", "trainer.trial=false", "rounds=3"]
LOCKSTEP = ["-m", "hydra/launcher=lockstep", *SMALL, "eval_every=2", "tracking.checkpoint_every=1000"]


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """A shell that starts the tests in the background has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """What each run of a sweep has recorded, by its number."""
    return {int(path.stem): json.loads(path.read_text()) for path in (folder / sweep.RECORDS_FOLDER).glob("*.json")}


def send(owner: Any, name: str, when: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Send this process a signal at the first call of `owner.name` with arguments for which `when` is true."""
    genuine, sent = getattr(owner, name), []

    def called(*args: Any, **kwargs: Any) -> Any:
        if not sent and when(*args, **kwargs):
            sent.append(name)
            signal.raise_signal(number)
        return genuine(*args, **kwargs)

    monkeypatch.setattr(owner, name, called)


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "local steps of the last round": (Trainer, "run_local_steps", lambda _, work: work.batch_plan.t == 2),
    "end of the last round": (Tracker, "record_round", lambda _, t, *__: t == 2),
    "last evaluation": (Tracker, "evaluate", lambda _, state, completed, *__: completed == 3),
    "last checkpoint": (Checkpointer, "write", lambda _, state, progress: progress.rounds == 3),
    "what is known of clients": (RunFolder, "write_clients_npz", lambda *_: True),
    "summary": (tracking, "summarise_run", lambda *_: True),
    "pictures": (Observers, "finish", lambda *_: True),
    "summary.json": (RunFolder, "finish", lambda *_: True),
    "files are closed": (RunFolder, "close", lambda *_, **__: True),
    "result is printed": (sweep, "_objective_value", lambda *_: True),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_late_in_a_run_keeps_that_run_and_stops_its_sweep(
    fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: int
) -> None:
    sweep_of_two = ["-m", *SMALL, "lr=0.1,0.2", "out=o"]
    with monkeypatch.context() as patched:
        send(*MOMENTS[moment], patched, number)
        stopped = fedsim(tmp_path, *sweep_of_two)
    assert stopped.code == 1
    assert "sweep of 2 runs in o: 1 done, 1 not started" in stopped.err
    assert "the same command with out=o runs the missing ones" in stopped.err
    assert len(list((tmp_path / "o").glob("*/summary.json"))) == len(list((tmp_path / "o").glob("*/config.yaml"))) == 1
    again = fedsim(tmp_path, *sweep_of_two)
    assert again.code == 0
    assert "1 done, 1 finished before" in again.err


@pytest.mark.slow
def test_a_signal_between_two_runs_of_a_sweep_stops_it(fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    send(sweep.SweepRunRecord, "write", lambda record, _: record.number == 1, monkeypatch, signal.SIGTERM)
    stopped = fedsim(tmp_path, "-m", *SMALL, "lr=0.1,0.2,0.3", "out=o")
    assert stopped.code == 1
    assert "sweep of 3 runs in o: 1 done, 1 stopped, 1 not started" in stopped.err
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_run_that_diverges_after_the_signal_has_failed_and_its_sweep_stops(
    fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise DivergenceError("non-finite values in round 2")

    monkeypatch.setattr(DivergenceGuard, "handle_nonfinite", diverge)
    stopped = fedsim(tmp_path, "-m", *SMALL, "lr=0.1,0.2", "out=o")
    assert stopped.code == 1
    assert "sweep of 2 runs in o: 1 failed, 1 not started" in stopped.err
    assert "non-finite values in round 2" in stopped.err


def test_a_single_run_says_that_it_is_complete(fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(*MOMENTS["last evaluation"], monkeypatch, signal.SIGTERM)
    stopped = fedsim(tmp_path, *SMALL, "out=o")
    assert stopped.code == 1
    assert stopped.err.endswith(
        f"fedsim: stopped by SIGTERM after the run ended in round 3 of 3; all of it is in {tmp_path}/o"
    )
    assert "after 3 rounds" in stopped.out
    assert (tmp_path / "o" / "summary.json").exists()


AT_WORK = (Trainer, "run_local_steps", lambda _, work: work.batch_plan.t == 1)
BETWEEN = (Tracker, "record_round", lambda self, t, *_: t == 1 and len(self.seeds) == 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("moment", "after", "setting"),
    [
        pytest.param(AT_WORK, 2, "on_nonfinite=stop", id="local steps, one federation"),
        pytest.param(AT_WORK, 2, "on_nonfinite=drop_client", id="local steps"),
        pytest.param(BETWEEN, 3, "on_nonfinite=drop_client", id="between two jobs"),
    ],
)
def test_jobs_in_lockstep_stop_after_the_same_round_and_go_on_bit_for_bit(
    fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Any, after: int, setting: str
) -> None:
    command = [*LOCKSTEP, "rounds=5", "seeds=[0],[0,1],[2]", setting]
    with monkeypatch.context() as patched:
        send(*moment, patched, signal.SIGINT)
        stopped = fedsim(tmp_path, *command, "out=o")
    assert stopped.code == 1
    assert "sweep of 3 runs in o: 3 stopped" in stopped.err
    assert stopped.err.count(f"stopped by SIGINT after round {after} of 5") == 3
    assert len(list((tmp_path / "o").glob("*/checkpoint.safetensors"))) == 3
    again, whole = fedsim(tmp_path, *command, "out=o"), fedsim(tmp_path, *command, "out=p")
    assert again.log.count(f"after round {after}") == 3
    assert (again.code, whole.code) == (0, 0)
    for path in sorted((tmp_path / "p").glob("*/checkpoint.safetensors")):
        one, other = load_file(path), load_file(tmp_path / "o" / path.relative_to(tmp_path / "p"))
        assert {name: value.tolist() for name, value in one.items()} == {n: v.tolist() for n, v in other.items()}


@pytest.mark.slow
def test_jobs_in_lockstep_that_have_not_begun_do_not_begin(
    fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the second is being made the first waits for its first round."""
    send(sweep, "finished_result", lambda cfg, _: cfg.local_steps == 2, monkeypatch, signal.SIGTERM)
    stopped = fedsim(tmp_path, *LOCKSTEP, "local_steps=1,2,3", "out=o")
    assert stopped.code == 1
    assert "sweep of 3 runs in o: 2 stopped, 1 not started" in stopped.err
    assert stopped.err.count("stopped by SIGTERM after round 1 of 3") == 2


@pytest.mark.slow
def test_a_signal_before_the_first_round_of_one_federation_stops_its_jobs_at_once(
    fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(sweep, "finished_result", lambda cfg, _: cfg.lr == 0.2, monkeypatch, signal.SIGTERM)
    stopped = fedsim(tmp_path, *LOCKSTEP, "lr=0.1,0.2,0.3", "out=o")
    assert stopped.code == 1
    assert "sweep of 3 runs in o: 2 stopped, 1 not started" in stopped.err
    assert {record["message"] for record in records(tmp_path / "o").values()} == {"stopped at once, not after a round"}


@pytest.mark.slow
def test_a_batch_of_jobs_in_lockstep_that_is_done_is_kept_and_the_next_does_not_begin(
    fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(*MOMENTS["pictures"], monkeypatch, signal.SIGTERM)
    stopped = fedsim(tmp_path, *LOCKSTEP, "lr=0.1,0.2,0.3,0.4", "hydra.launcher.at_once=2", "out=o")
    assert stopped.code == 1
    assert "sweep of 4 runs in o: 2 done, 2 not started" in stopped.err


@pytest.mark.slow
def test_a_second_signal_stops_all_jobs_at_once_and_each_says_so(
    fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "run_local_steps", twice)
    stopped = fedsim(tmp_path, *LOCKSTEP, "lr=0.1,0.2", "out=o")
    assert stopped.code == 1
    assert {record["message"] for record in records(tmp_path / "o").values()} == {"stopped at once, not after a round"}
