"""The outputs of a model's first frozen layers, computed once and stored in place of a data set's inputs.

Local steps and evaluation then compute the other layers alone (`fedsim.models.frozen_prefix`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedsim.data.datasets import Dataset
from fedsim.evaluation.calibration import CALIBRATED
from fedsim.local.performative import PFL
from fedsim.models import StatelessModel
from fedsim.models.features import FeatureLayer
from fedsim.models.frozen_prefix import FrozenPrefix
from fedsim.models.losses import LOSSES, UNLABELLED_LOSSES
from fedsim.models.probe import LARGER_BATCH_SIZE
from fedsim.run.contracts import contains_user_code
from fedsim.run.parts import Parts
from fedsim.run.population import Population

BATCH_SIZE = 256  # samples that go through the frozen layers together
PROBE_SAMPLES = 4  # number of samples on which they are tried
MEMORY_SHARE = 0.5  # share of the free memory that their outputs may take
log = logging.getLogger(__name__)


def without_frozen_layers(model: StatelessModel, components: Parts, population: Population) -> StatelessModel:
    """Return the model without its first frozen layers, whose outputs replace the inputs of the run's data set. Return
    the model as it is, and log why, if that would change results or if there is nothing to gain.

    Args:
        model: of the run, checked on its data.
        components: of the run.
        population: whose data set is changed.
    """
    dataset = population.dataset
    reason = input_change_reason(model, components, population)
    if reason is None:
        drop_keys = {key for key in model.dropout_keys if is_dropout_active(model.training_module, key)}
        prefix = FrozenPrefix.find_longest(
            model.training_module,
            model.evaluation_module,
            population.data.example_samples(PROBE_SAMPLES, model.dtype)["x"],
            lambda name: name in model.statistics or name in drop_keys,
        )
        reason = why_frozen_layers_stay(model, components, population, prefix)
    if reason is not None:
        log.info("trainer.cache_frozen: frozen layers are computed in every step, since %s", reason)
        return model
    train_x = _frozen_layer_outputs(model, prefix, model.training_module, dataset, dataset.train_x)
    if dataset.test_x is not None:
        dataset.test_x = _frozen_layer_outputs(model, prefix, model.evaluation_module, dataset, dataset.test_x)
    dataset.train_x = train_x
    log.info(
        "trainer.cache_frozen: %s of %s computed once; inputs of shape %s, %.0f MB, replace those of dataset=%s",
        "layer " + prefix.stages[0] if len(prefix.stages) == 1 else f"layers {prefix.stages[0]} to {prefix.stages[-1]}",
        type(model.training_module).__name__, list(dataset.shape), _dataset_bytes(dataset) / 1e6, dataset.name,
    )  # fmt: skip
    suffix = model.without_prefix(prefix, population.data.two_samples(model.dtype))
    suffix.check(population.data.example_samples(LARGER_BATCH_SIZE, model.dtype), dataset.classes, dataset.name)
    return suffix


def input_change_reason(model: StatelessModel, components: Parts, population: Population) -> str | None:
    """Return which part of a run changes or reads the inputs of samples; None if no part does."""
    dataset, local_rule, attack = population.dataset, components.local, components.attack
    kind = type(dataset)
    own_reading = kind.inputs is not Dataset.inputs or kind.prepare is not Dataset.prepare
    active_parts = {
        "shift": components.shift.active,
        "drift": components.drift.active,
        "contamination": components.contamination.active,
        "attack": attack is not None and attack.active and contains_user_code(attack),
        "capacity": components.capacity.active,
        "local": isinstance(local_rule, PFL) or contains_user_code(local_rule),
    }
    active_part = next((name for name, is_active in active_parts.items() if is_active), None)
    part_text = f"{active_part}={type(getattr(components, active_part)).__name__}" if active_part else ""
    reasons = {
        f"dataset={dataset.name} draws its samples anew": dataset.stream,
        f"dataset={dataset.name} stays on disk": dataset.memory_mapped,
        f"dataset={dataset.name} reads or prepares its inputs itself": own_reading,
        f"dataset={dataset.name} has further inputs ({', '.join(dataset.more)})": bool(dataset.more),
        "the clients hold a part of the data set, or all of it together": dataset is not components.dataset,
        "dataset.augment changes images in every step": dataset.augment is not None and dataset.augment.active,
        "the partition changes the inputs of each client": bool(population.tables and population.tables[0].skew),
        f"{part_text} may change or read inputs": bool(active_part),
        "the loss may read inputs": model.loss not in LOSSES.values() or model.loss in UNLABELLED_LOSSES,
        f"trainer.precision={model.precision} rounds them otherwise in training": model.precision != "full",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_frozen_layers_stay(
    model: StatelessModel, components: Parts, population: Population, prefix: FrozenPrefix
) -> str | None:
    """Return why these layers must stay in the model; None if they can be left out."""
    name = type(model.training_module).__name__
    if not prefix.stages:
        return (
            f"no frozen layer of {name} comes before the trained ones, computes with the input alone and gives each "
            "sample the same output in training and evaluation, without dropout or batch statistics"
        )
    local_rule = components.local
    if getattr(local_rule, "uses_features", False) or CALIBRATED in components.evaluation.models:
        layer = FeatureLayer.from_layer_name(
            model.evaluation_module, getattr(local_rule, "features", None), "local.features"
        )
        if prefix.contains_layer(model.training_module, layer.name):
            return f"features are {layer.describe()}, which is frozen"
    dataset = population.dataset
    sample = next(_batches(dataset, dataset.train_x[:1], model))
    numbers = sum(output.numel() for output in prefix.outputs(model.training_module, [sample]))
    samples = len(dataset.train_x) + (0 if dataset.test_x is None else len(dataset.test_x))
    needed, free = numbers * samples * model.dtype.itemsize, free_memory_bytes(model.device)
    if needed > MEMORY_SHARE * free:
        return f"their outputs take {needed / 1e9:.1f} GB, and {model.device} has {free / 1e9:.1f} GB of free memory"
    return None


def is_dropout_active(module: nn.Module, key: str) -> bool:
    """Return whether the dropout layer with this key changes its inputs."""
    return bool(getattr(module.get_submodule(key.rpartition(".")[0]), "p", 1.0))


def free_memory_bytes(device: torch.device) -> float:
    """Return the free memory of the device in bytes; infinity if it is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _batches(dataset: Dataset, x: Tensor, model: StatelessModel) -> Iterator[Tensor]:
    """Return stored inputs as the model receives them, in batches."""
    for batch in x.split(BATCH_SIZE):
        yield dataset.prepare(batch.to(model.device), model.dtype)


def _frozen_layer_outputs(
    model: StatelessModel, prefix: FrozenPrefix, module: nn.Module, dataset: Dataset, x: Tensor
) -> Tensor:
    """Return the outputs [N, …] of the frozen layers for stored inputs."""
    outputs: Tensor | None = None
    for number, output in enumerate(prefix.outputs(module, _batches(dataset, x, model))):
        if outputs is None:
            outputs = output.new_empty(len(x), *output.shape[1:])
        outputs[number * BATCH_SIZE : number * BATCH_SIZE + len(output)] = output
    assert outputs is not None
    return outputs


def _dataset_bytes(dataset: Dataset) -> int:
    return dataset.train_x.nbytes + (0 if dataset.test_x is None else dataset.test_x.nbytes)
