"""A plugin of pytest that breaks one algorithm by a thousandth: do the tests of its formula notice?

BROKEN=fedsim.strategies.fedavg:FedAvg PYTHONPATH=tests/scripts pytest -x -p broken_algorithm tests/strategies/…

As a program it does so for several algorithms, one after the other, in copies of a process that has imported fedsim
once; it reads {"module:class": [tests]} from its argument, and prints the exit code and the output of each as JSON.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

OFF = 1e-3
BROKEN = pytest.StashKey[type]()


def off(values: Tensor) -> Tensor:
    """Slightly other numbers."""
    return values * (1 + OFF) + OFF


def after_aggregate(state: Any) -> Any:
    return replace(state, model=off(state.model))


def after_step(outcome: tuple[dict[str, Tensor], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    carry, loss = outcome
    return {name: off(value) if value.is_floating_point() else value for name, value in carry.items()}, loss


AFTER = {"aggregate": after_aggregate, "step": after_step, "__call__": off}


def wrapped(method: Any, after: Any) -> Any:
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        return after(method(*arguments, **options))

    return call


def pytest_configure(config: pytest.Config) -> None:
    module, _, name = os.environ["BROKEN"].partition(":")
    kind = getattr(importlib.import_module(module), name)
    for method, after in AFTER.items():
        if hasattr(kind, method):
            setattr(kind, method, wrapped(getattr(kind, method), after))
    config.stash[BROKEN] = kind


def main() -> None:
    import fedsim  # noqa: F401 - the copies share it

    outcomes = {}
    for kind, tests in json.loads(sys.argv[1]).items():
        with tempfile.TemporaryFile("w+") as output:
            copy = os.fork()
            if copy == 0:
                os.environ["BROKEN"] = kind
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                code = pytest.main(["-x", "-q", "-p", "broken_algorithm", "-p", "no:cacheprovider", *tests])
                sys.stdout.flush()
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
            output.seek(0)
            outcomes[kind] = code, output.read()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
