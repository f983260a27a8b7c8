"""FedPAC beside a loop by torch.optim, whose quadratic programme is solved by trying all supports."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_feature_rules import COUNTS, LOCAL, SIZES, labelled, net, simulation_of_fixture  # noqa: F401

from fedsim import ConfigError, Simulation
from fedsim.local import SGD, FedPAC
from fedsim.models.selectors import Head
from fedsim.strategies import FedPAC as Combining
from fedsim.strategies.fedpac import head_combination_weights

LAM, HEAD_STEPS = 1.3, 1


def best_on_simplex(programme: np.ndarray) -> np.ndarray:
    """The α on the simplex that minimises αᵀPα: of each support the point where all its slopes are equal."""
    k, best = len(programme), None
    for size in range(1, k + 1):
        for support in map(list, itertools.combinations(range(k), size)):
            free = np.linalg.solve(programme[np.ix_(support, support)], np.ones(size))
            alpha = np.zeros(k)
            alpha[support] = free / free.sum()
            if (alpha >= 0).all() and (best is None or alpha @ programme @ alpha < best @ programme @ best):
                best = alpha
    return best


class Loop:
    """One replicate."""

    def __init__(self, simulation: Simulation, replicate: int, weighting: str) -> None:
        self.simulation, self.replicate, self.weighting = simulation, replicate, weighting
        module = copy.deepcopy(simulation.model.training_module)
        row = simulation.model.initial(simulation.federation.seeds)[replicate]
        module.load_state_dict(module.state_dict() | simulation.model.unflatten(row))
        self.server, self.heads = module, [copy.deepcopy(module[-1].state_dict()) for _ in SIZES]
        self.prototypes, self.sparse = {}, False

    def round(self, t: int) -> None:
        m = len(SIZES)
        cohort = self.simulation.federation.make_cohort(COUNTS[t], np.ones_like(COUNTS[t], dtype=float), t)
        plan = self.simulation.trainer.batches.plan(cohort, t)
        ends, h, v, noted = {}, {}, {}, {}
        for position, virtual in enumerate(cohort.host_index.virtual_clients):
            if virtual // m == self.replicate:
                i = int(virtual % m)
                ends[i], seen = self.trained(plan.chunk(np.array([position])), i)
                z, y = (torch.cat([batch[part] for batch in seen]) for part in (0, 1))
                noted[i] = {label: z[y == label] for label in y.unique().tolist()}
                h[i] = np.zeros((4, 3))
                for label, rows in noted[i].items():
                    h[i][label] = rows.mean(0).numpy() * len(rows) / len(z)
                v[i] = (float(z.square().sum(1).mean()) - (h[i] ** 2).sum()) / SIZES[i]
        for label in range(4):
            rows = [one[label] for one in noted.values() if label in one]
            if rows:
                self.prototypes[label] = torch.cat(rows).mean(0)
        if ends:
            self.combine(ends, h, v)

    def trained(self, chunk, i):
        module, seen = copy.deepcopy(self.server), []
        module[-1].load_state_dict(self.heads[i])
        for step in range(int(chunk.steps[0])):
            batch = chunk.batch(step, 0, 1, torch.float64)
            x, y = batch["x"][0], batch["y"][0]
            z = module[:-1](x)
            penalty = sum(
                ((one - self.prototypes[int(label)]) ** 2).mean()
                for one, label in zip(z, y, strict=True) if int(label) in self.prototypes
            ) / len(x)  # fmt: skip
            seen.append((z.detach(), y))
            loss = F.cross_entropy(module[-1](z), y) + (0 if step < HEAD_STEPS else LAM * penalty)
            trained = module[-1] if step < HEAD_STEPS else module[:-1]
            optimiser = torch.optim.SGD(trained.parameters(), lr=LOCAL["lr"])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return module, seen

    def combine(self, ends, h, v):
        active = sorted(ends)
        share = np.array([SIZES[i] if self.weighting == "data" else 1.0 for i in active])
        states = [ends[i].state_dict() for i in active]
        mean = {n: sum(w * s[n] for w, s in zip(share / share.sum(), states, strict=True)) for n in states[0]}
        self.server.load_state_dict(mean)
        for i in active:
            programme = np.array(
                [[np.sum((h[i] - h[j]) * (h[i] - h[k])) + (j == k) * v[j] for k in active] for j in active]
            )
            alpha = best_on_simplex(programme)
            self.sparse |= bool((alpha == 0).any())
            last = [ends[j][-1].state_dict() for j in active]
            self.heads[i] = {n: sum(a * s[n] for a, s in zip(alpha, last, strict=True)) for n in last[0]}

    def row(self, i: int | None = None) -> torch.Tensor:
        module = copy.deepcopy(self.server)
        if i is not None:
            module[-1].load_state_dict(self.heads[i])
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("weighting", ["uniform", "data"])
def test_every_round_follows_the_formula(weighting, executor, simulation_of, play):
    simulation = simulation_of(FedPAC(LAM, HEAD_STEPS, **LOCAL), executor, strategy=Combining(weighting))
    loops = [Loop(simulation, replicate, weighting) for replicate in (0, 1)]
    for played in play(simulation):
        models = played.after.models.unflatten(0, (2, -1))
        for replicate, loop in enumerate(loops):
            loop.round(played.t)
            torch.testing.assert_close(played.after.model[replicate], loop.row(), rtol=0, atol=1e-10)
            wanted = torch.stack([loop.row(i) for i in range(len(SIZES))])
            torch.testing.assert_close(models[replicate], wanted, rtol=0, atol=1e-10)
    assert any(loop.sparse for loop in loops)


def test_weights_are_those_of_the_programme_and_its_limits():
    draw = np.random.default_rng(0)
    h, v = draw.standard_normal((5, 6)), draw.random(5)
    for i, alpha in enumerate(head_combination_weights(h, v)):
        difference = h[i] - h
        np.testing.assert_allclose(alpha, best_on_simplex(np.diag(v) + difference @ difference.T), rtol=0, atol=1e-10)
    same = head_combination_weights(np.repeat(h[:1], 5, 0), v)  # of equal clients the less noisy weigh more
    np.testing.assert_allclose(same, np.tile(1 / v / (1 / v).sum(), (5, 1)), rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        head_combination_weights(h, 1e-9 * v), np.eye(5), rtol=0, atol=1e-6
    )  # much data: own ones
    np.testing.assert_allclose(head_combination_weights(h[:1], v[:1]), [[1.0]])
    np.testing.assert_allclose(head_combination_weights(np.zeros((3, 2)), np.zeros(3)), np.full((3, 3), 1 / 3))


@pytest.mark.slow
def test_the_first_steps_train_the_last_layer_alone(simulation_of, play):
    options = LOCAL | {"epochs": None, "steps": 2, "batch_size": None}
    simulation = simulation_of(FedPAC(LAM, 1, **options), strategy=Combining())
    first = next(play(simulation)).report
    head = simulation.federation.columns.column_mask(r"^4\.", first.end) > 0
    assert bool((first.start[:, head] != first.end[:, head]).any(1).all())
    without = next(play(simulation_of(FedPAC(LAM, 0, **options), strategy=Combining()))).report
    assert torch.equal(without.end[:, head], without.start[:, head])
    one = next(play(simulation_of(SGD(**options | {"steps": 1}))))
    torch.testing.assert_close(first.end[:, head], one.report.end[:, head], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_and_replicates_stay_apart(simulation_of, Scripted, tmp_path):
    def simulation(**options):
        return simulation_of(FedPAC(LAM, HEAD_STEPS, **LOCAL), strategy=Combining("data"), **options)

    whole = simulation().run().state
    simulation(rounds=4).run(tmp_path)
    resumed = simulation().run(tmp_path, resume=True).state
    assert torch.equal(resumed.models, whole.models)
    assert torch.equal(resumed.model, whole.model)
    alone = Simulation(
        labelled(), net, clients=len(SIZES), seeds=(5,), local=FedPAC(LAM, HEAD_STEPS, **LOCAL), rounds=len(COUNTS),
        availability=Scripted(COUNTS[:, 1:]), strategy=Combining("data"),
        execution=simulation().execution,
    ).run().state  # fmt: skip
    torch.testing.assert_close(alone.models, whole.models.unflatten(0, (2, -1))[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("local", "options", "said"),
    [
        (SGD(), {}, r"strategy=fedpac combines last layers by statistics.*use local=fedpac"),
        (FedPAC(), {"columns": Head()}, r"must receive them; use columns=all"),
    ],
)
def test_what_does_not_fit_is_refused(local, options, said, simulation_of):
    with pytest.raises(ConfigError, match=said):
        simulation_of(local, strategy=Combining(), **options)


def test_steps_for_the_last_layer_alone_are_refused():
    with pytest.raises(ConfigError, match=r"head_steps=3 leaves none of local_steps=3"):
        FedPAC(head_steps=3, steps=3)
