"""Event-driven runs: laws of the queue, the synchronous special case, checkpoints, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from timed import QUIET, SEEDS, SIZES, column, run_of

from fedsim import ConfigError, Execution
from fedsim.availability import Bernoulli, Multiset, Uniform
from fedsim.availability.clock import ConstantDelay, Devices, Events, UniformWork
from fedsim.core.ranks import ProcessRanks
from fedsim.data.contamination import FeatureNoise
from fedsim.local import APFL, SGD
from fedsim.run.event_queue import EventQueue, StartCandidates
from fedsim.run.together import run_together
from fedsim.strategies import FedAsync, FedAvg, FedAvgKnown, FedBuff, FedNova, FedPBC

RATES = np.array([0.4, 0.7, 1.0, 1.6, 3.3])  # updates per second of each client
INFINITE = np.full(len(RATES), np.inf)


def simulate(updates: int, limit: int | None = None):
    """Who arrives at each server update, when, and the version of its model; exponential times, one arrival a step."""
    draw, queue, began = np.random.default_rng(4), EventQueue(), {}
    arrivals, times, staleness, in_flight = [], [], [], []
    for t in range(updates):
        idle = draw.permutation([i for i in range(len(RATES)) if i not in began])
        seconds = draw.exponential(1 / RATES)
        step = queue.advance_until_update(StartCandidates(idle, seconds[idle], INFINITE[: len(idle)]), 1, limit)
        began |= dict.fromkeys(step.started_clients, t)
        (client,) = step.aggregated_clients
        arrivals.append(client)
        times.append(queue.current_time)
        staleness.append(t - began.pop(client))
        in_flight.append(len(queue.events))
    return np.array(arrivals), np.array(times), np.array(staleness), np.array(in_flight)


def test_staleness_and_shares_of_busy_clients_follow_their_laws():
    """Exponential times, everybody busy: client i has the share q_i = μ_i / Λ of arrivals, P(τ = k) = q_i (1 − q_i)^k,
    and the mean staleness is m − 1 whatever the speeds; Λ updates per second."""
    updates = 40_000
    arrivals, times, staleness, _ = simulate(updates)
    shares = RATES / RATES.sum()
    assert np.bincount(arrivals) / updates == pytest.approx(shares, abs=0.008)
    assert staleness.mean() == pytest.approx(len(RATES) - 1, rel=0.02)
    assert updates / times[-1] == pytest.approx(RATES.sum(), rel=0.02)
    for client, q in enumerate(shares):
        own = staleness[arrivals == client]
        assert own.mean() == pytest.approx((1 - q) / q, rel=0.05)
        for k in range(4):
            assert (own == k).mean() == pytest.approx(q * (1 - q) ** k, abs=0.015)


def test_with_a_limit_of_clients_in_flight_the_mean_staleness_is_one_less():
    _, _, staleness, in_flight = simulate(20_000, limit=3)
    assert set(in_flight) == {2}  # at an arrival, of three
    assert staleness.mean() == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("limit", [2, 4])
def test_throughput_obeys_littles_law(limit):
    """Updates per second × mean time from start to arrival = clients in flight, of which there are always `limit`."""
    draw, queue, duration, seconds = np.random.default_rng(7), EventQueue(), {}, []
    for _ in range(5000):
        idle = draw.permutation([i for i in range(len(RATES)) if i not in duration])
        drawn = draw.lognormal(0.0, 1.0, len(RATES)) / RATES
        step = queue.advance_until_update(StartCandidates(idle, drawn[idle], INFINITE[: len(idle)]), 1, limit)
        duration |= {client: drawn[client] for client in step.started_clients}
        seconds.append(duration.pop(step.aggregated_clients[0]))
    assert len(seconds) / queue.current_time * np.mean(seconds) == pytest.approx(limit, rel=0.01)


def test_a_queue_that_is_empty_ends_at_once_or_at_the_deadline():
    nobody = StartCandidates(np.zeros(0, int), np.zeros(0), np.zeros(0))
    queue = EventQueue(3.0)
    assert (queue.advance_until_update(nobody, 2).aggregated_clients, queue.current_time) == ([], 3.0)
    assert (queue.advance_until_update(nobody, 2, deadline=1.5).aggregated_clients, queue.current_time) == ([], 4.5)


def test_a_buffer_that_is_not_full_waits_and_an_arrival_at_the_deadline_counts():
    queue = EventQueue()
    pair = StartCandidates(np.array([4, 7]), np.array([2.0, 1.0]), np.array([np.inf, 0.25]))
    step = queue.advance_until_update(pair, 2)  # 7 fails after 0.25 seconds
    assert (step.started_clients, step.failing_clients, step.aggregated_clients) == ([4, 7], [7], [])
    assert (queue.buffered_clients, queue.current_time) == ([4], 2.0)
    more = StartCandidates(np.array([1, 2]), np.array([1.0, 1.5]), np.array([np.inf, np.inf]))
    late = copy.deepcopy(queue).advance_until_update(more, 4, deadline=1.0)
    assert late.aggregated_clients == [4, 1]
    assert queue.advance_until_update(more, 2).aggregated_clients == [4, 1]
    assert queue.current_time == 3.0
    assert [entry[1] for entry in queue.events] == [2]


SYNCHRONOUS = {
    "all": {},
    "server": {"server": 0.3},
    "deadline": {"deadline": 1.0},
    "partial work": {"deadline": 1.0, "late": "partial"},
    "the first": {"first": 2, "deadline": 1.2},
    "links": {"down": 100.0, "up": 30.0, "link_spread": 0.5},
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_synchronous_strategy_has_the_numbers_of_devices_bit_for_bit(build, name):
    times = {"compute": 0.05, "compute_spread": 0.7, "jitter": 0.8} | SYNCHRONOUS[name]
    counts = (np.random.default_rng(1).random((6, 2, 4)) < 0.7).astype(np.int8)
    counts[2] = 0
    for strategy, options in ((FedAvg(), {}), (FedNova(), {"work": UniformWork()})):
        events, devices = (
            run_of(build(counts, strategy, clock=clock(**times), **options)) for clock in (Events, Devices)
        )
        assert torch.equal(events.state.model, devices.state.model)
        for one, other in zip(events.history, devices.history, strict=True):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
    if times.keys() & {"deadline", "first"} and times.get("late") != "partial":
        assert len({row["late_clients"] for row in events.history}) > 1


def test_failing_clients_of_a_synchronous_round_are_absent_and_nobody_waits_for_them(build):
    result = run_of(build(clock=Events(0.1, failure=0.5), rounds=6))
    active = np.array(column(result, "active_clients")[1:])
    assert 0 < active.sum() < 24
    assert np.array_equal(active + column(result, "late_clients")[1:], np.full(6, 4))
    assert (np.diff(column(result, "virtual_seconds")) <= 4.0 + 1e-9).all()  # the slowest takes 4 seconds
    assert run_of(build(clock=Events(0.1, failure=1.0), rounds=6)).state.model.isfinite().all()


def test_clients_that_rejoin_lose_time_and_no_work(build):
    """Nobody is absent; a round ends with the slowest client, pauses included, which are exponential on average."""
    clock = Events(0.1, failure=0.5, rejoin=2.0)
    result = run_of(build(clock=clock, rounds=6))
    assert torch.equal(result.state.model, run_of(build(rounds=6)).state.model)
    assert column(result, "late_clients") == [0] * 7
    clock, work = build(clock=clock).round_clock.clock, 0.1 * 5 * np.array(SIZES)
    ends = [work + clock.pause_seconds(t, np.arange(4)) for t in range(6)]
    assert np.diff(column(result, "virtual_seconds")) == pytest.approx(np.max(ends, axis=1))
    pauses = np.concatenate([clock.pause_seconds(t, np.arange(8)) for t in range(2000)])
    assert (pauses > 0).mean() == pytest.approx(0.5, abs=0.02)  # five standard errors, as below
    assert pauses[pauses > 0].mean() == pytest.approx(2.0, rel=0.056)
    assert np.isinf(clock.failure_fractions(3, np.arange(8))).all()
    with pytest.raises(ConfigError, match="has a deadline and clients that pause"):
        build(Bernoulli(Uniform(0.5)), strategy=FedAvgKnown(), clock=Events(failure=0.1, rejoin=1.0, deadline=2.0))


def test_without_deadline_or_with_a_late_one_it_waits_for_all_and_is_fedavg_without_a_clock(build):
    without_clock = run_of(build()).state.model
    for deadline in (None, 1e9):
        assert torch.equal(run_of(build(clock=Events(0.1, deadline=deadline))).state.model, without_clock)
        assert torch.equal(run_of(build(clock=Devices(0.1, deadline=deadline))).state.model, without_clock)


ASYNCHRONOUS = {
    "fedasync": (FedAsync, {}),
    "fedbuff": (lambda: FedBuff(2), {"failure": 0.3, "concurrency": 3}),
    "fedavg": (FedAvg, {"arrivals": 2, "deadline": 0.3}),
    "shared": (
        lambda: FedBuff(2),
        {"failure": 0.3, "down": 60.0, "shared_down": 70.0, "shared_up": 50.0, "server": 0.2},
    ),
}


def killed_in_round(simulation, t: int, out) -> None:
    """Run in a child that ends by SIGKILL in the aggregation of round t; a checkpoint is written after each round."""
    child = os.fork()
    if not child:
        aggregate = simulation.strategy.aggregate

        def until(state, report, now):
            if now == t:
                os.kill(os.getpid(), signal.SIGKILL)
            return aggregate(state, report, now)

        simulation.strategy.aggregate = until
        simulation.run(out=out, tracking=dataclasses.replace(QUIET, checkpoint_every=1))
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_run_that_is_killed_and_resumed_is_the_uninterrupted_one_bit_for_bit(build, tmp_path, name):
    strategy, settings = ASYNCHRONOUS[name]

    def simulation():
        how = Execution(dtype="float64", memory="host" if name == "fedbuff" else "device")
        counts, clock = np.ones((9, 2, 4), dtype=np.int8), Events(0.1, jitter=1.0, **settings)
        rule = {"batch_size": 2}
        return build(counts, strategy(), rule=rule, clock=clock, work=UniformWork(), execution=how, rounds=9)

    killed_in_round(simulation(), 5, tmp_path / "a")
    stopped = load_file(tmp_path / "a" / "checkpoint.safetensors")
    assert len(stopped["queue.at"]) > 0  # clients were in flight
    resumed = run_of(simulation(), out=tmp_path / "a", resume=True)
    uninterrupted = run_of(simulation(), out=tmp_path / "b")
    assert torch.equal(resumed.state.model, uninterrupted.state.model)
    assert len(resumed.history) == 20
    for column_name in ("virtual_seconds", "late_clients", "samples", "total_bytes_down", "update_staleness"):
        np.testing.assert_array_equal(*(column(result, column_name) for result in (resumed, uninterrupted)))
    one, other = (load_file(tmp_path / name / "checkpoint.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_replicate_has_the_numbers_that_it_has_alone(build):
    counts = np.ones((6, 2, 4), dtype=np.int8)
    clock = Events(0.1, compute_spread=0.5, jitter=1.0, concurrency=2)
    both = run_of(build(counts, FedAsync(), rule={"batch_size": 2}, clock=clock))
    alone = run_of(build(counts[:, 1:], FedAsync(), rule={"batch_size": 2}, clock=clock, seeds=SEEDS[1:]))
    assert torch.allclose(both.state.model[1], alone.state.model[0], atol=1e-13, rtol=0)
    times = (column(result, "virtual_seconds", SEEDS[1]) for result in (both, alone))
    assert next(times) == next(times)
    assert column(both, "virtual_seconds", SEEDS[0]) != column(both, "virtual_seconds", SEEDS[1])


def test_runs_in_lockstep_have_the_numbers_that_they_have_alone(build):
    def simulation(lr):
        clock = Events(0.1, jitter=1.0)
        return build(strategy=FedAsync(), rule={"lr": lr, "batch_size": 2}, clock=clock)

    rates = (0.02, 0.01)
    together = run_together([simulation(lr) for lr in rates])
    for lr, result in zip(rates, together, strict=True):
        assert torch.allclose(result.state.model, run_of(simulation(lr)).state.model, atol=1e-12, rtol=0)


def test_local_rules_with_memory_of_clients_are_computed_at_the_start(build):
    simulation = build(strategy=FedAsync(), clock=Events(0.1, jitter=1.0), local=APFL(lr=0.02, steps=2, batch_size=2))
    assert not simulation.delayed_updates.is_computed_lazily
    assert run_of(simulation).state.model.isfinite().all()
    assert not build(
        strategy=FedAsync(), clock=Events(), contamination=FeatureNoise(0.1)
    ).delayed_updates.is_computed_lazily
    assert build(strategy=FedAsync(), clock=Events(), local=SGD()).delayed_updates.is_computed_lazily


def test_bytes_and_staleness_are_counted(build):
    result = run_of(build(strategy=FedAsync(), clock=Events(0.1)))  # rounds of 2, 1, 4 and 3 seconds
    assert column(result, "virtual_seconds") == pytest.approx([0, 1, 2, 2, 3, 3, 4])  # clients 1, 0, 1, 1, 3, 0
    assert column(result, "active_clients") == [0, 1, 1, 1, 1, 1, 1]
    assert column(result, "update_staleness")[1:] == [0, 1, 1, 0, 4, 3]  # updates since each started
    sent, received = np.array([0, 4, 5, 6, 7, 8, 9]), np.arange(7)
    assert column(result, "total_bytes_down") == (sent * 32).tolist()
    assert column(result, "total_bytes_up") == (received * 32).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clock": Events(arrivals=2), "strategy": FedPBC()}, "is not defined for updates that started"),
        ({"clock": Events(arrivals=2), "strategy": FedAsync()}, r"clock\.arrivals=2, but .* steps after 1"),
        ({"clock": Events(), "strategy": FedBuff(5)}, "steps after 5 arrivals .* each of clients=4 sends one"),
        ({"clock": Events(first=2), "strategy": FedAsync()}, r"clock\.first=2 is for a server that waits"),
        ({"clock": Events(deadline=2.0), "strategy": FedBuff(2)}, r"clock\.deadline=2 ends the wait of a server"),
        ({"clock": Events(), "strategy": FedAsync(), "delay": ConstantDelay(1)}, "clock=events both determine"),
        ({"clock": Events(), "strategy": FedBuff(2), "on_nonfinite": "drop_client"}, "on_nonfinite=drop_client"),
        ({"clock": Events(arrivals=2), "counts": Multiset(2)}, "availability=multiset selects clients several times"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_refused_in_a_sentence(build, options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_several_ranks_are_refused(build):
    delivery = build(strategy=FedAsync(), clock=Events()).delayed_updates
    delivery.federation = dataclasses.replace(delivery.federation, ranks=ProcessRanks(0, 2))
    with pytest.raises(ConfigError, match="clock=events runs in one process, and there are 2 ranks"):
        delivery.setup()
