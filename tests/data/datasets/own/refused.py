"""What is refused: one sentence, and nothing in a file is executed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from fedsim.core import ConfigError


class Trap:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("trapped",)


def refused(make: Callable[[], object], says: str) -> None:
    """`make` ends in one sentence that says so."""
    with pytest.raises(ConfigError, match=re.escape(says)) as raised:
        make()
    assert "\n" not in str(raised.value)
    assert not os.path.exists("trapped")
