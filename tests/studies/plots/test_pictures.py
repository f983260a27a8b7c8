"""Pictures that compare runs say what was swept, in few entries; what runs lack is left out, not what others have."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from made import curve, run, strategy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

from fedsim.studies.plots.bars import bars_figure
from fedsim.studies.plots.by_setting import final_by_setting_figure
from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.compare import comparison_pictures, final_values_figure
from fedsim.studies.plots.curves import comparison_figure, draw_curve
from fedsim.studies.plots.html_report import report_html
from fedsim.studies.plots.looks import curve_styles
from fedsim.studies.plots.plot_cli import final_values_table, main
from fedsim.studies.plots.style import set_log_labels
from fedsim.studies.results.differences import load_runs
from fedsim.studies.results.latex import escape_latex
from fedsim.studies.results.runs import final_metric_columns

STRATEGIES = ("FedAvg", "FedAWE", "FedPBC", "MIFA")


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four strategies by five rates; the initial model's loss is far from all others."""
    root = tmp_path_factory.mktemp("twenty")
    for i, name in enumerate(STRATEGIES):
        for j, lr in enumerate((1.0, 0.1, 10.0, 0.5, 2.0)):
            columns = {
                "train_accuracy": curve(0.1, 0.9),
                "test_accuracy": curve(0.1, 0.5 + 0.1 * i),
                "client_accuracy_worst10": curve(0.0, 0.3),
                "test_loss": curve(50, 1 + 0.1 * j),
            }
            run(root / f"{j}-{name}", {"strategy": strategy(name), "lr": lr}, columns)
    return root


def legend(drawing: Figure) -> list[str]:
    return [text.get_text() for text in drawing.legends[0].get_texts()]


def drawn(drawing: Figure) -> FigureCanvasAgg:
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    return canvas


def test_one_swept_key_is_the_colour_and_another_the_dashes(twenty: Path) -> None:
    runs = load_runs([twenty])
    drawing = comparison_figure(runs)
    lines = drawing.axes[0].get_lines()
    told = {run.label: (line.get_color(), line.get_linestyle()) for run, line in zip(runs, lines, strict=True)}
    assert len(set(told.values())) == 20
    by_rate = {lr: {look[0] for label, look in told.items() if label.endswith(f"lr={lr}")} for lr in (0.1, 0.5, 10.0)}
    assert [len(tints) for tints in by_rate.values()] == [1, 1, 1]
    assert len(set.union(*by_rate.values())) == 3
    by_name = {name: {look[1] for label, look in told.items() if label.startswith(name)} for name in STRATEGIES}
    assert [len(dashes) for dashes in by_name.values()] == [1, 1, 1, 1]
    assert sorted(legend(drawing)) == sorted([*STRATEGIES, *(f"lr={lr}" for lr in (0.1, 0.5, 1.0, 2.0, 10.0))])


def test_runs_of_a_sweep_stand_in_the_order_of_its_values(twenty: Path) -> None:
    rates = [re.findall(r"lr=(.*)", run.label)[0] for run in load_runs([twenty])]
    assert rates == ["0.1", "0.5", "1.0", "2.0", "10.0"] * 4


def test_a_loss_stands_beside_accuracy_with_units_and_round_0_stretches_no_axis(twenty: Path) -> None:
    curves = next(comparison_pictures(load_runs([twenty]))).figure
    wanted = ["test accuracy (%)", "test loss", "training accuracy, worst tenth of clients (%)"]
    assert [axes.get_ylabel().replace("\n", " ") for axes in curves.axes] == wanted
    drawn(curves)
    assert {text.get_text() for text in curves.axes[0].get_yticklabels()} >= {"60", "80"}
    low, high = curves.axes[1].get_ylim()
    assert high < 5  # it begins at 50
    last = [line.get_ydata() for line in curves.axes[1].get_lines()]
    assert all(low < y < high for ydata in last for y in ydata[1:])
    assert [axes.get_xlabel() for axes in final_values_figure(load_runs([twenty])).axes] == [wanted[0], wanted[2]]


def test_numbers_of_one_key_are_deep_to_pale(twenty: Path) -> None:
    folders = [twenty / f"{j}-MIFA" for j in range(5)]
    runs = load_runs(folders)
    shades = {run.settings["lr"]: look.colour for run, look in zip(runs, curve_styles(runs).styles, strict=True)}
    light = [sum(bytes.fromhex(shades[lr][1:])[:2]) for lr in sorted(shades)]
    assert light == sorted(light)
    assert len(set(light)) == 5


def test_twenty_entries_stay_inside_the_picture(tmp_path: Path) -> None:
    for number in range(20):
        settings = {"a": number % 3, "b": number // 3 % 3, "c": number % 5, "path": f"a/folder/far/below{number}.csv"}
        run(tmp_path / str(number), settings, {"test_accuracy": curve(0.1, 0.5), "test_loss": curve(5, 1)})
    runs = load_runs([tmp_path])
    assert runs[0].label == "a=0 b=0 c=0 path=below0.csv"
    drawing = comparison_figure(runs)
    canvas = drawn(drawing)
    assert len(set(legend(drawing))) == 20
    box = drawing.legends[0].get_window_extent()
    width, height = canvas.get_width_height()
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= min(axes.get_tightbbox().y0 for axes in drawing.axes)
    assert all(axes.get_window_extent().height > 0.4 * height for axes in drawing.axes)
    assert len(set(curve_styles(runs).styles)) == 20


def test_three_keys_are_colours_dashes_and_markers(tmp_path: Path) -> None:
    for name in STRATEGIES[:2]:
        for lr in (0.1, 0.2):
            for gamma in (0.3, 0.6):
                settings = {"strategy": strategy(name), "lr": lr, "availability": {"trajectory": {"gamma": gamma}}}
                run(tmp_path / f"{name}{lr}{gamma}", settings, {"test_loss": curve(2, 1)})
    runs = load_runs([tmp_path])
    found = curve_styles(runs)
    assert len(set(found.styles)) == 8
    assert [name for name, _ in found.legend] == ["FedAvg", "FedAWE", "lr=0.1", "lr=0.2", "gamma=0.3", "gamma=0.6"]


def test_three_keys_may_have_as_many_values_as_there_are_dashes_markers_and_colours(tmp_path: Path) -> None:
    for number in range(40):
        settings = {"a": number % 4, "b": number % 8 + 10, "c": number % 10 + 20}
        run(tmp_path / str(number), settings, {"test_loss": curve(2, 1)})
    found = curve_styles(load_runs([tmp_path]))
    assert len(set(found.styles)) == 40
    assert [len({getattr(look, name) for look in found.styles}) for name in ("colour", "dashes", "marker")] == [
        10,
        4,
        8,
    ]
    assert len(found.legend) == 4 + 8 + 10


def test_at_most_two_telling_metrics_and_a_loss_are_drawn_by_default(tmp_path: Path) -> None:
    names = ("test_accuracy", "client_accuracy_worst10", "test_accuracy_by_client_worst10", "test_loss", "my_metric")
    for number in range(2):
        run(tmp_path / str(number), {"lr": number}, {name: curve(0.1, 0.5) for name in names})
    axes = comparison_figure(load_runs([tmp_path])).axes
    expected = ["test accuracy (%)", "test loss", "test accuracy, worst tenth of clients (%)"]
    assert [one.get_ylabel().replace("\n", " ") for one in axes] == expected


def test_a_band_on_a_logarithmic_axis_is_of_quantiles() -> None:
    values = np.array([[1e-3, 1.0, 2.0, 3.0, 100.0], [1e-3, 1.0, np.nan, 3.0, 9.0]])
    axes = Figure().subplots()
    axes.set_yscale("log")
    draw_curve(axes, np.array([1, 2]), values, "distance_to_po", "", "red")
    heights = {float(y) for _, y in axes.collections[0].get_paths()[0].vertices}
    for row in values:
        for edge in np.quantile(row[np.isfinite(row)], [0.1, 0.9]):
            assert min(abs(height / edge - 1) for height in heights) < 1e-12


def test_reference_points_are_set_as_mathematics(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        run(tmp_path / str(lr), {"lr": lr}, {"distance_to_po": curve(2, 0.1)})
    labels = [
        axes.get_ylabel() for picture in comparison_pictures(load_runs([tmp_path])) for axes in picture.figure.axes
    ]
    assert r"distance to $\theta^{\mathrm{PO}}$" in labels
    cells = [ResultCell({"rule": "PFL"}, values_by_measure={"distance to θ^PO": np.ones(1)})]
    (axes,) = bars_figure(cells, "distance to θ^PO", colours="rule").axes
    assert axes.get_title() == r"distance to $\theta^{\mathrm{PO}}$"
    assert escape_latex("to θ^PS_1, θ") == r"to $\theta^{\mathrm{PS}}$\_1, $\theta$"


def test_unlike_runs_keep_their_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    run(tmp_path / "o" / "a", {"lr": 0.1}, {"test_loss": curve(2, 1), "test_accuracy": curve(0.1, 0.8)}, seeds=(0,))
    run(
        tmp_path / "o" / "b", {"lr": 0.2}, {"test_loss": curve(2, 1), "global_validation_loss": curve(2, 1)}, seeds=(0,)
    )
    runs = load_runs([tmp_path / "o"])
    columns = ["test_loss", "test_accuracy", "global_validation_loss"]
    assert final_metric_columns(runs) == columns
    read = pandas.read_csv(io.StringIO(final_values_table(runs, columns, "csv")))
    assert np.array_equal(read[columns].notna(), [[True, True, False], [True, False, True]])
    assert report_html(runs).count("<td>–</td>") == 2
    assert [axes.get_ylabel() for axes in comparison_figure(runs).axes] == ["test loss", "test accuracy (%)"]
    assert [len(axes.get_lines()) for axes in comparison_figure(runs).axes] == [2, 1]
    main([str(tmp_path / "o"), "--metric", "global_validation_loss", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "lr=0.1" in said
    assert "±" not in said  # of one seed
    assert "nan" not in said


def test_curves_along_virtual_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replicates are there at different times: straight lines between evaluations, as long as all of them go on."""
    columns = {"test_accuracy": curve(0.1, 0.5), "virtual_seconds": [0, 3, 6, 9, 12]}
    for name in STRATEGIES[:2]:
        run(tmp_path / name, {"strategy": strategy(name)}, columns)
    runs = load_runs([tmp_path])
    places, values = runs[0].curve_along("test_accuracy", "virtual_seconds")
    times, known = (runs[0].curve(name)[1] for name in ("virtual_seconds", "test_accuracy"))
    assert places.tolist() == [0, 3, 6, 9, 12]
    assert np.allclose(values[:, 0], known[:, 0])
    assert values[1, 2] == pytest.approx(known[0, 2] + (known[1, 2] - known[0, 2]) * 3 / times[1, 2])
    axes = comparison_figure(runs, ["test_accuracy"], "virtual_seconds").axes[0]
    assert axes.get_xlabel() == "virtual seconds"
    assert axes.get_lines()[0].get_xdata()[-1] == 12
    main([str(tmp_path), "--x", "virtual_seconds", "--html", str(tmp_path / "report.html")])
    assert "Over virtual seconds" in (tmp_path / "report.html").read_text()
    with pytest.raises(SystemExit, match="--x='rounds' is unknown; choose one of virtual_seconds, samples, seconds"):
        main([str(tmp_path), "--x", "rounds"])


@pytest.mark.parametrize(("ends", "plain"), [((2.7, 3.5), True), ((0.001, 5.0), False)])
def test_a_logarithmic_axis_within_a_decade_has_plain_numbers(ends: tuple[float, float], plain: bool) -> None:
    drawing = Figure()
    axes = drawing.subplots()
    axes.set_yscale("log")
    set_log_labels(axes.yaxis)
    axes.set_ylim(*ends)
    FigureCanvasAgg(drawing).draw()
    texts = [tick.get_text() for tick in axes.get_yticklabels(which="both") if tick.get_text()]
    assert len(texts) > 1
    assert all((re.fullmatch(r"[\d.]+", text) is not None) == plain for text in texts)


def test_keys_that_follow_from_a_swept_choice_are_no_labels(tmp_path: Path) -> None:
    command = "fedsim -m local=sgd,rrm when.local.rrm.shift.deploy=round"
    for name, deploy in (("FedAvg", "step"), ("MIFA", "round")):
        folder = run(
            tmp_path / name, {"strategy": strategy(name), "shift": {"deploy": deploy}}, {"test_loss": curve(2, 1)}
        )
        (folder / "environment.json").write_text(json.dumps({"command": command}))
    assert [one.label for one in load_runs([tmp_path])] == ["FedAvg", "MIFA"]
    (tmp_path / "MIFA" / "environment.json").write_text("{}")
    (tmp_path / "FedAvg" / "environment.json").write_text("{}")
    assert [one.label for one in load_runs([tmp_path])] == ["FedAvg deploy=step", "MIFA deploy=round"]


def test_final_values_are_drawn_by_a_swept_setting(twenty: Path, tmp_path: Path) -> None:
    """A line per strategy; rates from 0.1 to 10 on a logarithmic axis, in order."""
    runs = load_runs([twenty])
    drawing = final_by_setting_figure(runs, "lr", ["test_accuracy", "test_loss"])
    drawn(drawing)
    accuracy, loss = drawing.axes
    assert accuracy.get_xscale() == "log"
    assert sorted(legend(drawing)) == sorted(STRATEGIES)
    for axes, metric in ((accuracy, "test_accuracy"), (loss, "test_loss")):
        assert len(axes.containers) == len(STRATEGIES)
        for bars in axes.containers:
            strategy_runs = [run for run in runs if bars.get_label() in run.label]
            expected = sorted((run.settings["lr"], run.final(metric)[0]) for run in strategy_runs)
            np.testing.assert_allclose(np.transpose(bars.lines[0].get_data()), expected)
            spread = np.ptp(np.array(bars.lines[2][0].get_segments())[:, :, 1], axis=1) / 2
            np.testing.assert_allclose(
                spread, [run.final(metric)[1] for run in sorted(strategy_runs, key=lambda r: r.settings["lr"])]
            )
    main([str(twenty), "--x", "lr", "--metric", "test_loss", "--out", str(tmp_path), "--format", "png"])
    assert (tmp_path / "by_setting.png").stat().st_size > 5000
    assert "Error bars are ±1 standard deviation over 3 seeds" in (tmp_path / "by_setting.caption.txt").read_text()
    assert len(list(tmp_path.glob("*.png"))) > 1
    arguments = [str(twenty), "--x", "lr", "--out", str(tmp_path / "one"), "--format", "png", "--only"]
    main([*arguments, "by_setting"])
    assert [path.name for path in (tmp_path / "one").glob("*.png")] == ["by_setting.png"]
    with pytest.raises(SystemExit, match=r"--only='by_settings' is unknown; .* did you mean 'by_setting'"):
        main([*arguments, "curves,by_settings"])


def test_final_values_by_words_have_a_place_each(twenty: Path) -> None:
    drawing = final_by_setting_figure(load_runs([twenty]), "strategy._target_", ["test_accuracy"])
    drawn(drawing)
    assert [text.get_text() for text in drawing.axes[0].get_xticklabels()] == sorted(STRATEGIES, key=str.lower)
    assert all(bars.lines[0].get_linestyle() == "None" for bars in drawing.axes[0].containers)


def test_an_axis_that_is_neither_a_column_nor_swept_is_refused(
    twenty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"--x='rounds' is unknown; choose one of samples, seconds, strategy, lr"):
        main([str(twenty), "--x", "rounds"])


def test_the_final_values_are_those_of_the_metric_that_was_chosen(twenty: Path) -> None:
    pictures = {picture.name: picture for picture in comparison_pictures(load_runs([twenty]), ["test_loss"])}
    assert "loss" in pictures["final"].figure.axes[0].get_xlabel().lower()


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_an_interval_band_is_students_of_the_mean(scale: str) -> None:
    draw = np.random.default_rng(0)
    values = draw.lognormal(size=(5, 6))
    values[2, :4] = np.nan
    axes = Figure().subplots()
    axes.set_yscale(scale)
    draw_curve(axes, np.arange(5), values, "test_loss", "", "black", band="interval")
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    for round_number, row in enumerate(values):
        sample = row[np.isfinite(row)]
        expected = stats.t.interval(0.95, len(sample) - 1, sample.mean(), stats.sem(sample))
        heights = corners[corners[:, 0] == round_number, 1]
        np.testing.assert_allclose([heights.min(), heights.max()], expected)


def test_captions_say_what_bands_and_error_bars_show(twenty: Path, tmp_path: Path) -> None:
    main([str(twenty), "--x", "lr", "--spread", "interval", "--out", str(tmp_path), "--format", "png"])
    for name in ("curves", "by_setting"):
        text = (tmp_path / f"{name}.caption.txt").read_text()
        assert "Student's 95 % interval of the mean over 3 seeds" in text
        assert "standard deviation" not in text
