"""What FOCUS, FedStale, MimiC, AREA and MIFA's divisors must be: limits, invariants, and the strategies they meet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from library import everybody, one_by_one, points
from naive_strategies import BY_DATA, CLIENTS, SEEDS

from fedsim import Execution
from fedsim.availability import Bernoulli, UniformK
from fedsim.core import ConfigError
from fedsim.local import SGD, FedRep, Momentum
from fedsim.strategies import (
    AREA,
    MIFA,
    FedAU,
    FedAvg,
    FedAvgAll,
    FedAvgKnown,
    FedPBC,
    FedStale,
    FedVARP,
    Focus,
    MimiC,
    Scaffold,
)
from fedsim.uplink import TopK, Uplink

SAME = {"rtol": 0, "atol": 1e-12}


def test_focus_remembers_the_gradient_that_was_taken_last_under_every_executor(federated, play):
    """It steps s − 1 times: the last gradient is that of the model before the last step, weight decay included."""
    simulations = [federated(Focus(), execution=Execution(e, dtype="float64")) for e in ("vmap", "loop", "fused")]
    for one, *others in zip(*map(play, simulations), strict=True):
        for other in others:
            torch.testing.assert_close(one.after.memory, other.after.memory, **SAME)
            assert other.after.memory.any()


def test_with_one_local_step_focus_is_mifa_over_the_sum(models):
    one = models(Focus(0.5), work={"steps": 1}, schedule="sqrt")
    torch.testing.assert_close(one, models(MIFA(0.5 * CLIENTS, "gradient"), work={"steps": 1}, schedule="sqrt"), **SAME)


U = [-1.0, 0.5, 3.0, 4.0, 2.5]
SOME = np.array([[0, 1, 0, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [1, 1, 0, 0, 1]])[:, None]


@pytest.mark.parametrize(("strategy", "steps"), [(Focus(), 3), (Scaffold(), 3), (Focus(), 1), (AREA(), 1), (MIFA(), 1)])
def test_the_optimum_is_left_by_nobody_whoever_comes(strategy, steps, Scripted):
    """Once clients are remembered as they are there: quadratics ½ (x − u_i)², a constant rate. FedAvg leaves it."""
    optimum, rule = float(np.mean(U)), SGD(lr=0.1, steps=steps)
    gradients = [optimum - u for u in U] if steps > 1 else None  # else a first round of everybody finds them
    counts = SOME if gradients else np.concatenate([np.ones((1, 1, 5), dtype=int), SOME])
    found = one_by_one(points(strategy, U, rule, availability=Scripted(counts)), optimum, 5, gradients)
    assert found == pytest.approx([optimum] * 5, abs=1e-12)
    assert abs(one_by_one(points(FedAvg(), U, rule, availability=Scripted(SOME)), optimum, 1)[0] - optimum) > 0.1


@pytest.mark.parametrize(("strategy", "lr"), [(Focus(), 0.1), (AREA(), 0.9)])
def test_it_comes_to_the_optimum_though_clients_come_unequally_often(strategy, lr, Scripted):
    counts = np.tile(np.array([[1, 1, 1, 0, 0], [1, 0, 0, 1, 1]])[:, None], (9, 1, 1))
    simulation = points(strategy, U, SGD(lr=lr, steps=3 if lr < 0.5 else 1), availability=Scripted(counts))
    assert one_by_one(simulation, 10.0, 18)[-1] == pytest.approx(np.mean(U), abs=0.05)


@pytest.mark.parametrize("strategy", [MimiC(), AREA(), FedStale(0.4), FedStale(0.4, probabilities="known")])
def test_with_everybody_there_it_is_fedavg(strategy, models, Scripted):
    if getattr(strategy, "uses_known", False):  # the script's probabilities are not 1
        strategy = FedStale(0.0)
    torch.testing.assert_close(models(strategy, counts=everybody()), models(FedAvg(), counts=everybody()), **SAME)


def test_mimic_on_one_curvature_is_full_participation_whoever_comes(Scripted):
    """Every round but the empty one, for any number of local steps; without a first round of all it is not."""
    rule, there = SGD(lr=0.1, steps=4), Scripted(SOME)
    full = one_by_one(points(FedAvg(), U, rule), 10.0, 4)
    found = one_by_one(points(MimiC(), U, rule, availability=there), 10.0, 5)
    assert found == pytest.approx([full[0], full[1], full[1], full[2], full[3]], abs=1e-12)
    partly = one_by_one(points(MimiC(first_round="available"), U, rule, availability=there), 10.0, 1)
    assert abs(partly[0] - full[0]) > 0.1


def test_in_mimics_first_round_everybody_takes_part(federated, play):
    first, second, *_ = play(federated(MimiC()))
    assert (first.report.cohort.host_index.multiplicity == 1).all()
    assert len(first.report.cohort) == len(SEEDS) * CLIENTS > len(second.report.cohort)


def test_areas_model_is_the_mean_of_what_clients_delivered(federated, play):
    """x + u of the paper, after every round; one client alone moves it by w_i of its change."""
    simulation = federated(AREA("data"))
    for played in play(simulation):
        rows = played.after.models.unflatten(0, (len(SEEDS), CLIENTS))
        mean = torch.einsum("i,rid->rd", torch.tensor(BY_DATA, dtype=torch.float64), rows)
        torch.testing.assert_close(played.after.model, mean, **SAME)
        torch.testing.assert_close(simulation.strategy.client_mean(played.after, simulation.federation), mean, **SAME)


def test_fedstale_without_stale_innovations_weighs_by_probabilities_alone(models):
    for stale, fresh in (
        (FedStale(0.0, probabilities="known"), FedAvgKnown()),
        (FedStale(0.0, cutoff=3), FedAU(cutoff=3)),
    ):
        torch.testing.assert_close(models(stale), models(fresh), **SAME)


def test_with_all_stale_innovations_and_k_of_m_clients_fedstale_is_fedvarp():
    runs = (
        one_by_one(points(strategy, U, SGD(lr=0.1, steps=2), availability=UniformK(2)), 10.0, 6)
        for strategy in (FedStale(1.0, probabilities="known"), FedVARP())
    )
    assert next(runs) == pytest.approx(next(runs), abs=1e-12)


def test_mifa_of_those_seen_starts_as_fedavg_and_goes_on_as_mifa(models):
    """Client 2 of the first replicate is the last to come, in round 0 of the script; all have come after round 3."""
    seen, all_, fedavg = models(MIFA(divide_by="seen")), models(MIFA()), models(FedAvg())
    torch.testing.assert_close(seen[0], fedavg[0], **SAME)
    assert not torch.allclose(all_[0], fedavg[0], atol=1e-3)
    everybodys = (models(MIFA(divide_by="seen"), counts=everybody()), models(MIFA(), counts=everybody()))
    torch.testing.assert_close(*everybodys, **SAME)


def test_gossip_by_data_keeps_the_mean_by_data(federated, play):
    """Σ_i w_i x_i of FedPBC moves by the clients' own steps alone, whoever is linked."""
    simulation = federated(FedPBC(weighting="data"))
    for played in play(simulation):
        before, after = (
            torch.einsum("i,rid->rd", torch.tensor(BY_DATA, dtype=torch.float64), rows.unflatten(0, (2, CLIENTS)))
            for rows in (played.report.end, played.after.models)
        )
        torch.testing.assert_close(after, before, **SAME)
        torch.testing.assert_close(simulation.strategy.client_mean(played.after, simulation.federation), after, **SAME)


def test_mifa_that_forgets_at_once_is_fedavg_over_all(models):
    torch.testing.assert_close(models(MIFA(0.7, max_age=0)), models(FedAvgAll(0.7)), **SAME)


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [(Focus, torch.float16), (FedStale, torch.bfloat16), (MimiC, torch.float16), (MIFA, torch.float16)],
)
def test_the_mean_is_that_of_the_rounded_memory(strategy, dtype, federated, play):
    made = strategy(memory_dtype=str(dtype).removeprefix("torch."), weighting="data")
    for played in play(federated(made)):
        assert played.after.memory.dtype == dtype
        rows = played.after.memory.double().unflatten(0, (len(SEEDS), CLIENTS))
        mean = torch.einsum("i,rid->rd", torch.tensor(BY_DATA, dtype=torch.float64), rows)
        torch.testing.assert_close(played.after.mean, mean, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: Focus(empty="wait"), r"empty='wait'.*step, skip"),
        (lambda: FedStale(beta=1.2), r"beta=1\.2"),
        (lambda: FedStale(probabilities="true"), r"probabilities='true'.*estimated, known"),
        (lambda: MimiC(first_round="none"), r"first_round='none'.*all, available"),
        (lambda: AREA("sizes"), r"weighting='sizes'.*uniform, data"),
        (lambda: MIFA(divide_by="some"), r"divide_by='some'.*all, seen"),
        (lambda: MIFA(max_age=-1), r"max_age=-1"),
    ],
)
def test_impossible_settings_name_their_key(build, key):
    with pytest.raises(ConfigError, match=key):
        build()


@pytest.mark.parametrize("rule", [Momentum])
def test_focus_refuses_rules_that_hand_no_gradient_back(rule, federated):
    with pytest.raises(ConfigError, match=r"strategy=Focus hands correction, gradient to the local rule.*Momentum"):
        federated(Focus(), rule=rule).run()


def test_fedstale_refuses_probabilities_that_nobody_knows(federated):
    class Unknown(Bernoulli):
        unknown_reason = "draws what nobody knows"

    with pytest.raises(ConfigError, match=r"strategy=fedstale.*probabilities=known"):
        FedStale(probabilities="known").check(Unknown())
    FedStale().check(Unknown())
    assert "gradient" not in FedRep.supported_keys


def test_focus_refuses_stages_that_would_change_nothing(federated):
    with pytest.raises(ConfigError, match=r"strategy=Focus sends no rows.*gradients go up as they are.*uplink=none"):
        federated(Focus(), uplink=Uplink(TopK(k=1)))
