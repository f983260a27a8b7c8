"""TensorBoard event files: a folder for the mean over replicates beside one for each, named as they are to be read.

Those of a sweep are read as `strategy=fedawe/mean` and `strategy=fedawe/seed_0`. The folders lie side by side because
TensorBoard takes what lies below a row of its HPARAMS table for more results of that row.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.evaluation.columns import COLUMNS, MEASURED, MODELS, also
from fedsim.personal import PERSONAL_COLUMNS
from fedsim.tracking.result import Row, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS = {
    "test_loss": "loss/test",
    "train_loss": "loss/train",
    "test_accuracy": "accuracy/test",
    "test_accuracy_by_client": "accuracy/test, mean over clients",
    "train_accuracy": "accuracy/train",
    "client_accuracy_worst10": "accuracy/worst tenth of clients",
    "performative_risk": "loss/performative risk",
    "decoupled_loss": "loss/decoupled",
    "distance_to_optimum": "distance/to optimum",
    "distance_to_ps": "distance/to PS (stable)",
    "distance_to_po": "distance/to PO (optimal)",
    "active_clients": "participation/active clients",
    "mean_active_clients": "participation/mean active clients",
    "bytes_down": "bytes/to clients, last round",
    "bytes_up": "bytes/to the server, last round",
    "total_bytes_down": "bytes/to clients, so far",
    "total_bytes_up": "bytes/to the server, so far",
} | {name: name.replace("_", "/", 1).replace("_", " ") for name in PERSONAL_COLUMNS}
GROUPS |= {
    of: f"{GROUPS[name]}, {what.removeprefix('the ')}"
    for model, what in MODELS.items()
    for name, of in also(model, MEASURED).items()
    if name in GROUPS
}
ADDED = re.compile(rf"(?:({'|'.join(MODELS)})_)?(test|train|client)_(.+)")  # columns of metrics that a user adds
SETS = {"test": "test", "train": "train", "client": "worst tenth of clients"}


def tag(column: str) -> str | None:
    """Where a column's curve stands; None for those that are not drawn."""
    if column in GROUPS or column in COLUMNS:
        return GROUPS.get(column)
    if not (match := ADDED.fullmatch(column)):
        return column.replace("_", "/", 1).replace("_", " ")  # of clients' own models
    model, over, metric = match.groups()
    metric = metric.removesuffix("_worst10") if over == "client" else metric
    return f"{metric}/{SETS[over]}" + (f", {MODELS[model].removeprefix('the ')}" if model else "")


def _wait_for_a_later_name(folder: Path) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second they were opened in: wait,
    for a second at most, until a new file comes after those that are there."""
    opened = [path.name.split(".")[3] for path in folder.glob("*/events.out.tfevents.*")]
    newest = max((int(second) for second in opened if second.isdigit()), default=0)
    while int(time.time()) == newest:
        time.sleep(0.02)


class TensorBoard:
    """Writes one evaluation at a time.

    Args:
        folder: of the run; event files go into `mean` and `seed_S` in it, those of a single replicate into `seed_S`.
        seeds: of the replicates.
        purge_from: the first round that will be written (again); older points from there on are hidden.
    """

    def __init__(self, folder: Path, seeds: tuple[int, ...], purge_from: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _wait_for_a_later_name(folder)
        names = [f"seed_{s}" + (f"_replicate_{r}" if seeds.count(s) > 1 else "") for r, s in enumerate(seeds)]
        first, *others = ["mean", *names] if len(seeds) > 1 else names
        self.mean = SummaryWriter(str(folder / first), purge_step=purge_from)
        self.each = [SummaryWriter(str(folder / name), purge_step=purge_from) for name in others]

    def write(self, completed: int, rows: list[Row], clients: dict[str, np.ndarray]) -> None:
        """The scalars of every replicate, their mean, and what was measured of every client as histograms."""
        for name in rows[0]:
            if (place := tag(name)) is not None:
                self.mean.add_scalar(place, mean_std([row[name] for row in rows])[0], completed)
                for writer, row in zip(self.each, rows, strict=False):
                    writer.add_scalar(place, row[name], completed)
        for name, values in clients.items():
            if len(values):
                self.mean.add_histogram(f"clients/{name}", values, completed, bins="auto")
        self.flush()

    def figure(self, tag: str, figure: Figure, completed: int) -> None:
        """A picture."""
        self.mean.add_figure(tag, figure, completed)

    def hparams(self, settings: dict[str, Any]) -> None:
        """The settings for the HPARAMS table; its results are the last points of the metrics' own curves.

        What the columns are is left to TensorBoard: it looks at all runs of a sweep, and puts first what differs. Said
        by a run, which knows but its own settings, they would be those of whichever run is found first.
        """
        from torch.utils.tensorboard.summary import hparams

        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in settings.items()}
        _columns, start, end = hparams(plain, {})
        for summary in (start, end):
            self.mean._get_file_writer().add_summary(summary)

    def flush(self) -> None:
        """All of it is in the files now, or an OSError says why not."""
        for writer in (self.mean, *self.each):
            writer.flush()

    def close(self) -> None:
        for writer in (self.mean, *self.each):
            writer.close()
