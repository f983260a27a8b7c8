"""summary.json: where a run ended, what it cost, and its distances to θ^PS and θ^PO."""

from __future__ import annotations

from typing import Any

from fedsim.evaluation.performative.references import POINT_NAME_BY_COLUMN
from fedsim.run.progress import Progress
from fedsim.run.setup import Setup
from fedsim.run.tracking.result import MetricsRow, Result


def summarise_run(simulation: Setup, result: Result, progress: Progress) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        simulation: what was run.
        result: what it gave.
        progress: where it stands.
    """
    last_rows = [row for row in result.history if row["round"] == result.history[-1]["round"]]
    summary_numbers: dict[str, Any] = {
        "rounds": progress.rounds,
        "stopped": result.stopped,
        "seeds": list(simulation.federation.seeds),
        "final": {name: {"mean": mean, "std": std} for name, (mean, std) in result.final.items()},
        "per_replicate": [
            {"seed": row["seed"]}
            | {key: summary_numbers[replicate] for key, summary_numbers in simulation.settings_per_seed.items()}
            | {name: row[name] for name in result.metric_names}
            for replicate, row in enumerate(last_rows)
        ],
        "dropped": progress.dropped,
        "seconds": round(result.seconds, 3),
        "samples": result.samples,
        "total_bytes_down": round((sum(progress.links) + sum(progress.unanswered)) * simulation.traffic.bytes_down),
        "total_bytes_up": round(sum(progress.links) * simulation.traffic.bytes_up),
        "samples_per_second": round(result.samples / max(result.seconds, 1e-9), 1),
        "parameters": simulation.model.dimension,
        "executor": simulation.trainer.executor_choice.executor,
        "chunk": simulation.trainer.executor_choice.chunk,
    }
    if simulation.round_clock.clock.active:
        summary_numbers["virtual_seconds"] = progress.virtual
    summary_numbers |= simulation.participation.summary(progress.rounds)
    if (private := simulation.privacy(progress.rounds)) is not None:
        summary_numbers["privacy"] = private.as_json()
    return (
        summary_numbers
        | simulation.stop.target_summary(result.history, simulation.column_descriptions)
        | _reference_point_summary(simulation, result.history)
        | result.extra
    )


def _reference_point_summary(run: Setup, history: list[MetricsRow]) -> dict[str, Any]:
    """Return θ^PS and θ^PO, and the distance to each with which every replicate began and ended."""
    reference_entries, count = run.references.summary(), len(run.federation.seeds)
    for column, name in POINT_NAME_BY_COLUMN.items():
        if reference_entries and column in history[0]:
            first_and_last_rows = zip(history[:count], history[-count:], strict=True)
            reference_entries[name]["distance"] = [
                {"first": first_row[column], "last": last_row[column]} for first_row, last_row in first_and_last_rows
            ]
    return {"references": reference_entries} if reference_entries else {}
