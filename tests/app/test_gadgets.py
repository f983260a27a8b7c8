"""Calls by which a configuration could run commands, write files or read pickles: refused in every group."""

from __future__ import annotations

import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.app.build import _instantiate
from fedsim.app.kinds import KINDS
from fedsim.core.errors import ConfigError
from fedsim.core.targets import BUILT_IN_PACKAGES, resolve_target
from fedsim.core.torchvision_import import import_torchvision
from fedsim.evaluation.metrics.metric import METRIC_KIND
from fedsim.models.kinds import LOSS_KIND

CANARY = "canary"  # a file that none of these calls may make
TOUCH = f"open({CANARY!r}, 'w').close()"
CALLS: dict[str, dict[str, Any]] = {
    # the standard library
    "os.system": {"command": f"touch {CANARY}"},
    "os.popen": {"cmd": f"touch {CANARY}"},
    "os.mkdir": {"path": CANARY},
    "os.open": {"path": CANARY, "flags": 65},
    "posix.system": {"command": f"touch {CANARY}"},
    "os.execvp": {"file": "touch", "args": ["touch", CANARY]},
    "subprocess.run": {"args": ["touch", CANARY]},
    "subprocess.Popen": {"args": ["touch", CANARY]},
    "subprocess.check_output": {"args": ["touch", CANARY]},
    "pty.spawn": {"argv": ["touch", CANARY]},
    "builtins.eval": {"source": TOUCH},
    "builtins.exec": {"source": TOUCH},
    "builtins.open": {"file": CANARY, "mode": "w"},
    "builtins.__import__": {"name": "antigravity"},
    "builtins.getattr": {"object": "os", "name": "system"},
    "io.open": {"file": CANARY, "mode": "w"},
    "pathlib.Path.touch": {"self": CANARY},
    "shutil.copyfile": {"src": "/etc/hostname", "dst": CANARY},
    "tempfile.mkdtemp": {"dir": "."},
    "pickle.loads": {"data": "cos\nsystem\n(S'touch canary'\ntR."},
    "pickle.load": {"file": CANARY},
    "marshal.loads": {"bytes": ""},
    "importlib.import_module": {"name": "antigravity"},
    "importlib.machinery.SourceFileLoader": {"fullname": "x", "path": CANARY},
    "runpy.run_path": {"path_name": CANARY},
    "code.interact": {},
    "timeit.timeit": {"stmt": TOUCH},
    "cProfile.run": {"statement": TOUCH},
    "pdb.run": {"statement": TOUCH},
    "functools.partial": {"func": {"_target_": "os.system", "command": f"touch {CANARY}"}},
    "functools.reduce": {"function": "os.system", "sequence": [f"touch {CANARY}"]},
    "operator.call": {"obj": {"_target_": "os.mkdir", "path": CANARY}},
    "operator.methodcaller": {"name": "touch"},
    "types.FunctionType": {"code": TOUCH, "globals": {}},
    "types.CodeType": {},
    "logging.FileHandler": {"filename": CANARY},
    "logging.config.dictConfig": {"config": {"version": 1}},
    "sqlite3.connect": {"database": CANARY},
    "dbm.dumb.open": {"file": CANARY, "flag": "c"},
    "shelve.open": {"filename": CANARY},
    "ctypes.CDLL": {"name": "libc.so.6"},
    "webbrowser.open": {"url": "file:///"},
    "urllib.request.urlretrieve": {"url": "file:///etc/hostname", "filename": CANARY},
    "multiprocessing.Process": {"target": "os.system"},
    "threading.Thread": {"target": "os.system"},
    "atexit.register": {"func": {"_target_": "os.mkdir", "path": CANARY}},
    "sys.exit": {},
    # hydra, omegaconf
    "hydra.utils.instantiate": {"config": {"_target_": "os.mkdir", "path": CANARY}},
    "hydra.utils.call": {"config": {"_target_": "os.mkdir", "path": CANARY}},
    "hydra.utils.get_method": {"path": "os.system"},
    "hydra.utils.get_class": {"path": "subprocess.Popen"},
    "hydra.utils.get_object": {"path": "os.system"},
    "hydra.core.config_store.ConfigStore": {},
    "omegaconf.OmegaConf.save": {"config": {}, "f": CANARY},
    "omegaconf.OmegaConf.register_new_resolver": {"name": "x", "resolver": "os.system"},
    "yaml.unsafe_load": {"stream": "!!python/object/apply:os.mkdir [canary]"},
    # numpy and its kin
    "numpy.load": {"file": CANARY, "allow_pickle": True},
    "numpy.save": {"file": CANARY, "arr": [1]},
    "numpy.savetxt": {"fname": CANARY, "X": [1]},
    "numpy.fromfile": {"file": CANARY},
    "numpy.memmap": {"filename": CANARY, "mode": "w+", "shape": [1]},
    "numpy.lib.format.open_memmap": {"filename": CANARY, "mode": "w+", "shape": [1]},
    "numpy.f2py.compile": {"source": ""},
    "scipy.io.savemat": {"file_name": CANARY, "mdict": {}},
    "sklearn.datasets.fetch_openml": {"name": "x"},
    "sklearn.utils.fixes.os.system": {"command": f"touch {CANARY}"},
    "joblib.dump": {"value": 1, "filename": CANARY},
    "joblib.load": {"filename": CANARY},
    "matplotlib.pyplot.savefig": {"fname": CANARY},
    # torch
    "torch.os.system": {"command": f"touch {CANARY}"},
    "torch.os.system.__call__": {"command": f"touch {CANARY}"},
    "torch.nn.modules.module.warnings.sys.exit": {},
    "torch.sys.modules.get": {"key": "os"},
    "torch.load": {"f": CANARY, "weights_only": False},
    "torch.save": {"obj": 1, "f": CANARY},
    "torch.from_file": {"filename": CANARY, "shared": True, "size": 8},
    "torch.UntypedStorage.from_file": {"filename": CANARY, "shared": True, "nbytes": 8},
    "torch.storage.UntypedStorage.from_file": {"filename": CANARY, "shared": True, "nbytes": 8},
    "torch.FloatStorage.from_file": {"filename": CANARY, "shared": True, "size": 8},
    "torch.PyTorchFileWriter": {"name": CANARY},
    "torch.hub.load": {"repo_or_dir": ".", "model": "x", "source": "local"},
    "torch.hub.download_url_to_file": {"url": "file:///etc/hostname", "dst": CANARY},
    "torch.jit.load": {"f": CANARY},
    "torch.jit.CompilationUnit": {"lang": "def f():\n  return 1"},
    "torch.ops.load_library": {"path": CANARY},
    "torch.classes.load_library": {"path": CANARY},
    "torch.package.PackageImporter": {"file_or_buffer": CANARY},
    "torch.package.PackageExporter": {"f": CANARY},
    "torch.serialization.load": {"f": CANARY},
    "torch.export.load": {"f": CANARY},
    "torch.compile": {"model": {"_target_": "os.mkdir", "path": CANARY}},
    "torch.fx.GraphModule": {"root": {}, "graph": {}},
    "torch.multiprocessing.spawn": {"fn": "os.system"},
    "torch.distributed.FileStore": {"file_name": CANARY, "world_size": 1},
    "torch.distributed.TCPStore": {"host_name": "localhost", "port": 0},
    "torch.distributed.nn.RemoteModule": {"remote_device": "x", "module_cls": "os.system"},
    "torch.distributed.elastic.multiprocessing.api.os.system": {"command": f"touch {CANARY}"},
    "torch.distributed.run.main": {"args": [CANARY]},
    "torch.utils.cpp_extension.load": {"name": "x", "sources": []},
    "torch.utils.cpp_extension.load_inline": {"name": "x", "cpp_sources": ""},
    "torch.utils.model_zoo.load_url": {"url": "file:///x"},
    "torch.utils.benchmark.Timer": {"stmt": TOUCH},
    "torch.utils.benchmark.Timer.timeit": {"self": {"_target_": "torch.utils.benchmark.Timer", "stmt": TOUCH}},
    "torch.utils.collect_env.run": {"command": f"touch {CANARY}"},
    "torch.utils.tensorboard.SummaryWriter": {"log_dir": CANARY},
    "torch.utils.data.datapipes.utils.decoder.torch.load": {"f": CANARY},
    "torch.utils.file_baton.FileBaton": {"lock_file_path": CANARY},
    "torch.profiler.profile": {},
    "torch.profiler.tensorboard_trace_handler": {"dir_name": CANARY},
    "torch.onnx.export": {"model": 1, "f": CANARY},
    "torch.testing.make_tensor": {},
    "torch.library.Library": {"ns": "x", "kind": "DEF"},
    "torch._inductor.cpp_builder.run_compile_cmd": {"cmd_line": f"touch {CANARY}", "cwd": "."},
    "torch._inductor.runtime.compile_tasks._reload_python_module": {"key": "x", "path": CANARY},
    "torch._inductor.codecache.PyCodeCache.load": {"source_code": TOUCH},
    "torch._C._jit_set_profiling_mode": {},
    "torch._dynamo.OptimizedModule": {"mod": 1},
    "torch.nn.Module.load_state_dict": {"self": 1, "state_dict": {}},
    "torch.nn.Linear.__init__": {},
    "torch.nn.Linear.forward.__globals__": {},
    "torch.nn.parallel.distributed.os.system": {"command": f"touch {CANARY}"},
    "torch.nn.utils.parametrize.pickle_not_allowed": {},
    "torch.nn.functional.importlib.import_module": {"name": "antigravity"},
    # torchvision, torchmetrics, flwr-datasets
    "torchvision.io.write_file": {"filename": CANARY, "data": 1},
    "torchvision.io.read_image": {"path": CANARY},
    "torchvision.utils.save_image": {"tensor": 1, "fp": CANARY},
    "torchvision.datasets.utils.download_url": {"url": "file:///etc/hostname", "root": "."},
    "torchvision.datasets.utils.extract_archive": {"from_path": CANARY},
    "torchvision.datasets.DatasetFolder": {"root": ".", "loader": {"_target_": "os.mkdir", "path": CANARY}},
    "torchvision.datasets.LSUN": {"root": ".", "classes": "train"},
    "torchvision.datasets.cifar.pickle.load": {"file": CANARY},
    "torchvision.models.resnet.load_state_dict_from_url": {"url": "file:///x"},
    "torchvision.models.resnet.nn.Linear": {"in_features": 1, "out_features": 1},
    "torchvision.models.get_weight": {"name": "x"},
    "torchvision.transforms.Lambda": {"lambd": {"_target_": "os.mkdir", "path": CANARY}},
    "torchmetrics.text.BERTScore": {"model_name_or_path": CANARY},
    "torchmetrics.multimodal.CLIPScore": {"model_name_or_path": CANARY},
    "torchmetrics.utilities.imports.os.system": {"command": f"touch {CANARY}"},
    "torchmetrics.wrappers.MetricTracker": {"metric": {"_target_": "os.mkdir", "path": CANARY}},
    "flwr_datasets.FederatedDataset": {"dataset": CANARY},
    "flwr_datasets.partitioner.partitioner.datasets.load_dataset": {"path": CANARY},
    # fedsim
    "fedsim.core.files.write_json": {"path": CANARY, "content": {}},
    "fedsim.core.files.replacement_file": {"path": CANARY},
    "fedsim.core.lock.Lock": {"folder": CANARY},
    "fedsim.core.targets.resolve_target": {"key": "x", "target": "os.system", "kind": "x"},
    "fedsim.app.cli.main": {},
    "fedsim.studies.results.export_cli.write": {"path": CANARY, "model": {}},
    "fedsim.app.sweep.SweepCallback": {},
    "fedsim.studies.plots.plot_cli.main": {"arguments": []},
    "fedsim.run.checkpoint.Checkpointer": {"folder": CANARY},
    "fedsim.run.folder.RunFolder": {"path": CANARY},
    "fedsim.run.Simulation": {},
    "fedsim.run.tracking.metrics_csv.MetricsCSV": {"path": CANARY, "columns": {}},
    "fedsim.run.tracking.tensorboard.SummaryWriter": {"log_dir": CANARY},
    "fedsim.run.tracking.services.import_service": {"name": "antigravity"},
    "fedsim.data.datasets.cinic10.replacement_file": {"path": CANARY},
    "fedsim.load": {"folder": "."},
}  # fmt: skip
PLACES = {**KINDS, "model.loss": LOSS_KIND, "metrics": METRIC_KIND}


def test_there_are_enough_of_them() -> None:
    assert len(CALLS) >= 60
    assert {target.partition(".")[0] for target in CALLS} >= {"torch", "torchvision", "torchmetrics", "hydra", "numpy"}


@pytest.mark.parametrize("target", CALLS)
def test_none_is_called_in_any_group(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    node = {"_target_": target, **CALLS[target]}
    for group in KINDS:
        with pytest.raises(ConfigError, match=rf"^{group}[\w.]*\._target_="):
            _instantiate(group, dict(node), {})
    for name, kind in PLACES.items():
        with pytest.raises((ConfigError, ImportError)):
            resolve_target(name, target, kind)
    holders = {
        "dataset": {"_target_": "fedsim.data.datasets.TorchData", "train": node},
        "tracking": {"_target_": "fedsim.run.tracking.Tracking", "observers": [node]},
        "uplink": {"_target_": "fedsim.uplink.Uplink", "first": node},
        "partition": {"_target_": "fedsim.data.partition.Flwr", "partitioner": node},
        "local": {"_target_": "fedsim.local.SGD", "schedule": node, "lr": [{"deep": node}]},
    }
    for group, holder in holders.items():
        with pytest.raises(ConfigError, match=rf"^{group}[\w.]*\._target_="):
            _instantiate(group, holder, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("group", "node"),
    [
        ("dataset", {"_target_": "fedsim.data.datasets.TorchData", "train": {
            "_target_": "torchvision.datasets.FakeData", "size": 9, "image_size": [3, 4, 4],
            "transform": {"_target_": "torchvision.transforms.Compose",
                          "transforms": [{"_target_": "torchvision.transforms.ToTensor"}]}}}),
        ("partition", {"_target_": "fedsim.data.partition.Hierarchical",
                       "inner": {"_target_": "fedsim.data.partition.IID"}}),
        ("uplink", {"_target_": "fedsim.uplink.Uplink", "any": {"_target_": "fedsim.uplink.TopK", "k": 2}}),
        ("strategy", {"_target_": "fedsim.strategies.RobustServer",
                      "rule": {"_target_": "fedsim.strategies.Median"},
                      "server": {"_target_": "fedsim.strategies.FedAvg"}}),
        ("tracking", {"_target_": "fedsim.run.tracking.Tracking",
                      "observers": [{"_target_": "fedsim.run.tracking.TensorBoard"}]}),
    ],
)  # fmt: skip
def test_objects_of_the_right_kind_are_built_inside_others(group: str, node: dict[str, Any]) -> None:
    import_torchvision()
    assert isinstance(_instantiate(group, node, {}), KINDS[group].bases)


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("torchvision.models.resnet18", "model"),
        ("torchvision.models.googlenet", "model"),
        ("torchvision.models.segmentation.fcn_resnet50", "model"),
        ("torchvision.models.VisionTransformer", "model"),
        ("fedsim.models.from_torchvision", "model"),
        ("torch.nn.functional.cross_entropy", "model.loss"),
        ("torch.nn.CrossEntropyLoss", "model.loss"),
        ("fedsim.models.losses.squared", "model.loss"),
        ("torchmetrics.classification.MulticlassAccuracy", "metrics"),
        ("torchmetrics.MeanSquaredError", "metrics"),
        ("torchmetrics.functional.mean_squared_error", "metrics"),
        ("torchmetrics.text.Perplexity", "metrics"),
    ],
)
def test_documented_classes_and_functions_are_found(target: str, place: str) -> None:
    if target.startswith("torchmetrics"):
        pytest.importorskip("torchmetrics")
    assert callable(resolve_target(place, target, PLACES[place]))


@pytest.mark.slow
def test_a_random_walk_meets_nothing_but_what_is_of_the_kind() -> None:
    """Dotted paths of attributes, drawn at random from the built-in packages; nothing is called."""
    import_torchvision()
    draw = random.Random(0)
    roots = [sys.modules[name] for name in ("fedsim", "torch", "torchvision") if name in sys.modules]
    inner = [
        m for name, m in sorted(sys.modules.items()) if name.partition(".")[0] in BUILT_IN_PACKAGES and m is not None
    ]
    accepted = 0
    for _ in range(4000):
        here: Any = draw.choice(roots if draw.random() < 0.3 else inner)
        path = [here.__name__]
        for _ in range(draw.randint(1, 4)):
            names = list(vars(here)) if hasattr(here, "__dict__") else []
            if not names:
                break
            name = draw.choice(names)
            try:
                here = getattr(here, name)
            except Exception:
                break
            path.append(name)
            if not isinstance(here, (types.ModuleType, type)):
                break
        for place, kind in PLACES.items():
            try:
                made = resolve_target(place, ".".join(path), kind)
            except (ConfigError, ImportError):
                continue
            accepted += 1
            assert not any(part.startswith("_") for name in path for part in name.split("."))
            if isinstance(made, type):
                wanted = kind.bases or kind.built_in_bases or (torch.nn.Module,)
                assert issubclass(made, wanted), (place, path)
            else:
                assert kind.is_builder_function(made), (place, path)
    assert accepted > 20
