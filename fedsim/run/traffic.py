"""Bytes that travel between the server and the clients that take part in a round, computed from what is sent.

They are those of the parts of a row that travel (`fedsim.core.columns`), in the type in which rows are computed.
Single numbers beside them (a weight, a count of samples, the number of a round) are left out, and so is what precedes
the first round or serves an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedsim.core import checks
from fedsim.local import LocalRule
from fedsim.models import RowModel
from fedsim.strategies import Strategy
from fedsim.uplink import Uplink


@dataclass(frozen=True)
class Traffic:
    """What one client that takes part in a round costs.

    Attributes:
        down: bytes that the server sends to it.
        up: bytes that it sends to the server.
    """

    down: int
    up: int

    @classmethod
    def of(cls, strategy: Strategy[Any], rule: LocalRule, model: RowModel, uplink: Uplink | None = None) -> Traffic:
        """Vectors that the strategy sends of the shared columns, each averaged statistic once, and what the rule adds.
        The first vector up is the client's row, which goes through the uplink.

        Raises:
            ConfigError: a strategy's own counts of vectors are not whole numbers from 0 on.
        """
        columns, size = model.columns, torch.finfo(model.dtype).bits // 8
        name, rule_numbers = type(strategy).__name__, rule.traffic(model.dimension)
        vectors = (strategy.vectors_down, strategy.vectors_up)
        for direction, count in zip(("down", "up"), vectors, strict=True):
            checks.whole_number(f"strategy={name}: vectors_{direction}", count, minimum=0)
        down, up = (
            n * len(columns.shared) + len(columns.averaged) + extra_numbers
            for n, extra_numbers in zip(vectors, rule_numbers, strict=True)
        )
        plain = len(columns.shared) * size
        saved = 0 if uplink is None or not strategy.vectors_up else plain - uplink.code(len(columns.shared), size).bytes
        return cls(down * size, up * size - saved)

    def columns(self, last: tuple[float, float], ever: tuple[float, float]) -> dict[str, int]:
        """The columns of metrics.csv where so many models were sent to clients and by them, in the last round and in
        all rounds together; a client that holds a part of the model counts as that part."""
        byte_columns: dict[str, int] = {}
        for prefix, (receivers, senders) in (("", last), ("total_", ever)):
            byte_columns |= {
                f"{prefix}bytes_down": round(receivers * self.down),
                f"{prefix}bytes_up": round(senders * self.up),
            }
        return byte_columns
