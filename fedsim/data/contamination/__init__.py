"""Which of a client's samples are rotten: a fixed foreign law Q_i mixed into any source (Huber's model)."""

from fedsim.data.contamination.huber import Contamination, Huber, NoContamination
from fedsim.data.contamination.laws import FeatureNoise, Gaussian, LabelFlip, Point

__all__ = ["Contamination", "FeatureNoise", "Gaussian", "Huber", "LabelFlip", "NoContamination", "Point"]
