"""A list of numbers, one per seed: every replicate gives what a run with its number alone gives, bit for bit."""

from __future__ import annotations

import inspect
import json
import typing

import numpy as np
import pytest
import torch

import fedsim.strategies as library
from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Full, Uniform
from fedsim.core import ConfigError, Federation
from fedsim.core.per_seed import NumberOrListPerSeed, PerSeed, as_per_seed
from fedsim.local import APFL, SGD
from fedsim.run.together import run_together
from fedsim.run.tracking import Tracking
from fedsim.strategies import FedAvg, FedAvgM, FedAWE, FedBuff, FedOpt, FedProx, Median, RobustServer

SIZES = (5, 2, 9, 4)
TWO = {  # of every setting that takes a list: one number, and another
    "server_lr": (0.9, 0.4),
    "momentum": (0.2, 0.7),
    "beta1": (0.9, 0.5),
    "beta2": (0.99, 0.8),
    "tau": (1e-3, 0.1),
    "mu": (0.01, 0.7),
    "alpha": (0.3, 0.05),
    "beta": (0.5, 1.0),
    "clip": (0.3, 0.05),
    "amplification": (1.5, 0.7),
    "eps": (1e-3, 0.5),
}
BESIDE = {"bad": 0.0, "window": 2, "buffer": 2}


def settings(made: type) -> dict[str, typing.Any]:
    """Argument → annotation, those of the classes it derives from where it has no `__init__` of its own."""
    hints = typing.get_type_hints(made.__init__)
    return {name: hints.get(name) for name in inspect.signature(made).parameters}


def lists(made: type) -> list[str]:
    """Its settings that take a list."""
    return [name for name, hint in settings(made).items() if hint in (NumberOrListPerSeed, NumberOrListPerSeed | None)]


FOUND = {
    made: lists(made)
    for made in vars(library).values()
    if inspect.isclass(made) and not inspect.isabstract(made) and lists(made)
}


def played(play, Regression, regression_of, strategy, seeds, lr, execution=None, availability=None, rule=SGD, **local):
    simulation = Simulation(
        regression_of(SIZES),
        Regression,
        clients=len(SIZES),
        availability=availability or Bernoulli(Uniform(0.6)),
        strategy=strategy,
        local=rule(lr=lr, steps=2, batch_size=2, **local),
        rounds=3,
        seeds=seeds,
        execution=execution or Execution(executor="loop"),
    )
    return [round.after for round in play(simulation)]


@pytest.fixture(name="models")
def models_fixture(play, Regression, regression_of):
    """[T, R, d] the models after every round."""
    return lambda *what, **how: torch.stack(
        [after.model for after in played(play, Regression, regression_of, *what, **how)]
    )


def test_every_setting_that_takes_a_list_is_tried():
    """And every server rate is one of them; `strategy.rule` of a robust server keeps its own at 1."""
    assert set().union(*FOUND.values()) == set(TWO)
    assert all("server_lr" in FOUND[made] for made in vars(library).values()
               if inspect.isclass(made) and not inspect.isabstract(made) and "server_lr" in settings(made))  # fmt: skip
    assert len(FOUND) > 30


@pytest.mark.sampled(4)
@pytest.mark.parametrize("made", FOUND, ids=lambda made: made.__name__)
def test_replicates_with_numbers_of_their_own_are_runs_of_their_own(made, models):
    """Of all its settings at once, and of rates of local steps beside them."""
    beside = {name: value for name, value in BESIDE.items() if name in settings(made)}
    lr = [0.05, 0.02]
    together = models(
        made(**beside, **{name: [TWO[name][0]] * 2 + [TWO[name][1]] * 2 for name in FOUND[made]}), (0, 1, 0, 1), lr * 2
    )
    for first in (0, 1):
        alone = models(made(**beside, **{name: TWO[name][first] for name in FOUND[made]}), (0, 1), lr)
        assert torch.equal(together[:, 2 * first : 2 * first + 2], alone)
    assert not torch.equal(together[:, :2], together[:, 2:])


@pytest.mark.parametrize("how", ["loop", "vmap", "fused"])
def test_rows_of_one_call_have_numbers_of_their_own(how, models):
    """In every executor: FedProx's μ pulls on, and APFL's α mixes, each row as its replicate says."""
    execution = Execution(executor=how, dtype="float64")
    many = {"execution": execution, "rule": APFL, "alpha": [0.1, 0.1, 0.8, 0.8]}
    together = models(FedProx(mu=[0.0, 0.0, 0.9, 0.9]), (0, 1, 0, 1), 0.05, **many)
    for first, (mu, alpha) in enumerate(((0.0, 0.1), (0.9, 0.8))):
        alone = models(FedProx(mu=mu), (0, 1), 0.05, execution=execution, rule=APFL, alpha=alpha)
        torch.testing.assert_close(together[:, 2 * first : 2 * first + 2], alone, rtol=0, atol=1e-12)
    assert not torch.allclose(together[:, :2], together[:, 2:])


def test_a_clients_own_mixture_is_its_replicates():
    federation = Federation((0, 1, 0), 2, np.ones(6))
    alpha = APFL(alpha=[0.1, 0.5, 0.9]).memory(federation, 3)["alpha"]
    torch.testing.assert_close(alpha, torch.tensor([0.1, 0.1, 0.5, 0.5, 0.9, 0.9]), rtol=0, atol=0)
    one = APFL(alpha=0.3).memory(federation, 3)["alpha"]
    assert torch.equal(one, torch.full((6,), 0.3))


def simulation(regression_of, Regression, strategy, seeds=(0, 1, 0), rounds=4, **options) -> Simulation:
    return Simulation(
        regression_of(SIZES),
        Regression,
        clients=len(SIZES),
        availability=Bernoulli(Uniform(0.6)),
        strategy=strategy,
        local=SGD(**{"lr": 0.05, "steps": 2, "batch_size": 2} | options),
        rounds=rounds,
        seeds=seeds,
        evaluation=EvaluationOptions(every=1),
        execution=Execution(executor="loop"),
    )


def numbers(result):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in result.history]


def test_a_run_goes_on_and_says_which_replicate_had_which_number(tmp_path, regression_of, Regression):
    def made(rounds):
        strategy = FedAWE([0.9, 0.4, 0.4], clip=[0.5, 0.5, 0.05])
        return simulation(regression_of, Regression, strategy, rounds=rounds, lr=[0.05, 0.05, 0.02])

    quiet = Tracking(progress="none", tensorboard=False)
    made(2).run(tmp_path / "run", tracking=quiet)
    assert numbers(made(4).run(tmp_path / "run", resume=True, tracking=quiet)) == numbers(made(4).run())
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["per_replicate"]
    assert [row["seed"] for row in told] == [0, 1, 0]
    assert [row["strategy.server_lr"] for row in told] == [0.9, 0.4, 0.4]
    assert [row["strategy.clip"] for row in told] == [0.5, 0.5, 0.05]
    assert [row["lr"] for row in told] == [0.05, 0.05, 0.02]


def test_a_run_of_one_number_says_nothing_of_it(tmp_path, regression_of, Regression):
    simulation(regression_of, Regression, FedAWE([0.5])).run(tmp_path, tracking=Tracking(progress="none"))
    assert "strategy.server_lr" not in json.loads((tmp_path / "summary.json").read_text())["per_replicate"][0]


def test_runs_with_lists_advance_together(regression_of, Regression):
    def both():
        return [
            simulation(regression_of, Regression, FedProx([0.0, 0.2, 0.9], [1.0, 0.5, 0.7])),
            simulation(regression_of, Regression, FedAvgM(0.9, [0.1, 0.9]), seeds=(4, 5), lr=[0.01, 0.05]),
        ]

    assert [numbers(each) for each in run_together(both())] == [numbers(each.run()) for each in both()]


def test_a_robust_servers_server_takes_lists_and_its_rule_does_not(models):
    given = {"availability": Full()}
    together = models(RobustServer(Median(), FedOpt(server_lr=[0.1, 0.1, 0.4, 0.4])), (0, 1, 0, 1), 0.05, **given)
    for first, rate in ((0, 0.1), (2, 0.4)):
        alone = models(RobustServer(Median(), FedOpt(server_lr=rate)), (0, 1), 0.05, **given)
        assert torch.equal(together[:, first : first + 2], alone)
    with pytest.raises(ConfigError, match=r"server_lr=\[1\.0, 1\.0\] must be 1"):
        RobustServer(Median([1.0, 1.0]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FedAvg([1.0, 0.5]), r"strategy\.server_lr has 2 entries, but there are 3 seeds; give one per seed"),
        (lambda: FedAvg([1.0, 0.5, 0]), r"server_lr\[2\]=0 must be positive"),
        (lambda: FedAvg([]), r"server_lr=\[\] has no entries"),
        (lambda: FedOpt(tau=[0.1, 1e30]), r"tau=\[0\.1, 1e\+30\] must be below"),
        (lambda: RobustServer(Median(), FedAvg([1, 2])), r"strategy\.server\.server_lr has 2 entries"),
        (lambda: FedBuff(a=[0.1, 0.2, 0.3]), r"a=\[0\.1, 0\.2, 0\.3\] must be a finite number"),
    ],
)
def test_wrong_lists_are_refused(make, said, regression_of, Regression):
    with pytest.raises(ConfigError, match=said):
        simulation(regression_of, Regression, make())


def test_numbers_reckon_as_each_alone_would():
    """The same bits: with numbers in double precision, with tensors in theirs."""
    draw = torch.Generator().manual_seed(0)
    rows, values = torch.rand(3, 4, generator=draw) + 0.1, [0.9, 1 / 3, 1e-4]
    number = PerSeed(tuple(values))
    for how in (
        lambda x, r: x * r, lambda x, r: r * x, lambda x, r: (1 - x) * r, lambda x, r: r - x * r, lambda x, r: r + x,
        lambda x, r: x + r, lambda x, r: x - r, lambda x, r: r - x, lambda x, r: x / r, lambda x, r: r / x,
        lambda x, r: x / 7 * r, lambda x, r: (1 / x) * r, lambda x, r: x**2 * r, lambda x, r: (x * x - 1) * r,
        lambda x, r: (x + x) * r[:, 0],
    ):  # fmt: skip
        together = how(number, rows)
        assert torch.equal(together, torch.cat([how(x, rows[k : k + 1]) for k, x in enumerate(values)]))


def test_numbers_of_replicates_meet_no_rows_of_clients():
    """Nor do they become an object in an array."""
    number = PerSeed((0.5, 0.25))
    with pytest.raises(ValueError, match=r"each of 2 replicates meets a tensor \[3, 4\].*cohort\.expand_per_seed"):
        number * torch.ones(3, 4)
    with pytest.raises(TypeError):
        np.ones(2) * number
    federation = Federation((0, 1), 3, np.ones(6))
    cohort = federation.make_cohort(np.array([[1, 1, 0], [0, 0, 1]]), np.ones((2, 3)))
    assert cohort.expand_per_seed(number) == PerSeed((0.5, 0.5, 0.25))
    assert cohort.expand_per_seed(0.5) == 0.5
    assert str(number) == "[0.5, 0.25]"
    assert as_per_seed([4.0]) == 4.0
