"""APFL, Per-FedAvg, pFedMe and Ditto against plain autograd, client by client."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from personal_rules import RULES, SHAPES, double, module, simulation_of, watched
from torch import nn
from torch.func import functional_call

from fedsim import Simulation
from fedsim.data.datasets import Quadratics
from fedsim.local import APFL, Ditto, PerFedAvg, PFedMe
from fedsim.models import Mean

RIDGE = 0.3


WAYS = {
    "vmap": double("vmap"),
    "vmap in chunks": double("vmap", chunk=3),
    "loop with two workers": double("loop", workers=2, chunk=2),
}


def output(row, x):
    parts = row.split([s.numel() for s in SHAPES.values()])
    return functional_call(
        module, {n: p.reshape(s) for (n, s), p in zip(SHAPES.items(), parts, strict=True)}, (x,)
    )  # fmt: skip


def loss_of(scores, row, y):
    return nn.functional.cross_entropy(scores, y) + 0.5 * RIDGE * row.square().sum()


def gradients(loss, *leaves):
    """Of loss(leaves) with respect to every leaf."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(loss(*leaves), leaves)


def apfl_step(rule, state, x, y, lr, first):
    def mixture(v, alpha):
        w = state["w"]
        if rule.mix == "outputs":
            return loss_of(alpha * output(v, x) + (1 - alpha) * output(w, x), v, y)
        return loss_of(output(alpha * v + (1 - alpha) * w, x), alpha * v + (1 - alpha) * w, y)

    if rule.adaptive and (first or rule.every == "step"):
        _, slope = gradients(mixture, state["personal"], state["alpha"])
        alpha = state["alpha"] - lr * (slope + rule.alpha_decay * state["alpha"])
        state["alpha"] = torch.tensor(min(max(alpha.item(), 0.0), 1.0), dtype=torch.float64)
    of_v, _ = gradients(mixture, state["personal"], state["alpha"])
    (of_w,) = gradients(lambda w: loss_of(output(w, x), w, y), state["w"])
    state["personal"] = state["personal"] - (0.35 / 0.2 if rule.ratio != 1 else 1.0) * lr * of_v
    state["w"] = state["w"] - lr * of_w


def perfedavg_step(rule, state, x, y, lr, first):
    """The exact step differentiates through the inner one; one that keeps it goes on from where that ended."""
    ours = (slice(0, None, 2), slice(1, None, 2)) if len(x) > 1 else (slice(None), slice(None))
    (x1, x2), (y1, y2) = [x[s] for s in ours], [y[s] for s in ours]

    def f(row, x, y):
        return loss_of(output(row, x), row, y)

    def meta(row):
        (slope,) = torch.autograd.grad(f(row, x1, y1), row, create_graph=True)
        return f(row - rule.inner_lr * (slope if rule.second_order else slope.detach()), x2, y2)

    if rule.keep_inner:
        state["w"] = state["w"] - rule.inner_lr * gradients(lambda row: f(row, x1, y1), state["w"])[0]
        meta = functools.partial(f, x=x2, y=y2)
    (gradient,) = gradients(meta, state["w"])
    state["w"] = state["w"] - lr * gradient


def pfedme_step(rule, state, x, y, lr, first):
    w = state["w"]
    theta = state["personal"] if rule.warm_start else w
    for k in range(rule.inner_steps):
        own = slice(k if k < len(x) else 0, None, 3) if rule.batches_per_step == 3 else slice(None)

        def near(theta, own=own):
            return loss_of(output(theta, x[own]), theta, y[own]) + 0.5 * rule.penalty * (theta - w).square().sum()

        theta = theta - rule.inner_lr * gradients(near, theta)[0]
    state["personal"], state["w"] = theta, w - lr * rule.penalty * (w - theta)


def ditto_step(rule, state, x, y, lr, first):
    if first:
        state["received"] = state["w"]

    def own(v):
        return loss_of(output(v, x), v, y) + 0.5 * rule.penalty * (v - state["received"]).square().sum()

    for name, rate, loss in (
        ("personal", 0.35 / 0.2 * lr, own),
        ("w", lr, lambda w: loss_of(output(w, x), w, y)),
    ):
        state[name] = state[name] - rate * (gradients(loss, state[name])[0] + rule.weight_decay * state[name])


STEPS = {Ditto: ditto_step, APFL: apfl_step, PerFedAvg: perfedavg_step, PFedMe: pfedme_step}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_a_rule_is_plain_autograd_client_by_client(way, name, Scripted, play):
    """Five rounds of ragged clients, one of a single sample, that come and go; one round is empty, one for a replicate:
    end rows, personal models, α, reported losses."""
    words = ["11100 00000 11111 00000 00101", "00101 01010 11111 00000 10010"]
    counts = np.array([[list(map(int, w)) for w in one.split()] for one in words]).swapaxes(0, 1)
    rule = RULES[name]()
    simulation = watched(simulation_of(local=rule, ridge=RIDGE, availability=Scripted(counts), rounds=len(counts),
                                       execution=WAYS[way]))  # fmt: skip
    initial = simulation.initial_state().model.repeat_interleave(5, dim=0)
    v, alphas = initial.clone(), torch.full((10,), getattr(rule, "alpha", 0.0), dtype=torch.float64)
    moved = False
    for played in play(simulation):
        cohort = played.report.cohort
        plan = simulation.trainer.batches.plan(cohort, played.t)
        for position, client in enumerate(cohort.host_index.rows):
            chunk, losses = plan.chunk(np.array([position])), []
            state = {"w": played.report.start[position], "personal": v[client], "alpha": alphas[client]}
            for step in range(int(chunk.steps[0])):
                batch = chunk.batch(step, 0, 1, torch.float64)
                lr = 0.2 / (played.t * int(chunk.steps[0]) + step + 3.0)
                x, y = batch["x"][0], batch["y"][0]
                drawn = 2 if isinstance(rule, PerFedAvg) else getattr(rule, "batches_per_step", 1)
                at = state["personal"] if getattr(rule, "warm_start", False) else state["w"]
                losses.append(loss_of(output(at, x[::drawn]), at, y[::drawn]).item())
                STEPS[type(rule)](rule, state, x, y, lr, step == 0)
            v[client], alphas[client] = state["personal"], state["alpha"]
            torch.testing.assert_close(played.report.end[position], state["w"], rtol=0, atol=1e-10)
            assert played.report.loss[position].item() == pytest.approx(np.mean(losses), abs=1e-10)
        for kept, expected in (("personal", v), ("alpha", alphas)):
            if kept in simulation.clients:
                torch.testing.assert_close(simulation.clients[kept], expected, rtol=0, atol=1e-10)
        moved = moved or (alphas - rule.alpha).abs().max() > 1e-3 if getattr(rule, "adaptive", False) else True
    assert moved


@pytest.mark.parametrize("way", WAYS)
def test_the_hessian_product_is_the_slope_of_the_gradient(way):
    """Finite differences of plain gradients; the model is smooth (tanh) and has dropout, whose mask stays."""

    def build(shape, classes):
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, classes))

    local = PerFedAvg(batch_size=2, steps=1)
    simulation = simulation_of(build, ridge=RIDGE, clients=5, local=local, execution=WAYS[way])
    row = simulation.initial_state().model[0]
    vector = torch.sin(torch.arange(len(row), dtype=torch.float64))
    federation = simulation.federation
    cohort = federation.make_cohort(np.ones((2, 5)), np.ones((2, 5)))
    batch = simulation.trainer.batches.plan(cohort, 0).chunk(np.array([4])).batch(0, 0, 1, torch.float64)
    batch = {k: value[0] for k, value in batch.items()}
    executor = simulation.trainer.executor
    if way.startswith("loop"):
        objective = executor._objectives.get()
    else:
        from fedsim.trainer.buffer_recording import BufferRecordingObjective
        from fedsim.trainer.objective import FunctionalObjective

        objective = BufferRecordingObjective(FunctionalObjective(simulation.model), None)
    with torch.no_grad():
        product = objective.hessian_product(row, vector, batch)
        ahead, behind = (objective.gradient(row + h * vector, batch)[0] for h in (1e-5, -1e-5))
    torch.testing.assert_close(product, (ahead - behind) / 2e-5, rtol=0, atol=1e-8)


def test_mixed_outputs_are_differentiated_by_the_clients_own_model_and_by_alpha() -> None:
    """The loop differentiates a module, the other executors a function."""
    from fedsim.trainer.objective import FunctionalObjective

    simulation = simulation_of(ridge=RIDGE, execution=double("loop", workers=1))
    v, w = simulation.initial_state().model
    x, y, alpha = simulation.dataset.train_x[:4], simulation.dataset.train_y[:4], torch.tensor(0.3).double()
    mixture = lambda v, alpha: loss_of(alpha * output(v, x) + (1 - alpha) * output(w, x), v, y)  # noqa: E731
    by_model, by_alpha = gradients(mixture, v, alpha)
    for objective in (simulation.trainer.executor._objectives.get(), FunctionalObjective(simulation.model)):
        gradient, slope, value, *_ = objective.mixed_outputs(v, w, alpha, {"x": x, "y": y})
        torch.testing.assert_close(gradient, by_model, rtol=0, atol=1e-12)
        torch.testing.assert_close(slope, by_alpha, rtol=0, atol=1e-12)
        torch.testing.assert_close(value, mixture(v, alpha), rtol=0, atol=1e-12)


def test_a_loss_that_is_linear_has_no_curvature():
    """½‖θ − x‖² has the identity for a Hessian, θᵀx nothing: its gradient does not depend on θ."""
    dataset = Quadratics(clients=3, dimension=4)
    simulation = Simulation(dataset, Mean, clients=3, execution=double("loop", workers=1))
    objective = simulation.trainer.executor._objectives.get()
    vector = torch.arange(4.0, dtype=torch.float64)
    batch = {"x": torch.ones(2, 4, dtype=torch.float64)}
    torch.testing.assert_close(objective.hessian_product(vector, vector, batch), vector)
    simulation.model.loss = lambda output, batch: (output * batch["x"]).sum(1)
    assert not objective.hessian_product(vector, vector, batch).any()
