"""Transformations of clients' updates before the server receives them: compression, clipping, noise."""

from fedsim.uplink.chain import Uplink
from fedsim.uplink.compression import QSGD, Compressor, RandK, Sign, TopK
from fedsim.uplink.private import Clip, GaussianNoise, TreeNoise
from fedsim.uplink.stage import Encoding, Stage, StageContext

__all__ = [
    "QSGD",
    "Clip",
    "Compressor",
    "Encoding",
    "GaussianNoise",
    "RandK",
    "Sign",
    "Stage",
    "StageContext",
    "TopK",
    "TreeNoise",
    "Uplink",
]
