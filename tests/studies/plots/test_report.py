"""`fedsim-plot --html`: one file that says what differs, with every picture inside, as a real browser shows it."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from made import curve
from made import run as write_run
from omegaconf import OmegaConf
from PIL import Image

from fedsim import EvaluationOptions, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.data.datasets import Dataset
from fedsim.local import SGD
from fedsim.models import MLP
from fedsim.run.tracking import Tracking
from fedsim.strategies import FedAvg, FedAWE
from fedsim.studies.plots.html_report import _result_rows, report_html
from fedsim.studies.plots.plot_cli import main
from fedsim.studies.results.differences import load_runs

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
RATES = (0.1, 0.3)
PICTURES = ["curves", "final", "clients", "availability", "partition"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two strategies by two rates, two replicates each; what the command line writes beside a run is there too."""
    root = tmp_path_factory.mktemp("sweep")
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((60, 4))), torch.as_tensor(draw.integers(0, 3, 60))
    for strategy in (FedAvg(), FedAWE()):
        for lr in RATES:
            name = type(strategy).__name__
            simulation = Simulation(
                Dataset("blobs", x[:40], y[:40], x[40:], y[40:], classes=3),
                functools.partial(MLP, hidden=(5,)),
                clients=4,
                availability=Bernoulli(Uniform(0.6)),
                strategy=strategy,
                local=SGD(lr=lr, steps=2, batch_size=2),
                rounds=4,
                seeds=(0, 1),
                evaluation=EvaluationOptions(every=2),
            )
            folder = root / f"{name}-{lr}"
            simulation.run(folder, tracking=Tracking(progress="none", tensorboard=False))
            settings = {"strategy": {"_target_": f"fedsim.strategies.{name}"}, "lr": lr, "rounds": 4, "note": "<b>&"}
            OmegaConf.save(settings, folder / "config.yaml")
    return root


@pytest.fixture(scope="module")
def report(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the sweep, from a glob that the shell left alone."""
    path = tmp_path_factory.mktemp("report") / "below" / "report.html"
    main([f"{sweep}/Fed*", "--html", str(path)])
    return path


class Reader(HTMLParser):
    """Collects every attribute that names something to fetch, and the text of every table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for key, value in attributes if key in ("src", "href", "srcset", "data")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data.strip()


def test_the_report_is_one_file_that_fetches_nothing(report: Path) -> None:
    text = report.read_text()
    assert [path.name for path in report.parent.iterdir()] == ["report.html"]
    assert all(value.startswith("data:image/svg+xml;base64,") for value in Reader(text).fetched)
    assert not re.search(r"<script|<link|@import|url\(", text)
    assert re.findall(r'<section id="(\w+)">', text) == ["differences", "results", *PICTURES, "origins"]


def test_differences_and_results_are_those_of_the_runs(report: Path, sweep: Path) -> None:
    rows = Reader(report.read_text()).rows
    labels = ["FedAvg lr=0.1", "FedAvg lr=0.3", "FedAWE lr=0.1", "FedAWE lr=0.3"]
    order = [rows[0].index(label) for label in labels]
    table = {row[0]: [row[i] for i in order] for row in rows[1:3]}
    assert table == {"strategy": ["FedAvg", "FedAvg", "FedAWE", "FedAWE"], "lr": ["0.1", "0.3", "0.1", "0.3"]}
    accuracy = {row[0]: row[1] for row in rows if row[0] in labels}
    for label, name in zip(labels, ("FedAvg-0.1", "FedAvg-0.3", "FedAWE-0.1", "FedAWE-0.3"), strict=True):
        final = json.loads((sweep / name / "summary.json").read_text())["final"]["test_accuracy"]
        assert accuracy[label] == f"{100 * final['mean']:.1f} ± {100 * final['std']:.1f} %"


def test_the_best_number_is_marked_where_a_metric_has_a_better_side(tmp_path: Path) -> None:
    for number, (accuracy, loss) in enumerate([(float("nan"), 1.0), (0.5, 3.0), (0.7, 2.0)]):
        columns = {"test_accuracy": curve(0.1, accuracy), "test_loss": curve(5, loss), "client_drift": [number] * 5}
        write_run(tmp_path / str(number), {"lr": number}, columns)
    marked = {row["column"]: [best for _, best in row["cells"]] for row in _result_rows(load_runs([tmp_path]))}
    assert marked["test_accuracy"] == [False, False, True]
    assert marked["test_loss"] == [True, False, False]
    assert marked["client_drift"] == [False, False, False]


def test_of_two_runs_the_better_one_is_marked_and_a_run_alone_is_not(tmp_path: Path) -> None:
    for number, loss in enumerate((3.0, 2.0)):
        write_run(tmp_path / str(number), {"lr": number}, {"test_loss": curve(5, loss)})
    for folders, expected in (([tmp_path], [False, True]), ([tmp_path / "0"], [False])):
        (row,) = _result_rows(load_runs(folders))
        assert [best for _, best in row["cells"]] == expected


def test_settings_are_text_not_markup(report: Path) -> None:
    text = report.read_text()
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text


def test_options_that_one_class_alone_has_are_out_of_the_table(tmp_path: Path) -> None:
    def write(name: str, settings: dict[str, object]) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.csv").write_text("round,seed,test_loss\n0,0,1.0\n1,0,0.5\n")
        OmegaConf.save(settings, folder / "config.yaml")

    for name, lr in (("a", 0.1), ("b", 0.2)):
        write(name, {"strategy": {"_target_": "fedsim.strategies.FedAvgM", "momentum": 0.9, "server_lr": lr}, "lr": lr})
    write("c", {"strategy": {"_target_": "fedsim.strategies.FedProx", "mu": 0.01}, "lr": 0.1})
    page = report_html(load_runs([tmp_path]))
    rows = Reader(page).rows
    table = {row[0] for row in rows[: rows.index(next(row for row in rows if row[0] == "run"))]}
    assert {"strategy", "lr"} <= table
    assert "strategy.server_lr" in table  # it differs between runs of the class
    assert not {"strategy.momentum", "strategy.mu"} & table
    hidden = page[page.index("<summary>Options of a single class (2)") :]
    assert "strategy.mu (FedProx" in hidden
    assert "strategy.momentum (FedAvgM)" in hidden
    assert page.count('class="wide" tabindex="0"') == 2


@pytest.mark.slow
def test_a_reader_is_told_what_is_missing(sweep: Path, tmp_path: Path) -> None:
    shutil.copytree(sweep, tmp_path / "copy")
    (tmp_path / "copy" / "FedAvg-0.1" / "clients.npz").unlink()
    path = tmp_path / "copy" / "FedAWE-0.1" / "config.yaml"
    path.write_text(path.read_text().replace("rounds: 4", "rounds: 9"))
    text = report_html(load_runs([tmp_path / "copy"]))
    assert "FedAvg lr=0.1 rounds=4 has no clients.npz" in text
    assert "FedAWE lr=0.1 rounds=9 has completed 4 of 9 rounds" in text


@pytest.mark.slow
def test_a_single_run_has_a_report_too(sweep: Path) -> None:
    text = report_html(load_runs([sweep / "FedAvg-0.1"]))
    sections = re.findall(r'<section id="(\w+)">', text)
    assert sections == ["results", "curves", "clients", "availability", "partition", "origins"]


@pytest.mark.slow
def test_pictures_as_png_and_pdf(sweep: Path, tmp_path: Path) -> None:
    main([str(sweep / "FedAvg-0.1"), str(sweep / "FedAWE-0.1"), "--out", str(tmp_path / "pictures")])
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == sorted(f"{name}.{ending}" for name in PICTURES for ending in ("png", "pdf", "caption.txt"))
    for name in PICTURES:
        with Image.open(tmp_path / "pictures" / f"{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 20  # more than an empty frame


def browse(*arguments: str) -> str:
    """What headless Chromium prints."""
    assert BROWSER is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
    done = subprocess.run([BROWSER, *options, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_every_picture_and_no_line_leaves_the_page(report: Path, tmp_path: Path, width: int) -> None:
    """A script that is added to a copy writes down what the browser has laid out."""
    probe = """<script>addEventListener("load", () => { document.body.innerHTML = "<output>" + JSON.stringify({
      drawn: [...document.images].map(i => i.complete && i.naturalWidth > 300 && i.clientWidth > 300),
      overflow: document.documentElement.scrollWidth - innerWidth,
      headings: [...document.querySelectorAll("h2")].map(h => h.textContent),
      fetched: performance.getEntriesByType("resource").filter(e => !e.name.startsWith("data:")).map(e => e.name),
    }) + "</output>" })</script>"""
    copy = tmp_path / "probed.html"
    copy.write_text(report.read_text().replace("</body>", probe + "</body>"))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = browse(profile, f"--window-size={width},900", "--dump-dom", copy.as_uri())
    seen = json.loads(re.findall(r"<output>(.*)</output>", shown)[0])
    assert seen["drawn"] == [True] * len(PICTURES)
    assert seen["overflow"] <= 0
    assert seen["headings"][:2] == ["What differs", "Results after the last round"]
    assert seen["fetched"] == []


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_a_screenshot_has_the_colours_of_every_run(report: Path, tmp_path: Path) -> None:
    from fedsim.studies.plots.style import PALETTE

    target, profile = tmp_path / "page.png", f"--user-data-dir={tmp_path / 'profile'}"
    browse(profile, "--window-size=1200,2400", f"--screenshot={target}", report.as_uri())
    with Image.open(target) as page:
        counts = {rgb: n for n, rgb in page.convert("RGB").getcolors(1 << 24) or []}
    for tint in PALETTE[:2]:  # a strategy's each; rates are dashes
        assert counts.get(tuple(bytes.fromhex(tint[1:])), 0) > 100, tint
