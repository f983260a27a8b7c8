"""Which of a client's samples are rotten: a fixed foreign law Q_i mixed into any source (Huber's model)."""

from fedsim.contamination.base import Contamination, Huber, NoContamination
from fedsim.contamination.feature_noise import FeatureNoise
from fedsim.contamination.gaussian import Gaussian
from fedsim.contamination.label_flip import LabelFlip
from fedsim.contamination.point import Point

__all__ = ["Contamination", "FeatureNoise", "Gaussian", "Huber", "LabelFlip", "NoContamination", "Point"]
