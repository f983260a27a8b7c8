"""Any module: FedAvg of it equals one written by hand (deepcopy, torch.optim, average), however it is computed."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from any_modules import REFUSED, STATISTICS, UNVMAPPED, ZOO
from by_hand import RATE, by_hand, samples, simulation_of
from torch import nn

from fedsim import ConfigError, EvaluationOptions, Execution
from fedsim.local import SGD
from fedsim.run.tracking import Tracking

double = functools.partial(Execution, dtype="float64")
WAYS = {
    "auto": double(),
    "fused": double("fused", workers=2),
    "fused, one row, one worker": double("fused", chunk=1, workers=1),
    "vmap": double("vmap"),
    "vmap, one row": double("vmap", chunk=1),
    "loop": double("loop", workers=2),
    "loop, one row, one worker": double("loop", chunk=1, workers=1),
}
QUICK = ("auto", "vmap", "loop")
REST = tuple(way for way in WAYS if way not in QUICK)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ways", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["ways", "other ways"])
@pytest.mark.parametrize("name", ZOO)
def test_fedavg_of_any_module_is_that_written_by_hand(name: str, ways: tuple[str, ...]) -> None:
    build = ZOO[name]
    expected: list[nn.Module] | None = None
    for way in ways:
        execution = WAYS[way]
        if way.startswith("vmap") and name in UNVMAPPED:
            with pytest.raises(ConfigError, match=r"trainer\.executor=vmap cannot run"):
                simulation_of(build, execution=execution)
            continue
        simulation = simulation_of(build, execution=execution)
        result = simulation.run()
        assert bool(simulation.model.statistics) == (name in STATISTICS)
        expected = by_hand(simulation, build) if expected is None else expected
        data = samples()
        for r, server in enumerate(expected):
            row = torch.cat([p.detach().reshape(-1) for p in server.parameters() if p.requires_grad])
            torch.testing.assert_close(result.state.model[r], row, rtol=0, atol=1e-10, msg=f"{way}")
            with torch.no_grad():
                loss = F.cross_entropy(server.eval()(data.test_x), data.test_y).item()  # statistics enter here
            assert result.history[-2 + r]["test_loss"] == pytest.approx(loss, abs=1e-10), way


def test_a_module_that_cannot_be_vmapped_is_refused_under_vmap_and_computed_otherwise_by_default() -> None:
    build = ZOO["a branch by data"]
    with pytest.raises(ConfigError, match=r"^trainer\.executor=vmap cannot run \w+ \(.+\); use trainer\.executor=auto"):
        simulation_of(build, execution=WAYS["vmap"])
    candidates = [choice.executor for choice in simulation_of(build, execution=WAYS["auto"]).trainer.candidate_choices]
    assert candidates
    assert "vmap" not in candidates


OFTEN = ("batch norm", "batch norm, cumulative", "spectral norm", "lstm", "batch norm by batches", "functional dropout")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in ZOO])
def test_resumed_or_alone_among_three_it_is_the_same(name: str, tmp_path: Any) -> None:
    quiet = Tracking(progress="none", tensorboard=False)
    simulation = functools.partial(simulation_of, ZOO[name], seeds=(0, 1, 2))
    whole = simulation().run()
    simulation(rounds=1).run(tmp_path, tracking=quiet)
    resumed = simulation().run(tmp_path, resume=True, tracking=quiet)
    assert torch.equal(resumed.state.model, whole.state.model)
    assert resumed.history[-1]["test_loss"] == whole.history[-1]["test_loss"]
    alone = simulation_of(ZOO[name], seeds=(2,)).run()
    torch.testing.assert_close(alone.state.model[0], whole.state.model[2], rtol=0, atol=1e-12)
    assert alone.history[-1]["test_loss"] == pytest.approx(whole.history[-1]["test_loss"], abs=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_row_can_hold_is_refused_by_name_before_anything_is_written(name: str, tmp_path: Any) -> None:
    build, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence):
        simulation_of(build).run(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_nobody_hears_what_torch_tells_its_developers() -> None:
    """Under vmap some operations are computed row by row, to the same numbers; users cannot change that."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        simulation_of(ZOO["weight norm"], execution=WAYS["vmap"]).run()
        warnings.warn("somebody else's", stacklevel=1)
    assert [str(w.message) for w in heard] == ["somebody else's"]


def test_a_batch_of_one_is_refused_where_it_cannot_be_normalised() -> None:
    local = SGD(lr=RATE, epochs=1, batch_size=3, drop_last=False)  # client 0 has seven samples
    with pytest.raises(
        ConfigError, match=r"cannot train on a batch of one sample.*client 0 has one; give local\.drop_last"
    ):
        simulation_of(ZOO["batch norm"], local=local)
    simulation_of(ZOO["batch norm"], local=SGD(lr=RATE, epochs=1, batch_size=5, drop_last=False))


def test_who_takes_part_moves_the_statistics_and_nobody_else(Scripted: Any) -> None:
    """Batch normalisation's mean after a round of one client is that client's; an empty round changes nothing."""
    counts = np.array([[[0, 1, 0]], [[0, 0, 0]]])
    given = {"seeds": (0,), "evaluation": EvaluationOptions(every=1), "availability": Scripted(counts)}
    simulation = simulation_of(ZOO["batch norm"], **given)
    history = simulation.run().history
    assert history[1]["test_loss"] == history[2]["test_loss"]
    alone = simulation_of(ZOO["batch norm"], **given | {"availability": Scripted(counts[:1])}, rounds=1).run()
    assert alone.history[1]["test_loss"] == history[1]["test_loss"]
