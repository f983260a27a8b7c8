"""A query of a strategy to clients in addition to training: the loss of models on their validation samples."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.evaluation.personal.scores import ClientScorer
from fedsim.trainer import Trainer


class ValidationQuery:
    """Queries clients in the middle of a run, with their private columns.

    Args:
        trainer: of the run, whose memory of clients is looked at.
        scores: on the clients' validation samples, or on the law of a stream.
    """

    def __init__(self, trainer: Trainer, scores: ClientScorer) -> None:
        self.trainer, self.scores = trainer, scores

    @torch.no_grad()
    def __call__(self, cohort: Cohort, rows: Tensor) -> Tensor:
        """[n] the mean loss of each client's row [n, d] on its validation samples; NaN for a client without any."""
        memory = self.trainer.last_initial_memory or Memory()
        full_rows = self.trainer.model.columns.full_rows(rows, cohort, memory)
        return self.scores.validation_losses(full_rows, cohort, cohort.round)
