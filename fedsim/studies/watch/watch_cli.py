"""`fedsim watch`: curves of the runs in a folder, on a local page, while they are computed."""

from __future__ import annotations

import argparse
import signal
import webbrowser
from pathlib import Path
from types import FrameType

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.watch.folder import WatchedFolder

DEFAULT_PORT = 5006
MAX_PORT = 65535


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    argument_parser = argparse.ArgumentParser("fedsim watch", description=f"Show {COMMAND_DESCRIPTIONS['watch']}.")
    argument_parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder of a run, of a sweep, or of several of them"
    )
    argument_parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port of the page (default: {DEFAULT_PORT}); 0: a free port"
    )
    argument_parser.add_argument(
        "--no-browser", action="store_true", help="print the address without opening a browser"
    )
    argument_parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="seconds between two updates (default: 2)"
    )
    return argument_parser


def main(arguments: list[str]) -> None:
    """Serve the page until Ctrl-C, or a signal to terminate."""
    options = parser().parse_args(arguments)
    if not 0 <= options.port <= MAX_PORT:
        raise ConfigError(f"--port {options.port} must lie between 0 and {MAX_PORT}")
    if checks.check_finite("--every", options.every) < 0.1:
        raise ConfigError(f"--every {options.every:g} must be at least 0.1 seconds")
    watched_folder = WatchedFolder(options.folder, options.every)
    try:
        from fedsim.studies.watch.server import SERVER_ADDRESS, make_server
    except ImportError as error:
        raise ConfigError("the page needs Bokeh, an extra; pip install 'fedsim-torch[watch]'") from error
    page_server = make_server(watched_folder, options.port)
    address = f"http://{SERVER_ADDRESS}:{page_server.port}/"
    loop = page_server.io_loop

    def handle_stop_signal(_number: int, _frame: FrameType | None) -> None:
        loop.asyncio_loop.call_soon_threadsafe(loop.stop)  # type: ignore[attr-defined]

    # a KeyboardInterrupt would be lost where it is raised in a finaliser or a callback that catches it
    previous_handlers = {
        number: signal.signal(number, handle_stop_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        print(f"watching {options.folder} at {address} (Ctrl-C ends it)", flush=True)
        page_server.start()
        if not options.no_browser:
            loop.add_callback(webbrowser.open, address)
        loop.start()
        print("no longer watching")
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        page_server.stop()
