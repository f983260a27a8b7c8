"""What a `_target_` in a configuration may name: something of a trusted package, or of the user's own code.

Trusted packages are those that models, data and metrics come from. The user's own code is what is neither Python's own
nor installed among its packages: modules of the working directory, of PYTHONPATH, of a checkout. What a name leads to
counts, not what it is called: `torch.os.system` is none of PyTorch's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.core.errors import ConfigError

PACKAGES = (
    "fedsim", "torch", "torchvision", "torchmetrics", "transformers", "peft", "timm", "sklearn", "flwr_datasets",
)  # fmt: skip
CLOSED = (  # of these, what reads pickles, compiles, starts, fetches or writes
    "fedsim.app", "fedsim.core", "fedsim.plots", "fedsim.results", "fedsim.run.checkpoint", "fedsim.run.folder",
    "fedsim.tracking.metrics_csv", "fedsim.tracking.clients",
    "torch.load", "torch.save", "torch.hub", "torch.serialization", "torch.package", "torch.jit", "torch.ops",
    "torch.classes", "torch.distributed", "torch.multiprocessing", "torch.utils.cpp_extension",
    "torch.utils.model_zoo", "torch.utils.collect_env",
    "torch.testing", "torch.export", "torch.onnx", "torch.fx", "torch.compile", "torch.library", "torch.compiler",
    "torchvision.io", "torchvision.datasets.utils", "transformers.dynamic_module_utils", "transformers.utils",
    "transformers.commands", "transformers.pipeline", "sklearn.utils", "sklearn.datasets.fetch_openml",
)  # fmt: skip
REMOTE = "trust_remote_code"  # by which Hugging Face's libraries run code of a repository

_named: ContextVar[tuple[str, ...]] = ContextVar("packages that the user trusts", default=())


@contextlib.contextmanager
def trusting(packages: Sequence[str]) -> Iterator[None]:
    """Within the block, these packages are trusted too."""
    before = _named.set(tuple(packages))
    try:
        yield
    finally:
        _named.reset(before)


def found(key: str, target: str) -> Any:
    """What stands at a dotted path.

    Args:
        key: under which a configuration names it.
        target: package.module.Name.

    Raises:
        ConfigError: a configuration may not name it.
        ImportError, ValueError: there is no such thing.
    """
    root = target.partition(".")[0]
    _check(key, target, target)
    if root == "torchvision":
        from fedsim.core.torchvision_import import torchvision

        torchvision()  # where its compiled operators do not load, a plain import fails
    try:
        made = pkgutil.resolve_name(target)
    except AttributeError as error:
        raise ImportError(str(error)) from error
    if isinstance(made, ModuleType):
        raise ImportError(f"{target} is a module")
    made_in, name = getattr(made, "__module__", None), getattr(made, "__qualname__", getattr(made, "__name__", ""))
    if isinstance(made_in, str) and callable(made):
        _check(key, target, f"{made_in}.{name}")
    return made


def check_all(key: str, node: Any) -> None:
    """Refuse a part of a configuration, however deep, that names what none may.

    Raises:
        ConfigError: the message says where.
    """
    if isinstance(node, dict):
        if node.get(REMOTE) and not {"transformers", "datasets"} & set(_named.get()):
            raise ConfigError(
                f"{key}.{REMOTE}={node[REMOTE]} runs code of a repository; if you know it, add trusted=[transformers]"
            )
        target = node.get("_target_")
        if isinstance(target, str) and target != "???":
            _check(f"{key}._target_", target, target)
            with contextlib.suppress(ImportError, ValueError):  # said where it is made
                found(f"{key}._target_", target)
        for name, value in node.items():
            check_all(f"{key}.{name}", value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            check_all(key, value)


def _check(key: str, target: str, path: str) -> None:
    """Is it of a trusted package, or the user's own?"""
    root = path.partition(".")[0]
    if root in _named.get():
        return
    if root in PACKAGES:
        if not any(path == closed or path.startswith(f"{closed}.") for closed in CLOSED):
            return
        raise ConfigError(
            f"{key}={target!r} is no part of {root} that configurations may call; if you know what it does with what "
            f"this one gives it, add trusted=[{root}]"
        )
    if not _installed(root):
        return
    what = "" if root == target.partition(".")[0] else f" is {path}, and that"
    raise ConfigError(
        f"{key}={target!r}{what} is of the package {root}, which configurations may not call; if you trust it with "
        f"what this one gives it, add trusted=[{root}]"
    )


def _installed(root: str) -> bool:
    """Is it Python's own, or among the installed packages? What is not found at all is said elsewhere."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return root != "__main__"
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or [])
    if not places:
        return True  # built in, or frozen
    theirs = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(
        {"site-packages", "dist-packages"} & set(place.parts) or any(place.is_relative_to(base) for base in theirs)
        for place in (Path(text).resolve() for text in places)
    )
