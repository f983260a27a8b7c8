"""Settings that name a round, or count rounds: what lies after the last round is reported as without effect."""

from __future__ import annotations

import inspect
import logging
import re

import pytest
from setting_pairs import given
from small_runs import configuration
from test_settings_without_effect import SMALL, classes, told_fixture  # noqa: F401 (a fixture)

from fedsim.core.constraints import IntegerAtLeast, constraints_in_hint, resolved_type_hints
from fedsim.core.effects import RoundParameter

ROUNDS = 4  # of SMALL
# Key → what it needs beside it, a value that is reached in part or whole, and one that is not.
NOT_REACHED = {
    "attack.since": (["attack=noise"], 3, 4),
    "attack.warmup": (["attack=mimic"], 4, 5),
    "drift.at": (["drift=abrupt"], [4], [5]),
    "drift.first": (["drift=by_client", "drift.last=9"], 4, 5),
    "drift.rounds_of_clients": (["drift=by_client"], [9, 9, 4, 9, 9, 9], [9, 9, 5, 9, 9, 9]),
    "availability.leaves": (["availability=arrivals", "availability.initial=1"], [4, 9, 9, 9, 9, 9], [5] * 6),
    "delay.rounds": (["delay=constant"], 3, 4),
    "strategy.collect": (["strategy=fedlaavg"], 3, 4),
    "strategy.cutoff": (["strategy=fedau", "availability=stationary"], 3, 4),
    "strategy.max_age": (["strategy=mifa", "availability=stationary"], 2, 3),
    "strategy.max_staleness": (["strategy=aced"], 2, 3),
    "strategy.window": (["strategy=amplified_fedavg"], 4, 5),
    "local.schedule.floor": (["local/schedule=cosine", "local.schedule.floor=0.5", "rounds=4"], None, None),
    "stop.patience": (["partition.validation=0.2", "eval_every=2"], 2, 3),
}
# Parameters whose docstring speaks of rounds, in which one beyond the last round still makes a difference.
OTHERS = {
    "Arrivals.joins": "a client that joins later does not take part; if none joins, it is said that nothing is trained",
    "ByClient.last": "the changes of the other clients are spread up to it",
    "Cosine.rounds": "the rate falls more slowly",
    "Cosine.warmup": "the rate rises more slowly",
    "Cyclic.length": "the first turn lasts to the end",
    "Cyclic.k": "no round, but a number of clients",
    "Devices.first": "no round, but a number of clients",
    "Events.first": "no round, but a number of clients",
    "MinimumSeparation.separation": "each client takes part at most once",
    "ConstantDelay.rounds": "reported as training nothing",
    "FedLaAvg.collect": "reported as training nothing",
    "UniformDelay.least": "reported at the end, if the model did not move",
    "UniformDelay.most": "the delays are spread up to it",
    "LognormalDelay.most": "the delays are cut off there",
    "Setup.rounds": "it is the number of rounds",
    "Shift.redraw": "the data react to the initial model in the whole run",
    "Staircase.period": "the probabilities change more slowly",
    "_Periodic.period": "the probabilities change more slowly",
    "AmplifiedScaffold.window": "the correction is never updated",
    "EvaluationOptions.every": "only the first and the last model are evaluated",
    "FedALA.mixing_steps": "counts local steps",
    "FedRep.head_steps": "counts local steps",
    "FedPAC.head_steps": "counts local steps",
    "CentredClipping.iterations": "counts steps of one round",
    "Tracking.checkpoint_every": "only the last round has a checkpoint",
    "Batches.redraw": "that of the shift",
}


def parameters_of_rounds() -> set[str]:
    """Class.parameter of whole numbers that are described by rounds."""
    found = set()
    for cls in classes():
        if "__init__" not in vars(cls) and "__post_init__" not in vars(cls):
            continue
        hints, arguments = resolved_type_hints(cls.__init__), (cls.__doc__ or "").partition("Args:")[2]
        for name in list(inspect.signature(cls.__init__).parameters)[1:]:
            if not any(isinstance(constraint, IntegerAtLeast) for constraint in constraints_in_hint(hints.get(name))):
                continue
            described = re.search(
                rf"^ +(?:\w+, )*{name}(?:, \w+)*: (.*?)(?=^ {{4,8}}\w[\w, *]*: |\Z)", arguments, re.M | re.S
            )
            if re.search(r"\brounds?\b", f"{name} {described[1] if described else ''}".replace("_", " ")):
                found.add(f"{cls.__name__}.{name}")
    return found


@pytest.mark.slow
def test_each_whole_number_of_rounds_is_declared_or_has_a_reason() -> None:
    declared = {f"{cls.__name__}.{rule.parameter}" for cls in classes() for rule in vars(cls).get("effective_if", ())}
    assert parameters_of_rounds() - declared - OTHERS.keys() == set()
    of_rounds = [r for cls in classes() for r in vars(cls).get("effective_if", ()) if isinstance(r, RoundParameter)]
    assert {rule.parameter for rule in of_rounds} <= {key.rpartition(".")[2] for key in NOT_REACHED}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("key", NOT_REACHED)
def test_what_lies_after_the_last_round_is_said_and_what_does_not_is_not(key: str, told) -> None:
    beside, reached, late = NOT_REACHED[key]
    with_late = (
        [*beside, f"{key}={late}"]
        if late is not None
        else [*beside, "local.schedule.warmup=4", "local.schedule.rounds=9"]
    )
    with_reached = [*beside, f"{key}={reached}"] if reached is not None else beside
    assert [said for said in told(*with_late) if said.startswith(f"{key}=")]
    assert not [said for said in told(*with_reached) if said.startswith(f"{key}=")]


def test_rounds_of_a_list_are_named_one_by_one(told) -> None:
    assert told("drift=abrupt", "drift.at=[1,9,12]") == [
        f"drift.at=[1, 9, 12] has no effect in round {late} without more than {late - 1} rounds" for late in (9, 12)
    ]
    assert told("drift=abrupt") == ["drift.at=[50] has no effect without more than 49 rounds"]  # the default
    assert not told("drift=abrupt", "rounds=50")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "reached"),
    [
        ("attack.since", 3),
        ("attack.warmup", 1),
        ("drift.at", [4]),
        ("drift.first", 4),
        ("availability.leaves", [3] * 6),
    ],
)
def test_a_run_is_the_same_wherever_beyond_its_end_a_round_lies(
    key: str, reached: object, caplog: pytest.LogCaptureFixture
) -> None:
    beside, _, late = NOT_REACHED[key]
    later = [number + 3 for number in late] if isinstance(late, list) else late + 3
    words = {word.partition("=")[0]: word for word in (*SMALL, *beside)}
    with caplog.at_level(logging.ERROR):
        runs = [
            given(configuration(*(words | {key: f"{key}={value}"}).values()))[0] for value in (late, later, reached)
        ]
    assert runs[0] == runs[1] != runs[2]
