"""Measure all figures of docs/performance.md and README.md again, for a quiet machine; started again it goes on.

Each benchmark is a process of its own and writes docs/figures/NAME.json. A file is left alone if the same code on the
same machine wrote it, so that a second call measures what is missing. Commit the files, then run
`python scripts/performance_page.py`, which writes the figures into the pages.

python scripts/benches.py                      # all of them; hours, since the peers are installed and measured too
python scripts/benches.py --only rounds,peers  # some
python scripts/benches.py --gpu                # those of docs/gpu_and_clusters.md, in about six minutes on an H100
python scripts/benches.py --tiny --out FOLDER  # all, at sizes whose figures mean nothing: do the scripts run?
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import bench_record

FIGURES = bench_record.ROOT / "docs" / "figures"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
QUIET = 0.3  # load average above which a machine is not quiet


@dataclass(frozen=True)
class Benchmark:
    """One script and its sizes.

    Attributes:
        script: in the folder scripts.
        arguments: of the measurement for the pages.
        tiny: of a run that takes seconds.
        variables: environment variables of the measurement.
    """

    script: str
    arguments: list[str] = field(default_factory=list)
    tiny: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


BENCHMARKS = {
    "rounds": Benchmark("bench.py", [], ["--only", "a,f", "--repeat", "1", "--population", "2000"]),
    "grouped": Benchmark(
        "bench_executors.py",
        ["--clock", "cpu", "--only", "cnn_8,cnn_16,cnn_16_gn,leaf_cnn,cifar10_cnn"],
        ["--only", "cnn_8", "--repeat", "1", "--seconds", "0.01"],
        ONE_THREAD,
    ),
    "executors": Benchmark(
        "bench_executors.py", ["--clock", "cpu"], ["--only", "linear", "--repeat", "1", "--seconds", "0.01"], ONE_THREAD
    ),
    "peak": Benchmark(
        "bench_peak.py", ["--repeat", "3"], ["--only", "c", "--active", "1", "--repeat", "1"], ONE_THREAD
    ),
    "precision": Benchmark(
        "bench_precision.py",
        ["--clock", "cpu", "--active", "2", "--steps", "2", "--repeat", "3"],
        ["--only", "c", "--active", "1", "--steps", "1", "--repeat", "1"],
        ONE_THREAD,
    ),
    "sweeps": Benchmark(
        "bench_sweeps.py", ["--rounds", "600", "--repeat", "2"], ["--only", "means", "--repeat", "1", "--rounds", "2"]
    ),
    "trial": Benchmark(
        "bench_trial.py",
        ["--clock", "cpu", "--trials", "2", "--repeat", "5", "--seconds", "0.03"],
        ["--only", "digits_cnn", "--repeat", "1", "--trials", "1", "--seconds", "0.01"],
        ONE_THREAD,
    ),
    "tuning": Benchmark(
        "bench_tuning.py",
        [],
        ["--problems", "2", "--rounds", "6", "--timed-rounds", "6", "--repeat", "1"],
        ONE_THREAD,
    ),
    "events": Benchmark(
        "bench_events.py",
        ["--clock", "cpu"],
        ["--only=logistic-fedbuff,population", "--repeat=1", "--updates=60", "--skipped=20", "--small-populations"],
        ONE_THREAD,
    ),
    "plan": Benchmark("bench_plan.py", [], ["--only", "quadratics", "--rounds", "3", "--seconds", "0.01"], ONE_THREAD),
    "growth": Benchmark(
        "bench_growth.py", [], ["--only", "parameters", "--repeat", "1", "--largest", "1000"], ONE_THREAD
    ),
    "memory": Benchmark("client_memory.py", [], ["--clients", "20"]),
    "peers": Benchmark(
        "bench_peers/run.py",
        ["--repeat", "5"],
        ["--only", "fedsim,loop,vmap", "--workloads", "p-mlp", "--rounds", "2", "--repeat", "1"],
    ),
}


GRAPHS = ["--device", "cuda", "--only", "a,b,c,e", "--repeat", "2", "--set", "executor=vmap"]
GPU_BENCHMARKS = {
    "gpu_rounds": Benchmark("bench.py", ["--device", "cuda", "--only", "a,b,c,d,e,g", "--repeat", "2"]),
    "gpu_never": Benchmark("bench.py", [*GRAPHS, "compile=never"]),
    "gpu_replay": Benchmark("bench.py", [*GRAPHS, "compile=replay"]),
    "gpu_graph": Benchmark("bench.py", [*GRAPHS, "compile=graph"]),
    "gpu_precision": Benchmark("bench_precision.py", ["--device", "cuda", "--only", "fedawe,d", "--repeat", "2"]),
    "gpu_executors": Benchmark(
        "bench_executors.py",
        [
            "--device",
            "cuda",
            "--repeat",
            "2",
            "--seconds",
            "0.05",
            "--only",
            "cnn_16,cifar10_cnn,resnet18_gn,vit,transformer,char_lstm,mlp",
        ],
    ),
    "gpu_frozen": Benchmark("bench_frozen.py", ["--device", "cuda", "--repeat", "3"]),
}


def is_measured(path: Path) -> bool:
    """Did this code on this machine write the file?"""
    if not path.exists():
        return False
    facts = json.loads(path.read_text(encoding="utf-8"))["made"]
    checksum, machine = bench_record.code(), bench_record.hardware()
    return checksum is not None and facts.get("code") == checksum and machine.items() <= facts["machine"].items()


def measure(benchmark: Benchmark, path: Path, tiny: bool) -> bool:
    """Run one benchmark, which writes this file; False if it fails."""
    script = str(bench_record.ROOT / "scripts" / benchmark.script)
    arguments = benchmark.tiny if tiny else benchmark.arguments
    command = [sys.executable, script, *arguments, "--json", str(path)]
    paths = [str(bench_record.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | benchmark.variables | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=variables, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help=f"default: {','.join(BENCHMARKS)}")
    parser.add_argument("--gpu", action="store_true", help=f"on a GPU: {','.join(GPU_BENCHMARKS)}")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of the files (default: docs/figures)")
    parser.add_argument("--tiny", action="store_true", help="seconds each, into another folder")
    parser.add_argument("--again", action="store_true", help="measure also what this code on this machine has measured")
    options = parser.parse_args()
    benchmarks = GPU_BENCHMARKS if options.gpu else BENCHMARKS
    names = options.only.split(",") if options.only else list(benchmarks)
    if unknown := set(names) - set(benchmarks):
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; choose from {', '.join(benchmarks)}")
    if options.tiny and options.gpu:
        parser.error("--tiny is for the benchmarks of a CPU")
    if options.tiny and options.out.resolve() == FIGURES:
        parser.error("--tiny needs --out, another folder than that of the pages' figures")
    if not options.tiny and bench_record.code() is None:
        print("uncommitted changes: files say so, and a second call measures them again", file=sys.stderr)
    if not options.tiny and (load := os.getloadavg()[0]) > QUIET:
        print(f"this machine is not quiet: its load average is {load:.1f}", file=sys.stderr)
    failures = []
    for name in names:
        if not options.again and is_measured(options.out / f"{name}.json"):
            print(f"== {name}: measured already", flush=True)
            continue
        begin = time.monotonic()
        print(f"== {name}: {benchmarks[name].script}", flush=True)
        if not measure(benchmarks[name], options.out / f"{name}.json", options.tiny):
            failures.append(name)
        print(f"== {name}: {time.monotonic() - begin:.0f} s", flush=True)
    if failures:
        print(f"failed: {', '.join(failures)}; a second call measures them again", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
