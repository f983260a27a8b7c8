"""The report that the trainer passes to the strategy after a round's local work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from fedsim.core import checks
from fedsim.core.column_names import ColumnsByName
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory


@dataclass
class Report:
    """Attributes (n rows, in the cohort's order):

    cohort: who computed, and who of them takes part.
    start: [n, d] where each row began.
    carry: what each row ended with: 'params' [n, d] and whatever the strategy gave it to carry.
    loss: [n] mean training loss over the row's local steps.
    lr: [R] learning rate of the round's first local step, also where nobody computed. Where clients' clocks differ (see
        `fedsim.local.schedules`), that of whoever has most steps a round.
    lr_sum: [n] learning rates of the row's own local steps, summed: s·η_l where the rate is constant in a round.
    samples: [n] training samples each row processed (host).
    gradient_weight: [n] what the row's steps weigh gradients in sum, rates included: `lr_sum` where steps are plain;
        None where the rule cannot say (`LocalRule.gradient_weight`).
    deployed: [R, d] what the server deployed in this round (θ̃ where the shift has inertia and answers to the server).
    finite: [n] bool: is all of the row finite, with what rule and shift remember of the client? None: not looked at.
    end_with_private: [n, d] where each row arrived, columns that no strategy sees included (`fedsim.core.columns`).
    memory: what local rule and shift remember of the clients after this round; `remembered` reads it.
    server: [R, d] the server's model with which the round began.
    staleness: [n] rounds since each row began (host); None: none did so earlier.
    received: [n, d] G_i as the server gets it, where something happened to it on its way (`fedsim.uplink`).
    """

    cohort: Cohort
    start: Tensor
    carry: dict[str, Tensor]
    loss: Tensor
    lr: Tensor
    lr_sum: Tensor
    samples: np.ndarray
    deployed: Tensor | None = None
    finite: Tensor | None = None
    end_with_private: Tensor | None = None
    gradient_weight: Tensor | None = None
    memory: Memory | None = None
    server: Tensor | None = None
    received: Tensor | None = None
    staleness: np.ndarray | None = None

    @property
    def end(self) -> Tensor:
        """[n, d], the rows after the local steps, as strategies see them."""
        return self.carry["params"]

    @property
    def end_rows_with_private_columns(self) -> Tensor:
        """[n, d'], the rows after the local steps with the columns that clients keep private."""
        return self.end if self.end_with_private is None else self.end_with_private

    @property
    def columns(self) -> ColumnsByName:
        """The columns of each of the model's tensors in `start`, `end` and `innovation`, by name."""
        return self.cohort.federation.columns

    @property
    def rounds_late(self) -> np.ndarray:
        """[n], the rounds since each row was started; zeros if no row is late."""
        return np.zeros(len(self.cohort), dtype=np.int64) if self.staleness is None else self.staleness

    @cached_property
    def innovation(self) -> Tensor:
        """[n, d], G_i = start − end: positive along the descent."""
        return self.start - self.end if self.received is None else self.received

    def client_memory(self, name: str) -> Tensor:
        """Return [n, …], an entry of the memory of each row's client after the round, by the name that the local rule
        or the shift gives it in `memory` or `own_models`: for example APFL's 'personal'.

        Raises:
            ConfigError: nothing is remembered under this name.
        """
        memory = self.memory or Memory()
        if name not in memory.clients:
            names = sorted(memory.clients)
            raise ConfigError(
                f"the strategy asks for the client memory {name!r}, but local rule and shift of this run remember "
                f"{', '.join(names) or 'nothing'}{checks.nearest_name_hint(name, names)}; choose another local rule"
            )
        return self.cohort.gather(memory.clients[name]) if memory.writable else memory.pending_writes[name]
