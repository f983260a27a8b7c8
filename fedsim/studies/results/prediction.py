"""Prediction with a model of a run folder: module and preprocessing are rebuilt from the run's configuration."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.core import targets
from fedsim.core.errors import ConfigError
from fedsim.data.datasets import Dataset, Table, TextTable
from fedsim.data.datasets.own.text_table import PADDING
from fedsim.models import StatelessModel
from fedsim.models.kinds import LOSS_KIND, MODEL_KIND
from fedsim.models.losses import LossFunction, correct_share
from fedsim.run.model_choice import fit_constructor_to_dataset

BATCH_SIZE = 1000  # samples of one forward pass
MODEL_SETTINGS_NOT_ARGUMENTS = ("loss", "ridge", "output")  # settings of the model that its class does not take


class Predictor:
    """A predictor that calls the run's module on inputs preprocessed as in the run.

    Args:
        settings: `model` of config.yaml. Its classes are built: call this where the packages are trusted.
        dataset: the data set of the run.

    Raises:
        ConfigError: the module cannot be built, or the data set keeps no samples.
    """

    def __init__(self, settings: Mapping[str, Any], dataset: Dataset) -> None:
        self.dataset = dataset
        node = {name: value for name, value in settings.items() if name not in MODEL_SETTINGS_NOT_ARGUMENTS}
        model_part = targets.parse_object("model", node, MODEL_KIND)
        loss = _loss_function(settings.get("loss"), dataset)
        constructor = functools.partial(model_part.factory, **{name: node[name] for name in model_part.arguments})
        build = fit_constructor_to_dataset(constructor, dataset, loss)
        if len(dataset.train_x) > 1:
            samples = self._prepared_batch(dataset.train_x[:2], dataset.train_y, dataset.more)
        elif dataset.test_x is not None:
            samples = self._prepared_batch(dataset.test_x[:2], dataset.test_y, dataset.test_more)
        else:
            raise ConfigError(
                f"dataset={dataset.name} draws its samples and keeps none to try the module on; load run.model() into "
                "a module of your own"
            )
        self.model = StatelessModel(build, loss, pair=samples, output=settings.get("output"))
        self.model.check(samples, dataset.classes, dataset.name)

    def module(self, state: Mapping[str, Tensor]) -> nn.Module:
        """Return the module with this state, in evaluation mode."""
        module = self.model.evaluation_module
        module.load_state_dict(state)
        return module.eval()

    def input_tensor(self, x: Any) -> Tensor:
        """Return raw inputs as a tensor; rows of a table are encoded as those of the run.

        Raises:
            ConfigError: they are no numbers, and the data set is no table.
        """
        if isinstance(self.dataset, (Table, TextTable)) and not isinstance(x, (Tensor, np.ndarray, list, tuple)):
            return self.dataset.encode(x)
        try:
            return torch.as_tensor(x)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"inputs of type {type(x).__name__} are no tensor or array; give [n, "
                f"{', '.join(map(str, self.dataset.shape))}] of n samples"
            ) from error

    @torch.no_grad()
    def outputs(self, state: Mapping[str, Tensor], x: Tensor, extra_inputs: Mapping[str, Tensor]) -> Any:
        """Return outputs [n, …] for raw inputs [n, *shape]; bytes are scaled and normalised as in the run."""
        if x.dim() != 1 + len(self.dataset.shape) or tuple(x.shape[1:]) != self.dataset.shape:
            raise ConfigError(
                f"inputs have shape {list(x.shape)}; give [n, {', '.join(map(str, self.dataset.shape))}] of n samples"
            )
        if missing_inputs := sorted(set(self.model.call.extra_inputs) - extra_inputs.keys()):
            raise ConfigError(
                f"the model has further inputs; give {', '.join(f'{name}=…' for name in missing_inputs)} too"
            )
        module, results = self.module(state), []
        for first_sample in range(0, len(x), BATCH_SIZE):
            row_selection = slice(first_sample, first_sample + BATCH_SIZE)
            batch = {"x": self.dataset.prepare(x[row_selection], torch.float32), **self.dataset.extra_inputs(
                dict(extra_inputs), row_selection, torch.float32)}  # fmt: skip
            results.append(self.model.call(module, self.model.call.inputs(batch)))
        return torch.cat(results) if results and isinstance(results[0], Tensor) else results

    @torch.no_grad()
    def text_completions(self, state: Mapping[str, Tensor], rows: Any) -> list[str]:
        """Return the text that the model predicts after each prompt, always with the most probable next token.

        Raises:
            ConfigError: the run's data set is not one of texts to be completed.
        """
        dataset = self.dataset
        if not isinstance(dataset, TextTable) or dataset.task != "completion":
            raise ConfigError(
                f"dataset={dataset.name} holds no texts to complete; use dataset=text_table task=completion"
            )
        module, texts = self.module(state), []
        for prompts in dataset.encode(rows).to(torch.int64).split(BATCH_SIZE):
            row_numbers, lengths = torch.arange(len(prompts)), (prompts != PADDING).sum(1)
            sequences = torch.nn.functional.pad(prompts, (0, dataset.longest_target))
            for step in range(dataset.longest_target):
                scores = self.model.call(module, {"x": sequences[:, : dataset.length]})
                sequences[row_numbers, lengths + step] = scores[row_numbers, lengths + step - 1].argmax(1)
            for sequence, length in zip(sequences, lengths.tolist(), strict=True):
                texts.append(dataset.decode_tokens(sequence[length : length + dataset.longest_target].tolist()))
        return texts

    @torch.no_grad()
    def test_metrics(self, state: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the loss, and the accuracy if there are labels, on the whole test set."""
        data, model = self.dataset, self.model
        if data.test_x is None:
            raise ConfigError(f"dataset={data.name} has no test samples")
        if not model.tensor_output:
            raise ConfigError("the model returns no tensor; call module() on the samples instead")
        module, loss, correct = self.module(state), 0.0, 0.0
        for first_sample in range(0, len(data.test_x), BATCH_SIZE):
            batch = self._prepared_batch(
                data.test_x, data.test_y, data.test_more, slice(first_sample, first_sample + BATCH_SIZE)
            )
            output = model.call(module, model.call.inputs(batch))
            loss += float(model.loss(output, batch).expand(len(batch["x"])).sum())
            if model.labelled:
                correct += float(correct_share(model.scores(output, 1), batch["y"], 1).sum())
        count = len(data.test_x)
        return {"test_loss": loss / count} | ({"test_accuracy": correct / count} if model.labelled else {})

    def _prepared_batch(
        self, x: Tensor, y: Tensor | None, extra_inputs: dict[str, Tensor], row_selection: slice = slice(2)
    ) -> dict[str, Tensor]:
        batch = {
            "x": self.dataset.prepare(x[row_selection], torch.float32),
            **self.dataset.extra_inputs(extra_inputs, row_selection, torch.float32),
        }
        if y is not None:
            batch["y"] = y[row_selection].to(torch.float32) if y.is_floating_point() else y[row_selection]
        return batch


def _loss_function(name: Any, dataset: Dataset) -> str | LossFunction:
    """Return the loss that the settings name, possibly by a dotted path, or else the data set's."""
    if name is None:
        return dataset.loss
    loss: str | LossFunction = targets.resolve_target("model.loss", name, LOSS_KIND) if "." in str(name) else name
    return loss
