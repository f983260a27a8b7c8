"""Losses, the objective, and models that do not fit their data."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modules import SETTINGS
from torch import Tensor, nn

from fedsim.core import ConfigError
from fedsim.models import LOSSES, SVHNCNN, Linear, Mean, StatelessModel
from fedsim.models.row_model import _scores_classes

X, Y = torch.zeros(2, 6), torch.tensor([0, 2])


def pair(x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
    return {"x": x} if y is None else {"x": x, "y": y}


@SETTINGS
@given(n=st.integers(1, 6), classes=st.integers(1, 5), seed=st.integers(0, 1000))
def test_cross_entropy_is_minus_the_log_probability_of_the_label(n: int, classes: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    output = torch.randn(n, classes, generator=draw, dtype=torch.float64)
    y = torch.randint(0, classes, (n,), generator=draw)
    expected = [
        math.log(sum(math.exp(v) for v in row)) - row[label]
        for row, label in zip(output.tolist(), y.tolist(), strict=True)
    ]
    torch.testing.assert_close(LOSSES["cross_entropy"](output, {"y": y}), torch.tensor(expected, dtype=torch.float64))


@SETTINGS
@given(n=st.integers(1, 6), width=st.integers(1, 5), column=st.booleans(), seed=st.integers(0, 1000))
def test_squared_losses_are_half_the_squared_distance(n: int, width: int, column: bool, seed: int) -> None:
    """To y, or to the sample itself; a target of one number may come with or without its axis."""
    draw = torch.Generator().manual_seed(seed)
    output, target = torch.randn(2, n, width, generator=draw, dtype=torch.float64)
    expected = torch.tensor(
        [
            sum((a - b) ** 2 for a, b in zip(o, y, strict=True)) / 2
            for o, y in zip(*map(Tensor.tolist, (output, target)), strict=True)
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(LOSSES["half_squared_distance"](output, {"x": target}), expected)
    y = target[:, 0] if width == 1 and column else target
    torch.testing.assert_close(LOSSES["squared"](output, {"y": y}), expected)


def test_the_objective_is_mean_loss_plus_ridge() -> None:
    """L = mean ℓ + λ/2 ‖θ‖²; weights make the mean a weighted one, so that padding (weight 0) is not heard."""
    model = StatelessModel(lambda: Linear((2,), 1), loss="squared", ridge=0.3)
    theta = torch.tensor([1.0, -2.0, 0.5])
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]), torch.tensor([1.0, 0.0, 3.0])
    batch = {"x": x, "y": y}
    parameters = model.unflatten(theta)
    losses = 0.5 * (x @ theta[:2] + theta[2] - y).square()
    ridge = 0.5 * 0.3 * float(theta.square().sum())
    output, values = model.predict(parameters, batch), list(parameters.values())
    torch.testing.assert_close(model.objective(output, batch, values), losses.mean() + ridge)
    weight = torch.tensor([1.0, 1.0, 0.0])
    torch.testing.assert_close(model.objective(output, batch | {"weight": weight}, values), losses[:2].mean() + ridge)


def test_the_gradient_of_ridge_is_lambda_theta() -> None:
    """Where the loss is flat, only the penalty pulls."""
    model = StatelessModel(lambda: Linear((2,), 2), loss=lambda output, batch: output.sum(1) * 0, ridge=0.3)
    theta = torch.randn(model.dimension, requires_grad=True)
    parameters = model.unflatten(theta)
    batch = {"x": torch.zeros(4, 2)}
    value = model.objective(model.predict(parameters, batch), batch, list(parameters.values()))
    (gradient,) = torch.autograd.grad(value, theta)
    torch.testing.assert_close(gradient, 0.3 * theta)


def test_an_unknown_loss_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"model\.loss='hinge' is unknown; choose one of cross_entropy"):
        StatelessModel(nn.Linear(2, 2), loss="hinge")


def test_a_model_that_fits_passes_the_check() -> None:
    StatelessModel(lambda: Linear((6,), 3)).check(pair(X, Y), 3, "d")
    StatelessModel(lambda: Linear((6,), 1), loss="squared").check(pair(X, Y.float()), None, "d")
    StatelessModel(lambda: Linear((6,), 2), loss="squared").check(pair(X, torch.zeros(2, 2)), None, "d")
    StatelessModel(lambda: Mean((6,)), loss="half_squared_distance").check(pair(X), None, "d")


@pytest.mark.parametrize(
    ("module", "loss", "y", "classes", "message"),
    [
        (nn.Linear(5, 3), "cross_entropy", Y, 3, r"model does not fit dataset=d, whose inputs have shape \[6\]"),
        (SVHNCNN(), "cross_entropy", Y, 10, r"model does not fit dataset=d, whose inputs have shape \[6\]"),
        (nn.Linear(6, 2), "cross_entropy", Y, 3, r"shape \[2, 2\].*dataset=d has 3 classes: expected \[2, 3\]"),
        (nn.Linear(6, 4), "cross_entropy", Y, 3, r"shape \[2, 4\].*dataset=d has 3 classes: expected \[2, 3\]"),
        (nn.Linear(6, 3), "cross_entropy", None, None, r"model\.loss needs 'y'.*dataset=d"),
        (nn.Linear(6, 1), "squared", None, None, r"model\.loss needs 'y'.*dataset=d"),
        (nn.Linear(6, 3), lambda output, batch: output, Y, 3, r"model\.loss=<lambda> returns shape \[2, 3\].*\[B\]"),
        (nn.Linear(6, 4), "squared", torch.zeros(2, 3), None, r"model\.loss does not fit.*dataset=d"),
        (nn.Linear(6, 4), "half_squared_distance", None, None, r"model\.loss does not fit.*dataset=d"),
    ],
    ids=[
        "input_width",
        "input_rank",
        "too_few_classes",
        "too_many_classes",
        "no_labels",
        "no_targets",
        "loss_per_output",
        "targets",
        "sample_as_target",
    ],
)
def test_a_mismatch_ends_before_the_first_round(
    module: nn.Module, loss: str, y: Tensor | None, classes: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StatelessModel(module, loss).check(pair(X, y), classes, "d")


@pytest.mark.parametrize(
    ("shape", "classes", "scores"), [((4, 3), 3, True), ((4, 2), 3, False), ((4, 1), 2, True), ((4, 1), 3, False)]
)
def test_one_output_scores_two_classes_and_no_more(shape: tuple[int, int], classes: int, scores: bool) -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    assert _scores_classes(torch.zeros(shape), labels, classes) == scores


@pytest.mark.parametrize(
    ("module", "loss", "y"),
    [
        (nn.Linear(6, 3), "squared", torch.zeros(2)),
        (nn.Linear(6, 1), "squared", torch.zeros(2, 3)),
        (nn.Linear(6, 1), "half_squared_distance", None),
    ],
    ids=["three_outputs_for_one_number", "one_output_for_three_numbers", "one_output_for_a_sample_of_six"],
)
def test_outputs_and_targets_of_different_size_do_not_broadcast(module: nn.Module, loss: str, y: Tensor | None) -> None:
    """½‖output − y‖² of vectors of different length does not exist; broadcasting would silently train on nonsense."""
    with pytest.raises(ConfigError, match=r"model.*dataset=d"):
        StatelessModel(module, loss).check(pair(X, y), None, "d")


def test_each_sample_of_each_client_has_its_own_loss() -> None:
    """With padding they are the same, wherever there is a sample; inputs are vectors and targets numbers."""
    model = StatelessModel(lambda: Linear((3,), 1), loss="squared")
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(2, 4, 1, generator=draw)
    batch = {"x": torch.randn(2, 4, 3, generator=draw), "y": torch.randn(2, 4, generator=draw)}
    losses = 0.5 * (output[..., 0] - batch["y"]).square()
    torch.testing.assert_close(model.client_sample_losses(output, batch), losses)
    torch.testing.assert_close(model.client_sample_losses(output, batch, torch.ones(2, 4)), losses)
