"""Bad run folders: one sentence each, no traceback, no round starts, and nothing in them changes.

`RUNS` is the table: what is wrong, and what the answer says.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bad_input import QUIET, Trap, answer, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedsim import Simulation
from fedsim.app.cli import main
from fedsim.core import CheckpointError
from fedsim.data.datasets import Quadratics
from fedsim.models import Mean
from fedsim.run.checkpoint import NAME, read
from fedsim.run.tracking import Tracking

SMALL = ["dataset=quadratics", "partition=natural", "model=mean", "clients=3", "dataset.dimension=4"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of the command line, two rounds long."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "argv", ["fedsim", *QUIET, *SMALL])
        main()
    return folder / "out"


def headed(sums: str | None = None, **changes: str | None) -> Callable[[Path], None]:
    """The checkpoint with another header; as of a version that knew no checksums, unless they are given."""

    def damage(folder: Path) -> None:
        content = (folder / NAME).read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])["__metadata__"]
        for name, value in (({} if sums == "kept" else {"sums": sums, "versions": None}) | changes).items():
            header.pop(name) if value is None else header.update({name: value})
        save_file(load_file(folder / NAME), folder / NAME, header)

    return damage


def cut(folder: Path) -> None:
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(content[:-3])


def directory(folder: Path) -> None:
    (folder / NAME).unlink()
    (folder / NAME).mkdir()


def pipe(name: str) -> Callable[[Path], None]:
    """What would be waited for, for ever."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def going(**changes: object) -> Callable[[Path], None]:
    """The checkpoint of a run that stands elsewhere."""

    def damage(folder: Path) -> None:
        with safe_open(folder / NAME, framework="pt") as file:
            progress = json.loads(file.metadata()["progress"])
        headed(progress=json.dumps(progress | changes))(folder)

    return damage


def described(length: int | None = None, **changes: object) -> Callable[[Path], None]:
    """The checkpoint with another word on where its model lies, and on how long these words are."""

    def damage(folder: Path) -> None:
        content = (folder / NAME).read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header["model"] |= changes
        tensors = content[8 + size :]
        text = json.dumps(header).encode()
        size = len(text) if length is None else length
        (folder / NAME).write_bytes(size.to_bytes(8, "little") + text + tensors)

    return damage


def flipped(folder: Path) -> None:
    content = bytearray((folder / NAME).read_bytes())
    content[-1] ^= 4
    (folder / NAME).write_bytes(content)


def lines(count: int) -> Callable[[Path], None]:
    """That many fewer lines of metrics.csv."""

    def damage(folder: Path) -> None:
        kept = (folder / "metrics.csv").read_text().splitlines(keepends=True)[:-count]
        (folder / "metrics.csv").write_text("".join(kept))

    return damage


RUNS: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "truncated": (cut, [], NAME),
    "empty": (text(NAME, ""), [], NAME),
    "a pickle": (lambda f: torch.save(Trap(), f / NAME), [], NAME),
    "a folder": (directory, [], NAME),
    "a pipe": (pipe(NAME), [], "cannot be read (it is a pipe or a device; write what it gives to a file)"),
    "metrics from a pipe": (pipe("metrics.csv"), [], "is not a metrics file of fedsim (it is a pipe or a device"),
    "of another program": (lambda f: save_file({"x": torch.zeros(2)}, f / NAME), [], "not written by this version"),
    "without identity": (headed(identity=None), [], "has a damaged header"),
    "with broken identity": (headed(identity="{"), [], "has a damaged header"),
    "identity is a list": (headed(identity="[1]"), [], "has a damaged header"),
    "without progress": (headed(progress=None), [], "has a damaged header"),
    "progress of another kind": (headed(progress='{"epochs": 3}'), [], "has a damaged header"),
    "negative progress": (headed(progress='{"rounds": -3}'), [], "has a damaged header"),
    "progress of nobody": (headed(progress='{"rounds": 2}'), [], "has a damaged header"),
    "of another lr": (lambda f: None, ["lr=0.7"], "lr was 0.1, now 0.7"),
    "of another strategy": (lambda f: None, ["strategy=fedpbc"], "belongs to another run"),
    "of more rounds": (lambda f: None, ["rounds=1"], "has completed 2; raise rounds"),
    "a flipped bit": (flipped, [], "is damaged: model has changed since it was written"),
    "another header under its sums": (
        headed("kept", identity="{}"),
        [],
        "is damaged: the header has changed since it was",
    ),
    "without sums": (headed(versions='{"torch": "2"}'), [], "it has no checksums"),
    "sums of other tensors": (headed('{"model": 1}'), [], "is damaged: the header has changed"),
    "sums are a list": (headed("[]"), [], "has a damaged header"),
    "a header deep as a well": (headed(identity="[" * 9999 + "]" * 9999), [], "has a damaged header"),
    "content of another kind": (headed(content='{"train_x of the data": 3}'), [], "train_x of the data changed"),
    "without some content": (headed(content='{"x": [[1], "0"]}'), [], "with other content"),
    "rounds as a truth": (going(rounds=True), [], "records True rounds"),
    "rounds as a fraction": (going(rounds=1.5), [], "records 1.5 rounds"),
    "rounds without end": (going(rounds=10**30), [], "records 1000000000"),
    "rows of nobody": (going(rows=-1), [], "records -1 rows"),
    "more rows": (going(rows=7), [], "has 2 of the 7 rows"),
    "time without end": (going(seconds=float("inf")), [], "records inf seconds"),
    "samples of nobody": (going(samples=[-1]), [], "records -1 samples"),
    "samples as a word": (going(samples="a"), [], "its samples are no list"),
    "links of two": (going(links=[1, 1]), [], "(its counts)"),
    "somebody dropped nowhere": (going(dropped=[{"replicate": 0}]), [], "has a damaged header"),
    "dropped as words": (going(dropped=["x"]), [], "has a damaged header"),
    "executors as a list": (going(executors=[]), [], "records no executors"),
    "a length beyond all files": (described(2**63), [], "cannot be read"),
    "a length beyond this file": (described(10**7), [], "cannot be read"),
    "a length of nothing": (described(0), [], "cannot be read"),
    "an unknown dtype": (described(dtype="F99"), [], "cannot be read"),
    "another dtype": (described(dtype="I32"), [], "model is [1, 4] of int32, expected [1, 4] of float32"),
    "a negative shape": (described(shape=[-1, 4]), [], "cannot be read"),
    "a shape beyond all memory": (described(shape=[2**62, 2**62]), [], "cannot be read"),
    "another shape": (described(shape=[4, 1]), [], "model is [4, 1] of float32"),
    "offsets beyond the file": (described(data_offsets=[0, 2**40]), [], "cannot be read"),
    "offsets that run back": (described(data_offsets=[16, 0]), [], "cannot be read"),
    "offsets as words": (described(data_offsets=["a", "b"]), [], "cannot be read"),
    "metrics gone": (lambda f: (f / "metrics.csv").unlink(), [], "metrics.csv is gone, with the 2 rows"),
    "metrics emptied": (text("metrics.csv", ""), [], "metrics.csv has 0 of the 2 rows"),
    "metrics cut": (lines(1), [], "metrics.csv has 1 of the 2 rows that the run had written by round 2; restore it"),
    "metrics of bytes": (text("metrics.csv", b"\xff\n\xfe\n"), [], "metrics.csv is not a metrics file"),
    "metrics of words": (text("metrics.csv", "round,seed\na,b\n"), [], "metrics.csv is not a metrics file"),
    "metrics of another program": (text("metrics.csv", "x,y\n1,2\n"), [], "metrics.csv is not a metrics file"),
    "metrics of another run": (text("metrics.csv", "round,seed\n0,0\n"), [], "has other columns"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", RUNS)
def test_a_bad_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path, case: str) -> None:
    """It is refused, and stays as it is."""
    damage, arguments, message = RUNS[case]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "out")
    damage(tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    said = answer(monkeypatch, *SMALL, "rounds=5", "resume=auto", *arguments)
    assert said is not None
    assert message in said
    assert not Path("trapped").exists()
    after = {path: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert {p: c for p, c in after.items() if p.suffix != ".json"} == {
        p: c for p, c in before.items() if p.suffix != ".json"
    }


def test_the_table_is_as_long_as_it_was_promised() -> None:
    assert len(RUNS) >= 51


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_checkpoint_with_any_bytes_changed_is_what_it_was_or_refused_by_name(
    tmp_path: Path, data: st.DataObject
) -> None:
    simulation = Simulation(Quadratics(clients=3, dimension=4), Mean, clients=3, rounds=1)
    path = tmp_path / NAME
    good = path.with_suffix(".good")
    if not good.exists():
        simulation.run(tmp_path, tracking=Tracking(progress="none", tensorboard=False))
        path.rename(good)
    content = bytearray(good.read_bytes())
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    like, identity = simulation.initial_state(), {"seeds": [0], "strategy": "FedAvg"}
    refusal = None
    try:
        state, progress = read(path, like, identity)
    except CheckpointError as error:
        refusal = str(error)
    if refusal is None:
        (was, stood), found = read(good, like, identity), (state.model, progress)
        assert torch.equal(found[0], was.model)
        assert found[1] == stood
    else:
        assert str(path) in refusal
