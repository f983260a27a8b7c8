"""Pairs of a key and a composition in which it exists: what becomes of a run when the key gets another value.

`python tests/app/setting_pairs.py --seeds 32` counts the outcomes of random pairs, for docs/reliability.md.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from own_files import SETTINGS, write
from settings_that_matter import AVAILABILITY, BASE, ELSEWHERE, SPLIT, more_files
from small_runs import COMPANY, SHIFTED, configuration

from fedsim.app.build import build
from fedsim.app.config import groups, resolved_settings
from fedsim.core.errors import ConfigError, DivergenceError, MissingDataError, RunError
from fedsim.core.settings import flatten_settings

MADE_UP = ("binary", "gaussian", "house", "market", "pricing", "quadratics", "regression", "synthetic")
MEANS = ("gau", "mar", "pri", "qua")
BRIEF_SEARCH = ("shift.references=none", "shift.references_seconds=2")  # where a key asks for the points after all
BESIDE = (
    {  # what a choice needs beside it
        "drift=abrupt": ["drift.at=[1,2]"],
        "strategy=cfl": [*SPLIT[1:], "strategy.eps_1=100", "strategy.eps_2=0"],
        "availability=arrivals": ["availability.base.p=0.2"],
        "model=mean": ["dataset=gaussian_mean", "partition=natural"],
        **COMPANY,
        "strategy=fedfomo": ["partition.validation=0.2", "availability=full", "strategy.downloads=1"],
        **SETTINGS,
        "local=plugin": [*SHIFTED["demand"], "shift=demand", *BRIEF_SEARCH, "local.explore=6"],
        **{f"shift={name}": BRIEF_SEARCH for name in ("elastic", "strategic")},
        **{f"shift={name}": [*beside, *BRIEF_SEARCH] for name, beside in SHIFTED.items()},
    }
    | {
        f"dataset={name}": ["partition=natural"] + (["model=mean"] if name.startswith(MEANS) else [])
        for name in groups()["dataset"]
        if name.startswith(MADE_UP)
    }
)
# Keys of these do nothing but for the sake of others, and are covered there.
LEFT_OUT = ("hydra", "tracking", "trainer", "out", "resume", "trusted", "objective", "device", "deterministic")


def given(cfg: DictConfig, whole: bool = False) -> tuple[str, list[str]]:
    """All that a run gives but for the time it took, or why it gives nothing; and what it logged.

    Raises:
        MissingDataError: its data are not on this machine, and `whole` asks for them.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedsim")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    remembered: list[Any] = []
    try:
        simulation = build(cfg)[0]
        make = simulation.trainer.initial_memory
        simulation.trainer.initial_memory = lambda model: remembered.append(make(model)) or remembered[0]  # type: ignore
        result = simulation.run()
    except (ConfigError, DivergenceError, RunError) as error:
        if whole and isinstance(error, MissingDataError):
            raise
        return f"refused: {error}", said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in result.history]
    held = vars(result.state) | {f"{of} {n}": v for of, each in vars(remembered[0]).items() for n, v in _named(each)}
    tensors = [(name, value) for name, value in sorted(held.items()) if isinstance(value, torch.Tensor)]
    kept = [rows, [[name, digest(value)] for name, value in tensors], result.stopped, result.extra]
    return json.dumps(kept, sort_keys=True, default=str), said


def _named(values: Any) -> Iterator[tuple[str, Any]]:
    return iter(values.items()) if isinstance(values, dict) else iter(())


def digest(value: torch.Tensor) -> str:
    """Of its bits."""
    whole = value.detach().cpu().contiguous()
    return hashlib.sha256(whole.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@functools.cache
def base(*overrides: str) -> tuple[DictConfig, str, list[str]]:
    """A composition, and what its run gives."""
    cfg = configuration(*overrides)
    return cfg, *given(cfg, whole=True)


def with_value(cfg: DictConfig, key: str, value: Any) -> DictConfig:
    """The same with another value of a key."""
    cfg = cfg.copy()
    with open_dict(cfg):
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    return cfg


def values(cfg: DictConfig, key: str) -> list[Any]:
    """Other values of the same kind; for a word those that a wrong one is told of."""
    now = OmegaConf.select(cfg, key)
    found: list[Any] = []
    if isinstance(now, bool):
        found = [not now]
    elif isinstance(now, int):
        found = [now + 1, max(now - 1, 0), 2 * now, now + 3]
    elif isinstance(now, float):
        found = [now * 1.5, now * 0.5, now + 0.25, now / 20, now + 5]
    elif now is None:
        found = [2, 0.3, [0, 1], 0.01]
    elif isinstance(now, str):
        told = re.search(r"choose one of (.*)$", given(with_value(cfg, key, "zzz"))[0])
        found = re.findall(r"[\w.]+", told[1])[:5] if told else []
    return [value for value in found if value != now]


def keys_of(cfg: DictConfig) -> list[str]:
    """Keys of a composition that a run's numbers may depend on, interpolated ones left to those they follow."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    follow = {name for name, value in flatten_settings({str(k): v for k, v in raw.items()}) if "${" in str(value)}
    found = (name for name, _ in flatten_settings(resolved_settings(cfg)))
    return [
        name
        for name in found
        if not name.endswith("_target_") and name not in ELSEWHERE and name not in follow
        if not name.startswith(LEFT_OUT)
    ]


def outcome(overrides: tuple[str, ...], key: str, patient: bool = True) -> tuple[str, str]:
    """What becomes of a key's other values: one "changes" the run, or is "told" to have no effect; all are "refused";
    or they are "silent". Beside it the value that shows it.

    Args:
        overrides: the composition.
        key: of it.
        patient: before it is silent, try a longer run.
    """
    cfg, before, said = base(*overrides)
    told = any(key in sentence for sentence in said)
    silent: list[Any] = []
    for value in values(cfg, key):
        after, heard = given(with_value(cfg, key, value))
        if after.startswith("refused"):
            continue
        if after != before:
            return "changes", str(value)
        if told or any(key in sentence for sentence in heard):
            return "told", str(value)
        silent.append(value)
    if not silent:
        return "refused", ""
    return outcome((*overrides, "rounds=30"), key, patient=False) if patient else ("silent", str(silent[-1]))


def compositions() -> Iterator[tuple[tuple[str, ...], str]]:
    """Every choice of every group that runs on what is here, and the group."""
    for group, choices in groups().items():
        if group in ("experiment", "sweep", "tracking", "trainer") or group.startswith("hydra"):
            continue
        for choice in choices:
            own = f"{group}={choice}"
            beside = BESIDE.get(own, [])
            there = [] if group.startswith("availability") else AVAILABILITY
            there = [] if any(word.startswith("availability=") for word in beside) else there
            if group.startswith("availability/"):
                there = ["availability=sine" if "trajectory" in group else "availability=bernoulli"]
            yield (*BASE, *there, *beside, own), group.replace("/", ".")


def mixed(seed: int) -> tuple[str, ...]:
    """A random composition of several groups."""
    draw = random.Random(seed)
    words: list[str] = []
    for group in ("strategy", "local", "availability", "clock", "delay", "uplink", "attack", "work", "local/schedule"):
        if draw.random() < 0.5:
            choice = draw.choice(groups()[group])
            words += [*BESIDE.get(f"{group}={choice}", []), f"{group}={choice}"]
    last = {word.partition("=")[0]: word for word in words}
    return (*BASE, "clients=10", *last.values())


def sampled_keys(seed: int, count: int = 8) -> list[str]:
    """Keys of the random composition of this seed; none where it is refused."""
    words = mixed(seed)
    try:
        cfg, outputs, _ = base(*words)
    except MissingDataError:
        return []
    return [] if outputs.startswith("refused") else random.Random(seed).sample(keys_of(cfg), count)


def count_outcomes(seeds: range) -> tuple[Counter[str], list[str]]:
    """How many pairs have which outcome, and the keys of the silent ones."""
    counts, silent_keys = Counter[str](), list[str]()
    for seed in seeds:
        for key in sampled_keys(seed):
            result = outcome(mixed(seed), key)[0]
            counts[result] += 1
            silent_keys += [key] if result == "silent" else []
        base.cache_clear()
    return counts, silent_keys


def main() -> None:
    """Print the outcomes of the pairs of so many random compositions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=32, help="random compositions (default: 32)")
    seeds = range(parser.parse_args().seeds)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write(Path(folder))
        more_files(Path(folder))
        counts, silent_keys = count_outcomes(seeds)
    print(f"{sum(counts.values())} pairs: {dict(counts)}; silent: {sorted(set(silent_keys))}")


if __name__ == "__main__":
    main()
