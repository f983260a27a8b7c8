"""fedsim beside other simulators, on pfl-research's published workload (see `workload.py`), on a CPU.

Every contender is one small script that uses its simulator as that simulator's own documentation does, in an
environment of its own (made on first use; nothing of it is a dependency of fedsim). Contenders take turns, so that the
ratios hold when the machine's speed drifts; ratios are taken between neighbours in time, and the medians are shown.

usage: python scripts/bench_peers/run.py [--json FILE] [--only fedsim,pfl2] [--workloads p-mlp,p-cnn] [--rounds N]
                                         [--repeat 3] [--envs FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import table
import torch
import workload as w

sys.path.append(str(Path(__file__).resolve().parents[1]))
import bench_record

HERE = Path(__file__).resolve().parent
TORCH = "torch==" + torch.__version__.split("+")[0]  # all that use PyTorch use fedsim's
LIMIT = 300  # seconds a script may take


@dataclass
class Contender:
    """How one contender is run.

    Attributes:
        script: in this folder.
        environment: name of its environment; None is this interpreter.
        launcher: arguments of Python before the script.
        variables: environment variables.
    """

    script: str
    environment: str | None = None
    launcher: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CONTENDERS = {
    "fedsim": Contender("peer_fedsim.py"),
    "pfl": Contender("peer_pfl.py", "pfl"),
    "pfl2": Contender("peer_pfl.py", "pfl", TORCHRUN, {"OMP_NUM_THREADS": "1"}),
    "fedjax": Contender("peer_fedjax.py", "fedjax"),
    "fedlab": Contender("peer_fedlab.py", "fedlab"),
    "flwr": Contender("peer_flwr.py", "flwr"),
    "loop": Contender("peer_loop.py"),
    "vmap": Contender("peer_vmap.py"),
}
REQUIREMENTS = {  # one call of pip each
    "pfl": [[TORCH, "pfl[pytorch]"]],
    "fedjax": [["fedjax", "jax<0.5", "jaxlib<0.5"]],
    "fedlab": [  # its own requirements ask for an old torch
        [TORCH, "torchvision", "numpy", "pandas", "scipy", "scikit-learn", "munch", "nvidia-ml-py", "tqdm"],
        ["--no-deps", "fedlab"],
    ],
    "flwr": [[TORCH, "flwr[simulation]"]],
}


def interpreter(name: str | None, folder: Path) -> str:
    """The Python of an environment, which is made where it is not there yet."""
    if name is None:
        return sys.executable
    root, wanted = folder / name, REQUIREMENTS[name]
    python, note = root / "bin" / "python", root / "requirements.json"
    if not note.exists() or json.loads(note.read_text()) != wanted:
        print(f"making the environment {root} …", file=sys.stderr, flush=True)
        if not python.exists():
            venv.create(root, with_pip=True)
        for packages in wanted:
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", *packages], check=True, stderr=subprocess.DEVNULL
            )
        note.write_text(json.dumps(wanted))
    return str(python)


def run(contender: Contender, python: str, arguments: list[str]) -> dict[str, Any]:
    """One repetition: what the script reports, or its 'error'."""
    variables = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "PYTHONWARNINGS": "ignore"} | contender.variables
    command = [python, *contender.launcher, str(HERE / contender.script), *arguments]
    started = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, errors = started.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {LIMIT} s"}
    finally:
        end(started)
    answers = [line for line in said.splitlines() if line.startswith('{"seconds"')]
    if started.returncode or not answers:
        lines = [line for line in errors.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit status {started.returncode}"}
    found: dict[str, Any] = json.loads(answers[-1])
    return found


def end(started: subprocess.Popen[str]) -> None:
    """Stop a script and its workers, if they still run: launchers first get the time to stop theirs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if started.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(started.pid, number)
                started.wait(timeout=20)


def measure(workload: str, names: list[str], repeat: int, rounds: int | None, envs: Path) -> list[dict[str, Any]]:
    """All contenders in turn, `repeat` times."""
    arguments = [workload] + ([] if rounds is None else ["--rounds", str(rounds)])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    pythons = {name: interpreter(CONTENDERS[name].environment, envs) for name in names}
    for repetition in range(repeat):
        for name in names:
            runs[name].append(run(CONTENDERS[name], pythons[name], arguments))
            print(
                f"{workload} {repetition + 1}/{repeat} {name}: {summary(runs[name][-1])}", file=sys.stderr, flush=True
            )
    return table.rows(workload, runs)


def summary(found: dict[str, Any]) -> str:
    """One repetition in a few words."""
    return found.get("error") or f"{min(found['seconds']):.4f} s a round at best"


def stop(number: int, frame: object) -> None:
    """Asked to end: unwind, so that the script that is running ends too."""
    sys.exit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    parser = argparse.ArgumentParser(description="fedsim beside other simulators, seconds a round on a CPU.")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated contenders of {', '.join(CONTENDERS)}")
    parser.add_argument("--workloads", default=",".join(w.SHAPES), help="comma-separated; default %(default)s")
    parser.add_argument("--rounds", type=int, help=f"timed rounds of a repetition; default {w.ROUNDS}")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions; default %(default)s")
    parser.add_argument("--envs", type=Path, default=HERE / ".envs", help="where the environments are")
    asked = parser.parse_args()
    names = asked.only.split(",") if asked.only else list(CONTENDERS)
    workloads = asked.workloads.split(",")
    for option, given, known in (("--only", names, CONTENDERS), ("--workloads", workloads, w.SHAPES)):
        if unknown := set(given) - set(known):
            parser.error(f"{option}: {', '.join(sorted(unknown))} unknown; choose from {', '.join(known)}")
    print(
        f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {asked.repeat} repetitions; "
        f"{w.CLIENTS} clients × "
        f"{w.SAMPLES} samples, {w.ACTIVE} a round, batch {w.BATCH}, one epoch of SGD at {w.LR}, no evaluation"
    )
    found = []
    for workload in workloads:
        made = measure(workload, names, asked.repeat, asked.rounds, asked.envs.resolve())
        print(f"\n{workload}", *table.lines(made), sep="\n", flush=True)
        found += made
    if asked.json:
        best = {name: table.against_best([r for r in found if r["workload"] == name]) for name in workloads}
        bench_record.save(asked.json, found, repeat=asked.repeat, best_peer=best)


if __name__ == "__main__":
    main()
