"""`fedsim algorithms`: a catalogue of strategies, local rules, columns and uplink stages, generated from their classes.

Nothing here is a list to keep: papers stand in docstrings, what is remembered is what a class makes for three clients
and a model of five numbers, and what it assumes is what it refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.app.commands.assumed import requirements_text
from fedsim.app.comments import first_comment
from fedsim.app.config import choice_target, config_folder, groups
from fedsim.availability import Full, Population
from fedsim.core import checks
from fedsim.core.column_names import ColumnsByName
from fedsim.core.columns import OWN_COLUMNS_ENTRY
from fedsim.core.constraints import declared_type_hints, describe_allowed_values
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation, FullDataGradients
from fedsim.core.memory import Memory
from fedsim.local import LocalRule
from fedsim.models.selectors import Selector
from fedsim.uplink import Uplink

LISTED_GROUPS = ("strategy", "local", "columns", "uplink", "attack")
CLIENTS, COLUMNS = 3, 5  # size of the federation on which algorithms are tried
PROCESS_CLIENTS = 100  # clients of the availability processes
PAPER_PATTERN = re.compile(
    r"\(([^()]*(?:\b(?:19|20)\d\d\b|\bprofl\b|\bfedawe\b|\bfedpbc\b|\bp-fedavg\b|\bapfl\b)[^()]*)\)"
)
NON_ALGORITHMS = ("none", "custom", "all", "by_name")  # no algorithms


@dataclass(frozen=True)
class AlgorithmChoice:
    """One choice of a configuration group.

    Attributes:
        group, name: as on the command line.
        kind: its class.
        instance: an object of it, as the choice's file has it.
    """

    group: str
    name: str
    kind: type
    instance: Any

    @property
    def summary(self) -> str:
        """The description of the choice in one line, from its file."""
        return first_comment(config_folder() / self.group / f"{self.name}.yaml")

    @property
    def paper(self) -> str:
        """The first paper that is named: in the choice's file, the class's first paragraph, its module, or below."""
        docstring, module = inspect.getdoc(self.kind) or "", inspect.getmodule(self.kind)
        for text in (self.summary, docstring.split("\n\n")[0], (module and module.__doc__) or "", docstring):
            if match := PAPER_PATTERN.search(text):
                return " ".join(match[1].split()).split(":")[0]
        return ""

    @property
    def kept_tensors_text(self) -> str:
        """Describe the tensors that are kept between rounds in addition to the server's model."""
        tensors = [(name, list(value.shape), value.dtype) for name, value in _remembered_tensors(self).items()]
        return ", ".join(f"{name}: {_tensor_size_text(shape, kind)}" for name, shape, kind in tensors) or "nothing"

    @property
    def traffic_text(self) -> str:
        """Describe the numbers sent per participating client and round; d is the number of model parameters, in
        float32."""
        if self.group == "strategy":
            vectors_down_text, vectors_up_text = (
                _vector_bytes_text(getattr(self.instance, f"vectors_{direction}")) for direction in ("down", "up")
            )
            return f"{vectors_down_text} down, {vectors_up_text} up"
        if self.group == "columns":
            return "4 bytes of every number that travels, down and up"
        if self.group == "local":
            is_default_traffic = type(self.instance).extra_transmitted_numbers is LocalRule.extra_transmitted_numbers
            return "nothing more" if is_default_traffic else "what the server estimates with clients, where it does"
        code = Uplink(self.instance).code(1000, 4)
        return f"{code.bytes} bytes up where d = 1000"

    @property
    def assumptions_text(self) -> str:
        """Describe the requirements without which the algorithm refuses to run."""
        if self.group == "strategy":
            assumptions = [
                *_supported_availability_names(self.instance),
                *_compatible_local_rules(self.instance),
                *_column_requirements(self.instance),
            ]
            if self.instance.needs_full_gradients:
                assumptions.append("clients answer for all their data")
            if self.instance.needs_validation_losses:
                assumptions.append("clients have validation samples (partition.validation)")
            return "; ".join(assumptions) or "nothing"
        if self.group == "local":
            return "one client that holds all data" if self.instance.pooled else requirements_text(self.instance)
        if self.group == "columns":
            return next(
                (
                    description
                    for description, module in _example_models().items()
                    if _selector_fits(self.instance, module)
                ),
                "nothing",
            )
        return "clients that send (not local_only)"


def main(arguments: list[str]) -> None:
    """Print the catalogue, or all details of the named algorithms."""
    parser = argparse.ArgumentParser("fedsim algorithms", description=f"Show {COMMAND_DESCRIPTIONS['algorithms']}.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="choices, such as fedawe or uplink=topk")
    options = parser.parse_args(arguments)
    catalogue = list(algorithms())
    for name in options.names:
        checks.check_choice("NAME", name.rpartition("=")[2], [algorithm.name for algorithm in catalogue])
    selection = [name.rpartition("=")[::2] for name in options.names]
    for algorithm in catalogue:
        if (algorithm.group, algorithm.name) in [(group or algorithm.group, name) for group, name in selection]:
            print(
                f"{algorithm.group}={algorithm.name}: {algorithm.summary}\n\n{inspect.getdoc(algorithm.kind)}\n\n"
                f"{algorithm_details(algorithm)}\n{allowed_values_text(algorithm)}\n"
            )
    if not selection:
        print(
            "\n\n".join(
                f"{group}\n"
                + "\n".join(algorithm_line(algorithm) for algorithm in catalogue if algorithm.group == group)
                for group in LISTED_GROUPS
            )
        )
        print("\n`fedsim algorithms NAME` describes an algorithm.")


def algorithm_line(algorithm: AlgorithmChoice) -> str:
    """Return one line about an algorithm."""
    names_paper = algorithm.paper and algorithm.paper not in algorithm.summary
    return f"  {algorithm.name:20} {algorithm.summary}{f' ({algorithm.paper})' if names_paper else ''}"


def algorithm_details(algorithm: AlgorithmChoice) -> str:
    """Return the details of an algorithm in addition to its docstring."""
    facts = {
        "remembers": algorithm.kept_tensors_text,
        "sends": algorithm.traffic_text,
        "assumes": algorithm.assumptions_text,
    }
    return "\n".join(f"{name:10} {value}" for name, value in facts.items())


def allowed_values_text(algorithm: AlgorithmChoice) -> str:
    """Describe the allowed values of its parameters, as its constructor declares them."""
    lines = [f"{name}: {describe_allowed_values(hint)}" for name, hint in declared_type_hints(algorithm.kind).items()]
    return "\n".join(f"{'allows' if not number else '':10} {line}" for number, line in enumerate(lines))


@functools.cache
def algorithms() -> tuple[AlgorithmChoice, ...]:
    """List the algorithms, group by group."""
    return tuple(
        _algorithm_of(group, name) for group in LISTED_GROUPS for name in groups()[group] if name not in NON_ALGORITHMS
    )


def _algorithm_of(group: str, name: str) -> AlgorithmChoice:
    """Return a choice as its file describes it; values that the file takes from elsewhere are the class's defaults."""
    node = OmegaConf.to_container(OmegaConf.load(config_folder() / group / f"{name}.yaml"), resolve=False)
    assert isinstance(node, dict)
    subnode = node.get(name)
    settings = subnode if isinstance(subnode, dict) and "_target_" in subnode else node
    settings = {str(k): v for k, v in settings.items() if k != "defaults" and not (isinstance(v, str) and "${" in v)}
    return AlgorithmChoice(group, name, get_class(settings["_target_"]), instantiate(settings, _convert_="all"))


@functools.cache
def _example_federation() -> Federation:
    return Federation((0,), CLIENTS, np.ones(CLIENTS), full_data_oracle=_empty_gradients)


def _empty_gradients(cohort: Cohort, models: Tensor) -> FullDataGradients:
    """Return the gradients that clients without data report for models."""
    return FullDataGradients(models.new_zeros(len(cohort)), models.new_zeros(len(cohort), models.shape[1]))


def _remembered_tensors(algorithm: AlgorithmChoice) -> dict[str, Tensor]:
    """Return names and tensors of everything that the algorithm stores."""
    federation, model = _example_federation(), torch.zeros(1, COLUMNS)
    if algorithm.group == "columns":
        return {OWN_COLUMNS_ENTRY: federation.zeros(0)}  # how much depends on the model
    if algorithm.group == "strategy":
        state = algorithm.instance.initial(model, federation)
        return {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name != "model"}
    if algorithm.group == "local":
        try:
            tensors = algorithm.instance.memory(federation, COLUMNS)
        except AttributeError:  # it depends on the data
            tensors = {}
        return tensors | {name: federation.broadcast(model) for name in algorithm.instance.own_models}
    memory = Memory()
    Uplink(algorithm.instance).add_stage_memory(memory, federation, model)
    return {name.split()[-1]: value for name, value in (memory.uplink | memory.server).items()}


@functools.cache
def _example_models() -> dict[str, nn.Module]:
    """Return model feature → a small example model that has it, in ascending order of features."""
    first_layer, second_layer = (nn.Linear(2, 2) for _ in range(2))
    return {
        "any model": first_layer,
        "a model of several layers": nn.Sequential(first_layer, second_layer),
        "a model with batch normalisation": nn.Sequential(first_layer, nn.BatchNorm1d(2), second_layer),
    }


def _selector_fits(selector: Selector, module: nn.Module) -> bool:
    try:
        selector.private_parameters(module, [name for name, _ in module.named_parameters()])
    except ConfigError:
        return False
    return True


def _tensor_size_text(shape: list[int], kind: torch.dtype) -> str:
    """Describe the size of a tensor of this shape, for three clients and a model of five numbers."""
    quantity, owner = (
        ("number" if len(shape) < 2 else "row"),
        {CLIENTS: "each client", 1: "the server"}.get(shape[0], ""),
    )
    if shape[1:] == [0]:  # how many depends on the model
        return f"a part of a row of {owner}"
    if len(shape) > 1 and shape[1:] != [COLUMNS]:
        quantity = f"{' × '.join('d' if n == COLUMNS else str(n) for n in shape[1:])} numbers"
    return f"a {quantity} of {owner}" if quantity in ("number", "row") else f"{quantity} of {owner}"


def _vector_bytes_text(count: int) -> str:
    return "nothing" if not count else f"{4 * count} d bytes"


def _supported_availability_names(strategy: Any) -> Iterator[str]:
    """Return the availability processes under which the algorithm runs, unless it runs under all of them."""
    runs: list[str] = []
    refusing_processes: list[str] = []
    for name, process in _file_free_availabilities().items():
        try:
            strategy.check(process)
            runs.append(name)
        except ConfigError:
            refusing_processes.append(name)
    if refusing_processes:
        runs_are_fewer = len(runs) <= len(refusing_processes)
        if refusing_processes == ["unknown"]:
            yield "the true p_i^t are known"
        else:
            yield (
                f"availability={', '.join(runs)}"
                if runs_are_fewer
                else f"availability none of {', '.join(refusing_processes)}"
            )


@functools.cache
def _file_free_availabilities() -> dict[str, Any]:
    """Return the availability processes that need no files; one of those that share a class."""
    processes: dict[str, Any] = {}
    for name in groups()["availability"]:
        if name != "custom":
            with contextlib.suppress(TypeError, ConfigError, KeyError):  # one that needs a file, or is made of another
                processes[name] = get_class(choice_target("availability", name))()
    processes["unknown"] = UnknownProbabilityAvailability()
    for process in processes.values():
        process.setup(Population((0,), PROCESS_CLIENTS))
    return processes


class UnknownProbabilityAvailability(Full):
    """An availability process whose probabilities are unknown."""

    law = "unknown"
    unknown_reason = "is a record"


def _column_requirements(strategy: Any) -> Iterator[str]:
    """Describe the partition of columns that its model must have."""
    try:
        strategy.check_columns(ColumnsByName())
    except ConfigError as error:
        residuals = "model.residual" in str(error)
        yield f"a model with adapters{' and residuals' if residuals else ''} (model=lora_mlp)"


def _compatible_local_rules(strategy: Any) -> Iterator[str]:
    """Return the local rules with which the algorithm runs, unless it runs with all: it refuses some, and some do
    not use what it passes to clients."""
    empty_cohort = _example_federation().make_cohort(np.zeros((1, CLIENTS)), np.zeros((1, CLIENTS)))
    state = strategy.initial(torch.zeros(1, COLUMNS), _example_federation())
    start = strategy.start(state, empty_cohort)
    carry_keys = set(start) - {"params"} if isinstance(start, dict) else set()
    runs: list[str] = []
    refusing_processes: list[str] = []
    for algorithm in algorithms():
        if algorithm.group != "local" or algorithm.instance.pooled:
            continue
        try:
            strategy.check_local(algorithm.instance)
            is_compatible = carry_keys <= algorithm.instance.supported_keys
        except ConfigError:
            is_compatible = False
        (runs if is_compatible else refusing_processes).append(algorithm.name)
    if refusing_processes:
        yield (
            f"local={', '.join(runs)}"
            if len(runs) <= len(refusing_processes)
            else f"local none of {', '.join(refusing_processes)}"
        )
