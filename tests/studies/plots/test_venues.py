"""Pictures for a paper: as wide as a column, letters of the venue's size, a caption beside each, axes' ends by hand."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import pytest
from made import curve, run, strategy
from PIL import Image

from fedsim.studies.plots.compare import comparison_pictures
from fedsim.studies.plots.looks import curve_styles
from fedsim.studies.plots.plot_cli import main
from fedsim.studies.plots.venues import VENUES, use_venue
from fedsim.studies.results.differences import load_runs


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sweep")
    for name in ("FedAvg", "Scaffold"):
        for lr in (0.1, 0.2):
            columns = {"test_accuracy": curve(0.1, 0.8), "test_loss": curve(2, 1), "distance_to_ps": curve(2, 0.1)}
            run(root / f"{name}{lr}", {"strategy": strategy(name), "lr": lr}, columns)
    return root


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", VENUES)
def test_every_picture_is_as_wide_as_a_column_and_not_too_high(name: str, sweep: Path, tmp_path: Path) -> None:
    venue = VENUES[name]
    main([str(sweep), "--out", str(tmp_path), "--style", name, "--format", "png,pdf,svg"])
    found = sorted(tmp_path.glob("*.png"))
    assert {path.stem for path in found} == {"curves", "final", "distances"}
    for path in found:
        with Image.open(path) as image:
            assert image.width == pytest.approx(150 * venue.text_width, abs=1)
            assert image.height <= 150 * (venue.max_height + 1)  # the legend is below the panels
        (box,) = re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+) ", path.with_suffix(".pdf").read_bytes())
        assert float(box) == pytest.approx(72 * venue.text_width, abs=0.5)
        assert b"/Type3" not in path.with_suffix(".pdf").read_bytes()
        assert path.with_suffix(".svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("name", VENUES)
def test_letters_are_of_the_venues_size_and_nothing_lies_outside(name: str, sweep: Path) -> None:
    with use_venue(VENUES[name]), matplotlib.rc_context(VENUES[name].matplotlib_parameters):
        for picture in comparison_pictures(load_runs([sweep])):
            figure = picture.figure
            sizes = {axes.yaxis.label.get_size() for axes in figure.axes}
            assert sizes == {VENUES[name].font_size}
            figure.draw_without_rendering()
            box = figure.get_tightbbox()
            assert box.x0 > -0.02
            assert box.x1 < figure.get_figwidth() + 0.02


def test_a_caption_says_what_bands_are_and_of_how_many_seeds(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(sweep), "--out", str(tmp_path / "few")])
    assert "bands are over 3 seeds. A spread over fewer than 5 seeds" in capsys.readouterr().err
    curves, distances = ((tmp_path / "few" / f"{name}.caption.txt").read_text() for name in ("curves", "distances"))
    assert "Bands are ±1 standard deviation over 3 seeds. A spread over fewer than 5 seeds" in curves
    assert "Okabe–Ito" in curves
    assert "(3 seeds) from the 10 % to the 90 % quantile" in distances
    many = run(tmp_path / "many", {"lr": 1}, {"test_loss": curve(2, 1)}, seeds=range(5))
    main([str(many), "--out", str(tmp_path / "drawn")])
    assert "seeds" not in capsys.readouterr().err
    assert "over 5 seeds.\n" in (tmp_path / "drawn" / "curves.caption.txt").read_text()
    one = run(tmp_path / "one", {"lr": 1}, {"test_loss": curve(2, 1)}, seeds=[0])
    main([str(one), "--out", str(tmp_path / "drawn")])
    assert "seeds" not in capsys.readouterr().err
    assert "Bands" not in (tmp_path / "drawn" / "curves.caption.txt").read_text()


def test_a_legend_says_what_colours_and_lines_are(sweep: Path) -> None:
    found = curve_styles(load_runs([sweep]))
    assert found.legend_title == "colour: strategy, line: learning rate"
    assert [name for name, _ in found.legend] == ["FedAvg", "SCAFFOLD", "lr=0.1", "lr=0.2"]
    figure = next(comparison_pictures(load_runs([sweep]))).figure
    assert figure.legends[0].get_title().get_text() == found.legend_title
    assert curve_styles(load_runs([sweep / "FedAvg0.1", sweep / "FedAvg0.2"])).legend_title == "learning rate"


def test_ends_of_an_axis(sweep: Path, tmp_path: Path) -> None:
    (drawing,) = (
        p.figure
        for p in comparison_pictures(load_runs([sweep]), limits={"test_accuracy": (0.5, 1)})
        if p.name == "curves"
    )
    assert drawing.axes[0].get_ylim() == (0.5, 1)
    assert drawing.axes[1].get_ylim() != (0.5, 1)
    main([str(sweep), "--out", str(tmp_path), "--ylim", "test_accuracy=0.5,1", "--format", "svg"])
    assert not list(tmp_path.glob("*.png"))
    for given, said in (
        ("test_accuracy=1", "must be NAME=LOW,HIGH"),
        ("test_accuracy=1,0", "1 must be less than 0"),
        ("accuracy=0,1", "--ylim='accuracy' is unknown"),
    ):
        with pytest.raises(SystemExit, match=said):
            main([str(sweep), "--ylim", given])
    with pytest.raises(SystemExit, match="--format='gif' is unknown"):
        main([str(sweep), "--format", "png,gif"])
