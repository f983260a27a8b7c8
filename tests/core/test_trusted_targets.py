"""What a configuration may name: classes of the kind that a place wants, built in or the user's own."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from torch import nn

from fedsim import load
from fedsim.core import ConfigError
from fedsim.core.targets import (
    RENAMED_MODULES,
    ComponentKind,
    migrated_target_path,
    parse_object,
    resolve_target,
    trust_packages,
    with_current_class_paths,
)
from fedsim.data.datasets import Dataset, Digits

MODULE = ComponentKind("an nn.Module", (nn.Module,), modules=("torch.nn", "fedsim.models"))
PATH = ComponentKind("a path", (Path,))


@pytest.mark.parametrize("target", ["torch.nn.Linear", "torch.nn.modules.linear.Linear", "fedsim.models.MLP"])
def test_a_class_of_the_kind_is_found(target: str) -> None:
    assert issubclass(resolve_target("model._target_", target, MODULE), nn.Module)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("os.system", "is of the package os"),
        ("torch.os.system", "is not an nn.Module that configurations may build"),
        ("torch.nn.modules.module.torch.hub.load", "leads to the package torch|is not an nn.Module"),
        ("torch.nn.functional.softplus", "is not an nn.Module"),
        ("torch.nn.Linear.forward", "is an attribute of a type"),
        ("torch.nn.Linear.__call__", "__call__ begins with an underscore"),
        ("torch._C.Generator", "_C begins with an underscore"),
        ("torch.nn.modules.module.warnings.warn", "leads to the package warnings"),
        ("fedsim.models.dense.nn.Linear", "leads to the package torch"),
        ("a b.c", "is not the path of a class"),
        ("torch.nn.Linear ", "is not the path of a class"),
        ("${oc.decode:os.system}", "is not the path of a class"),
    ],
)
def test_what_is_of_no_such_kind_is_refused(target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\._target_={re.escape(repr(target))}.*({said})"):
        resolve_target("model._target_", target, MODULE)


def test_code_of_a_repository_runs_only_for_users_who_trust_the_library_that_fetches_it() -> None:
    given = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1, "trust_remote_code": True}
    with pytest.raises(ConfigError, match=r"^model\.trust_remote_code=True runs code of a repository"):
        parse_object("model", given, MODULE)
    assert parse_object("model", given | {"trust_remote_code": False}, MODULE).factory is nn.Linear
    with trust_packages(["transformers"]):
        assert parse_object("model", given, MODULE).factory is nn.Linear


@pytest.mark.parametrize("old", RENAMED_MODULES)
def test_a_package_is_found_by_the_name_it_had(old: str) -> None:
    assert importlib.util.find_spec(old) is None
    assert importlib.util.find_spec(RENAMED_MODULES[old]) is not None
    assert migrated_target_path(f"{old}.Name") == f"{RENAMED_MODULES[old]}.Name"


def test_folders_of_earlier_versions_are_read() -> None:
    dataset = ComponentKind("a data set", (Dataset,), modules=("fedsim.data.datasets",))
    assert resolve_target("dataset._target_", "fedsim.datasets.Digits", dataset) is Digits
    assert migrated_target_path("fedsim.datasets_of_mine.Digits") == "fedsim.datasets_of_mine.Digits"
    assert migrated_target_path("mine.fedsim.datasets.Digits") == "mine.fedsim.datasets.Digits"
    was = {"dataset._target_": "fedsim.datasets.Digits", "note": "fedsim.datasets.Digits"}
    assert with_current_class_paths(was) == {
        "dataset._target_": "fedsim.data.datasets.Digits",
        "note": "fedsim.datasets.Digits",
    }
    with pytest.raises(ConfigError, match="is not a data set"):
        resolve_target("dataset._target_", "fedsim.tracking.services.importlib", dataset)


def test_own_classes_of_the_kind_may_be_named_and_what_they_imported_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_own.py").write_text(
        "import os\nfrom subprocess import run\nfrom torch import nn\nfrom torch.nn import Linear\n"
        "class Net(nn.Module):\n    class Inside(nn.Module): pass\n    def build(self): pass\n"
        "class Plain: pass\ndef make(): return nn.Linear(1, 1)\nmade = Net()\nshortcut = os.system\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("Net", "Net.Inside", "make", "Linear"):
        assert resolve_target("m", f"mine_own.{name}", MODULE).__name__ == name.rpartition(".")[2]
    for name, said in {
        "os.system": "leads to the package os",
        "run": r"is subprocess\.run, and that is of the package subprocess",
        "shortcut": r"is posix\.system|is nt\.system",
        "Plain": r"is a class, but not an nn\.Module; derive it from torch\.nn\.modules\.module\.Module",
        "Net.build": "belongs to a class is closed",
        "Net.forward": "belongs to a class is closed",
        "made": "is a Net; give a function or class",
        "nn.Linear": "leads to the package torch",
    }.items():
        with pytest.raises(ConfigError, match=said):
            resolve_target("m", f"mine_own.{name}", MODULE)
    for missing in ("mine_own.Nothing", "mine_nowhere.Net"):
        with pytest.raises(ImportError):
            resolve_target("m", missing, MODULE)
    with trust_packages([], own_code=False), pytest.raises(ConfigError, match="is of the package mine_own"):
        resolve_target("m", "mine_own.Net", MODULE)
    with trust_packages(["mine_own"], own_code=False):
        assert resolve_target("m", "mine_own.Net", MODULE).__name__ == "Net"


def test_nothing_is_imported_before_it_is_known_to_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("this", "torch.utils.bundled_inputs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(ConfigError):
            resolve_target("model._target_", f"{name}.s", MODULE)
        assert name not in sys.modules


def test_a_package_that_the_user_names_is_trusted_within_the_block_alone() -> None:
    with trust_packages(["pathlib"]):
        assert resolve_target("x", "pathlib.Path", PATH) is Path
        with pytest.raises(ConfigError, match="is a class, but not a path"):
            resolve_target("x", "pathlib.PurePath", PATH)
        with pytest.raises(ConfigError, match="leads to the package os"):
            resolve_target("x", "pathlib.os.system", PATH)
    with pytest.raises(ConfigError, match="is of the package pathlib"):
        resolve_target("x", "pathlib.Path", PATH)


def test_objects_among_the_arguments_are_looked_at_however_deep() -> None:
    for inside in ({"_target_": "os.system"}, [[{"b": {"_target_": "os.system"}}]], {"b": [{"_target_": "os.system"}]}):
        with pytest.raises(ConfigError, match=r"model\.a[.b]*\._target_='os\.system' is of the package os"):
            parse_object("model", {"_target_": "torch.nn.Linear", "a": inside}, MODULE)
    with pytest.raises(ConfigError, match="stands where no object is wanted"):
        parse_object("model", {"_target_": "torch.nn.Linear", "a": {"_target_": "torch.nn.ReLU"}}, MODULE)


def test_text_that_looks_like_an_interpolation_is_handed_on_as_text() -> None:
    """Settings are resolved once, by Hydra; a second time would let a file write a `_target_` that nobody looked at."""
    text = "${oc.decode:'{_target_: os.mkdir, path: stolen}'}"
    kept = ComponentKind("a Kept", (Kept,), argument_kinds=())
    assert parse_object("x", {"_target_": f"{__name__}.Kept", "value": text}, kept).build().value == text


class Kept:
    """Keeps what it is given."""

    def __init__(self, value: str) -> None:
        self.value = value


def test_a_run_folder_of_a_stranger_calls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_own.py").write_text(f"open({str(tmp_path / 'stolen')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "metrics.csv").write_text("# round: r\nround,seed,test_loss\n0,0,1.0\n")
    stolen = tmp_path / "stolen"
    for target, said in {
        "os.mkdir": r"dataset\._target_='os\.mkdir' is of the package os.*fedsim\.load\(folder, trusted=\['os'\]\)",
        "their_own.Data": r"is of the package their_own.*fedsim\.load\(folder, trusted=\['their_own'\]\)",
        "${oc.decode:os.mkdir}": "is not the path of a class",
        "torch.os.system.__call__": "begins with an underscore",
        "sklearn.datasets.fetch_openml": "is of the package sklearn",
    }.items():
        (tmp_path / "config.yaml").write_text(f"dataset:\n  _target_: {target}\n  path: {stolen}\ntrusted: [os]\n")
        with pytest.raises(ConfigError, match=said):
            load(tmp_path).dataset()
    text = f"'${{oc.decode:\"{{_target_: os.mkdir, path: {stolen}}}\"}}'"
    (tmp_path / "config.yaml").write_text(f"dataset:\n  _target_: fedsim.data.datasets.Digits\n  augment: {text}\n")
    load(tmp_path).dataset()
    assert not stolen.exists()
    (tmp_path / "config.yaml").write_text("dataset:\n  _target_: their_own.Data\n")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load(tmp_path, trusted=["their_own"]).dataset()
    assert stolen.exists()  # the caller said so


def test_who_trusts_a_package_trusts_code_of_his_own_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_network.py").write_text("from torch import nn\n\n\nclass Net(nn.Module):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_target("m", "my_network.Net", MODULE).__name__ == "Net"
    with trust_packages(["pathlib"]):
        assert resolve_target("m", "my_network.Net", MODULE).__name__ == "Net"
