"""Records of a board's algorithms in each track, stored in one JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from fedsim.core.files import write_json


@dataclass
class TunedTrackRecords:
    """The records of a board's entries in each track.

    Attributes:
        by_track: track → entry → record.
    """

    file_name: ClassVar[str]

    by_track: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the records from a board's folder; they are empty if there is no file."""
        path = folder / cls.file_name
        return cls(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def write(self, folder: Path) -> None:
        """Write the records to a board's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / self.file_name, self.by_track)

    def update(self, track: str, settings: dict[str, dict[str, Any]]) -> None:
        """Add or replace the records of entries (entry → record) in this track."""
        self.by_track.setdefault(track, {}).update(settings)

    def record_of(self, track: str, entry: str) -> dict[str, Any] | None:
        """Return the record of an entry in a track; None if there is none yet."""
        return self.by_track.get(track, {}).get(entry)

    def remove_entry(self, entry: str) -> None:
        """Delete the records of an entry in all tracks."""
        for track in self.by_track.values():
            track.pop(entry, None)
