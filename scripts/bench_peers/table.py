"""From the repetitions of all contenders to ratios and a table; nothing here runs anything."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OURS = "fedsim"
NOT_PEERS = (OURS, "loop", "vmap")  # what nobody would install


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """How many times longer their round takes: median over neighbouring repetitions of the ratio of medians.

    Args:
        ours, theirs: seconds of every timed round, one list per repetition.
    """
    return statistics.median(
        statistics.median(b) / statistics.median(a) for a, b in zip(ours, theirs, strict=True) if a and b
    )


def rows(workload: str, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One row per contender, fastest first, and how many times faster fedsim is than each.

    Args:
        workload: its name.
        runs: contender → what its script reported, one entry per repetition; entries of a script that failed have
            'error' instead of 'seconds'.
    """
    seconds = {name: [list(run.get("seconds", ())) for run in reports] for name, reports in runs.items()}
    made = []
    for name, reports in runs.items():
        row: dict[str, Any] = {"workload": workload, "peer": name}
        every = [value for repetition in seconds[name] for value in repetition]
        if not every:
            made.append(row | {"error": reports[-1].get("error", "no repetition") if reports else "no repetition"})
            continue
        row |= {"seconds": statistics.median(every), "min_seconds": min(every), "rounds": len(every)}
        both = [a and b for a, b in zip(seconds.get(OURS, ()), seconds[name], strict=False)]
        if name != OURS and any(both):
            row["fedsim_faster"] = ratio(seconds[OURS], seconds[name])
        last = [run for run in reports if "seconds" in run][-1]
        made.append(row | {key: last[key] for key in ("setting", "threads", "versions", "moved", "parameters")})
    return sorted(made, key=lambda row: row.get("seconds", float("inf")))


def against_best(made: Sequence[Mapping[str, Any]]) -> tuple[str, float] | None:
    """The fastest peer and how many times faster fedsim is; None where nothing can be compared."""
    peers = [row for row in made if row["peer"] not in NOT_PEERS and "fedsim_faster" in row]
    if not peers:
        return None
    best = min(peers, key=lambda row: row["fedsim_faster"])
    return best["peer"], best["fedsim_faster"]


def lines(made: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of one workload, as text."""
    head = f"{'peer':9} {'median s':>9} {'min s':>9} {'fedsim is':>10}   setting"
    text = [head]
    for row in made:
        if "error" in row:
            text.append(f"{row['peer']:9} failed: {row['error']}")
            continue
        faster = f"{row['fedsim_faster']:.2f}×" if "fedsim_faster" in row else ""
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        threads = f"{row['threads']} thread" + ("s" if row["threads"] > 1 else "")
        text.append(
            f"{row['peer']:9} {row['seconds']:>9.4f} {row['min_seconds']:>9.4f} {faster:>10}   "
            f"{row['setting']}; {threads}; {versions}"
        )
    best = against_best(made)
    if best is not None:
        text.append(f"fedsim is {best[1]:.2f} times as fast as the best peer, {best[0]}")
    return text
