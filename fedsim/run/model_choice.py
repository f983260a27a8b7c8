"""The model that a user chose, before the data determine its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.data.datasets import Dataset
from fedsim.data.samples import ClientData
from fedsim.models import StatelessModel
from fedsim.models.fitting import fill_constructor_arguments
from fedsim.models.losses import LossFunction
from fedsim.models.probe import LARGER_BATCH_SIZE


@dataclass(frozen=True, eq=False)
class ModelChoice:
    """The user's choice of a model.

    Attributes:
        module: builds it, or is it.
        loss: per sample; None: the data set's.
        ridge: penalty.
        output: which of the things that the module returns; None where it returns a tensor.
        precision: of matrix products, see `Execution`.
    """

    module: Callable[..., nn.Module] | nn.Module
    loss: str | LossFunction | None
    ridge: float
    output: str | int | None
    precision: str

    def build(self, data: ClientData) -> StatelessModel:
        """Build the model of rows for this data set, and try it on a few samples.

        Raises:
            ConfigError: it cannot be built for them, or fails on them.
        """
        dataset, federation = data.dataset, data.federation
        _check_extra_inputs(dataset)
        loss = dataset.loss if self.loss is None else self.loss
        builder = fit_constructor_to_dataset(self.module, dataset, loss)
        pair, output = data.two_samples(federation.dtype), self.output
        built = StatelessModel(
            builder, loss, self.ridge, federation.device, federation.dtype, self.precision, pair, output
        )
        built.check(data.example_samples(LARGER_BATCH_SIZE, federation.dtype), dataset.classes, dataset.name)
        return built


@dataclass(frozen=True, eq=False)
class GivenModel:
    """A model that was built before.

    Attributes:
        model: it.
    """

    model: StatelessModel

    def build(self, data: ClientData) -> StatelessModel:
        """Return the model, whatever the data set."""
        return self.model


def _check_extra_inputs(dataset: Dataset) -> None:
    """Check that further inputs belong to both training and test samples and have distinct names."""
    name_clashes = sorted({"x", "y", "weight", "client", "row", "key", "deployed", "round"} & dataset.more.keys())
    if name_clashes:
        raise ConfigError(
            f"dataset={dataset.name}: a further input is called {name_clashes[0]!r}, which is taken; rename it"
        )
    if dataset.test_x is not None and dataset.more.keys() != dataset.test_more.keys():
        raise ConfigError(
            f"dataset={dataset.name}: training samples have the further inputs {sorted(dataset.more)}, test samples "
            f"{sorted(dataset.test_more)}; give both the same"
        )
    input_pairs = ((dataset.more, dataset.train_x), (dataset.test_more, dataset.test_x))
    for name, value, x in (
        (name, value, x) for extra_inputs, x in input_pairs if x is not None for name, value in extra_inputs.items()
    ):
        if len(value) != len(x):
            raise ConfigError(f"dataset={dataset.name}: {name} has {len(value)} entries for {len(x)} samples")


def fit_constructor_to_dataset(
    model: Callable[..., nn.Module] | nn.Module, dataset: Dataset, loss: str | LossFunction
) -> Callable[[], nn.Module] | nn.Module:
    """Pass the data set's `shape` and `classes`, and whether each position has a label, to a model's constructor, if it
    takes them and they are not set.

    Logistic loss takes one output for its two classes.
    """
    labels = dataset.train_y if dataset.classes else None
    per_position = None if labels is None else labels.dim() > 1 and not labels.is_floating_point()
    classes = 1 if loss == "logistic" else dataset.classes
    return fill_constructor_arguments(model, dataset.shape, classes, per_position, lambda: dataset.num_tokens)
