"""Every shift against its formula, sample by sample, in training (both executors) and in evaluation."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import BinaryGaussians, Dataset, Digits, GiveMeSomeCredit, HousePrices, Pricing
from fedsim.data.datasets.data_files import data_root
from fedsim.local import SGD
from fedsim.models import MLP, Linear, Mean
from fedsim.shift import Demand, Elastic, GroupMean, Location, Response, Strategic
from fedsim.shift.shift import pad_batches

M = 5


class Recording(SGD):
    """Keeps the samples it was shown (loop executor, one worker)."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def step(self, carry, batch, lr, objective):
        self.seen.append((carry["params"].clone(), batch))
        return super().step(carry, batch, lr, objective)


def blobs(classes: int = 3, features: int = 4) -> Dataset:
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(M), 9)
    x, y = torch.as_tensor(draw.standard_normal((45, features))), torch.as_tensor(draw.integers(0, classes, 45))
    loss = "logistic" if classes == 2 else "cross_entropy"
    return Dataset("blobs", x, y, classes=classes, owners=torch.as_tensor(owners), loss=loss)


def regression(features: int = 3) -> Dataset:
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((45, features))), torch.as_tensor(draw.standard_normal(45))
    return Dataset("regression", x, y, loss="squared", owners=torch.arange(M).repeat_interleave(9))


double = functools.partial(Execution, dtype="float64")


def simulation_of(dataset, model, shift, rule=None, **options) -> Simulation:
    rule = rule or SGD(lr=0.1, steps=3, batch_size=4)
    return Simulation(dataset, model, clients=M, shift=shift, local=rule, **{"execution": double()} | options)


def weights(theta: np.ndarray, outputs: int, features: int) -> np.ndarray:
    """W [C, n] of a linear layer, whose weight comes before its bias."""
    return theta[: outputs * features].reshape(outputs, features)


def strategic_binary(x, y, theta, i, shift):
    moved = x.copy()
    for f in (0, 2):
        moved[:, f] -= shift.epsilons[i].item() * weights(theta, 1, 4)[0, f]
    return moved, y


def strategic_classes(x, y, theta, i, shift):
    w = weights(theta, 3, 4)
    return x - shift.epsilons[i].item() * (w[2] - (w[0] + w[1]) / 2), y


def group_mean(x, y, theta, i, shift):
    w = weights(theta, 2, 4) if len(theta) > 5 else np.stack([np.zeros(4), weights(theta, 1, 4)[0]])
    return np.stack([xj - shift.gammas[i, yj].item() * (w[1] - w[0]) for xj, yj in zip(x, y, strict=True)]), y


CASES = {
    "location": (lambda: Pricing(M, 4), Mean, lambda: Location(0.3, 0.2), lambda x, y, theta, i, s: (
        x + s.epsilons[i].item() * theta, y)),
    "demand": (lambda: Pricing(M, 4), Mean, lambda: Demand(1.5, 0.7), lambda x, y, theta, i, s: (
        x - s.gammas[i].item() * theta, y)),
    "response": (regression, Linear, lambda: Response(1.5, 0.7), lambda x, y, theta, i, s: (
        x, np.array([yj - s.gammas[i].item() * sum(theta[:3] * xj) for xj, yj in zip(x, y, strict=True)]))),
    "strategic, logistic": (lambda: blobs(2), Linear, lambda: Strategic(0.5, 0.3, features=[0, 2]), strategic_binary),
    "strategic, three classes": (blobs, Linear, lambda: Strategic(0.5, 0.3, target=2), strategic_classes),
    "group_mean, logistic": (lambda: blobs(2), Linear, lambda: GroupMean([0.1, 2.0], [0.1, 0.5]), group_mean),
    "group_mean, softmax": (lambda: blobs(2), functools.partial(Linear, classes=2), lambda: GroupMean([0.1, 2.0], 0.1),
                            group_mean),
}  # fmt: skip


def start_of(simulation: Simulation, rows: int) -> torch.Tensor:
    return torch.sin(torch.arange(rows * simulation.model.dimension) + 1.0).double().reshape(rows, -1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("deploy", ["step", "round"])
@pytest.mark.parametrize("case", CASES)
def test_a_rule_meets_samples_moved_by_the_formula(case, deploy):
    """The base batch of every client and step, moved by hand, is what the rule is shown; both executors agree."""
    build, model, make, formula = CASES[case]
    loss = "cross_entropy" if "softmax" in case else None
    rule, shift = Recording(lr=0.1, steps=3, batch_size=4), make()
    shift.deploy = deploy
    simulation = simulation_of(build(), model, shift, rule, execution=double("loop", workers=1), loss=loss)
    cohort = simulation.federation.make_cohort(np.ones((1, M)), np.ones((1, M)))
    start = start_of(simulation, M)
    deployed = torch.cos(start[:1])
    rule, shift = simulation.trainer.local_rule, simulation.shift
    rule.seen.clear()
    end = simulation.trainer.run(start, cohort, 1, deployed).end
    base = simulation.trainer.batches.plan(cohort, 1)
    assert len(rule.seen) == 3 * M
    for number, (params, met) in enumerate(rule.seen):
        client, step = divmod(number, 3)
        plain = base.chunk(np.array([client])).batch(step, 0, 1, torch.float64)
        theta = (params if deploy == "step" else deployed[0]).numpy()
        y = plain["y"][0].numpy() if "y" in plain else None
        x, y = formula(plain["x"][0].numpy(), y, theta, client, shift)
        np.testing.assert_allclose(met["x"], x, atol=1e-12)
        if y is not None:
            np.testing.assert_allclose(met["y"], y, atol=1e-12)
        assert not np.allclose(met["x"], plain["x"][0]) or not np.allclose(met["y"], plain["y"][0])
    vmapped = simulation_of(build(), model, shift, execution=double("vmap", chunk=2), loss=loss)
    torch.testing.assert_close(vmapped.trainer.run(start, cohort, 1, deployed).end, end, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", [name for name in CASES if "softmax" not in name])
def test_evaluation_looks_at_samples_that_answer_the_evaluated_and_the_deployed_model(case):
    """performative_loss and decoupled_loss by hand: every stored sample, or the stream's own evaluation sample."""
    build, model, make, formula = CASES[case]
    shift = make()
    simulation = simulation_of(build(), model, shift, evaluation=EvaluationOptions(client_samples=9))
    shift = simulation.shift
    evaluator, theta = simulation.evaluator, start_of(simulation, 2)
    found = evaluator(theta[:1], theta[1:]).metrics
    batch = evaluator._client_batch(evaluator.samples, slice(None), 0)
    for name, answered in (("performative_loss", theta[0]), ("decoupled_loss", theta[1])):
        losses = []
        for i in range(M):
            y = batch["y"][0, i].numpy() if "y" in batch else None
            x, y = formula(batch["x"][0, i].numpy(), y, answered.numpy(), i, shift)
            moved = {"x": torch.as_tensor(x)} | ({} if y is None else {"y": torch.as_tensor(y)})
            losses.append(simulation.model.loss(simulation.model.evaluate(theta[0], moved["x"]), moved).mean())
        assert found[name][0] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-10)
    assert found["train_loss"] == found["performative_loss"]
    assert found["decoupled_loss"] != pytest.approx(found["performative_loss"])


def test_the_performative_risk_counts_the_ridge_and_is_least_where_theta_po_is():
    """θ^PO of house prices with ridge λ, in one dimension: a(1+γ)E[x²] / ((1+γ)² E[x²] + λ)."""
    a, gamma, ridge, moment = 5 / 3, 1.5, 10 / 3, 1 + 25 / 9
    simulation = simulation_of(HousePrices(M), functools.partial(Linear, bias=False), Response(gamma), ridge=ridge)
    optimum = a * (1 + gamma) * moment / ((1 + gamma) ** 2 * moment + ridge)
    theta = torch.tensor([[optimum], [optimum - 0.01], [optimum + 0.01]], dtype=torch.float64)
    found = [simulation.evaluator(row[None]).metrics for row in theta]
    for metrics, (value,) in zip(found, theta.tolist(), strict=True):
        risk = 0.5 * (((1 + gamma) * value - a) ** 2 * moment + 2.0333**2) + 0.5 * ridge * value**2
        assert metrics["performative_risk"][0] == pytest.approx(risk, abs=1e-9)
    risks = [metrics["performative_risk"][0] for metrics in found]
    assert risks[0] < min(risks[1:])


def test_the_decoupled_loss_of_a_run_is_on_data_that_answered_the_model_before_the_round(play):
    shift = Location(0.5, 0.1)
    options = {"loss": "half_squared_distance", "rounds": 3, "evaluation": EvaluationOptions(every=1)}
    simulation = simulation_of(Pricing(M, 2), Mean, shift, **options)
    played = list(play(simulation))
    history = simulation.run().history
    for row, before in zip(history[1:], played, strict=True):
        fresh = simulation.evaluator(before.after.model, before.before.model).metrics
        assert row["decoupled_loss"] == pytest.approx(fresh["decoupled_loss"][0], abs=1e-12)
    assert history[0]["decoupled_loss"] == history[0]["performative_loss"]


def test_sensitivities_lie_in_their_range_and_are_those_given():
    spread = simulation_of(Pricing(M, 2), Mean, Demand(2.0, 1.0)).shift
    assert ((spread.gammas - 2.0).abs() <= 1.0).all()
    assert len(spread.gammas.unique()) == M
    again = simulation_of(Pricing(M, 2), Mean, Demand(2.0, 1.0), seeds=(7, 8)).shift
    assert torch.equal(again.gammas, spread.gammas)
    other = simulation_of(Pricing(M, 2), Mean, Demand(2.0, 1.0, seed=1)).shift
    assert not torch.equal(other.gammas, spread.gammas)
    given = simulation_of(Pricing(M, 2), Mean, Demand([1.0, 2.0, 3.0, 4.0, 5.0], 0.0)).shift
    assert given.gammas.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_images_move_on_the_chosen_pixels_only():
    shift = Strategic(0.7, 0.0, features=[10, 63], target=3)
    simulation = simulation_of(Digits(), Linear, shift)
    shift = simulation.shift
    theta = start_of(simulation, 1)[0]
    x = torch.rand(6, 1, 8, 8, dtype=torch.float64)
    moved = shift({"x": x, "client": torch.tensor(2)}, theta)["x"]
    w = theta[:640].reshape(10, 64)
    for pixel in range(64):
        step = 0.7 * (w[3, pixel] - w[[0, 1, 2, 4, 5, 6, 7, 8, 9], pixel].mean()) if pixel in (10, 63) else 0.0
        torch.testing.assert_close(moved.flatten(1)[:, pixel], x.flatten(1)[:, pixel] - step)


def people() -> Dataset:
    data = blobs(2)
    data.feature_names = ("age", "income", "savings", "debts")
    return data


@pytest.mark.parametrize("shift", [Strategic, Elastic, lambda features: GroupMean([1.0, 2.0], 0.0, features)])
def test_features_are_named_or_numbered(shift):
    named = simulation_of(people(), Linear, shift(features=["debts", "income"])).shift
    numbered = simulation_of(blobs(2), Linear, shift(features=[1, 3])).shift
    assert named.shifted_columns.tolist() == numbered.shifted_columns.tolist() == [1, 3]


@pytest.mark.skipif(not (data_root(None) / "give_me_some_credit").exists(), reason="no credit data")
def test_credit_applicants_move_what_they_can_and_the_base_sample_each_time():
    """Three features, by −ε_i θ_S; a second deployment starts from the base sample again."""
    shift = Strategic(1.0, 0.1)
    simulation = simulation_of(GiveMeSomeCredit(), Linear, shift)
    shift = simulation.shift
    theta = start_of(simulation, 1)[0]
    base = {"x": simulation.dataset.train_x[:50].double(), "client": torch.tensor(1)}
    change = shift(base, theta)["x"] - base["x"]
    expected = torch.zeros(11, dtype=torch.float64)
    expected[[0, 5, 7]] = -shift.epsilons[1] * theta[[0, 5, 7]]
    torch.testing.assert_close(change, expected[:10].expand(50, -1))
    assert torch.equal(shift(base, 2 * theta)["x"] - base["x"], shift(base, 2 * theta)["x"] - base["x"])
    torch.testing.assert_close(shift(base, 2 * theta)["x"] - base["x"], 2 * change)


class Squashed(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(shape[0], classes)

    def forward(self, x):
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: simulation_of(blobs(), MLP, Strategic()), "shift=strategic moves inputs along.*model=linear"),
        (lambda: simulation_of(blobs(), Squashed, GroupMean([1.0] * 3, 0.0)), "shift=group_mean moves inputs along"),
        (lambda: simulation_of(blobs(), Linear, GroupMean()), r"shift\.gamma=\[0\.02, 3\.0\] has 2.*blobs has 3"),
        (lambda: simulation_of(Pricing(M), Mean, GroupMean()), "shift=group_mean needs class labels"),
        (lambda: simulation_of(blobs(), Linear, Strategic(features=[4])), r"shift\.features names feature 4.*to 3"),
        (lambda: simulation_of(blobs(), Linear, Strategic(features=["age"])), r"features of .*blobs have no names"),
        (lambda: simulation_of(people(), Linear, Strategic(features=["aje"])), r"names 'aje'.*did you mean 'age'"),
        (lambda: simulation_of(blobs(), Linear, Strategic(features=[])), r"shift\.features=\[\] moves nothing"),
        (lambda: simulation_of(blobs(), Linear, Strategic(target=3)), r"shift\.target=3 is not a class"),
        (lambda: simulation_of(blobs(), Linear, Demand()), "shift=demand adds the model's parameters.*use model=mean"),
        (lambda: simulation_of(blobs(), Linear, Response()), "shift=response moves a real-valued target"),
        (lambda: simulation_of(HousePrices(M), MLP, Response()), "shift=response moves inputs along.*model=linear"),
        (lambda: simulation_of(Pricing(M), Mean, Demand([1.0])), r"shift\.gamma has 1 entries, but clients=5"),
        (lambda: simulation_of(BinaryGaussians(M), Linear, Strategic(box=[1, 1])), r"box=\[1, 1\]"),
        (lambda: simulation_of(BinaryGaussians(M), Linear, Strategic(references="yes")), r"references='yes'"),
    ],
)  # fmt: skip
def test_what_cannot_be_shifted_is_refused_in_one_sentence(build, message):
    with pytest.raises(ConfigError, match=message) as refused:
        build()
    assert "\n" not in str(refused.value)


def test_a_single_batch_is_padded_to_itself() -> None:
    batch = {"x": torch.arange(6.0).reshape(3, 2), "y": torch.arange(3)}
    joined = pad_batches([batch])
    assert joined.keys() == {"x", "y", "weight"}
    assert torch.equal(joined["x"][0], batch["x"])
    assert joined["weight"].tolist() == [[1, 1, 1]]
