"""Settings without effect are logged with their reason, on the command line and in Python; those with one are not."""

from __future__ import annotations

import inspect
import logging
import pkgutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from setting_pairs import BESIDE
from small_runs import QUICK, SHIFTED, configuration

import fedsim as package
from fedsim import Simulation
from fedsim.app.build import build
from fedsim.availability import Bernoulli, Staircase
from fedsim.availability.clock import Devices
from fedsim.availability.probabilities import Uniform
from fedsim.core.effects import (
    EffectiveIf,
    RoundParameter,
    differs_from_default,
    parameters_of_constructor,
    sentences_without_effect,
)
from fedsim.data.datasets import Digits, Synthetic
from fedsim.models import Linear
from fedsim.run.settings import RunFacts
from fedsim.strategies import FedAsync, FedAvg, FedLaAvg, FedOpt
from fedsim.uplink import Clip, Uplink

SMALL = ["clients=6", "rounds=4", "seeds=[0]", "availability=full"]
ROTTEN, WOKEN = ["contamination=gaussian", "contamination.fraction=0"], ["contamination.fraction=0.1"]
LOCATION = [*SHIFTED["location"], "shift=location"]
POINTS = ["dataset=quadratics", "partition=natural", "model=mean", "dataset.points=[1,2,3,4,5,6]"]
MEANS = ["dataset=gaussian_mean", "partition=natural", "model=mean", "dataset.means=[1,2,3,4,5,6]"]
SOMETIMES = ["availability=stationary"]
UNEQUAL = ["partition=quantity"]
EQUAL = ["partition=equal"]
ADAPTIVE = ["local=profl", *BESIDE["shift=demand"], "shift=demand"]
JOINED = ["availability=arrivals", "availability.joins=[0,0,1,1,2,2]"]
# For every key that may rest: a composition in which it does, and what wakes it.
RESTING = {
    "local.alpha_every": (["local=apfl", "local.alpha_every=step"], ["local.adaptive=true"]),
    "local.alpha_decay": (["local=apfl", "local.alpha_decay=0.1"], ["local.adaptive=true"]),
    "local.mixing_lr": (["local=fedala", "local.mixing_lr=2", "local.mixing_steps=0"], ["local.mixing_steps=1"]),
    "local.drop_last": (
        ["local.drop_last=false", "local.sampling=replacement", "local_epochs=1", "clients=7"],
        ["local.sampling=pass"],
    ),
    "local.decoupled": (["local=adam", "local.decoupled=true"], ["local.weight_decay=0.1"]),
    "local.nesterov": (["local=momentum", "local.nesterov=true", "local.momentum=0"], ["local.momentum=0.5"]),
    "local.temperature": (["local=fedntd", "local.temperature=2", "local.beta=0"], ["local.beta=1"]),
    "local.average": (["local=fedproto", "model=mlp", "local.average=clients", "local.lam=0"], ["local.lam=1"]),
    "local.features": (["local=moon", "model=mlp", "local.features=layers.1", "local.mu=0"], ["local.mu=1"]),
    "local.margin": (["local=fedlc", "local.margin=balanced", "local.tau=0"], ["local.tau=1"]),
    "local.history": (["local=pofl", "local.history=3"], [*LOCATION, "shift.references=none"]),
    "local.rcond": (["local=pg", "local.rcond=0.1"], [*LOCATION, "shift.references=none"]),
    "local.bins": ([*ADAPTIVE, "local.bins=5", "local.robust=false"], ["local.robust=true"]),
    "local.server_method": ([*ADAPTIVE, "local.server_method=regression"], ["local.server_derivative=true"]),
    "local.tolerance": ([*ADAPTIVE, "local.tolerance=2"], ["local.adaptive_samples=true", "local.max_samples=9"]),
    "local.adapt_steps": (
        ["local=perfedavg", "local.adapt_steps=2"],
        ["personal.over=all", "partition.validation=0.2"],
    ),
    "personal.at": (["personal.at=end", "partition.validation=0.2"], ["personal.over=all"]),
    "personal.localize": (["personal.localize=sgd", "partition.validation=0.2"], ["personal.over=online"]),
    "personal.train_samples": (["personal.train_samples=9", "partition.validation=0.2"], ["personal.newcomers=3"]),
    "personal.newcomer_epochs": (["personal.newcomer_epochs=1", "partition.validation=0.2"], ["personal.newcomers=3"]),
    "dataset.augment.per": (["dataset.augment.per=batch"], ["dataset.augment.flip=true"]),
    "strategy.clipped": (["strategy=fedawe", "strategy.clip=0.5", "strategy.clipped=mean"], ["strategy.server_lr=0.5"]),
    "strategy.probability": (["strategy=dsgd", "strategy.probability=0.9"], ["strategy.topology=erdos_renyi"]),
    "strategy.seed": (
        ["strategy=dsgd", "strategy.seed=3"],
        ["strategy.topology=erdos_renyi", "strategy.probability=0.9"],
    ),
    "strategy.degrees": (["strategy=dsgd", "strategy.degrees=there"], SOMETIMES),
    "strategy.spread": (["strategy=ifca", "strategy.spread=1", "strategy.k=1"], ["strategy.k=2"]),
    "strategy.linkage": (
        ["strategy=cfl", "strategy.linkage=complete", "strategy.max_clusters=1"],
        ["strategy.max_clusters=2"],
    ),
    "strategy.assign": (
        ["strategy=hetlora", "model=lora_mlp", "strategy.assign=size", "strategy.ranks=[4]"],
        ["strategy.ranks=[2,4]"],
    ),
    "strategy.exploration": (
        ["strategy=fedfomo", "partition.validation=0.2", "strategy.downloads=5", "strategy.exploration=0.5"],
        ["strategy.downloads=4"],
    ),
    "strategy.exploration_decay": (
        [
            "strategy=fedfomo",
            "partition.validation=0.2",
            "strategy.exploration_decay=0.5",
            "strategy.exploration=0",
            "strategy.downloads=2",
        ],
        ["strategy.exploration=0.2"],
    ),
    "strategy.isolation": (
        ["strategy=feddrift", "strategy.isolation=3", "strategy.max_clusters=1"],
        ["strategy.max_clusters=2"],
    ),
    "strategy.max_loss": (
        ["strategy=adaptive_window", "strategy.max_loss=5", "strategy.power=0"],
        ["strategy.power=1"],
    ),
    "strategy.gamma": (["strategy=cfl", "strategy.gamma=0.5", "strategy.start_round=9"], ["strategy.start_round=1"]),
    "strategy.average": (["strategy=ifca", "strategy.average=gradients", "strategy.k=1"], ["strategy.k=2"]),
    "strategy.fraction": (
        ["strategy=fedlaavg", "strategy.fraction=0.3", "strategy.select=all"],
        ["strategy.select=longest"],
    ),
    "strategy.beta2": (
        ["strategy=fedopt", "strategy.beta2=0.5", "strategy.optimizer=adagrad"],
        ["strategy.optimizer=yogi"],
    ),
    "strategy.first_round": (["strategy=mimic", "strategy.first_round=available"], SOMETIMES),
    "strategy.memory": (["strategy=mifa", "strategy.memory=gradient"], ["local/schedule=inverse_sqrt"]),
    "strategy.wait_for_all": (["strategy=mifa", "strategy.wait_for_all=true"], SOMETIMES),
    "strategy.max_age": (["strategy=mifa", "strategy.max_age=2"], SOMETIMES),
    "strategy.compute": (["strategy=fedpbc", "strategy.compute=active"], SOMETIMES),
    "strategy.cutoff": (["strategy=fedau", "strategy.cutoff=2"], SOMETIMES),
    "strategy.beta": (["strategy=fedstale", "strategy.beta=0.2"], SOMETIMES),
    "strategy.empty": (["strategy=focus", "strategy.empty=skip"], SOMETIMES),
    "strategy.require_full": (["strategy=scaffnew", "strategy.require_full=false"], SOMETIMES),
    "strategy.window": (["strategy=amplified_fedavg", "strategy.window=5"], ["strategy.window=4"]),
    "strategy.weighting": (["strategy.weighting=data", *EQUAL], UNEQUAL),
    "strategy.a": (
        ["strategy=fedbuff", "strategy.a=2", "delay=uniform", "strategy.discount=constant"],
        ["strategy.discount=hinge"],
    ),
    "strategy.b": (["strategy=fedasync", "strategy.b=2", "delay=uniform"], ["strategy.discount=hinge"]),
    "strategy.discount": (["strategy=fedasync", "strategy.discount=hinge"], ["delay=uniform"]),
    "strategy.explore": (["strategy=oort", "strategy.explore=0.5", "strategy.k=6"], ["strategy.k=2"]),
    "trainer.workers": (["trainer.workers=2", "trainer.executor=vmap"], ["trainer.executor=loop"]),
    "trainer.trial": (["trainer.trial=false", "trainer.executor=loop"], ["trainer.executor=auto"]),
    "uplink": (["uplink=topk", "strategy=local_only"], ["strategy=fedavg"]),
    "attack": (["attack=noise", "strategy=local_only"], ["strategy=fedavg"]),
    "attack.fraction": (["attack=noise", "attack.fraction=0.5", "attack.clients=[1]"], ["attack.clients=null"]),
    "attack.since": (["attack=noise", "attack.since=4"], ["attack.since=3"]),
    "uplink.clip.rate": (["uplink=clip", "uplink.clip.rate=0.5"], ["uplink.clip.quantile=0.5"]),
    "uplink.clip.count_noise": (["uplink=clip", "uplink.clip.count_noise=3"], ["uplink.clip.quantile=0.5"]),
    "uplink.gaussian.rate": (["uplink=gaussian", "uplink.gaussian.rate=0.5"], ["uplink.gaussian.quantile=0.5"]),
    "uplink.topk.fraction": (["uplink=topk", "uplink.topk.fraction=0.5", "uplink.topk.k=3"], ["uplink.topk.k=null"]),
    "clock.late": (["clock=devices", "clock.late=partial"], ["clock.deadline=1"]),
    "clock.compute": (
        ["clock=devices", "clock.compute=0.5", "clock.devices={compute:[0.1]}"],
        ["clock.devices=null"],
    ),
    "clock.down": (
        ["clock=devices", "clock.down=9", "clock.devices={compute:[0.1],down:[4]}"],
        ["clock.devices={compute:[0.1]}"],
    ),
    "clock.up": (
        ["clock=devices", "clock.up=9", "clock.devices={compute:[0.1],up:[4]}"],
        ["clock.devices={compute:[0.1]}"],
    ),
    "clock.compute_law": (["clock=devices", "clock.compute_law=pareto"], ["clock.compute_spread=0.5"]),
    "clock.link_spread": (["clock=devices", "clock.link_spread=0.5"], ["clock.up=1000"]),
    "stop.over": (["stop.over=mean"], ["stop.target={test_accuracy:0.9}"]),
    "shift.box": ([*LOCATION, "shift.box=[0,9]", "shift.references=none"], ["shift.references=auto"]),
    "shift.references_seconds": (
        [*LOCATION, "shift.references_seconds=9", "shift.references=none"],
        ["shift.references=auto"],
    ),
    "shift.epsilon": ([*LOCATION, "shift.epsilon=0.5", "shift.epsilons=[0,0,0,0,0,0]"], ["shift.epsilons=null"]),
    "availability.initial": ([*JOINED, "availability.initial=0.1"], ["availability.joins=null"]),
    "availability.rate": ([*JOINED, "availability.rate=0.1"], ["availability.joins=null"]),
    "availability.order": ([*JOINED, "availability.order=number"], ["availability.joins=null"]),
    "availability.batch": (
        ["availability=arrivals", "availability.batch=2", "availability.rate=0"],
        ["availability.rate=1"],
    ),
    "availability.lifetime": (
        ["availability=arrivals", "availability.lifetime=3", "availability.leaves=[1,2,3,4,5,6]"],
        ["availability.leaves=null"],
    ),
    "availability.law": (["availability=arrivals", "availability.law=constant"], ["availability.lifetime=3"]),
    "availability.floor": (["availability=stationary", "availability.floor=0.1"], ["availability.floor=0.6"]),
    "availability.shape": (["availability=device_sessions", "availability.shape=2"], ["availability.law=weibull"]),
    "availability.persistence": (
        ["availability=common_factor", "availability.persistence=0.5", "availability.correlation=0"],
        ["availability.correlation=0.5"],
    ),
    "availability.base.p0": (
        [
            "availability=stationary",
            "availability/base=groups",
            "availability.base.p0=0.3",
            "availability.base.p=[0.1,0.2]",
        ],
        ["availability.base.p=null"],
    ),
    "availability.trajectory.low": (["availability=staircase", "availability.trajectory.low=0.1"], ["rounds=30"]),
    "dataset.slope": ([*POINTS, "dataset.slope=0.5"], ["dataset.points=null"]),
    "dataset.variance": ([*MEANS, "dataset.variance=0.5"], ["dataset.means=null"]),
    "partition.exponent": (["partition=quantity", "partition.exponent=2"], ["partition.law=power"]),
    "drift.direction": (
        ["drift=linear", "drift.direction=[1]", "drift.moves=targets"],
        [*MEANS, "drift.moves=features"],
    ),
    "drift.plane": (
        ["drift=linear", "drift.plane=[1,0]", "dataset=binary_gaussians", "dataset.dimension=2", "partition=natural"],
        ["drift.moves=rotation"],
    ),
    "drift.seed": (["drift=linear", "drift.seed=3"], ["drift.spread=0.5"]),
    "drift.references": ([*LOCATION, "drift=linear", "drift.references=none"], ["shift=none"]),
    "drift.references_seconds": (
        ["drift=linear", "drift.references=none", "drift.references_seconds=9"],
        ["drift.references=always"],
    ),
    "drift.between": (
        ["drift=replay", "drift.path={round:[0,1],displacement:[0,1]}", "drift.between=linear"],
        ["drift.path={round:[0,2],displacement:[0,1]}"],
    ),
    "drift.repeat": (
        ["drift=replay", "drift.path={round:[0,99],displacement:[0,1]}", "drift.repeat=true"],
        ["drift.path={round:[0,1],displacement:[0,1]}"],
    ),
    "drift.first": (
        ["drift=by_client", "drift.first=3", "drift.rounds_of_clients=[1,1,1,1,1,1]"],
        ["drift.rounds_of_clients=null"],
    ),
    "drift.last": (
        ["drift=by_client", "drift.last=30", "drift.rounds_of_clients=[1,1,1,1,1,1]"],
        ["drift.rounds_of_clients=null"],
    ),
    "contamination.mean": (["contamination.mean=1", *ROTTEN], WOKEN),
    "contamination.std": (["contamination.std=1", *ROTTEN], WOKEN),
    "contamination.clients": (["contamination.clients=[1]", *ROTTEN], WOKEN),
    "contamination.exact": (["contamination.exact=true", *ROTTEN], WOKEN),
    "contamination.value": (["contamination.value=2", "contamination=point", "contamination.fraction=0"], WOKEN),
}


@pytest.fixture(name="told")
def told_fixture(caplog):
    """The warnings that a run's composition is met with."""

    def told(*overrides: str) -> list[str]:
        caplog.clear()
        words = {word.partition("=")[0].lstrip("+"): word for word in (*SMALL, *overrides)}
        with caplog.at_level(logging.WARNING, "fedsim"):
            build(configuration(*words.values()))
        return [record.getMessage() for record in caplog.records]

    return told


@pytest.mark.sampled(6)
@pytest.mark.parametrize("key", RESTING)
def test_a_setting_is_told_where_it_rests_and_only_there(key, told):
    rests, wakes = RESTING[key]
    given = [sentence for sentence in told(*rests) if " has no effect without " in sentence]
    assert [sentence for sentence in given if sentence.startswith((f"{key}=", f"{key} "))]
    assert not [sentence for sentence in told(*rests, *wakes) if sentence.startswith((f"{key}=", f"{key} "))]
    if key not in ("uplink", "attack"):
        assert not [s for s in told(*[text for text in rests if not text.startswith(f"{key}=")]) if s.startswith(key)]


def classes() -> set[type]:
    """All of the package's that a run may be made of."""
    modules = [
        import_module(module.name)
        for module in pkgutil.walk_packages(package.__path__, "fedsim.")
        if module.name.split(".")[1] not in ("app", "plots", "__main__")
    ]
    found = (value for module in modules for value in vars(module).values() if inspect.isclass(value))
    return {each for each in found if str(each.__module__).startswith("fedsim.")}


def test_what_is_declared_are_parameters_of_the_class_or_of_one_derived_from_it():
    known, count = classes(), 0
    for cls in known:
        for rule in (*vars(cls).get("effective_if", ()), *vars(cls).get("stops_training", ())):
            count += 1
            family = [each for each in known if issubclass(each, cls)]
            assert any(rule.parameter in parameters_of_constructor(each) for each in family), (
                f"{cls.__name__}: {rule.parameter}"
            )
            if not isinstance(rule, RoundParameter):  # which has no condition
                assert list(inspect.signature(rule.condition).parameters) == ["component", "run"]
    assert count > 80


def test_exploring_for_longer_than_the_run_is_said_to_train_nothing(told):
    """4 rounds of 3 local steps are 12: with 12 steps of exploring no model moves."""
    run = [*LOCATION, "shift.references=none", "local=plugin", "local_steps=3"]
    for steps in (11, 12):
        assert any("trains nothing" in said for said in told(*run, f"local.explore={steps}")) == (steps >= 12)


def test_a_list_of_server_rates_rests_where_all_are_one(told):
    clipped = ["strategy=fedawe", "strategy.clip=0.5", "strategy.clipped=mean", "seeds=[0,1]"]
    assert any("strategy.clipped=mean has no effect" in said for said in told(*clipped, "strategy.server_lr=[1,1.0]"))
    assert not any("strategy.clipped" in said for said in told(*clipped, "strategy.server_lr=[1,0.5]"))


def test_batches_of_all_samples_have_no_short_last_one(told):
    said = told("batch_size=null", "local.drop_last=false")
    assert said == ["local.drop_last=False has no effect without a batch_size"]


def test_the_spread_of_synthetic_models_is_told_to_move_no_label(told):
    assert "dataset.alpha=3" in told("dataset=synthetic", "partition=natural", "dataset.alpha=3")[0]
    assert not told("dataset=synthetic", "partition=natural", "dataset.beta=3")
    one, other = (Synthetic(clients=3, alpha=alpha, samples=20) for alpha in (0.0, 9.0))
    assert torch.equal(one.train_x, other.train_x)
    assert torch.equal(one.train_y, other.train_y)


def test_a_simulation_in_python_says_so_too(caplog):
    with caplog.at_level(logging.WARNING, "fedsim"):
        Simulation(
            Digits(),
            Linear,
            clients=5,
            rounds=2,
            strategy=FedOpt("adagrad", beta2=0.5),
            clock=Devices(link_spread=0.3),
            uplink=Uplink(Clip(rate=0.3)),
        )
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "strategy.beta2=0.5 has no effect without strategy.optimizer=adam or yogi",
        "uplink.clip.rate=0.3 has no effect without uplink.clip.quantile",
        "clock.link_spread=0.3 has no effect without clock.down or clock.up",
    ]


class Halved(FedAvg):
    """Somebody's own, with a declaration of its own beside FedAvg's."""

    effective_if = (EffectiveIf("often", lambda component, run: component.half, "{at}.half=true"),)

    def __init__(self, half: bool = False, often: int = 1) -> None:
        super().__init__()
        self.half, self.often = half, often


def test_what_has_no_default_or_cannot_be_compared_counts_as_given():
    """Of such a value too it is said that it has no effect."""

    class Component:
        def __init__(self, required, array=torch.zeros(2), number=1.0):  # noqa: B008
            self.required, self.array, self.number = required, array, number

    values = {"required": 0.0, "array": torch.zeros(2), "number": 2.0}
    assert all(differs_from_default(Component, name, value) for name, value in values.items())
    assert not differs_from_default(Component, "number", 1.0)


def test_a_class_of_ones_own_declares_some_too():
    assert list(sentences_without_effect("strategy", Halved(often=2), None)) == [
        "strategy.often=2 has no effect without strategy.half=true"
    ]
    assert not list(sentences_without_effect("strategy", Halved(True, often=2), None))
    assert not list(sentences_without_effect("strategy", Halved(often=1), None))


def test_nobody_who_can_take_part_is_said_at_the_start(caplog):
    with caplog.at_level(logging.WARNING, "fedsim"):
        Simulation(Digits(), Linear, clients=5, rounds=3, availability=Bernoulli(Uniform(0.0)))
    assert "availability=Bernoulli trains nothing: no client can take part in any round" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["delay=constant", "delay.rounds=4"], "delay.rounds=4 trains nothing"),
        (["strategy=fedlaavg", "strategy.collect=9"], "strategy.collect=9 trains nothing"),
    ],
)
def test_what_arrives_after_the_last_round_is_said_at_the_start(overrides, says, told):
    assert says in told(*overrides)[0]


def test_a_model_that_never_moved_is_said_at_the_end(caplog):
    with caplog.at_level(logging.WARNING, "fedsim"):
        Simulation(Digits(), Linear, clients=5, rounds=2, strategy=FedAvg()).run()
        Simulation(Digits(), Linear, clients=5, rounds=2, strategy=FedAsync(), clock=Devices()).run()
        assert not caplog.records
        Simulation(Digits(), Linear, clients=5, rounds=2, clock=Devices(deadline=1e-9), strategy=FedAvg()).run()
        Simulation(Digits(), Linear, clients=5, rounds=2, strategy=FedLaAvg(collect=5)).run()
    assert caplog.text.count("the server's model did not change in 2 rounds") == 2


def test_the_command_says_so_once_for_all_jobs(fedsim, tmp_path: Path):
    ended = fedsim(tmp_path, *QUICK, "personal.at=end", "objective=test_accuracy", "out=o")
    assert ended.code == 0
    assert (
        "personal.at=end has no effect without personal.over=all, online or honest, or personal.newcomers" in ended.log
    )
    assert "objective has no effect in a single run" in ended.log
    ended = fedsim(tmp_path, "-m", *QUICK, "personal.at=end", "lr=0.1,0.2", "out=s")
    assert ended.log.count("personal.at=end has no effect") == 1
    assert fedsim(tmp_path, *QUICK, "contamination=gaussian", "contamination.clients=[]").err.startswith(
        "fedsim: contamination.clients=[] contaminates no client"
    )


@pytest.mark.parametrize("setting", [{"low": 0.1}, {"share": 0.75}, {"period": 8}])
def test_a_staircase_that_stays_on_its_first_step_is_any_other_unless_clients_begin_elsewhere(setting):
    (name, value), short, long = *setting.items(), SimpleNamespace(rounds=3), SimpleNamespace(rounds=20)
    staircase = Staircase(**setting)
    assert list(sentences_without_effect("availability.trajectory", staircase, short)) == [
        f"availability.trajectory.{name}={value} has no effect without more rounds than the first part of the period"
    ]
    assert not list(sentences_without_effect("availability.trajectory", staircase, long))
    assert not list(sentences_without_effect("availability.trajectory", Staircase(**setting, zones=2), short))


def test_where_probabilities_are_unknown_any_may_occur() -> None:
    """A recorded availability has no probabilities, so that no setting is said to have no effect because of them."""

    def may_be_below(limit: float, unknown_reason: str) -> bool:
        availability = SimpleNamespace(
            unknown_reason=unknown_reason, probabilities=lambda t: np.array([0.5 if t < 2 else 0.3])
        )
        facts = SimpleNamespace(availability=availability, rounds=3)
        return RunFacts.any_probability(facts, lambda p: p < limit)  # type: ignore[arg-type]

    assert [may_be_below(limit, "") for limit in (0.2, 0.4, 0.6)] == [False, True, True]
    assert may_be_below(0.2, "a record")
