"""What successive halving saves in `fedsim tune`, and what it loses; and how long many trials take beside one run.

Tuning problems are combinations of availability, heterogeneity, number of local steps and strategy, each with 64 trials
(16 local rates × 4 of the server). Both the full grid and halving choose by validation accuracy or loss; the chosen
trials are compared by the test accuracy of the same seeds, which no choice has seen, or by the distance to the optimum;
so are the trials of the best mean, to see what the rule for noise changes.
Client-steps are the training samples that both processed. The time of 64 trials is divided by that of one run with the
same seeds and rounds, both measured in this process, folders and start included.

usage: python scripts/bench_tuning.py [--json FILE] [--problems 20] [--rounds 54] [--seeds 3] [--timed-rounds 600]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_record
import numpy as np
import torch

from fedsim.evaluation.columns import is_higher_better
from fedsim.run.tracking import RunConfig
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.tuning.schedule import SuccessiveHalving
from fedsim.studies.tuning.space import Trial
from fedsim.studies.tuning.tune import TuningOutcome, compose_single_config, tune

COMMON = ["device=cpu", "trainer.trial=false", "tracking.progress=none", "tracking.tensorboard=false"]
LOGISTIC = ["dataset=digits", "model=linear", "clients=10", "batch_size=10"]
MEANS = ["dataset=gaussian_mean", "model=mean", "partition=natural", "clients=10", "batch_size=10"]
AVAILABILITY = ("stationary", "sine", "markov", "cyclic")
SERVER = "strategy.server_lr=0.3,1,1.7,3"
RATES = {"logistic": "lr=log(0.003,3,16)", "means": "lr=log(0.003,0.6,16)"}


def problems() -> list[tuple[str, str, list[str], str | None, str]]:
    """Name, workload, overrides, the metric of the choice (None: validation), and that of the comparison."""
    of_labels = [
        (f"{process}, alpha={alpha}, {strategy}", "logistic",
         [*LOGISTIC, f"availability={process}", f"partition.alpha={alpha}", f"local_steps={steps}",
          f"strategy={strategy}", "partition.validation=0.2"], None, "test_accuracy")
        for process in AVAILABILITY
        for alpha, steps in ((0.1, 3), (1.0, 5))
        for strategy in ("fedavg", "fedavgm")
    ]  # fmt: skip
    of_means = [
        (f"means, {process}, {steps} steps", "means",
         [*MEANS, f"availability={process}", f"local_steps={steps}"], "train_loss", "distance_to_optimum")
        for process in AVAILABILITY
        for steps in (2, 5)
    ]  # fmt: skip
    return [*of_labels, *of_means]


def score(outcome: TuningOutcome, trial: Trial, metric: str) -> float:
    """The comparison's metric of a trial after the last round, mean over seeds."""
    tuning = outcome.tuning
    federation = next(of for of in reversed(tuning.federations) if trial in of.trials)
    return float(federation.values(metric, tuning.rung_rounds[-1])[federation.trials.index(trial)].mean())


def samples(outcome: TuningOutcome) -> float:
    """Training samples that all trials processed."""
    tuning, total = outcome.tuning, 0.0
    for trial in tuning.values_by_trial:
        federation = next(of for of in reversed(tuning.federations) if trial in of.trials)
        numbers = federation.values("samples", tuning.rounds_of(trial))
        total += float(numbers[federation.trials.index(trial)].sum())
    return total


def compare(problem: tuple[str, str, list[str], str | None, str], rounds: int, seeds: int) -> dict[str, Any]:
    """The full grid and halving on one problem."""
    name, workload, overrides, metric, of_comparison = problem
    words = [*COMMON, *overrides, f"rounds={rounds}", RATES[workload], SERVER]
    row: dict[str, Any] = {"problem": name, "metric": of_comparison}
    with tempfile.TemporaryDirectory() as folder:
        for way, halving, more in (
            ("full", SuccessiveHalving(eta=1), [f"eval_every={rounds}"]),
            ("halving", SuccessiveHalving(), []),
        ):
            outcome = tune([*words, *more], seeds, metric, halving, extensions=0, out=Path(folder) / way)
            row[way] = {
                "chosen": dict(outcome.choice.trial),
                "score": score(outcome, outcome.choice.trial, of_comparison),
                "score_of_best": score(outcome, outcome.choice.best_trial, of_comparison),
                "samples": samples(outcome),
            }
    row["times_fewer"] = row["full"]["samples"] / row["halving"]["samples"]
    sign = 1 if is_higher_better(of_comparison) else -1
    for key in ("score", "score_of_best"):
        row[f"gain_in_{key}"] = sign * (row["halving"][key] - row["full"][key])
    return row


def timed(workload: str, rounds: int, seeds: int) -> dict[str, Any]:
    """The time of 64 trials beside that of one run."""
    overrides = [*COMMON, *(LOGISTIC if workload == "logistic" else MEANS), "local_steps=5", f"rounds={rounds}"]
    every = f"eval_every={SuccessiveHalving().first_rung_rounds(rounds, 64)}"
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, knobs in (("one run", None), ("64 trials", [RATES[workload], SERVER])):
            begin = time.monotonic()
            if knobs is None:
                one_run([*overrides, every], seeds, Path(folder) / "one")
            else:
                tune([*overrides, *knobs], seeds, "train_loss", extensions=0, out=Path(folder) / "many")
            seconds[way] = time.monotonic() - begin
    return {"workload": workload, "seconds": seconds, "times_one_run": seconds["64 trials"] / seconds["one run"]}


def one_run(overrides: Sequence[str], seeds: int, folder: Path) -> None:
    """A single run with the same seeds, in a folder."""
    from fedsim.app.build import build

    simulation, tracking, identity = build(
        compose_single_config([*overrides, "lr=0.05", f"seeds={list(range(seeds))}"])
    )
    simulation.run(folder, False, tracking, RunConfig(identity))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=54)
    parser.add_argument("--seeds", type=int, default=3, help="of the tuning problems (%(default)s); timed are 5")
    parser.add_argument("--timed-rounds", type=int, default=600, help="of the timing (%(default)s); 0: no timing")
    parser.add_argument("--repeat", type=int, default=1, help="of the timing (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fedsim").setLevel(logging.ERROR)
    every = problems()
    positions = np.linspace(0, len(every) - 1, min(options.problems, len(every))).round().astype(int)
    rows = []
    for position in positions:
        rows.append(compare(every[position], options.rounds, options.seeds))
        row = rows[-1]
        scores = f"{row['full']['score']:.4g} | {row['halving']['score']:.4g}"
        save(options, rows, [])
        print(f"| {row['problem']} | {row['metric']} | {scores} | {row['times_fewer']:.1f} |", flush=True)
    timings = []
    for workload in RATES if options.timed_rounds else ():
        timed(workload, 2 * SuccessiveHalving().eta, 2)  # what a process imports and compiles once
        repeated = [timed(workload, options.timed_rounds, 5) for _ in range(options.repeat)]
        times = statistics.median(of["times_one_run"] for of in repeated)
        timings.append(
            {"workload": workload, "times_one_run": times, "repetitions": [of["seconds"] for of in repeated]}
        )
        print(f"| {workload} | 64 trials take {times:.1f} times the time of one run |", flush=True)
        save(options, rows, timings)
    summary = save(options, rows, timings)
    for name, of in summary.items():
        print(f"{name}: {of}")


def save(options: argparse.Namespace, rows: list[dict[str, Any]], timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Write what is measured so far, and return its summary: means over problems, with intervals."""
    summary: dict[str, Any] = {"times_fewer": float(np.mean([row["times_fewer"] for row in rows]))}
    for metric in dict.fromkeys(row["metric"] for row in rows):
        for key in ("score", "score_of_best"):
            gains = PairedDifference(np.array([row[f"gain_in_{key}"] for row in rows if row["metric"] == metric]))
            summary[f"{metric}, {key}"] = {
                "problems": gains.num_pairs,
                "gain": gains.mean,
                "interval": list(gains.confidence_interval),
            }
    content = [{"summary": summary, "timings": timings, "problems": rows}]
    bench_record.save(options.json, content, problems=len(rows), rounds=options.rounds, seeds=options.seeds)
    return summary


if __name__ == "__main__":
    main()
