"""Two draws of a run never share numbers: no key and counter are asked for in two places, or twice in a round."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, ClassCorrelated, CommonShock, Jitter, Uniform
from fedsim.core import rng
from fedsim.core.rng import Purpose
from fedsim.data.contamination import Gaussian
from fedsim.data.datasets import CropFlip, Dataset, GaussianMean
from fedsim.data.partition import Dirichlet
from fedsim.local import SGD
from fedsim.models import MLP, Mean
from fedsim.shift import Location

LOOP = Execution("loop", dtype="float64")
PACKAGE = str(Path(rng.__file__).parents[1])
ASKERS = {
    "PARTITION": ["partition.py table"],
    "MODEL": ["row_model.py initial"],
    "PROBABILITY": ["probabilities.py base"],
    "TRAJECTORY": ["trajectories.py at"],
    "AVAILABILITY": ["processes.py bernoulli"],
    "BATCH": ["stored.py make_feed"],
    "AUGMENT": ["stored.py batch_of_rows"],
    "DROPOUT": ["batches.py batch"],
    "CONTAMINATION": ["batches.py contaminate"],
    "DATA": ["gaussian.py __init__", "gaussian.py draw_dirichlet_weights"],  # by counters of their own
    "SHIFT": ["location.py setup"],
    "COMMON": ["correlated.py _next_state"],
    "NOISE": ["drawn.py batch_of_rows"],
    "EVALUATION": ["drawn.py fixed_samples"],
}
HOMES = {  # purpose → files of ours that name it; for a purpose of a whole folder the folder
    "DATA": "data/datasets", "PARTITION": "data/partition/partition.py", "MODEL": "models/row_model.py",
    "PROBABILITY": "availability/probabilities.py", "TRAJECTORY": "availability/trajectories.py",
    "AVAILABILITY": " ".join(f"availability/{file}.py" for file in ("cyclic", "markov", "processes", "separation")),
    "BATCH": "data/samples/stored.py", "AUGMENT": "data/samples/stored.py",
    "DROPOUT": "run/sample_contract.py data/samples/batches.py",
    "NOISE": "data/samples/client_data.py data/samples/drawn.py",
    "CALIBRATION": "evaluation/calibration.py",
    "EVALUATION": "evaluation/performative/risk.py run/sample_contract.py data/samples/client_samples.py",
    "CONTAMINATION": "run/sample_contract.py data/samples/batches.py data/samples/client_data.py",
    "SHIFT": "shift", "STRATEGY": "strategies",
    "CLIENTS": "run/wiring.py",
    "FEATURES": "data/partition/features.py", "COMMON": "availability/correlated.py",
    "SPELL": "availability/separation.py availability/sessions.py", "TURNS": "availability/cyclic.py",
    "ROSTER": "availability/recorded.py", "UPLINK": "uplink", "ATTACK": "uplink/attack",
    "CLOCK": "availability/clock/clock.py", "WORK": "availability/clock/work.py",
    "DELAY": "availability/clock/delay.py",
    "POINT": "local/exploring.py", "MIXTURE": "shift/shift.py", "CLUSTER": "strategies/ifca.py", "TIE": "core/ties.py",
    "EVENT": "availability/clock/events.py",
    "DRIFT": "data/drift", "ONSET": "data/drift/paths.py",
    "ARRIVAL": "availability/arrivals.py",
    "DEVICE": "availability/clock/device_table.py",
    "CAPACITY": "models/capacity.py", "CHANNEL": "models/capacity.py", "WIDTH": "models/capacity.py",
}  # fmt: skip
PASSED_ON = ("rng.py", "client_data.py", "heterogeneity.py")  # they ask for others


def images() -> Simulation:
    """Stored samples, with augmentation, dropout, contamination, a partition with validation, shuffles."""
    x = torch.randint(0, 255, (60, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = Dataset("images", x, torch.arange(60) % 3, classes=3, augment=CropFlip(padding=1, flip=True))
    return Simulation(
        data, lambda shape, classes: MLP(shape, classes, hidden=[5, 4], dropout=0.4), clients=4,
        partition=Dirichlet(alpha=5.0, validation=0.2), contamination=Gaussian(fraction=0.4), execution=LOOP, rounds=3,
        availability=Bernoulli(ClassCorrelated(), Jitter(0.1)), local=SGD(steps=7, batch_size=3), seeds=(3, 11),
    )  # fmt: skip


class Tossing(GaussianMean):
    """Draws a uniform number for every sample, too."""

    uniforms = 1


def stream() -> Simulation:
    """Fresh samples whose law answers the model, under common shocks."""
    return Simulation(
        Tossing(4, weight_variance=0.01, seed=2), Mean, clients=4,
        shift=Location(0.5, 0.1, seed=2, references="none"), contamination=Gaussian(fraction=0.4),
        availability=CommonShock(Uniform(0.6), groups=2, persistence=0.5),
        local=SGD(steps=4, batch_size=3), seeds=(3, 11), execution=LOOP, rounds=3,
    )  # fmt: skip


def place() -> str:
    """File and function of ours that asks."""
    frame = sys._getframe(1)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        passed_on = (
            file.endswith(PASSED_ON) or function == "draw_uniforms"
        )  # of an availability process, which names it
        if file.startswith(PACKAGE) and not passed_on and not function.startswith("<"):
            return f"{Path(file).name} {function}"
        frame = frame.f_back
    return "a test"


class Spy:
    """What was drawn: purpose → places that ask for it; place and line → pairs of key and counter, as one number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.askers: dict[Purpose, set[str]] = defaultdict(set)
        self.narrow: dict[tuple[int, ...], set[str]] = defaultdict(set)
        self.pairs: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
        generator, bits = rng.generator, rng.random_bits

        def asked(row_keys):
            def keys_of(seeds, purpose, clients, *counters):
                self.askers[purpose].add(place())
                return row_keys(seeds, purpose, clients, *counters)

            return keys_of

        def generator_of(seed, purpose, *counters):
            self.askers[purpose].add(place())
            self.narrow[(seed, int(purpose), *counters)].add(f"{place()} {sys._getframe(1).f_lineno}")
            return generator(seed, purpose, *counters)

        def bits_of(keys, counters):
            frame, depth = sys._getframe(1), 1
            while frame.f_code.co_filename == rng.__file__:
                depth += 1
                frame = sys._getframe(depth)
            both = torch.broadcast_tensors(keys, counters.to(torch.int64))
            pair = (both[0] ^ (both[1] * 0x5851F42D4C957F2D)).flatten()  # an injection of the few counters
            self.pairs[frame.f_code.co_filename, frame.f_lineno].append(pair.numpy().copy())
            return bits(keys, counters)

        of_keys = [(name, asked(getattr(rng, name))) for name in ("row_keys", "row_keys_host")]
        for name, spy in (*of_keys, ("generator", generator_of), ("random_bits", bits_of)):
            monkeypatch.setattr(rng, name, spy)


@pytest.mark.parametrize("make", [images, stream])
def test_no_two_draws_of_a_run_share_numbers(make, play, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    simulation = make()
    narrow = {key: set(places) for key, places in spy.narrow.items()}
    assert all(len(places) == 1 for places in narrow.values()), narrow
    spy.pairs.clear()  # from here on all is training
    list(play(simulation))
    found = {at: np.concatenate(pairs) for at, pairs in spy.pairs.items()}
    assert len(found) >= (5 if make is images else 4)
    for at, pairs in found.items():
        assert len(np.unique(pairs)) == len(pairs), f"drawn twice at {at}"
    for (at, pairs), (other, others) in itertools.combinations(found.items(), 2):
        assert not len(np.intersect1d(pairs, others)), f"{at} and {other} share numbers"


def test_every_purpose_is_asked_for_in_one_place(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purpose that is taken for another one would go unnoticed as long as keys differ by what is folded in."""
    spy = Spy(monkeypatch)
    for make in (images, stream):
        simulation = make()
        list(play(simulation, 1))
        simulation.evaluator(simulation.initial_state().model)
    assert {purpose.name: sorted(places) for purpose, places in spy.askers.items()} == ASKERS


def test_a_purpose_is_named_where_it_belongs_and_nowhere_else() -> None:
    """Parts that are never in one run share a purpose; no other two do."""
    named: dict[str, set[str]] = defaultdict(set)
    for path in Path(PACKAGE).rglob("*.py"):
        for purpose in re.findall(r"\bPurpose\.([A-Z]+)", path.read_text(encoding="utf-8")):
            file = path.relative_to(PACKAGE).as_posix()
            home = HOMES.get(purpose, "nowhere")
            named[purpose].add(home if file.startswith(f"{home}/") else file)
    assert named == {purpose: set(files.split()) for purpose, files in HOMES.items()}
    assert named.keys() == Purpose.__members__.keys()


def test_a_purpose_is_given_as_the_purpose() -> None:
    """Seeds and purposes are whole numbers: exchanged, they would draw numbers that belong to another seed."""
    positions = {"generator": 1, "row_keys": 1, "row_keys_host": 1, "of_seeds": 2}
    count = 0
    for path in Path(PACKAGE).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text)) if "Purpose." in text else ():
            name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
            if name in positions:
                named = [re.match(r"(rng\.)?Purpose\.", ast.unparse(argument)) is not None for argument in call.args]
                count += any(named)
                assert not any(named) or named.index(True) == positions[name], f"{path.name}: {ast.unparse(call)}"
    assert count > 20


def test_two_seeds_share_no_more_than_chance() -> None:
    """Among n² pairs of keys of 64 bits none agrees; a shuffle of one seed is none of the other's."""
    clients = torch.arange(2000)
    keys = [
        rng.row_keys(torch.full((2000,), seed), purpose, clients, t)
        for seed in (0, 1, 2**40)
        for purpose in (Purpose.BATCH, Purpose.NOISE)
        for t in range(5)
    ]
    assert len(torch.unique(torch.cat(keys))) == 30 * 2000
    one, other = (rng.uniform(keys[number][:, None], torch.arange(50), torch.float64) for number in (0, 10))
    share = float((one == other).double().mean())  # of 10⁵ pairs of 24 bits: 0.006 are expected to agree
    assert share < 5e-5
    assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 5 / 100_000**0.5


@pytest.mark.parametrize("value", [0, 1, 7, 2**31, 2**62, -1])
def test_a_number_of_the_host_folds_as_one_of_the_device(value: int) -> None:
    key = torch.tensor([0, 1, -5, 2**62], dtype=torch.int64)
    assert torch.equal(rng.fold_in(key, value), rng.fold_in(key, torch.tensor(value)))


def test_neighbouring_normal_numbers_are_made_of_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, bits = list[int](), rng.random_bits
    monkeypatch.setattr(
        rng, "random_bits", lambda keys, counters: asked.extend(counters.tolist()) or bits(keys, counters)
    )
    rng.normal(torch.tensor(3), torch.arange(100))
    assert len(set(asked)) == len(asked) == 200
