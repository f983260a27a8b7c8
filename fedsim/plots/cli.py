"""`fedsim-plot RUN_DIR…`: compare runs by a table on the terminal and a picture of their curves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedsim import checks
from fedsim.errors import ConfigError
from fedsim.plots.curves import figure
from fedsim.plots.runs import Run, find


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `fedsim-plot`."""
    parser = argparse.ArgumentParser("fedsim-plot", description="Compare runs: a table and a picture of their curves.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, or a sweep's folder")
    parser.add_argument("--out", type=Path, help="folder for curves.png and curves.pdf (default: the first RUN_DIR)")
    parser.add_argument("--metric", action="append", metavar="NAME", help="a column of metrics.csv; may be repeated")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    try:
        runs = find(options.runs)
        known = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
        for name in options.metric or []:
            checks.choice("--metric", name, known)
        out = options.out or options.runs[0]
        out.mkdir(parents=True, exist_ok=True)
    except ConfigError as error:
        sys.exit(f"fedsim-plot: {error}")
    except OSError as error:
        sys.exit(f"fedsim-plot: --out {options.out or options.runs[0]} cannot be written ({error.strerror})")
    print(table(runs, options.metric or known, options.markdown))
    drawing = figure(runs, options.metric)
    for ending in ("png", "pdf"):
        drawing.savefig(out / f"curves.{ending}")
    folders = " ".join(map(str, options.runs))
    if not options.markdown:
        print(f"\npicture: {out / 'curves.png'}\ncurves:  tensorboard --logdir {folders}")


def table(runs: list[Run], metrics: list[str], markdown: bool = False) -> str:
    """Final mean ± standard deviation of every metric and run."""
    cells = [["run", *metrics]]
    for run in runs:
        cells.append([run.label, *(cell(metric, *run.final(metric)) for metric in metrics)])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    edge, gap, end = ("| ", " | ", " |") if markdown else ("", "  ", "")
    lines = [
        edge + gap.join(f"{text:{'<' if c == 0 else '>'}{widths[c]}}" for c, text in enumerate(row)) + end
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|" if markdown else "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:]])


def cell(metric: str, mean: float, std: float) -> str:
    """Accuracies in per cent, everything else to four digits."""
    if "accuracy" in metric:
        return f"{100 * mean:.1f} ± {100 * std:.1f} %"
    return f"{mean:.4g} ± {std:.2g}"
