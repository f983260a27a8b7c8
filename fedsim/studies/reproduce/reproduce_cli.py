"""`fedsim-reproduce PAPER/NAME`: run a recipe, compare with the paper, write numbers and picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from fedsim.app.build import build
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file
from fedsim.core.speaking import tolerate_broken_pipes
from fedsim.run.stopping import Stopped
from fedsim.run.tracking.environment import environment
from fedsim.run.wiring import resolve_device
from fedsim.studies.plots.cells import Cell
from fedsim.studies.plots.curves import metrics_of
from fedsim.studies.plots.figure_kinds import draw
from fedsim.studies.plots.style import save_small_png
from fedsim.studies.reproduce import report, stored
from fedsim.studies.reproduce.provenance import commit, made_now, refuse_untraceable, write_source_hash
from fedsim.studies.reproduce.recipe import SCALES, Recipe, load, names, recipe_folder
from fedsim.studies.reproduce.runner import (
    FINISHED_RUN_FILE,
    Job,
    Outcome,
    carry_out_all,
    in_company,
    jobs_at_once,
    plan,
    resumable_command,
    settings_warnings_of,
    trusted_by,
)
from fedsim.studies.reproduce.stored import Result, rejudge
from fedsim.studies.reproduce.verify import verify
from fedsim.studies.results.runs import load as load_run

RUNS, RESULTS = "runs", "results"


@tolerate_broken_pipes()
def main(arguments: list[str] | None = None) -> None:
    """Entry point of `fedsim-reproduce`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with resumable_command("fedsim-reproduce", logging.INFO):
        if options.list:
            print(listing())
            return
        if options.judge or options.verify is not None:
            _look_at_stored(options)
            return
        recipe_names = list(options.recipe)
        if options.all:
            papers = sorted({name.partition("/")[0] for name in names()})
            paper = checks.choice("--all", options.all, papers)
            recipe_names += [name for name in names() if name.startswith(f"{paper}/")]
        if not recipe_names:
            parser.error("name a recipe, or --all PAPER; --list shows them")
        recipes = [load(name) for name in recipe_names]
        device = str(resolve_device(options.device))
        rows_by_recipe = {
            recipe.name: reproduce(recipe, options.scale, device, options.out, options.jobs, tuple(options.override))
            for recipe in recipes
        }
        if len(rows_by_recipe) > 1:
            print(report.summary(rows_by_recipe))


def _look_at_stored(options: argparse.Namespace) -> None:
    """Judge committed results again, or repeat some of their runs."""
    results = stored_results(options.recipe)
    if options.judge:
        for result in results:
            rejudge(result)
    elif not verify(results, options.verify, options.within):
        sys.exit("fedsim-reproduce: --verify: stored numbers did not come out again")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fedsim-reproduce",
        description="Reproduce figures and tables of papers: run, compare with the printed numbers, draw.",
        epilog="Finished runs are not run again, and recipes of a paper share the runs they have in common.",
    )
    parser.add_argument("recipe", nargs="*", metavar="PAPER/NAME", help="one or several recipes")
    parser.add_argument("--list", action="store_true", help="name all recipes")
    parser.add_argument("--all", metavar="PAPER", help="all recipes of a paper")
    parser.add_argument(
        "--scale", default="cpu", choices=SCALES, help="smoke: seconds; cpu: what two cores finish; paper: as published"
    )
    parser.add_argument(
        "--judge", action="store_true", help="judge the committed results of the recipes, or all, anew without running"
    )
    parser.add_argument(
        "--verify",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="repeat N random runs of the committed results of the recipes, or of all, and compare (default: 1)",
    )
    parser.add_argument("--within", type=float, metavar="SECONDS", help="--verify: runs that took at most so long")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default: reproduced)")
    parser.add_argument("--jobs", default="auto", help="runs at once (default: one per core on a CPU, one on a GPU)")
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="change every run; may be repeated"
    )
    return parser


def stored_results(recipes: list[str]) -> list[Result]:
    """Return the committed results of these recipes; of all if none is named."""
    results = stored.results(recipe_folder())
    names_of_results = {result.recipe for result in results}
    for name in recipes:
        checks.choice("recipe", name, names_of_results)
    return [result for result in results if not recipes or result.recipe in recipes]


def listing() -> str:
    """List the recipes, what they show, and what is smaller at the cpu scale."""
    lines = []
    for name in names():
        recipe = load(name)
        lines.append(f"{name:24} {recipe.source}: {recipe.about}")
        reduced_text = recipe.scales["cpu"].reduced
        lines.append(f"{'':24} --scale cpu: {reduced_text or 'as published'}")
    return "\n".join(lines)


def reproduce(
    recipe: Recipe, scale: str, device: str, out: Path, jobs: str = "auto", overrides: tuple[str, ...] = ()
) -> list[report.Row]:
    """Carry out a recipe and write its report; returns the report's rows.

    Args:
        recipe: what to reproduce.
        scale: 'smoke', 'cpu' or 'paper'.
        device: where the runs go.
        out: holds PAPER/runs (shared by the recipes of a paper) and PAPER/results/NAME-SCALE.
        jobs: runs at once, or 'auto'.
        overrides: Hydra overrides on top of the recipe's.
    """
    if not recipe.scales[scale].printed:
        recipe = dataclasses.replace(recipe, paper={})
    refuse_untraceable(out)
    paper, _, name = recipe.name.partition("/")
    folder = out / paper / RESULTS / f"{name}-{scale}"
    _make_folder(folder, out)
    runs, common_overrides = out / paper / RUNS, (f"device={device}", *overrides)
    reduced = recipe.scales[scale].reduced
    scale_note = f" ({reduced})" if reduced else ""
    print(f"{recipe.name}: {recipe.source}, scale {scale}{scale_note}")
    skipped: dict[str, str] = {}
    tuned: dict[str, str] = {}
    settings = recipe.settings(scale)
    if recipe.tune is not None:
        trials = plan(settings, runs, (*common_overrides, *recipe.tune.short.get(scale, [])), trusted_by(overrides))
        print(f"  tuning {recipe.tune.axis}")
        cells = _train_cells(trials, jobs, device, skipped)
        report.measure(recipe, cells)
        tuned = recipe.tune.best_labels(cells)
        settings = [s for s in settings if tuned.get(recipe.tune.group_label(s.at)) == s.at[recipe.tune.axis]]
    planned = plan(settings, runs, common_overrides, trusted_by(overrides))
    if recipe.train:
        cells = _train_cells(planned, jobs, device, skipped)
    else:
        with settings_warnings_of(common_overrides):
            cells = _build_cells(planned, skipped)
    if recipe.tune is not None:
        for cell in cells:
            del cell.at[recipe.tune.axis]
    report.measure(recipe, cells)
    numbers = report.numbers_of(recipe, cells)
    lines = report.number_rows(recipe, numbers, cells)
    lines += [report.comparison_row(judgement) for judgement in report.judge(recipe, numbers, scale)]
    metadata = _metadata(recipe, scale, device, planned, skipped, tuned)
    report.save_json(folder / "report.json", lines, metadata)
    if lines:
        report.save_rows(folder / "results.csv", lines, metadata)
    if recipe.figure is not None and cells:
        _save_figure(folder, cells, recipe.figure, metadata)
    print(report.table(lines, report.unreached_texts(recipe, lines, cells)))
    if note := no_verdicts_note(recipe, scale):
        print(note)
    reasons = skipped | {name: f"tuned to {rate}" for name, rate in tuned.items()}
    for setting_name, reason in reasons.items():
        print(f"{setting_name}: {reason}")
    print(f"written to {folder}\n")
    return lines


def no_verdicts_note(recipe: Recipe, scale: str) -> str:
    """Why a reproduction has numbers and no verdict; '' where its comparisons are meant for this scale."""
    scales = [other for other in SCALES if any(other in comparison.scales for comparison in recipe.comparisons)]
    if not scales:
        return "no verdicts: the recipe compares nothing"
    if scale in scales:
        return ""
    return f"no verdicts at scale {scale}; use --scale {scales[0]}"


def _make_folder(folder: Path, out: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror}); choose another folder") from error


def _save_figure(folder: Path, cells: list[Cell], figure: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Save the figure, and for curves also their numbers, so that they can be drawn without the runs."""
    drawing = draw(cells, figure)
    with replacement_file(folder / "figure.png", "wb") as file:
        save_small_png(drawing, file)
    with replacement_file(folder / "figure.pdf", "wb") as file:
        drawing.savefig(file, format="pdf")
    if figure["kind"] == "curves":
        report.save_curves(folder / "curves.csv", cells, metrics_of(figure), metadata)


def _train_cells(planned: list[Job], jobs: str, device: str, skipped: dict[str, str]) -> list[Cell]:
    """Run the unfinished jobs, and return a cell for each finished run."""
    pending = [job for job in planned if not job.finished]
    print(f"  {len(planned)} runs, {len(planned) - len(pending)} of them finished already")
    outcomes: dict[Path, Outcome] = {}
    stopped: str | None = None
    for number, (job, outcome) in enumerate(carry_out_all(pending, jobs_at_once(jobs, device, len(pending))), 1):
        print(f"  [{number}/{len(pending)}] {job.setting.name}: {outcome.status}, {outcome.message}")
        outcomes[job.folder] = outcome
        if outcome.status == "done":
            write_source_hash(job.folder)
        stopped = outcome.message if outcome.status == "stopped" else stopped
    if stopped is not None:  # those that went together with it have stopped too
        raise Stopped(stopped)
    cells = []
    for job in planned:
        if job.finished:
            cells.append(Cell(job.setting.at, load_run(job.folder)))
        else:
            skipped[job.setting.name] = f"{outcomes[job.folder].status}, {outcomes[job.folder].message}"
    return cells


def _build_cells(planned: list[Job], skipped: dict[str, str]) -> list[Cell]:
    """Build the configured simulations without training, and return their cells."""
    cells = []
    for job in planned:
        try:
            simulation, _, _ = build(job.config)
            cells.append(Cell(job.setting.at, availability=simulation.availability))
        except ConfigError as error:
            skipped[job.setting.name] = str(error)
    return cells


def _metadata(
    recipe: Recipe, scale: str, device: str, planned: list[Job], skipped: dict[str, str], tuned: dict[str, str]
) -> dict[str, Any]:
    """Return the metadata of the report: recipe, scale, seeds, machine, versions and commit."""
    provenance = environment(torch.device(device))
    machine = f"{provenance['gpu'] or str(provenance['cpus']) + ' CPU cores'}, torch {provenance['versions']['torch']}"
    return {
        "recipe": recipe.name,
        "source": recipe.source,
        "about": recipe.about,
        "scale": scale,
        "reduced": recipe.scales[scale].reduced,
        "seeds": sorted({seed for job in planned for seed in job.seeds}),
        "machine": machine,
        "skipped": skipped,
        "tuned": tuned,
        "overrides": {job.setting.name: list(job.overrides) for job in planned},
        "seconds": seconds_of(planned) if recipe.train else {},
        "sources": made_now(job.folder for job in planned if recipe.train and job.finished),
        **provenance,
        "commit": commit(recipe_folder().parent),
    }


def seconds_of(planned: list[Job]) -> dict[str, float]:
    """Return the seconds of each finished run by its name; runs in lockstep share their time equally."""
    return {
        job.setting.name: round(
            float(json.loads((job.folder / FINISHED_RUN_FILE).read_text())["seconds"]) / len(company), 2
        )
        for company in in_company(planned)
        for job in company
        if job.finished
    }
