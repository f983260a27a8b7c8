"""Whether an executor gives the same numbers as plain PyTorch: a user's module and loss are tried before anything is
written.

The reference is the way one would write it by hand: a fresh copy of the module for each client, `loss.backward()`, a
step along the gradients, batches without padding. An executor takes the same clients through the same batches; where it
ends elsewhere it is not used. Modules and losses of this package and of torchvision are not tried, the tests do that.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.core import rng, streams
from fedsim.core.errors import ConfigError, first_message_line
from fedsim.core.snapshot import snapshot, snapshot_key
from fedsim.data.samples import Batch, Batches
from fedsim.local import SGD
from fedsim.models import LOSSES, StatelessModel
from fedsim.models.calling import cast_output
from fedsim.models.copying import copy_module, get_named_tensor, set_module_tensors
from fedsim.models.probe import ForwardTraits
from fedsim.models.row_model import is_built_in
from fedsim.models.user_loss import loss_label, unwrap_loss
from fedsim.shift import NoShift

TRIAL_LEARNING_RATE = 0.01
DOUBLE_PRECISION_TOLERANCE = (
    1e-7  # tolerance of double-precision updates, relative to the largest; modules may use single precision inside
)
SINGLE_PRECISION_TOLERANCE = 1e-3  # of single-precision moves, for modules that cannot run in double precision
TRIAL_STEPS = 8
NUM_TRIED_BATCH_SIZES = 8  # number of the run's batch sizes that are tried
MAX_TRIED_BATCH_SIZE = 256  # number of samples of the largest batch that is tried

TrialRunner = Callable[["AgreementTrial", StatelessModel], Tensor]


def is_model_built_in(model: StatelessModel) -> bool:
    """Return whether the module is one of this package's or torchvision's, and the loss one of this package's."""
    return is_built_in(model.training_module) and model.loss in LOSSES.values()


@dataclass
class AgreementTrial:
    """Three clients with batches of different sizes, as an executor's chunk.

    Attributes:
        source_samples: what their batches are made of, 'x' [N, …] and so on.
        rows: [3, d] where they begin.
        sizes: [3, S] samples of each batch (host), 0 after a client's last.
        num_trained_columns: how many of the columns are trained parameters.
    """

    source_samples: Batch
    rows: Tensor
    sizes: np.ndarray
    num_trained_columns: int

    @property
    def steps(self) -> np.ndarray:
        """The number of local steps of each client, [3], descending."""
        steps: np.ndarray = np.count_nonzero(self.sizes, axis=1)
        return steps

    def active_row_counts(self) -> list[int]:
        """The number of clients that take each of the steps."""
        return [int(np.count_nonzero(self.sizes[:, step])) for step in range(self.sizes.shape[1])]

    def batch(self, step: int, first_row: int, stop: int, dtype: torch.dtype) -> Batch:
        """Return the batch of clients first…stop−1 at a step, padded to the largest, as `samples.Chunk.batch` does."""
        batch_sizes = self.sizes[first_row:stop, step]
        batch_width = int(batch_sizes.max())
        clients = torch.arange(first_row, stop, device=self.rows.device)
        count = len(self.source_samples["x"])
        slot = (torch.arange(batch_width, device=self.rows.device) + 3 * clients[:, None] + 5 * step) % count
        batch = {name: value[slot] for name, value in self.source_samples.items()}
        batch |= {"client": clients, "row": clients, "key": rng.fold_in(clients + 1, step)}
        if int(batch_sizes.min()) < batch_width:
            size_tensor = torch.as_tensor(batch_sizes, device=self.rows.device)
            batch["weight"] = (torch.arange(batch_width, device=self.rows.device) < size_tensor[:, None]).to(dtype)
        return batch

    def contaminate(self, batch: Batch, step: int, first_row: int, stop: int) -> Batch:
        """Return the batch unchanged: samples are not contaminated."""
        return batch

    def batch_of_client(self, client: int, step: int, dtype: torch.dtype) -> Batch:
        """Return the batch of one client, without padding."""
        return {name: value[0] for name, value in self.batch(step, client, client + 1, dtype).items()}


def make_agreement_trial(model: StatelessModel, samples: Batch, batch_sizes: tuple[int, ...]) -> AgreementTrial:
    """Return clients with batches of these sizes in turn, and with different models."""
    row = model.initial([0])[0]
    sine_values = torch.sin(torch.arange(1.0, 3 * model.trained + 1)).reshape(3, -1).to(row)
    rows = row.repeat(3, 1)
    rows[:, : model.trained] += 0.02 * sine_values
    order = [list(itertools.islice(itertools.cycle(np.roll(batch_sizes, shift)), TRIAL_STEPS)) for shift in range(3)]
    table = np.array(order)
    table[1:, -1] = 0  # two clients finish one step earlier
    return AgreementTrial(samples, rows, table, model.trained)


def reference_final_parameters(trial: AgreementTrial, model: StatelessModel) -> Tensor:
    """Return the rows [3, d] at which plain PyTorch ends, client by client."""
    return torch.stack([_reference_trained_row(trial, model, client) for client in range(len(trial.rows))])


def is_loss_repeatable(trial: AgreementTrial, model: StatelessModel) -> bool:
    """Return whether the loss gives the same value twice for the same output and batch."""
    batch, module = trial.batch_of_client(0, 0, model.dtype), copy_module(model.training_module)
    with torch.no_grad(), model.random_context(batch):
        output = cast_output(model.call(module, model.call.inputs(batch)), model.dtype)
        return bool(torch.equal(model.loss(output, batch), model.loss(output, batch)))


def _reference_trained_row(trial: AgreementTrial, model: StatelessModel, client: int) -> Tensor:
    module, row = copy_module(model.training_module), trial.rows[client]
    parameters_by_name = dict(module.named_parameters())
    for name, value in model.unflatten(row).items():
        parameters_by_name[name].data = value.clone()
    set_module_tensors(module, model.unflatten_statistics(row))
    dropouts = [module.get_submodule(name.rpartition(".")[0]) for name in model.dropout_keys]
    parameters = [p for p in module.parameters() if p.requires_grad]
    for step in range(int(trial.steps[client])):
        batch = trial.batch_of_client(client, step, model.dtype)
        for dropout in dropouts:
            dropout.key = batch["key"]
        module.zero_grad()
        with torch.enable_grad():
            with model.random_context(batch):
                output = cast_output(model.call(module, model.call.inputs(batch)), model.dtype)
            buffers_before = _copy_buffers(module)
            model.objective(output, batch, parameters).backward()
            _check_no_writes_in_backward(module, buffers_before)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.sub_(TRIAL_LEARNING_RATE * parameter.grad.to_dense())
    trained_columns = [p.detach().reshape(-1) for p in parameters]
    statistics_columns = [
        get_named_tensor(module, name).detach().reshape(-1).to(model.dtype) for name in model.statistics
    ]
    return torch.cat([*trained_columns, *statistics_columns])


def _copy_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_buffers()}


def _check_no_writes_in_backward(module: nn.Module, buffers_before: dict[str, Tensor]) -> None:
    """Refuse buffers that a hook or a `torch.autograd.Function` writes in the backward pass, since a client's
    statistics are those after its forward pass."""
    for name, value in _copy_buffers(module).items():
        if name in buffers_before and not torch.equal(value.nan_to_num(), buffers_before[name].nan_to_num()):
            raise ConfigError(
                f"model: {type(module).__name__} writes to its buffer {name!r} in the backward pass, which is not kept "
                "for each client; write to buffers in the forward pass"
            )


def make_executor_trial_runner(make_executor: Callable[[StatelessModel], Any]) -> TrialRunner:
    """Return the function that computes the rows [3, d] at which an executor ends."""

    def run(trial: AgreementTrial, model: StatelessModel) -> Tensor:
        rates = torch.full((TRIAL_STEPS, len(trial.rows)), TRIAL_LEARNING_RATE, dtype=model.dtype, device=model.device)
        end_rows: Tensor = make_executor(model).run(trial, {"params": trial.rows.clone()}, rates, None)[0]["params"]
        return end_rows

    return run


class ExecutorAgreement:
    """Which executors give the same numbers as plain PyTorch for one model and its loss; each is tried once.

    Args:
        model: of the run.
        batches: where the run's samples and batch sizes come from.
        make_executor: (name, model, rule, shift) → an executor.

    Raises:
        ConfigError: the module cannot be trained on batches of the run's sizes, or not in a repeatable way.
    """

    def __init__(self, model: StatelessModel, batches: Batches, make_executor: Callable[..., Any]) -> None:
        self._make_executor = make_executor
        self._verdict_by_case: dict[tuple[str, bool, bool], str | None] = {}
        self.model, self.tolerance = model, SINGLE_PRECISION_TOLERANCE
        samples = batches.data.example_samples(min(max(batches.largest, 8), MAX_TRIED_BATCH_SIZE), model.dtype)
        with streams.suppress_trial_effects():
            try:
                double_model = model.to_double_precision()
                exact = {n: v.double() if v.is_floating_point() else v for n, v in samples.items()}
                self.expected_end_rows = self._compute_expected_end_rows(double_model, exact, batches)
                self.model, self.tolerance = double_model, DOUBLE_PRECISION_TOLERANCE
            except (ConfigError, MemoryError):
                raise
            except Exception:  # a module may require single precision
                try:
                    self.expected_end_rows = self._compute_expected_end_rows(model, samples, batches)
                except (ConfigError, MemoryError):
                    raise
                except Exception as error:
                    raise ConfigError(
                        f"model: {type(model.training_module).__name__} cannot be trained with its loss: a step of "
                        f"plain PyTorch raised {type(error).__name__}: {first_message_line(error)[:300]}"
                    ) from error

    def _compute_expected_end_rows(self, model: StatelessModel, samples: Batch, batches: Batches) -> Tensor:
        sizes = self._agreement_batch_sizes(model, samples, batches)
        self.trial = make_agreement_trial(model, samples, sizes)
        expected = reference_final_parameters(self.trial, model)
        streams.reseed_global_generators(2)
        if not self._moves_agree(
            expected,
            reference_final_parameters(self.trial, model),
            0.0 if model.device.type == "cpu" else self.tolerance,
        ):
            if not is_loss_repeatable(self.trial, model):
                raise ConfigError(
                    f"{loss_label(unwrap_loss(model.loss))} returns another value when it is called again "
                    "with the same output and batch; a loss must keep no state, since all clients share it"
                )
            raise ConfigError(
                f"model: {type(model.training_module).__name__} gives other numbers the second time from the same "
                "model and samples; what it keeps or draws outside of parameters and buffers is shared by all clients"
            )
        return expected

    def _agreement_batch_sizes(self, model: StatelessModel, samples: Batch, batches: Batches) -> tuple[int, ...]:
        """Return the batch sizes to try: 7 and 2, and the run's largest and smallest, if the module takes them."""
        occurring_sizes = [size for size in batches.distinct_batch_sizes if size <= MAX_TRIED_BATCH_SIZE] or [
            min(batches.largest, MAX_TRIED_BATCH_SIZE)
        ]
        spread = (
            np.linspace(0, len(occurring_sizes) - 1, min(len(occurring_sizes), NUM_TRIED_BATCH_SIZES))
            .round()
            .astype(int)
        )
        occurring_sizes = [occurring_sizes[index] for index in spread]
        accepted_sizes, error_by_size = [], dict[int, Exception]()
        for size in dict.fromkeys((7, 2, *occurring_sizes)):
            trial = make_agreement_trial(model, samples, (size,))
            trial.sizes[:, 1:] = 0
            try:
                reference_final_parameters(trial, model)
                accepted_sizes.append(size)
            except (ConfigError, MemoryError):
                raise
            except Exception as error:
                error_by_size[size] = error
        for size in occurring_sizes:
            if size in error_by_size and size >= model.traits.min_batch:
                reason = error_by_size[size]
                raise ConfigError(
                    f"model: {type(model.training_module).__name__} cannot be trained on a batch of {size} samples, "
                    f"which clients have: plain PyTorch raised {type(reason).__name__}: "
                    f"{first_message_line(reason)[:300]}"
                ) from reason
        if not accepted_sizes:
            raise next(iter(error_by_size.values()))
        return tuple(accepted_sizes[:TRIAL_STEPS])

    def executor_refusal_reason(self, executor_name: str, traits: ForwardTraits) -> str | None:
        """Return why this executor cannot be used, in a few words; None if it gives the same numbers."""
        key = executor_name, traits.mixes_samples, traits.isolation_reason is not None
        if key not in self._verdict_by_case:
            self._verdict_by_case[key] = self._try_executor(executor_name, traits)
        return self._verdict_by_case[key]

    def _try_executor(self, executor_name: str, traits: ForwardTraits) -> str | None:
        model, self.model.traits = self.model, traits
        run = make_executor_trial_runner(
            lambda of: self._make_executor(executor_name, of, SGD(lr=TRIAL_LEARNING_RATE), NoShift())
        )
        with streams.suppress_trial_effects():
            try:
                end_rows = run(self.trial, model)
            except (ConfigError, MemoryError):
                raise
            except Exception as error:
                return first_message_line(error, type(error).__name__)[:200]
        return (
            None
            if self._moves_agree(self.expected_end_rows, end_rows, self.tolerance)
            else "it gives other numbers than plain PyTorch"
        )

    def _moves_agree(self, expected: Tensor, end_rows: Tensor, tolerance: float) -> bool:
        """Compare moves relative to the largest move of each client, separately for parameters and statistics."""
        trained = self.trial.num_trained_columns
        for columns in (slice(0, trained), slice(trained, None)):
            expected_moves, actual_moves = (
                (rows - self.trial.rows.to(rows))[:, columns] for rows in (expected, end_rows)
            )
            if not expected_moves.shape[1]:
                continue
            scale = expected_moves.abs().nan_to_num(0, 0, 0).amax(1, keepdim=True)
            deviations = (expected_moves - actual_moves).abs()
            if not torch.equal(expected_moves.isnan(), actual_moves.isnan()) or bool(
                (deviations > tolerance * scale + 1e-14).any()
            ):
                return False
        return True


MAX_REMEMBERED_MODULES = 32  # number of modules whose results are cached in this process
_agreement_by_model: OrderedDict[Hashable, ExecutorAgreement] = OrderedDict()


def cached_agreement(
    model: StatelessModel, batches: Batches, make_executor: Callable[..., Any]
) -> ExecutorAgreement | None:
    """Return the agreement of a model and its loss, cached within the process; None for trusted ones."""
    if is_model_built_in(model):
        return None
    model_snapshot = snapshot(
        [model.training_module, unwrap_loss(model.loss), model.call, model.ridge, model.precision]
    )
    kinds = [
        (name, value.shape[1:], value.dtype) for name, value in batches.data.example_samples(2, model.dtype).items()
    ]
    cache_key = (
        snapshot_key(model_snapshot),
        batches.distinct_batch_sizes,
        str(model.device),
        tuple(model.statistics),
        tuple(kinds),
    )
    if cache_key not in _agreement_by_model:
        _agreement_by_model[cache_key] = ExecutorAgreement(model, batches, make_executor)
        if len(_agreement_by_model) > MAX_REMEMBERED_MODULES:
            _agreement_by_model.popitem(last=False)
    return _agreement_by_model[cache_key]
