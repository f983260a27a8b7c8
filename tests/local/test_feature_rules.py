"""MOON, FedNTD and FedProto beside loops by torch.optim, client by client, and where they must be plain SGD.

Five unequal clients in two replicates, some without a class; a client is absent in some rounds, and one round is empty
for a replicate.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim import ConfigError, Execution, Simulation
from fedsim.data.datasets import Dataset, Quadratics
from fedsim.local import MOON, SGD, FedNTD, FedProto
from fedsim.local.fedntd import not_true_divergence
from fedsim.models import MLP, Linear, Mean
from fedsim.strategies import LocalOnly

SIZES = (2, 9, 4, 3, 8)
WORDS = ("11011 01110 10101 00000 11111 10011", "10110 11111 00111 11001 01100 11110")
COUNTS = np.array([[list(map(int, word)) for word in one.split()] for one in WORDS]).swapaxes(0, 1)  # [T, R, m]
LOCAL = {"lr": 0.3, "epochs": 2, "batch_size": 3, "drop_last": False}


def labelled() -> Dataset:
    """Four classes, of which clients lack some."""
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    labels = np.where(owners == 1, draw.integers(0, 2, len(owners)), draw.integers(0, 4, len(owners)))
    x = torch.as_tensor(draw.standard_normal((len(owners), 4)))
    return Dataset("labelled", x, torch.as_tensor(labels), classes=4, owners=torch.as_tensor(owners))


def net(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, classes))


def normalised(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, classes)
    )


@pytest.fixture(name="simulation_of")
def simulation_of_fixture(Scripted):
    def of(local, executor="vmap", model=net, **options) -> Simulation:
        return Simulation(
            options.pop("dataset", None) or labelled(), model, clients=len(SIZES), seeds=(3, 5), local=local,
            availability=Scripted(COUNTS), execution=Execution(executor, dtype="float64"),
            **{"rounds": len(COUNTS)} | options,
        )  # fmt: skip

    return of


class Loop:
    """Clients of one replicate, trained one after the other by torch.optim on the batches of the run.

    `penalty(module, features, output, batch, received, client)` is what their loss has beside the cross-entropy.
    """

    def __init__(self, simulation: Simulation, replicate: int, local_only: bool = False) -> None:
        self.simulation, self.replicate, self.local_only = simulation, replicate, local_only
        model = simulation.model
        module = copy.deepcopy(model.training_module)
        row = model.initial(simulation.federation.seeds)[replicate]
        module.load_state_dict(module.state_dict() | model.unflatten(row))
        self.server = module
        self.clients = [copy.deepcopy(module) for _ in SIZES]  # as each ended its last round

    def features(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module[:-1](x)

    def penalty(self, module, features, output, y, x, received, client):
        raise NotImplementedError

    def seen(self, client, features, y):
        """What the client notes of a step."""

    def begin(self, client, x):
        """Before its first step of a round."""

    def after(self, active):
        """What the server does beside averaging."""

    def round(self, t: int) -> None:
        simulation, m = self.simulation, len(SIZES)
        cohort = simulation.federation.make_cohort(COUNTS[t], np.ones_like(COUNTS[t], dtype=float), t)
        plan = simulation.trainer.batches.plan(cohort, t)
        active = []
        for position, virtual in enumerate(cohort.host_index.virtual_clients):
            if virtual // m != self.replicate:
                continue
            client = int(virtual % m)
            active.append(client)
            received = copy.deepcopy(self.clients[client] if self.local_only else self.server)
            module = copy.deepcopy(received)
            module.train()
            received.eval()
            optimiser = torch.optim.SGD(module.parameters(), lr=LOCAL["lr"])
            chunk = plan.chunk(np.array([position]))
            self.begin(client, None)
            for step in range(int(chunk.steps[0])):
                batch = chunk.batch(step, 0, 1, torch.float64)
                x, y = batch["x"][0], batch["y"][0]
                features = self.features(module, x)
                output = module[-1](features)
                optimiser.zero_grad()
                loss = F.cross_entropy(output, y) + self.penalty(module, features, output, y, x, received, client)
                loss.backward()
                self.seen(client, features.detach(), y)
                optimiser.step()
            self.clients[client] = module
        if active and not self.local_only:
            states = [self.clients[client].state_dict() for client in active]
            self.server.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})
        if active:
            self.after(active)

    def server_row(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.server.parameters()])


class NaiveMOON(Loop):
    def begin(self, client, x):
        self.previous = copy.deepcopy(self.clients[client]).eval()

    def penalty(self, module, features, output, y, x, received, client):
        with torch.no_grad():
            near, far = self.features(received, x), self.features(self.previous, x)
        scores = torch.stack([F.cosine_similarity(features, near), F.cosine_similarity(features, far)], 1) / 0.4
        return 2.0 * F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.int64))


class NaiveFedNTD(Loop):
    def penalty(self, module, features, output, y, x, received, client):
        with torch.no_grad():
            teacher = received(x)
        total = 0.0
        for own, other, label in zip(output, teacher, y.tolist(), strict=True):
            others = [c for c in range(4) if c != label]
            probabilities = torch.softmax(other[others] / 1.5, 0)
            total = total + F.kl_div(torch.log_softmax(own[others] / 1.5, 0), probabilities, reduction="sum")
        return 0.7 * total / len(y)


class NaiveFedProto(Loop):
    average = "samples"

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.prototypes: dict[int, torch.Tensor] = {}

    def begin(self, client, x):
        if not hasattr(self, "noted"):
            self.noted: dict[int, dict[int, list[torch.Tensor]]] = {}
        self.noted[client] = {}

    def penalty(self, module, features, output, y, x, received, client):
        target = features.detach().clone()
        for row, label in enumerate(y.tolist()):
            target[row] = self.prototypes.get(label, target[row])
        return 1.3 * F.mse_loss(features, target)

    def seen(self, client, features, y):
        for row, label in zip(features, y.tolist(), strict=True):
            self.noted[client].setdefault(label, []).append(row)

    def after(self, active):
        for label in range(4):
            means = {i: torch.stack(self.noted[i][label]) for i in active if label in self.noted[i]}
            if means:
                weights = [len(rows) if self.average == "samples" else 1 for rows in means.values()]
                rows = [w * values.mean(0) for w, values in zip(weights, means.values(), strict=True)]
                self.prototypes[label] = sum(rows) / sum(weights)


RULES = {
    "moon": (lambda **o: MOON(2.0, 0.4, **LOCAL | o), NaiveMOON),
    "fedntd": (lambda **o: FedNTD(0.7, 1.5, **LOCAL | o), NaiveFedNTD),
    "fedproto": (lambda **o: FedProto(1.3, **LOCAL | o), NaiveFedProto),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("name", RULES)
def test_every_round_follows_the_formula(name, executor, simulation_of, play):
    rule, naive = RULES[name]
    simulation = simulation_of(rule(), executor)
    loops = [naive(simulation, replicate) for replicate in (0, 1)]
    for played in play(simulation):
        for replicate, loop in enumerate(loops):
            loop.round(played.t)
            torch.testing.assert_close(played.after.model[replicate], loop.server_row(), rtol=0, atol=1e-10)
    assert not torch.allclose(played.after.model[0], played.after.model[1])


@pytest.mark.slow
@pytest.mark.parametrize("average", ["samples", "clients"])
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_clients_of_fedproto_share_prototypes_alone(average, executor, simulation_of, play):
    """strategy=local_only: models never meet, but prototypes do, whose means only the classes' owners enter."""
    simulation = simulation_of(FedProto(1.3, average, **LOCAL), executor, strategy=LocalOnly())
    loops = [NaiveFedProto(simulation, replicate, local_only=True) for replicate in (0, 1)]
    for played in play(simulation):
        for replicate, loop in enumerate(loops):
            loop.average = average
            loop.round(played.t)
            rows = torch.stack([torch.cat([p.detach().reshape(-1) for p in c.parameters()]) for c in loop.clients])
            models = played.after.models.unflatten(0, (2, -1))[replicate]
            torch.testing.assert_close(models, rows, rtol=0, atol=1e-10)
    memory = played.report.memory.clients
    for replicate, loop in enumerate(loops):
        for client in range(len(SIZES)):
            found = memory["prototypes"].unflatten(0, (2, -1))[replicate, client]
            for label, prototype in loop.prototypes.items():
                torch.testing.assert_close(found[label], prototype, rtol=0, atol=1e-10)
    sums = played.report.client_memory("class sums")
    assert sums.shape == (len(played.report.cohort), 4, 3)
    assert torch.equal(played.report.client_memory("class counts").sum(1).cpu(), torch.tensor(
        [2.0 * SIZES[i] for i in played.report.cohort.client_index.tolist()], dtype=torch.float64
    ))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", [net, normalised], ids=["plain", "batch normalisation"])
@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize(
    "rule", [lambda **o: MOON(0.0, **o), lambda **o: FedNTD(0.0, **o), lambda **o: FedProto(0.0, **o)]
)
def test_without_the_penalty_it_is_fedavg_bit_for_bit(rule, executor, model, simulation_of):
    options, local = {"executor": executor, "model": model, "rounds": 3}, LOCAL | {"drop_last": True}
    plain = simulation_of(SGD(**local), **options).run().state.model
    assert torch.equal(simulation_of(rule(**local), **options).run().state.model, plain)


@pytest.mark.slow
def test_moon_has_no_gradient_in_the_first_round(simulation_of):
    """There the last model is the one that everybody received."""
    first, second = ({"rounds": rounds} for rounds in (1, 2))
    plain = simulation_of(SGD(**LOCAL), **first).run().state.model
    torch.testing.assert_close(simulation_of(MOON(5.0, **LOCAL), **first).run().state.model, plain, rtol=0, atol=1e-13)
    plain = simulation_of(SGD(**LOCAL), **second).run().state.model
    assert not torch.allclose(simulation_of(MOON(5.0, **LOCAL), **second).run().state.model, plain, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_the_last_model_of_moon_has_its_running_statistics(executor, simulation_of, play):
    simulation = simulation_of(MOON(2.0, **LOCAL | {"drop_last": True}), executor, normalised)
    for played in play(simulation, 2):
        rows = played.report.end_rows_with_private_columns
        assert torch.equal(played.report.client_memory("last model"), rows)
    assert simulation.model.statistics


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_executors_agree_where_models_of_comparison_are_evaluated(name, simulation_of):
    """Batch normalisation with the running statistics of those models, and no dropout in them."""

    def model(shape: tuple[int, ...], classes: int) -> nn.Module:
        head = nn.Sequential(nn.Dropout(0.3), nn.Linear(6, classes))
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), head)

    rule = RULES[name][0]
    ends = [
        simulation_of(rule(drop_last=True), executor, model, rounds=3).run().state.model
        for executor in ("vmap", "loop")
    ]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_the_divergence_leaves_out_the_true_class():
    """Scores of the true class do not matter, and equal scores of the others give 0, whatever they have in common."""
    draw = torch.Generator().manual_seed(0)
    teacher, labels = torch.randn(5, 4, generator=draw, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3])
    output = teacher + torch.randn(5, 1, generator=draw, dtype=torch.float64)
    output = output.scatter_add(1, labels[:, None], torch.randn(5, 1, generator=draw, dtype=torch.float64))
    torch.testing.assert_close(
        not_true_divergence(output, teacher, labels), torch.zeros(5).double(), rtol=0, atol=1e-12
    )
    assert bool((not_true_divergence(torch.randn_like(output), teacher, labels) > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_replicates_are_the_same_alone_and_together(name, simulation_of, Scripted):
    rule = RULES[name][0]
    together = simulation_of(rule()).run().state.model
    for replicate, seed in enumerate((3, 5)):
        alone = Simulation(
            labelled(), net, clients=len(SIZES), seeds=(seed,), local=rule(), rounds=len(COUNTS),
            availability=Scripted(COUNTS[:, replicate : replicate + 1]), execution=Execution("vmap", dtype="float64"),
        )  # fmt: skip
        torch.testing.assert_close(alone.run().state.model[0], together[replicate], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_is_the_uninterrupted_one(name, simulation_of, tmp_path):
    rule = RULES[name][0]
    whole = simulation_of(rule()).run().state.model
    simulation_of(rule(), rounds=3).run(out=tmp_path)
    resumed = simulation_of(rule()).run(out=tmp_path, resume=True).state.model
    assert torch.equal(resumed, whole)


@pytest.mark.slow
def test_features_may_be_the_outputs_of_a_named_layer(simulation_of):
    named = simulation_of(MOON(features="3", **LOCAL), rounds=2).run().state.model
    default = simulation_of(MOON(**LOCAL), rounds=2).run().state.model
    assert torch.equal(named, default)
    other = simulation_of(MOON(features="1", **LOCAL), rounds=2).run().state.model
    assert not torch.allclose(other, default)


def test_fedproto_sends_class_means(simulation_of):
    simulation = simulation_of(FedProto(**LOCAL), strategy=LocalOnly())
    assert (simulation.traffic.bytes_down, simulation.traffic.bytes_up) == (8 * 4 * 3, 8 * (4 * 3 + 4))


class Twice(nn.Module):
    """Uses its last linear layer two times."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.last(self.first(x))))


@pytest.mark.parametrize(
    ("rule", "model", "message"),
    [
        (lambda: MOON(features="layers.7"), MLP, r"local\.features='layers\.7' is not a layer of MLP.*did you mean"),
        (lambda: MOON(), Linear, r"local=moon trains features, but the input of layer 'layer' of Linear"),
        (lambda: MOON(), Twice, r"local=moon needs a layer that is used once.*is used 2 times"),
        (lambda: FedProto(features="0"), lambda shape, classes: nn.Sequential(nn.Identity(), nn.Linear(4, classes)),
         r"local=fedproto trains features, but the output of layer '0'"),
    ],
)  # fmt: skip
def test_unsuitable_models_are_refused(rule, model, message, simulation_of):
    with pytest.raises(ConfigError, match=message):
        simulation_of(rule(), model=model)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda: MOON(), r"local\.features must name the layer.*Mean has no linear layer"),
        (lambda: FedNTD(), r"local=fedntd distils.*dataset=quadratics has no class label for each sample"),
    ],
)
def test_data_without_classes_or_features_are_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        Simulation(Quadratics(clients=2, points=[0.0, 1.0]), Mean, clients=2, local=rule())


def test_fedproto_refuses_data_without_classes():
    data = Dataset("pairs", torch.randn(8, 4), torch.randn(8, 1))
    with pytest.raises(ConfigError, match=r"local=fedproto averages.*dataset=pairs has no class label"):
        Simulation(data, MLP, clients=2, local=FedProto(), loss="squared")
