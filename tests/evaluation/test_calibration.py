"""The calibrated last layer (CCVR) beside the paper's formulas in a loop over clients, and the Bayes classifier."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.contamination import Gaussian
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.data.drift import Linear as LinearDrift
from fedsim.evaluation import calibration
from fedsim.evaluation.calibration import ClassifierCalibration, ClassStatistics, train_head, virtual_features
from fedsim.local import SGD
from fedsim.models import MLP, Linear, Mean

SIZES = (3, 1, 7, 4, 9, 2)
CLASSES, INPUTS = 3, 4


def samples(count: int, sizes: tuple[int, ...] = SIZES) -> Dataset:
    draw = np.random.default_rng(3)

    def pairs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = draw.integers(0, CLASSES, n)
        return torch.as_tensor(draw.normal(size=(n, INPUTS)) + y[:, None]), torch.as_tensor(y)

    owners = torch.as_tensor(np.repeat(np.arange(len(sizes)), sizes))
    return Dataset("samples", *pairs(sum(sizes)), *pairs(count), classes=CLASSES, owners=owners)


def simulation_of(dataset: Dataset, model=MLP, of=("global", "calibrated"), **options) -> Simulation:
    options = {"execution": Execution(dtype="float64", executor="loop"), "clients": len(SIZES)} | options
    return Simulation(
        dataset, model, local=SGD(lr=0.1, steps=1, batch_size=4), rounds=2,
        evaluation=EvaluationOptions(every=1, of=list(of)), **options,
    )  # fmt: skip


def hidden_mlp(shape: tuple[int, ...], classes: int) -> MLP:
    return MLP(shape, classes, hidden=(5,))


@pytest.mark.parametrize("samples_per_pass", [4000, 10])
def test_mean_and_covariance_are_the_combination_of_those_of_the_clients(monkeypatch, samples_per_pass: int) -> None:
    """Equation 3 of the paper in a loop over clients that compute their own; both are those of the pooled samples."""
    monkeypatch.setattr(calibration, "SAMPLES_PER_PASS", samples_per_pass)
    simulation = simulation_of(samples(5), hidden_mlp, seeds=(0, 1))
    models = torch.randn(2, simulation.model.dimension, generator=torch.Generator().manual_seed(1)).double()
    statistics = simulation.evaluated_models.calibration.statistics(models[1], replicate=1)
    parameters = {name: value.numpy() for name, value in simulation.model.unflatten(models[1]).items()}
    (w, _), (b, _) = ([value for name, value in parameters.items() if name.endswith(end)] for end in ("weight", "bias"))
    x, y = simulation.dataset.train_x.numpy(), simulation.dataset.train_y.numpy()
    features = np.maximum(x @ w.T + b, 0)
    bounds = np.cumsum([0, *SIZES])
    for c in range(CLASSES):
        of_clients = [features[first:last][y[first:last] == c] for first, last in itertools.pairwise(bounds)]
        of_clients = [z for z in of_clients if len(z)]
        n = sum(map(len, of_clients))
        mean = sum(len(z) * z.mean(0) for z in of_clients) / n
        within = sum((len(z) - 1) / (n - 1) * np.cov(z.T) for z in of_clients if len(z) > 1)
        between = sum(len(z) / (n - 1) * np.outer(z.mean(0), z.mean(0)) for z in of_clients)
        covariance = within + between - n / (n - 1) * np.outer(mean, mean)
        assert statistics.counts[c] == n
        np.testing.assert_allclose(statistics.means[c].numpy(), mean, atol=1e-10)
        np.testing.assert_allclose(statistics.covariances[c].numpy(), covariance, atol=1e-10)
        np.testing.assert_allclose(covariance, np.cov(features[y == c].T), atol=1e-10)


def gaussian_features(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features and labels of three classes with unit covariance, and the means of the classes."""
    draw = torch.Generator().manual_seed(0)
    means = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]]).double()
    labels = torch.randint(CLASSES, (count,), generator=draw)
    return means[labels] + torch.randn(count, 2, generator=draw).double(), labels, means


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    return float((scores.argmax(1) == labels).double().mean())


def test_on_gaussian_features_a_biased_head_becomes_nearly_the_bayes_classifier() -> None:
    """With unit covariances and equal fractions Bayes' rule is the nearest mean, which is a linear head."""
    features, labels, means = gaussian_features(6000)
    statistics = ClassStatistics.zeros(CLASSES, 2, features.device)
    statistics.add(features[:3000], labels[:3000])
    biased_head = [torch.zeros(CLASSES, 2).double(), torch.tensor([5.0, 0.0, 0.0]).double()]
    head = train_head(biased_head, *virtual_features(statistics, seed=0))
    unseen, of_unseen = features[3000:], labels[3000:]
    bayes = accuracy(-torch.cdist(unseen, means), of_unseen)
    calibrated = accuracy(nn.functional.linear(unseen, *head), of_unseen)
    before = accuracy(nn.functional.linear(unseen, *biased_head), of_unseen)
    assert before < 0.4 < 0.75 < bayes
    weight, bias = (tensor.requires_grad_() for tensor in head)
    drawn, of_drawn = virtual_features(statistics, seed=0)
    loss = (
        nn.functional.cross_entropy(drawn @ weight.T + bias, of_drawn) + calibration.RIDGE / 2 * weight.square().sum()
    )
    assert all(gradient.norm() < 1e-3 for gradient in torch.autograd.grad(loss, [weight, bias]))
    # 1,500 virtual features: the excess error is of order 6 parameters / 1,500; five σ of 3,000 samples are 0.04
    assert abs(calibrated - bayes) < 0.02


def test_virtual_features_have_the_moments_of_the_class_and_are_those_of_the_seed() -> None:
    features, labels, _ = gaussian_features(200)
    features[:, 1] = 2 * features[:, 0]  # a singular covariance
    statistics = ClassStatistics.zeros(CLASSES + 1, 2, features.device)  # of one class there are no samples
    statistics.add(features, labels)
    drawn, of = virtual_features(statistics, seed=1, count=4000)
    assert of.bincount().tolist() == [4000] * CLASSES
    for c in range(CLASSES):
        covariance = statistics.covariances[c]
        assert torch.allclose(drawn[of == c, 1], 2 * drawn[of == c, 0], atol=1e-5)
        error = 5 * (covariance.diagonal() / 4000).sqrt()
        assert ((drawn[of == c].mean(0) - statistics.means[c]).abs() < error).all()
        assert torch.allclose(drawn[of == c].T.cov(), covariance, rtol=5 * (2 / 4000) ** 0.5)
    assert torch.equal(virtual_features(statistics, seed=1, count=4000)[0], drawn)
    assert not torch.equal(virtual_features(statistics, seed=2, count=4000)[0], drawn)


@pytest.mark.slow
def test_only_the_last_layer_changes_training_does_not_and_replicates_are_those_of_each_alone() -> None:
    dataset = samples(40)
    both = simulation_of(dataset, hidden_mlp, seeds=(0, 1))
    result, plain = both.run(), simulation_of(dataset, hidden_mlp, of=("global",), seeds=(0, 1)).run()
    assert torch.equal(result.state.model, plain.state.model)
    calibrated = both.evaluated_models.calibration(result.state.model)
    changed = (calibrated != result.state.model).any(0)
    head = 5 * CLASSES + CLASSES
    assert not changed[:-head].any()
    assert changed[-head:].all()
    last = {row["seed"]: row for row in result.history if row["round"] == 2}
    metrics = both.evaluator(calibrated).metrics
    for name in ("test_accuracy", "test_loss", "train_accuracy"):
        np.testing.assert_allclose([last[r][f"calibrated_{name}"] for r in (0, 1)], metrics[name])
    alone = simulation_of(dataset, hidden_mlp, seeds=(1,))
    torch.testing.assert_close(alone.evaluated_models.calibration(result.state.model[1:]), calibrated[1:])


@pytest.mark.parametrize(
    ("dataset", "model", "options", "message"),
    [
        (GaussianMean(clients=6), Mean, {}, "dataset=gaussian_mean has no class label for each sample"),
        (samples(5), hidden_mlp, {"loss": nn.functional.cross_entropy}, "model.loss is not cross_entropy"),
        (samples(5), hidden_mlp, {"drift": LinearDrift(0.1)}, "stored samples that do not change"),
        (samples(5), hidden_mlp, {"contamination": Gaussian(fraction=0.5)}, "a contamination or an attack on labels"),
        (samples(5), lambda shape, classes: nn.Bilinear(4, 4, 3), {}, "before a last linear layer that is trained"),
    ],
    ids=["no labels", "loss", "drift", "contamination", "no linear layer"],
)
def test_what_has_no_classifier_or_fixed_samples_is_refused(dataset, model, options, message) -> None:
    if "linear" in message:
        model = NoLinearLayer
    with pytest.raises(ConfigError, match=message):
        simulation_of(dataset, model, **options)


class NoLinearLayer(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, classes, shape[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, None])[..., 0]


class TwiceScaled(nn.Module):
    """Outputs that are not those of the last linear layer."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.layer(x)


def test_outputs_must_be_those_of_the_last_linear_layer() -> None:
    with pytest.raises(
        ConfigError, match="needs a model whose outputs are those of its last linear layer, and 'layer'"
    ):
        simulation_of(samples(5), TwiceScaled)
    assert isinstance(simulation_of(samples(5), Linear).evaluated_models.calibration, ClassifierCalibration)


def test_each_replicate_gets_the_head_that_its_own_samples_and_seed_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def quickly(head, features, labels):
        return [parameter + (labels + 1).to(features) @ features.sum(1) for parameter in head]

    monkeypatch.setattr(calibration, "train_head", quickly)
    simulation = simulation_of(samples(5), hidden_mlp, seeds=(4, 1))
    models = torch.randn(2, simulation.model.dimension, generator=torch.Generator().manual_seed(1)).double()
    calibrate = simulation.evaluated_models.calibration
    calibrated = calibrate(models)
    for replicate, seed in enumerate((4, 1)):
        before, after = (simulation.model.unflatten(rows[replicate]) for rows in (models, calibrated))
        *hidden, weight, bias = before
        assert all(torch.equal(after[name], before[name]) for name in hidden)
        drawn = virtual_features(calibrate.statistics(models[replicate], replicate), seed)
        head = quickly([before[weight], before[bias]], *drawn)
        for name, expected in zip((weight, bias), head, strict=True):
            torch.testing.assert_close(after[name], expected)
