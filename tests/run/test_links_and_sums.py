"""A run folder that somebody else made, or a disk that changed a bit: links are not followed, changes are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedsim import Simulation, Tracking, load
from fedsim.core.checksums import add_checksums, find_damaged_entry
from fedsim.core.errors import CheckpointError, ConfigError, OutputError
from fedsim.core.files import replacement_file, write_json
from fedsim.data.datasets import Digits
from fedsim.run.run_files import CONSTANTS_FILE

QUIET = Tracking(progress="none", tensorboard=False)


def simulation(rounds: int) -> Simulation:
    return Simulation(Digits(), net, clients=4, rounds=rounds)


def net() -> nn.Module:
    """Its first layer is frozen."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4).requires_grad_(False), nn.Linear(4, 10))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    simulation(2).run(folder, tracking=QUIET)
    return folder


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (to / path.name).write_bytes(path.read_bytes())
    return to


NAMES = ("summary", "config", "environment", "checkpoint", "constants", "metrics", "clients", "best")


def test_nothing_is_written_through_links(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path / "run")
    victims = {}
    for name in NAMES:
        victim = tmp_path / f"victim-{name}"
        victim.write_text("precious")
        (folder / f"{name}.partial").symlink_to(victim)
        victims[name] = victim
    for name in ("summary.json", "environment.json", "clients.npz", CONSTANTS_FILE):
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / f"victim-{name.partition('.')[0]}")
    simulation(3).run(folder, resume=True, tracking=QUIET)
    assert {path.read_text() for path in victims.values()} == {"precious"}
    assert not any((folder / name).is_symlink() for name in ("summary.json", "environment.json", "clients.npz"))
    assert load(folder).rows[-1]["round"] == 3


def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "seed_0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="seed_0 is a link, and runs write inside their own folder alone"):
        simulation(1).run(tmp_path / "run", tracking=Tracking(progress="none"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_is_made_anew_in_the_place_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    for name in ("a.json", "a.partial"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(RuntimeError), replacement_file(tmp_path / "a.json"):
        raise RuntimeError
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "a.json").read_text() == '{\n  "a": 1\n}\n'


def test_every_changed_bit_of_frozen_parameters_is_noticed(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path / "run")
    whole = (folder / CONSTANTS_FILE).read_bytes()
    expected = load(folder).model()
    for number in range(0, 8 * len(whole), 8 * len(whole) // 150 + 1):
        changed = bytearray(whole)
        changed[number // 8] ^= 1 << (number % 8)
        (folder / CONSTANTS_FILE).write_bytes(changed)
        try:
            found = load(folder).model()
        except CheckpointError:
            continue
        assert all(torch.equal(found[name], value) for name, value in expected.items()), number


def test_frozen_parameters_without_checksums_are_those_of_an_earlier_version() -> None:
    tensors = {"a": torch.ones(2)}
    header = add_checksums({"format": "fedsim-constants"}, tensors)
    assert find_damaged_entry({}, tensors) is None
    assert find_damaged_entry(header, tensors) is None
    assert find_damaged_entry({"format": "fedsim-constants"}, tensors) == "the header"
    assert find_damaged_entry(header, {"a": torch.zeros(2)}) == "a"


def test_a_changed_digit_of_the_rows_is_noticed_on_resume(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path / "run")
    path = folder / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    row = next(number for number, line in enumerate(lines) if line.startswith("2,"))
    digit = max(at for at, sign in enumerate(lines[row]) if sign.isdigit() and lines[row][at - 1].isdigit())
    other = "7" if lines[row][digit] != "7" else "3"
    path.write_text("".join([*lines[:row], lines[row][:digit] + other + lines[row][digit + 1 :], *lines[row + 1 :]]))
    with pytest.raises(ConfigError, match=r"metrics\.csv is not what the run had written by round 2"):
        simulation(3).run(folder, resume=True, tracking=QUIET)


def test_rows_resumed_twice_keep_their_checksum(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path / "run")
    for rounds in (3, 4):
        simulation(rounds).run(folder, resume=True, tracking=QUIET)
    assert [row["round"] for row in load(folder).rows][-1] == 4
