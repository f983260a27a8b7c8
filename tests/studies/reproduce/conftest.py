"""The command line in this process, as the tests of `app` have it."""

from __future__ import annotations

from command_line import fedsim, quickly

__all__ = ["fedsim", "quickly"]
