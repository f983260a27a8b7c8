"""The trainers of a run: one for each local rule, all of them with the same clients."""

from __future__ import annotations

from fedsim.data.contamination import Contamination
from fedsim.data.samples import Batches, ClientData
from fedsim.local import LocalRule
from fedsim.models import StatelessModel
from fedsim.shift import Shift
from fedsim.trainer.execution import Execution
from fedsim.trainer.trainer import Trainer


class TrainerFactory:
    """Makes a trainer of these clients for a local rule.

    Args:
        client_data: the clients' samples.
        shift: how they react; `setup_shift` sets it up for them.
        model, contamination, execution: of the run.
        executor_cache: which executors its trainers found the quickest, by their rules' names; None: nothing yet.
    """

    def __init__(
        self,
        client_data: ClientData,
        shift: Shift,
        model: StatelessModel,
        contamination: Contamination,
        execution: Execution,
        executor_cache: dict[str, str] | None = None,
    ) -> None:
        self.data, self.shift, self.model = client_data, shift, model
        self.contamination, self.execution = contamination, execution
        self.executor_cache = {} if executor_cache is None else executor_cache
        self._created_trainers: list[Trainer] = []
        self._full_data_reasons: list[tuple[str, LocalRule | None]] = []
        self._one_worker = False

    def setup_shift(self) -> None:
        """Set up the shift for data and model, once before the first trainer is made."""
        self.shift.setup(self.data.federation, self.data, self.model)

    def __call__(self, local_rule: LocalRule) -> Trainer:
        """Return the trainer of a rule, which is bound to data, shift and model."""
        batches = Batches(self.data, local_rule.work, self.contamination, self.model.needs_keys, self.shift.redraw)
        local_rule.setup(self.data, self.shift, self.model)
        trainer = Trainer(local_rule, self.model, self.shift, batches, self.execution, self.executor_cache)
        for reason, rule_class in self._full_data_reasons:
            if rule_class is None or type(rule_class) is type(local_rule):
                trainer.restrict_to_loop(reason)
        if self._one_worker:
            trainer.restrict_to_one_thread()
        self._created_trainers.append(trainer)
        return trainer

    def restrict_to_one_thread(self) -> None:
        """Call `Trainer.restrict_to_one_thread` of all trainers, including later ones."""
        self._one_worker = True
        for trainer in self._created_trainers:
            trainer.restrict_to_one_thread()

    def restrict_to_loop(self, reason: str, rule: LocalRule | None = None) -> None:
        """Call `Trainer.restrict_to_loop` of all trainers, or of those of one class of local rules, including later
        ones."""
        if (reason, rule) not in self._full_data_reasons:
            self._full_data_reasons.append((reason, rule))
        for trainer in self._created_trainers:
            if rule is None or type(trainer.local_rule) is type(rule):
                trainer.restrict_to_loop(reason)
