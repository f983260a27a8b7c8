"""Transfers that share the server's link: closed forms, the law of processor sharing, and a fluid model in a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from timed import column, run_of

from fedsim import ConfigError
from fedsim.availability import Bernoulli, Uniform
from fedsim.availability.clock import Events
from fedsim.run.event_queue import StartCandidates, TransferLoads
from fedsim.run.shared_links import SharedLinkQueue, max_min_fair_rates
from fedsim.strategies import FedAsync, FedAvgKnown, FedBuff

BYTES = 32  # of a transfer of `build`'s model
NOBODY = StartCandidates(np.zeros(0, int), np.zeros(0), np.zeros(0), TransferLoads(0, 0, np.zeros(0), np.zeros(0)))


def test_fair_rates_fill_the_link_and_exceed_no_limit():
    own = np.array([5.0, 1.0, math.inf, 2.0])
    assert max_min_fair_rates(own, 10.0) == pytest.approx([3.5, 1.0, 3.5, 2.0])
    assert max_min_fair_rates(own[:2], 10.0) == pytest.approx([5.0, 1.0])
    assert max_min_fair_rates(np.full(3, math.inf), 6.0) == pytest.approx([2.0, 2.0, 2.0])


def test_a_round_of_simultaneous_transfers_takes_as_long_as_all_of_them_one_after_another(build):
    clock = Events(1e-12, shared_down=100.0, shared_up=40.0)
    times = column(run_of(build(clock=clock)), "virtual_seconds")
    assert np.diff(times) == pytest.approx(np.full(6, 4 * BYTES / 100 + 4 * BYTES / 40), rel=1e-9)


@pytest.mark.slow
def test_a_saturated_link_is_always_in_use(build):
    """All clients transfer at all times: one update per `bytes / capacity` seconds in the long run."""
    result = run_of(build(np.ones((60, 2, 4), dtype=np.int8), FedAsync(), clock=Events(1e-9, shared_up=8.0), rounds=60))
    times = column(result, "virtual_seconds")
    # at the end, what the three other clients have sent of their updates is not counted yet
    assert 60 * BYTES <= 8 * times[-1] * (1 + 1e-6) <= 63 * BYTES


@pytest.mark.slow
def test_a_link_that_is_fast_enough_changes_nothing(build):
    clock = {"compute": 0.1, "jitter": 1.0, "down": 50.0, "up": 20.0, "link_spread": 0.5, "failure": 0.2}
    for strategy in (FedBuff(2), None):
        shared, own = (
            run_of(build(strategy=strategy, clock=Events(**clock, **fast)))
            for fast in ({"shared_down": 1e9, "shared_up": 1e9}, {})
        )
        assert column(shared, "virtual_seconds") == pytest.approx(column(own, "virtual_seconds"), rel=1e-9)
        assert (shared.state.model == own.state.model).all()


def sojourns(sizes: np.ndarray, arrivals: np.ndarray, capacity: float) -> np.ndarray:
    """Seconds that each upload takes."""
    count, queue, sojourn = len(sizes), SharedLinkQueue(upload_capacity=capacity), np.zeros(len(sizes))
    free = np.full(count, math.inf)
    for client in range(count):  # each with its own size
        transfers = TransferLoads(0.0, float(sizes[client]), free[:1], np.array([capacity]))
        one = StartCandidates(
            np.array([client]), arrivals[client] + sizes[client : client + 1] / capacity, free[:1], transfers
        )
        queue.advance_until_update(one, count + 1, deadline=0.0)
    queue.buffered_clients.clear()
    for _ in range(count):
        (client,) = queue.advance_until_update(NOBODY, 1).aggregated_clients
        sojourn[client] = queue.current_time - arrivals[client]
    return sojourn


@pytest.mark.slow
@pytest.mark.parametrize("law", ["constant", "exponential"])
def test_mean_time_of_an_upload_obeys_the_law_of_processor_sharing(law):
    """M/G/1-PS: (b / C) / (1 − ρ), whatever the distribution of sizes; the link is in use a share ρ of the time."""
    draw, count, load = np.random.default_rng(3), 8000, 0.5
    sizes = np.full(count, 2.0) if law == "constant" else draw.exponential(2.0, count)
    arrivals = np.cumsum(draw.exponential(2.0 / 10.0 / load, count))
    times = sojourns(sizes, arrivals, 10.0)
    assert times.mean() == pytest.approx(0.2 / (1 - load), rel=0.06)
    begin, end = np.sort(arrivals), np.sort(arrivals + times)
    in_use = np.sort(np.concatenate([begin, end]))
    present = np.searchsorted(begin, in_use, "right") - np.searchsorted(end, in_use, "right")
    busy = np.diff(in_use)[present[:-1] > 0].sum()
    assert busy * 10.0 == pytest.approx(sizes.sum(), rel=1e-6)  # the link does nothing but send
    assert busy / in_use[-1] == pytest.approx(load, rel=0.05)


def fluid(tasks, order, limit, capacities):
    """(when, client, failed) of tasks [(seconds alone, down, up, own down, own up, fraction)], in a plain loop."""
    time, waiting, active, ends = 0.0, list(order), {}, []
    while waiting or active:
        while waiting and len(active) < limit:
            client = waiting.pop(0)
            seconds, down, up, own_down, own_up, fraction = tasks[client]
            parts = [[0, down, min(own_down, capacities[0])], [1, seconds, 1.0], [2, up, min(own_up, capacities[1])]]
            if fails := math.isfinite(fraction):  # cut what comes after this share of the time alone
                budget = fraction * sum(amount / rate for _, amount, rate in parts)
                for part in parts:
                    part[1] = min(part[1], budget * part[2])
                    budget = max(budget - part[1] / part[2], 0.0)
            active[client] = ([part for part in parts if part[1] > 0], fails)
        rates = dict.fromkeys(active, 1.0)
        for kind, capacity in ((0, capacities[0]), (2, capacities[1])):
            own = {client: parts[0][2] for client, (parts, _) in active.items() if parts[0][0] == kind}
            low, high = 0.0, capacity
            for _ in range(200):  # the level that fills the link
                level = (low + high) / 2
                low, high = (level, high) if sum(min(rate, level) for rate in own.values()) < capacity else (low, level)
            rates |= {client: min(rate, high) for client, rate in own.items()}
        step = min(parts[0][1] / rates[client] for client, (parts, _) in active.items())
        time += step
        for client, (parts, fails) in list(active.items()):
            parts[0][1] -= step * rates[client]
            if parts[0][1] < 1e-9:
                parts.pop(0)
            if not parts:
                ends.append((time, client, fails))
                del active[client]
    return ends


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("limit", [3, 12])
def test_times_as_a_fluid_model_says_in_a_loop(limit, failing):
    draw, count, capacities = np.random.default_rng(5), 12, (9.0, 4.0)
    seconds, own_down, own_up = draw.exponential(1.0, count), draw.uniform(1, 8, count), draw.uniform(0.5, 4, count)
    fraction = np.where(draw.random(count) < 0.5 * failing, draw.random(count), np.inf)
    down, up = 6.0, 5.0
    rates = np.minimum(own_down, capacities[0]), np.minimum(own_up, capacities[1])
    order, duration = draw.permutation(count), down / rates[0] + seconds + up / rates[1]
    tasks = [(seconds[i], down, up, own_down[i], own_up[i], fraction[i]) for i in range(count)]
    expected = fluid(tasks, order, limit, capacities)
    queue, waiting, arrivals = (
        SharedLinkQueue(download_capacity=capacities[0], upload_capacity=capacities[1]),
        list(order),
        [],
    )
    for _ in range(sum(not fails for *_, fails in expected)):
        pick = np.array(waiting, dtype=int)
        transfers = TransferLoads(down, up, rates[0][pick], rates[1][pick])
        step = queue.advance_until_update(StartCandidates(pick, duration[pick], fraction[pick], transfers), 1, limit)
        waiting = [client for client in waiting if client not in step.started_clients]
        arrivals.append((queue.current_time, step.aggregated_clients[0]))
    assert [client for _, client in arrivals] == [client for _, client, fails in expected if not fails]
    assert [time for time, _ in arrivals] == pytest.approx([time for time, _, fails in expected if not fails], rel=1e-8)
    assert failing == any(fails for *_, fails in expected)


def test_what_a_shared_link_excludes_is_refused(build):
    with pytest.raises(ConfigError, match=r"late=partial plans steps before a client starts, .* set late=drop"):
        build(clock=Events(late="partial", deadline=2.0, shared_up=10.0))
    with pytest.raises(ConfigError, match="a deadline and a shared link of the server"):
        build(Bernoulli(Uniform(0.5)), strategy=FedAvgKnown(), clock=Events(deadline=2.0, shared_up=10.0))
