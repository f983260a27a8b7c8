"""The import of PyTorch and the simulator by the command line; other commands do not need it."""

from __future__ import annotations

import functools
import gc


@functools.cache
def import_run_modules() -> None:
    """Import the modules that a run needs, once per process, with the garbage collector paused.

    Objects of modules are not garbage. Looking for garbage among them takes 0.4 s while PyTorch is imported, and 0.3 s
    at the end of the process; it is left out, and `gc.freeze` exempts them from later collections.
    """
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        import fedsim.run  # noqa: F401

        gc.freeze()
    finally:
        if gc_was_enabled:
            gc.enable()
