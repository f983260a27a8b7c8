"""capacity=custom: a class of one's own gives the same model as the package's, or one sentence."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import QUICK, configuration

from fedsim.app.build import build
from fedsim.core.errors import ConfigError
from fedsim.models.capacity import Widths

RUN = [*QUICK, "model=mlp", "model.hidden=[6]", "tracking.progress=none", "trainer.trial=false"]


def custom(name: str, *more: str) -> list[str]:
    return [*RUN, "capacity=custom", f"capacity._target_={name}", *more]


def model_of(overrides: list[str], capacity: object = None) -> torch.Tensor:
    run, _, _ = build(configuration(*overrides))
    if capacity is not None:
        assert type(run.components.capacity) is type(capacity)
    return run.run().state.model


@pytest.mark.slow
def test_a_capacity_of_ones_own_is_the_packages_where_it_holds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of even numbers have the second width, as in `EvenClients`."""
    levels = lambda self, federation: (  # noqa: E731
        setattr(self, "ascending", np.array([0.5, 1.0])),
        setattr(self, "level", torch.arange(federation.num_memory_rows) % federation.clients % 2),
    )
    monkeypatch.setattr(Widths, "setup", levels)
    own = model_of(custom("own_capacity.EvenClients"))
    package = model_of([*RUN, "capacity=heterofl", "capacity.widths=[1.0,0.5]"], Widths())
    assert torch.equal(own, package)
    assert not torch.equal(own, model_of(RUN))
    assert not torch.equal(own, model_of(custom("own_capacity.EvenClients", "+capacity.share=0.9")))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*RUN, "capacity=custom"], "capacity._target_ is missing; set capacity._target_=package.module.Class"),
        (custom("own_capacity.Nobody"), "own_capacity.Nobody"),
        (custom("fedsim.strategies.FedAvg"), "FedAvg' is not a Capacity that configurations may build"),
        (custom("own_capacity.EvenClients", "+capacity.share=2"), "capacity.share=2 must lie between 0 and 1"),
        (custom("own_capacity.EvenClients", "+capacity.widths=[1]"), "capacity: .*widths"),
        (custom("own_capacity.EvenClients", "strategy=scaffold"), "gives clients a part of the model, and strategy="),
        ([*QUICK, "capacity=custom", "capacity._target_=own_capacity.EvenClients"], "hidden layer"),
        (custom("own_capacity.OneSet"), "capacity=OneSet: held_channels, in round 0, must return sets of channels"),
        (custom("own_capacity.Drawn"), "capacity=Drawn.*draws from a global random stream"),
        (custom("own_capacity.Counted"), "capacity=Counted: .* differs when the same rounds are simulated a second"),
    ],
)
def test_what_a_capacity_may_not_be_is_one_sentence(
    overrides: list[str], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def begin() -> None:
        run, tracking, _ = build(configuration(*overrides))
        run.run(tmp_path / "o", tracking=tracking)

    with caplog.at_level(logging.ERROR), pytest.raises(ConfigError, match=message) as raised:
        begin()
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "o").exists()
