"""Runs read back from their folders: settings, numbers, models; what makes runs differ, and by how much."""

from fedsim.results.models import StoredModels
from fedsim.results.runs import Run, load

__all__ = ["Run", "StoredModels", "load"]
