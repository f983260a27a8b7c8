"""Several ranks give one process's numbers and checkpoints, end together, and are resumed by any number of ranks.

Ranks are spawned processes that talk through gloo; each group of them plays many runs, since starting costs seconds.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from ranked_runs import (
    CASES,
    CLOSE,
    HALF,
    RESUMED,
    ROUNDS,
    all_cases,
    assert_same_run,
    ended,
    first_halves,
    one_cannot_write,
    one_dies,
    one_diverges,
    one_is_told_to_stop,
    play,
    second_halves,
    spawn,
)

from fedsim.core import ProcessRanks


@pytest.fixture(scope="module", name="played")
def played_fixture(tmp_path_factory) -> Path:
    """What one process, two and three ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "halves-1").mkdir()
    first_halves(folder / "halves-1", ProcessRanks())
    jobs = [(all_cases, "2"), (first_halves, "halves-2"), (second_halves, "halves-1"), (one_is_told_to_stop, "stopped")]
    assert spawn(2, folder, *jobs, (one_diverges, "diverged"), (ended, "ended"), (one_cannot_write, "unwritable")) == [
        0,
        0,
    ]
    assert spawn(3, folder, (all_cases, "3"), (second_halves, "halves-2"), (one_dies, "dead")) == [0, 0, 9]
    return folder


@pytest.fixture(scope="module", name="alone")
def alone_fixture(tmp_path_factory):
    """The run folder of one process for a case."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run(name: str) -> Path:
        play(name, folder, ProcessRanks())
        return folder / name

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_give_the_numbers_of_one_process(count, name, played, alone) -> None:
    assert_same_run(played / str(count) / name, alone(name), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_ends_with_the_same_bits(count, played) -> None:
    models = [torch.load(played / str(count) / f"models-{rank}", weights_only=True) for rank in range(count)]
    for name in CASES:
        one, *others = (model[name].nan_to_num(7.0) for model in models)  # a replicate that was given up is NaN
        assert all(torch.equal(one, other) for other in others), name


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("halves", ["halves-1", "halves-2"])
def test_any_number_of_ranks_goes_on_with_anybodys_checkpoint(halves, name, played, alone) -> None:
    """One process, then two ranks; two ranks, then three."""
    assert_same_run(played / halves / name, alone(name), **CLOSE)


@pytest.mark.slow
def test_a_rank_that_is_told_to_stop_stops_all_after_the_round(played, alone) -> None:
    folder = played / "stopped"
    told = [(folder / f"error-{rank}").read_text() for rank in range(2)]
    after = f"after round 2 of {ROUNDS}"
    assert told == [f"Stopped: stopped by another rank {after}", f"Stopped: stopped by SIGTERM {after}"]
    play("fedawe", folder, ProcessRanks())
    assert_same_run(folder / "fedawe", alone("fedawe"), **CLOSE)


@pytest.mark.slow
def test_a_client_that_diverges_is_named_by_every_rank(played) -> None:
    """Client 4 is the first rank's; both say the same."""
    told = [(played / "diverged" / f"error-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert "DivergenceError: non-finite values in round" in told[0]
    assert "seed 5: clients 4;" in told[0]


@pytest.mark.slow
def test_an_error_of_the_first_rank_ends_the_others(played) -> None:
    told = [(played / "unwritable" / f"error-{rank}").read_text() for rank in range(2)]
    assert told[0].startswith("ConfigError: out=")
    assert told[1] == told[0]  # it is told, and none is left waiting


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_which_is_resumed_without_it(played, alone) -> None:
    folder = played / "dead"
    for rank in range(2):
        told = (folder / f"error-{rank}").read_text()
        assert told.startswith(f"PeerError: rank {rank} of 3 lost another rank (")
        assert "\n" not in told
    play("fedawe", folder, ProcessRanks())
    assert_same_run(folder / "fedawe", alone("fedawe"), **CLOSE)


@pytest.mark.slow
def test_rules_and_observers_end_the_run_of_all_ranks_in_the_same_round(played) -> None:
    for name, why in (
        ("rule", "stop.target: train_loss 1e+09 was reached in every replicate after round 1"),
        ("watched", f"after round {HALF}"),
    ):
        told = [(played / "ended" / f"{name}-{rank}").read_text() for rank in range(2)]
        assert told[0] == told[1]
        assert why in told[0]


def test_rows_of_all_ranks_stand_one_rank_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second of three ranks sees it; all send equally many rows, of which some are padding."""
    rows = [torch.full((length, 2), float(length)) for length in (2, 1, 3)]

    def all_gather(gathered: list[torch.Tensor], own: torch.Tensor) -> None:
        assert torch.equal(own[:1], rows[1])
        for received, sent in zip(gathered, rows, strict=True):
            received[: len(sent)] = sent

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    found = ProcessRanks(1, 3).all_gather_rows(rows[1], [2, 1, 3])
    assert torch.equal(found, torch.cat(rows))
