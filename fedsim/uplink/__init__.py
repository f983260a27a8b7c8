"""What happens to clients' rows on their way to the server: compression, clipping, noise."""

from fedsim.uplink.base import Code, Link, Stage
from fedsim.uplink.chain import Uplink
from fedsim.uplink.compression import QSGD, Compressor, RandK, Sign, TopK

__all__ = ["QSGD", "Code", "Compressor", "Link", "RandK", "Sign", "Stage", "TopK", "Uplink"]
