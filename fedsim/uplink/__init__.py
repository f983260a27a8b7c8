"""What happens to clients' rows on their way to the server: compression, clipping, noise."""

from fedsim.uplink.base import Code, Link, Stage
from fedsim.uplink.chain import Uplink
from fedsim.uplink.compression import QSGD, Compressor, RandK, Sign, TopK
from fedsim.uplink.private import Clip, GaussianNoise, TreeNoise

__all__ = [
    "QSGD",
    "Clip",
    "Code",
    "Compressor",
    "GaussianNoise",
    "Link",
    "RandK",
    "Sign",
    "Stage",
    "TopK",
    "TreeNoise",
    "Uplink",
]
