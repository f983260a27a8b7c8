"""The user's choices for a run: the arguments of a `Simulation`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

from torch import nn
from typing_extensions import Self

from fedsim.availability import Availability
from fedsim.availability.clock import Clock, Delay, Work
from fedsim.core.constraints import Count, NonNegative, OneOf, validate_arguments
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.ranks import ProcessRanks
from fedsim.data.contamination import Contamination
from fedsim.data.datasets import Dataset
from fedsim.data.datasets.checked import check_dataset
from fedsim.data.drift import Drift
from fedsim.data.partition import Partition
from fedsim.evaluation import EvaluationOptions
from fedsim.evaluation.personal import Personal
from fedsim.local import LocalRule
from fedsim.models.capacity import Capacity
from fedsim.models.losses import LossFunction
from fedsim.models.precision import tf32_products
from fedsim.models.selectors import Selector
from fedsim.run.assembly import Assembly
from fedsim.run.contracts import changed_attribute_paths, contains_user_code, take_snapshot
from fedsim.run.divergence import ON_NONFINITE_CHOICES
from fedsim.run.model_choice import GivenModel, ModelChoice
from fedsim.run.ownership import PartCopier
from fedsim.run.parts import PART_TYPES, Parts
from fedsim.run.rules import Stop
from fedsim.run.user_code import user_code_error_context
from fedsim.run.wiring import ComputeSettings, check_component_types, check_seeds, restrict_per_seed_settings
from fedsim.shift import Shift
from fedsim.strategies import Strategy
from fedsim.trainer import Execution
from fedsim.uplink import Uplink
from fedsim.uplink.attack import Attack

START_MODELS = ("random", "ps", "erm")


@validate_arguments
class Setup(Assembly):
    """A federation that is set up and checked. The arguments are the groups of a configuration and its top-level keys.

    Parts are copied before they are set up (`fedsim.run.ownership`), so that the same objects may be given to several
    simulations.

    Args:
        dataset: what samples exist.
        model: builds a fresh `nn.Module`; called with `shape` and `classes` if it takes them (see `StatelessModel`).
        clients: m, or 'all' that come with the data. Of more than m that do, partition=natural draws m.
        partition: who holds which; the natural one where the data set has owners, else iid.
        availability: who can take part.
        strategy: the aggregation algorithm.
        local: the local rule.
        shift, contamination: how data react to the model, and which samples are contaminated.
        drift: how the law of the data changes from round to round, whatever the model is.
        rounds: T.
        seeds: one replicate each, simulated together.
        loss, ridge: per-sample loss (the data set's by default) and penalty.
        output: which of the things that the module returns, where it is not a tensor: a name, or a number.
        start: 'random': the model's own initialisation; 'ps': the performatively stable point (p-fedavg Fig. 11);
            'erm': the best model on data that have not reacted yet (the program of p-fedavg's authors).
        on_nonfinite: 'stop', 'drop_client' or 'drop_replicate', see `fedsim.run.divergence`.
        columns: which parts of the model stay with the client; everything travels unless given.
        capacity: how much of the model each client holds; all of it unless given.
        personal: whose own models are scored too, and who joins when training is over.
        evaluation: when which model is evaluated.
        stop: when the run ends before its last round.
        uplink: what happens to rows between local work and aggregation.
        attack: who lies, and how: before the uplink.
        clock: how long clients take in virtual seconds, and who is late.
        work: how much of a round's local steps each does.
        delay: how many rounds later rows arrive.
        execution: where and how all is computed.
        ranks: the processes that share the run (`ProcessRanks.join_group()` under torchrun); a lone one unless given.
    """

    config_key_by_argument: ClassVar[dict[str, str]] = {  # configuration key → the argument that replaces it in Python
        "lr": "give it to the local rule: local=SGD(lr=0.1)",
        "batch_size": "give it to the local rule: local=SGD(batch_size=32)",
        "local_steps": "give it to the local rule: local=SGD(steps=10)",
        "local_epochs": "give it to the local rule: local=SGD(epochs=1)",
        "eval_every": "give it to the evaluation: evaluation=EvaluationOptions(every=10)",
        "diagnostics": "give it to the evaluation: evaluation=EvaluationOptions(diagnostics=['drift'])",
        "device": "give it to the execution: execution=Execution(device='cpu')",
        "out": "give it to the run: simulation.run(out='folder')",
    }
    effective_if: EffectDeclarations = (
        EffectiveIf(
            "uplink",
            lambda component, run: run.has_client_uploads or not component.components.uplink.stages,
            "a strategy whose clients send something",
            attribute="components.uplink",
        ),
        EffectiveIf(
            "attack",
            lambda component, run: run.has_client_uploads or not component.components.attack.active,
            "a strategy whose clients send something",
            attribute="components.attack",
        ),
    )

    def __init__(  # noqa: PLR0913 (users call it with keywords: the groups and keys of a configuration)
        self,
        dataset: Dataset,
        model: Callable[..., nn.Module] | nn.Module,
        clients: int | str = 100,
        partition: Partition | None = None,
        availability: Availability | None = None,
        strategy: Strategy[Any] | None = None,
        local: LocalRule | None = None,
        shift: Shift | None = None,
        contamination: Contamination | None = None,
        rounds: Count = 100,
        seeds: Sequence[int] = (0,),
        loss: str | LossFunction | None = None,
        ridge: NonNegative = 0.0,
        output: str | int | None = None,
        start: Annotated[str, OneOf(*START_MODELS)] = "random",
        on_nonfinite: Annotated[str, OneOf(*ON_NONFINITE_CHOICES)] = "stop",
        columns: Selector | None = None,
        capacity: Capacity | None = None,
        personal: Personal | None = None,
        evaluation: EvaluationOptions | None = None,
        execution: Execution | None = None,
        stop: Stop | None = None,
        uplink: Uplink | None = None,
        attack: Attack | None = None,
        clock: Clock | None = None,
        work: Work | None = None,
        delay: Delay | None = None,
        drift: Drift | None = None,
        ranks: ProcessRanks | None = None,
    ) -> None:
        check_component_types(PART_TYPES, locals())
        execution = execution or Execution()
        compute = ComputeSettings.from_execution(execution, ranks or ProcessRanks())
        check_dataset(dataset, loss)  # on the host, before the samples move
        components = Parts.copy_of(
            dataset.to(compute.device), evaluation=evaluation, uplink=uplink, partition=partition,
            availability=availability, strategy=strategy, local=local, shift=shift, contamination=contamination,
            attack=attack, columns=columns, capacity=capacity, clock=clock, work=work, delay=delay, personal=personal,
            stop=stop, trainer=execution, drift=drift,
        )  # fmt: skip
        choice = ModelChoice(model, loss, ridge, output, execution.precision)
        chosen_seeds = check_seeds(seeds)
        self._groups = _parts_before_setup(components)
        with user_code_error_context(components), tf32_products(False):
            super().__init__(components, choice, compute, clients, chosen_seeds, rounds, start, on_nonfinite)

    def check_same_parts(self, simulation: Setup) -> None:
        """Refuse to resume a run of the same settings whose user-defined parts were constructed differently.

        Raises:
            ConfigError: naming the part and the attribute, such as one that counts objects of the class.
        """
        numbered = {name.partition(".")[0] for name in self.settings_per_seed}
        for group, component in self._groups.items():
            if group == "dataset" or group in numbered or not contains_user_code(component):
                continue
            if paths := changed_attribute_paths(component, take_snapshot(simulation._groups[group])):
                raise ConfigError(
                    f"{group}={type(component).__name__}: two objects made of the same settings differ in {paths[0]}, "
                    "which depends on how many were made before in this process"
                )

    def copy_for_trials(self, replicates: Sequence[int], steps: int) -> Self:
        """Return the same run with copies of its parts, for some of its replicates, for trials: clients are trained one
        at a time, with at most so many local steps, and nothing is evaluated."""
        dataset, seeds = self.components.dataset, [self.federation.seeds[replicate] for replicate in replicates]
        part_copies = copy_components(self._groups, dataset)
        rule: LocalRule = part_copies["local"]
        restrict_per_seed_settings(part_copies["strategy"], rule, part_copies["drift"], replicates)
        if not (rule.indivisible or rule.pooled or part_copies["work"].active):
            planned_steps = rule.work.steps or steps
            rule.work = dataclasses.replace(rule.work, steps=min(planned_steps, steps), epochs=None)
        execution = dataclasses.replace(
            self.execution, executor="loop", workers=1, chunk="auto", compile="never", trial=False
        )
        newcomers = self.components.personal if self.components.personal.newcomers else Personal()
        components = Parts(
            **part_copies | {
                "dataset": dataset, "columns": None, "trainer": execution, "stop": Stop(), "personal": newcomers,
                "evaluation": EvaluationOptions(),
            }
        )  # fmt: skip
        compute = dataclasses.replace(self.compute, memory="device")
        setup_copy = type(self).__new__(type(self))
        clients = self.federation.clients + self.components.personal.newcomers
        Assembly.__init__(
            setup_copy, components, GivenModel(self.model), compute, clients, tuple(seeds), self.rounds, "random",
            self.on_nonfinite,
        )  # fmt: skip
        return setup_copy


def _parts_before_setup(components: Parts) -> dict[str, Any]:
    """Return the parts by group as they were before their setup; copies if one of them is user-defined."""
    groups = {entry.name: getattr(components, entry.name) for entry in dataclasses.fields(Parts)}
    if not any(contains_user_code(component) for group, component in groups.items() if group != "dataset"):
        return groups
    return copy_components(groups, components.dataset)


def copy_components(groups: dict[str, Any], dataset: Dataset) -> dict[str, Any]:
    """Return copies of parts that share the data set; objects that two parts share are shared by their copies."""
    copies = PartCopier(dataset)
    return {group: copies(component) for group, component in groups.items()}
