"""Notices models that became non-finite, without stopping a device in the middle of its work."""

from __future__ import annotations

import torch

from fedsim.errors import DivergenceError
from fedsim.federation import Federation
from fedsim.strategies import State
from fedsim.trainer import Report

_NEVER = torch.iinfo(torch.int64).max
_NAMED = 10  # clients a message lists


class DivergenceGuard:
    """Remembers on the device in which round each row first became non-finite; `check` raises.

    Args:
        federation: who exists.
        strategy: its name, for the message.
    """

    def __init__(self, federation: Federation, strategy: str) -> None:
        self.federation, self.strategy = federation, strategy
        self.rows = torch.full((federation.rows,), _NEVER, device=federation.device)
        self.models = torch.full((federation.replicates,), _NEVER, device=federation.device)

    def see(self, t: int, state: State, report: Report) -> None:
        """Note losses, rows and server's models after round t (no transfer)."""
        rows = report.cohort.rows
        fine = torch.isfinite(report.loss) & torch.isfinite(report.end.sum(1))  # a sum is the quickest look at a row
        round_or_never = torch.where(fine, _NEVER, t)
        self.rows[rows] = torch.minimum(self.rows[rows], round_or_never)
        finite = torch.isfinite(state.model).all(1)
        self.models = torch.minimum(self.models, torch.where(finite, _NEVER, t))

    def check(self) -> None:
        """Raise if anything was seen; costs one transfer."""
        rows, models = self.rows.cpu(), self.models.cpu()
        first = int(torch.minimum(rows.min(), models.min()))
        if first == _NEVER:
            return
        m, seeds = self.federation.clients, self.federation.seeds
        bad = torch.nonzero(rows == first)[:, 0]
        replicates = sorted({int(v) // m for v in bad} | {int(r) for r in torch.nonzero(models == first)[:, 0]})
        clients = sorted({int(v) % m for v in bad})
        named = ", ".join(map(str, clients[:_NAMED])) + (
            f" and {len(clients) - _NAMED} more" if clients[_NAMED:] else ""
        )
        where = f"clients {named}" if clients else "the aggregated model"
        raise DivergenceError(
            f"non-finite values in round {first} of {self.strategy}, "
            f"seed {', '.join(str(seeds[r]) for r in replicates)}: {where}; lower lr, or clip gradients with local.clip"
        )
