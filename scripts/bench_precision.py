"""How much faster a round is in bfloat16, and on a GPU in TF32, than in float32: fedsim, the usual simulator and the
raw loop, each in all precisions.

Workloads (c) and (d) of `bench.py`, the CNN of `bench_peers` (p-cnn) and FedAWE's on CIFAR-10 (fedawe). All contenders
of `bench.py`, in all precisions, take turns in one process; the other programs round by PyTorch's own autocast.
Evaluation is off, nothing is written. A gain is the median over the repetitions of float32's seconds / the precision's:
below 1 is slower, which is so wherever the processor has no units for bfloat16 (`fedsim info` says whether it has).

usage: python scripts/bench_precision.py [--json FILE] [--only c,d] [--repeat 5] [--clock cpu] [--active 2] [--steps 3]
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import bench_options
import bench_record
import torch
from bench import interleaved, timed
from bench_rounds import Rounds
from bench_workloads import WORKLOADS, Workload, common_round, fedawe, limit_round, p_cnn

from fedsim.models.precision import bfloat16_units_text
from fedsim.run.wiring import resolve_device

WORKS: dict[str, Callable[[], Workload]] = {
    "c": WORKLOADS["c"], "d": WORKLOADS["d"], "p-cnn": p_cnn, "fedawe": fedawe
}  # fmt: skip


def measure(work: Workload, device: str, repeat: int, clock: str) -> dict[str, Any]:
    """Seconds of a round of everybody in all precisions, and what those below float32 gain."""
    contenders: dict[str, Callable[[], float]] = {}
    precisions = ("full", "tf32", "bf16") if resolve_device(device).type == "cuda" else ("full", "bf16")
    rounds = {p: Rounds(work, [0], device, {"precision": p}, 0.2, False, clock) for p in precisions}
    where = rounds["full"].simulation.device
    for precision in precisions:
        contenders[f"fedsim {precision}"] = rounds[precision].seconds
        for name, others in (("common", common_round), ("limit", limit_round)):
            contenders[f"{name} {precision}"] = timed(others(work, where, precision), where, clock)
    times = interleaved(contenders, repeat)

    def median(other: str, name: str) -> float:
        return statistics.median(a / b for a, b in zip(times[other], times[name], strict=True))

    return {
        "workload": work.name,
        "what": work.what,
        "clients": work.clients if work.active is None else work.active,
        "steps": work.steps,
        "gain": {
            precision: {name: median(f"{name} full", f"{name} {precision}") for name in ("fedsim", "common", "limit")}
            for precision in precisions[1:]
        },
        "times_the_limit": {p: median(f"limit {p}", f"fedsim {p}") for p in precisions},
        "times_common": {p: median(f"common {p}", f"fedsim {p}") for p in precisions},
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
        "executor": {p: rounds[p].simulation.trainer.executor_choice.describe() for p in precisions},
    }


def main() -> None:
    parser = bench_options.parser(__doc__ or "", WORKS, "wall")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--active", type=int, help="clients of a round, in place of the workload's own number")
    parser.add_argument("--steps", type=int, help="of a client, in place of the workload's own number")
    options = parser.parse_args()
    wanted = bench_options.wanted(parser, options.only, WORKS)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; bfloat16 units: {bfloat16_units_text()}")
    rows = []
    for name in wanted:
        work = WORKS[name]()
        shrunk = {key: given for key in ("active", "steps") if (given := getattr(options, key)) is not None}
        row = measure(dataclasses.replace(work, **shrunk), options.device, options.repeat, options.clock)
        print(f"({name}) {row['clients']} clients, {row['steps']} steps, executor {row['executor']['full']}")
        for precision, gain in row["gain"].items():
            print(f"  gain of {precision}: " + ", ".join(f"{who} {times:.2f}×" for who, times in gain.items()))
        for other, ratios in (("limit", row["times_the_limit"]), ("common", row["times_common"])):
            print(f"  fedsim beside {other}: " + ", ".join(f"{p} {r:.2f}×" for p, r in ratios.items()), flush=True)
        rows.append(row)
    settings = {"repeat": options.repeat, "clock": options.clock, "units": bfloat16_units_text()}
    bench_record.save(options.json, rows, device=resolve_device(options.device), **settings)


if __name__ == "__main__":
    main()
