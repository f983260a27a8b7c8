"""The direction in input space along which people change their features in response to a linear model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.data.datasets import Dataset
from fedsim.models import StatelessModel


class ResponseDirection:
    """θ ↦ the gradient of the score that people reduce, on the features that they can change; zero elsewhere.

    For one output the score is that output, wᵀx + b, and the direction w (the papers' θ without its bias). For C
    outputs it is the target's output minus the mean of the others, W_target − mean_{c≠target} W_c: for two classes the
    log-odds of softmax, so that both parameterisations of logistic regression give the same reaction. x − ε·direction
    is the best response to that score at quadratic cost ‖x' − x‖² / 2ε (profl §6), which is why the model must be
    linear in x.

    Args:
        shift: what the command line calls it, for messages.
        dataset: whose inputs are moved.
        model: one `nn.Linear` on the flattened input.
        features: names of the features that move, or their positions in the flattened input; None for the data set's
            own strategic ones, or all.
        target: the class whose score is lowered, of several outputs.

    Attributes:
        shifted_columns: positions of the features that move.
    """

    def __init__(
        self,
        shift: str,
        dataset: Dataset,
        model: StatelessModel,
        features: Sequence[int | str] | None = None,
        target: int = 1,
    ) -> None:
        self.shape, size = dataset.shape, math.prod(dataset.shape)
        name, layer = _single_linear_layer(model)
        if layer is None or layer.in_features != size or not _is_linear_model(model, layer, name, dataset.shape):
            raise ConfigError(
                f"shift={shift} moves inputs along the weights of a model that is linear in them, which this model is "
                f"not on dataset={dataset.name}; use model=linear"
            )
        self.outputs = layer.out_features
        if target >= self.outputs > 1:
            raise ConfigError(
                f"shift.target={target} is not a class of dataset={dataset.name}, which has {self.outputs}"
            )
        weight = f"{name}.weight" if name else "weight"
        self._start = sum(math.prod(s) for s in list(model.shapes.values())[: list(model.shapes).index(weight)])
        self._stop = self._start + self.outputs * size
        output_mix = torch.full((self.outputs,), -1.0 / max(self.outputs - 1, 1), dtype=torch.float64)
        output_mix[target if self.outputs > 1 else 0] = 1.0
        self._mix = output_mix.to(model.device)
        self._mask = _feature_mask(dataset, features if features is not None else dataset.strategic).to(model.device)
        self.shifted_columns = torch.nonzero(self._mask)[:, 0]

    def __call__(self, theta: Tensor) -> Tensor:
        """[d] → [*shape]."""
        weight = theta[self._start : self._stop].reshape(self.outputs, -1)
        return ((self._mix.to(theta.dtype) @ weight) * self._mask.to(theta.dtype)).reshape(self.shape)


def _single_linear_layer(model: StatelessModel) -> tuple[str, nn.Linear | None]:
    """The one linear layer that holds every parameter, and its name."""
    for name, module in model.evaluation_module.named_modules():
        if isinstance(module, nn.Linear) and {p.rpartition(".")[0] for p in model.shapes} == {name}:
            return name, module
    return "", None


def _is_linear_model(model: StatelessModel, layer: nn.Linear, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether the output is that of this layer alone, tried on arbitrary inputs and parameters."""
    count = torch.arange(model.dimension + 2 * layer.in_features, device=model.device, dtype=model.dtype)
    row, x = torch.sin(count + 1).split([model.dimension, 2 * layer.in_features])
    x = x.reshape(2, *shape)
    parameters = model.unflatten(row)
    bias = parameters.get(f"{name}.bias" if name else "bias")
    expected = x.flatten(1) @ parameters[f"{name}.weight" if name else "weight"].T + (0 if bias is None else bias)
    output = model.evaluate(row, x)
    return output.shape == expected.shape and torch.allclose(output, expected, atol=1e-4)


def _feature_mask(dataset: Dataset, features: Sequence[int | str] | None) -> Tensor:
    """[size] 1 for the features that move."""
    size = math.prod(dataset.shape)
    if features is None:
        return torch.ones(size, dtype=torch.float64)
    mask = torch.zeros(size, dtype=torch.float64)
    mask[list(dataset.feature_indices(features, "shift.features"))] = 1
    if not mask.any():
        raise ConfigError("shift.features=[] moves nothing; name features, or use shift=none")
    return mask
