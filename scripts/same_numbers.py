"""Bit for bit: do runs give the numbers that they gave before a change of the code, or on another device?

python scripts/same_numbers.py record before.json                # 120 compositions, with the code as it is
python scripts/same_numbers.py compare before.json               # the same with the code as it is now; exit code 1
python scripts/same_numbers.py record cpu.json --set device=cpu trainer.dtype=float64
python scripts/same_numbers.py compare cpu.json --set device=cuda trainer.dtype=float64 --tolerance 1e-6

The compositions are those of tests/app/test_fuzz.py, drawn at random, and one for each choice of each configuration
group. The file holds their overrides, every number of metrics.csv apart from times, and a checksum of the last models.
A composition that is refused is recorded as refused; `compare` prints sentences that have changed, and counts as
different what is refused on one side alone. With a tolerance, numbers may differ by this share of the larger one, or
by as much where both are below 1; the models' checksums are then not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import io
import json
import logging
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fedsim.app.cli import main as fedsim

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["rounds=3", "clients=12", "eval_every=1", "local_steps=2", "seeds=[0,1]"]
QUIET = ["tracking.tensorboard=false", "tracking.progress=none", "trainer.trial=false"]
GROUPS = ("strategy", "local", "availability", "shift", "uplink", "attack", "partition", "contamination", "clock")
TIMED = ("seconds", "time")  # in names of columns


def compositions(count: int) -> dict[str, list[str]]:
    """Name → overrides."""
    from small_runs import COMPANY, SHIFTED  # type: ignore[import-not-found]
    from test_fuzz import composition  # type: ignore[import-not-found]

    from fedsim.app.config import groups

    drawn = {f"random {number}": composition(number) for number in range(count)}
    each = {}
    for group in GROUPS:
        for choice in groups()[group]:
            beside = COMPANY.get(f"{group}={choice}", []) + (SHIFTED.get(choice, []) if group == "shift" else [])
            each[f"{group}={choice}"] = [*SMALL, *beside, f"{group}={choice}"]
    return drawn | each


def numbers(overrides: list[str]) -> dict[str, Any]:
    """What a run with these overrides ends with: columns and a checksum, or why there was none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        sys.argv = ["fedsim", *overrides, *QUIET, f"out={out}"]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                fedsim()
        except SystemExit as end:
            if end.code:
                return {"refused": str(end.code)}
        lines = [line for line in (out / "metrics.csv").read_text().splitlines() if not line.startswith("#")]
        rows = list(csv.DictReader(lines))
        columns = {n: [row[n] for row in rows] for n in rows[0] if not any(word in n for word in TIMED)}
        return {"columns": columns, "models": _checksum(out)}


def _checksum(out: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(out.glob("*.safetensors")):
        for name, value in sorted(load_file(path).items()):
            found.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def are_close(before: list[str], now: list[str], tolerance: float) -> bool:
    """Are the numbers of a column equal, or equal to rounding where a tolerance is given?"""
    if before == now or not tolerance:
        return before == now
    try:
        pairs = [(float(a), float(b)) for a, b in zip(before, now, strict=True) if a != b]
    except ValueError:
        return False
    return all(math.isnan(a) == math.isnan(b) for a, b in pairs) and all(
        math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in pairs if not math.isnan(a)
    )


def differences(before: dict[str, Any], now: dict[str, Any], tolerance: float = 0.0) -> str:
    """What is not the same, in a few words; nothing where all is."""
    if "refused" in before and "refused" in now:
        return ""
    if "refused" in before or "refused" in now:
        return f"refused {'before' if 'refused' in before else 'now'}: {before.get('refused') or now.get('refused')}"
    gone, new = (one["columns"].keys() - other["columns"].keys() for one, other in ((before, now), (now, before)))
    shared = before["columns"].keys() & now["columns"].keys()
    moved = [n for n in shared if not are_close(before["columns"][n], now["columns"][n], tolerance)]
    told = [f"columns gone: {sorted(gone)}"] if gone else []
    told += [f"new columns: {sorted(new)}"] if new else []
    told += [f"other numbers: {sorted(moved)}"] if moved else []
    told += ["other models"] if not tolerance and before["models"] != now["models"] else []
    return "; ".join(told)


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=120, help="random compositions of `record` (default: 120)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of every composition")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative difference that counts as equal")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every Nth composition, from the Kth")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "app"))  # also where custom models of the compositions come from
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    recorded = {} if asked.action == "record" else json.loads(asked.file.read_text())
    todo = compositions(asked.count) if asked.action == "record" else {n: r["overrides"] for n, r in recorded.items()}
    first, _, step = asked.part.partition("/")
    found, different, began = dict[str, dict[str, Any]](), 0, time.perf_counter()
    for name, overrides in list(todo.items())[int(first) - 1 :: int(step)]:
        try:
            found[name] = {"overrides": overrides, **numbers([*overrides, *asked.set])}
        except Exception as error:
            found[name] = {"overrides": overrides, "refused": f"{type(error).__name__}: {error}"}
        if asked.action == "compare":
            said = differences(recorded[name], found[name], asked.tolerance)
            different += bool(said)
            if said:
                print(f"{name}: {said}", flush=True)
            elif recorded[name].get("refused") != found[name].get("refused"):
                print(f"{name}: other words\n  {recorded[name]['refused']}\n  {found[name]['refused']}", flush=True)
    if asked.action == "record":
        asked.file.write_text(json.dumps(found))
    refused = sum("refused" in one for one in found.values())
    print(
        f"{len(found)} compositions, {refused} refused, {different} different, {time.perf_counter() - began:.0f} s"
        if asked.action == "compare"
        else f"{len(found)} compositions, {refused} refused, {time.perf_counter() - began:.0f} s"
    )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
