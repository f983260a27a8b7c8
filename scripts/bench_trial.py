"""What the trial of executors gains over the stated rule: over 30 models, what each chooses and what that costs.

Per model: the choice of the rule alone (`trainer.trial=false`), the choices of several trials, and the local steps of
rounds under every executor that can run the model, interleaved in one process. A choice's loss is its time divided by
that of the fastest executor, minus one.

usage: OMP_NUM_THREADS=1 python scripts/bench_trial.py --clock cpu [--json FILE] [--only vit,gru] [--repeat 5]
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any
from unittest.mock import patch

import bench_options
import bench_record
import torch
from bench import interleaved
from bench_models import MODELS, Case
from bench_rounds import CLOCKS

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import UniformK
from fedsim.core.errors import ConfigError
from fedsim.trainer import trial

EXECUTORS = ("fused", "grouped", "vmap", "loop")
RECORDED_AFTER = 40  # steps after which a vmapped step is replayed (`fedsim.trainer.replay`)
WARM_UP = 1.0  # seconds, at most
CLOSE = 0.05  # loss below which two executors count as equally fast


class LocalRounds:
    """The local steps of a round's clients, timed: all that an executor does.

    Args:
        work: what runs.
        options: device, clock, and the least seconds that are timed together.
        settings: of `Execution`.
    """

    def __init__(self, work: Case, options: Any, **settings: Any) -> None:
        self.simulation = Simulation(
            work.data,
            work.model,
            clients=work.clients,
            availability=UniformK(work.active or work.clients),
            local=work.local(),
            evaluation=EvaluationOptions(every=10**9, client_samples=1),
            execution=Execution(device=options.device, **settings),
        )
        self.clock, self.t = CLOCKS[options.clock], 0
        self.state = self.simulation.initial_state()
        self.cohort = self.simulation.availability.sample(0)
        self.start = self.simulation.strategy.start(self.state, self.cohort)

    def warm_up(self, steps: int, least: float) -> None:
        """Run until executors have recorded what they replay, and set how many rounds are timed together."""
        taken, begin = self.run(1), self.clock()
        for _ in range(1 + RECORDED_AFTER // steps):
            taken = self.run(1)
            if self.clock() - begin > WARM_UP:
                break
        self.count = 1 + int(least / taken)

    def run(self, count: int) -> float:
        """Mean seconds of so many rounds."""
        begin = self.clock()
        for _ in range(count):
            self.simulation.trainer.run(self.start, self.cohort, self.t, self.state.model)
            self.t += 1
        if self.simulation.device.type == "cuda":
            torch.cuda.synchronize(self.simulation.device)
        return (self.clock() - begin) / count

    def seconds(self) -> float:
        return self.run(self.count)


def trials(work: Case, options: Any) -> tuple[str, list[str], float]:
    """The rule's choice, those of several trials, and the median seconds that a trial takes."""
    timed_benchmark, chosen, seconds = trial.fastest_of_contenders, list[str](), list[float]()

    def clocked(*arguments: Any) -> str:
        begin = CLOCKS[options.clock]()
        name = timed_benchmark(*arguments)
        seconds.append(CLOCKS[options.clock]() - begin)
        return name

    with patch.object(trial, "fastest_of_contenders", clocked):
        for _ in range(options.trials):
            trial.FASTEST_EXECUTOR_NAMES.clear()
            rounds = LocalRounds(work, options)
            rounds.run(1)
            chosen.append(rounds.simulation.trainer.executor_choice.executor)
    return rounds.simulation.trainer.candidate_choices[0].executor, chosen, statistics.median(seconds or [0.0])


def measure(name: str, work: Case, options: Any) -> dict[str, Any]:
    """One row: choices, and the loss of each executor against the fastest one."""
    rule, chosen, seconds = trials(work, options)
    rounds: dict[str, LocalRounds] = {}
    for executor in EXECUTORS:
        try:
            rounds[executor] = LocalRounds(work, options, executor=executor)
        except ConfigError:
            continue
        rounds[executor].warm_up(work.steps, options.seconds)
    times = interleaved({executor: r.seconds for executor, r in rounds.items()}, options.repeat)
    medians = {executor: statistics.median(taken) for executor, taken in times.items()}
    best = min(medians, key=lambda executor: medians[executor])
    losses = {
        executor: statistics.median(a / b for a, b in zip(taken, times[best], strict=True)) - 1
        for executor, taken in times.items()
    }
    return {
        "model": name,
        "what": work.what,
        "rule": rule,
        "trials": chosen,
        "best": best,
        "loss": losses,
        "rule_loss": losses[rule],
        "trial_loss": statistics.median(losses[executor] for executor in chosen),
        "trial_rounds": seconds / medians[best],
        "seconds": medians,
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the rows say together."""
    usual = [Counter(row["trials"]).most_common(1)[0][0] for row in rows]
    differ = [row for row, name in zip(rows, usual, strict=True) if name != row["rule"]]
    unsteady = [row for row in rows if len(set(row["trials"])) > 1]

    def losses(key: str) -> str:
        values = [row[key] for row in rows]
        above = sum(value > CLOSE for value in values)
        return f"mean {statistics.mean(values):.1%}, largest {max(values):.1%}, above {CLOSE:.0%} for {above}"

    return [
        f"{len(rows)} models; the trial differs from the rule for {len(differ)}, and from itself for {len(unsteady)}",
        f"loss of the rule's choice:  {losses('rule_loss')}",
        f"loss of the trial's choice: {losses('trial_loss')}",
        f"a trial takes as long as {statistics.median(row['trial_rounds'] for row in rows):.1f} rounds (median)",
    ]


def main() -> None:
    parser = bench_options.parser(__doc__ or "", MODELS, "wall")
    parser.add_argument("--seconds", type=float, default=0.1, help="of rounds in one repetition (default 0.2)")
    parser.add_argument("--trials", type=int, default=3, help="of each model (default 3)")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    wanted = bench_options.wanted(parser, options.only, MODELS)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; loss against the fastest executor")
    print(f"{'model':17} {'rule':>6} {'loss':>7}   {'trials':18} {'loss':>7}   best   seconds", flush=True)
    rows = []
    for name in wanted:
        row = measure(name, MODELS[name](), options)
        rows.append(row)
        seconds = " ".join(f"{executor} {taken:.4f}" for executor, taken in row["seconds"].items())
        print(
            f"{name:17} {row['rule']:>6} {row['rule_loss']:7.1%}   {' '.join(row['trials']):18} "
            f"{row['trial_loss']:7.1%}   {row['best']:6} {seconds}",
            flush=True,
        )
        settings = {name: getattr(options, name) for name in ("repeat", "clock", "trials", "seconds")}
        bench_record.save(options.json, rows, **settings)  # a long run may be cut
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
