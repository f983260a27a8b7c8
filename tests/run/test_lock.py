"""A folder belongs to one process, and to a dead one no more."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from killing import child
from resumable import QUIET, Coins, simulation_of

from fedsim.core import ConfigError, lock
from fedsim.core.lock import LOCK_FILE_NAME, Lock, check_folder_unlocked
from fedsim.core.lock import _try_lock as lock_file
from fedsim.run.together import LockstepRunner
from fedsim.run.tracking import RunConfig


def held_by_another(folder: Path) -> tuple[int, int]:
    """A forked process that holds it until it is killed, and reads nothing: its number, and a pipe it has open."""
    ear, mouth = os.pipe()
    pid = os.fork()
    if pid == 0:
        Lock(folder)
        os.write(mouth, b"!")
        signal.pause()
    assert os.read(ear, 1) == b"!"
    os.close(mouth)
    return pid, ear


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_folder_is_taken_and_given_back_without_a_trace(tmp_path: Path) -> None:
    first = Lock(tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match=rf"a/b is in use by process {os.getpid()} on .*; wait until that ends, or"):
        Lock(tmp_path / "a" / "b")
    Lock(tmp_path / "a" / "c").release()
    first.release()
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    Lock(tmp_path / "a").release()
    assert (tmp_path / "a").is_dir()  # it was there before


@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "without locks"])
def test_a_live_process_keeps_its_folder_and_a_dead_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:  # as on a network file system whose server has none
        monkeypatch.setattr(lock, "_try_lock", lambda file: False)
    pid, ear = held_by_another(tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"in use by process {pid} on "):
            Lock(tmp_path)
        with pytest.raises(ConfigError, match=f"in use by process {pid} on "):
            check_folder_unlocked(tmp_path)
    finally:
        kill(pid)
        os.close(ear)
    assert (tmp_path / LOCK_FILE_NAME).exists()
    check_folder_unlocked(tmp_path)
    Lock(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_a_child_that_outlives_its_parent_does_not_keep_the_parents_folder(tmp_path: Path) -> None:
    """A worker that was forked has a copy of the file, and with it the operating system's lock."""

    def parent(tell) -> None:
        Lock(tmp_path)
        grandchild = os.fork()
        if grandchild == 0:
            time.sleep(60)
        tell(f"{grandchild}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    ear, mouth = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ear)
        parent(lambda text: os.write(mouth, text.encode()))
    os.close(mouth)
    grandchild = int(os.read(ear, 20))
    os.waitpid(pid, 0)
    try:
        os.kill(grandchild, 0)  # it lives
        deadline = time.monotonic() + 10  # its first act, that of giving the copy back, takes a moment
        while True:
            try:
                Lock(tmp_path).release()
                break
            except ConfigError:
                assert time.monotonic() < deadline
                os.sched_yield()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(ear)


@pytest.mark.parametrize(
    ("changed", "free"),
    [
        ({}, False),
        ({"began": "1"}, True),  # the number was given again
        ({"pid": 2**22 + 7}, True),
        ({"host": "elsewhere", "pid": 2**22 + 7}, False),
        ({"pid": "x"}, False),
    ],
)
def test_without_locks_the_files_word_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict, free: bool
) -> None:
    monkeypatch.setattr(lock, "_try_lock", lambda file: False)
    (tmp_path / LOCK_FILE_NAME).write_text(json.dumps(lock._process_identity() | changed))
    if free:
        Lock(tmp_path).release()
        assert not list(tmp_path.iterdir())
    else:
        with pytest.raises(
            ConfigError, match=re.escape(f"delete {tmp_path / LOCK_FILE_NAME} if you know that it has ended")
        ):
            Lock(tmp_path)


@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "without locks"])
def test_of_many_at_once_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    if not locks:
        monkeypatch.setattr(lock, "_try_lock", lambda file: False)
    inside, most, taken = [0], [0], [0]

    def work() -> None:
        for _ in range(60):
            try:
                mine = Lock(tmp_path)
            except ConfigError:
                continue
            inside[0] += 1
            taken[0] += 1
            most[0] = max(most[0], inside[0])
            os.sched_yield()
            inside[0] -= 1
            mine.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert most == [1]
    assert taken[0] > 5


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("dear")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK_FILE_NAME).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"out=.*cannot be written"):
        simulation_of(rounds=1).run(tmp_path / "out", tracking=QUIET)
    assert (tmp_path / "mine").read_text() == "dear"


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_does_not_notice(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", []

    def second() -> None:
        for resume in (False, True):
            with pytest.raises(ConfigError) as refused:
                simulation_of(rounds=1).run(out=folder, resume=resume, tracking=QUIET)
            said.append(str(refused.value))

    straight = simulation_of().run()
    result = simulation_of(availability=Coins(3, second)).run(folder, tracking=QUIET)
    assert [f"is in use by process {os.getpid()}" in text for text in said] == [True, True]
    assert (result.state.model == straight.state.model).all()
    assert not (folder / LOCK_FILE_NAME).exists()


def test_a_killed_runs_folder_is_free(tmp_path: Path) -> None:
    def work(tell) -> None:
        simulation_of(availability=Coins(3, lambda: os.kill(os.getpid(), signal.SIGKILL))).run(tmp_path, tracking=QUIET)

    assert child(work).killed
    assert (tmp_path / LOCK_FILE_NAME).exists()
    assert simulation_of().run(tmp_path, resume=True, tracking=QUIET).history[-1]["round"] == 6


def test_a_folder_with_somebodys_configuration_is_not_a_runs(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("dear: me\n")
    with pytest.raises(ConfigError, match=r"holds a config\.yaml that no run wrote"):
        simulation_of(rounds=1).run(tmp_path, tracking=QUIET, config=RunConfig(yaml="rounds: 1\n"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.yaml", "dear: me\n")]


def test_runs_in_lockstep_own_their_folders_too(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look() -> None:
        seen.append(sorted(path.parent.name for path in tmp_path.glob(f"*/{LOCK_FILE_NAME}")))

    runs = [simulation_of(rounds=3, availability=Coins(1, look)) for _ in range(2)]
    ended = dict(
        LockstepRunner()(
            [lambda run=run, n=n: run.run_as_generator(tmp_path / str(n), False, QUIET) for n, run in enumerate(runs)]
        )
    )
    assert [ended[n].history[-1]["round"] for n in (0, 1)] == [3, 3]
    assert seen == [["0", "1"]] * 2
    assert not list(tmp_path.rglob(LOCK_FILE_NAME))
    mine = Lock(tmp_path / "0")
    ended = dict(
        LockstepRunner()(
            [lambda n=n: simulation_of(rounds=3).run_as_generator(tmp_path / str(n), False, QUIET) for n in (0, 1)]
        )
    )
    mine.release()
    assert "is in use by process" in str(ended[0])
    assert ended[1].history[-1]["round"] == 3


def test_a_file_is_locked_for_one_who_opened_it(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as first, (tmp_path / "file").open("w") as second:
        assert lock_file(first.fileno())
        with pytest.raises(BlockingIOError):
            lock_file(second.fileno())
