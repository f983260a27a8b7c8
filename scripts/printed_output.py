"""Write again what pages say that a command prints: every block below `<!-- printed by: COMMAND -->`.

python scripts/printed_output.py

Commands run in a folder of their own. It, times and speeds become …, since they are never the same twice.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(?P<mark><!-- printed by: (?P<command>.+?) -->\n```\n)(?P<printed>.*?)(?=```$)", re.M | re.S)


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = rewritten(text, run)
        if written != text:
            page.write_text(written, encoding="utf-8")


def rewritten(text: str, run: Callable[[list[str]], str]) -> str:
    """A page with the blocks that `run` gives."""
    return BLOCK.sub(lambda found: found["mark"] + run(shlex.split(found["command"])), text)


def lasting(printed: str, folder: str) -> str:
    """Without times, speeds and the folder of the run's folder."""
    return re.sub(r"in [\d.]+ s \([\d,]+ (samples|worlds)/s\)", r"in … s (… \1/s)", printed.replace(folder, "…"))


def run(words: list[str]) -> str:
    """What one of fedsim's commands prints."""
    program = [str(Path(sys.executable).parent / words[0]), *words[1:], "tracking.progress=none"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(program, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        return lasting(done.stdout, folder)


if __name__ == "__main__":
    main()
