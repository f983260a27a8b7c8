"""The command line in this process."""

from __future__ import annotations

from command_line import fedsim

__all__ = ["fedsim"]
