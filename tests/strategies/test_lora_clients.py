"""RoLoRA and HetLoRA beside a loop by torch.optim over clients, and what they must have in common with FedIT."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_lora_aggregation import (
    COUNTS,
    FACTORS,
    LAYERS,
    MODEL,
    SIZES,
    module_of,
    simulation_of_fixture,  # noqa: F401
    trained,
    weight,
)
from torch import nn

from fedsim import ConfigError
from fedsim.local import SGD, Momentum
from fedsim.models import MLP, LoRAMLP
from fedsim.strategies import FedAvg, HetLoRA, RoLoRA
from fedsim.uplink import GaussianNoise

THREE = partial(LoRAMLP, hidden=(5,), rank=3, alpha=4.5)  # 4.5/3 is the scaling of `weight`


def rounds(simulation, play):
    """(replicate, who comes, round); a round in which nobody does is checked here."""
    for played in play(simulation):
        for replicate in (0, 1):
            active = [int(i) for i in np.flatnonzero(COUNTS[played.t][replicate])]
            if active:
                yield replicate, active, played
            else:
                assert torch.equal(played.after.model[replicate], played.before.model[replicate])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("weighting", ["data", "uniform"])
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_every_round_of_rolora_follows_the_formula_and_has_no_aggregation_error(
    executor, weighting, simulation_of, play
):
    simulation = simulation_of(RoLoRA(weighting), executor, model=MODEL, local=SGD(lr=0.4, steps=3, batch_size=None))
    for replicate, active, played in rounds(simulation, play):
        moving, fixed = FACTORS[::-1] if played.t % 2 == 0 else FACTORS
        before, after = (module_of(simulation, state.model[replicate]) for state in (played.before, played.after))
        ends = [
            trained(simulation, module_of(simulation, played.before.model[replicate]), i, (moving,)) for i in active
        ]
        shares = np.array([SIZES[i] if weighting == "data" else 1.0 for i in active])
        shares = shares / shares.sum()
        for name in LAYERS:
            assert torch.equal(before.get_parameter(f"{name}.{fixed}"), after.get_parameter(f"{name}.{fixed}"))
            means = [
                sum(w * of(module) for w, module in zip(shares, ends, strict=True))
                for of in (lambda m, n=name: m.get_parameter(f"{n}.{moving}"), lambda m, n=name: weight(m, n))  # noqa: B023
            ]
            torch.testing.assert_close(after.get_parameter(f"{name}.{moving}"), means[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(weight(after, name), means[1], rtol=0, atol=1e-10)
            assert not torch.equal(before.get_parameter(f"{name}.{moving}"), after.get_parameter(f"{name}.{moving}"))


def truncated(module: nn.Module, rank: int) -> nn.Module:
    """The module with real adapters of this rank, and the same scaling."""
    for name in LAYERS:
        layer = module.get_submodule(name)
        layer.lora_A = nn.Parameter(layer.lora_A.detach()[:rank].clone())
        layer.lora_B = nn.Parameter(layer.lora_B.detach()[:, :rank].clone())
    return module


@pytest.mark.sampled(1)
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_every_round_of_hetlora_follows_the_formula(executor, norms, simulation_of, play):
    """By size: the clients' 2, 7, 4 and 5 samples give ranks 1, 3, 1 and 3."""
    strategy, ranks = HetLoRA([3, 1], "size", norms, "data"), (1, 3, 1, 3)
    simulation = simulation_of(strategy, executor, model=THREE)
    for replicate, active, played in rounds(simulation, play):
        ends = [
            trained(simulation, truncated(module_of(simulation, played.before.model[replicate]), ranks[i]), i)
            for i in active
        ]
        shares = np.array([float(SIZES[i]) for i in active])
        if norms:
            products = [
                [(m.get_submodule(n).lora_B @ m.get_submodule(n).lora_A).detach() for n in LAYERS] for m in ends
            ]
            shares *= [float(sum(one.square().sum() for one in both)) ** 0.5 for both in products]
        shares = shares / shares.sum()
        after = module_of(simulation, played.after.model[replicate])
        for name in LAYERS:
            layers = [module.get_submodule(name) for module in ends]
            a = sum(w * F.pad(m.lora_A, (0, 0, 0, 3 - len(m.lora_A))) for w, m in zip(shares, layers, strict=True))
            b = sum(w * F.pad(m.lora_B, (0, 3 - m.lora_B.shape[1])) for w, m in zip(shares, layers, strict=True))
            torch.testing.assert_close(after.get_submodule(name).lora_A, a, rtol=0, atol=1e-10)
            torch.testing.assert_close(after.get_submodule(name).lora_B, b, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("local", [SGD, Momentum])
def test_what_a_client_lacks_stays_zero(local, simulation_of, play):
    simulation = simulation_of(HetLoRA([1, 3]), model=THREE, local=local(lr=0.4, steps=3, batch_size=None))
    for played in play(simulation):
        cohort = played.report.cohort
        lacks = simulation.strategy.held_column_masks(played.before, cohort) == 0
        assert bool(lacks.any())
        assert not bool(played.report.end[lacks].any())
        assert sorted(played.before.level.unflatten(0, (2, -1))[0].tolist()) == [0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["uniform", "data"])
def test_equal_ranks_are_fedit_bit_for_bit(weighting, simulation_of):
    equal, fedit = (
        simulation_of(strategy, model=THREE).run().state.model
        for strategy in (HetLoRA([3], norm_weights=False, weighting=weighting), FedAvg(weighting=weighting))
    )
    assert torch.equal(equal, fedit)
    assert not torch.equal(simulation_of(HetLoRA([3]), model=THREE).run().state.model, fedit)


STRATEGIES = {"rolora": (RoLoRA, MODEL), "hetlora": (lambda: HetLoRA([1, 3]), THREE)}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_run_is_the_uninterrupted_one_and_replicates_stay_apart(name, simulation_of, Scripted, tmp_path):
    strategy, model = STRATEGIES[name]
    whole = simulation_of(strategy(), model=model).run().state.model
    simulation_of(strategy(), model=model, rounds=2).run(out=tmp_path)
    assert torch.equal(simulation_of(strategy(), model=model).run(out=tmp_path, resume=True).state.model, whole)
    alone = simulation_of(strategy(), model=model, seeds=(5,), availability=Scripted(COUNTS[:, 1:])).run()
    torch.testing.assert_close(alone.state.model[0], whole[1], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_noise_of_the_uplink_moves_no_fixed_factor_and_fills_no_client(simulation_of, play):
    simulation = simulation_of(RoLoRA(), model=MODEL, uplink=GaussianNoise(multiplier=1.0))
    for played in play(simulation, 2):
        fixed = simulation.federation.columns.column_mask("lora_B" if played.t % 2 else "lora_A", played.after.model)
        assert bool((played.report.innovation[:, fixed > 0] != 0).all())
        assert not bool(((played.after.model - played.before.model) * fixed).any())
    simulation = simulation_of(HetLoRA([1, 3]), model=THREE, uplink=GaussianNoise(multiplier=1.0))
    played = next(play(simulation))
    cohort = played.report.cohort
    lacks = simulation.strategy.held_column_masks(played.before, cohort) == 0
    assert bool((played.report.innovation[lacks] != 0).all())
    everyone_lacks = torch.stack([lacks[cohort.replicate_index == r].all(0) for r in (0, 1)])
    assert not bool(played.after.model[everyone_lacks].any())


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        (RoLoRA, {"model": MLP}, r"strategy=rolora aggregates products of adapters"),
        (RoLoRA, {"model": MODEL, "local": Momentum()}, r"hands scale to the local rule"),
        (HetLoRA, {"model": MLP}, r"strategy=hetlora aggregates products of adapters"),
        (HetLoRA, {"model": MODEL}, r"ranks=\[1, 2, 4\] must have the rank of the model's adapters.* is 2"),
    ],
)
def test_what_cannot_be_aggregated_is_refused(strategy, options, said, simulation_of, tmp_path):
    with pytest.raises(ConfigError, match=said):
        simulation_of(strategy(), **options).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"ranks=\[\] must name at least one rank"):
        HetLoRA([])
