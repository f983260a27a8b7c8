"""A board: which algorithms meet in which cells, how rates are tuned, what is measured. Read from YAML, checked."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.board.findings import Finding
from fedsim.studies.board.measured import BoardMeasure
from fedsim.studies.board.trials import TunedParameter, Tuning
from fedsim.studies.described import choices, read_description
from fedsim.studies.reproduce.recipe import recipe_folder

BOARDS_FOLDER = "leaderboard/boards"  # below the folder of the recipes
RESULTS_FOLDER = "leaderboard/results"


@dataclass(frozen=True)
class Cell:
    """One setting in which all algorithms meet.

    Attributes:
        track: data and model.
        at: (axis, label) of every axis.
        overrides: that make it.
    """

    track: str
    at: tuple[tuple[str, str], ...]
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """TRACK/LABEL/LABEL, which names its file too."""
        return "/".join([self.track, *(label for _, label in self.at)])


@dataclass
class Entry:
    """One algorithm.

    Attributes:
        overrides: that make it.
        about: what it is, in a few words.
        knob: what is tuned beside the local rate; None: nothing.
        rates: factor on the track's lowest and highest local rate, for algorithms that need others.
        remembers: does it keep something of each client between rounds?
    """

    overrides: list[str]
    about: str = ""
    knob: TunedParameter | None = None
    rates: float = 1.0
    remembers: bool = False


@dataclass
class Track:
    """Data and model, and the cells on them.

    Attributes:
        about: in a few words.
        overrides: that make it.
        rates: lowest and highest local rate that is tried.
        tuned_at: the places, axis → label, where rates are tuned; a trial's score is its mean over them.
        target: of the board's main metric, for what it costs to reach it.
        axes: axis → labels, where not all of the board's.
    """

    about: str
    overrides: list[str]
    rates: tuple[float, float]
    tuned_at: list[dict[str, str]]
    target: float
    axes: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Board:
    """Attributes:

    name: of its file.
    title, about: what it asks.
    base: Hydra overrides of every run.
    seeds: of the rows.
    axes: axis → label → overrides.
    tracks, entries: by name.
    tuning: how rates are found.
    measures: what is told of every row, by name; the first one makes the order.
    against: the entry that the others are held against.
    compared: digests that all rows of a cell must share.
    findings: what the numbers say, when there are some.
    """

    name: str
    title: str
    about: str
    base: list[str]
    seeds: list[int]
    axes: dict[str, dict[str, list[str]]]
    tracks: dict[str, Track]
    entries: dict[str, Entry]
    tuning: Tuning
    measures: dict[str, BoardMeasure]
    against: str
    compared: list[str]
    findings: list[Finding] = field(default_factory=list)

    @property
    def main_measure(self) -> str:
        """The measure that makes the order."""
        return next(iter(self.measures))

    def cells(self, track: str | None = None) -> list[Cell]:
        """Those of a track, or all, in their order."""
        names = list(self.tracks) if track is None else [track]
        return [self.cell(name, dict(at)) for name in names for at in self._variants(self.tracks[name])]

    def cell(self, track: str, at: Mapping[str, str]) -> Cell:
        """The one at these labels."""
        overrides = [*self.tracks[track].overrides, *(o for axis in self.axes for o in self.axes[axis][at[axis]])]
        return Cell(track, tuple((axis, at[axis]) for axis in self.axes), tuple(overrides))

    def cell_named(self, name: str) -> Cell:
        """A cell by its name.

        Raises:
            ConfigError: there is none.
        """
        cells = {cell.name: cell for cell in self.cells()}
        return cells[checks.choice("--cell", name, cells)]

    def _variants(self, track: Track) -> list[tuple[tuple[str, str], ...]]:
        labels = [[(axis, label) for label in track.axes.get(axis, self.axes[axis])] for axis in self.axes]
        return list(itertools.product(*labels))

    def check(self) -> None:
        """Refuse a board that contradicts itself."""
        prefix = f"board {self.name}"
        checks.choice(f"{prefix}: against", self.against, self.entries)
        if set(self.seeds) & set(self.tuning.seeds):
            raise ConfigError(f"{prefix}: tuning.seeds={self.tuning.seeds} and seeds={self.seeds} share some")
        for name, track in self.tracks.items():
            self._check_track(f"{prefix}: tracks.{name}", track)
        for name, entry in self.entries.items():
            self.tuning.check(f"{prefix}: entries.{name}", entry.knob)
        for number, finding in enumerate(self.findings, 1):
            for comparison in finding.shown_by:
                cells = [cell.name for cell in self.cells()]
                comparison.check(f"{prefix}: findings {number}", self.entries, self.measures, cells)

    def _check_track(self, prefix: str, track: Track) -> None:
        """Axes, labels and places that the board has."""
        for axis, labels in track.axes.items():
            checks.choice(f"{prefix}.axes", axis, self.axes)
            for label in labels:
                checks.choice(f"{prefix}.axes.{axis}", label, self.axes[axis])
        for at in track.tuned_at:
            if at.keys() != self.axes.keys():
                raise ConfigError(f"{prefix}.tuned_at={at} must name {', '.join(self.axes)}")
            for axis, label in at.items():
                checks.choice(f"{prefix}.tuned_at.{axis}", label, self.axes[axis])
        if not track.tuned_at:
            raise ConfigError(f"{prefix}.tuned_at is empty; name a place where rates are tuned")


def board_folder() -> Path:
    """Where boards are described."""
    return recipe_folder() / BOARDS_FOLDER


def results_folder() -> Path:
    """Where committed results are; of an installed package, which has none, a folder of the user's."""
    root = recipe_folder()
    return root / RESULTS_FOLDER if (root.parent / "fedsim").is_dir() else Path(RESULTS_FOLDER)


def board_names(folder: Path | None = None) -> list[str]:
    """All boards."""
    return sorted(path.stem for path in (folder or board_folder()).glob("*.yaml"))


def load_board(name: str, folder: Path | None = None) -> Board:
    """Read a board by its name.

    Raises:
        ConfigError: for an unknown board, or one that contradicts itself.
    """
    directory = folder or board_folder()
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # for classes of its own
    with read_description("board", name, directory, board_names(folder), "fedsim-leaderboard") as content:
        board = _board(name, content)
        board.check()
    return board


def _board(name: str, content: dict[str, Any]) -> Board:
    content["axes"] = {axis: choices(labels) for axis, labels in content["axes"].items()}
    content["tracks"] = {str(key): Track(**_labels_as_text(value)) for key, value in content["tracks"].items()}
    content["entries"] = {str(key): parse_entry(value) for key, value in content["entries"].items()}
    content["tuning"] = Tuning(**content["tuning"])
    content["measures"] = {key: BoardMeasure(**value) for key, value in content["measures"].items()}
    content["findings"] = [Finding.from_content(finding) for finding in content.get("findings") or []]
    return Board(name, **content)


def parse_entry(content_or_text: Any) -> Entry:
    """From YAML: one override, or the attributes of an `Entry`."""
    if isinstance(content_or_text, str):
        return Entry([content_or_text])
    content = dict(content_or_text)
    if isinstance(content["overrides"], str):
        content["overrides"] = [content["overrides"]]
    knob = content.pop("knob", None)
    return Entry(**content, knob=TunedParameter(**knob) if knob else None)


def _labels_as_text(track: dict[str, Any]) -> dict[str, Any]:
    """Labels that YAML reads as numbers, as text again; a pair of rates."""
    axes = {axis: [str(label) for label in labels] for axis, labels in (track.get("axes") or {}).items()}
    tuned_at = [{axis: str(label) for axis, label in at.items()} for at in track["tuned_at"]]
    low, high = track["rates"]
    return track | {"axes": axes, "tuned_at": tuned_at, "rates": (float(low), float(high))}
