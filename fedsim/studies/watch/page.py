"""The page: curves, a table of the runs, and what may be chosen; a Bokeh document for each visitor.

Names of runs and of metrics may come from somebody else. The page shows them as text: in cells that escape their
content, in text that is drawn and not parsed as a formula, and in no template.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource, CustomJS, HoverTool, PlainText
from bokeh.models.widgets.inputs import Checkbox, Select
from bokeh.models.widgets.markups import Div
from bokeh.models.widgets.tables import DataTable, StringFormatter, TableColumn
from bokeh.plotting import figure

from fedsim.app.job_progress import LEADING_METRICS
from fedsim.evaluation.registry import DISTANCE_COLUMNS
from fedsim.studies.results.runs import measured_columns, run_that_measures
from fedsim.studies.watch.curves import BAND_KINDS, curve, last_value
from fedsim.studies.watch.folder import Snapshot, WatchedFolder, WatchedRun, one_line

PAGE_TITLE = "fedsim watch"
COLOURS = (  # Okabe–Ito (Okabe and Ito 2008) without yellow, and two more
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F", "#8C510A", "#6A3D9A",
)  # fmt: skip
DASHES: tuple[list[int], ...] = ([], [6], [2, 4], [2, 4, 6, 4])  # for runs beyond the colours
AXIS_SCALES: tuple[Literal["linear", "log"], ...] = ("linear", "log")
COLUMN_HEADINGS = {
    "run": "run",
    "state": "state",
    "round": "round",
    "value": "last value",
    "changed": "last evaluation",
}
COLUMN_WIDTHS = {"run": 330, "state": 75, "round": 90, "value": 130, "changed": 120, "message": 380}


class Page:
    """One visitor's page.

    Args:
        document: of the visitor.
        watched: the folder, which all visitors share.
    """

    def __init__(self, document: Document, watched: WatchedFolder) -> None:
        self._watched = watched
        self._styles: dict[str, int] = {}  # folder → the number of its colour, which it keeps
        self._selected_folders: set[str] = set()  # folders of the runs that are drawn; none: all
        self._rows: dict[str, list[Any]] = {}
        self._leading_metric = ""  # the metric that is shown unless the visitor chooses another
        self.metric: Any = Select(title="metric", options=[], value="", width=330, name="metric")
        bands: list[Any] = list(BAND_KINDS)
        self.band: Any = Select(title="band over seeds", options=bands, value=BAND_KINDS[0], width=210, name="band")
        self.logarithmic = Checkbox(label="logarithmic", active=False, name="logarithmic", margin=(30, 5, 5, 5))
        self.status = Div(text="", render_as_text=True, name="status", sizing_mode="stretch_width")
        self.lines = ColumnDataSource({"xs": [], "ys": [], "colour": [], "dash": [], "run": []}, name="lines")
        self.bands = ColumnDataSource({"xs": [], "ys": [], "colour": []}, name="bands")
        self.table = ColumnDataSource({name: [] for name in (*COLUMN_WIDTHS, "colour", "folder")}, name="table")
        self._plots = {scale: self._plot(scale) for scale in AXIS_SCALES}
        self._set_scale()
        self.metric.on_change("value", self._on_metric)
        self.band.on_change("value", self._on_band)
        self.logarithmic.on_change("active", self._on_scale)
        self.table.selected.on_change("indices", self._on_selection)
        document.title = PAGE_TITLE
        document.add_root(
            column(
                self.status,
                row(self.metric, self.band, self.logarithmic, styles={"flex-wrap": "wrap"}),
                *self._plots.values(),
                Div(text="Select rows to draw these runs alone (Ctrl or Shift for several).", render_as_text=True),
                self._data_table(),
                sizing_mode="stretch_width",
            )
        )
        document.add_periodic_callback(self.refresh, round(1000 * watched.seconds))
        self.refresh()

    def _plot(self, scale: Literal["linear", "log"]) -> Any:
        plot = figure(
            height=420,
            sizing_mode="stretch_width",
            y_axis_type=scale,
            tools="pan,wheel_zoom,box_zoom,reset,save",
            output_backend="svg",
            name=f"{scale} curves",
        )
        plot.xaxis.axis_label = "round"
        plot.yaxis.axis_label = PlainText(text="")
        plot.patches("xs", "ys", source=self.bands, fill_color="colour", fill_alpha=0.18, line_alpha=0)
        lines = plot.multi_line(
            "xs", "ys", source=self.lines, line_color="colour", line_dash="dash", line_width=2, hover_line_width=4
        )
        tooltips = [("run", "@run"), ("round", "$x{0}"), ("value", "$y{0.000}")]
        plot.add_tools(HoverTool(renderers=[lines], tooltips=tooltips, line_policy="nearest"))
        return plot

    def _data_table(self) -> DataTable:
        columns = [
            TableColumn(
                field=name,
                title=COLUMN_HEADINGS.get(name, name),
                width=width,
                formatter=StringFormatter(text_color="colour") if name == "run" else StringFormatter(),
            )
            for name, width in COLUMN_WIDTHS.items()
        ]
        table = DataTable(
            source=self.table,
            columns=columns,
            height=330,
            sizing_mode="stretch_width",
            index_position=None,
            selectable=True,
            editable=False,
            reorderable=False,
        )
        # Bokeh before the release with its pull request 15136 draws a table again where the number of rows changes only
        self.table.js_on_change("data", CustomJS(args={"table": table}, code="table.view.change.emit()"))
        return table

    def _set_scale(self) -> None:
        self._plots["linear"].visible = not self.logarithmic.active
        self._plots["log"].visible = bool(self.logarithmic.active)

    def _on_metric(self, attr: str, old: str, new: str) -> None:
        self.logarithmic.active = new in DISTANCE_COLUMNS
        self.refresh()

    def _on_band(self, attr: str, old: str, new: str) -> None:
        self.refresh()

    def _on_scale(self, attr: str, old: bool, new: bool) -> None:
        self._set_scale()

    def _on_selection(self, attr: str, old: Sequence[int], new: Sequence[int]) -> None:
        folders = self.table.data["folder"]
        self._selected_folders = {folders[index] for index in new if index < len(folders)}
        self.refresh()

    def refresh(self) -> None:
        """Update the page to the current state of the folder; unchanged parts are not sent again."""
        snapshot = self._watched.snapshot()
        self._offer_metrics(snapshot)
        self._show_table(snapshot)
        self._draw(snapshot)
        self.status.text = self._summary(snapshot)

    def _offer_metrics(self, snapshot: Snapshot) -> None:
        names = measured_columns(snapshot.measured)
        options = [(name, one_line(_heading(snapshot, name))) for name in names]
        if self.metric.options != options:
            self.metric.options = options
        if names and (self.metric.value not in names or self.metric.value == self._leading_metric):
            self._leading_metric = next((name for name in LEADING_METRICS if name in names), names[0])
            self.metric.value = self._leading_metric
        label = one_line(_heading(snapshot, self.metric.value)) if self.metric.value in names else ""
        for plot in self._plots.values():
            if plot.yaxis[0].axis_label.text != label:
                plot.yaxis[0].axis_label = PlainText(text=label)

    def _show_table(self, snapshot: Snapshot) -> None:
        table_rows = [self._row(watched) for watched in snapshot.runs]
        rows = {name: [line[name] for line in table_rows] for name in self.table.data}
        if rows == self._rows:
            return
        indices = [number for number, folder in enumerate(rows["folder"]) if folder in self._selected_folders]
        self._rows = rows
        self.table.data = dict(rows)
        if self.table.selected.indices != indices:
            self.table.selected.indices = indices

    def _row(self, watched: WatchedRun) -> dict[str, str]:
        run, rounds = watched.run, watched.run.settings.get("rounds") if watched.run else None
        last = run.rows[-1]["round"] if run else 0
        return {
            "run": watched.label,
            "state": watched.state,
            "round": f"{last}/{rounds}" if rounds else f"{last}",
            "value": last_value(run, self.metric.value) if run and self.metric.value else "",
            "changed": time.strftime("%H:%M:%S", time.localtime(watched.changed)) if watched.changed else "",
            "message": watched.message,
            "colour": COLOURS[self._style(watched) % len(COLOURS)],
            "folder": str(watched.folder),
        }

    def _draw(self, snapshot: Snapshot) -> None:
        lines: dict[str, list[Any]] = {name: [] for name in self.lines.data}
        bands: dict[str, list[Any]] = {name: [] for name in self.bands.data}
        for watched in snapshot.runs:
            if watched.run is None or (self._selected_folders and str(watched.folder) not in self._selected_folders):
                continue
            drawn = curve(watched.run, self.metric.value, self.band.value)
            if drawn is None:
                continue
            style = self._style(watched)
            colour, dash = COLOURS[style % len(COLOURS)], DASHES[style // len(COLOURS) % len(DASHES)]
            for name, entry in zip(lines, (drawn.rounds, drawn.mean, colour, dash, watched.label), strict=True):
                lines[name].append(entry.tolist() if isinstance(entry, np.ndarray) else entry)
            finite = np.isfinite(drawn.low) & np.isfinite(drawn.high)
            if finite.sum() > 1:
                rounds = drawn.rounds[finite]
                bands["xs"].append([*rounds.tolist(), *rounds[::-1].tolist()])
                bands["ys"].append([*drawn.low[finite].tolist(), *drawn.high[finite][::-1].tolist()])
                bands["colour"].append(colour)
        for source, data in ((self.lines, lines), (self.bands, bands)):
            if not _same(source.data, data):
                source.data = data

    def _style(self, watched: WatchedRun) -> int:
        return self._styles.setdefault(str(watched.folder), len(self._styles))

    def _summary(self, snapshot: Snapshot) -> str:
        counts: dict[str, int] = {}
        for watched in snapshot.runs:
            counts[watched.state] = counts.get(watched.state, 0) + 1
        counts_text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none yet"
        left_out = f", the first {len(snapshot.runs)} shown" if snapshot.total > len(snapshot.runs) else ""
        total = (
            f"{snapshot.total} of {snapshot.planned}" if (snapshot.planned or 0) > snapshot.total else snapshot.total
        )
        read_at = time.strftime("%H:%M:%S", time.localtime(snapshot.read_at))
        return f"{one_line(str(self._watched.folder))}: {total} runs ({counts_text}{left_out}); read at {read_at}"


def _heading(snapshot: Snapshot, name: str) -> str:
    return run_that_measures(snapshot.measured, name).describe(name).heading


def _same(before: Any, after: dict[str, list[Any]]) -> bool:
    """Return whether the columns are equal, with NaN equal to itself."""
    return repr({name: list(before[name]) for name in after}) == repr(after)
