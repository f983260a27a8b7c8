"""How what a user wrote is tried: whose it is, its errors in one sentence, what it left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

import fedsim
from fedsim.core import streams
from fedsim.core.errors import ConfigError

HOME = Path(fedsim.__file__).parent
Named = dict[str, Tensor]


def foreign(part: Any) -> bool:
    """Is it somebody's own?"""
    return not type(part).__module__.startswith("fedsim.")


@contextlib.contextmanager
def within(what: str, part: Any) -> Iterator[None]:
    """Errors of somebody's own part in one sentence; nothing may be drawn from a global stream."""
    before = streams.now()
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        if not foreign(part):
            raise
        own = [f for f in traceback.extract_tb(error.__traceback__) if _elsewhere(f.filename)]
        where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        said = (str(error) or "no message").splitlines()[0]
        raise ConfigError(f"{what} raised {type(error).__name__}: {said}{where}") from error
    if not streams.equal(before, streams.now()):
        raise ConfigError(
            f"{what} draws from a global random stream, which depends on all that was drawn before; use "
            "fedsim.core.rng, whose numbers are functions of seed, round and client"
        )


def _elsewhere(file: str) -> bool:
    return "site-packages" not in file and HOME not in Path(file).parents


def fields(state: Any) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def copied(of: Any) -> Any:
    """The same with tensors of its own, which may be written to."""
    own = {name: value.clone() for name, value in fields(of).items() if isinstance(value, Tensor)}
    return dataclasses.replace(of, **own)


def kind(value: Any) -> str:
    """What it is, in a word."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else type(value).__name__
