"""The page's server, which listens on the loopback address only and serves pages of its own origin only."""

from __future__ import annotations

import errno
import logging
import socket

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import Server
from bokeh.settings import settings

from fedsim.core.errors import ConfigError
from fedsim.studies.watch.folder import WatchedFolder
from fedsim.studies.watch.page import WatchPage

SERVER_ADDRESS = "127.0.0.1"


def make_server(watched_folder: WatchedFolder, port: int) -> Server:
    """Create a server of the page without starting it.

    Other machines cannot reach it. Programs of this one can, those of its other users included; a page of another
    origin that is open in the browser cannot.

    Args:
        watched_folder: the folder.
        port: port of the server; 0: a free one.

    Raises:
        ConfigError: the port is taken or not allowed.
    """
    logging.getLogger("bokeh").setLevel(logging.WARNING)
    logging.getLogger("tornado.access").setLevel(logging.ERROR)
    settings.resources = "server"  # the page's scripts come from here, not from the network
    port = port or _free_port()
    origins = [f"{SERVER_ADDRESS}:{port}", f"localhost:{port}"]
    settings.allowed_ws_origin = origins  # also where the environment allows others

    def add_page(document: Document) -> None:
        WatchPage(document, watched_folder)

    try:
        return Server(
            {"/": Application(FunctionHandler(add_page))},
            port=port,
            address=SERVER_ADDRESS,
            allow_websocket_origin=origins,
            check_unused_sessions_milliseconds=5_000,
            unused_session_lifetime_milliseconds=15_000,
        )
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(f"--port {port} {reason}; choose another, or --port 0 for a free one") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((SERVER_ADDRESS, 0))
        return int(probe.getsockname()[1])
