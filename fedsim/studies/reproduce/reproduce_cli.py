"""`fedsim-reproduce PAPER/NAME`: run a recipe, compare with the paper, write numbers and picture."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedsim.app.build import build
from fedsim.app.job_progress import duration_text
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file
from fedsim.core.speaking import tolerate_broken_pipes, without_logging
from fedsim.run.stopping import Stopped
from fedsim.run.tracking.environment import environment_facts
from fedsim.run.wiring import resolve_device
from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.curves import curve_metrics
from fedsim.studies.plots.figure_kinds import draw_figure
from fedsim.studies.plots.style import save_small_png
from fedsim.studies.reproduce import report, stored
from fedsim.studies.reproduce.comparison import Judgement
from fedsim.studies.reproduce.ledger import load_statement_ledger, papers_with_ledger
from fedsim.studies.reproduce.provenance import check_clean_checkout, commit_hash, common_source_hash, write_source_hash
from fedsim.studies.reproduce.recipe import (
    SCALES,
    Recipe,
    list_recipe_names,
    load_recipe,
    recipe_folder,
    recorded_run_seconds,
)
from fedsim.studies.reproduce.runner import (
    FINISHED_RUN_FILE,
    Outcome,
    RecipeJob,
    batch_jobs,
    filter_settings_warnings,
    job_command_context,
    num_concurrent_jobs,
    plan_jobs,
    run_jobs,
    trusted_packages,
)
from fedsim.studies.reproduce.statements import statements_text
from fedsim.studies.reproduce.stored import StoredRecipeResult, update_verdicts
from fedsim.studies.reproduce.verify import verify_by_rerunning
from fedsim.studies.results.runs import load as load_run

RUNS_FOLDER, RESULTS_FOLDER = "runs", "results"


@tolerate_broken_pipes()
def main(arguments: list[str] | None = None) -> None:
    """Entry point of `fedsim-reproduce`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with job_command_context("fedsim-reproduce", logging.INFO):
        if options.list:
            print(recipe_list_text(options.recipe))
            return
        if options.judge or options.verify is not None:
            _judge_or_rerun_results(options)
            return
        recipe_names = _requested_recipe_names(options)
        if not recipe_names:
            parser.error("name a recipe, or --all PAPER; --list shows them")
        recipes = [load_recipe(name) for name in recipe_names]
        device = str(resolve_device(options.device))
        rows_by_recipe = {
            recipe.name: reproduce_recipe(
                recipe, options.scale, device, options.out, options.jobs, tuple(options.override)
            )
            for recipe in recipes
        }
        if len(rows_by_recipe) > 1:
            print(report.summary_table(rows_by_recipe))


def _paper_names() -> list[str]:
    """Return the papers that have recipes."""
    return sorted({name.partition("/")[0] for name in list_recipe_names()})


def _requested_recipe_names(options: argparse.Namespace) -> list[str]:
    papers = _paper_names()
    for name in options.recipe:
        if name in papers:
            raise ConfigError(f"{name} is a paper, not a recipe; use --all {name}, or name its recipes, {name}/NAME")
    recipe_names = list(options.recipe)
    if options.all:
        paper = checks.check_choice("--all", options.all, papers)
        recipe_names += [name for name in list_recipe_names() if name.startswith(f"{paper}/")]
    return recipe_names


def _judge_or_rerun_results(options: argparse.Namespace) -> None:
    """Judge committed results again, or repeat some of their runs."""
    results = stored_results(options.recipe)
    if options.judge:
        for result in results:
            update_verdicts(result)
    elif not verify_by_rerunning(results, options.verify, options.within):
        sys.exit("fedsim-reproduce: --verify: stored numbers were not reproduced")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fedsim-reproduce",
        description="Reproduce figures and tables of papers: run, compare with the printed numbers, draw.",
        epilog="Finished runs are not run again, and recipes of a paper share the runs they have in common.",
    )
    parser.add_argument("recipe", nargs="*", metavar="PAPER/NAME", help="one or several recipes")
    parser.add_argument("--list", action="store_true", help="list all recipes, or those of the papers that are named")
    parser.add_argument("--all", metavar="PAPER", help="all recipes of a paper")
    parser.add_argument(
        "--scale",
        default="cpu",
        choices=SCALES,
        help="smoke: takes seconds and gives no verdicts; cpu: feasible on two cores; paper: as published",
    )
    parser.add_argument(
        "--judge",
        action="store_true",
        help="judge the committed results of the recipes, or of all, again without new runs",
    )
    parser.add_argument(
        "--verify",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="repeat N random runs of the committed results of the recipes, or of all, and compare (default: 1)",
    )
    parser.add_argument(
        "--within", type=float, metavar="SECONDS", help="--verify: only runs that took at most this time"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    parser.add_argument(
        "--out", type=Path, default=Path("reproduced"), help="folder of the results (default: reproduced)"
    )
    parser.add_argument(
        "--jobs", default="auto", help="number of simultaneous runs (default: one per core on a CPU, one on a GPU)"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting of all runs; may be repeated",
    )
    return parser


def stored_results(recipes: list[str]) -> list[StoredRecipeResult]:
    """Return the committed results of these recipes; of all if none is named."""
    results = stored.load_stored_results(recipe_folder())
    names_of_results = {result.recipe for result in results}
    for name in recipes:
        checks.check_choice("recipe", name, names_of_results)
    return [result for result in results if not recipes or result.recipe in recipes]


def recipe_list_text(papers_or_recipes: list[str]) -> str:
    """List these recipes, or those of these papers, what they show, and what is smaller at the cpu scale; all of them
    if none is named."""
    recipe_names = list_recipe_names()
    for name in papers_or_recipes:
        checks.check_choice("--list", name, [*_paper_names(), *recipe_names])
    lines, run_seconds = [], recorded_run_seconds()
    for name in recipe_names:
        if papers_or_recipes and not {name, name.partition("/")[0]} & set(papers_or_recipes):
            continue
        recipe = load_recipe(name)
        lines.append(f"{name:24} {recipe.source}: {recipe.about}")
        reduced_text = recipe.scales["cpu"].reduced
        lines.append(f"{'':24} --scale cpu: {reduced_text or 'as published'}")
        times = [
            f"{duration_text(t)} (--scale {scale if reduced_text else 'cpu or paper'})"
            for scale, t in run_seconds.get(name, {}).items()
        ]
        if times:
            lines.append(f"{'':24} the stored runs took {', '.join(times)} on one processor core")
    return "\n".join(lines)


def reproduce_recipe(
    recipe: Recipe, scale: str, device: str, out: Path, jobs: str = "auto", overrides: tuple[str, ...] = ()
) -> list[report.ReportRow]:
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
    check_clean_checkout(out)
    paper, _, name = recipe.name.partition("/")
    folder = out / paper / RESULTS_FOLDER / f"{name}-{scale}"
    _make_folder(folder, out)
    reduced_text = recipe.scales[scale].reduced
    scale_note = f" ({reduced_text})" if reduced_text else ""
    print(f"{recipe.name}: {recipe.source}, scale {scale}{scale_note}")
    runs = _carry_out_runs(recipe, scale, device, out / paper / RUNS_FOLDER, jobs, overrides)
    cells = runs.cells
    report.compute_cell_measures(recipe, cells)
    numbers = report.numbers_by_measure(recipe, cells)
    lines = report.make_number_rows(recipe, numbers, cells)
    judgements = report.judge_comparisons(recipe, numbers, scale)
    lines += [report.comparison_row(judgement) for judgement in judgements]
    metadata = _metadata(recipe, scale, device, runs, jobs)
    report.save_json(folder / "report.json", lines, metadata)
    if lines:
        report.save_rows(folder / "results.csv", lines, metadata)
    if recipe.figure is not None and cells:
        _save_figure(folder, cells, recipe.figure, metadata)
    unreached_texts = report.unreached_target_texts(recipe, lines, cells)
    print(report.format_report_rows(lines, unreached_texts, report.number_notes(recipe, lines)))
    if verdicts_note := no_verdicts_note(recipe, scale):
        print(verdicts_note)
    print(_paper_statements_text(recipe, scale, judgements), end="")
    notes_by_cell = runs.skip_reasons | {name: f"tuned to {rate}" for name, rate in runs.tuned_rates.items()}
    for setting_name, reason in notes_by_cell.items():
        print(f"{setting_name}: {reason}")
    print(f"written to {folder}\n")
    return lines


@dataclass
class RecipeRuns:
    """The runs of a recipe.

    Attributes:
        planned_jobs: the runs that the report is about.
        cells: those of them that have finished, without the tuned axis.
        skip_reasons: name of a run → why it did not finish.
        tuned_rates: place on the other axes → the label of the tuned axis that was selected there.
    """

    planned_jobs: list[RecipeJob] = field(default_factory=list)
    cells: list[ResultCell] = field(default_factory=list)
    skip_reasons: dict[str, str] = field(default_factory=dict)
    tuned_rates: dict[str, str] = field(default_factory=dict)


def _carry_out_runs(
    recipe: Recipe, scale: str, device: str, folder: Path, jobs: str, overrides: tuple[str, ...]
) -> RecipeRuns:
    """Tune what the recipe tunes, and carry out its runs in a folder."""
    runs, settings, common_overrides = RecipeRuns(), recipe.settings(scale), (f"device={device}", *overrides)
    train_cells = functools.partial(_train_cells, recipe, jobs=jobs, device=device, skip_reasons=runs.skip_reasons)
    if recipe.tune is not None:
        trial_overrides = (*common_overrides, *recipe.tune.trial_overrides.get(scale, []))
        trials = plan_jobs(settings, folder, trial_overrides, trusted_packages(overrides))
        print(f"  tuning {recipe.tune.axis}")
        cells = train_cells(trials)
        report.compute_cell_measures(recipe, cells)
        runs.tuned_rates = recipe.tune.best_label_by_place(cells)
        settings = recipe.tuned_settings(settings, runs.tuned_rates)
    runs.planned_jobs = plan_jobs(settings, folder, common_overrides, trusted_packages(overrides))
    if recipe.train:
        runs.cells = train_cells(runs.planned_jobs)
    else:
        with filter_settings_warnings(common_overrides):
            runs.cells = _build_cells(runs.planned_jobs, runs.skip_reasons)
    if recipe.tune is not None:
        for cell in runs.cells:
            del cell.axis_labels[recipe.tune.axis]
    return runs


def _paper_statements_text(recipe: Recipe, scale: str, judgements: list[Judgement]) -> str:
    """Return the lines of `statements_text`; '' for a recipe of a paper without a ledger."""
    paper = recipe.name.partition("/")[0]
    if paper not in papers_with_ledger(recipe_folder()):
        return ""
    text = statements_text(recipe, scale, judgements, load_statement_ledger(paper, recipe_folder()))
    return f"{text}\n" if text else ""


def no_verdicts_note(recipe: Recipe, scale: str) -> str:
    """Why a reproduction has numbers and no verdict; '' where its comparisons are meant for this scale."""
    scales = [
        other_scale
        for other_scale in SCALES
        if any(other_scale in comparison.scales for comparison in recipe.comparisons)
    ]
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


def _save_figure(folder: Path, cells: list[ResultCell], figure: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Save the figure, and for curves also their numbers, so that they can be drawn without the runs."""
    drawing = draw_figure(cells, figure)
    with replacement_file(folder / "figure.png", "wb") as file:
        save_small_png(drawing, file)
    with replacement_file(folder / "figure.pdf", "wb") as file:
        drawing.savefig(file, format="pdf")
    if figure["kind"] == "curves":
        report.save_curves(folder / "curves.csv", cells, curve_metrics(figure), metadata)


def _check_measures(recipe: Recipe, planned_jobs: list[RecipeJob]) -> None:
    """Before runs begin: refuse a measure of a column that the first of them does not have.

    Raises:
        ConfigError: naming the measure and the column.
    """
    job = next((job for job in planned_jobs if not job.is_finished), None)
    if job is None:
        return
    config = job.config.copy()
    config.device = "cpu"  # nothing is computed
    try:
        with without_logging():
            simulation, _, _ = build(config, trusted=job.trusted)
    except Exception:  # which the run reports
        return
    newcomers = simulation.newcomers is not None
    report.check_columns(recipe, simulation.possible_columns, newcomers, f"its run {job.setting.name}")


def _train_cells(
    recipe: Recipe, planned_jobs: list[RecipeJob], jobs: str, device: str, skip_reasons: dict[str, str]
) -> list[ResultCell]:
    """Run the unfinished jobs, and return a cell for each finished run."""
    _check_measures(recipe, planned_jobs)
    pending_jobs = [job for job in planned_jobs if not job.is_finished]
    print(f"  {len(planned_jobs)} runs, {len(planned_jobs) - len(pending_jobs)} of them finished already")
    outcomes: dict[Path, Outcome] = {}
    stop_reason: str | None = None
    for number, (job, outcome) in enumerate(
        run_jobs(pending_jobs, num_concurrent_jobs(jobs, device, len(pending_jobs))), 1
    ):
        print(f"  [{number}/{len(pending_jobs)}] {job.setting.name}: {outcome.status}, {outcome.message}")
        outcomes[job.folder] = outcome
        if outcome.status == "done":
            write_source_hash(job.folder)
        stop_reason = outcome.message if outcome.status == "stopped" else stop_reason
    if stop_reason is not None:  # those that went together with it have stopped too
        raise Stopped(stop_reason)
    cells = []
    for job in planned_jobs:
        if job.is_finished:
            cells.append(ResultCell(job.setting.axis_labels, load_run(job.folder)))
        else:
            skip_reasons[job.setting.name] = f"{outcomes[job.folder].status}, {outcomes[job.folder].message}"
    return cells


def _build_cells(planned_jobs: list[RecipeJob], skip_reasons: dict[str, str]) -> list[ResultCell]:
    """Build the configured simulations without training, and return their cells."""
    cells = []
    for job in planned_jobs:
        try:
            simulation, _, _ = build(job.config)
            cells.append(ResultCell(job.setting.axis_labels, availability=simulation.availability))
        except ConfigError as error:
            skip_reasons[job.setting.name] = str(error)
    return cells


def _metadata(recipe: Recipe, scale: str, device: str, runs: RecipeRuns, jobs: str) -> dict[str, Any]:
    """Return the metadata of the report: recipe, scale, seeds, machine, versions and commit."""
    provenance = environment_facts(torch.device(device))
    machine = f"{provenance['gpu'] or str(provenance['cpus']) + ' CPU cores'}, torch {provenance['versions']['torch']}"
    at_once = num_concurrent_jobs(jobs, device, len(runs.planned_jobs))
    return {
        "recipe": recipe.name,
        "source": recipe.source,
        "about": recipe.about,
        "scale": scale,
        "reduced": recipe.scales[scale].reduced,
        "seeds": sorted({seed for job in runs.planned_jobs for seed in job.seeds}),
        "machine": machine,
        "skipped": runs.skip_reasons,
        "tuned": runs.tuned_rates,
        "overrides": {job.setting.name: list(job.overrides) for job in runs.planned_jobs},
        "seconds": seconds_by_run(runs.planned_jobs, at_once) if recipe.train else {},
        "sources": common_source_hash(job.folder for job in runs.planned_jobs if recipe.train and job.is_finished),
        **provenance,
        "commit": commit_hash(recipe_folder().parent),
    }


def seconds_by_run(planned_jobs: list[RecipeJob], at_once: int) -> dict[str, float]:
    """Return the seconds of each finished run by its name; the runs that one of the `at_once` processes trained in
    lockstep share their time equally."""
    return {
        job.setting.name: round(
            float(json.loads((job.folder / FINISHED_RUN_FILE).read_text())["seconds"]) / len(company), 2
        )
        for company in batch_jobs(planned_jobs, at_once)
        for job in company
        if job.is_finished
    }
