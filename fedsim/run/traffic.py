"""Bytes that are sent between the server and the participating clients in a round.

They are those of the parts of a row that travel (`fedsim.core.columns`), in the type in which rows are computed.
Single numbers beside them (a weight, a count of samples, the number of a round) are left out, and so is what precedes
the first round or serves an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.local import LocalRule
from fedsim.models import StatelessModel
from fedsim.strategies import Strategy
from fedsim.uplink import Uplink


@dataclass(frozen=True)
class Traffic:
    """The bytes that one participating client receives and sends in a round.

    Attributes:
        bytes_down: bytes that the server sends to it.
        bytes_up: bytes that it sends to the server.
    """

    bytes_down: int
    bytes_up: int

    @classmethod
    def compute_per_round(
        cls, strategy: Strategy[Any], local_rule: LocalRule, model: StatelessModel, uplink: Uplink | None = None
    ) -> Traffic:
        """Compute the bytes from the vectors of shared columns that the strategy sends, with each averaged statistic
        once, and from what the local rule adds. The first vector to the server is the client's row, which passes the
        uplink.

        Raises:
            ConfigError: a strategy's own counts of vectors are not whole numbers from 0 on.
        """
        model_columns, bytes_per_number = model.columns, torch.finfo(model.dtype).bits // 8
        name, rule_numbers = type(strategy).__name__, local_rule.extra_transmitted_numbers(model.dimension)
        vector_counts = (strategy.vectors_down, strategy.vectors_up)
        for direction, count in zip(("down", "up"), vector_counts, strict=True):
            checks.check_whole_number(f"strategy={name}: vectors_{direction}", count, minimum=0)
        sent_up = len(model_columns.shared) - model.column_names.num_received_columns
        values_down, values_up = (
            n * count + len(model_columns.averaged) + extra_numbers
            for n, count, extra_numbers in zip(
                vector_counts, (len(model_columns.shared), sent_up), rule_numbers, strict=True
            )
        )
        shared_bytes = len(model_columns.shared) * bytes_per_number
        saved_numbers = (
            0
            if uplink is None or not strategy.vectors_up
            else shared_bytes - uplink.code(len(model_columns.shared), bytes_per_number).bytes
        )
        if saved_numbers and sent_up < len(model_columns.shared):
            raise ConfigError(
                "an uplink that compresses rows would count columns that clients do not send, which this model has "
                f"({min(model.received_parameters)}); use uplink=none"
            )
        return cls(values_down * bytes_per_number, values_up * bytes_per_number - saved_numbers)

    def columns(self, last_links: tuple[float, float], total_links: tuple[float, float]) -> dict[str, int]:
        """Return the columns of metrics.csv if so many models were sent to clients and by them, in the last round and
        in all rounds; a client that holds a part of the model counts as that part."""
        byte_columns: dict[str, int] = {}
        for prefix, (receivers, senders) in (("", last_links), ("total_", total_links)):
            byte_columns |= {
                f"{prefix}bytes_down": round(receivers * self.bytes_down),
                f"{prefix}bytes_up": round(senders * self.bytes_up),
            }
        return byte_columns
