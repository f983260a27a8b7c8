"""The configuration that a run was composed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunConfig:
    """The recorded configuration of a run; the command line fills it in.

    Attributes:
        identity: settings that a resumed run must share.
        settings: named values for TensorBoard's HPARAMS table; empty: strategy and data set.
        yaml: text that is kept as config.yaml in the run folder; None: no such file.
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    yaml: str | None = None
