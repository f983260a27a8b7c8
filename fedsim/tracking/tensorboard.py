"""TensorBoard event files: the mean over replicates in the run folder, each replicate beside it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.personal import PERSONAL_COLUMNS
from fedsim.tracking.result import Row, mean_std

GROUPS = {
    "test_loss": "loss/test",
    "train_loss": "loss/train",
    "test_accuracy": "accuracy/test",
    "train_accuracy": "accuracy/train",
    "client_accuracy_worst10": "accuracy/worst tenth of clients",
    "distance_to_optimum": "distance/to optimum",
    "active_clients": "participation/active clients",
    "mean_active_clients": "participation/mean active clients",
} | {name: name.replace("_", "/", 1).replace("_", " ") for name in PERSONAL_COLUMNS}


def _wait_for_a_later_name(folder: Path) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second they were opened in: wait,
    for a second at most, until a new file comes after those that are there."""
    opened = [path.name.split(".")[3] for path in folder.rglob("events.out.tfevents.*")]
    newest = max((int(second) for second in opened if second.isdigit()), default=0)
    while int(time.time()) == newest:
        time.sleep(0.02)


class TensorBoard:
    """Writes one evaluation at a time.

    Args:
        folder: for event files; with several replicates each gets a sub-folder `seed_S`.
        seeds: of the replicates.
        purge_from: the first round that will be written (again); older points from there on are hidden.
    """

    def __init__(self, folder: Path, seeds: tuple[int, ...], purge_from: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _wait_for_a_later_name(folder)
        self.mean = SummaryWriter(str(folder), purge_step=purge_from)
        names = [f"seed_{s}" + (f"_replicate_{r}" if seeds.count(s) > 1 else "") for r, s in enumerate(seeds)]
        each = [folder / name for name in names] if len(seeds) > 1 else []
        self.each = [SummaryWriter(str(f), purge_step=purge_from) for f in each]

    def write(self, completed: int, rows: list[Row], clients: dict[str, np.ndarray]) -> None:
        """The scalars of every replicate, their mean, and what was measured of every client as histograms."""
        for name, tag in GROUPS.items():
            if name in rows[0]:
                self.mean.add_scalar(tag, mean_std([row[name] for row in rows])[0], completed)
                for writer, row in zip(self.each, rows, strict=False):
                    writer.add_scalar(tag, row[name], completed)
        for name, values in clients.items():
            if len(values):
                self.mean.add_histogram(f"clients/{name}", values, completed, bins="auto")
        for writer in (self.mean, *self.each):
            writer.flush()

    def image(self, tag: str, pixels: np.ndarray, completed: int) -> None:
        """An image [H, W, 3] in [0, 1]."""
        self.mean.add_image(tag, pixels, completed, dataformats="HWC")

    def hparams(self, settings: dict[str, Any], metrics: list[str]) -> None:
        """The settings for the HPARAMS table; its results are the last points of the metrics' own curves."""
        from torch.utils.tensorboard.summary import hparams

        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in settings.items()}
        for summary in hparams(plain, {GROUPS[name]: 0.0 for name in metrics if name in GROUPS}):
            self.mean._get_file_writer().add_summary(summary)

    def close(self) -> None:
        for writer in (self.mean, *self.each):
            writer.close()
