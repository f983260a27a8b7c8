"""The results of a board on disk: one file per cell with its rows and their digests, and one file of tuned rates."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.core.files import nan_to_none, replacement_file
from fedsim.studies.board.board import BoardCell, BoardTrack, Leaderboard
from fedsim.studies.board.digests import DigestsByName, check_matching_digests
from fedsim.studies.board.track_settings import TunedTrackRecords
from fedsim.studies.board.trials import BoardTrial, TunedParameter, TuningBudget

DONE_STATUS, REFUSED_STATUS, FAILED_STATUS = "done", "refused", "failed"


@dataclass
class Row:
    """The result of one algorithm in one cell.

    Attributes:
        status: 'done', 'diverged' (all seeds diverged), 'refused' (the algorithm cannot run here), or 'failed' (the
            algorithm raised an error).
        message: the reason, where the status is not 'done'.
        overrides: Hydra overrides of the row in addition to the cell's.
        numbers: measure → one number per seed; NaN where a seed has none.
        curve: [rounds, the main metric's means over seeds].
        remembered: bytes stored per client between rounds.
        digests: digests of its data, splits, traces, initial models and batches.
        made: command, commit and versions that made the row.
    """

    status: str
    message: str = ""
    overrides: list[str] = field(default_factory=list)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    curve: list[list[float]] = field(default_factory=list)
    remembered: float = 0.0
    digests: DigestsByName = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    def values_of(self, measure: str) -> np.ndarray:
        """Return the numbers of a measure, one per seed [R]; empty for a row without numbers."""
        return np.array(self.numbers.get(measure, []), dtype=float)


@dataclass
class CellRows:
    """The rows of a cell.

    Attributes:
        cell: the cell.
        rows: entry → row.
        digests: the digests that its rows share.
    """

    cell: BoardCell
    rows: dict[str, Row] = field(default_factory=dict)
    digests: DigestsByName = field(default_factory=dict)

    def add_row(self, entry_name: str, row: Row, shared_digests: list[str]) -> None:
        """Add a row, or replace the entry's old one.

        Raises:
            ConfigError: the row was made with other traces, splits, data, initial models or batches.
        """
        check_matching_digests(f"{entry_name} in {self.cell.name}", row.digests, self.digests, shared_digests)
        self.digests = row.digests | self.digests
        self.rows[entry_name] = row


def cell_path(folder: Path, cell: BoardCell) -> Path:
    """Return the path of a cell's file below the folder of its board."""
    return folder / f"{cell.name}.json"


def read_cell_rows(folder: Path, cell: BoardCell, board: Leaderboard) -> CellRows:
    """Read the rows of a cell; there are none if it has no file.

    Raises:
        ConfigError: the file is damaged, or a row cannot be compared with the other rows.
    """
    path, cells = cell_path(folder, cell), CellRows(cell)
    if not path.exists():
        return cells
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        stored_settings = {key: content[key] for key in _cell_settings(cell, board)}
        rows = {entry_name: Row(**_restore_row(row, content)) for entry_name, row in content["rows"].items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path} holds no rows of a board ({error})") from error
    if stored_settings != _cell_settings(cell, board):
        raise ConfigError(f"{path} was made with other settings than board {board.name} has now; delete it")
    for entry_name, row in rows.items():
        measured_values = [row.numbers.get(measure, []) for measure in board.measures]
        if row.status == DONE_STATUS and any(len(values) != len(board.seeds) for values in measured_values):
            raise ConfigError(
                f"{path}: {entry_name} does not have one value of each measure for each of "
                f"seeds={board.seeds}; --forget it"
            )
        cells.add_row(entry_name, row, board.compared)
    return cells


def write_cell_rows(folder: Path, cells: CellRows, board: Leaderboard) -> None:
    """Write the rows of a cell atomically, one row per line.

    Digests and provenance that several rows share are stored once; the rows refer to them by index.
    """
    path = cell_path(folder, cells.cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    shared_entries: dict[str, list[Any]] = {"digests": [], "made": []}
    rows = {}
    for entry_name, row in cells.rows.items():
        record = _round_numbers(asdict(row))
        for field_name, entries in shared_entries.items():
            if record[field_name] not in entries:
                entries.append(record[field_name])
            record[field_name] = entries.index(record[field_name])
        rows[entry_name] = record
    head = {"cell": cells.cell.name, **_cell_settings(cells.cell, board), **shared_entries}
    text_lines = [f"  {json.dumps(key)}: {_row_json(value)}," for key, value in head.items()]
    text_lines += [
        '  "rows": {',
        ",\n".join(f"    {json.dumps(entry_name)}: {_row_json(row)}" for entry_name, row in rows.items()),
        "  }",
    ]
    with replacement_file(path) as file:
        file.write("\n".join(["{", *text_lines, "}"]) + "\n")


def _cell_settings(cell: BoardCell, board: Leaderboard) -> dict[str, Any]:
    """Return the settings that all rows of a cell share: overrides, target and measures."""
    measures = {name: [m.metric, m.last, m.until] for name, m in board.measures.items()}
    target = board.tracks[cell.track].target
    return {"overrides": [*board.base, *cell.overrides], "target": target, "measures": measures}


def _row_json(value: Any) -> str:
    return json.dumps(nan_to_none(value), ensure_ascii=False)


class TunedRates(TunedTrackRecords):
    """The tuned rates of each algorithm in a track, with all trials.

    A record is {'lr', 'knob', 'score', 'trials', …}; 'lr' is None where all trials failed.
    """

    file_name = "rates.json"

    def is_at_edge(self, track: str, name: str) -> bool:
        """Return whether the chosen rate is the lowest or highest that was tried, so that one beyond may be better."""
        record = self.record_of(track, name)
        if not record or record["lr"] is None:
            return False
        rates = [rate for rate, knob, *_ in record["trials"] if knob == record["knob"]]
        return len(rates) > 1 and record["lr"] in (min(rates), max(rates))

    def check(self, board: Leaderboard, track: str, name: str) -> None:
        """Refuse rates that were tuned with other trials than the board's.

        Raises:
            ConfigError: the trials differ from the board's.
        """
        tuned_rates, entry = self.record_of(track, name), board.entries[name]
        if not tuned_rates or not tuned_rates["trials"]:
            return
        low, high = (entry.rates * rate for rate in board.tracks[track].rates)
        grid = [[lr, knob] for knob, rates in board.tuning.rate_grids(entry.knob, (low, high)).items() for lr in rates]
        tuning = [board.tuning.metric, board.tuning.rounds, board.tuning.seeds]
        if [t[:2] for t in tuned_rates["trials"]] != grid or [
            tuned_rates[k] for k in ("metric", "rounds", "seeds")
        ] != tuning:
            raise ConfigError(
                f"the rates of {name} in {track} were found by other trials than the board's; --forget it"
            )


def make_tuning_record(
    best_trial: BoardTrial | None,
    scores_by_trial: dict[BoardTrial, list[float]],
    tuning: TuningBudget,
    track: BoardTrack,
) -> dict[str, Any]:
    """Return the record that `Rates` stores for an algorithm: the chosen values, the trials and the budget."""

    def finite_or_none(value: float) -> float | None:
        return float(f"{value:.6g}") if math.isfinite(value) else None

    trials = [[t.lr, t.tuned_value, *(finite_or_none(v) for v in values)] for t, values in scores_by_trial.items()]
    best = (
        None
        if best_trial is None
        else finite_or_none(sum(scores_by_trial[best_trial]) / len(scores_by_trial[best_trial]))
    )
    return {
        "lr": None if best_trial is None else best_trial.lr,
        "knob": None if best_trial is None else best_trial.tuned_value,
        "score": best,
        "metric": tuning.metric,
        "rounds": tuning.rounds,
        "seeds": tuning.seeds,
        "at": [" / ".join(at.values()) for at in track.tuned_at],
        "trials": trials,
    }


def tuned_overrides(rates: dict[str, Any], knob: TunedParameter | None) -> list[str]:
    """Return the overrides that set the tuned rate and parameter."""
    override_texts = [f"lr={rates['lr']}"]
    return override_texts if knob is None else [*override_texts, knob.override(rates["knob"])]


def _round_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Round the numbers of a row to seven digits."""
    row["numbers"] = {name: [float(f"{v:.7g}") for v in values] for name, values in row["numbers"].items()}
    return row


def _restore_row(row: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Convert null back to NaN, and replace the indices of shared digests and provenance by their content."""
    numbers = row.get("numbers", {})
    row["numbers"] = {name: [math.nan if v is None else v for v in values] for name, values in numbers.items()}
    row["curve"] = [[math.nan if v is None else v for v in component] for component in row.get("curve", [])]
    return row | {component: dict(content[component][row[component]]) for component in ("digests", "made")}
