"""A user's loss, per sample or over the batch: FedAvg with it equals one written by hand, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import RATE, by_hand, samples, simulation_of
from torch import Tensor, nn

from fedsim import ConfigError, Execution
from fedsim.local import SGD
from fedsim.models.user_loss import resolve_user_loss

WORK = SGD(lr=RATE, epochs=2, batch_size=5, drop_last=False)  # clients of 7, 5 and 9 samples: batches of 5, 4 and 2


def cox(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The negative partial likelihood, with the first input as the time of the event."""
    risk, time = output[:, 0], batch["x"][:, 0]
    at_risk = time[None, :] >= time[:, None]
    return -(risk - risk[None, :].masked_fill(~at_risk, -torch.inf).logsumexp(1)).mean()


def supervised_contrastive(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    z = F.normalize(output, dim=1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf).log_softmax(1)
    alike = (batch["y"][:, None] == batch["y"]) & ~torch.eye(len(z), dtype=torch.bool)
    return -(scores.nan_to_num(neginf=0.0) * alike).sum(1).div(alike.sum(1).clamp(min=1)).mean()


def ranknet(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    difference = output[:, :1] - output[:, :1].T
    return F.softplus(-difference * (batch["y"][:, None] > batch["y"])).mean()


def listnet(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return -(batch["y"].to(output.dtype).softmax(0) * output[:, 0].log_softmax(0)).sum()


def vicreg(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    centred = output - output.mean(0)
    return F.relu(1 - (centred.square().mean(0) + 1e-4).sqrt()).mean() + 0.1 * (centred.T @ centred).square().mean()


def per_sample_of_the_batch(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """One number per sample, which depends on the others all the same."""
    return F.cross_entropy(output - output.mean(0), batch["y"], reduction="none")


class Focal:
    """A callable object, per sample."""

    def __call__(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(output, batch["y"], reduction="none")
        return (1 - (-losses).exp()).square() * losses


class SmoothedCrossEntropy(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__(label_smoothing=0.1)


def with_target(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    return lambda output, batch: loss(output, batch["y"])


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))
WEIGHTED_DOUBLE = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
# What the user gives, and the same as a function of output and batch.
RIGHT: dict[str, tuple[Any, Callable[[Any, dict[str, Tensor]], Tensor]]] = {
    "F.cross_entropy": (F.cross_entropy, with_target(F.cross_entropy)),
    "nn.CrossEntropyLoss()": (nn.CrossEntropyLoss(), with_target(F.cross_entropy)),
    "nn.CrossEntropyLoss": (nn.CrossEntropyLoss, with_target(F.cross_entropy)),
    "weighted classes": (WEIGHTED, with_target(WEIGHTED_DOUBLE)),
    "a class": (SmoothedCrossEntropy, with_target(SmoothedCrossEntropy())),
    "output and target": (lambda output, y: F.cross_entropy(output, y), with_target(F.cross_entropy)),
    "an object": (Focal(), lambda output, batch: Focal()(output, batch).mean()),
    "cox": (cox, cox),
    "supervised contrastive": (supervised_contrastive, supervised_contrastive),
    "ranknet": (ranknet, ranknet),
    "listnet": (listnet, listnet),
    "vicreg": (vicreg, vicreg),
    "a constant in a global": (
        lambda output, batch: smoothed_by_a_constant(output, batch),
        lambda o, b: F.cross_entropy(o, b["y"], label_smoothing=0.1),
    ),
    "relabels its own batch": (
        lambda output, batch: relabelling(output, batch), lambda o, b: F.cross_entropy(o, (b["y"] + 1) % 3),
    ),
    "per sample of the batch": (per_sample_of_the_batch, lambda o, b: per_sample_of_the_batch(o, b).mean()),
}  # fmt: skip
QUICK = ("auto", "vmap", "loop")


@pytest.mark.parametrize("name", RIGHT)
def test_fedavg_with_a_users_loss_is_that_written_by_hand(name: str) -> None:
    given, loss = RIGHT[name]
    expected: list[nn.Module] | None = None
    for executor in QUICK:
        execution = Execution(executor, dtype="float64")
        simulation = simulation_of(lambda: nn.Linear(4, 3), loss=given, local=WORK, execution=execution)
        result = simulation.run()
        build = lambda: nn.Linear(4, 3)  # noqa: E731
        expected = by_hand(simulation, build, loss=loss) if expected is None else expected
        data = samples()
        for r, server in enumerate(expected):
            row = torch.cat([p.detach().reshape(-1) for p in server.parameters()])
            torch.testing.assert_close(result.state.model[r], row, rtol=0, atol=1e-12, msg=f"{name}, {executor}")
            with torch.no_grad():
                batch = {"x": data.test_x, "y": data.test_y}
                on_test = loss(server.eval()(data.test_x), batch).item()
                held = [data.owners == client for client in range(3)]
                each = [loss(server(data.train_x[h]), {"x": data.train_x[h], "y": data.train_y[h]}) for h in held]
            assert result.history[-2 + r]["test_loss"] == pytest.approx(on_test, abs=1e-12)
            on_train = float(sum(each)) / len(each)  # clients weigh the same
            assert result.history[-2 + r]["train_loss"] == pytest.approx(on_train, rel=1e-6)


class TwoHeads(nn.Module):
    """Two outputs in training; in evaluation too if `always`, else the first alone, as GoogLeNet's."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.one, self.two, self.always = nn.Linear(4, 3), nn.Linear(4, 3), always

    def forward(self, x: Tensor) -> Any:
        return {"one": self.one(x), "two": self.two(x)} if self.training or self.always else self.one(x)


@pytest.mark.parametrize(("loss", "mixes"), [(Focal(), False), (per_sample_of_the_batch, True), (vicreg, True)])
def test_whether_a_loss_mixes_samples_is_found_out(loss: Any, mixes: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(6, 3, generator=draw), "y": torch.arange(6) % 3}
    output = torch.randn(6, 3, generator=draw)
    resolved = resolve_user_loss(loss, output, batch, "test", torch.device("cpu"), torch.float32)
    assert resolved.mixes_samples == mixes


def both_heads(output: Any, batch: dict[str, Tensor]) -> Tensor:
    if isinstance(output, Tensor):
        return F.cross_entropy(output, batch["y"], reduction="none")
    return sum(F.cross_entropy(head, batch["y"], reduction="none") for head in output.values())


@pytest.mark.parametrize("always", [True, False])
def test_a_loss_takes_several_heads(always: bool) -> None:
    simulation = simulation_of(lambda: TwoHeads(always), loss=both_heads, local=WORK)
    result = simulation.run()
    servers = by_hand(simulation, lambda: TwoHeads(always), loss=lambda o, b: both_heads(o, b).mean())
    for r, server in enumerate(servers):
        row = torch.cat([p.detach().reshape(-1) for p in server.parameters()])
        torch.testing.assert_close(result.state.model[r], row, rtol=0, atol=1e-12)
        with torch.no_grad():
            on_test = both_heads(server.eval()(samples().test_x), {"y": samples().test_y}).mean().item()
        assert result.history[-2 + r]["test_loss"] == pytest.approx(on_test, abs=1e-12)
        assert ("test_accuracy" in result.history[-1]) is not always  # a dictionary is no score of classes


def test_a_head_of_training_alone_is_named_and_left_out_in_evaluation() -> None:
    simulation = simulation_of(lambda: TwoHeads(False), output="one", local=WORK)
    result = simulation.run()
    servers = by_hand(simulation, lambda: TwoHeads(False), loss=lambda o, b: F.cross_entropy(o["one"], b["y"]))
    row = torch.cat([p.detach().reshape(-1) for p in servers[0].parameters()])
    torch.testing.assert_close(result.state.model[0], row, rtol=0, atol=1e-12)


def noisy(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output + 0.1 * torch.randn_like(output), batch["y"], reduction="none")


def test_random_numbers_of_a_loss_belong_to_client_and_step() -> None:
    """Whatever the executor, the chunk, the workers and the state of the global stream."""
    ended = []
    for number, execution in enumerate((Execution("loop", workers=2), Execution("vmap", chunk=2), Execution())):
        torch.manual_seed(number)
        simulation = simulation_of(lambda: nn.Linear(4, 3), loss=noisy, local=WORK, execution=execution)
        ended.append(simulation.run().state.model)
    torch.testing.assert_close(ended[0], ended[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(ended[0], ended[2], rtol=0, atol=1e-6)


class WithParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.scale * output, target)


def in_place(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.mul_(2), batch["y"], reduction="none")


def raising(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    raise AssertionError("no such thing")


def target_first(target: Tensor, output: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


class Counting(nn.Module):
    """A loss with memory, in an attribute or in a buffer, that matters from call `first` on."""

    def __init__(self, first: int = 0, buffer: bool = False) -> None:
        super().__init__()
        self.first = first
        if buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = 0

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, batch["y"], reduction="none") * (1 + 0.1 * max(0, int(self.calls) - self.first))


FIRST: dict[str, Any] = {}


class Remembered:
    prior: ClassVar[Tensor | None] = None


def balanced_by_the_first_batch(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Class weights of the first batch it meets, kept in a global."""
    counts = FIRST.setdefault("counts", 1 + torch.bincount(batch["y"], minlength=3))
    return F.cross_entropy(output, batch["y"], weight=(1 / counts).to(output), reduction="none")


def centred_by_the_first_output(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean output of the first batch, kept in a class."""
    if Remembered.prior is None:
        Remembered.prior = output.detach().mean(0)
    return F.cross_entropy(output - Remembered.prior, batch["y"], reduction="none")


def relabelling(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """It puts another target into its batch, which accuracies must not get."""
    batch["y"] = (batch["y"] + 1) % 3
    return F.cross_entropy(output, batch["y"], reduction="none")


def smoothed_by_a_constant(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """A constant that is computed when it is first needed, which every batch gives alike."""
    smooth = FIRST.setdefault("eye", 0.9 * torch.eye(3, dtype=torch.float64) + 0.1 / 3).to(output)
    return -(smooth[batch["y"]] * output.log_softmax(1)).sum(1)


REFUSED: dict[str, tuple[Any, str]] = {
    "weights of the first batch in a global": (balanced_by_the_first_batch, "keeps in global 'FIRST'"),
    "mean of the first batch in a class": (centred_by_the_first_output, r"keeps in Remembered\.prior what it computed"),
    "counts its calls": (Counting(), "model.loss=Counting keeps in calls what it computed from an earlier batch"),
    "counts its calls, which matters late": (Counting(30), "model.loss=Counting keeps in calls what it computed"),
    "counts its calls, matters much later": (Counting(900), "model.loss=Counting keeps in calls what it computed"),
    "counts its calls in a buffer": (Counting(buffer=True), "model.loss=Counting keeps in calls what it computed"),
    "a float": (lambda output, batch: 0.5, "returns float, not a tensor"),
    "nothing": (lambda output, batch: None, "returns None, not a tensor"),
    "a tuple": (lambda output, batch: (output.sum(), 1), "returns tuple, not a tensor"),
    "several per sample": (lambda output, batch: output, r"returns shape \[\d, 3\]"),
    "a number that is no function of the output": (
        lambda output, batch: torch.ones(len(output), requires_grad=True), "has no gradient",
    ),
    "writes what is there the second time": (
        lambda output, y: F.cross_entropy(output, y.clamp_(max=1)), "writes into the model's output or the batch",
    ),
    "writes into batches of four": (
        lambda output, y: F.cross_entropy(output.mul_(2) if len(output) == 4 else output, y), "writes into the model's",
    ),
    "no gradient": (lambda output, batch: output.detach().square().mean(1), "has no gradient"),
    "its own parameters": (WithParameters(), "WithParameters has parameters of its own"),
    "numpy's noise": (lambda output, batch: output.sum(1) * np.random.normal(), "draws random numbers that cannot"),  # noqa: NPY002
    "writes": (in_place, "in_place writes into the model's output"),
    "raises": (raising, "raising raised AssertionError: no such thing"),
    "target first": (target_first, "takes 'target' first"),
    "unknown entry": (lambda output, batch: batch["mask"], "needs 'mask', which dataset=toy does not have"),
    "no function": (5, "5"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_used_is_refused_in_a_sentence(name: str) -> None:
    given, sentence = REFUSED[name]
    for _ in range(2):  # a second attempt finds what the first found
        with pytest.raises(ConfigError, match=sentence) as refused:
            simulation_of(lambda: nn.Linear(4, 3), loss=given, local=WORK)
    assert "\n" not in str(refused.value)


def test_a_loss_that_penalises_the_given_module_is_refused() -> None:
    """Clients train copies: the gradient of the penalty would reach none of them."""
    module = nn.Linear(4, 3)

    def penalised(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch["y"]) + 0.5 * module.weight.square().sum().to(output)

    for given in (module, lambda: module):
        with pytest.raises(ConfigError, match="has a gradient with respect to parameters of the module"):
            simulation_of(given, loss=penalised, local=WORK)


def test_a_teacher_in_a_closure_is_no_part_of_the_model() -> None:
    """Distillation without detach: the teacher's parameters have gradients, and nobody steps along them."""
    teacher = nn.Linear(4, 3).double()

    def distilled(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.kl_div(output.log_softmax(1), teacher(batch["x"].double()).softmax(1).to(output), reduction="sum")

    simulation = simulation_of(lambda: nn.Linear(4, 3), loss=distilled, local=WORK)
    result = simulation.run()
    for r, server in enumerate(by_hand(simulation, lambda: nn.Linear(4, 3), loss=distilled)):
        row = torch.cat([p.detach().reshape(-1) for p in server.parameters()])
        torch.testing.assert_close(result.state.model[r], row, rtol=0, atol=1e-12)
