"""The command line as a user meets it: a run, a sweep and its comparison, help, completion, what a stop leaves."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import QUICK

from fedsim.app.cli import main
from fedsim.app.config import groups, keys
from fedsim.run.tracker import Tracker
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.studies.plots.plot_cli import main as plot
from fedsim.studies.results.differences import load_runs


def process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedsim", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_run_waits_for_no_library_that_it_does_not_need(tmp_path: Path) -> None:
    """Most of a start is PyTorch's own; each of these would add to it."""
    dear = ("scipy", "sklearn", "matplotlib", "pandas", "torchvision", "tensorboard", "torchmetrics")
    code = (
        "import sys; from fedsim.app.cli import main\n"
        "sys.argv = ['fedsim', 'rounds=1', 'out=here', 'tracking.tensorboard=false', 'tracking.progress=none']\n"
        f"main(); print('met', [name for name in {dear} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "met []", done.stderr


def test_a_run_leaves_everything_it_promises(tmp_path: Path) -> None:
    done = process(tmp_path, *QUICK[:-1], "strategy=fedawe", "availability=sine", "seeds=[4,2]", "out=here")
    assert done.returncode == 0, done.stderr
    assert "test_accuracy" in done.stdout
    assert "tensorboard --logdir" in done.stdout
    folder = tmp_path / "here"
    names = {"metrics.csv", "summary.json", "config.yaml", "environment.json", "clients.npz", "checkpoint.safetensors"}
    names |= {"mean", "seed_4", "seed_2"}
    assert {path.name for path in folder.iterdir()} == names
    assert [(row["round"], row["seed"]) for row in read_metrics(folder / "metrics.csv")] == [
        (t, seed) for t in range(3) for seed in (4, 2)
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["seeds"] == [4, 2]
    assert summary["final"]["test_accuracy"]["mean"] == pytest.approx(
        sum(r["test_accuracy"] for r in summary["per_replicate"]) / 2
    )
    assert json.loads((folder / "environment.json").read_text())["command"].endswith("out=here")


@pytest.mark.slow
def test_a_sweep_its_resumption_and_its_comparison(fedsim, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", *QUICK, "strategy=fedavg,fedpbc", "lr=0.1,0.2", "out=sweep"]
    assert fedsim(tmp_path, *sweep).code == 0
    again = fedsim(tmp_path, *sweep, "resume=never")
    assert again.code != 0
    assert again.err.count("already holds a run; add resume=auto") == 4
    longer = fedsim(tmp_path, *sweep, "rounds=3")
    assert longer.code == 0, longer.err
    assert longer.log.count("after round 2") == 4
    runs = load_runs([tmp_path / "sweep"])
    assert sorted(r.label for r in runs) == ["FedAvg lr=0.1", "FedAvg lr=0.2", "FedPBC lr=0.1", "FedPBC lr=0.2"]
    assert all(list(r.curve("test_loss")[0]) == [0, 1, 2, 3] for r in runs)
    plot([str(tmp_path / "sweep"), "--out", str(tmp_path / "pictures")])
    assert (tmp_path / "pictures" / "curves.png").stat().st_size > 10_000
    assert "FedPBC lr=0.2" in capsys.readouterr().out


def test_a_mistake_ends_the_process_with_one_sentence(tmp_path: Path) -> None:
    done = process(tmp_path, "ronds=3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("fedsim: ronds is not a setting; did you mean 'rounds'?")
    assert done.stderr.count("\n") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_the_line_of_a_stopped_run_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["fedsim", *QUICK, "tracking.progress=none", "rounds=4"]
    finish = Tracker.record_round

    def interrupted(tracker: Tracker, t: int, *arguments: Any) -> None:
        if t == 1:
            os.kill(os.getpid(), number)
        finish(tracker, t, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Tracker, "record_round", interrupted)
        patched.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as left:
            main()
    found = re.fullmatch(
        rf"fedsim: stopped by {number.name} after round 2 of 4; go on with the same command and resume=auto (out=\S+)",
        str(left.value.code),
    )
    assert found
    monkeypatch.setattr(sys, "argv", [*command, "resume=auto", found[1]])
    main()
    folder = Path(found[1].removeprefix("out="))
    assert [row["round"] for row in read_metrics(folder / "metrics.csv")] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_refused_resumption_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["fedsim", *QUICK, "tracking.progress=none", "out=here"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    before = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    for change, message in (("lr=0.7", "lr was 0.1, now 0.7"), ("rounds=1", "has completed 2")):
        monkeypatch.setattr(sys, "argv", [*command, "resume=auto", change])
        with pytest.raises(SystemExit, match=message):
            main()
        assert {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()} == before


def test_help_names_every_group_and_fits_its_screens(fedsim, tmp_path: Path) -> None:
    shown = fedsim(tmp_path, "--help").out
    assert max(map(len, shown.splitlines())) <= 100
    assert len(shown.splitlines()) <= 125
    for line in ("fedsim info", "fedsim data", "fedsim --shell-completion"):
        assert line in shown
    in_one_line = " ".join(shown.split())
    for group, choices in groups().items():
        assert f" {group} {', '.join(choices)}" in in_one_line
    groups_in_order = ["dataset", "partition", "availability", "shift", "model", "local", "strategy", "uplink", "clock"]
    places = [re.search(rf"^  {group} ", shown, re.M) for group in groups_in_order]
    assert [match.start() for match in places if match] == sorted(match.start() for match in places if match)
    assert all(places)
    assert "yours:" not in shown  # every group of fedsim's own has a section
    for name in keys():
        if "." not in name and name not in ("hydra",):
            assert f"{name}=" in shown


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["data"]], ids=" ".join)
def test_a_reader_that_has_left_is_no_error(words: list[str], tmp_path: Path) -> None:
    """As with `fedsim --help | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fedsim", *words]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("strategy=fedp", {"strategy=fedpac", "strategy=fedpbc", "strategy=fedprox"}),
        ("availability=sine availability.tra", {"availability.trajectory."}),
        ("partition.al", {"partition.alpha="}),
    ],
)
def test_the_shell_completes_choices_and_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, expected: set[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedsim", "--shell-completion", "query=bash"])
    monkeypatch.setenv("COMP_LINE", f"fedsim {typed}")
    main()
    assert set(capsys.readouterr().out.split()) == expected


def test_any_module_from_the_users_own_package(fedsim, tmp_path: Path) -> None:
    (tmp_path / "mine_alone.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, classes, width):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, classes))\n"
    )
    done = fedsim(tmp_path, *QUICK, "model=custom", "model._target_=mine_alone.Net", "+model.width=7", "out=o")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "o" / "summary.json").read_text())["parameters"] == 64 * 7 + 7 + 7 * 10 + 10
