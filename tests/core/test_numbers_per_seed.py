"""Numbers per seed: those of some replicates."""

from __future__ import annotations

from fedsim.core.per_seed import PerSeed, select_replicate_settings
from fedsim.strategies import FedAvgM, FedProx, Strategy


class Holder(Strategy):  # type: ignore[type-arg]
    """A strategy that holds another one."""

    def __init__(self, inner: Strategy) -> None:  # type: ignore[type-arg]
        self.inner, self.factor = inner, PerSeed((1.0, 2.0, 3.0))

    def aggregate(self, state, report, t):  # type: ignore[no-untyped-def]
        return state


def test_an_object_keeps_the_numbers_of_some_replicates_and_so_do_those_inside_it() -> None:
    holder = Holder(FedAvgM(server_lr=[0.1, 0.2, 0.3], momentum=0.5))
    select_replicate_settings(holder, [0, 2], Strategy)
    assert holder.factor == PerSeed((1.0, 3.0))
    assert holder.inner.server_lr == PerSeed((0.1, 0.3))
    assert holder.inner.momentum == 0.5


def test_the_number_of_one_replicate_is_a_number() -> None:
    strategy = FedProx(mu=[0.1, 0.2], server_lr=0.5)
    select_replicate_settings(strategy, (1,), Strategy)
    assert (strategy.mu, strategy.server_lr) == (0.2, 0.5)
