"""Personal rules where they meet other rules, closed forms, interruptions and mistakes."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from personal_rules import LOCAL, RULES, double, simulation_of, watched

from fedsim import Simulation
from fedsim.availability import Bernoulli, Sine, Uniform
from fedsim.core import ConfigError
from fedsim.data.datasets import GaussianMean, Quadratics
from fedsim.local import APFL, SGD, Ditto, PerFedAvg, PFedMe
from fedsim.local.perfedavg import split_into_batches
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Location
from fedsim.strategies import FedAvg, FedAWE, FedProx, LocalOnly, Scaffold

QUIET = Tracking(progress="none", tensorboard=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mix", ["params", "outputs"])
@pytest.mark.parametrize("strategy", [FedAvg(server_lr=0.7), FedAWE(), Scaffold(), FedProx(mu=0.5)],
                         ids=lambda s: type(s).__name__)  # fmt: skip
def test_apfl_leaves_the_global_model_alone(strategy, mix):
    """w never meets v, whatever α is: the state is that of the strategy under SGD, bit for bit."""
    options = LOCAL | {"clip": 0.5, "weight_decay": 0.1}
    runs = [
        simulation_of(local=rule, strategy=strategy, availability=Bernoulli(Uniform(0.6), Sine())).run()
        for rule in (SGD(**options), APFL(alpha=0.0, mix=mix, **options), APFL(alpha=0.7, mix=mix, **options))
    ]
    for other in runs[1:]:
        assert torch.equal(other.state.model, runs[0].state.model)
        assert [row["train_loss"] for row in other.history] == [row["train_loss"] for row in runs[0].history]


@pytest.mark.parametrize("executor", ["vmap", "fused"])
@pytest.mark.parametrize("mix", ["params", "outputs"])
def test_with_alpha_one_apfl_trains_everybody_alone(mix, executor):
    """v is then the model of a client without a federation, bit for bit; with α = 0 the predictor is w."""
    coins = {"availability": Bernoulli(Uniform(0.6), Sine()), "rounds": 4, "execution": double(executor)}
    options = LOCAL | {"weight_decay": 0.1}
    alone = simulation_of(local=SGD(**options), strategy=LocalOnly(), **coins).run()
    together = watched(simulation_of(local=APFL(alpha=1.0, mix=mix, **options), **coins))
    together.run()
    assert torch.equal(together.clients["personal"], alone.state.models)
    row = {
        "params": alone.state.model[0],
        "personal": alone.state.models[3],
        "alpha": torch.ones((), dtype=torch.float64),
    }
    own = sum(weight * part for weight, part in together.trainer.local_rule.personal(row))
    assert torch.equal(own, row["personal"])
    none = row | {"alpha": 0 * row["alpha"]}
    assert torch.equal(sum(weight * part for weight, part in together.trainer.local_rule.personal(none)), row["params"])


def test_ditto_leaves_the_global_model_alone_and_without_a_penalty_everybody_too():
    """Bit for bit: the state is FedAvg's whatever λ is; at λ = 0 v is the model of a client without a federation."""
    coins = {"availability": Bernoulli(Uniform(0.6), Sine()), "rounds": 4, "execution": double("loop")}
    options = LOCAL | {"clip": 0.5, "weight_decay": 0.1}
    plain = simulation_of(local=SGD(**options), **coins).run()
    alone = simulation_of(local=SGD(**options), strategy=LocalOnly(), **coins).run()
    for penalty in (0.0, 2.0):
        ditto = watched(simulation_of(local=Ditto(penalty=penalty, **options), **coins))
        assert torch.equal(ditto.run().state.model, plain.state.model)
        assert torch.equal(ditto.clients["personal"], alone.state.models) == (penalty == 0.0)


def test_dittos_models_rest_between_ones_own_and_the_federations():
    """On F_i = ½‖x − u_i‖²: v_i = (u_i + λ x) / (1 + λ), x the mean of all u_i."""
    u = torch.tensor([[1.0, 2.0], [5.0, 5.0], [-1.0, 0.0]], dtype=torch.float64)
    simulation = watched(Simulation(
        Quadratics(clients=3, points=u.tolist()), Mean, clients=3, local=Ditto(penalty=0.5, lr=0.2, steps=5), rounds=40,
        execution=double(),
    ))  # fmt: skip
    model = simulation.run().state.model
    torch.testing.assert_close(model[0], u.mean(0))
    torch.testing.assert_close(simulation.clients["personal"], (u + 0.5 * model) / 1.5)


def test_local_only_is_every_client_for_itself(Scripted):
    """On F_i = ½‖x − u_i‖² x arrives at u + (1 − η)^s (x − u), s the steps the client took; the model is the mean."""
    counts = np.array([[[1, 0, 1]], [[0, 0, 1]], [[0, 0, 0]]])
    dataset = Quadratics(clients=3, points=[[1.0, 2.0], [5.0, 5.0], [-1.0, 0.0]])
    simulation = Simulation(
        dataset, functools.partial(Mean, start=2.0), clients=3, availability=Scripted(counts), strategy=LocalOnly(),
        local=SGD(lr=0.1, steps=2), rounds=3, execution=double(),
    )  # fmt: skip
    state = simulation.run().state
    steps = torch.tensor([2.0, 0.0, 4.0], dtype=torch.float64)[:, None]
    expected = dataset.train_x + 0.9**steps * (2.0 - dataset.train_x)
    torch.testing.assert_close(state.models, expected)
    torch.testing.assert_close(state.model[0], expected.mean(0))


def test_pfedmes_closed_form_on_a_quadratic(Scripted):
    """f = ½‖θ − u‖²: K steps from w contract towards (u + λ w) / (1 + λ) by 1 − a(1 + λ) each."""
    penalty, inner, k, lr, u = 3.0, 0.05, 4, 0.2, torch.tensor([1.0, -2.0], dtype=torch.float64)
    simulation = watched(Simulation(
        Quadratics(clients=1, points=[u.tolist()]), functools.partial(Mean, start=4.0), clients=1, execution=double(),
        local=PFedMe(penalty=penalty, inner_steps=k, inner_lr=inner, lr=lr, steps=3), rounds=1,
        strategy=FedAvg(server_lr=0.5),
    ))  # fmt: skip
    model = simulation.run().state.model[0]
    w = torch.full((2,), 4.0, dtype=torch.float64)
    for _ in range(3):
        target = (u + penalty * w) / (1 + penalty)
        theta = target + (1 - inner * (1 + penalty)) ** k * (w - target)
        w = w - lr * penalty * (w - theta)
    torch.testing.assert_close(simulation.clients["personal"][0], theta)
    torch.testing.assert_close(model, 0.5 * 4.0 + 0.5 * w)  # x ← (1 − β) x + β mean w


def test_per_fedavg_halves_are_disjoint_in_a_pass():
    """A client of eight samples and batch_size=2: two steps an epoch, b₁ ∪ b₂ over both is everything once."""
    simulation = simulation_of(local=PerFedAvg(batch_size=2, epochs=1))
    cohort = simulation.federation.make_cohort(np.ones((2, 5)), np.ones((2, 5)))
    chunk = simulation.trainer.batches.plan(cohort, 0).chunk(np.array([4]))
    assert chunk.sizes.tolist() == [[4, 4]]
    met = torch.cat([chunk.batch(step, 0, 1, torch.float64)["x"][0] for step in range(2)])
    assert len(torch.unique(met, dim=0)) == 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RULES)
def test_an_interrupted_run_is_the_uninterrupted_one(name, tmp_path):
    def run(folder, rounds, resume=False):
        simulation = watched(simulation_of(local=RULES[name](), strategy=FedAWE(), rounds=rounds,
                                           availability=Bernoulli(Uniform(0.6), Sine())))  # fmt: skip
        state = simulation.run(tmp_path / folder, resume=resume, tracking=QUIET).state
        return state, copy.deepcopy(simulation.clients)

    straight, kept = run("straight", 4)
    run("parts", 2)
    resumed, again = run("parts", 4, resume=True)
    assert torch.equal(resumed.models, straight.models)
    assert set(kept) == set(again)
    assert all(torch.equal(kept[n], again[n]) for n in kept)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RULES)
def test_a_replicate_gives_the_same_numbers_alone_as_in_company(name):
    """To rounding; and so it does when data answer the model, under a strategy whose clients keep models."""

    def run(seeds):
        simulation = watched(Simulation(
            GaussianMean(clients=5), Mean, clients=5, seeds=seeds, rounds=4, shift=Location(0.5, 0.3),
            local=RULES[name](epochs=None, steps=3), strategy=FedAWE(), availability=Bernoulli(Uniform(0.6), Sine()),
            execution=double(),
        ))  # fmt: skip
        return simulation.run().state.models, simulation.clients

    together, kept = run((3, 5))
    alone, own = run((5,))
    torch.testing.assert_close(together[5:], alone, rtol=0, atol=1e-12)
    assert all(torch.allclose(kept[n][5:], own[n], rtol=0, atol=1e-12) for n in own)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"alpha=1\.5"):
        APFL(alpha=1.5)
    with pytest.raises(ConfigError, match=r"alpha_every='epoch'"):
        APFL(alpha_every="epoch")
    with pytest.raises(ConfigError, match=r"keep_inner=true has no second order"):
        PerFedAvg(second_order=True, keep_inner=True)
    with pytest.raises(ConfigError, match=r"personal_lr=0\.1 beside a list"):
        APFL(lr=[0.1, 0.2], personal_lr=0.1)
    with pytest.raises(ConfigError, match="batch_size=0"):
        PerFedAvg(batch_size=0)
    with pytest.raises(ConfigError, match=r"penalty"):
        PFedMe(penalty=0)
    with pytest.raises(ConfigError, match=r"penalty=-1"):
        Ditto(penalty=-1)


def test_rates_of_replicates_move_both_models():
    """lr is a list: each replicate's v follows its own rate."""
    runs = []
    for seeds, lr in (((3, 3), [0.1, 0.3]), ((3,), 0.3)):
        simulation = watched(simulation_of(Linear, local=APFL(**LOCAL | {"lr": lr}), seeds=seeds))
        simulation.run()
        runs.append(simulation.clients["personal"])
    torch.testing.assert_close(runs[0][5:], runs[1], rtol=0, atol=1e-12)
    assert not torch.allclose(runs[0][:5], runs[1])


def test_parts_of_a_batch_have_every_so_manyth_sample_and_masks_of_their_own() -> None:
    """Dropout draws by the key of a batch."""
    parts = split_into_batches({"x": torch.arange(7), "key": torch.tensor(5)}, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 3, 6], [1, 4], [2, 5]]
    assert len({part["key"].item() for part in parts}) == 3
