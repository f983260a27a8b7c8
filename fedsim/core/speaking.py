"""Output of commands: the reader may close the stream (`| head`, a closed terminal), and names of runs may contain
control characters.

A name of a folder, a setting or a label may come from somebody else. Control characters in it are printed as escapes,
so that it cannot move the cursor, rename the window or hide a line; in Markdown it is text, whatever signs it has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from fedsim.core.torch_warnings import ignore_vmap_warning

_MARKDOWN_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|&(?=#|\w+;)")
_LINK_PATTERN = re.compile(r"(?i)\b(?:(https?|ftp|mailto|xmpp)(:)|(www)(\.))")
_NUMPY_SCALAR_PATTERN = re.compile(
    r"""\bnp\.(?:(?:float|int|uint|complex|bool|str|bytes|datetime|timedelta|longdouble|longlong)\d*_?"""
    r"""\(('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^()'"]*)(?:,\s*'\w+')?\)|(True|False)_\b)"""
)
_LINE_START_MARKUP = re.compile(r"(?m)^(\s*)(#|[-+=](?=\s|$))")
_UNPRINTABLE_SPACES = "\n\r\t\u00a0\u2007\u2009\u202f"  # not printable according to Python, but harmless


def escape_unprintable(text: str) -> str:
    """Return a text with control characters, and characters that change the direction of writing, replaced by
    escapes."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character in _UNPRINTABLE_SPACES or character.isprintable()
        else character.encode("unicode_escape").decode()
        for character in text
    )


def strip_numpy_scalar_reprs(text: str) -> str:
    """Return the same structure with NumPy scalars as Python numbers and strings: {'a': 3} for {np.str_('a'):
    np.int64(3)}."""
    return _NUMPY_SCALAR_PATTERN.sub(lambda match: match[1] or match[2] or "", text) if "np." in text else text


def escape_markdown(text: str) -> str:
    """Return a text that Markdown shows literally: no further column of a table, no link, picture, address or tag."""
    text = _MARKDOWN_MARKUP.sub(lambda match: "&amp;" if match[0] == "&" else f"\\{match[0]}", escape_unprintable(text))
    text = text.replace("<", "&lt;").replace(">", "&gt;")
    text = _LINK_PATTERN.sub(lambda match: f"{match[1] or match[3]}\\{match[2] or match[4]}", text)
    return _LINE_START_MARKUP.sub(r"\1\\\2", text)


def code_span(text: str) -> str:
    """Return a text as Markdown code, between more backticks than it contains in a row."""
    text = " ".join(escape_unprintable(text).split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    edge = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{edge}{text}{edge}{fence}"


class BrokenPipeTolerantStream:
    """A text stream whose reader may close it: later output is discarded, without an error. Characters that the
    stream's encoding lacks are written as escapes.

    Args:
        stream: that is written to; all but writing is its own.
        escape_control: control characters are written as escapes.
    """

    def __init__(self, stream: Any, escape_control: bool = False) -> None:
        self._stream, self._escape_control = stream, escape_control

    def write(self, text: str) -> int:
        """Return the number of characters, whether written or discarded."""
        try:
            text = escape_unprintable(text) if self._escape_control else text
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # for example a stream that supports ASCII only
                encoding = getattr(self._stream, "encoding", None) or "ascii"
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._discard_output(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream, so that readers see what was written."""
        try:
            self._stream.flush()
        except OSError as error:
            self._discard_output(error)

    def _discard_output(self, error: OSError) -> None:
        """Discard all further output, since the stream has no reader. A pipe that is full for a moment and must not
        block loses only this text."""
        if isinstance(error, BlockingIOError):
            return
        with contextlib.suppress(OSError, ValueError):
            null_descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_descriptor, self._stream.fileno())
            os.close(null_descriptor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ignore_broken_pipes() -> None:
    """From now on standard output and standard error may lose their readers. Control characters are escaped only on
    standard output, since progress is drawn on standard error."""
    sys.stdout, sys.stderr = (_tolerate_broken_pipe(sys.stdout, escape_control=True), _tolerate_broken_pipe(sys.stderr))


def _tolerate_broken_pipe(stream: Any, escape_control: bool = False) -> Any:
    return (
        stream
        if stream is None or isinstance(stream, BrokenPipeTolerantStream)
        else BrokenPipeTolerantStream(stream, escape_control)
    )


@contextlib.contextmanager
def tolerate_broken_pipes() -> Iterator[None]:
    """`ignore_broken_pipes` within the block; output is flushed at its end, since Python would report an error when
    it exits."""
    original_streams = sys.stdout, sys.stderr
    ignore_broken_pipes()
    try:
        yield
    except SystemExit as exit_error:
        if isinstance(exit_error.code, str):
            exit_error.code = escape_unprintable(exit_error.code)
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = original_streams


class PrintableLogFormatter(logging.Formatter):
    """Log lines whose messages are printable."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s  %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escape_unprintable(strip_numpy_scalar_reprs(record.message))
        return super().formatMessage(record)


def log_to_stderr() -> None:
    """Show warnings on standard error, unless logs are shown already; PyTorch's about vmap are not shown."""
    ignore_vmap_warning()
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableLogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class _OncePerMessageFilter(logging.Filter):
    """Lets each message of a logger pass once."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_messages: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new_message = message not in self._logged_messages
        self._logged_messages.add(message)
        return is_new_message


def log_messages_once(logger: str) -> None:
    """From now on this logger logs each message once in this process, since the jobs of a sweep share most settings."""
    named_logger = logging.getLogger(logger)
    if not any(isinstance(log_filter, _OncePerMessageFilter) for log_filter in named_logger.filters):
        named_logger.addFilter(_OncePerMessageFilter())


@contextlib.contextmanager
def without_logging() -> Iterator[None]:
    """Within the block nothing is logged, since a trial repeats messages of the run itself."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled_level)
