"""What a board keeps of its algorithms track by track, in one file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from fedsim.core.files import write_json


@dataclass
class TrackSettings:
    """Attributes:

    by_track: track → entry → what is known of it.
    """

    file: ClassVar[str]

    by_track: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Those of a board's folder; nothing where there is no file."""
        path = folder / cls.file
        return cls(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def write(self, folder: Path) -> None:
        """Keep them."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / self.file, self.by_track)

    def update(self, track: str, settings: dict[str, dict[str, Any]]) -> None:
        """Entry → what is known of it in this track."""
        self.by_track.setdefault(track, {}).update(settings)

    def of(self, track: str, entry: str) -> dict[str, Any] | None:
        """What is known of it; None: nothing yet."""
        return self.by_track.get(track, {}).get(entry)

    def forget(self, entry: str) -> None:
        """Nothing is known of it any more."""
        for track in self.by_track.values():
            track.pop(entry, None)
