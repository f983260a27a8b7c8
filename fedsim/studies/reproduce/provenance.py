"""Provenance of a result: a hash of the package's sources and configurations, and the commit of a clean tree."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fedsim
from fedsim.app.config import config_folder
from fedsim.core.errors import ConfigError
from fedsim.studies.reproduce.recipe import recipe_folder

SOURCES_FILE = "sources.txt"  # in the folder of a run of a recipe
RESULTS_PATHSPEC = ":(exclude,glob)experiments/*/results/**"  # written by the command itself, recipe after recipe
TRACED_STATUS, VERIFIED_STATUS, UNVERIFIED_STATUS = "traced", "verified", "unverified"


def source_hash(package: Path | None = None, configurations: Path | None = None) -> str:
    """Return the SHA-256 of the names and contents of the package's Python files and of all configurations."""
    digest = hashlib.sha256()
    for root, pattern in (
        (package or Path(fedsim.__file__).parent, "*.py"),
        (configurations or config_folder(), "*.yaml"),
    ):
        for path in sorted(root.rglob(pattern), key=lambda each: each.relative_to(root).as_posix()):
            content = path.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def write_source_hash(run: Path) -> None:
    """Write the hash of the current sources into a run's folder."""
    (run / SOURCES_FILE).write_text(source_hash() + "\n", encoding="utf-8")


def common_source_hash(runs: Iterable[Path]) -> str | None:
    """Return the hash of the current sources if they made all these runs, else None."""
    sources = source_hash()
    source_files = [run / SOURCES_FILE for run in runs]
    all_current = all(
        source_file.exists() and source_file.read_text(encoding="utf-8").strip() == sources
        for source_file in source_files
    )
    return sources if all_current else None


def commit_hash(root: Path) -> str | None:
    """Return the commit of a checkout, with '+' if files other than results have changed; None without a commit."""
    if not (root / ".git").exists():
        return None
    try:
        changed_files = _run_git(root, "status", "--porcelain", "--", ".", RESULTS_PATHSPEC)
        return _run_git(root, "rev-parse", "HEAD") + ("+" if changed_files else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def check_clean_checkout(out: Path, experiments: Path | None = None) -> None:
    """Refuse to write committed results unless the checkout is clean and a branch has its commit.

    Args:
        out: where results are to be written.
        experiments: the folder of committed results; that of this checkout unless given.

    Raises:
        ConfigError: `out` is that folder, and the checkout has changes, no commit, or one that no branch has.
    """
    experiments = experiments or recipe_folder()
    if out.resolve() != experiments.resolve():
        return
    root = experiments.parent
    commit_text = commit_hash(root)
    results_text = f"--out {out} holds results that are committed"
    if commit_text is None:
        raise ConfigError(f"{results_text}, and this is not a git checkout; choose another folder")
    if commit_text.endswith("+"):
        raise ConfigError(f"{results_text}, and the checkout has changes; commit them first, or choose another folder")
    if not _run_git(root, "for-each-ref", "--contains", commit_text, "refs/heads", "refs/remotes"):
        raise ConfigError(f"{results_text}, and no branch has the commit {commit_text[:12]}; make a branch of it first")


def provenance_status(report: Mapping[str, Any]) -> str:
    """Return the provenance of a report: 'traced', 'verified' or 'unverified'.

    'traced': made by known sources of a clean checkout; 'verified': one or more of its runs were repeated.
    """
    if report.get("sources") and report.get("commit") and not str(report["commit"]).endswith("+"):
        return TRACED_STATUS
    return VERIFIED_STATUS if report.get("verified") else UNVERIFIED_STATUS


def _run_git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
