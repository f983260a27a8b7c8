"""A small recipe carried out: tuned, repeated, several runs at once, killed, refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fedsim.app.job_progress import duration_text
from fedsim.core import ConfigError
from fedsim.core.errors import DivergenceError, MissingDataError
from fedsim.run.stopping import Stopped
from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.reproduce import measures, report, runner
from fedsim.studies.reproduce import reproduce_cli as cli
from fedsim.studies.reproduce.recipe import RecipeSetting, list_recipe_names, load_recipe, recorded_run_seconds
from fedsim.studies.reproduce.report import ReportRow
from fedsim.studies.results.runs import load as load_run
from fedsim.trainer import run_to_completion

SMALL = """
source: nowhere Fig. 1
about: a test
base: [dataset=digits, clients=4, rounds=3, eval_every=1, local_steps=1]
axes:
  algorithm: {FedAvg: strategy=fedavg, FedAWE: strategy=fedawe}
  rate: {"0.1": lr=0.1, "1e-6": lr=0.000001}
scales: {smoke: {overrides: [rounds=2]}, cpu: {}, paper: {}}
measures: {loss: {metric: train_loss}}
tune: {axis: rate, measure: loss, best: lowest}
paper: {loss: {FedAvg: 7}}
comparisons: [{we_test: training helps, ours: true, exact: true, of: {}, is: below, than: 100, scales: [smoke]}]
figure: {kind: curves, metric: train_loss, colours: algorithm}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "small.yaml").write_text(SMALL)
    return tmp_path


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ReportRow]]:
    """The small recipe at smoke scale, one run at a time: the folder it wrote, and its rows."""
    root = tmp_path_factory.mktemp("small")
    (root / "mine").mkdir()
    (root / "mine" / "small.yaml").write_text(SMALL)
    return root / "out", cli.reproduce_recipe(load_recipe("mine/small", root), "smoke", "cpu", root / "out", jobs="1")


def job_of(number: int, dataset: str = "digits", local: str = "SGD", lr: float = 0.1) -> runner.RecipeJob:
    same = {name: {} for name in ("model", "shift", "contamination")}
    config = {"dataset": dataset, "local": {"_target_": local, "lr": lr}, "rounds": 3, "deterministic": False, **same}
    return runner.RecipeJob(
        RecipeSetting((("number", str(number)),), ()), (), Path(str(number)), OmegaConf.create(config), {}
    )


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_jobs_of_a_kind_go_together_in_at_least_as_many_batches_as_processes(count: int, processes: int) -> None:
    jobs = [job_of(number, lr=0.1 * (1 + number)) for number in range(count)]
    batches = runner.batch_jobs(jobs, processes)
    assert [job for batch in batches for job in batch] == jobs
    sizes = [len(batch) for batch in batches]
    assert max(sizes) <= runner.RUNS_PER_LOCKSTEP
    # no batch is larger than an equal share of the jobs, so that no process waits for another's second half
    assert max(sizes) == min(runner.RUNS_PER_LOCKSTEP, -(-count // processes))


def test_jobs_that_share_no_local_steps_go_apart() -> None:
    jobs = [job_of(0), job_of(1, dataset="mnist"), job_of(2, lr=0.5), job_of(3, local="Adam")]
    assert runner.batch_jobs(jobs) == [[jobs[0], jobs[2]], [jobs[1]], [jobs[3]]]


@pytest.mark.parametrize(("processes", "expected"), [(1, [30.0] * 4), (2, [60.0] * 4), (4, [120.0] * 4)])
def test_runs_in_lockstep_share_the_seconds_of_their_process(
    processes: int, expected: list[float], tmp_path: Path
) -> None:
    jobs = [dataclasses.replace(job_of(number), folder=tmp_path / str(number)) for number in range(4)]
    for job in jobs:
        job.folder.mkdir()
        (job.folder / runner.FINISHED_RUN_FILE).write_text('{"seconds": 120.0}')
    assert cli.seconds_by_run(jobs, processes) == dict(zip("0123", expected, strict=True))


@pytest.mark.slow
def test_tuning_keeps_the_best_and_says_which(carried_out: tuple[Path, list[ReportRow]]) -> None:
    out, lines = carried_out
    assert [line.name for line in lines] == ["FedAvg", "FedAWE", "training helps"]
    assert (lines[0].paper, lines[2].verdict) == (7.0, "held")
    report = json.loads((out / "mine/results/small-smoke/report.json").read_text())
    assert report["tuned"] == {"FedAvg": "0.1", "FedAWE": "0.1"}


@pytest.mark.slow
def test_finished_runs_are_not_run_again_and_scales_do_not_meet(
    folder: Path,
    carried_out: tuple[Path, list[ReportRow]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, first = carried_out
    shutil.copytree(out, folder / "out")
    recipe = load_recipe("mine/small", folder)
    ran: list[str] = []
    genuine = runner.job_local_tasks
    monkeypatch.setattr(
        runner, "job_local_tasks", lambda job, **how: ran.append(job.setting.name) or genuine(job, **how)
    )
    again = cli.reproduce_recipe(recipe, "smoke", "cpu", folder / "out", jobs="1")
    assert again == first
    assert ran == []
    assert "4 runs, 4 of them finished already" in capsys.readouterr().out
    recipe.scales["smoke"].printed = False  # another problem than the paper's
    assert [line.paper for line in cli.reproduce_recipe(recipe, "smoke", "cpu", folder / "out", jobs="1")] == [None] * 3
    cli.reproduce_recipe(recipe, "cpu", "cpu", folder / "out", jobs="1")
    assert len(ran) == 4


@pytest.mark.slow
def test_several_at_once_give_the_same_numbers(folder: Path, carried_out: tuple[Path, list[ReportRow]]) -> None:
    assert (
        cli.reproduce_recipe(load_recipe("mine/small", folder), "smoke", "cpu", folder / "out", jobs="2")
        == carried_out[1]
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [(MissingDataError("no file"), "skipped"), (DivergenceError("inf"), "diverged"), (Stopped("by Ctrl-C"), "stopped")],
)
def test_a_run_that_does_not_reach_its_end_has_the_outcome_that_its_error_says(
    error: BaseException, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(runner, "run_as_generator", fail)
    job = runner.RecipeJob(RecipeSetting((), ()), (), tmp_path, OmegaConf.create({}), {})
    assert run_to_completion(runner.job_local_tasks(job)) == runner.Outcome(status, str(error))


LONG = """
import sys
from pathlib import Path
from fedsim.studies.reproduce import reproduce_cli as cli
from fedsim.studies.reproduce.recipe import load_recipe

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    cli.reproduce_recipe(load_recipe("mine/small", folder), "cpu", "cpu", folder / "out", jobs="2")
"""


def workers_of(parent: int) -> set[int]:
    """Processes below a process, by the kernel's own lists."""
    children: set[int] = set()
    for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
        children |= {int(child) for child in tasks.read_text().split()}
    return children


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_killed_command_leaves_nothing_running_and_can_go_on(folder: Path) -> None:
    (folder / "mine" / "small.yaml").write_text(SMALL.replace("rounds=3", "rounds=1000000"))
    script = folder / "long.py"
    script.write_text(LONG)
    command = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.DEVNULL)
    wait_until(lambda: len(list((folder / "out").glob("*/runs/*/checkpoint.safetensors"))) >= 2)
    workers = workers_of(command.pid)
    command.kill()
    command.wait()
    assert len(workers) >= 2
    wait_until(lambda: not any(running(worker) for worker in workers))
    assert len(list((folder / "out").glob("*/runs/*/checkpoint.safetensors"))) >= 2


def running(process: int) -> bool:
    """Is it there, and not a zombie that nobody has waited for?"""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Poll; fail after so long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


@pytest.mark.slow
def test_absent_data_and_divergence_are_reported_not_fatal(folder: Path) -> None:
    text = SMALL.replace('"1e-6": lr=0.000001', "absent: [dataset=mnist, dataset.root=nowhere], wild: lr=1e38")
    (folder / "mine" / "small.yaml").write_text(text.replace("tune:", "# "))
    lines = cli.reproduce_recipe(load_recipe("mine/small", folder), "smoke", "cpu", folder / "out", jobs="1")
    report = json.loads((folder / "out/mine/results/small-smoke/report.json").read_text())
    assert [line.name for line in lines] == ["FedAvg / 0.1", "FedAWE / 0.1", "training helps"]
    assert "skipped, dataset=mnist: no usable files" in report["skipped"]["FedAvg / absent"]
    assert report["skipped"]["FedAWE / wild"].startswith("diverged")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: curves", "kind: curve", "did you mean 'curves'"),
        ("cpu: {}", "cpus: {}", "lacks scales: cpu"),
        ("is: below", "is: less", "less"),
        ("measures: {loss", "measures: {lost", "loss"),
        ("comparisons:", "claims:", "claims is now comparisons"),
        ("ours: true", "statement: fig1", "mine has no statements.yaml"),
        ("axes:", "axis:", "not well formed"),
        ("axes:", "axes", "not well formed"),
        ("lr=0.1", "lrr=0.1", "lrr is not a setting"),
        ("figure:", "fitted: {algorythm: FedAWE}\nfigure:", "did you mean 'algorithm'"),
        ("figure:", "fitted: {algorithm: FedAWF}\nfigure:", "did you mean 'FedAWE'"),
        ("figure:", 'fitted: {rate: "0.1"}\nfigure:', "rate is tuned"),
        ("than: 100", "than: 100, reason: why, shown_by: mine/smal", "did you mean 'mine/small'"),
    ],
)
def test_a_bad_recipe_is_one_sentence(folder: Path, old: str, new: str, message: str) -> None:
    (folder / "mine" / "small.yaml").write_text(SMALL.replace(old, new))
    with pytest.raises(ConfigError, match=message) as caught:
        cli.reproduce_recipe(load_recipe("mine/small", folder), "smoke", "cpu", folder / "out", jobs="1")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--list"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in list_recipe_names())
    assert "--scale cpu: as published\n" in shown
    for scales in recorded_run_seconds().values():
        for scale, seconds in scales.items():
            assert any(f"{duration_text(seconds)} (--scale {label})" in shown for label in (scale, "cpu or paper"))
    cli.main(["--list", "fedpbc", "afl/fashion"])
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")}
    assert names == {"afl/fashion", *(name for name in list_recipe_names() if name.startswith("fedpbc/"))}
    for arguments, message in (
        (["fedpbc/fig2"], "did you mean 'fedpbc/fig2"),
        (["--all", "fedpcb"], "did you mean 'fedpbc'"),
        (["--list", "fedpcb"], "did you mean 'fedpbc'"),
        (["fedpbc/fig2a", "--jobs", "0"], "--jobs 0"),
        (["fedpbc/fig2a", "--device", "abacus"], "abacus"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.main([*arguments, "--scale", "smoke", "--out", "unused"] if "--jobs" not in arguments else arguments)
        assert message in str(left.value.code)


def test_the_log_names_settings_without_effect_that_the_user_gave_alone(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("fedsim.run.settings")
    for given, kept in ((["strategy.beta=2"], ["strategy.beta"]), (None, ["dataset.augment.per", "strategy.beta"])):
        caplog.clear()
        with runner.filter_settings_warnings(given):
            log.warning("dataset.augment.per=batch has no effect without dataset.augment")
            log.warning("strategy.beta=2 has no effect without strategy.kind=hinge")
        assert [message.partition("=")[0] for message in caplog.messages] == kept
    log.warning("dataset.augment.per=batch has no effect without dataset.augment")
    assert len(caplog.messages) == 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("measures: {score: {metric: test_acuracy}}", "measures.score needs the column test_acuracy, which its run"),
        (
            "measures: {score: {metric: distance_to_ps or drift_of_clients}}",
            "column distance_to_ps or drift_of_clients",
        ),
        ("measures: {score: {metric: train_loss, x: virtual_seconds}}", "needs the column virtual_seconds"),
        ("measures: {score: {metric: newcomers test_loss}}", "measures.score needs newcomers, but its run .* has none"),
        (
            "measures: {loss: {metric: train_loss}}\nfigure: {kind: curves, metric: [train_loss, fairness]}",
            "figure needs the column fairness",
        ),
    ],
)
def test_a_column_that_no_run_measures_is_refused_before_the_runs(
    changes: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    kept = [line for line in SMALL.splitlines() if not line.startswith(("measures", "tune", "paper", "comp", "figure"))]
    (tmp_path / "mine" / "small.yaml").write_text("\n".join([*kept, *changes.splitlines()]))
    monkeypatch.setattr(cli, "run_jobs", lambda *given: pytest.fail("a run began"))
    with pytest.raises(ConfigError, match=f"^mine/small: .*{says}"):
        cli.reproduce_recipe(load_recipe("mine/small", tmp_path), "smoke", "cpu", tmp_path / "out", jobs="1")


def test_a_column_that_one_run_lacks_is_refused_after_the_runs(carried_out: tuple[Path, list[ReportRow]]) -> None:
    folder = next(path.parent for path in (carried_out[0] / "mine" / "runs").glob("*/summary.json"))
    run = load_run(folder)
    recipe = dataclasses.replace(load_recipe("mine/small", carried_out[0].parent), tune=None)
    recipe.measures["late"] = measures.make_measure(metric="validation_accuracy")
    with pytest.raises(
        ConfigError, match=r"measures.late needs the column validation_accuracy, which the run in .*/runs/"
    ):
        report.compute_cell_measures(recipe, [ResultCell({"algorithm": "FedAvg", "rate": "0.1"}, run)])


def test_a_report_tells_rates_that_were_tuned_from_runs_that_were_skipped(
    carried_out: tuple[Path, list[ReportRow]],
) -> None:
    stored = json.loads((carried_out[0] / "mine/results/small-smoke/report.json").read_text())
    assert stored["tuned"] == {"FedAvg": "0.1", "FedAWE": "0.1"}
    assert stored["skipped"] == {}


def test_of_jobs_in_lockstep_the_log_names_what_the_user_gave_to_any_of_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warning_tasks(job: runner.RecipeJob, **options: Any) -> Any:
        for text in ("strategy.beta=2", "local.mu=1", "dataset.augment.per=batch"):
            logging.getLogger("fedsim.run.settings").warning("%s has no effect without another", text)
        return runner.Outcome("done")
        yield

    monkeypatch.setattr(runner, "job_local_tasks", warning_tasks)
    given, other, unknown = (
        dataclasses.replace(job_of(number), user_overrides=words)
        for number, words in enumerate([("strategy.beta=2",), ("local.mu=1", "lr=0.1"), None])
    )
    for company, kept in (
        ([given], ["strategy.beta"]),
        ([given, other], ["strategy.beta", "local.mu"]),
        ([given, unknown], ["strategy.beta", "local.mu", "dataset.augment.per"]),
    ):
        caplog.clear()
        assert [job for job, outcome in runner.run_in_lockstep(company) if outcome.status == "done"] == company
        told = [
            record.getMessage().partition("=")[0] for record in caplog.records if record.name == "fedsim.run.settings"
        ]
        assert told == kept * len(company)


@pytest.mark.usefixtures("composed_once")
def test_a_recipe_without_training_has_a_cell_for_every_simulation_that_can_be_built(tmp_path: Path) -> None:
    """The other one is skipped, with the reason."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "drawn.yaml").write_text(
        "source: nowhere Fig. 2\nabout: a test\ntrain: false\nbase: [dataset=digits, availability=stationary]\n"
        "axes: {clients: {two: clients=2, none: clients=0}}\n"
        "scales: {smoke: {}, cpu: {}, paper: {}}\nfigure: {kind: bubbles, clients: 2}\n"
    )
    recipe = load_recipe("mine/drawn", tmp_path)
    runs = cli._carry_out_runs(recipe, "smoke", "cpu", tmp_path / "out", "1", ())
    (cell,), ((skipped, reason),) = runs.cells, runs.skip_reasons.items()
    assert cell.axis_labels == {"clients": "two"}
    assert cell.availability is not None
    assert cell.availability.population.clients == 2
    assert skipped == "none"
    assert "clients=0" in reason
