"""The sequence of stages between local training and aggregation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.memory import Memory
from fedsim.core.report import Report
from fedsim.uplink.stage import Encoding, Stage, StageContext


class Uplink:
    """A sequence of stages; without stages, rows arrive unchanged.

    The strategy sees the rows that arrive: `innovation` is the output of the last stage, and `end` is start −
    innovation. A strategy's client memory is therefore computed from received rows. Clients that compute without
    participating send nothing, and keep their memory. Further vectors that a strategy sends (`vectors_up` above 1) and
    averaged statistics are not transformed.

    Args:
        *stages: the stages in order, or a list of them.
        **named_stages: further stages; a configuration names them, and keeps their order.

    Example:
        >>> from fedsim.uplink import QSGD, TopK
        >>> Uplink(TopK(k=10), QSGD(levels=1)).code(1000, 4).bytes  # two bits each, four bytes each for where, a norm
        47
    """

    def __init__(self, *stages: Stage | Sequence[Stage], **named_stages: Stage) -> None:
        stage_list = stages[0] if len(stages) == 1 and isinstance(stages[0], (list, tuple)) else stages
        self.stages: tuple[Stage, ...] = (*stage_list, *named_stages.values())
        self.named_parts = {type(stage).__name__.lower(): stage for stage in stage_list} | named_stages
        names = [*(f"stage {number}" for number in range(len(stage_list))), *named_stages]
        for name, stage in zip(names, self.stages, strict=True):
            if isinstance(stage, type):
                raise ConfigError(
                    f"uplink.{name} is the class {stage.__name__}; give an object of it: {stage.__name__}(…)"
                )
            if not isinstance(stage, Stage):
                raise ConfigError(f"uplink.{name} is a {type(stage).__name__}; give a class of fedsim.uplink.Stage")

    def setup(self, federation: Federation, availability: Availability) -> None:
        """Set up the stages for the federation; refuse stages that are incompatible."""
        for number, stage in enumerate(self.stages):
            stage.setup(federation, availability, self.stages[:number])

    def add_stage_memory(self, memory: Memory, federation: Federation, model: Tensor) -> None:
        """Add the memory of the stages before round 0, for rows as long as the models [R, d]."""
        for number, stage in enumerate(self.stages):
            for name, value in stage.memory(federation, model.shape[1]).items():
                memory.uplink[f"{number} {name}"] = value
            for name, value in stage.initial_server_memory(federation, model.shape[1]).items():
                memory.server[f"uplink {number} {name}"] = value

    def code(self, dimension: int, size: int) -> Encoding:
        """Return how a row of so many numbers, of `size` bytes each, is encoded after all stages."""
        code = plain_encoding = Encoding(dimension, 8 * size)
        for stage in self.stages:
            code = stage.code(code, plain_encoding)
            if not isinstance(code, Encoding) or code.bytes < 0:
                returned_text = f"{code.bytes} bytes" if isinstance(code, Encoding) else type(code).__name__
                raise ConfigError(
                    f"uplink={type(stage).__name__}: code must return an Encoding of 0 bytes or more, and returns "
                    f"{returned_text}"
                )
        return code

    def __call__(self, report: Report, memory: Memory) -> Report:
        """Return the report as the server receives it; the memory of the stages changes in place."""
        if not self.stages:
            return report
        cohort = report.cohort
        sent_rows, end = report.innovation, report.end
        sending_rows = np.flatnonzero(cohort.host_index.multiplicity > 0)
        sender_index = (
            None if len(sending_rows) == len(cohort) else torch.as_tensor(sending_rows, device=sent_rows.device)
        )
        cohort, rows = (
            (cohort, sent_rows) if sender_index is None else (cohort.subset(sending_rows), sent_rows[sender_index])
        )
        start = report.start if sender_index is None else report.start[sender_index]
        for number, stage in enumerate(self.stages):
            arrived_rows = stage(rows, StageContext(cohort, memory, number))
            if (arrived_rows.shape, arrived_rows.dtype) != (rows.shape, rows.dtype):
                same_shape = arrived_rows.shape == rows.shape
                returned_text, expected = (
                    str(tensor.dtype).removeprefix("torch.") if same_shape else str(list(tensor.shape))
                    for tensor in (arrived_rows, rows)
                )
                raise ConfigError(
                    f"uplink={type(stage).__name__} must return rows {expected}, and returns {returned_text}"
                )
            rows = arrived_rows
        if sender_index is None:
            received, end = rows, start - rows
        else:
            received, end = sent_rows.index_copy(0, sender_index, rows), end.index_copy(0, sender_index, start - rows)
        return dataclasses.replace(report, received=received, carry=report.carry | {"params": end})
