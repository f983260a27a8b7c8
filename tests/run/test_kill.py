"""Killed at any moment and resumed, a run is the uninterrupted one, bit for bit; nothing is lost or doubled.

And a disk that cannot be written is an error that names the file, and spares the last good checkpoint.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import re
import resource
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import Ended, at_every_line, child
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedsim import EvaluationOptions, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import ConfigError, OutputError, files
from fedsim.data.datasets import Dataset, Quadratics
from fedsim.data.partition import Dirichlet
from fedsim.local import APFL
from fedsim.models import MLP, Mean
from fedsim.run.checkpoint import NAME
from fedsim.run.tracking import Tracking
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.strategies import FedAWE

ROUNDS, SEEDS = 8, (1, 4)
KILLS = 30  # a third each by the clock, at a line of the modules that write, and at one that replaces a file
REPLACING = ("run/checkpoint:", *(f"core/files:{name}" for name in ("replacing", "written", "on_disk", "_folder")))


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """Client models in the strategy's state, personal ones in the rule's memory: a checkpoint of 8 MB."""
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((90, 4))), torch.as_tensor(draw.integers(0, 3, 90))
    return Simulation(
        Dataset("blobs", x[:60], y[:60], x[60:], y[60:], classes=3),
        functools.partial(MLP, hidden=(12_000,)),
        clients=5,
        partition=Dirichlet(1.0, "per_class"),
        availability=Bernoulli(Uniform(0.6)),
        strategy=FedAWE(),
        local=APFL(lr=0.05, steps=2, batch_size=4, adaptive=True),
        rounds=ROUNDS,
        seeds=SEEDS,
        evaluation=EvaluationOptions(every=1),
    )


def run(simulation: Simulation, folder: Path, start: int) -> None:
    """Start or go on, some seconds after the last start: event files are told apart by the second they begin in."""
    clock = time.time
    time.time = lambda: clock() + 2 * start
    simulation.run(folder, resume=True, tracking=Tracking(progress="none", checkpoint_every=1))


def killed_at_line(simulation: Simulation, folder: Path, start: int, number: int, among: tuple[str, ...]) -> Ended:
    """Killed at the `number`-th line that is executed in the given places."""

    def work(tell) -> None:
        lines = iter(range(number))

        def visit(place: str) -> None:
            if place.startswith(among) and next(lines, None) is None:
                tell(place)
                os.kill(os.getpid(), signal.SIGKILL)

        with at_every_line(visit):
            run(simulation, folder, start)

    return child(work)


def left(folder: Path) -> dict[str, object]:
    """Everything a run leaves but its times."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(folder / "metrics.csv")]
    tensors = load_file(folder / NAME)
    points = {}
    for events in sorted({path.parent for path in folder.rglob("events.*")}):
        seen = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
        for tag in seen.Tags()["scalars"]:
            points[f"{events.name} {tag}"] = [(point.step, point.value) for point in seen.Scalars(tag)]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "rows": rows,
        "tensors": {name: (value.shape, value.numpy().tobytes()) for name, value in tensors.items()},
        "points": points,
        "final": summary["final"],
        "samples": summary["samples"],
        "files": sorted({p.name for p in folder.iterdir()}),
    }


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_the_uninterrupted_one(simulation: Simulation, tmp_path: Path) -> None:
    straight = child(lambda _: run(simulation, tmp_path / "straight", 0))
    expected = left(tmp_path / "straight")
    assert [(row["round"], row["seed"]) for row in expected["rows"]] == [
        (t, s) for t in range(ROUNDS + 1) for s in SEEDS
    ]
    assert len(expected["points"]) == 11 * (1 + len(SEEDS))
    assert all([step for step, _ in curve] == list(range(ROUNDS + 1)) for curve in expected["points"].values())

    lines: list[str] = []

    def count(tell) -> None:
        with at_every_line(lines.append):
            run(simulation, tmp_path / "counted", 0)
        tell("\n".join(lines))

    places = child(count).told.split("\n")
    replacing = [place for place in places if place.startswith(REPLACING)]
    draw = np.random.default_rng(2026)
    kills: list[str] = []
    runs = 0
    while len(kills) < KILLS:
        folder = tmp_path / f"killed_{runs}"
        for start in itertools.count():
            if len(kills) >= KILLS:
                ended = child(lambda _, to=folder, n=start: run(simulation, to, n))
            elif len(kills) % 3 == 0:
                moment = draw.uniform(0, straight.seconds / 2)
                ended = child(lambda _, to=folder, n=start: run(simulation, to, n), kill_after=moment)
            elif len(kills) % 3 == 1:
                ended = killed_at_line(simulation, folder, start, int(draw.integers(len(places) // 3)), ("",))
            else:
                ended = killed_at_line(simulation, folder, start, int(draw.integers(len(replacing) // 3)), REPLACING)
            if not ended.killed:
                break
            halfway = (folder / NAME).with_suffix(".partial").exists()
            kills.append(ended.told or ("the clock, a checkpoint half written" if halfway else "the clock"))
        assert left(folder) == expected
        runs += 1
    writing = sum("half written" in place or place.startswith(REPLACING) for place in kills)
    print(f"{len(kills)} kills, {writing} of them in the middle of replacing a file, in {runs} runs: {kills}")
    assert writing >= KILLS // 3


def small(**options) -> Simulation:
    """Quick to run, quick to write."""
    return Simulation(
        Quadratics(clients=3, dimension=4), Mean, clients=3, evaluation=EvaluationOptions(every=1), **options
    )


QUIET = Tracking(progress="none", tensorboard=False, checkpoint_every=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("file", [NAME, "metrics.csv", "summary.json", "environment.json"])
def test_a_full_disk_is_an_error_that_names_the_file_and_the_old_one_survives(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full answers every write as a full disk does; here it is opened where a file is written beside its place."""
    small(rounds=3).run(tmp_path, tracking=QUIET)
    before = (tmp_path / file).read_bytes()
    full, opened = (tmp_path / file).with_suffix(".partial"), files._new_file_opener
    monkeypatch.setattr(
        files,
        "_new_file_opener",
        lambda path, flags: os.open("/dev/full", os.O_WRONLY) if path == str(full) else opened(path, flags),
    )
    with pytest.raises((OutputError, ConfigError), match=rf"{re.escape(str(tmp_path / file))}.*No space left"):
        small(rounds=6).run(tmp_path, resume=True, tracking=QUIET)
    if file == "summary.json":  # that of fewer rounds goes as the longer run begins
        assert not (tmp_path / file).exists()
    else:
        assert (tmp_path / file).read_bytes() == before
    monkeypatch.undo()
    resumed = small(rounds=6).run(tmp_path, resume=True, tracking=QUIET)
    assert torch.equal(resumed.state.model, small(rounds=6).run().state.model)
    assert [row["round"] for row in read_metrics(tmp_path / "metrics.csv")] == list(range(7))


def own_disk(folder: Path, kib: int, again: bool = False) -> None:
    """A disk of this size on the folder, seen by this process alone; `again`: the one that is there gets this size."""
    libc, own_mounts, own_user, private, remount = ctypes.CDLL(None, use_errno=True), 0x20000, 0x10000000, 0x44000, 32
    if not again:
        denied = libc.unshare(own_mounts | (own_user if os.geteuid() else 0))
        if denied or libc.mount(None, b"/", None, private, None):
            raise PermissionError
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", remount if again else 0, f"size={kib}k".encode()):
        raise PermissionError


@pytest.mark.slow
def test_wherever_the_disk_ends_the_file_is_named_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    """Real disks of one page, two pages and so on, until the run fits."""

    def larger() -> Simulation:
        return Simulation(
            Quadratics(clients=3, dimension=2000), Mean, clients=3, evaluation=EvaluationOptions(every=1), rounds=6
        )

    def fill(tell, kib: int) -> None:
        try:
            own_disk(tmp_path, kib)
        except PermissionError:
            tell("no disk")
            return
        said = "it fits"
        try:
            run(larger(), tmp_path / "out", 0)
        except (OutputError, ConfigError) as error:
            said = str(error)
            assert not (tmp_path / "out" / "summary.json").exists()
        own_disk(tmp_path, 64 * 1024, again=True)
        run(larger(), tmp_path / "out", 1)
        tell(json.dumps([said, repr(left(tmp_path / "out"))]))

    told = []
    for pages in itertools.count(1):
        said = child(lambda tell, kib=4 * pages: fill(tell, kib)).told
        if said == "no disk":
            pytest.skip("mounting a disk is not allowed here")
        told.append(json.loads(said))
        if told[-1][0] == "it fits":
            break
    *full, (_, straight) = told
    assert all(found == straight for _, found in full)
    named = Counter(re.fullmatch(r".*/out/([\w. ]+) cannot be written \(No space left on device\).*", said)[1]
                    for said, _ in full)  # fmt: skip
    print(f"{len(full)} full disks: {dict(named)}")
    assert {"metrics.csv", "event files", NAME} <= named.keys()


def test_a_disk_that_fills_up_while_rows_are_appended_loses_none_but_those(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the row that meets it is cut short."""

    def fill(tell) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = (tmp_path / "metrics.csv").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
        with pytest.raises(OutputError) as raised:
            small(rounds=9).run(tmp_path, resume=True, tracking=QUIET)
        tell(str(raised.value))

    small(rounds=3).run(tmp_path, tracking=QUIET)
    assert str(tmp_path / "metrics.csv") in child(fill).told
    small(rounds=9).run(tmp_path, resume=True, tracking=QUIET)
    straight = small(rounds=9).run()
    assert [(row["round"], row["train_loss"]) for row in read_metrics(tmp_path / "metrics.csv")] == [
        (row["round"], row["train_loss"]) for row in straight.history
    ]


@pytest.mark.parametrize("resume", [True, False])
def test_a_read_only_folder_is_refused_by_name_and_stays_as_it_was(resume: bool, tmp_path: Path) -> None:
    small(rounds=3).run(tmp_path, tracking=QUIET)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def write(tell) -> None:
        os.chdir(tmp_path)  # for those who may not even look into the folders above
        if os.geteuid() == 0:  # nothing is read-only for root
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(ConfigError) as raised:
            small(rounds=6).run(".", resume=resume, tracking=QUIET)
        tell(str(raised.value))

    tmp_path.chmod(0o555)
    try:
        assert re.search(r"out=\. cannot be written \(Permission denied\)", child(write).told)
    finally:
        tmp_path.chmod(0o755)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
