"""Contaminated samples of clients: a fixed law Q_i mixed into the client's own data (Huber's model)."""

from fedsim.data.contamination.huber import Contamination, HuberContamination, NoContamination
from fedsim.data.contamination.laws import FeatureNoise, Gaussian, LabelFlip, Point

__all__ = ["Contamination", "FeatureNoise", "Gaussian", "HuberContamination", "LabelFlip", "NoContamination", "Point"]
