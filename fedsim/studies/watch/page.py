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
from fedsim.studies.results.runs import final_metric_columns, run_that_measures
from fedsim.studies.watch.curves import BAND_KINDS, final_value_text, make_curve
from fedsim.studies.watch.folder import FolderSnapshot, WatchedFolder, WatchedRun, single_line

PAGE_TITLE = "fedsim watch"
RUN_COLOURS = (  # Okabe–Ito (Okabe and Ito 2008) without yellow, and two more
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F", "#8C510A", "#6A3D9A",
)  # fmt: skip
RUN_DASHES: tuple[list[int], ...] = ([], [6], [2, 4], [2, 4, 6, 4])  # for runs beyond the colours
AXIS_SCALES: tuple[Literal["linear", "log"], ...] = ("linear", "log")
COLUMN_HEADINGS = {
    "run": "run",
    "state": "state",
    "round": "round",
    "value": "last value",
    "changed": "last evaluation",
}
COLUMN_WIDTHS = {"run": 330, "state": 75, "round": 90, "value": 130, "changed": 120, "message": 380}


class WatchPage:
    """One visitor's page.

    Args:
        document: of the visitor.
        watched_folder: the folder, which all visitors share.
    """

    def __init__(self, document: Document, watched_folder: WatchedFolder) -> None:
        self._watched_folder = watched_folder
        self._styles: dict[str, int] = {}  # folder → the number of its colour, which it keeps
        self._selected_folders: set[str] = set()  # folders of the runs that are drawn; none: all
        self._rows: dict[str, list[Any]] = {}
        self._leading_metric = ""  # the metric that is shown unless the visitor chooses another
        self.metric_select: Any = Select(title="metric", options=[], value="", width=330, name="metric")
        bands: list[Any] = list(BAND_KINDS)
        self.band_select: Any = Select(
            title="band over seeds", options=bands, value=BAND_KINDS[0], width=210, name="band"
        )
        self.logarithmic_checkbox = Checkbox(
            label="logarithmic", active=False, name="logarithmic", margin=(30, 5, 5, 5)
        )
        self.status_text = Div(text="", render_as_text=True, name="status", sizing_mode="stretch_width")
        self.line_source = ColumnDataSource({"xs": [], "ys": [], "colour": [], "dash": [], "run": []}, name="lines")
        self.band_source = ColumnDataSource({"xs": [], "ys": [], "colour": []}, name="bands")
        self.table_source = ColumnDataSource({name: [] for name in (*COLUMN_WIDTHS, "colour", "folder")}, name="table")
        self._plots = {scale: self._plot(scale) for scale in AXIS_SCALES}
        self._set_scale()
        self.metric_select.on_change("value", self._on_metric_change)
        self.band_select.on_change("value", self._on_band_change)
        self.logarithmic_checkbox.on_change("active", self._on_scale_change)
        self.table_source.selected.on_change("indices", self._on_table_selection)
        document.title = PAGE_TITLE
        document.add_root(
            column(
                self.status_text,
                row(self.metric_select, self.band_select, self.logarithmic_checkbox, styles={"flex-wrap": "wrap"}),
                *self._plots.values(),
                Div(text="Select rows to draw these runs alone (Ctrl or Shift for several).", render_as_text=True),
                self._data_table(),
                sizing_mode="stretch_width",
            )
        )
        document.add_periodic_callback(self.refresh, round(1000 * watched_folder.seconds))
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
        plot.patches("xs", "ys", source=self.band_source, fill_color="colour", fill_alpha=0.18, line_alpha=0)
        lines = plot.multi_line(
            "xs", "ys", source=self.line_source, line_color="colour", line_dash="dash", line_width=2, hover_line_width=4
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
            source=self.table_source,
            columns=columns,
            height=330,
            sizing_mode="stretch_width",
            index_position=None,
            selectable=True,
            editable=False,
            reorderable=False,
        )
        # Bokeh before the release with its pull request 15136 draws a table again where the number of rows changes only
        self.table_source.js_on_change("data", CustomJS(args={"table": table}, code="table.view.change.emit()"))
        return table

    def _set_scale(self) -> None:
        self._plots["linear"].visible = not self.logarithmic_checkbox.active
        self._plots["log"].visible = bool(self.logarithmic_checkbox.active)

    def _on_metric_change(self, attr: str, old: str, new: str) -> None:
        self.logarithmic_checkbox.active = new in DISTANCE_COLUMNS
        self.refresh()

    def _on_band_change(self, attr: str, old: str, new: str) -> None:
        self.refresh()

    def _on_scale_change(self, attr: str, old: bool, new: bool) -> None:
        self._set_scale()

    def _on_table_selection(self, attr: str, old: Sequence[int], new: Sequence[int]) -> None:
        folders = self.table_source.data["folder"]
        self._selected_folders = {folders[index] for index in new if index < len(folders)}
        self.refresh()

    def refresh(self) -> None:
        """Update the page to the current state of the folder; unchanged parts are not sent again."""
        snapshot = self._watched_folder.snapshot()
        self._update_metric_options(snapshot)
        self._show_table(snapshot)
        self._update_curves(snapshot)
        self.status_text.text = self._summary(snapshot)

    def _update_metric_options(self, snapshot: FolderSnapshot) -> None:
        names = final_metric_columns(snapshot.measured_runs)
        options = [(name, single_line(_metric_heading(snapshot, name))) for name in names]
        if self.metric_select.options != options:
            self.metric_select.options = options
        if names and (self.metric_select.value not in names or self.metric_select.value == self._leading_metric):
            self._leading_metric = next((name for name in LEADING_METRICS if name in names), names[0])
            self.metric_select.value = self._leading_metric
        label = (
            single_line(_metric_heading(snapshot, self.metric_select.value))
            if self.metric_select.value in names
            else ""
        )
        for plot in self._plots.values():
            if plot.yaxis[0].axis_label.text != label:
                plot.yaxis[0].axis_label = PlainText(text=label)

    def _show_table(self, snapshot: FolderSnapshot) -> None:
        table_rows = [self._table_row(watched_run) for watched_run in snapshot.runs]
        rows = {name: [line[name] for line in table_rows] for name in self.table_source.data}
        if rows == self._rows:
            return
        indices = [number for number, folder in enumerate(rows["folder"]) if folder in self._selected_folders]
        self._rows = rows
        self.table_source.data = dict(rows)
        if self.table_source.selected.indices != indices:
            self.table_source.selected.indices = indices

    def _table_row(self, watched_run: WatchedRun) -> dict[str, str]:
        run, rounds = watched_run.run, watched_run.run.settings.get("rounds") if watched_run.run else None
        last_round = run.rows[-1]["round"] if run else 0
        return {
            "run": watched_run.label,
            "state": watched_run.state,
            "round": f"{last_round}/{rounds}" if rounds else f"{last_round}",
            "value": final_value_text(run, self.metric_select.value) if run and self.metric_select.value else "",
            "changed": time.strftime("%H:%M:%S", time.localtime(watched_run.last_change_time))
            if watched_run.last_change_time
            else "",
            "message": watched_run.message,
            "colour": RUN_COLOURS[self._style_index(watched_run) % len(RUN_COLOURS)],
            "folder": str(watched_run.folder),
        }

    def _update_curves(self, snapshot: FolderSnapshot) -> None:
        lines: dict[str, list[Any]] = {name: [] for name in self.line_source.data}
        bands: dict[str, list[Any]] = {name: [] for name in self.band_source.data}
        for watched_run in snapshot.runs:
            if watched_run.run is None or (
                self._selected_folders and str(watched_run.folder) not in self._selected_folders
            ):
                continue
            drawn_curve = make_curve(watched_run.run, self.metric_select.value, self.band_select.value)
            if drawn_curve is None:
                continue
            style = self._style_index(watched_run)
            colour, dash = (
                RUN_COLOURS[style % len(RUN_COLOURS)],
                RUN_DASHES[style // len(RUN_COLOURS) % len(RUN_DASHES)],
            )
            for name, entry in zip(
                lines, (drawn_curve.rounds, drawn_curve.mean, colour, dash, watched_run.label), strict=True
            ):
                lines[name].append(entry.tolist() if isinstance(entry, np.ndarray) else entry)
            finite = np.isfinite(drawn_curve.lower_band) & np.isfinite(drawn_curve.upper_band)
            if finite.sum() > 1:
                rounds = drawn_curve.rounds[finite]
                bands["xs"].append([*rounds.tolist(), *rounds[::-1].tolist()])
                bands["ys"].append(
                    [*drawn_curve.lower_band[finite].tolist(), *drawn_curve.upper_band[finite][::-1].tolist()]
                )
                bands["colour"].append(colour)
        for source, data in ((self.line_source, lines), (self.band_source, bands)):
            if not _columns_equal(source.data, data):
                source.data = data

    def _style_index(self, watched_run: WatchedRun) -> int:
        return self._styles.setdefault(str(watched_run.folder), len(self._styles))

    def _summary(self, snapshot: FolderSnapshot) -> str:
        counts: dict[str, int] = {}
        for watched_run in snapshot.runs:
            counts[watched_run.state] = counts.get(watched_run.state, 0) + 1
        counts_text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none yet"
        left_out = f", the first {len(snapshot.runs)} shown" if snapshot.num_runs > len(snapshot.runs) else ""
        total = (
            f"{snapshot.num_runs} of {snapshot.num_planned}"
            if (snapshot.num_planned or 0) > snapshot.num_runs
            else snapshot.num_runs
        )
        read_at = time.strftime("%H:%M:%S", time.localtime(snapshot.read_time))
        folder_text = single_line(str(self._watched_folder.folder))
        return f"{folder_text}: {total} runs ({counts_text}{left_out}); read at {read_at}"


def _metric_heading(snapshot: FolderSnapshot, name: str) -> str:
    return run_that_measures(snapshot.measured_runs, name).describe_metric(name).heading


def _columns_equal(columns_before: Any, columns_after: dict[str, list[Any]]) -> bool:
    """Return whether the columns are equal, with NaN equal to itself."""
    return repr({name: list(columns_before[name]) for name in columns_after}) == repr(columns_after)
