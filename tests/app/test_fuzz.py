"""Random compositions over all groups: whatever runs gives the same numbers in every way that promises to.

Ten in `make test`, the other 520 among the slow ones. What cannot run must say so by an error of ours.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzed_forms import LISTS, formed
from omegaconf import DictConfig, OmegaConf, open_dict
from small_runs import COMPANY, configuration

from fedsim.app.build import build
from fedsim.app.config import groups
from fedsim.app.folding import combined_config, foldable_job_groups
from fedsim.core.errors import ConfigError, DivergenceError
from fedsim.run.fold import FoldedJobs, FoldJob, FoldMember, foldable_run_steps
from fedsim.run.together import LockstepRunner, run_together
from fedsim.run.tracking import RunConfig

BASE = [
    "rounds=2", "eval_every=1", "clients=4", "seeds=[3,8]", "local_steps=2", "trainer.dtype=float64",
    "trainer.executor=loop", "lr=0.02", "tracking.progress=none", "tracking.tensorboard=false",
]  # fmt: skip
DATA = {  # a data set, what it needs, and shifts that move it
    "digits": ([], []),
    "synthetic": ([], []),
    "quadratics": (["model=mean"], []),
    "gaussian_mean": (["model=mean"], ["location"]),
    "regression_groups": ([], []),
    "binary_gaussians": ([], ["group_mean", "elastic"]),
    "pricing": (["model=mean"], ["demand"]),
    "market": (["model=mean"], ["players"]),
    "house_prices": (["model.bias=false"], ["response"]),
    "pricing_groups": (["model=mean"], ["contribution"]),
}
STREAMS = ("gaussian_mean", "binary_gaussians", "pricing", "market", "pricing_groups")  # without a partition
LEFT_OUT = ("custom", "trace", "log", "table", "flwr", "natural", "by_name")


LATE = ["fedavg", "fedavg_all", "fedavgm", "fedopt", "fedprox", "fednova", "mifa"]
LATE += ["fedasync", "fedbuff", "afa_cd", "afa_cs"]


def choices(group: str) -> list[str]:
    return [choice for choice in groups()[group] if choice not in LEFT_OUT]


def composition(number: int) -> list[str]:
    """The overrides of one of them."""
    draw = random.Random(number)
    name = draw.choice([*DATA, "digits", "digits", "synthetic"])
    needs, moves = DATA[name]
    own, rules = [f"dataset={name}", *needs], set(choices("local"))
    if name == "digits":
        own += [f"partition={draw.choice(choices('partition'))}"]
        own += draw.choice([["model=linear"], ["model=mlp", "model.hidden=[6]"]])
    else:
        own += ["partition=natural"]
        # for classes, and for networks
        rules -= {"fedlc", "fedrod", "fedrep", "fedbabu", "moon", "fedntd", "fedproto", "fedpac"}
    rules -= set() if moves else {"rrm"}
    rules -= set() if name == "market" else {"play"}
    rules -= set() if name in ("gaussian_mean", "house_prices") else {"plugin"}
    adapters = ("fedex_lora", "flexlora", "flora", "hetlora", "rolora")  # which a model must have
    strategies = [choice for choice in choices("strategy") if choice not in (*adapters, "fedpac")]
    strategy, availability = draw.choice(strategies), draw.choice(choices("availability"))
    if strategy == "p_fedavg":
        availability = "full"
    own += [f"strategy={strategy}", f"availability={availability}"]
    if availability in ("bernoulli", "sine", "markov") and draw.random() < 0.7:
        bases = set(choices("availability/base")) - (
            set() if name == "digits" else {"class_correlated", "label_ordered"}
        )
        own += [f"availability/base={draw.choice(sorted(bases))}"]
    own += ["availability.k=3"] if availability in ("uniform_k", "multiset") else []
    own += ["availability.groups=2"] if availability == "cyclic" else []
    own += ["strategy.bad=0"] if strategy in ("trimmed_mean", "krum", "multi_krum", "bulyan") else []
    rule = draw.choice(sorted(rules))
    own += [f"local={rule}"]
    if rule in ("plugin", "play"):
        own += [f"local.explore={2 if rule == 'plugin' else 9}"]
    elif rule == "stateful_perfgd":
        own += ["local.history=1"]
    elif rule != "rrm":
        own += [text for text in COMPANY.get(f"local={rule}", []) if text != "model=mlp" or text not in own]
    if moves and (rule in ("rrm", "plugin", "play") or draw.random() < 0.6):
        fixed = {"rrm": "round", "dfo": "step", "plugin": "step", "stateful_perfgd": "step", "play": "step"}
        deploy = fixed.get(rule) or draw.choice(["step", "round"])
        own += [f"shift={draw.choice(moves)}", f"shift.deploy={deploy}"]
        own += ["shift.redraw=2"] if rule == "rrm" or (deploy == "round" and draw.random() < 0.3) else []
        own += [f"shift.inertia={draw.choice([0, 0.5])}", "shift.references=none"]
        own += [f"shift.mixture={[0.4, '[0.5,0.5]'][number % 2]}"] if number % 8 < 2 else []
    if draw.random() < 0.3:
        own += [f"contamination={draw.choice(['gaussian', 'point', 'feature_noise', 'none'])}"]
    if draw.random() < 0.4:
        schedule = draw.choice(choices("local/schedule"))
        own += [f"local/schedule={schedule}", *(["local.schedule.rounds=9"] if schedule == "cosine" else [])]
    own += ["partition.validation=0.3"] if strategy == "fedfomo" and name not in STREAMS else []
    stored = name in ("digits", "synthetic")
    own += [f"batch_size={'null' if stored and draw.random() < 0.2 else 4}"]
    if draw.random() < 0.4:
        own += [f"uplink=[{','.join(draw.sample(choices('uplink'), draw.choice([1, 1, 2])))}]"]
    if draw.random() < 0.2:
        lies = set(choices("attack")) - ({"none"} if name == "digits" else {"none", "label_flip"})
        own += [f"attack={draw.choice(sorted(lies))}", "attack.fraction=0.4"]
    if draw.random() < 0.3:
        own += ["clock=devices", "clock.compute_spread=1", "clock.down=1e5", f"clock.jitter={draw.choice([0, 0.5])}"]
        late = ["clock.deadline=0.05"]
        own += draw.choice([[], late, [*late, "clock.late=partial"], ["clock.first=2"]])
    own += [f"work={draw.choice(['uniform', 'geometric'])}"] if draw.random() < 0.2 else []
    own += ["strategy.require_full=false"] if strategy == "scaffnew" else []
    if strategy in LATE and draw.random() < 0.6:
        own += [f"delay={draw.choice([c for c in choices('delay') if c != 'none'])}"]
    return [*formed(number, own, strategy in LATE), *BASE]


def ran(cfg: DictConfig, folder: Path | None = None, **changes: Any) -> list[dict[str, Any]]:
    """The history of a run with some settings changed."""
    cfg = copy.deepcopy(cfg)
    with open_dict(cfg):
        for key, value in changes.items():
            OmegaConf.update(cfg, key.replace("__", "."), value)
    simulation, tracking, identity = build(cfg)
    return simulation.run(folder, folder is not None, tracking, RunConfig(identity)).history


def close(one: list[dict[str, Any]], other: list[dict[str, Any]], exactly: bool = False, tied: bool = False) -> None:
    """The same columns and numbers, but for the time they took; `tied`: which of several classes is predicted is up to
    rounding."""
    assert [sorted(row) for row in one] == [sorted(row) for row in other]
    for mine, yours in zip(one, other, strict=True):
        names = sorted(name for name in mine.keys() - {"seconds"} if not (tied and "accuracy" in name))
        a, b = (np.array([row[name] for name in names], dtype=float) for row in (mine, yours))
        if exactly:
            assert np.array_equal(a, b, equal_nan=True), names
        else:
            assert np.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True), (names, a, b)


def ties(cfg: DictConfig) -> bool:
    """Its model starts at zero, and classes that nobody has met stay alike."""
    return str(cfg.dataset._target_).endswith(".Synthetic")


def executors(cfg: DictConfig, folder: Path) -> None:
    close(ran(cfg), ran(cfg, trainer__executor="auto", trainer__chunk=3, trainer__trial=False), tied=ties(cfg))


def seeds(cfg: DictConfig, folder: Path) -> None:
    alone = {key.replace(".", "__"): pair[1] for key in LISTS if (pair := OmegaConf.select(cfg, key)) == LISTS[key]}
    close([row for row in ran(cfg) if row["seed"] == 8], ran(cfg, seeds=[8], **alone), tied=ties(cfg))


def resumed(cfg: DictConfig, folder: Path) -> None:
    """Broken off after one round, as a shorter run would be, and gone on with."""
    ran(cfg, folder / "run", rounds=1)
    close(ran(cfg, folder / "run"), ran(cfg), exactly=True)


def places(cfg: DictConfig, folder: Path) -> None:
    close(ran(cfg), ran(cfg, trainer__memory="host"), exactly=True)


def together(cfg: DictConfig, folder: Path) -> None:
    other = copy.deepcopy(cfg)
    other.lr = 0.01
    joint = run_together([build(one)[0] for one in (cfg, other)])
    close(joint[0].history, ran(cfg), exactly=True)
    close(joint[1].history, ran(other), exactly=True)
    folded(cfg, folder)


def folded(cfg: DictConfig, folder: Path) -> None:
    """In one federation, where that can be: broken off after one round, resumed, and the run with lists bit for bit."""
    other = copy.deepcopy(cfg)
    other.lr = 0.01
    configs, folders = [cfg, other], [folder / "0", folder / "1"]
    if not foldable_job_groups(configs, folders) or FoldMember(build(cfg)[0]).unfoldable_reason():
        return
    lists = ran(combined_config(configs))
    for rounds in (1, cfg.rounds):
        jobs = []
        for one, path in zip(configs, folders, strict=True):
            OmegaConf.update(one, "rounds", rounds)
            simulation, tracking, identity = build(one)
            jobs.append(FoldJob(foldable_run_steps(simulation, path, True, tracking, RunConfig(identity))))
            jobs[-1].start()
        federation = functools.partial(lambda joint: build(joint)[0], combined_config(configs))
        for _, outcome in LockstepRunner[None]()([FoldedJobs(jobs, federation).generate_round_tasks]):
            assert outcome is None
    for number, job in enumerate(jobs):
        if isinstance(job.outcome, BaseException):
            raise job.outcome
        first = number * len(cfg.seeds)
        replicates = slice(first, first + len(cfg.seeds))
        close(job.outcome.history, [row for rows in evaluations(lists) for row in rows[replicates]], exactly=True)


def evaluations(history: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each."""
    return [list(rows) for _, rows in itertools.groupby(history, lambda row: row["round"])]


WAYS: list[Callable[[DictConfig, Path], None]] = [executors, seeds, resumed, places, together]


def tried(number: int, folder: Path) -> bool:
    """Does this composition run? Then it keeps one of the promises."""
    try:
        WAYS[number % len(WAYS)](configuration(*composition(number)), folder)
    except (ConfigError, DivergenceError):
        return False
    return True


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, 30, 5))
def test_random_compositions(first: int, tmp_path: Path) -> None:
    done = [tried(number, tmp_path / str(number)) for number in range(first, first + 5)]
    assert sum(done) >= 3  # the rest was refused


@pytest.mark.slow
@pytest.mark.parametrize("first", range(30, 530, 20))
def test_many_random_compositions(first: int, tmp_path: Path) -> None:
    done = [tried(number, tmp_path / str(number)) for number in range(first, first + 20)]
    assert sum(done) >= 12
