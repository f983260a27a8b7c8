"""A recipe: one figure or table of a paper as data. Read from YAML, checked, expanded into the runs it needs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fedsim
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.described import overrides_by_label, read_description
from fedsim.studies.plots.figure_kinds import DRAW_FUNCTION_BY_KIND
from fedsim.studies.reproduce import measures
from fedsim.studies.reproduce.comparison import Comparison, labels_by_axis
from fedsim.studies.reproduce.ledger import LEDGER_FILE, load_statement_ledger
from fedsim.studies.reproduce.measures import RunMeasure
from fedsim.studies.reproduce.tuning import TunedAxis

SCALES = ("smoke", "cpu", "paper")
RUN_SECONDS_FILE = "run_seconds.json"

LabelByAxis = dict[str, str]  # axis → label of one run


@dataclass(frozen=True)
class RecipeSetting:
    """One run of a recipe: a label on every axis, and the overrides that make it."""

    labels: tuple[tuple[str, str], ...]
    overrides: tuple[str, ...]

    @property
    def axis_labels(self) -> LabelByAxis:
        """The labels as axis → label."""
        return dict(self.labels)

    @property
    def name(self) -> str:
        """The labels joined to a name for readers."""
        return " / ".join(label for _, label in self.labels)


@dataclass
class RecipeScale:
    """How large a recipe is run.

    Attributes:
        reduced: what is smaller than in the paper; empty where nothing is.
        overrides: after the recipe's own.
        axes: replace the recipe's axes of the same name.
        printed: whether the paper's numbers are shown; false where data or model are others than the paper's.
    """

    reduced: str = ""
    overrides: list[str] = field(default_factory=list)
    axes: dict[str, Any] = field(default_factory=dict)
    printed: bool = True


@dataclass
class Recipe:
    """A figure or table of a paper, as data.

    Attributes:
        name: PAPER/NAME.
        source: the figure or table.
        about: what it shows, in a sentence or two.
        base: Hydra overrides of each run.
        axes: axis → label → overrides; the runs are the product of all axes.
        scales: the scales by name.
        measures: the measures of each run by name.
        paper: measure → the paper's numbers, nested by the labels of the axes in their order.
        comparisons: what we test of the paper's statements, and controls of our own.
        fitted: axis → labels whose constants were fitted after seeing the paper's numbers; they are marked, and used
            only in comparisons with `fitted: true`.
        figure: {kind: …} and the options of that kind, or None.
        tune: the axis along which the best run is selected, or None.
        remark: further results for the gallery, with their reasons if known.
        train: False if the figure shows the configuration and nothing is trained.
    """

    name: str
    source: str
    about: str
    axes: dict[str, dict[str, list[str]]]
    scales: dict[str, RecipeScale]
    base: list[str] = field(default_factory=list)
    measures: dict[str, RunMeasure] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    fitted: dict[str, list[str]] = field(default_factory=dict)
    figure: dict[str, Any] | None = None
    tune: TunedAxis | None = None
    remark: str = ""
    train: bool = True

    def settings(self, scale: str) -> list[RecipeSetting]:
        """Return the runs at this scale, in the order of the axes."""
        chosen_scale = self.scales[checks.check_choice("--scale", scale, self.scales)]
        axes = self.axes_at_scale(scale)
        product = itertools.product(
            *([(axis, label) for label in choices_of_axes] for axis, choices_of_axes in axes.items())
        )
        return [
            RecipeSetting(
                labels, (*self.base, *chosen_scale.overrides, *(o for a, label in labels for o in axes[a][label]))
            )
            for labels in product
        ]

    def tuned_settings(
        self, settings: list[RecipeSetting], best_label_by_place: Mapping[str, str]
    ) -> list[RecipeSetting]:
        """Return the settings whose label on the tuned axis is the best at their place on the other axes."""
        assert self.tune is not None
        axis, place_of = self.tune.axis, self.tune.untuned_axes_label
        return [
            setting
            for setting in settings
            if best_label_by_place.get(place_of(setting.axis_labels)) == setting.axis_labels[axis]
        ]

    def axes_at_scale(self, scale: str) -> dict[str, dict[str, list[str]]]:
        """Return the axes at this scale, which may select labels of an axis or define other ones."""
        axes = dict(self.axes)
        for axis, selection in self.scales[scale].axes.items():
            if isinstance(selection, list):
                axes[axis] = {
                    checks.check_choice(f"{self.name}: {axis}", c, self.axes[axis]): axes[axis][c] for c in selection
                }
            else:
                axes[axis] = overrides_by_label(selection)
        return axes

    def scale_specific_labels(self, scale: str) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
        """Return axis → labels that only this scale has, and labels that only other scales except 'smoke' have."""
        axes_at_other_scales = [
            self.axes_at_scale(other_scale) for other_scale in SCALES if other_scale not in ("smoke", scale)
        ]
        labels: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        for axis, choices_here in self.axes_at_scale(scale).items():
            labels_here, labels_elsewhere = (
                frozenset(choices_here),
                frozenset(label for axes in axes_at_other_scales for label in axes[axis]),
            )
            labels[axis] = labels_here - labels_elsewhere, labels_elsewhere - labels_here
        return labels

    def has_fitted_label(self, at: LabelByAxis) -> bool:
        """Return whether the place has one of the fitted labels."""
        return any(at.get(axis) in labels for axis, labels in self.fitted.items())

    def paper_value(self, measure: str, at: LabelByAxis) -> float | None:
        """Return the number that the paper printed, or None."""
        node: Any = self.paper.get(measure)
        for axis in self.axes:
            if isinstance(node, Mapping) and axis in at:
                node = node.get(at[axis])
        return float(node) if isinstance(node, int | float) else None


def recipe_folder() -> Path:
    """Return the folder of the recipes: inside an installed wheel, else `experiments` in the checkout."""
    package = Path(fedsim.__file__).parent
    installed_folder = package / "experiments"
    return installed_folder if installed_folder.is_dir() else package.parent / "experiments"


def list_recipe_names(folder: Path | None = None) -> list[str]:
    """Return the names of all recipes, as PAPER/NAME."""
    root = folder or recipe_folder()
    return sorted(
        path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/*.yaml") if path.name != LEDGER_FILE
    )


def recorded_run_seconds(folder: Path | None = None) -> dict[str, dict[str, float]]:
    """Return recipe → scale → the seconds of its runs when they were last stored, added up; `scripts/gallery.py` writes
    the file, since an installed wheel has no results."""
    path = (folder or recipe_folder()) / RUN_SECONDS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def load_recipe(name: str, folder: Path | None = None) -> Recipe:
    """Read a recipe by PAPER/NAME.

    Raises:
        ConfigError: for an unknown recipe, or one that contradicts itself.
    """
    recipe_names, root = list_recipe_names(folder), folder or recipe_folder()
    with read_description("recipe", name, root, recipe_names, "fedsim-reproduce") as content:
        recipe = _parse_recipe(name, content)
    if any(comparison.statement for comparison in recipe.comparisons):
        ledger = load_statement_ledger(name.partition("/")[0], root)
        for comparison in recipe.comparisons:
            ledger.check_comparison_statement(name, comparison)
    for comparison in recipe.comparisons:
        if comparison.shown_by and "::" not in comparison.shown_by:
            checks.check_choice(f"recipe {name}: comparisons: shown_by", comparison.shown_by, recipe_names)
    return recipe


def _parse_recipe(name: str, content: dict[str, Any]) -> Recipe:
    content["axes"] = {axis: overrides_by_label(labels) for axis, labels in content.get("axes", {}).items()}
    content["scales"] = {key: RecipeScale(**(value or {})) for key, value in content["scales"].items()}
    content["measures"] = {key: measures.make_measure(**value) for key, value in content.get("measures", {}).items()}
    content["tune"] = TunedAxis(**content["tune"]) if content.get("tune") else None
    content["paper"] = _stringify_keys(content.get("paper", {}))
    if "claims" in content:
        raise ConfigError(
            f"recipe {name}: claims is now comparisons, whose entries have we_test in place of claim, and statement: ID"
            " or ours: true"
        )
    content["comparisons"] = [Comparison.read(value) for value in content.get("comparisons", [])]
    content["fitted"] = labels_by_axis(content.get("fitted"))
    recipe = Recipe(name, **content)
    missing_scales = [scale for scale in SCALES if scale not in recipe.scales]
    if missing_scales:
        raise ConfigError(f"recipe {name} lacks scales: {', '.join(missing_scales)}")
    if recipe.figure is not None:
        checks.check_choice(f"recipe {name}: figure.kind", recipe.figure.get("kind"), DRAW_FUNCTION_BY_KIND)
    for comparison in recipe.comparisons:
        comparison.check(name, recipe.axes, recipe.measures, bool(recipe.fitted))
    for axis, labels in recipe.fitted.items():
        checks.check_choice(f"recipe {name}: fitted", axis, recipe.axes)
        all_labels = {label for scale in SCALES for label in recipe.axes_at_scale(scale)[axis]} | set(recipe.axes[axis])
        for label in labels:
            checks.check_choice(f"recipe {name}: fitted: {axis}", label, all_labels)
    if recipe.tune is not None:
        checks.check_choice(f"recipe {name}: tune.axis", recipe.tune.axis, recipe.axes)
        checks.check_choice(f"recipe {name}: tune.measure", recipe.tune.measure, recipe.measures)
        if recipe.tune.axis in recipe.fitted:
            raise ConfigError(f"recipe {name}: fitted: {recipe.tune.axis} is tuned, and the best of it loses its label")
    for measure in recipe.paper:
        checks.check_choice(f"recipe {name}: paper", measure, recipe.measures)
    return recipe


def _stringify_keys(node: Any) -> Any:
    """Convert labels that YAML reads as numbers back to text."""
    return {str(key): _stringify_keys(value) for key, value in node.items()} if isinstance(node, dict) else node
