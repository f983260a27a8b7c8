"""The progress of a run, as stored in its checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

MAX_INT64 = 2**63 - 1


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        rounds: completed ones.
        seconds: spent.
        samples: [R] processed by each replicate.
        participants: [R] clients that took part since the last evaluation, summed over `unevaluated` rounds.
        links: [R] how many models clients that took part sent, summed over all rounds; of a client that holds a part of
            the model, that part.
        unevaluated: rounds since the last evaluation.
        dropped: clients or replicates that became non-finite and were dropped, see `fedsim.run.divergence`.
        executors: what a trial settled, by the local rules' names, see `fedsim.trainer.trial`.
        unanswered: [R] how often clients were sent the model and sent nothing, summed over all rounds.
        virtual: [R] virtual seconds, where there is a clock.
        joules: [R] that clients spent, where the clock measures energy.
        staleness: [R] server updates between start and use, summed over the updates used since the last evaluation;
            empty where the run is not asynchronous.
        regret: [R] dynamic regret up to the last evaluation; empty unless the data drift.
        rows: written to metrics.csv by now; None: an earlier version of fedsim has not counted them.
        crc: checksum of these rows; None: an earlier version has not computed it.
    """

    rounds: int = 0
    seconds: float = 0.0
    samples: list[int] = field(default_factory=list)
    participants: list[float] = field(default_factory=list)
    links: list[float] = field(default_factory=list)
    unevaluated: int = 0
    dropped: list[dict[str, Any]] = field(default_factory=list)
    executors: dict[str, str] = field(default_factory=dict)
    rows: int | None = None
    crc: int | None = None
    unanswered: list[int] = field(default_factory=list)
    virtual: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    regret: list[float] = field(default_factory=list)

    @classmethod
    def at_start(cls, replicates: int) -> Progress:
        """Return the progress before the first round of so many replicates."""
        return cls(
            samples=[0] * replicates, participants=[0.0] * replicates, links=[0.0] * replicates,
            unanswered=[0] * replicates, rows=0, crc=0,
        )  # fmt: skip

    @classmethod
    def read(cls, text: str) -> Progress:
        """Return progress from JSON.

        Raises:
            ValueError, TypeError, RecursionError: it is not a run's progress.
        """
        progress = cls(**json.loads(text))
        round_counts = [
            ("rounds", progress.rounds),
            ("unevaluated", progress.unevaluated),
            ("rows", progress.rows or 0),
        ]
        round_counts.append(("checksum of rows", progress.crc or 0))
        round_counts += [
            (name, number)
            for name in ("samples", "unanswered")
            for number in _require_list(name, getattr(progress, name))
        ]
        for entry in _require_list("dropped", progress.dropped):
            entry_keys = (
                ("replicate", "round", "clients") if "clients" in entry else ("replicate", "round", "client", "times")
            )
            round_counts += [(f"dropped {name}", number) for name in entry_keys for number in _as_list(entry[name])]
        listed_numbers = [
            ("seconds", progress.seconds),
            *(
                (name, number)
                for name in ("participants", "links", "virtual", "joules", "staleness")
                for number in _require_list(name, getattr(progress, name))
            ),
        ]
        for name, value in round_counts:
            if type(value) is not int or not 0 <= value <= MAX_INT64:
                raise ValueError(f"it records {str(value)[:40]} {name}")
        for name, value in listed_numbers:
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"it records {str(value)[:40]} {name}")
        for value in _require_list("regret", progress.regret):
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"it records {str(value)[:40]} regret")
        if not progress.rounds:
            raise ValueError("it records no round")
        if not isinstance(progress.executors, dict) or not all(isinstance(v, str) for v in progress.executors.values()):
            raise ValueError("it records no executors")
        return progress


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _require_list(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise TypeError(f"its {name} are no list")
    return values
