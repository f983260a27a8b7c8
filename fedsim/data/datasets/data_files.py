"""What a data set is read from: files under the data root, where they are published, and how they get there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedsim.core.torchvision_import import torchvision


def data_root(root: str | None) -> Path:
    """The folder data sets are read from: `dataset.root`, else the variable FEDSIM_DATA, else ./data."""
    return Path(root or os.environ.get("FEDSIM_DATA") or "data").expanduser()


@dataclass(frozen=True)
class Files:
    """The files of one data set.

    Attributes:
        forms: paths under the data root; all those of one form are needed, and the first complete form is read.
        source: where they are published.
        url: an archive of them; None where torchvision fetches them, or where only a person can.
        folder: under the data root, where that archive is unpacked.
        torchvision: whether `dataset.download=true` fetches them.
        module, extra: what else reads them, and the extra of the package that brings it.
    """

    forms: tuple[tuple[str, ...], ...]
    source: str
    url: str | None = None
    folder: str = ""
    torchvision: bool = False
    module: str | None = None
    extra: str | None = None

    def locate(self, root: Path) -> list[Path]:
        """The paths of the form that is there; none where no form is complete."""
        for form in self.forms:
            if all((root / path).exists() for path in form):
                return [root / path for path in form]
        return []

    @property
    def by_hand(self) -> bool:
        """Must a person get them?"""
        return self.url is None and not self.torchvision

    def remedy(self, name: str) -> str:
        """What to do where they are absent, as half a sentence."""
        if self.torchvision:
            return f"add dataset.download=true where a network is at hand, or get them from {self.source}"
        if self.by_hand:
            return f"get {', '.join(Path(path).name for path in self.forms[-1])} from {self.source}"
        command = f"`fedsim data {name}` gets them where a network is at hand"
        return f"{command}; elsewhere unpack {self.url} in {self.folder} under the data root"

    def fetch(self, root: Path) -> None:
        """Download the archive and unpack it where it belongs; the archive itself is not kept."""
        folder = str(root / self.folder)
        torchvision().datasets.utils.download_and_extract_archive(self.url, folder, remove_finished=True)
