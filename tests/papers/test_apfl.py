"""What APFL's personal models are beside fine-tuned ones, where losses are quadratic: formulas of docs/claims/apfl.md.

f_i(x) = ½ ‖x − û_i‖², û_i the mean of the client's training samples. τ local steps at rate η keep the share
q = (1 − η)^τ of what they start from: fine-tuning makes û_i + q (x − û_i) of the federation's model x.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import UniformK
from fedsim.data.datasets import Dataset, Synthetic
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import Personal
from fedsim.local import APFL, SGD, PerFedAvg, PFedMe
from fedsim.models import Mean
from fedsim.strategies import FedAvg

ETA, TAU = 0.1, 10
Q = (1 - ETA) ** TAU


def kept_share(alpha: float) -> float:
    """p of APFL's mixture û_i + p (x − û_i) after the local steps of a round, once x rests."""
    a = (1 - ETA * alpha**2) ** TAU
    return (1 - alpha) / (1 - a) * (a * (1 - Q) - (a - Q) / (1 - alpha**2))


def points(clients: int, each: int, spread: float, noise: float = 1.0) -> Dataset:
    """Samples u_i + noise in eight dimensions, with u_i apart by `spread`."""
    draw = np.random.default_rng(2)
    owners = np.repeat(np.arange(clients), each)
    x = spread * draw.standard_normal((clients, 8))[owners] + noise * draw.standard_normal((len(owners), 8))
    return Dataset("points", torch.as_tensor(x), loss="half_squared_distance", owners=torch.as_tensor(owners))


def simulation_of(dataset: Dataset, clients: int, local, start: float = 6.0, **options) -> Simulation:
    given = {"partition": Natural(validation=0.5), "personal": Personal(over="all", at="end", train_samples=99),
             "evaluation": EvaluationOptions(every=1), "execution": Execution(dtype="float64"),
             "seeds": (3,)}  # fmt: skip
    return Simulation(dataset, functools.partial(Mean, start=start), clients=clients, local=local, **given | options)


def steps(kind=SGD, **options):
    return kind(lr=ETA, steps=TAU, batch_size=None, **options)


def means(simulation: Simulation) -> tuple[np.ndarray, np.ndarray]:
    """[m, d] of every client's training and validation samples."""
    z, table = simulation.dataset.train_x.numpy(), simulation.partition_tables[0]
    parts = [np.split(t.order, t.offsets[1:-1]) for t in (table, table.validation)]
    own, held = (np.stack([z[p].mean(0) for p in each]) for each in parts)
    return own, held


def spread_around(simulation: Simulation) -> float:
    """The loss on validation samples of their own mean."""
    z, held = simulation.dataset.train_x.numpy(), simulation.partition_tables[0].validation
    parts = [z[p] for p in np.split(held.order, held.offsets[1:-1])]
    return float(np.mean([0.5 * np.square(p - p.mean(0)).sum(1).mean() for p in parts]))


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "rounds"), [pytest.param(0.5, 90, marks=pytest.mark.slow), (0.75, 40)])
def test_both_models_keep_a_share_of_the_resting_federations(alpha, rounds):
    """Fine-tuning q, APFL p(α), both of x − û_i: less, and on average over a round's steps nothing, as in Remark 2."""
    once = EvaluationOptions(every=rounds)
    simulation = simulation_of(points(6, 8, 2.0), 6, steps(APFL, alpha=alpha), rounds=rounds, evaluation=once)
    row = simulation.run().history[-1]
    own, held = means(simulation)
    away, rest = own.mean(0) - own, spread_around(simulation)
    for model, share in (("localized", Q), ("personal", kept_share(alpha))):
        expected = rest + 0.5 * np.square(own + share * away - held).sum(1).mean()
        assert row[f"{model}_validation_loss"] == pytest.approx(expected, rel=1e-7)
    assert abs(kept_share(alpha)) < Q


@pytest.mark.slow
def test_apfl_is_ahead_of_fine_tuning_until_the_federations_model_is_good():
    """E ‖û + s (x − û) − u‖² = (1 − s)² σ² + s² D²: ahead while D² > σ² (2 − p − q) / (p + q), and no more then.

    σ² is the error of the client's own minimiser, D² that of the federation's model for this client. Here x improves
    slowly (η_g = 0.03) and clients are alike, so that D² falls from far above to below: the round of the crossing is
    the formula's.
    """
    clients, alpha, start, server = 40, 0.5, 6.0, 0.03
    simulation = simulation_of(
        points(clients, 20, 0.3, noise=2.0), clients, steps(APFL, alpha=alpha), rounds=100,
        strategy=FedAvg(server_lr=server), evaluation=EvaluationOptions(every=5), start=start,
    )  # fmt: skip
    history = simulation.run().history
    rounds = np.array([row["round"] for row in history])
    lead = np.array([row["localized_validation_loss"] - row["personal_validation_loss"] for row in history])
    own, held = means(simulation)
    p, centre, far = kept_share(alpha), own.mean(0), []
    for t in rounds:
        away = centre + (1 - server * (1 - Q)) ** t * (start - centre) - own
        far.append(((p + Q) / 2 * np.square(away).sum(1) + (away * (own - held)).sum(1)).mean() > 0)
    until, expected = rounds[lead > 0].max(), rounds[far].max()
    assert 30 <= expected <= 80
    assert (lead[(rounds > 15) & (rounds <= until)] > 0).all(), "ahead until then, once its own models have got going"
    assert abs(until - expected) <= 5, (until, expected)


@pytest.mark.slow
def test_the_training_loss_is_not_linear_in_alpha():
    """The loss that local minimisers leave room for is ½ p(α)² of the way to the federation's model: at α = 0.5 less
    than half of that at 0.25, where a line through both would be below 0 at 0.75."""
    losses = {}
    for alpha in (0.25, 0.5):
        simulation = simulation_of(points(6, 8, 2.0, noise=0.0), 6, steps(APFL, alpha=alpha), rounds=200,
                                   evaluation=EvaluationOptions(every=200))  # fmt: skip
        losses[alpha] = simulation.run().history[-1]["personal_training_loss"]
        own, _ = means(simulation)
        expected = 0.5 * kept_share(alpha) ** 2 * np.square(own.mean(0) - own).sum(1).mean()
        assert losses[alpha] == pytest.approx(expected, rel=1e-3)
    assert 0 < losses[0.5] < 0.5 * losses[0.25]


@pytest.mark.slow
def test_an_adaptive_alpha_rises_above_three_quarters():
    """Where a round begins the mixture lies between û_i and x, so that ⟨v − w, ∇f(v̄)⟩ < 0: α moves up, once x is near
    its resting point."""
    rule, alphas = steps(APFL, alpha=0.5, adaptive=True), []
    rule.after_round = lambda memory, cohort: alphas.append(memory["alpha"].clone())
    simulation_of(points(6, 8, 2.0), 6, rule, rounds=15, start=0.0).run()
    assert (alphas[0] == 0.5).all(), "v is w in the first round"
    assert (alphas[-1] > 0.75).all(), alphas[-1]


@pytest.mark.slow
def test_how_many_clients_are_online_hardly_enters_fine_tuned_models():
    """E x is the same for every K, its variance V_K = (1 − q)/(1 + q) · S²/K · (N − K)/(N − 1) around the optimum; a
    model after τ steps of its own sees q² of it. Loss of x: ½ (S² + V_K), fine-tuned: q² of that; at 5 σ over seeds."""
    clients, seeds, dataset = 10, range(40), points(10, 2, 2.0, noise=0.0)
    centres = dataset.train_x.numpy()[::2]
    spread = np.square(centres - centres.mean(0)).sum(1).mean()
    for online in (3, 7):
        variance = (1 - Q) / (1 + Q) * spread / online * (clients - online) / (clients - 1)
        run = simulation_of(
            dataset, clients, steps(), availability=UniformK(online), rounds=60, seeds=seeds,
            evaluation=EvaluationOptions(every=4), start=0.0,
        )  # fmt: skip
        history = [row for row in run.run().history if row["round"] >= 12]
        for model, share in (("global", 1.0), ("localized", Q**2)):
            losses = [np.mean([r[f"{model}_training_loss"] for r in history if r["seed"] == s]) for s in seeds]
            error = np.std(losses, ddof=1) / np.sqrt(len(seeds))
            assert abs(np.mean(losses) - share * (spread + variance) / 2) < 5 * error
            assert 5 * error < share * variance / 2, "half of what K adds would be seen"


def left(rule, rounds: int = 3) -> float:
    """Share of its start's distance to the optimum that one client's model still has, its samples being all alike."""
    run = simulation_of(
        points(1, 4, 1.0, noise=0.0), 1, rule, rounds=rounds, evaluation=EvaluationOptions(every=rounds)
    )
    u, x = run.dataset.train_x[0], run.run().state.model[0]
    return float(((x - u) / (6.0 - u)).mean())


def test_at_the_printed_rates_a_meta_step_goes_an_eleventh_of_the_way():
    """Per-FedAvg: 1 − β (1 − α) of the distance remains, of the program, which keeps the inner step, (1 − α)(1 − β)."""
    options = {"inner_lr": 0.01, "lr": 0.001, "steps": 20, "batch_size": None}
    assert left(PerFedAvg(**options)) == pytest.approx((1 - 0.001 * 0.99) ** 60)
    assert left(PerFedAvg(keep_inner=True, **options)) == pytest.approx((0.99 * 0.999) ** 60)
    assert np.log(0.99 * 0.999) / np.log(1 - 0.001 * 0.99) == pytest.approx(11, abs=0.2)


def test_at_the_printed_rates_pfedme_goes_as_far_as_sgd_at_a_fiftieth_of_fedavgs_rate():
    """An outer step of K gradients leaves 1 − ηλ/(1 + λ) · (1 − (1 − η (1 + λ))^K) of the distance, and with a warm
    start at least 1 − ηλ/(1 + λ): a gradient step is worth at most 0.15/16/5 = 0.0019, of FedAvg's 0.1."""
    options = {"penalty": 15.0, "inner_steps": 5, "inner_lr": 0.01, "lr": 0.01, "steps": 4, "batch_size": None}
    assert left(PFedMe(**options)) == pytest.approx((1 - 0.15 / 16 * (1 - 0.84**5)) ** 12)
    assert (1 - 0.15 / 16) ** 12 < left(PFedMe(warm_start=True, **options)) < left(PFedMe(**options))


def test_a_newcomers_mixture_is_fine_tuned_more_slowly():
    """Of x − û is left after s steps: fine-tuned (1 − η)^s = r^s, mixed (α a^s + r^s) / (1 + α), which is more."""
    alpha, dataset = 0.5, points(4, 6, 2.0)
    asked = Personal(newcomers=2, newcomer_epochs=5, train_samples=99)
    simulation = simulation_of(dataset, 4, steps(APFL, alpha=alpha), rounds=2, personal=asked)
    result = simulation.run()
    z, x = simulation.dataset.train_x.numpy(), result.state.model[0].numpy()
    training = [
        z[p] for p in np.split(simulation.partition_tables[0].order, simulation.partition_tables[0].offsets[1:-1])
    ][2:]
    for epoch in result.extra["newcomers"]:
        s = epoch["epoch"]  # an epoch is one full batch
        r, a = (1 - ETA) ** s, (1 - ETA * alpha**2) ** s
        for model, share in (("localized", r), ("personal", (alpha * a + r) / (1 + alpha))):
            rows = [own.mean(0) + share * (x - own.mean(0)) for own in training]
            losses = [0.5 * np.square(own - row).sum(1).mean() for own, row in zip(training, rows, strict=True)]
            assert epoch[f"{model}_training_loss"][0] == pytest.approx(np.mean(losses))
        assert s == 0 or epoch["personal_training_loss"][0] > epoch["localized_training_loss"][0]


def test_more_diverse_synthetic_clients_hold_more_of_one_label():
    """The share of a client's most frequent label, synthetic(0.5, 0.5) against (0, 0), 1,600 clients each: by 3 σ."""
    shares = {}
    for spread in (0.0, 0.5):
        drawn = [Synthetic(400, spread, spread, samples=50, test_fraction=0.0, seed=seed) for seed in range(4)]
        labels = [data.train_y.numpy().reshape(400, 50) for data in drawn]
        shares[spread] = np.array([np.bincount(row).max() / 50 for each in labels for row in each])
    even, diverse = shares.values()
    assert diverse.mean() - even.mean() > 3 * np.sqrt((diverse.var() + even.var()) / len(even))


def test_synthetic_0_0_is_not_iid():
    """Its clients draw weights and biases of their own, of variance 1 (Appendix B.1): the share of a client's most
    frequent label is larger than after the labels of all clients are shuffled, by 3 σ."""
    labels = Synthetic(400, 0.0, 0.0, samples=50, test_fraction=0.0, seed=0).train_y.numpy().reshape(400, 50)
    shuffled = np.random.default_rng(0).permutation(labels.reshape(-1)).reshape(400, 50)
    own, iid = (np.array([np.bincount(row).max() / 50 for row in each]) for each in (labels, shuffled))
    assert own.mean() - iid.mean() > 3 * np.sqrt((own.var() + iid.var()) / 400)
