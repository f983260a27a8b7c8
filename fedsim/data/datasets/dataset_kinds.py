"""The classes that a configuration may name as a data set, and inside one."""

from __future__ import annotations

from fedsim.core.targets import ComponentKind
from fedsim.data.datasets.augment import CropFlip
from fedsim.data.datasets.dataset import Dataset

# Those of torchvision that read images, arrays or texts of their own format, or check what they unpickle (CIFAR's).
# Left out are LSUN, which unpickles a cache without a checksum, and videos.
TORCHVISION_DATASETS = frozenset((
    "CIFAR10", "CIFAR100", "CLEVRClassification", "Caltech101", "Caltech256", "CelebA", "Country211", "DTD",
    "EMNIST", "EuroSAT", "FER2013", "FGVCAircraft", "FakeData", "FashionMNIST", "Flowers102", "Food101",
    "GTSRB", "INaturalist", "ImageFolder", "ImageNet", "Imagenette", "KMNIST", "MNIST", "Omniglot",
    "OxfordIIITPet", "PCAM", "Places365", "QMNIST", "RenderedSST2", "SEMEION", "STL10", "SUN397", "SVHN",
    "StanfordCars", "USPS",
))  # fmt: skip

_TRANSFORM_ARGUMENT_KINDS: dict[str, ComponentKind] = {}
TRANSFORM_KIND = ComponentKind(
    "a transform",
    required_methods=("__call__",),
    modules=("torchvision.transforms.transforms", "torchvision.transforms.v2"),
    reexporting_modules=("torchvision.transforms",),
    argument_kinds_by_name=_TRANSFORM_ARGUMENT_KINDS,
)
_TRANSFORM_ARGUMENT_KINDS["transforms"] = TRANSFORM_KIND  # of Compose
MAP_STYLE_DATASET_KIND = ComponentKind(
    "a map-style Dataset",
    required_methods=("__getitem__", "__len__"),
    modules=("torchvision.datasets",),
    class_names=TORCHVISION_DATASETS,
    argument_kinds_by_name=dict.fromkeys(("transform", "target_transform", "transforms"), TRANSFORM_KIND),
    argument_kinds=(TRANSFORM_KIND,),
)
AUGMENTATION_KIND = ComponentKind("an augmentation", (CropFlip,), modules=("fedsim.data.datasets",))
DATASET_KIND = ComponentKind(
    "a fedsim.data.datasets.Dataset",
    (Dataset,),
    modules=("fedsim.data.datasets",),
    argument_kinds_by_name={"train": MAP_STYLE_DATASET_KIND, "test": MAP_STYLE_DATASET_KIND},
    argument_kinds=(MAP_STYLE_DATASET_KIND, TRANSFORM_KIND, AUGMENTATION_KIND),
)
