"""The support matrix: the quick tests on the oldest and the newest supported versions (CONTRIBUTING.md, "A release").

Every version is written in pyproject.toml, once: Python's in the classifiers, the lower bounds in the dependencies.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"  # which can resolve to the lower bounds

PYTHONS = nox.project.python_versions(nox.project.load_toml("pyproject.toml"))
TORCH = "import platform, torch; print('Python', platform.python_version(), 'with PyTorch', torch.__version__)"


def _test(session: nox.Session, *options: str) -> None:
    """Run the quick tests, or those that stand after `--`, on the dependencies that uv chooses with these options."""
    session.install(*options, "--editable", ".[test]")
    session.run("python", "-c", TORCH)
    chosen = session.posargs or ["-n", "2"]
    session.run("python", "-m", "pytest", "-m", "not slow", *chosen, env={"OMP_NUM_THREADS": "1"})


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """The oldest Python, and every dependency at its lower bound."""
    _test(session, "--resolution=lowest-direct")


@nox.session(python="3.11")
def default(session: nox.Session) -> None:
    """The Python of development, and what pip chooses."""
    _test(session)


@nox.session(python=[python for python in PYTHONS if python != "3.11"])
def python(session: nox.Session) -> None:
    """The other Pythons, and what pip chooses."""
    _test(session)
