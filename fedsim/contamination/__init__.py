"""Which of a client's samples are rotten: a fixed foreign law Q_i mixed into any source (Huber's model)."""

from fedsim.contamination.base import Contamination, NoContamination

__all__ = ["Contamination", "NoContamination"]
