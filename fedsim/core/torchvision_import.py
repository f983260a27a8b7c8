"""Import torchvision where its compiled operators do not load.

A CPU-only PyTorch can meet a torchvision wheel built against the CUDA one; `import torchvision` then fails with
`operator torchvision::nms does not exist`. Data sets, transforms and classifiers need none of these operators, so
declaring the two missing schemas before the import is enough. Where torchvision imports by itself nothing is declared.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

_OPERATOR_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared_libraries: list[torch.library.Library] = []  # a Library undoes its definitions when it is collected


def import_torchvision() -> ModuleType:
    """The package, on any matching pair of torch and torchvision."""
    try:
        import torchvision as package
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # a half-finished import stays behind otherwise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator, schema in _OPERATOR_SCHEMAS.items():
            library.define(operator + schema)
        _declared_libraries.append(library)
        import torchvision as package
    module: ModuleType = package
    return module
