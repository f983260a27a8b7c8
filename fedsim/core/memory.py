"""Client and server memory of rules, shifts and evaluations between rounds; it is checkpointed with the strategy's
state."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fedsim.core.federation import Cohort

IN_FLIGHT, QUEUE = "in_flight", "queue"


@dataclass
class Memory:
    """Tensors that are updated in place, round by round; both parts are empty for most rules and shifts.

    Attributes:
        clients: name → [R·m, …]. A round's cohort carries its rows through the local steps under these names.
        server: name → [R, …].
        evaluated: name → [R·m, …]. No round sees it: what an evaluation must know of clients.
        uplink: name → [R·m, …]. No local step sees it: what is remembered of what clients sent (`fedsim.uplink`).
        in_flight: name → [k, …] of rows that arrive in later rounds, as many as there are
            (`fedsim.run.delayed_updates`).
        queue: name → [k] of events to come, on the host (`fedsim.run.event_clock`).
        writable: whether a round may change `clients`.
        pending_writes: where it may not: what the cohort of the last round would have remembered, name → [n, …].
    """

    clients: dict[str, Tensor] = field(default_factory=dict)
    server: dict[str, Tensor] = field(default_factory=dict)
    evaluated: dict[str, Tensor] = field(default_factory=dict)
    uplink: dict[str, Tensor] = field(default_factory=dict)
    in_flight: dict[str, Tensor] = field(default_factory=dict)
    queue: dict[str, Tensor] = field(default_factory=dict)
    writable: bool = True
    pending_writes: dict[str, Tensor] = field(default_factory=dict)

    def read_only_copy(self) -> Memory:
        """Return the same memory for work that is discarded: it is read and never changed."""
        return Memory(self.clients, {name: value.clone() for name, value in self.server.items()}, writable=False)

    def gather(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return the cohort's rows, [n, …]."""
        return {name: cohort.gather(value) for name, value in self.clients.items()}

    def scatter(self, cohort: Cohort, carry: dict[str, Tensor]) -> None:
        """Write the cohort's rows from the carry into the memory, in place."""
        for name in self.clients.keys() & carry.keys():
            self.scatter_entry(cohort, name, carry.pop(name))

    def scatter_entry(self, cohort: Cohort, name: str, rows: Tensor) -> None:
        """Write the cohort's rows [n, …] of one entry."""
        if self.writable:
            cohort.scatter(self.clients[name], rows)
        else:
            self.pending_writes[name] = rows

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the memory by the names that a checkpoint uses; those of a state's fields have no
        dots."""
        groups = {"clients": self.clients, "server": self.server, "evaluated": self.evaluated, "uplink": self.uplink}
        groups |= {IN_FLIGHT: self.in_flight, QUEUE: self.queue}
        return {f"{group}.{name}": value for group, entries in groups.items() for name, value in entries.items()}
