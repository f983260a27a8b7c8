"""Tables of runs against numbers computed by hand; what LaTeX, Markdown and CSV say, read back by their own readers."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsim.core import ConfigError
from fedsim.run.rules import first_evaluation_at_target
from fedsim.studies.results import table_cli as command
from fedsim.studies.results.differences import load_runs
from fedsim.studies.results.paired import PairedDifference, paired_difference
from fedsim.studies.results.run_measures import TableCell, final_metric_measure
from fedsim.studies.results.table import select_best_runs

SEEDS = (0, 1, 2)
ROUNDS = (0, 10, 20, 30)
BYTES = 1000  # of a round, each way


def accuracy(strategy: str, lr: float, t: int, r: int) -> float:
    """Rises with rounds; FedAWE is 0.1 better, less 0.01 a seed; lr=0.1 tests best and lr=0.5 validates best."""
    return 0.2 + t / 100 + (0.1 - 0.01 * r if strategy == "FedAWE" else 0) + 0.03 * r + (0.05 if lr == 0.1 else 0)


def write(folder: Path, strategy: str, lr: float, seeds: tuple[int, ...] = SEEDS, **given: Any) -> Path:
    """A run folder of these settings, its numbers those of `accuracy`."""
    folder.mkdir(parents=True)
    columns = ["round", "seed", "test_accuracy", "train_loss"] + ["global_validation_accuracy"] * given.get("held", 1)
    lines = [",".join([*columns, "total_bytes_down", "total_bytes_up", "seconds"])]
    for t in ROUNDS:
        for r, seed in enumerate(seeds):
            measured = [accuracy(strategy, lr, t, r), 2 - accuracy(strategy, lr, t, r)]
            measured += [0.5 + lr] * given.get("held", 1)
            lines.append(",".join(map(str, [t, seed, *measured, BYTES * t, BYTES * t, t / 7])))
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    config = f"strategy:\n  _target_: fedsim.strategies.{strategy}\n  beta: {lr}\nlr: {lr}\nlocal:\n  lr: {lr}\n"
    (folder / "config.yaml").write_text(config + f"seeds: {list(seeds)}\n")
    if given.get("chosen", True):
        (folder / "environment.json").write_text(json.dumps({"settings": {"strategy": strategy.lower()}}))
    return folder


def write_rates(folder: Path, settings: str = "") -> None:
    """Two runs that differ in lr alone."""
    for lr in (0.1, 0.5):
        write(folder / str(lr), "FedAvg", lr, chosen=bool(settings))
        (folder / str(lr) / "config.yaml").write_text(f"{settings}lr: {lr}\nseeds: {list(SEEDS)}\n")


@pytest.mark.parametrize(("last", "chosen"), [({}, 0.5), ({"last": 1}, 0.5), ({"last": 2}, 0.1), ({"last": 3}, 0.1)])
def test_the_best_is_chosen_by_the_mean_of_the_last_evaluations(tmp_path: Path, last: dict, chosen: float) -> None:
    """lr=0.5 is ahead at the last evaluation alone; by default that one counts."""
    for lr, values in ((0.1, [0.1, 0.5, 0.5, 0.5]), (0.5, [0.1, 0.2, 0.2, 0.6])):
        write(tmp_path / str(lr), "FedAvg", lr)
        (tmp_path / str(lr) / "config.yaml").write_text(f"lr: {lr}\nseeds: [0]\n")
        lines = ["round,seed,test_accuracy", *(f"{t},0,{value}" for t, value in zip(ROUNDS, values, strict=True))]
        (tmp_path / str(lr) / "metrics.csv").write_text("\n".join(lines) + "\n")
    choice = select_best_runs(load_runs([tmp_path]), ["lr"], "test_accuracy", **last)
    assert [run.settings["lr"] for run in choice.runs] == [chosen]


@pytest.fixture(name="runs")
def runs_fixture(tmp_path: Path) -> Path:
    for strategy in ("FedAvg", "FedAWE"):
        for lr in (0.1, 0.5):
            write(tmp_path / f"{strategy}_{lr}", strategy, lr)
    return tmp_path


@pytest.fixture(name="tell")
def tell_fixture(capsys: pytest.CaptureFixture[str]) -> Any:
    def tell(*arguments: object) -> str:
        command.main([*map(str, arguments)])
        return capsys.readouterr().out

    return tell


def frame(text: str) -> Any:
    return pytest.importorskip("pandas").read_csv(io.StringIO(text), comment="#")


def ends(strategy: str, lr: float) -> np.ndarray:
    return np.array([accuracy(strategy, lr, 30, r) for r in range(3)])


def test_a_line_for_every_run_by_the_keys_that_differ(runs: Path, tell: Any) -> None:
    found = frame(tell(runs, "--csv", "--metric", "test_accuracy", "--metric", "train_loss"))
    assert list(found.columns[:2]) == ["strategy", "lr"]
    assert found[["strategy", "lr"]].to_numpy().tolist() == [
        ["fedavg", 0.1], ["fedavg", 0.5], ["fedawe", 0.1], ["fedawe", 0.5]
    ]  # fmt: skip
    places = [(strategy, lr) for strategy in ("FedAvg", "FedAWE") for lr in (0.1, 0.5)]
    for line, (strategy, lr) in zip(found.itertuples(), places, strict=True):
        assert line.test_accuracy == pytest.approx(ends(strategy, lr).mean(), rel=1e-12)
        assert line[4] == pytest.approx(ends(strategy, lr).std(ddof=1), rel=1e-12)
        assert line.train_loss == pytest.approx(2 - ends(strategy, lr).mean(), rel=1e-12)


def test_the_spread_may_be_the_interval_of_the_mean(runs: Path, tell: Any) -> None:
    """Against SciPy's interval."""
    values = ends("FedAvg", 0.5)
    options = ("--metric", "test_accuracy", "--spread", "interval", "--confidence", 0.9)
    low, high = stats.t.interval(0.9, 2, values.mean(), stats.sem(values))
    found = frame(tell(runs / "FedAvg_0.5", "--csv", *options))
    assert "test_accuracy std" not in found
    assert found["test_accuracy half width"].item() == pytest.approx((high - low) / 2, rel=1e-9)
    text = tell(runs / "FedAvg_0.5", *options)
    assert f"{100 * values.mean():.1f} ± {100 * (high - low) / 2:.1f} %" in text
    latex = tell(runs / "FedAvg_0.5", "--latex", "--caption", "C", *options)
    assert "half the width of Student's 90" in latex
    assert "unreliable" in latex  # three seeds
    alone = TableCell(np.array([1.0]), interval_level=0.9)
    assert np.isnan(alone.spread)


def test_the_mean_of_the_last_evaluations(runs: Path, tell: Any) -> None:
    found = frame(tell(runs / "FedAvg_0.5", "--csv", "--last", 3, "--metric", "test_accuracy"))
    naive = np.mean([[accuracy("FedAvg", 0.5, t, r) for t in (10, 20, 30)] for r in range(3)])
    assert found["test_accuracy, last 3"].item() == pytest.approx(naive, rel=1e-12)


def test_a_pivot_of_one_key_over_the_other(runs: Path, tell: Any) -> None:
    text = tell(runs, "--csv", "--columns", "strategy", "--metric", "test_accuracy")
    found = frame(text).set_index("lr")
    assert found.loc[0.5, "test_accuracy fedawe"] == pytest.approx(ends("FedAWE", 0.5).mean())
    assert found.loc[0.1, "test_accuracy fedavg std"] == pytest.approx(ends("FedAvg", 0.1).std(ddof=1))
    with pytest.raises(ConfigError, match=r"several runs have strategy=fedavg; add lr to --rows or --columns, or take"):
        tell(runs, "--rows", "strategy")
    with pytest.raises(ConfigError, match="--rows='momentum' is unknown; choose one of strategy, lr"):
        tell(runs, "--rows", "momentum")


def test_the_best_value_is_chosen_by_validation_samples(runs: Path, tell: Any) -> None:
    """lr=0.1 has the better test accuracy, and must not be chosen for it."""
    text = tell(runs, "--csv", "--best", "lr")
    found = frame(text)
    assert found.lr.tolist() == [0.5, 0.5]
    assert "# lr: the best of 2 values by global_validation_accuracy; 0.5 is the largest lr tried (in 2 of 2" in text
    assert frame(tell(runs, "--csv", "--best", "lr", "--by", "test_accuracy")).lr.tolist() == [0.1, 0.1]
    assert frame(tell(runs, "--csv", "--best", "lr", "--by", "train_loss")).lr.tolist() == [0.1, 0.1]


def test_a_value_in_the_middle_is_not_the_largest_and_groups_differ_in_size(runs: Path, tell: Any) -> None:
    write(runs / "FedAvg_0.05", "FedAvg", 0.05)
    said = tell(runs, "--csv", "--best", "lr", "--by", "test_accuracy")
    assert (
        "# lr: the best of at most 3 values by test_accuracy; 0.1 is the smallest lr tried (in 1 of 2 choices); "
        "repeat the sweep with values beyond (finished runs are kept)" in said
    )


def test_a_line_of_several_runs_has_the_strategy_as_its_label(tmp_path: Path, tell: Any) -> None:
    write_rates(tmp_path, "strategy:\n  _target_: fedsim.strategies.FedAvg\n")
    assert frame(tell(tmp_path, "--csv", "--columns", "lr")).run.tolist() == ["fedavg"]
    write_rates(tmp_path / "unknown")
    assert frame(tell(tmp_path / "unknown", "--csv", "--columns", "lr")).run.isna().tolist() == [True]


def test_without_validation_samples_the_table_says_that_it_is_optimistic(tmp_path: Path, tell: Any) -> None:
    for lr in (0.1, 0.5):
        write(tmp_path / str(lr), "FedAvg", lr, held=0)
    text = tell(tmp_path, "--best", "lr")
    assert "chosen by test_accuracy itself" in text
    assert "optimistic; partition.validation=0.2" in text


def test_what_a_target_cost_replicate_by_replicate(runs: Path, tell: Any) -> None:
    found = frame(tell(runs / "FedAvg_0.5", "--csv", "--target", "test_accuracy=0.45", "--metric", "train_loss"))
    naive = [next((t for t in ROUNDS if accuracy("FedAvg", 0.5, t, r) >= 0.45 - 1e-12), math.nan) for r in range(3)]
    assert naive == [30, 30, 20]
    assert found["rounds to test_accuracy 0.45"].item() == pytest.approx(np.mean(naive))
    assert found["bytes to test_accuracy 0.45"].item() == pytest.approx(2 * BYTES * np.mean(naive))
    assert not [name for name in found.columns if "virtual" in name]
    text = tell(runs / "FedAvg_0.5", "--target", "test_accuracy=0.53", "--target", "train_loss=1.9")
    assert "30 ± 0 (2 of 3)" in text
    assert "–" in tell(runs / "FedAvg_0.5", "--target", "test_accuracy=0.9")


def test_falling_metrics_reach_a_target_from_above_and_equality_counts() -> None:
    values = np.array([[3.0, 3.0, 3.0], [2.0, 2.5, 2.9], [1.0, 2.0, 2.8]])
    assert first_evaluation_at_target(values, 2.0, higher_is_better=False).tolist() == [1, 2, -1]
    assert first_evaluation_at_target(0.1 * values, 0.3, higher_is_better=True).tolist() == [0, 0, 0]


def test_differences_are_paired_by_seed(runs: Path, tell: Any) -> None:
    text = tell(runs, "--csv", "--against", "strategy=fedavg", "--metric", "test_accuracy", "--confidence", 0.9)
    found = frame(text).set_index(["strategy", "lr"])
    name = "difference of test_accuracy"
    for lr in (0.1, 0.5):
        test = stats.ttest_rel(ends("FedAWE", lr), ends("FedAvg", lr))
        low, high = test.confidence_interval(0.9)
        line = found.loc[("fedawe", lr)]
        assert line[name] == pytest.approx(0.09, rel=1e-9)
        assert (line[f"{name} low"], line[f"{name} high"]) == (pytest.approx(low), pytest.approx(high))
        assert (line[f"{name} better"], line[f"{name} pairs"]) == (3, 3)
        assert math.isnan(found.loc[("fedavg", lr), name])
    assert "fedawe 0.1 against strategy=fedavg, test_accuracy: better in 3 of 3 pairs, 90 % interval" in text


def test_differences_stand_in_the_cells_of_every_form(runs: Path, tell: Any) -> None:
    """+9.0 percentage points in the mean, between Student's bounds, in three of three pairs."""
    low, high = (
        100 * bound
        for bound in paired_difference(ends("FedAWE", 0.1), ends("FedAvg", 0.1), SEEDS, SEEDS).confidence_interval
    )
    asked = (runs / "FedAvg_0.1", runs / "FedAWE_0.1", "--against", "strategy=fedavg", "--metric", "test_accuracy")
    said = f"+9.0 [{low:.1f}, {high:.1f}], 3/3"
    for text in (tell(*asked), tell(*asked, "--markdown")):
        (line,) = [
            line for line in text.splitlines() if line.lstrip("| ").startswith("fedawe") and "against" not in line
        ]
        assert said in line
    assert rf"$+9.0$ $[{low:.1f}, {high:.1f}]$, 3/3" in tell(*asked, "--latex")


def test_differences_need_the_same_seeds_in_the_same_order(tmp_path: Path, tell: Any) -> None:
    one = np.array([1.0, 2.0, 3.0])
    for other in ((2, 1, 0), (1, 0, 2), (0, 1), (0, 1, 2, 3)):
        with pytest.raises(ConfigError, match="need the same seeds on both sides"):
            paired_difference(one, one, SEEDS, other)
    write(tmp_path / "a", "FedAvg", 0.1)
    write(tmp_path / "b", "FedAWE", 0.1, seeds=(2, 1, 0))
    with pytest.raises(ConfigError, match=r"\[0, 1, 2\] and \[2, 1, 0\]|\[2, 1, 0\] and \[0, 1, 2\]"):
        tell(tmp_path, "--against", "strategy=fedavg", "--rows", "strategy")


@pytest.mark.parametrize("told", ["FedAvg", "fedavg", "Fed_Avg"])
def test_a_class_goes_by_its_name_where_no_choice_is_known(told: str, tmp_path: Path, tell: Any) -> None:
    for strategy in ("FedAvg", "FedAWE"):
        write(tmp_path / strategy, strategy, 0.1, chosen=False)
    assert "FedAWE against" in tell(tmp_path, "--against", f"strategy={told}")


def test_what_cannot_be_compared_is_one_sentence(runs: Path, tmp_path: Path, tell: Any) -> None:
    with pytest.raises(ConfigError, match="--against strategy=mifa: no run has it; strategy is fedavg, fedawe"):
        tell(runs, "--against", "strategy=mifa")
    with pytest.raises(ConfigError, match="--against='rate' is unknown"):
        tell(runs, "--against", "rate=1")
    write_rates(tmp_path / "rates")
    with pytest.raises(ConfigError, match=r"no setting differs between the runs \(after --best lr\)"):
        tell(tmp_path / "rates", "--best", "lr", "--against", "strategy=fedau")
    with pytest.raises(ConfigError, match="--against strategy must be NAME=VALUE, such as"):
        tell(runs, "--against", "strategy")
    write(tmp_path / "other", "MIFA", 0.1, seeds=(0, 1, 7))
    with pytest.raises(ConfigError, match=r"the same seeds on both sides, and they are \[0, 1, 2\] and \[0, 1, 7\]"):
        tell(runs / "FedAvg_0.1", tmp_path / "other", "--against", "strategy=mifa", "--rows", "strategy")
    with pytest.raises(ConfigError, match=r"--confidence 1\.5 must lie between"):
        tell(runs, "--confidence", 1.5)
    with pytest.raises(ConfigError, match="--last=0"):
        tell(runs, "--last", 0)
    with pytest.raises(ConfigError, match="--target test_accuracy=high must be a number"):
        tell(runs, "--target", "test_accuracy=high")
    with pytest.raises(ConfigError, match="--target='acuracy' is unknown"):
        tell(runs, "--target", "acuracy=0.5")
    with pytest.raises(ConfigError, match="--metric='acuracy' is unknown"):
        tell(runs, "--metric", "acuracy")


def test_replicates_without_a_number_leave_with_their_partners() -> None:
    found = paired_difference(np.array([1.0, np.nan, 3.0, 5.0]), np.array([0.0, 0.0, np.inf, 3.0]), range(4), range(4))
    assert found.values.tolist() == [1.0, 2.0]
    assert found.confidence_interval == pytest.approx(stats.t.interval(0.95, 1, loc=1.5, scale=0.5))


@pytest.mark.parametrize(
    ("values", "rises", "said"),
    [
        ([1.0, 1.1, 0.9], True, "better in 3 of 3 pairs, 95 % interval 0.7516 to 1.248: better"),
        ([1.0, 1.1, 0.9], False, "better in 0 of 3 pairs, 95 % interval 0.7516 to 1.248: worse"),
        ([1.0, -1.0, 0.0], True, "better in 1 of 3 pairs, 95 % interval -2.484 to 2.484: not significant"),
        ([1.0, -1.0, 0.0], False, "better in 1 of 3 pairs, 95 % interval -2.484 to 2.484: not significant"),
        ([1.0], True, "one pair says nothing of the spread"),
        ([], True, "there is no pair"),
    ],
)
def test_what_may_be_said(values: list[float], rises: bool, said: str) -> None:
    assert PairedDifference(np.array(values)).summary_sentence(rises) == said


def test_differences_of_accuracies_are_told_in_percentage_points() -> None:
    found = PairedDifference(np.array([0.010, 0.011, 0.009])).summary_sentence(True, percent=True)
    assert found == "better in 3 of 3 pairs, 95 % interval 0.7516 to 1.248 percentage points: better"


def test_latex_is_read_by_a_parser_of_latex(runs: Path, tell: Any, tmp_path: Path) -> None:
    latexwalker = pytest.importorskip("pylatexenc.latexwalker")
    file = tmp_path / "paper" / "table.tex"
    tell(runs, "--columns", "lr", "--metric", "test_accuracy", "--against", "strategy=fedavg", "--to", file)
    text = file.read_text()
    nodes, _, _ = latexwalker.LatexWalker(text, tolerant_parsing=False).get_latex_nodes()
    (tabular,) = [node for node in nodes if node.isNodeType(latexwalker.LatexEnvironmentNode)]
    assert tabular.environmentname == "tabular"
    upper, *body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count("& ") for line in body} == {4}
    assert r"\begin{tabular}{lrrrr}" in text
    assert r"\multicolumn{2}{c}{learning rate 0.1} & \multicolumn{2}{c}{learning rate 0.5}" in upper
    assert body[0].startswith(r"strategy & test accuracy (\%) & ")
    assert body[1].startswith("FedAvg & ")
    mean = 100 * ends("FedAWE", 0.1).mean()
    assert rf"\textbf{{\boldmath ${mean:.1f} \pm 2.0$}}" in text
    assert rf"${100 * ends('FedAvg', 0.1).mean():.1f} \pm 3.0$" in text


def test_markdown_is_a_table_with_as_many_cells_in_every_line(runs: Path, tell: Any) -> None:
    lines = tell(runs, "--markdown", "--best", "lr").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4
    assert len({line.count("|") for line in rows}) == 1
    assert set(rows[1]) == set("|-:")
    assert "**62.0 ± 2.0 %**" in rows[3]
    assert lines[-1].startswith("- lr: the best of 2")
    assert (
        lines[-2] == "- Bold: the best of each column by its mean alone, since fewer than 5 seeds distinguish little."
    )


def test_signs_that_mean_something_to_latex_are_spelt_out() -> None:
    from fedsim.studies.results.latex import escape_latex

    walker = pytest.importorskip("pylatexenc.latex2text")
    for text in ("50 % of A_1 & B^2", "{a}~#1", r"C:\runs", "$5", "a<b>c|d"):
        assert walker.LatexNodes2Text().latex_to_text(escape_latex(text)).replace("\xa0", "~").replace("ˆ", "^") == text


def test_a_measure_is_of_the_last_evaluation_unless_more_are_asked_for(tmp_path: Path) -> None:
    runs = load_runs([write(tmp_path / "run", "FedAvg", 0.1)])
    measure, mean_of_two = final_metric_measure("test_accuracy", runs), final_metric_measure("test_accuracy", runs, 2)
    assert (measure.heading, mean_of_two.heading) == ("test_accuracy", "test_accuracy, last 2")
    ends = [np.array([accuracy("FedAvg", 0.1, t, r) for r in range(len(SEEDS))]) for t in ROUNDS]
    np.testing.assert_allclose(measure.values_function(runs[0]), ends[-1])
    np.testing.assert_allclose(mean_of_two.values_function(runs[0]), (ends[-1] + ends[-2]) / 2)
