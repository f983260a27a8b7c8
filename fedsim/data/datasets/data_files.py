"""Files of a data set: their paths under the data root, where they are published, and how to download them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedsim.core.torchvision_import import import_torchvision


def data_root(root: str | None) -> Path:
    """The folder from which data sets are read: `dataset.root`, else the variable FEDSIM_DATA, else ./data."""
    return Path(root or os.environ.get("FEDSIM_DATA") or "data").expanduser()


@dataclass(frozen=True)
class Files:
    """The files of one data set.

    Attributes:
        forms: alternative lists of paths under the data root; the first list whose files all exist is read.
        source: where they are published.
        url: an archive of them; None if torchvision downloads them, or if they can only be downloaded by hand.
        folder: under the data root, where that archive is unpacked.
        torchvision: whether `dataset.download=true` fetches them.
        module, extra: another module needed to read them, and the extra of fedsim that installs it.
    """

    forms: tuple[tuple[str, ...], ...]
    source: str
    url: str | None = None
    folder: str = ""
    torchvision: bool = False
    module: str | None = None
    extra: str | None = None

    def existing_paths(self, root: Path) -> list[Path]:
        """The paths of the first complete form; empty if no form is complete."""
        for form in self.forms:
            if all((root / path).exists() for path in form):
                return [root / path for path in form]
        return []

    @property
    def is_manual_download(self) -> bool:
        """Whether the files can only be downloaded by hand."""
        return self.url is None and not self.torchvision

    def remedy(self, name: str) -> str:
        """What to do if files are missing, as a clause for error messages."""
        if self.torchvision:
            return f"set dataset.download=true if a network is available, or download them from {self.source}"
        if self.is_manual_download:
            return f"get {', '.join(Path(path).name for path in self.forms[-1])} from {self.source}"
        command = f"`fedsim data {name}` downloads them if a network is available"
        return f"{command}; otherwise unpack {self.url} in {self.folder} under the data root"

    def fetch(self, root: Path) -> None:
        """Download the archive and unpack it under the data root; the archive itself is deleted."""
        folder = str(root / self.folder)
        import_torchvision().datasets.utils.download_and_extract_archive(self.url, folder, remove_finished=True)
