"""LaTeX tables for a paper: what is bold, how numbers are rounded, names, caption and label."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from test_tables_of_runs import write

import fedsim.strategies
from fedsim.app.config import groups
from fedsim.core import ConfigError
from fedsim.studies.results import table_cli as command
from fedsim.studies.results.bold import best_line_indices, is_distinguishable
from fedsim.studies.results.display_names import CLASS_DISPLAY_NAMES, class_display_name
from fedsim.studies.results.rounding import fixed_decimals, num_decimals, round_to_error
from fedsim.studies.results.run_measures import TableCell, TableMeasure

ACCURACY = TableMeasure("test_accuracy", lambda run: np.zeros(1), higher_is_better=True, is_percent=True)
LOSS = TableMeasure("test_loss", lambda run: np.zeros(1), higher_is_better=False)


def cell(*values: float, seeds: list[int] | None = None) -> TableCell:
    return TableCell(np.array(values), list(range(len(values))) if seeds is None else seeds)


@pytest.fixture(name="tell")
def tell_fixture(capsys: pytest.CaptureFixture[str]) -> Any:
    def tell(*arguments: object) -> str:
        command.main([*map(str, arguments)])
        return capsys.readouterr().out

    return tell


@pytest.mark.parametrize(
    ("error", "decimals"), [(0.034, 2), (0.014, 3), (0.2, 1), (1.0, 1), (1.99, 1), (2.0, 0), (140.0, -1), (350.0, -2)]
)
def test_an_error_has_one_digit_or_two_where_it_begins_with_one(error: float, decimals: int) -> None:
    assert num_decimals(error) == decimals


@pytest.mark.parametrize(
    ("numbers", "latex"),
    [
        ((92.864, 1.31, 0.58), r"$92.9 \pm 1.3$"),
        ((92.864, 0.31, 0.14), r"$92.86 \pm 0.31$"),
        ((-0.004, 0.04, 0.02), r"$0.00 \pm 0.04$"),
        ((1234567.0, 45000.0, 20000.0), r"$(1.23 \pm 0.04) \times 10^{6}$"),
        ((0.0000321, math.nan, math.nan), r"$3.21 \times 10^{-5}$"),
        ((30.0, 0.0, 0.0), r"$30 \pm 0$"),
        ((0.12345, math.nan, math.nan), "$0.1235$"),
        ((0.0, 0.0, 0.0), r"$0 \pm 0$"),
    ],
)
def test_means_are_rounded_to_their_error(numbers: tuple[float, float, float], latex: str) -> None:
    assert round_to_error(*numbers).latex == latex


@given(st.floats(-1e5, 1e5), st.floats(1e-3, 1e3))
def test_rounding_moves_a_mean_by_less_than_its_error(mean: float, error: float) -> None:
    found = round_to_error(mean, math.nan, error)
    assert abs(float(found.mean) * 10.0**found.exponent - mean) <= 0.51 * error + 1e-9 * abs(mean)
    assert not re.fullmatch(r"-0\.?0*", found.mean)


@pytest.mark.parametrize("value", [-0.0, -0.04, 0.04])
def test_zero_has_no_sign(value: float) -> None:
    assert fixed_decimals(value, 1) == "0.0"
    assert ACCURACY.format_value(value / 100) == "0.0"
    assert LOSS.format_value(-0.0) == "0"


def test_bold_is_the_best_and_what_its_interval_does_not_part_from_it() -> None:
    """By seed the second is always 1 lower, although the seeds differ by 10; the third differs either way."""
    best = cell(90.0, 80.0, 70.0, 60.0, 50.0)
    lower, either = cell(89.0, 79.1, 68.9, 59.0, 49.0), cell(89.0, 81.0, 69.0, 60.9, 49.0)
    assert is_distinguishable(best, lower)
    assert not is_distinguishable(best, either)
    assert best_line_indices([lower, best, either], ACCURACY, 0.95) == {1, 2}
    elsewhere = TableCell(lower.values, [5, 6, 7, 8, 9])  # other seeds: Welch's interval is wide
    assert not is_distinguishable(best, elsewhere)
    assert best_line_indices([elsewhere, best, either], ACCURACY, 0.95) == {0, 1, 2}


def test_of_few_seeds_only_the_best_is_bold() -> None:
    """Hardly anything is distinguishable by four seeds, so that nearly all would be bold; equal means are."""
    best, either = cell(90.0, 80.0, 70.0, 60.0), cell(89.0, 81.0, 69.0, 60.9)
    assert not is_distinguishable(best, either)
    assert best_line_indices([either, best, cell(60.0, 70.0, 80.0, 90.0)], ACCURACY, 0.95) == {1, 2}


def test_bold_agrees_with_scipys_tests() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        one, other = draw.normal(0, 1, 6), draw.normal(draw.uniform(-2, 2), 2, 6)
        shared, apart = TableCell(one, [0] * 6), TableCell(other, [0] * 6)
        assert is_distinguishable(shared, apart, 0.9) == (stats.ttest_rel(one, other).pvalue < 0.1)
        apart = TableCell(other, [1] * 6)
        assert is_distinguishable(shared, apart, 0.9) == (stats.ttest_ind(one, other, equal_var=False).pvalue < 0.1)


def test_bold_of_single_seeds_losses_and_incomplete_cells() -> None:
    assert best_line_indices([cell(0.5), cell(0.4), cell(0.4), None], LOSS, 0.95) == {1, 2}
    assert best_line_indices([cell(0.5)], LOSS, 0.95) == set()
    incomplete = cell(10.0, math.nan, math.nan)  # rounds: one of three replicates was there
    assert best_line_indices([incomplete, cell(30.0, 31.0, 32.0), cell(50.0, 51.5, 52.0)], LOSS, 0.95) == {1}
    undirected = TableMeasure("power", LOSS.values_function, higher_is_better=False, has_best_value=False)
    assert best_line_indices([cell(1.0), cell(2.0)], undirected, 0.95) == set()


def test_every_strategy_has_a_name_for_papers() -> None:
    for choice in groups()["strategy"]:
        if choice != "custom":
            name = choice.replace("_", "")
            (kind,) = [kind for kind in fedsim.strategies.__all__ if kind.lower() == name]
            assert "_" not in class_display_name(choice, f"fedsim.strategies.{kind}")
    assert class_display_name("scaffold", "fedsim.strategies.Scaffold") == "SCAFFOLD"
    assert class_display_name("fedavg", "fedsim.strategies.FedAvg") == "FedAvg"
    assert class_display_name("mine_alone", "mypackage.Other") == "mine alone"
    assert class_display_name("custom", "mypackage.Absence") == "Absence"
    assert all(hasattr(fedsim.strategies, name) for name in CLASS_DISPLAY_NAMES)


@pytest.fixture(name="runs")
def runs_fixture(tmp_path: Path) -> Path:
    for strategy in ("FedAvg", "FedAWE", "Scaffold"):
        for lr in (0.1, 0.5):
            write(tmp_path / f"{strategy}_{lr}", strategy, lr)
    return tmp_path


def test_the_caption_explains_differences_from_a_reference(runs: Path, tell: Any) -> None:
    arguments = (runs, "--latex", "--best", "lr", "--metric", "test_accuracy", "--caption", "Digits")
    explanation = (
        r"Differences from FedAvg, paired by seed: mean [95 \% interval, Student's], "
        "and the number of pairs in which the run is better."
    )
    assert explanation in tell(*arguments, "--against", "strategy=fedavg")
    assert "Differences from" not in tell(*arguments)


def test_a_table_with_blocks_caption_and_label(runs: Path, tell: Any) -> None:
    latexwalker = pytest.importorskip("pylatexenc.latexwalker")
    text = tell(
        runs, "--latex", "--blocks", "lr", "--metric", "test_accuracy", "--caption", "Digits", "--label", "tab:digits"
    )
    nodes, _, _ = latexwalker.LatexWalker(text, tolerant_parsing=False).get_latex_nodes()
    (table,) = [node for node in nodes if node.isNodeType(latexwalker.LatexEnvironmentNode)]
    assert table.environmentname == "table"
    assert r"\label{tab:digits}" in text
    caption = re.search(r"\\caption\{(.*)\}\n", text)
    assert caption is not None
    assert caption[1].startswith(
        r"Digits. Mean $\pm$ standard deviation over 3 seeds. Bold: the best of each column and block by its mean alone"
    )
    assert "fewer than 5 seeds" in caption[1]
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    assert body.count(r"\midrule") == 2
    assert [line.count("textbf") for line in body.splitlines() if line.endswith(r"\\")] == [0, 1, 0] * 2
    assert body.count("0.1 & ") == 1
    assert "SCAFFOLD" in body


def test_renamed_in_every_form(runs: Path, tell: Any) -> None:
    asked = (runs, "--metric", "test_accuracy", "--columns", "lr")
    renamed = ["--rename", "fedawe=Ours", "--rename", "test accuracy=acc.", "--rename", "lr=step size"]
    latex = tell(*asked, "--latex", *renamed)
    assert r"\multicolumn{2}{c}{acc. (\%)}" in latex
    assert "step size 0.1 & step size 0.5" in latex
    assert "\nOurs & " in latex
    assert "FedAWE" not in latex
    text = tell(*asked, *renamed)
    assert "acc. step size=0.1" in text
    assert re.search("^Ours ", text, re.MULTILINE)
    assert "Ours," in tell(*asked, "--csv", "--rename", "FedAWE=Ours")
    with pytest.raises(ConfigError, match="--rename fedavgg=X: the table has no fedavgg; it has strategy"):
        tell(*asked, "--rename", "fedavgg=X")


def test_options_of_latex_alone(runs: Path, tell: Any) -> None:
    with pytest.raises(ConfigError, match="--caption is for LaTeX; add --latex"):
        tell(runs, "--caption", "x")
    with pytest.raises(ConfigError, match="--label 'a}b' must be letters"):
        tell(runs, "--latex", "--label", "a}b")
    with pytest.raises(ConfigError, match="--blocks='alpha' is unknown"):
        tell(runs, "--blocks", "alpha")
