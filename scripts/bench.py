"""How fast a whole round of fedsim is, beside what users would run instead and beside what the machine allows.

Per workload, interleaved in one process so that ratios hold while the machine's speed drifts:

- fedsim: whole rounds of `Simulation.run` into a run folder: sampling, gathering, local steps, aggregation, tracking,
  checkpoints; evaluation off. Mean over consecutive rounds, the first left out.
- common: the usual simulator loop (`bench_workloads.common_round`): per client a module, a DataLoader, torch.optim.SGD,
  a state_dict copy; then averaging.
- limit: a raw PyTorch loop that trains one model on as many samples at the same batch size, batches ready in memory.

A ratio is the median over the repetitions of other / fedsim. With --set precision=bf16 all of them are in bfloat16, the
others by PyTorch's autocast; `bench_precision.py` compares the two precisions.

usage: python scripts/bench.py [--json FILE] [--only a,c] [--repeat 5] [--device auto] [--set executor=loop …]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import bench_record
import torch
from bench_population import POPULATION, population
from bench_rounds import CLOCKS, Rounds
from bench_workloads import WORKLOADS, Workload, common_round, limit_round

from fedsim.run.wiring import resolve_device


def timed(run: Callable[[], Any], device: torch.device, clock: str = "wall") -> Callable[[], float]:
    """Seconds of one call, the device's work included, by one of `CLOCKS`."""
    now = CLOCKS[clock]

    def seconds() -> float:
        begin = now()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return now() - begin

    return seconds


def interleaved(contenders: dict[str, Callable[[], float]], repeat: int) -> dict[str, list[float]]:
    """Every contender's seconds, all of them in turn in every repetition; a first one warms up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repeat + 1):
        for name, seconds in contenders.items():
            taken = seconds()
            if repetition:
                times[name].append(taken)
    return times


def measure(work: Workload, device: str, repeat: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    rounds = Rounds(work, list(range(work.seeds)), device, settings)
    where = rounds.simulation.device
    contenders: dict[str, Callable[[], float]] = {"fedsim": rounds.seconds}
    precision = settings.get("precision", "full")
    contenders["common"] = timed(common_round(work, where, precision), where)
    if work.has_limit:
        contenders["limit"] = timed(limit_round(work, where, precision), where)
    if work.seeds > 1:
        single = Rounds(work, [0], device, settings)
        contenders["one seed after another"] = lambda: work.seeds * single.seconds()
    times = interleaved(contenders, repeat)

    def ratio(name: str) -> float | None:
        if name not in times:
            return None
        return statistics.median(a / b for a, b in zip(times[name], times["fedsim"], strict=True))

    row: dict[str, Any] = {"workload": work.name, "what": work.what, "vs_common": ratio("common")}
    row |= {"vs_limit": ratio("limit"), "seconds": statistics.median(times["fedsim"])}
    if work.seeds > 1:
        row["vs_seeds_one_after_another"] = ratio("one seed after another")
    row["executor"] = rounds.simulation.trainer.executor_choice.describe()
    row["median_seconds"] = {name: statistics.median(taken) for name, taken in times.items()}
    row["min_seconds"] = {name: min(taken) for name, taken in times.items()}
    return row


def show(row: dict[str, Any]) -> str:
    """One line of the table."""

    def times(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}×"

    line = f"({row['workload']}) {row['what']:58} {row['seconds']:>9.4f} s {times(row.get('vs_common')):>9}"
    line += f" {times(row.get('vs_limit')):>9}"
    if "vs_seeds_one_after_another" in row:
        line += f"   {times(row['vs_seeds_one_after_another'])} seeds one after another"
    if "more_seconds" in row:
        line += f"   {row['more_seconds']:+.3f} s to the 1,000 alone, {row['peak_gib']:.2f} GiB in all"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--only", metavar="LETTERS", help="comma-separated workloads (default: all)")
    parser.add_argument("--repeat", type=int, default=5, help="measured repetitions (default 5)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--population", type=int, default=POPULATION, help="clients of (f) (default %(default)s)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="fedsim's executor, chunk, …")
    options = parser.parse_args()
    works = WORKLOADS
    names = [*works, "f"]
    wanted = options.only.split(",") if options.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; choose from {', '.join(names)}")
    pairs = [pair.partition("=") for pair in options.set]
    settings: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, _, value in pairs}
    device = resolve_device(options.device)
    shown = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"{shown}, {torch.get_num_threads()} threads, torch {torch.__version__}; {options.repeat} repetitions")
    print(f"{'workload':62} {'a round':>11} {'vs common':>9} {'vs limit':>9}")
    rows = []
    for name in wanted:
        if name == "f":
            row = population(options.device, options.repeat, options.population)
        else:
            row = measure(works[name](), options.device, options.repeat, settings)
        print(show(row), flush=True)
        rows.append(row)
    bench_record.save(options.json, rows, device=device, repeat=options.repeat, set=options.set)


if __name__ == "__main__":
    main()
