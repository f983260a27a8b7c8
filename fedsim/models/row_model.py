"""A module as a function of one row: its columns, initial rows of replicates, predictions, losses.

A row holds everything of a client's model that changes: first its trained parameters, then its statistics, which are
the buffers that a forward pass in training moves (a batch normalisation's running mean, a counter). A gradient is zero
in the columns of statistics; who takes a step carries them out of the forward pass (`fedsim.trainer.statistics`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from fedsim.core import rng, streams
from fedsim.core.column_names import ColumnsByName
from fedsim.core.columns import ParameterPartition
from fedsim.core.errors import ConfigError, first_message_line
from fedsim.models.calling import Inputs, ModuleCaller, cast_output, tied_names
from fedsim.models.copying import copy_module, get_named_tensor, refuse_parameter_hooks
from fedsim.models.dropout import key_dropouts
from fedsim.models.features import FeatureLayer
from fedsim.models.frozen_prefix import FrozenPrefix
from fedsim.models.losses import LOSSES, UNLABELLED_LOSSES, LossFunction, weighted_mean
from fedsim.models.naming import StateDictLayout, named_views
from fedsim.models.precision import check_precision
from fedsim.models.probe import (
    DIFFERENT_NUMBERS_REASON,
    ForwardTraits,
    difference_reason,
    name_forward_errors,
    probe_forward_traits,
    second_row_vmap_result,
)
from fedsim.models.randomness import KeyedRandomness
from fedsim.models.selectors import Selector
from fedsim.models.substitution import (
    SharedTensorPair,
    check_parameter_substitution,
    overlapping_tensors,
    refuse_complex,
    refuse_shared_memory,
)
from fedsim.models.user_loss import UserLoss, cast_loss, resolve_user_loss
from fedsim.models.writes import TensorWriteGuard

ASKED_AGAIN = 5  # number of times that a selector is asked for its names
TRUSTED_PACKAGES = ("fedsim", "torchvision")  # packages whose modules are checked by the tests and not in each run
log = logging.getLogger(__name__)


def is_built_in(component: object) -> bool:
    """Return whether a class belongs to this package or to torchvision, whose modules the tests try once for all
    runs."""
    return type(component).__module__.partition(".")[0] in TRUSTED_PACKAGES


def _scores_classes(output: Any, y: Tensor | None, classes: int | None) -> bool:
    """Return whether outputs are scores of the classes, as an accuracy needs them."""
    if not isinstance(output, Tensor) or y is None or classes is None:
        return False
    if y.is_floating_point():
        return output.shape == y.shape
    return output.shape == (*y.shape, classes) or (classes == 2 and output.shape == (*y.shape, 1))


def _has_class_dim_second(output: Any, y: Tensor | None, classes: int | None) -> bool:
    """Return whether outputs may be [B, C, …] for labels of positions [B, …], as convolutions give them."""
    if not isinstance(output, Tensor) or y is None or y.is_floating_point() or y.dim() < 2:
        return False
    return output.dim() > 2 and output.movedim(1, -1).shape == (*y.shape, classes)


def _are_classes_second(loss: LossFunction, output: Any, batch: Mapping[str, Tensor], classes: int | None) -> bool:
    """Return whether classes are in the second dimension. If there are as many classes as positions, it is the
    dimension in which a larger score of the label lowers the user's loss more."""
    y = batch.get("y")
    if not _has_class_dim_second(output, y, classes):
        return False
    if not _scores_classes(output, y, classes):
        return True
    assert y is not None
    leaf = output.detach().clone().requires_grad_()
    try:
        with torch.enable_grad(), streams.preserve_rng_states():
            (gradient,) = torch.autograd.grad(loss(leaf, batch).sum(), leaf)
    except Exception:  # a loss that needs more samples than two
        return False
    labels = y.clamp(min=0)
    return bool(gradient.gather(1, labels[:, None]).sum() < gradient.gather(-1, labels[..., None]).sum())


class StatelessModel:
    """Wraps the constructor of a module; the module itself stays stateless.

    Args:
        build: returns a freshly initialised module; called once per replicate, each time from the replicate's seed. Or
            a ready `nn.Module`: then every replicate starts from its parameters.
        loss: a name in `LOSSES`, or a callable (output [B, …], batch) → [B].
        ridge: λ of the penalty λ/2 ‖θ‖² added to every loss.
        device, dtype: of the rows.
        precision: of training, see `fedsim.models.precision`.
        pair: a batch of some samples, by which lazy layers learn their shapes: 'x', and 'y' where there are targets;
            what else it holds are further inputs, which the module gets as keywords.
        output: which of the things that the module returns, see `fedsim.models.calling`.

    Attributes:
        shapes: of the trained parameters, by name.
        statistics: shapes of the statistics, by name; known after `check`.
        trained: how many trained parameters there are.
        dimension: d, columns of a row: those, and the statistics.
        private_parameters: names of what stays with the client.
        received_parameters: names of those that clients receive and do not train: layers name theirs in an attribute
            `received_parameters`, and detach them in their forward pass.
        feature_layer: whose features the local rule asks for; None for none.
        dropout_keys: names of the buffers that carry a client's dropout key.
        traits: what a forward pass does, see `fedsim.models.probe`.
        tensor_output: whether the module returns a tensor in evaluation, known after `check`; else a loss of the user's
            takes what it returns.
        labelled: whether outputs are scores of the data set's classes, so that there is an accuracy; known after
            `check`.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] | nn.Module,
        loss: str | LossFunction = "cross_entropy",
        ridge: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        precision: str = "full",
        pair: Mapping[str, Tensor] | None = None,
        output: str | int | None = None,
    ) -> None:
        if not callable(loss) and (not isinstance(loss, str) or loss not in LOSSES):
            raise ConfigError(f"model.loss={loss!r} is unknown; choose one of {', '.join(LOSSES)}")
        self.loss: LossFunction = loss if callable(loss) else LOSSES[loss]
        self.ridge = ridge
        self.device, self.dtype = device or torch.device("cpu"), dtype
        self.precision = check_precision(precision, self.device, dtype)
        if isinstance(build, nn.Module):
            refuse_parameter_hooks(build)
        self._build = (lambda: copy_module(build)) if isinstance(build, nn.Module) else build
        self._given_module = build if isinstance(build, nn.Module) else None
        self._original_module: nn.Module | None = None  # the template is a copy of it, until `check`
        self._shared_memory: list[SharedTensorPair] = []
        self._two_samples, self.call = pair, ModuleCaller(output, tuple(sorted((pair or {}).keys() - {"x", "y"})))
        template = self._make_template_module()
        self.dropout_keys = key_dropouts(template, self.device)
        self.call.aliases = tied_names(template)
        self.training_module = template.train()
        self.evaluation_module = copy_module(template).eval()
        self.shapes = {name: p.shape for name, p in template.named_parameters() if p.requires_grad}
        self.statistics: dict[str, torch.Size] = {}
        self._kinds: dict[str, torch.dtype] = {}
        self._checked_samples: Mapping[str, Tensor] | None = None
        self.trained = self.dimension = sum(s.numel() for s in self.shapes.values())
        self.private_parameters, self.traits = set[str](), ForwardTraits()
        self.feature_layer: FeatureLayer | None = None
        self.received_parameters = {
            f"{prefix}.{leaf}" if prefix else leaf
            for prefix, layer in template.named_modules()
            for leaf in getattr(layer, "received_parameters", ())
        } & self.shapes.keys()
        if ridge and self.received_parameters:
            raise ConfigError(
                f"model.ridge={ridge} would shrink {min(self.received_parameters)}, which clients do not train; give 0"
            )
        self.labelled = self._scores_second = False
        self.tensor_output = True
        if not self.trained:
            raise ConfigError("model: the module has no trainable parameters")
        self.columns = self._column_partition()
        self.convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in template.modules())

    def _make_template_module(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # frozen parameters and random buffers come from the template
            try:
                template = self._build_module()
            except TypeError as error:
                raise ConfigError(f"model cannot be built: {error}") from error
        if not isinstance(template, nn.Module):
            raise ConfigError(f"model: expected a torch.nn.Module, got {type(template).__name__}")
        refuse_parameter_hooks(template)
        trained = [name for name, parameter in template.named_parameters() if parameter.requires_grad]
        refuse_complex(template, trained)
        self._shared_memory, self._original_module = (
            overlapping_tensors(self._given_module or template),
            self._given_module or template,
        )
        # A copy, since what `build` returns may share layers with the user's other modules.
        return copy_module(template).to(self.device, self.dtype)

    def _build_module(self) -> nn.Module:
        """Build a user's module; parameters of lazy layers are initialised."""
        module = self._build()
        lazy = isinstance(module, nn.Module) and any(map(is_lazy, [*module.parameters(), *module.buffers()]))
        if lazy and self._two_samples is not None:
            kind = torch.get_default_dtype()
            inputs = tree_map(
                lambda v: v.to("cpu", kind if v.is_floating_point() else None), self.call.inputs(self._two_samples)
            )
            with torch.no_grad(), name_forward_errors(module):
                self.call(module.eval(), inputs)
        return module

    @property
    def needs_keys(self) -> bool:
        """Whether batches contain a 'key' for random numbers in the forward pass."""
        return bool(self.dropout_keys) or self.traits.random or (isinstance(self.loss, UserLoss) and self.loss.random)

    @property
    def loss_mixes_samples(self) -> bool:
        """Whether a sample's loss depends on the other samples of its batch."""
        return isinstance(self.loss, UserLoss) and self.loss.mixes_samples

    @property
    def mixes_samples(self) -> bool:
        """Whether batches in training must not be padded, since the module or the loss depends on the batch as a
        whole."""
        return self.traits.mixes_samples or self.loss_mixes_samples

    def timing_key(self) -> tuple[Hashable, ...]:
        """The properties on which the time of a step depends."""
        return str(self.training_module), *self.shapes.values(), self.device, self.dtype, self.precision

    def initial(self, seeds: Sequence[int]) -> Tensor:
        """Return one newly initialised row per replicate, [R, d]."""
        rows: dict[int, Tensor] = {}
        for seed in dict.fromkeys(seeds):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(rng.generator(seed, rng.Purpose.MODEL).integers(2**63)))
                module = self._build_module()
            flat_tensors = [p.detach().reshape(-1) for p in module.parameters() if p.requires_grad]
            flat_tensors += [
                get_named_tensor(module, name).detach().reshape(-1).to(self.dtype) for name in self.statistics
            ]
            rows[seed] = torch.cat([tensor.to(self.device, self.dtype) for tensor in flat_tensors])
        return torch.stack([rows[seed] for seed in seeds])

    def to_double_precision(self) -> StatelessModel:
        """The same model in double precision."""
        if self.dtype == torch.float64:
            return self
        loss = cast_loss(self.loss, self.device, torch.float64) if isinstance(self.loss, UserLoss) else self.loss
        double_model = StatelessModel(self._build, loss, self.ridge, self.device, torch.float64, pair=self._two_samples)
        double_model.call, double_model.labelled, checked = self.call, self.labelled, self._checked_samples
        double_model.feature_layer = self.feature_layer
        double_model.tensor_output, double_model._scores_second = self.tensor_output, self._scores_second
        double_model._checked_samples = checked and {
            n: v.double() if v.is_floating_point() else v for n, v in checked.items()
        }
        double_model._apply_probe_findings(self.traits)
        return double_model

    def without_prefix(self, prefix: FrozenPrefix, pair: Mapping[str, Tensor]) -> StatelessModel:
        """Return the same model without its frozen prefix, for the prefix's outputs as inputs; not checked yet.

        Args:
            prefix: of the module.
            pair: a batch of some of these inputs.
        """
        return StatelessModel(
            lambda: prefix.skipped(copy_module(self._build_module())),
            self.loss, self.ridge, self.device, self.dtype, self.precision, pair, self.call.output,
        )  # fmt: skip

    def _apply_probe_findings(self, traits: ForwardTraits) -> None:
        """Apply the probe's findings: statistics become columns."""
        self.traits = traits
        buffers = {name: get_named_tensor(self.training_module, name) for name in traits.statistics}
        self.statistics = {name: buffer.shape for name, buffer in buffers.items()}
        self._kinds = {name: buffer.dtype for name, buffer in buffers.items()}
        self.dimension = self.trained + sum(s.numel() for s in self.statistics.values())
        self.columns = self._column_partition()

    def _column_partition(self) -> ParameterPartition:
        sizes = {name: shape.numel() for name, shape in (self.shapes | self.statistics).items()}
        partition = ParameterPartition.from_sizes(sizes, set(self.statistics), self.private_parameters)
        return ParameterPartition(
            *(indices.to(self.device) for indices in (partition.shared, partition.private, partition.averaged))
        )

    def choose_private_parameters(self, selector: Selector) -> None:
        """Let a selector choose the private parameters, which stay with the client; after `check`."""
        names = [*self.shapes, *self.statistics]
        private_names = selector.private_parameters(self.training_module, list(names))
        label = f"columns={type(selector).__name__}: private_parameters"
        if not isinstance(private_names, (set, frozenset, list, tuple)):
            raise ConfigError(f"{label} must return a set of names, and returns {type(private_names).__name__}")
        if unknown_names := sorted(set(private_names) - set(names)):
            raise ConfigError(f"{label} names {unknown_names[0]!r}, which is none of the model's {', '.join(names)}")
        with streams.preserve_rng_states():
            for seed in range(ASKED_AGAIN):
                streams.reseed_global_generators(seed)
                if set(private_names) != set(selector.private_parameters(self.training_module, list(names))):
                    raise ConfigError(
                        f"{label} returns other names when it is called again; it must always return the same"
                    )
        self.private_parameters = set(private_names)
        self.columns = self._column_partition()
        if not len(self.columns.shared):
            raise ConfigError("columns: nothing of the model travels; use strategy=local_only")

    @property
    def column_names(self) -> ColumnsByName:
        """The columns of each tensor in the rows that strategies see."""
        return ColumnsByName.from_shapes(
            self.shapes, self.statistics, self.private_parameters, self.received_parameters
        )

    @property
    def naming(self) -> StateDictLayout:
        """The names by which a row becomes the module's `state_dict`."""
        return StateDictLayout.from_module(
            self.evaluation_module, self.shapes, self.statistics, self._kinds, self.private_parameters
        )

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """Return the named trained parameters of a row [d], as views."""
        return named_views(row, self.shapes)

    def unflatten_statistics(self, row: Tensor) -> dict[str, Tensor]:
        """Return the named statistics of a row [d], as copies of the buffers' types."""
        statistics = named_views(row[self.trained :], self.statistics) if self.statistics else {}
        return {
            name: value.clone() if (kind := self._kinds[name]).is_floating_point else value.round().to(kind)
            for name, value in statistics.items()
        }

    def flatten_statistics(self, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return the named statistics as columns of a row, [d − trained]."""
        return torch.cat([statistics[name].reshape(-1).to(self.dtype) for name in self.statistics])

    def predict(
        self, parameters: dict[str, Tensor], batch: Mapping[str, Tensor], statistics: dict[str, Tensor] | None = None
    ) -> Any:
        """Return the training-mode output [B, …] of one client, without state.

        Random numbers are keyed by batch['key']. `statistics` of the client's row are replaced by the moved ones.
        """
        buffers = {name: batch["key"] for name in self.dropout_keys}  # noqa: C420 (there may be neither)
        tensors = parameters | buffers | (statistics or {})
        with self.training_context(), self.random_context(batch), self._training_write_guard:
            output = cast_output(
                self.call.functional_call(self.training_module, tensors, self.call.inputs(batch)), self.dtype
            )
        for name in statistics or {}:
            statistics[name] = tensors[name]  # type: ignore[index]
        return output

    def random_context(self, batch: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass in training that answers its calls for random numbers."""
        return KeyedRandomness(batch["key"]) if self.traits.random else contextlib.nullcontext()

    @functools.cached_property
    def _training_write_guard(self) -> contextlib.AbstractContextManager[None]:
        return self.guard_writes(self.training_module)

    def guard_writes(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward pass in training through this copy of the module; built-in modules are
        not watched."""
        if is_built_in(module):
            return contextlib.nullcontext()
        return TensorWriteGuard(module, self.statistics)

    def training_context(self) -> torch.autocast:
        """Return the context of a forward pass in training; it caches nothing, since threads share that cache."""
        return torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16", cache_enabled=False)

    def evaluate(self, row: Tensor, x: Inputs) -> Any:
        """Return the evaluation-mode output [B, …] of the row [d] for inputs, see `ModuleCaller.inputs`."""
        module = (
            self.evaluation_module if self.traits.evaluation_isolated is None else copy_module(self.evaluation_module)
        )
        return self.call.functional_call(module, self.unflatten(row) | self.unflatten_statistics(row), x)

    def mean_loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a client's mean (or weighted mean) loss [] on a batch; a loss over the batch computes it itself."""
        losses = self.loss(output, batch)
        return weighted_mean(losses, batch.get("weight")) if losses.dim() else losses

    def scores(self, output: Tensor, num_leading_dims: int) -> Tensor:
        """Return outputs with the scores of classes in the last dimension; samples are in the first
        `num_leading_dims` dimensions."""
        return output.movedim(num_leading_dims, -1) if self._scores_second else output

    def client_sample_losses(self, output: Any, batch: Mapping[str, Tensor], weight: Tensor | None = None) -> Tensor:
        """Return losses [n, q] of the samples of n clients, given outputs [n, q, …]; `weight` [n, q] is 0 for padding.

        Where a loss sees the batch as a whole, each client's samples are a batch of their own, without padding, and a
        loss over the batch stands for each of its samples.
        """
        shape = next(iter(batch.values())).shape[:2] if weight is None else weight.shape
        samples = {name: value for name, value in batch.items() if value.shape[:2] == shape}
        if not self.loss_mixes_samples:
            flat = {name: value.flatten(0, 1) for name, value in samples.items()}
            return self.loss(tree_map(lambda v: v.flatten(0, 1), output), flat).reshape(shape)
        losses = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for client in range(shape[0]):
            row_selection = (
                torch.ones(shape[1], dtype=torch.bool, device=self.device) if weight is None else weight[client] > 0
            )
            if not bool(row_selection.any()):
                continue
            client_samples = {name: value[client][row_selection] for name, value in samples.items()}
            losses[client, row_selection] = self.loss(
                tree_map(lambda v, c=client, p=row_selection: v[c][p], output), client_samples
            ).to(self.dtype)
        return losses

    def objective(self, output: Any, batch: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """Return the scalar that a client minimises: mean (or weighted mean) loss plus ridge."""
        value = self.mean_loss(output, batch)
        if self.ridge:
            value = value + 0.5 * self.ridge * sum(p.square().sum() for p in parameters)
        return value

    def check(self, batch: Mapping[str, Tensor], classes: int | None, dataset: str) -> None:
        """Run a few samples through model and loss, so that a mismatch ends the run before its first round.

        Args:
            batch: 'x' [n, *shape] prepared inputs, n ≥ 2, 'y' [n, …] where there are targets, and further inputs.
            classes: how many outputs cross-entropy needs.
            dataset: its name, for the message.
        """
        samples = {name: value[:2] for name, value in batch.items()}
        row, x, y, inputs = self.initial([0])[0], samples["x"], samples.get("y"), self.call.inputs(samples)
        self.call.passes_objects = self.loss not in LOSSES.values()
        mismatch_text = f"model does not fit dataset={dataset}, whose inputs have shape {list(x.shape[1:])}"
        output = self._evaluate_or_refuse(row, inputs, mismatch_text)
        if classes is not None and y is not None and self.loss is LOSSES["cross_entropy"]:
            expected = (*y.shape, classes)
            is_users = not type(self.training_module).__module__.startswith("fedsim.")
            if is_users and _has_class_dim_second(output, y, classes) and _scores_classes(output, y, classes):
                raise ConfigError(
                    f"model returns shape {list(output.shape)}, and dataset={dataset} has {classes} classes and as "
                    "many positions: it is not clear which dimension holds the classes; set model.loss to a loss of "
                    "your own, such as torch.nn.functional.cross_entropy, which takes the second"
                )
            if output.shape != expected and output.dim() > 2 and output.movedim(1, -1).shape == expected:
                self.call.classes_second = True
                output = self.evaluate(row, inputs)
            if tuple(output.shape) != expected:
                raise ConfigError(
                    f"model returns shape {list(output.shape)} for {len(x)} inputs, but dataset={dataset} has "
                    f"{classes} classes: expected {list(expected)}"
                )
        self.labelled, self.tensor_output = (
            classes is not None and self.loss not in UNLABELLED_LOSSES,
            isinstance(output, Tensor),
        )
        if self.loss in LOSSES.values():
            self._check_built_in_loss(output, samples, dataset)
        else:
            self._resolve_user_loss(row, batch, dataset)
            self._scores_second = _are_classes_second(self.loss, output, samples, classes)
            self.labelled = self.labelled and (self._scores_second or _scores_classes(output, y, classes))
            if classes is not None and not self.labelled:
                log.info("model: its outputs are not scores of the %d classes of dataset=%s: accuracies are omitted",
                         classes, dataset)  # fmt: skip
        traits = probe_forward_traits(self.training_module, self.call.inputs(batch), self.call)
        self._check_functional_module(traits, inputs)
        self._apply_probe_findings(traits)
        row, self._checked_samples = self.initial([0])[0] if self.statistics else row, samples
        if self.traits.assigns_data or self.traits.isolation_reason is not None or not isinstance(output, Tensor):
            self.traits.evaluation_unvmapped = "it is evaluated one model at a time"
            return
        with self._preserved_modules():
            self.traits.evaluation_unvmapped = difference_reason(
                lambda: second_row_vmap_result(self.evaluate, row, inputs), lambda: self.evaluate(row, inputs)
            )

    def _check_functional_module(self, traits: ForwardTraits, pair: Inputs) -> None:
        """Check that the module is a function of the tensors of a row; a user's module is tried once."""
        original_module, self._original_module = self._original_module, None
        if is_built_in(self.training_module):
            return
        module, trained = self.training_module, list(self.shapes)
        refuse_complex(module, traits.statistics)
        refuse_shared_memory(module, self._shared_memory, [*trained, *traits.statistics], pair, self.call)
        check_parameter_substitution(module, original_module, pair, self.call, traits, trained)

    def _evaluate_or_refuse(self, row: Tensor, inputs: Inputs, mismatch_text: str) -> Any:
        """Return the module's output in evaluation, with its errors in one sentence."""
        try:
            return self.evaluate(row, inputs)
        except (ConfigError, MemoryError):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(f"{mismatch_text}: {first_message_line(error)}") from error
        except Exception as error:
            raise ConfigError(f"{mismatch_text}: {type(error).__name__}: {first_message_line(error)}") from error

    def _check_built_in_loss(self, output: Any, batch: Mapping[str, Tensor], dataset: str) -> None:
        """Try one of this package's losses on the output."""
        try:
            losses = self.loss(output, batch)
        except KeyError as error:
            raise ConfigError(f"model.loss needs {error}, which dataset={dataset} does not have") from error
        except (RuntimeError, ValueError, IndexError) as error:
            message = str(error).splitlines()[0]
            raise ConfigError(f"model.loss does not fit the model's output on dataset={dataset}: {message}") from error
        if losses.shape != (len(output),):
            raise ConfigError(f"model.loss returns shape {list(losses.shape)}; it must give one number per sample, [B]")

    def _resolve_user_loss(self, row: Tensor, batch: Mapping[str, Tensor], dataset: str) -> None:
        """Determine how the user's loss is called, on the outputs of as many of the samples as the module takes."""
        if isinstance(self.loss, UserLoss):
            return
        for count in (len(batch["x"]), 2):
            samples = {name: value[:count] for name, value in batch.items()}
            try:
                output = self.evaluate(row, self.call.inputs(samples))
            except Exception:
                if count == 2:
                    raise
                continue
            parameters = list(self._original_module.parameters()) if self._original_module is not None else []
            self.loss = resolve_user_loss(self.loss, output, samples, dataset, self.device, self.dtype, parameters)
            return

    @functools.cached_property
    def no_vmap_reason(self) -> str | None:
        """Return why rows cannot go through one vmapped pass of training; None if they can, or before `check`.

        Found out when asked for: what differentiates under vmap takes seconds to load.
        """
        if self._checked_samples is None:
            return None
        if self.traits.assigns_data:
            return "it assigns to tensor.data in its forward pass"
        if self.traits.isolation_reason is not None:
            return self.traits.isolation_reason
        row = self.initial([0])[0]
        keyed_samples = dict(self._checked_samples) | {"key": torch.zeros((), dtype=torch.int64, device=self.device)}

        def loss(parameters: dict[str, Tensor], row: Tensor, batch: dict[str, Tensor]) -> Tensor:
            output = self.predict(parameters, batch, self.unflatten_statistics(row))
            return self.objective(output, batch, list(parameters.values()))

        def functional_gradient(row: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return torch.cat([g.reshape(-1) for g in grad(loss)(self.unflatten(row), row, batch).values()])

        def gradient_by_autograd() -> Tensor:
            leaf_tensors = {
                name: value.detach().clone().requires_grad_() for name, value in self.unflatten(row).items()
            }
            with torch.enable_grad():
                gradients = torch.autograd.grad(
                    loss(leaf_tensors, row, keyed_samples), list(leaf_tensors.values()), materialize_grads=True
                )
            return torch.cat([g.to_dense().reshape(-1) for g in gradients])

        with self._preserved_modules():
            reason = difference_reason(
                lambda: second_row_vmap_result(functional_gradient, row, keyed_samples), gradient_by_autograd
            )  # deep structures: different only by rounding?
        return (
            reason
            if reason != DIFFERENT_NUMBERS_REASON or self.dtype == torch.float64
            else self.to_double_precision().no_vmap_reason
        )

    @contextlib.contextmanager
    def _preserved_modules(self) -> Iterator[None]:
        """Within the block, in full precision, passes may leave their tensors in the modules."""
        modules, precision, self.precision = (self.training_module, self.evaluation_module), self.precision, "full"
        self.training_module, self.evaluation_module = map(copy_module, modules)
        try:
            yield
        finally:
            (self.training_module, self.evaluation_module), self.precision = modules, precision
