"""Captured steps (trainer.compile=graph), where what a GPU does is done by calling the recorded operations again."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from stackable_models import MODELS, simulation_of
from test_replay import COMPOSITIONS, WORK, Counting, Promised, labelled, means
from torch import Tensor

from fedsim import Execution
from fedsim.core import ConfigError
from fedsim.local import SGD
from fedsim.trainer import choose, replay, vmap_executor
from fedsim.trainer.captures import GraphReplay
from fedsim.trainer.cuda_graph import check_graph_capturable


class StandIn:
    """Results lie where they lay when the work was captured, as a CUDA graph's do; so do the arguments it reads."""

    def __init__(self) -> None:
        self.captured, self.replayed = 0, 0

    def __call__(self, work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        self.captured += 1
        results = work()
        inputs = {id(given) for given in work.__closure__[0].cell_contents}
        places = [place for place, out in enumerate(results) if id(out) not in inputs]
        results = [out.clone() if place in places else out for place, out in enumerate(results)]

        def again() -> None:
            self.replayed += 1
            found = work()
            for place in places:
                results[place].copy_(found[place])

        for place in places:
            results[place].fill_(-7)  # a capture computes nothing
        return again, results


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(replay, "RECORDING_COST_IN_CALLS", 2)
    monkeypatch.setattr(choose, "check_graph_capturable", lambda *parts: None)
    monkeypatch.setattr(vmap_executor, "graph_capturer", lambda device: stand_in)
    return stand_in


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_captured_steps_have_the_same_bits(name: str, device: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever varies: rates, keys, who comes, data that answer, rows that finish early."""
    with caplog.at_level(logging.WARNING):
        captured = COMPOSITIONS[name]("graph").run()
    assert ("a step cannot be captured" in caplog.text) == (name == "ProFL")  # whose filter looks at numbers
    assert device.replayed >= device.captured
    assert device.captured or name == "ProFL"
    plain = COMPOSITIONS[name]("never").run()
    assert torch.equal(captured.state.model, plain.state.model)
    for left, right in zip(captured.history, plain.history, strict=True):
        assert left == pytest.approx(right | {"seconds": left["seconds"]}, rel=0, abs=0, nan_ok=True)


def test_arguments_and_results_are_nobody_elses(device: StandIn) -> None:
    calls = []

    def moved(x: Tensor, more: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(len(x))
        return x * more["rate"], {"rate": more["rate"], "twice": x + x}

    function = GraphReplay(moved, 0, capture=device)
    found, given = [], []
    for value in (1.0, 2.0, 3.0):
        x, rate = torch.full((2,), value), torch.full((2,), 10.0)
        found.append(function(x, {"rate": rate}))
        given.append((x, rate))
        x.fill_(-1)
        assert found[-1][1]["rate"] is rate  # handed through, not copied
    assert calls == [2]  # to be recorded
    assert [out[0].tolist() for out in found] == [[10, 10], [20, 20], [30, 30]]
    assert [out[1]["twice"].tolist() for out in found] == [[2, 2], [4, 4], [6, 6]]
    found[0][0].add_(1)
    assert function(torch.ones(2), {"rate": torch.ones(2)})[0].tolist() == [1, 1]
    assert device.captured == 1


def test_strides_of_arguments_may_be_any(device: StandIn) -> None:
    function = GraphReplay(lambda x, y: (x.reshape(-1) + 1, y.sum()), 0, capture=device)
    for shape in ((4, 3), (3, 4)):
        for _ in range(2):
            x, y = torch.rand(shape), torch.rand(3)
            for given in (x, x.t(), x[:, :1].expand(-1, 2)):
                one, two = function(given, y[None].expand(5, 3))
                assert torch.equal(one, given.reshape(-1) + 1)
                torch.testing.assert_close(two, 5 * y.sum())


def test_what_is_held_is_bounded_and_the_oldest_goes_first(device: StandIn) -> None:
    """A call of n rows holds 8n bytes: n of arguments and n of results, four bytes each."""
    function = GraphReplay(lambda x: x * 2, 0, capture=device, most_bytes=8 * 10)

    def held() -> list[int]:
        return [len(kept.inputs[0]) for kept in function._recordings.values()]

    def asked(n: int) -> None:
        x = torch.rand(n)
        assert torch.equal(function(x), x * 2)

    for n in (3, 4, 3):
        asked(n)
    assert held() == [4, 3]
    asked(5)
    assert held() == [3, 5]
    asked(4)  # captured again
    assert held() == [5, 4]
    assert device.captured == 4
    asked(10)
    assert held() == [10]


def test_what_is_too_large_is_not_captured_and_said_once(device: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    function = GraphReplay(lambda x: x * 2, 0, capture=device, most_bytes=8 * 10)
    with caplog.at_level(logging.WARNING):
        for n in (11, 12, 11, 10):
            x = torch.rand(n)
            assert torch.equal(function(x), x * 2)
    assert caplog.text.count("cannot be captured and runs operation by operation (it would hold") == 1
    assert sorted(type(kept).__name__ for kept in function._recordings.values()) == [
        "CapturedCudaGraph",
        "OperationRecording",
        "OperationRecording",
    ]


def test_what_the_device_does_not_take_down_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    def unable(work: Callable[[], list[Tensor]]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    calls = []
    function = GraphReplay(lambda x: (calls.append(0), x * 2)[1], 0, capture=unable)
    with caplog.at_level(logging.WARNING):
        for n in (2, 3, 2, 3):
            x = torch.rand(n)
            assert torch.equal(function(x), x * 2)
    assert caplog.text.count("by operation (operation not permitted when stream is capturing)") == 1
    assert len(calls) == 4  # two shapes, to be captured and then recorded as they are


def test_numbers_of_the_hosts_are_not_frozen(device: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    function = GraphReplay(lambda x, y: x * 2, 0, capture=device)
    with caplog.at_level(logging.WARNING):
        assert function(torch.ones(2), torch.ones(2, device="meta")).tolist() == [2, 2]
    assert "arguments lie on several devices" in caplog.text
    assert not device.captured


def test_what_cannot_be_traced_is_done_as_ever_and_said(device: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    function = GraphReplay(lambda x: x if float(x.sum()) > 0 else -x, 0, capture=device)
    with caplog.at_level(logging.WARNING):
        for value in (1.0, -1.0, 2.0):
            assert function(torch.tensor([value])).tolist() == [abs(value)]
    assert caplog.text.count("trainer.compile=graph: a step cannot be captured") == 1


def test_a_lack_of_memory_lets_go_of_what_was_captured(device: StandIn) -> None:
    trainer = means(SGD(**WORK), compile="graph").trainer
    assert isinstance(trainer.executor._shift_and_step_function, GraphReplay)
    before = trainer.executor
    trainer._halve_chunk(6)
    assert trainer.executor is not before
    assert trainer.executor_choice.chunk == 3
    assert trainer.executor_choice.describe() == "vmap executor, up to 3 rows at once (captured as CUDA graphs)"


def test_where_there_is_no_gpu_or_nothing_to_capture_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.compile=graph needs a GPU, and the device is cpu; use"):
        means(SGD(**WORK), compile="graph")
    simulation = labelled(SGD(**WORK), "never")
    monkeypatch.setattr(simulation.model, "device", torch.device("cuda", 0))
    check_graph_capturable(SGD(**WORK), simulation.model, simulation.shift)
    check_graph_capturable(Promised(**WORK), simulation.model, simulation.shift)
    with pytest.raises(ConfigError, match=r"^trainer\.compile=graph captures steps that do the same operations"):
        check_graph_capturable(Counting(**WORK), simulation.model, simulation.shift)


@pytest.mark.usefixtures("device")
def test_it_is_for_vmapped_steps() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.compile=graph is for trainer\.executor=vmap, not fused"):
        simulation_of(MODELS["mlp"][0], SGD(**WORK), execution=Execution("fused", compile="graph"))
