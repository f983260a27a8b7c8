"""Messages and logs print NumPy's scalars as the numbers and words that they are."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest

import fedsim
from fedsim import Simulation, Tracking
from fedsim.core import ConfigError, checks
from fedsim.core.speaking import PrintableLogFormatter, strip_numpy_scalar_reprs
from fedsim.data.datasets import Digits
from fedsim.local import SGD
from fedsim.models import Linear

SCALARS = [
    np.float64(0.5), np.float32(2), np.int64(3), np.uint8(7), np.str_("it's (a) word"), np.str_('say "x"'),
    np.bool_(True), np.False_, np.datetime64("2020-01-01"), np.timedelta64(3, "D"), np.float64("nan"), np.complex64(1j),
]  # fmt: skip


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_a_scalar_is_printed_without_its_type(scalar: np.generic) -> None:
    text = strip_numpy_scalar_reprs(f"{[scalar]} { ({scalar: scalar}) }")
    assert "np." not in text
    if not isinstance(scalar, (np.datetime64, np.timedelta64, np.complex64, np.float32)):
        assert text == f"{[scalar.item()]} { ({scalar.item(): scalar.item()}) }"


def test_what_is_no_scalar_stays() -> None:
    for text in ("np.random is global", "call np.unique(x)", "the array np.array([1])", "plain"):
        assert strip_numpy_scalar_reprs(text) == text


def test_errors_and_log_lines_print_no_types() -> None:
    for call in (
        lambda: SGD(lr=np.float64(-1)),
        lambda: checks.check_choice("strategy", np.str_("fedav"), ["fedavg"]),
        lambda: Simulation(Digits(), Linear, clients=np.float64(4.5)),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "np." not in str(caught.value)
    counts = {np.str_("a"): np.int64(3)}
    record = logging.LogRecord("fedsim", logging.INFO, "", 0, "classes %s", (counts,), None)
    assert PrintableLogFormatter().format(record).endswith("classes {'a': 3}")
    assert str(pickle.loads(pickle.dumps(ConfigError("x=np.int64(1)")))) == "x=1"


def test_a_runs_numbers_are_pythons() -> None:
    simulation = Simulation(Digits(), Linear, clients=4, rounds=1, seeds=list(np.arange(2)))
    result = simulation.run(tracking=Tracking(progress="none"))
    assert isinstance(result, fedsim.Result)
    for shown in (simulation.federation.seeds, result.history, result.final, result.extra, result.metric_names):
        assert "np." not in repr(shown)
