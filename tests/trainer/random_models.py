"""Models, losses and federations at random, each compared with a FedAvg written by hand in double precision.

    python tests/trainer/random_models.py --count 500 --seed 0             # one line per model, and a summary
    python tests/trainer/random_models.py --only 17                        # one number, with its specification
    python tests/trainer/random_models.py --count 500 --log found.jsonl    # goes on where it stopped

A verdict is `right` (the server's models and test losses are those of the program by hand, or, where the model
draws random numbers, those of every other way to compute the same run), `refused` (one sentence before anything is
written), `stopped` (one sentence in the round in which the module first does what it did not do when it was tried:
it writes to a tensor that it had left alone), `WRONG` or `TRACEBACK`. The program by hand builds a fresh module per
client and round, loads the server's parameters and buffers, takes `torch.optim.SGD` steps on unpadded batches and
averages parameters and buffers over those who took part. State that is in neither begins anew with every client and
round, as in `copy.deepcopy(server)`.

Conventions that it takes over from fedsim: which samples a batch has (the plan of the run, one client at a time,
without padding); a parameter that is not used has the gradient zero, and so decays and coasts; whole-numbered
buffers are averaged and rounded; parameters of replicates are initialised from their seeds (`fedsim.core.rng`).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import random_habits
import torch
from random_losses import LOSSES, TARGETS, WITH_CLASSES, Loss
from random_parts import (
    CHANNELS,
    FEATURE_PARTS,
    FEATURES,
    IMAGE_PARTS,
    NUMBERS,
    SEQUENCE_PARTS,
    SIDE,
    STEPS,
    TOKEN_PARTS,
    TOKENS,
    VOCABULARY,
    Build,
    Part,
    reset,
)  # fmt: skip
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsim import ConfigError, EvaluationOptions, Execution, Simulation
from fedsim.availability import Availability
from fedsim.core import rng
from fedsim.core.errors import DivergenceError, RunError
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.local import SGD, Momentum

ROUNDS, TESTED, LR = 3, 8, 0.05
LONGEST_SENTENCE = 600
GOOD = ("right", "refused", "stopped")
INPUTS = {"features": FEATURE_PARTS, "image": IMAGE_PARTS, "tokens": TOKEN_PARTS, "sequence": SEQUENCE_PARTS}
RETURNS = (
    "a tensor",
    "a tuple",
    "a dictionary",
    "a named tuple",
    "an object",
    "a tuple in training",
    "a dictionary in training",
)


class Scripted(Availability):
    """Who takes part is written down: counts [T, R, m]."""

    def __init__(self, counts: np.ndarray) -> None:
        self.script = counts

    def probabilities(self, t: int) -> np.ndarray:
        return np.ones(self.script[t].shape)

    def counts(self, t: int) -> np.ndarray:
        return self.script[t]


@dataclass
class Spec:
    """A run, drawn at random; see `drawn`."""

    number: int
    inputs: str
    width: int
    parts: list[str]
    builds: list[Build]
    returns: str
    ready: bool  # fedsim gets a module, not how to build one
    loss: Loss
    given_loss: Callable[[], Any]
    sizes: tuple[int, ...]
    counts: np.ndarray
    local: dict[str, Any]
    momentum: dict[str, Any] | None
    execution: dict[str, Any]
    seeds: tuple[int, ...]
    nasty: list[str]
    tolerance: float
    random: bool

    @property
    def short(self) -> str:
        local = ", ".join(f"{key}={value}" for key, value in {**self.local, **(self.momentum or {})}.items())
        how = ", ".join(f"{value}" for value in self.execution.values())
        returns = "" if self.returns == "a tensor" else f" → {self.returns}"
        ready = " (a module)" if self.ready else ""
        return (
            f"{self.inputs} | {' + '.join(self.parts)}{returns}{ready} | {self.loss.name} | "
            f"{local} | clients {self.sizes}, {len(self.seeds)} seed(s) | {how}"
        )


def _said(part: Part, build: Build) -> str:
    more = getattr(build, "said", "")
    return f"{part.name} ({more})" if more else part.name


def drawn(seed: int, number: int, named: bool = False) -> Spec:
    """The specification of this number: half of them have one nasty thing, a third two. `named`: under losses that
    fedsim knows by name alone."""
    draw = random.Random(f"{seed}/{number}")
    inputs = draw.choices(list(INPUTS), [5, 2, 1.5, 1.5])[0]
    nasties = draw.choices([0, 1, 2], [1, 3, 2])[0]
    width = draw.choice([6, 8])
    wild = draw.random() < 0.15  # draws random numbers
    chosen: list[tuple[dict[str, Part], Part]] = []
    loss_is_nasty = nasties > 0 and draw.random() < 0.3
    losses = [one for one in LOSSES.values() if one.nasty == loss_is_nasty and (wild or not one.random)]
    loss = draw.choice(losses)
    if named:
        loss, loss_is_nasty = (
            draw.choice([one for one in losses if isinstance(one.make(draw), str)] or [LOSSES["cross_entropy"]]),
            False,
        )
    left = nasties - loss_is_nasty
    returns = "a tensor"
    if left and draw.random() < 0.06:
        returns, left = draw.choice(RETURNS[1:]), left - 1
    elif draw.random() < 0.03:
        returns = draw.choice(RETURNS[1:5])

    def pick(table: dict[str, Part], nasty: bool, random: bool = False) -> Part:
        of = [one for one in table.values() if one.nasty == nasty and one.random == random]
        return draw.choices(of, [one.variants for one in of])[0]

    stem: list[Part] = []
    if inputs == "image":
        stem = [pick(IMAGE_PARTS, False) for _ in range(draw.randint(1, 2))]
    elif inputs in ("tokens", "sequence"):
        strange = left > 0 and draw.random() < 0.5
        stem, left = [pick(INPUTS[inputs], strange)], left - strange
    body = [pick(FEATURE_PARTS, False) for _ in range(draw.choice([0, 1, 1, 2]))]
    for _ in range(left):
        body.insert(draw.randint(0, len(body)), pick(FEATURE_PARTS, True))
    if wild and not loss.random:
        several = [one for one in FEATURE_PARTS.values() if one.random]
        body.insert(draw.randint(0, len(body)), draw.choice([*several, FEATURE_PARTS["random numbers"]]))
    if any(one.fresh for one in body):  # such a module cannot be handed over ready
        body = [one for one in body if not one.ready]
    chosen = [(INPUTS[inputs], one) for one in stem] + [(FEATURE_PARTS, one) for one in body]
    made = [(one, one.make(draw, width)) for _, one in chosen]
    parts = [one for one, _ in made]
    clients = draw.choice([2, 3, 4])
    sizes = draw.choice(
        [
            (6,) * clients,
            tuple(draw.randint(1, 12) for _ in range(clients)),
            (1, 12, 3, 7)[:clients],
            (7, 5, 9, 2)[:clients],
        ]
    )
    work = {"steps": draw.randint(1, 5)} if draw.random() < 0.5 else {"epochs": draw.randint(1, 2)}
    local = {
        "lr": LR, **work, "batch_size": draw.choice([None, 1, 2, 3, 5, 20]),
        "drop_last": draw.random() < 0.5, "sampling": draw.choice(["pass", "pass", "replacement"]),
    }  # fmt: skip
    if local["sampling"] == "replacement":
        local["batch_size"] = local["batch_size"] or 3
    if draw.random() < 0.2:
        local["weight_decay"] = 0.02
    momentum = {"momentum": draw.choice([0.5, 0.9]), "nesterov": draw.random() < 0.3} if draw.random() < 0.3 else None
    executor = draw.choices(["auto", "vmap", "loop", "fused"], [15, 2, 2, 2])[0]
    execution = {
        "executor": executor,
        "chunk": draw.choice(["auto", "auto", 1, 2]),
        "workers": draw.choice(["auto", 1, 2]),
    }
    seeds = tuple(range(draw.randint(1, 2)))
    counts = np.array([[[int(draw.random() < 0.65) for _ in sizes] for _ in seeds] for _ in range(ROUNDS)])
    for row in counts[0]:  # somebody trains
        row[draw.randrange(len(sizes))] = 1
    ready = (draw.random() < 0.3 or any(one.ready for one in parts)) and not any(one.fresh for one in parts)
    loss_seed = draw.random()
    nasty = [one.name for one in parts if one.nasty] + ([loss.name] if loss.nasty else [])
    nasty += [returns] if "in training" in returns else []
    return Spec(
        number, inputs, width, [_said(*one) for one in made], [build for _, build in made], returns, ready, loss,
        lambda: loss.make(random.Random(loss_seed)), sizes, counts, local, momentum, execution, seeds, nasty,
        max([1e-9, *(one.tolerance for one in parts), 1e-5 if "single precision" in loss.name else 0]),
        any(one.random for one in parts) or loss.random,
    )  # fmt: skip


class Net(nn.Module):
    """Parts in a row, from an input to what the loss takes."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.inputs, self.returns = spec.inputs, spec.returns
        if spec.inputs == "features":
            self.stem: nn.Module = nn.Linear(FEATURES, spec.width)
        elif spec.inputs == "image":
            self.stem = nn.Conv2d(2, CHANNELS, 1)
        images = sum(name.partition(" (")[0] in IMAGE_PARTS for name in spec.parts) if spec.inputs == "image" else 0
        layers = [build() for build in spec.builds]
        if spec.inputs == "image":
            layers[images:images] = [nn.Flatten(), nn.Linear(CHANNELS * SIDE * SIDE, spec.width)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(spec.width, int(np.prod(spec.loss.output)))
        self.extra = nn.Linear(spec.width, 2) if spec.returns != "a tensor" else None
        self.output = spec.loss.output

    def forward(self, x: Tensor) -> Any:
        if self.inputs in ("features", "image"):
            x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        output = self.head(x).unflatten(1, self.output)
        if self.extra is None:
            return output
        extra, kind = self.extra(x), self.returns
        if kind.endswith("in training") and not self.training:
            return output
        if kind.startswith("a tuple"):
            return output, extra
        if kind.startswith("a dictionary"):
            return {"extra": extra, "logits": output}
        if kind == "a named tuple":
            return random_habits.Output(extra, output)
        return SimpleNamespace(extra=extra, logits=output)


def output_of(returns: str) -> str | int | None:
    """What fedsim is told of what the module returns."""
    return None if returns == "a tensor" else 0 if returns.startswith("a tuple") else "logits"


def plain_output(returned: Any) -> Tensor:
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, dict):
        return returned["logits"]
    return returned.logits if hasattr(returned, "logits") else returned[0]


def samples(spec: Spec) -> Dataset:
    draw = np.random.default_rng(spec.number)
    count = sum(spec.sizes)

    def inputs(n: int) -> Tensor:
        if spec.inputs == "tokens":
            return torch.as_tensor(draw.integers(0, VOCABULARY, (n, TOKENS)))
        shape = {"features": (FEATURES,), "image": (2, SIDE, SIDE), "sequence": (STEPS, NUMBERS)}[spec.inputs]
        return torch.as_tensor(draw.standard_normal((n, *shape)))

    target, kind = TARGETS[spec.loss.target], spec.loss.target
    x, test_x = inputs(count), inputs(TESTED)
    y, test_y = target(draw, count), target(draw, TESTED)
    owners = torch.as_tensor(np.repeat(np.arange(len(spec.sizes)), spec.sizes))
    return Dataset("toy", x, y, test_x, test_y, classes=WITH_CLASSES.get(kind), owners=owners)


# ------------------------------------------------------------------------------------------------------ fedsim's way


def simulation_of(spec: Spec, counts: np.ndarray | None = None, **execution: Any) -> Simulation:
    counts = spec.counts if counts is None else counts
    build = functools.partial(Net, spec)
    model: Any = seeded(build, 123) if spec.ready else build
    local = SGD(**spec.local) if spec.momentum is None else Momentum(**spec.momentum, **spec.local)
    return Simulation(
        samples(spec),
        model,
        clients=len(spec.sizes),
        partition=Natural(),
        availability=Scripted(counts),
        local=local,
        rounds=len(counts),
        seeds=spec.seeds,
        loss=spec.given_loss(),
        output=output_of(spec.returns),
        evaluation=EvaluationOptions(every=ROUNDS),
        execution=Execution(**{**spec.execution, **execution, "dtype": "float64"}),
    )


def seeded(build: Build, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


State = dict[str, Tensor]


def simulated(
    spec: Spec, counts: np.ndarray | None = None, **execution: Any
) -> tuple[list[State], list[float], Simulation]:
    """The server's last models and test losses, by replicate."""
    reset()
    simulation = simulation_of(spec, counts, **execution)
    result = simulation.run()
    losses = [float(row["test_loss"]) for row in result.history[-len(spec.seeds) :]]
    return [result.model(replicate=r) for r in range(len(spec.seeds))], losses, simulation


# ------------------------------------------------------------------------------------------------------- by hand


class Unplain(Exception):
    """What plain PyTorch itself has no answer for."""


class NotFinite(Exception):
    """A loss in training is no finite number."""


def plain_module(spec: Spec, seed: int) -> nn.Module:
    """A fresh module of the replicate, in double precision."""
    key = 123 if spec.ready else int(rng.generator(seed, rng.Purpose.MODEL).integers(2**63))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        module: nn.Module = Net(spec)
        if spec.ready:  # fedsim draws lazy layers' parameters when it gets the module
            torch.manual_seed(int(rng.generator(seed, rng.Purpose.MODEL).integers(2**63)))
        if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
            x = samples(spec).train_x[:2]
            with torch.no_grad():
                module.eval()(x.float() if x.is_floating_point() else x)
    return module.double()


def state_of(module: nn.Module) -> State:
    return {n: v.detach().clone() for n, v in [*module.named_parameters(), *module.named_buffers()]}


def load(module: nn.Module, state: State) -> nn.Module:
    own = dict([*module.named_parameters(), *module.named_buffers()])
    if own.keys() != state.keys():
        raise Unplain(f"forward makes or loses {sorted(own.keys() ^ state.keys())}")
    with torch.no_grad():
        for name, value in state.items():
            if own[name].shape != value.shape:
                raise Unplain(f"{name} has changed its shape")
            own[name].copy_(value)
    return module


def mean_of(states: list[State]) -> State:
    mean = {}
    for name, first in states[0].items():
        if any(state[name].shape != first.shape for state in states):
            raise Unplain(f"{name} has another shape at each client")
        if first.is_floating_point() or first.is_complex():
            mean[name] = torch.stack([state[name] for state in states]).mean(0)
        else:
            mean[name] = torch.stack([state[name].double() for state in states]).mean(0)
    return mean


def rounded(state: State, like: State) -> State:
    """Whole-numbered buffers as the module has them."""
    return {
        name: value if value.dtype == like[name].dtype else value.round().to(like[name].dtype)
        for name, value in state.items()
    }


def plain_loss(spec: Spec, function: Any, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    if spec.loss.plain is not None:
        return spec.loss.plain(output, batch)
    value = function(output, batch["y"])
    return value.mean() if isinstance(value, Tensor) else value


def by_hand(spec: Spec, simulation: Simulation, skips: bool = False) -> tuple[list[State], list[State], list[float]]:
    """The server's last models, its first, and the last ones' test losses, by replicate.

    `skips`: a parameter without a gradient neither decays nor coasts, as torch.optim has it.
    """
    federation = simulation.federation
    firsts, lasts, losses = [], [], []
    data = samples(spec)
    for r, seed in enumerate(spec.seeds):
        like = state_of(plain_module(spec, seed))
        server = first = like
        for t in range(ROUNDS):
            everyone = np.zeros((len(spec.seeds), len(spec.sizes)))
            everyone[r] = 1
            plan = simulation.trainer.batches.plan(federation.make_cohort(everyone, everyone), t)
            states = []
            for i in np.flatnonzero(spec.counts[t, r]):
                reset()
                client, function = load(plain_module(spec, seed), rounded(server, like)).train(), spec.given_loss()
                trained = [p for p in client.parameters() if p.requires_grad]
                options = {"lr": LR, "weight_decay": spec.local.get("weight_decay", 0.0), **(spec.momentum or {})}
                optimizer = torch.optim.SGD(trained, **options)
                chunk = plan.chunk(np.array([i]))
                for step in range(int(chunk.steps[0])):
                    batch = {name: value[0] for name, value in chunk.batch(step, 0, 1, torch.float64).items()}
                    optimizer.zero_grad()
                    value = plain_loss(spec, function, plain_output(client(batch["x"].clone())), batch)
                    if not torch.isfinite(value):
                        raise NotFinite
                    value.backward()
                    for parameter in trained:
                        if parameter.grad is None and not skips:
                            parameter.grad = torch.zeros_like(parameter)
                        elif parameter.grad is not None and parameter.grad.is_sparse:
                            parameter.grad = parameter.grad.to_dense()
                    optimizer.step()
                states.append(state_of(client))
            server = mean_of(states) if states else server
        reset()
        tested = load(plain_module(spec, seed), rounded(server, like)).eval()
        with torch.no_grad():
            batch = {"x": data.test_x.clone(), "y": data.test_y.clone()}
            losses.append(float(plain_loss(spec, spec.given_loss(), plain_output(tested(batch["x"])), batch)))
        firsts.append(first)
        lasts.append(rounded(server, like))
    return lasts, firsts, losses


# ------------------------------------------------------------------------------------------------------- verdicts


@dataclass
class Verdict:
    """Attributes:

    word: right, refused, stopped, WRONG or TRACEBACK.
    deviation: the largest difference, relative to how far the server moved.
    sentence: what fedsim said, or what is wrong.
    """

    number: int
    word: str
    deviation: float = 0.0
    sentence: str = ""
    spec: str = ""
    nasty: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def line(self) -> str:
        return (
            f"{self.number:5d} {self.word:9s} {self.deviation:8.1e} {self.seconds:5.2f}s  {self.spec}  {self.sentence}"
        )


def deviation(one: State, other: State, first: State | None = None) -> tuple[float, str]:
    """Of two models, relative to the larger of how far the second moved and its size · 1e-3; and where."""
    moved = 0.0
    for name in one.keys() & other.keys():
        value = other[name].to(torch.complex128)
        from_ = first[name].to(torch.complex128) if first is not None else 0 * value
        if value.numel() and torch.isfinite(value.abs()).all():
            moved = max(moved, float((value - from_).abs().max()), 1e-3 * float(value.abs().max()))
    worst, where = 0.0, ""
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name].to(torch.complex128), other[name].to(torch.complex128)
        if a.shape != b.shape:
            return float("inf"), f"{name}: {list(a.shape)} for {list(b.shape)}"
        if not a.numel():
            continue
        both = torch.isfinite(a.abs()) == torch.isfinite(b.abs())
        gap = float((a - b).abs().nan_to_num(0.0).max()) if bool(both.all()) else float("inf")
        if gap / max(moved, 1e-12) > worst:
            worst, where = gap / max(moved, 1e-12), name
    return worst, where


def refusal(error: BaseException) -> str | None:
    """What is wrong with the way in which a run was refused; None where nothing is."""
    if not isinstance(error, (ConfigError, DivergenceError)):
        return f"{type(error).__name__}"
    said = str(error)
    if "\n" in said:
        return "several lines"
    return f"{len(said)} letters" if len(said) > LONGEST_SENTENCE else None


def _leaves_nothing(spec: Spec) -> bool:
    """Is the run refused before a folder is written?"""
    with tempfile.TemporaryDirectory() as folder:
        try:
            reset()
            simulation_of(spec).run(Path(folder) / "run")
        except Exception:
            return not list(Path(folder).iterdir())
    return False


def examine(seed: int, number: int, named: bool = False) -> Verdict:
    """Run the model of this number, and judge it."""
    began, spec = time.perf_counter(), drawn(seed, number, named)

    def judged(word: str, far: float = 0.0, sentence: str = "") -> Verdict:
        told = " ".join(sentence.split())
        return Verdict(number, word, far, told, spec.short, spec.nasty, time.perf_counter() - began)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            states, losses, simulation = simulated(spec)
        except Exception as error:
            if isinstance(error, RunError) and "left alone when it was tried" in str(error):
                return judged("stopped", 0, str(error))
            bad = refusal(error)
            if bad is not None:
                last = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(last.filename).name}:{last.lineno}"
                return judged("TRACEBACK", 0, f"{bad}: {str(error)[:300]} ({place})")
            if isinstance(error, ConfigError) and not _leaves_nothing(spec):
                return judged("WRONG", 0, f"refused, but a folder was written: {error}")
            if isinstance(error, DivergenceError):
                return judged("right" if _diverges(spec) else "WRONG", 0, str(error))
            return judged("refused", 0, str(error))
        if spec.random:
            far, where = _between_ways(spec, states)
            return judged("right" if far <= spec.tolerance else "WRONG", far, where)
        verdict = None
        for skips in (False, True):
            try:
                expected = by_hand(spec, simulation, skips)
            except ConfigError:
                raise
            except Exception as error:
                said = f"{type(error).__name__}: {str(error)[:200]}"
                return judged("WRONG", 0, f"runs, although plain PyTorch raises {said}")
            found = judged(*_against(spec, states, losses, *expected))
            verdict = verdict or found
            if found.word == "right":
                return found
        assert verdict is not None
        return verdict


def _against(
    spec: Spec,
    states: list[State],
    losses: list[float],
    expected: list[State],
    firsts: list[State],
    tested: list[float],
) -> tuple[str, float, str]:
    """fedsim's models and test losses against those by hand."""
    worst, where = 0.0, ""
    for got, wanted, first in zip(states, expected, firsts, strict=True):
        missing = {n for n in wanted if n in plain_names(spec)} - got.keys()
        if missing:
            return "WRONG", float("inf"), f"the model has no {sorted(missing)}"
        worst, where = max((worst, where), deviation(got, wanted, first))
    if worst > spec.tolerance:
        return "WRONG", worst, where
    if spec.loss.over_samples:
        for got_loss, wanted_loss in zip(losses, tested, strict=True):
            far = abs(got_loss - wanted_loss) / max(abs(wanted_loss), 1e-3)
            if not far <= spec.tolerance and np.isfinite(wanted_loss):
                return "WRONG", far, f"test_loss {got_loss:.6g} for {wanted_loss:.6g}"
    return "right", worst, ""


def plain_names(spec: Spec) -> set[str]:
    """Names in the plain module's state dictionary."""
    return set(plain_module(spec, 0).state_dict())


def _diverges(spec: Spec) -> bool:
    """Is the plain program's model not finite either?"""
    simulation = simulation_of(spec)
    try:
        expected, _, _ = by_hand(spec, simulation)
    except Exception:
        return True
    return any(not bool(torch.isfinite(v.abs().double()).all()) for state in expected for v in state.values())


def _between_ways(spec: Spec, states: list[State]) -> tuple[float, str]:
    """The largest difference from the same run computed in other ways, and which it is."""
    worst, which = 0.0, ""
    ways: list[dict[str, Any]] = [
        {},
        {"executor": "loop", "chunk": 1, "workers": 1},
        {"executor": "loop", "workers": 2},
        {"executor": "auto", "chunk": 2},
    ]
    for way in ways:
        try:
            other, _, _ = simulated(spec, None, **way)
        except ConfigError:  # this way is refused, and so gives no numbers that could differ
            if not way:
                raise
            continue
        for one, two in zip(states, other, strict=True):
            far, where = deviation(one, two)
            if far > worst:
                worst, which = far, f"{way or 'again'}: {where}"
    return max((worst, which), _company(spec))


def _company(spec: Spec) -> tuple[float, str]:
    """Two clients together end at the mean of where each ends alone."""
    counts = np.zeros((3, 1, len(spec.seeds), len(spec.sizes)), dtype=int)
    counts[0, ..., 0] = counts[1, ..., -1] = counts[2, ..., 0] = counts[2, ..., -1] = 1
    first, last, both = (simulated(spec, one)[0] for one in counts)
    worst, where = 0.0, ""
    for a, b, together in zip(first, last, both, strict=True):
        mean = {n: (a[n] + b[n]) / 2 for n in a if a[n].is_floating_point() or a[n].is_complex()}
        worst, where = max((worst, where), deviation(together, mean))
    return worst, f"in company: {where}"


# -------------------------------------------------------------------------------------------------- processes, command


def _send(pipe: Any, seed: int, number: int, named: bool) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        pipe.send(asdict(examine(seed, number, named)))
    except BaseException:
        pipe.send(
            {
                "number": number,
                "word": "HARNESS",
                "sentence": traceback.format_exc()[-1500:],
                "spec": drawn(seed, number, named).short,
            }
        )
    pipe.close()


def apart(seed: int, number: int, named: bool = False, seconds: float = 120.0) -> Verdict:
    """`examine` in a process of its own: one that crashes or hangs ends alone."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, seed, number, named))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            process.kill()
            return Verdict(
                number, "TRACEBACK", 0, f"runs for more than {seconds:g} s", drawn(seed, number, named).short
            )
        return Verdict(**ours.recv())
    except EOFError:
        process.join()
        return Verdict(
            number, "TRACEBACK", 0, f"the process died ({process.exitcode})", drawn(seed, number, named).short
        )
    finally:
        process.join()


def warm() -> None:
    """Load what differentiates under vmap, which takes seconds, before processes are forked."""
    torch.set_num_threads(1)
    torch.func.vmap(torch.func.grad(lambda w: w.sin().sum()))(torch.ones(2, 3))
    importlib.import_module("torch._dynamo")


def kinds() -> int:
    return sum(map(len, INPUTS.values()))


def verdicts(seed: int, numbers: Sequence[int], named: bool = False) -> Iterator[Verdict]:
    warm()
    for number in numbers:
        yield apart(seed, number, named)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="these numbers alone")
    parser.add_argument("--log", type=Path, help="a file of JSON lines; numbers in it are not run again")
    parser.add_argument("--named", action="store_true", help="losses that fedsim knows by name alone")
    parser.add_argument("--bad", action="store_true", help="print only what is neither right nor refused")
    asked = parser.parse_args()
    numbers = asked.only or list(range(asked.first, asked.first + asked.count))
    found: list[Verdict] = []
    if asked.log and asked.log.exists():
        found = [Verdict(**json.loads(line)) for line in asked.log.read_text().splitlines()]
        numbers = [n for n in numbers if n not in {one.number for one in found}]
    for verdict in verdicts(asked.seed, numbers, asked.named):
        found.append(verdict)
        if not asked.bad or verdict.word not in GOOD:
            print(verdict.line, flush=True)
        if asked.log:
            with asked.log.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    words = Counter(one.word for one in found)
    plain = sum(one.word == "refused" and not one.nasty for one in found)
    print(
        f"{len(found)} models: "
        + ", ".join(f"{n} {word}" for word, n in words.most_common())
        + f"; {plain} of the refused have nothing nasty"
    )
    return int(any(one.word not in GOOD for one in found))


if __name__ == "__main__":
    sys.exit(main())
