"""The best model of each replicate so far, in a safetensors file next to the checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedsim.core import checksums
from fedsim.core.files import check_regular_path, replacement_file
from fedsim.run.run_files import BEST_MODELS_FILE, MODEL_HEADER_KEY

log = logging.getLogger(__name__)


class BestModels:
    """Keeps a host copy of each replicate's evaluated model at its best value of the metric; of equal values the first.

    It is written with every checkpoint, just before it. Where a run is killed between the two, what the file is ahead
    by comes again in the resumed run, bit for bit, and is not better than itself.

    Args:
        folder: of the run.
        metric: by which models are judged.
        higher_is_better: is more of it better?
        header: what is told of the models, see `fedsim.studies.results.StoredModelReader`.
    """

    def __init__(self, folder: Path, metric: str, higher_is_better: bool, header: dict[str, Any]) -> None:
        self.path, self.metric, self.higher_is_better, self.header = (
            folder / BEST_MODELS_FILE,
            metric,
            higher_is_better,
            header,
        )
        self.models: Tensor | None = None
        self.rounds: list[int] = []
        self.values: list[float] = []
        self._has_unwritten_models = False

    def resume(self) -> None:
        """Continue with the models in the file, if they were chosen by the same metric."""
        if not self.path.exists():
            return
        try:
            with safe_open(check_regular_path(self.path), framework="pt") as file:
                header, models = file.metadata(), file.get_tensor("model")
            best_record, damaged_name = (
                json.loads(header["best"]),
                checksums.find_damaged_entry(header, {"model": models}),
            )
            if damaged_name is not None:
                raise ValueError(f"it is damaged: the checksum of {damaged_name} differs")
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            log.warning("%s cannot be read (%s); the best model is searched from here on", self.path, error)
            return
        if best_record["metric"] != self.metric:
            log.warning(
                "the best model was chosen by %s; by %s it is searched from here on", best_record["metric"], self.metric
            )
            return
        self.models, self.rounds, self.values = models, best_record["rounds"], best_record["values"]

    def update(self, completed_rounds: int, models: Tensor, metric_values: np.ndarray) -> None:
        """Compare the models [R, d] of an evaluation, whose metric is [R], with the best ones so far."""
        if self.models is None:
            self.models = torch.empty(models.shape, dtype=models.dtype)
            self.rounds, self.values = [-1] * len(models), [float("nan")] * len(models)
        sign = 1 if self.higher_is_better else -1
        for r, value in enumerate(metric_values.tolist()):
            if value == value and not sign * value <= sign * self.values[r]:
                self.models[r] = models[r].cpu()
                self.rounds[r], self.values[r], self._has_unwritten_models = completed_rounds, value, True

    def write(self) -> None:
        """Write the best models to the file, if there are new ones."""
        if not self._has_unwritten_models or self.models is None:
            return
        record = {"metric": self.metric, "rounds": self.rounds, "values": self.values}
        header = {"format": "fedsim-best", "best": json.dumps(record), MODEL_HEADER_KEY: json.dumps(self.header)}
        tensors = {"model": self.models.contiguous()}
        with replacement_file(self.path, "wb", durable=True) as file:
            file.write(save(tensors, metadata=checksums.add_checksums(header, tensors)))
        self._has_unwritten_models = False

    def summary(self) -> dict[str, Any]:
        """Return the entry of summary.json."""
        return {"metric": self.metric, "rounds": self.rounds, "values": self.values}
