"""Runs read back from their folders: settings, numbers, models; what makes runs differ, and by how much."""

from fedsim.studies.results.runs import Run, load
from fedsim.studies.results.stored_models import StoredModelReader

__all__ = ["Run", "StoredModelReader", "load"]
