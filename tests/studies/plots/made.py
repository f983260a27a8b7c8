"""Run folders as a sweep leaves them, written down instead of trained."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

ROUNDS = (0, 10, 20, 30, 40)


def run(
    folder: Path, settings: Mapping[str, Any], columns: Mapping[str, Sequence[float]], seeds: Sequence[int] = (0, 1, 2)
) -> Path:
    """A run whose columns have a value for each of ROUNDS; replicates are some thousandths apart."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.csv", "w", newline="") as file:
        file.writelines(f"# {name}: of a test\n" for name in columns)
        writer = csv.writer(file)
        writer.writerow(["round", "seed", *columns, "samples", "seconds"])
        for number, t in enumerate(ROUNDS):
            for apart, seed in enumerate(seeds):
                writer.writerow([t, seed, *(v[number] * (1 + 0.02 * apart) for v in columns.values()), 100 * t, 1.0])
    OmegaConf.save(dict(settings), folder / "config.yaml")
    return folder


def curve(start: float, end: float) -> list[float]:
    """From a start to near an end, at once."""
    return [start, *(end + 0.05 * (start - end) * np.exp(-np.arange(4))).tolist()]


def strategy(name: str) -> dict[str, Any]:
    return {"_target_": f"fedsim.strategies.{name}"}
