"""A board: its algorithms, its cells, how rates are tuned, and what is measured; read from YAML and checked."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.board.findings import BoardQuestion
from fedsim.studies.board.measured import LeaderboardMeasure
from fedsim.studies.board.trials import TunedParameter, TuningBudget
from fedsim.studies.described import overrides_by_label, read_description
from fedsim.studies.reproduce.recipe import recipe_folder

BOARDS_FOLDER = "leaderboard/boards"  # below the folder of the recipes
RESULTS_FOLDER = "leaderboard/results"


@dataclass(frozen=True)
class BoardCell:
    """One setting in which all algorithms are compared.

    Attributes:
        track: data and model.
        axis_labels: (axis, label) of each axis.
        overrides: Hydra overrides of the cell.
    """

    track: str
    axis_labels: tuple[tuple[str, str], ...]
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the cell and of its file, TRACK/LABEL/LABEL."""
        return "/".join([self.track, *(label for _, label in self.axis_labels)])


@dataclass
class BoardEntry:
    """An algorithm on a board.

    Attributes:
        overrides: Hydra overrides of the algorithm.
        about: a short description.
        knob: the parameter that is tuned in addition to the local learning rate; None: only the rate is tuned.
        rates: factor on the track's lowest and highest local rate, for algorithms that need other rates.
        remembers: whether the algorithm stores something for each client between rounds.
    """

    overrides: list[str]
    about: str = ""
    knob: TunedParameter | None = None
    rates: float = 1.0
    remembers: bool = False


@dataclass
class BoardTrack:
    """A data set with a model, and the cells that use them.

    Attributes:
        about: a short description.
        overrides: Hydra overrides of the track.
        rates: lowest and highest local rate that is tried.
        tuned_at: the cells, as axis → label, where rates are tuned; the score of a trial is its mean over them.
        target: value of the board's main metric for measures of the cost to reach it.
        axes: axis → labels, for axes on which the track has only some of the board's labels.
    """

    about: str
    overrides: list[str]
    rates: tuple[float, float]
    tuned_at: list[dict[str, str]]
    target: float
    axes: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Leaderboard:
    """A comparison of many algorithms in many cells.

    Attributes:
        name: name of its file, without the suffix.
        title, about: heading and short description.
        base: Hydra overrides of each run.
        seeds: seeds of the rows.
        axes: axis → label → overrides.
        tracks, entries: tracks and algorithms by name.
        tuning: how learning rates are tuned.
        measures: the measures of each row, by name; the first one determines the order.
        against: the reference entry with which the others are compared.
        compared: digests that all rows of a cell must share.
        findings: questions, and the comparisons that answer them.
        equivalence_margins: measure → the largest difference that does not matter, in the measure's own unit.
    """

    name: str
    title: str
    about: str
    base: list[str]
    seeds: list[int]
    axes: dict[str, dict[str, list[str]]]
    tracks: dict[str, BoardTrack]
    entries: dict[str, BoardEntry]
    tuning: TuningBudget
    measures: dict[str, LeaderboardMeasure]
    against: str
    compared: list[str]
    findings: list[BoardQuestion] = field(default_factory=list)
    equivalence_margins: dict[str, float] = field(default_factory=dict)

    @property
    def main_measure(self) -> str:
        """The measure that determines the order of the entries."""
        return next(iter(self.measures))

    def cells(self, track: str | None = None) -> list[BoardCell]:
        """Return the cells of a track, or of all tracks, in their order."""
        names = list(self.tracks) if track is None else [track]
        return [self.cell(name, dict(at)) for name in names for at in self._axis_label_combinations(self.tracks[name])]

    def cell(self, track: str, at: Mapping[str, str]) -> BoardCell:
        """Return the cell of a track at these labels (axis → label)."""
        overrides = [*self.tracks[track].overrides, *(o for axis in self.axes for o in self.axes[axis][at[axis]])]
        return BoardCell(track, tuple((axis, at[axis]) for axis in self.axes), tuple(overrides))

    def find_cell(self, cell_name: str) -> BoardCell:
        """Return the cell of this name.

        Raises:
            ConfigError: the board has no such cell.
        """
        cells = {cell.name: cell for cell in self.cells()}
        return cells[checks.check_choice("--cell", cell_name, cells)]

    def _axis_label_combinations(self, track: BoardTrack) -> list[tuple[tuple[str, str], ...]]:
        labels = [[(axis, label) for label in track.axes.get(axis, self.axes[axis])] for axis in self.axes]
        return list(itertools.product(*labels))

    def check(self) -> None:
        """Refuse a board that contradicts itself."""
        prefix = f"board {self.name}"
        checks.check_choice(f"{prefix}: against", self.against, self.entries)
        if set(self.seeds) & set(self.tuning.seeds):
            raise ConfigError(f"{prefix}: tuning.seeds={self.tuning.seeds} and seeds={self.seeds} share some")
        for name, track in self.tracks.items():
            self._check_track(f"{prefix}: tracks.{name}", track)
        for name, entry in self.entries.items():
            self.tuning.check(f"{prefix}: entries.{name}", entry.knob)
        self._validate_findings(prefix)

    def _validate_findings(self, prefix: str) -> None:
        """Check the equivalence margins, and the comparisons of the findings."""
        for measure, margin in self.equivalence_margins.items():
            checks.check_choice(f"{prefix}: equivalence_margins", measure, self.measures)
            checks.check_positive(f"{prefix}: equivalence_margins.{measure}", margin)
        margins = {measure: self.equivalence_margins.get(measure) for measure in self.measures}
        cells = [cell.name for cell in self.cells()]
        for number, finding in enumerate(self.findings, 1):
            finding.check(f"{prefix}: findings {number}")
            for comparison in finding.comparisons:
                comparison.check(f"{prefix}: findings {number}", self.entries, margins, cells)

    def _check_track(self, prefix: str, track: BoardTrack) -> None:
        """Check that a track names axes and labels that the board has."""
        for axis_name, labels in track.axes.items():
            checks.check_choice(f"{prefix}.axes", axis_name, self.axes)
            for axis_label in labels:
                checks.check_choice(f"{prefix}.axes.{axis_name}", axis_label, self.axes[axis_name])
        for at in track.tuned_at:
            if at.keys() != self.axes.keys():
                raise ConfigError(f"{prefix}.tuned_at={at} must name {', '.join(self.axes)}")
            for axis_name, axis_label in at.items():
                checks.check_choice(f"{prefix}.tuned_at.{axis_name}", axis_label, self.axes[axis_name])
        if not track.tuned_at:
            raise ConfigError(f"{prefix}.tuned_at is empty; name a place where rates are tuned")


def board_definitions_folder() -> Path:
    """Return the folder of the descriptions of boards."""
    return recipe_folder() / BOARDS_FOLDER


def results_folder() -> Path:
    """Return the folder of the committed results; in an installed package a folder below the working directory."""
    root = recipe_folder()
    return root / RESULTS_FOLDER if (root.parent / "fedsim").is_dir() else Path(RESULTS_FOLDER)


def leaderboard_names(folder: Path | None = None) -> list[str]:
    """Return the names of all boards."""
    return sorted(path.stem for path in (folder or board_definitions_folder()).glob("*.yaml"))


def load_leaderboard(board_name: str, folder: Path | None = None) -> Leaderboard:
    """Read a board by its name.

    Raises:
        ConfigError: the board is unknown or contradicts itself.
    """
    directory = folder or board_definitions_folder()
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # for classes of its own
    with read_description("board", board_name, directory, leaderboard_names(folder), "fedsim-leaderboard") as content:
        board = _parse_leaderboard(board_name, content)
        board.check()
    return board


def _parse_leaderboard(board_name: str, board_content: dict[str, Any]) -> Leaderboard:
    board_content["axes"] = {axis: overrides_by_label(labels) for axis, labels in board_content["axes"].items()}
    board_content["tracks"] = {
        str(key): BoardTrack(**_normalised_track(value)) for key, value in board_content["tracks"].items()
    }
    board_content["entries"] = {str(key): parse_entry(value) for key, value in board_content["entries"].items()}
    board_content["tuning"] = TuningBudget(**board_content["tuning"])
    board_content["measures"] = {key: LeaderboardMeasure(**value) for key, value in board_content["measures"].items()}
    board_content["findings"] = [BoardQuestion.from_content(finding) for finding in board_content.get("findings") or []]
    return Leaderboard(board_name, **board_content)


def parse_entry(content_or_text: Any) -> BoardEntry:
    """Create an entry from its YAML: a single override, or the attributes of an `Entry`."""
    if isinstance(content_or_text, str):
        return BoardEntry([content_or_text])
    content = dict(content_or_text)
    if isinstance(content["overrides"], str):
        content["overrides"] = [content["overrides"]]
    knob = content.pop("knob", None)
    return BoardEntry(**content, knob=TunedParameter(**knob) if knob else None)


def _normalised_track(track: dict[str, Any]) -> dict[str, Any]:
    """Convert labels that YAML reads as numbers to text, and the rates to a pair of floats."""
    axes = {axis: [str(label) for label in labels] for axis, labels in (track.get("axes") or {}).items()}
    tuned_at = [{axis: str(label) for axis, label in at.items()} for at in track["tuned_at"]]
    low, high = track["rates"]
    return track | {"axes": axes, "tuned_at": tuned_at, "rates": (float(low), float(high))}
