"""Names that come from elsewhere: text in Markdown, escapes on a terminal."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from fedsim.core.speaking import (
    PrintableLogFormatter,
    code_span,
    escape_markdown,
    escape_unprintable,
    tolerate_broken_pipes,
)

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m a\rb\x00 \u202egnp.exe"


def test_control_characters_are_printed_as_escapes() -> None:
    shown = escape_unprintable(HOSTILE)
    assert "\x1b" not in shown
    assert shown.startswith(r"\x1b]0;owned\x07\x1b[2J\x9b31m")
    assert r"\u202e" in shown
    assert escape_unprintable("θ ± 3 %\n− é") == "θ ± 3 %\n− é"


@tolerate_broken_pipes()
def _said() -> None:
    print(f"saved in {HOSTILE}")
    sys.exit(f"fedsim: out={HOSTILE}")


def test_standard_output_errors_and_logs_escape_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as left:
        _said()
    assert "\x1b" not in stream.getvalue()
    assert r"saved in \x1b]0;owned" in stream.getvalue()
    assert "\x1b" not in str(left.value.code)
    record = logging.LogRecord("x", logging.INFO, "", 0, "run: %s", (HOSTILE,), None)
    assert "\x1b" not in PrintableLogFormatter().format(record)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (r"a\|b", r"a\\\|b"),
        ("![x](http://a.b/c.png)", r"!\[x\](http\://a.b/c.png)"),
        ("[c](javascript:alert(1))", r"\[c\](javascript:alert(1))"),
        ("<img src=x onerror=y>", "&lt;img src=x onerror=y&gt;"),
        ("<https://a.b>", r"&lt;https\://a.b&gt;"),
        ("see www.a.b", r"see www\.a.b"),
        ("&lt;b&gt; & c", "&amp;lt;b&amp;gt; & c"),
        ("`code` *em* __strong__ a_b ~~no~~ $x$", r"\`code\` \*em\* \_\_strong\_\_ a_b \~\~no\~\~ \$x\$"),
        ("# title", r"\# title"),
        ("- item", r"\- item"),
        ("\x1b[31m", r"\\x1b\[31m"),
        ("−0.5, lr=0.1", "−0.5, lr=0.1"),
    ],
)
def test_markdown_shows_a_name_as_it_is(name: str, text: str) -> None:
    assert escape_markdown(name) == text


def test_code_keeps_to_its_fence() -> None:
    assert code_span("fedsim lr=1") == "`fedsim lr=1`"
    assert code_span("a `b` ``c``") == "``` a `b` ``c`` ```"
    assert code_span("two\nlines") == "`two lines`"
