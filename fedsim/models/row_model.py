"""A module as a function of one row: its columns, initial rows of replicates, predictions, losses.

A row holds everything of a client's model that changes: first its trained parameters, then its statistics, which are
the buffers that a forward pass in training moves (a batch normalisation's running mean, a counter). A gradient is zero
in the columns of statistics; who takes a step carries them out of the forward pass (`fedsim.trainer.statistics`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from fedsim.core import rng
from fedsim.core.columns import Columns
from fedsim.core.errors import ConfigError
from fedsim.models.calling import Calling, Inputs
from fedsim.models.dropout import key_dropouts
from fedsim.models.losses import LOSSES, Loss, weighted_mean
from fedsim.models.naming import Naming, named
from fedsim.models.precision import checked
from fedsim.models.probe import OTHER, Findings, probe, second_of_two, why_not
from fedsim.models.randomness import KeyedRandomness
from fedsim.models.selectors import Selector


class RowModel:
    """Wraps how a module is built; the module itself stays stateless.

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
        home: names of what stays with the client.
        dropout_keys: names of the buffers that carry a client's dropout key.
        traits: what a forward pass does, see `fedsim.models.probe`.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] | nn.Module,
        loss: str | Loss = "cross_entropy",
        ridge: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        precision: str = "full",
        pair: Mapping[str, Tensor] | None = None,
        output: str | int | None = None,
    ) -> None:
        if not callable(loss) and (not isinstance(loss, str) or loss not in LOSSES):
            raise ConfigError(f"model.loss={loss!r} is unknown; choose one of {', '.join(LOSSES)}")
        self.loss: Loss = loss if callable(loss) else LOSSES[loss]
        self.ridge = ridge
        self.device, self.dtype = device or torch.device("cpu"), dtype
        self.precision = checked(precision, self.device, dtype)
        self._build = (lambda: copy.deepcopy(build)) if isinstance(build, nn.Module) else build
        self._pair, self.call = pair, Calling(output, tuple(sorted((pair or {}).keys() - {"x", "y"})))
        template = self._template()
        self.dropout_keys = key_dropouts(template)
        self.training_module = template.train()
        self.evaluation_module = copy.deepcopy(template).eval()
        self.shapes = {name: p.shape for name, p in template.named_parameters() if p.requires_grad}
        self.statistics: dict[str, torch.Size] = {}
        self._kinds: dict[str, torch.dtype] = {}
        self._checked: Mapping[str, Tensor] | None = None
        self.trained = self.dimension = sum(s.numel() for s in self.shapes.values())
        self.home, self.traits = set[str](), Findings()
        if not self.trained:
            raise ConfigError("model: the module has no trainable parameters")
        self.columns = self._columns()
        self.convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in template.modules())

    def _template(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # frozen parameters and random buffers come from the template
            try:
                template = self._made()
            except TypeError as error:
                raise ConfigError(f"model cannot be built: {error}") from error
        if not isinstance(template, nn.Module):
            raise ConfigError(f"model: expected a torch.nn.Module, got {type(template).__name__}")
        return template.to(self.device, self.dtype)

    def _made(self) -> nn.Module:
        """A module of the user's, its lazy layers' parameters drawn."""
        module = self._build()
        lazy = isinstance(module, nn.Module) and any(map(is_lazy, [*module.parameters(), *module.buffers()]))
        if lazy and self._pair is not None:
            kind = torch.get_default_dtype()
            inputs = tree_map(
                lambda v: v.to("cpu", kind if v.is_floating_point() else None), self.call.inputs(self._pair)
            )
            with torch.no_grad():
                self.call(module.eval(), inputs)
        return module

    @property
    def keyed(self) -> bool:
        """Do batches carry a 'key' for random numbers in the forward pass?"""
        return bool(self.dropout_keys) or self.traits.random

    def told(self) -> tuple[Hashable, ...]:
        """What the time of a step depends on."""
        return str(self.training_module), *self.shapes.values(), self.device, self.dtype, self.precision

    def initial(self, seeds: Sequence[int]) -> Tensor:
        """[R, d] one freshly initialised row per replicate."""
        rows: dict[int, Tensor] = {}
        for seed in dict.fromkeys(seeds):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(rng.generator(seed, rng.Purpose.MODEL).integers(2**63)))
                module = self._made()
            parts = [p.detach().reshape(-1) for p in module.parameters() if p.requires_grad]
            parts += [module.get_buffer(name).reshape(-1).to(self.dtype) for name in self.statistics]
            rows[seed] = torch.cat([part.to(self.device, self.dtype) for part in parts])
        return torch.stack([rows[seed] for seed in seeds])

    def in_double(self) -> RowModel:
        """The same model in double precision."""
        if self.dtype == torch.float64:
            return self
        double = RowModel(self._build, self.loss, self.ridge, self.device, torch.float64, pair=self._pair)
        double.call, checked = self.call, self._checked
        double._checked = checked and {n: v.double() if v.is_floating_point() else v for n, v in checked.items()}
        double._know(self.traits)
        return double

    def _know(self, traits: Findings) -> None:
        """Take the probe's findings: statistics become columns."""
        self.traits = traits
        buffers = {name: self.training_module.get_buffer(name) for name in traits.statistics}
        self.statistics = {name: buffer.shape for name, buffer in buffers.items()}
        self._kinds = {name: buffer.dtype for name, buffer in buffers.items()}
        self.dimension = self.trained + sum(s.numel() for s in self.statistics.values())
        self.columns = self._columns()

    def _columns(self) -> Columns:
        sizes = {name: shape.numel() for name, shape in (self.shapes | self.statistics).items()}
        found = Columns.of(sizes, set(self.statistics), self.home)
        return Columns(*(part.to(self.device) for part in (found.shared, found.own, found.averaged)))

    def divide(self, selector: Selector) -> None:
        """Let a selector say what stays with the client; after `check`."""
        self.home = selector.home(self.training_module, [*self.shapes, *self.statistics])
        self.columns = self._columns()
        if not len(self.columns.shared):
            raise ConfigError("columns: nothing of the model travels; use strategy=local_only")

    @property
    def naming(self) -> Naming:
        """How a row is the module's `state_dict`."""
        return Naming.of(self.evaluation_module, self.shapes, self.statistics, self._kinds, self.home)

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """[d] → the named trained parameters, as views."""
        return named(row, self.shapes)

    def statistics_of(self, row: Tensor) -> dict[str, Tensor]:
        """[d] → the named statistics, copies of the buffers' types."""
        moved = named(row[self.trained :], self.statistics) if self.statistics else {}
        return {
            name: value.clone() if (kind := self._kinds[name]).is_floating_point else value.round().to(kind)
            for name, value in moved.items()
        }

    def as_columns(self, statistics: Mapping[str, Tensor]) -> Tensor:
        """The named statistics → their columns of a row, [d − trained]."""
        return torch.cat([statistics[name].reshape(-1).to(self.dtype) for name in self.statistics])

    def predict(
        self, parameters: dict[str, Tensor], batch: Mapping[str, Tensor], statistics: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Training-mode output [B, …] of one client, stateless.

        Random numbers are keyed by batch['key']. `statistics` of the client's row are replaced by the moved ones.
        """
        buffers = {name: batch["key"] for name in self.dropout_keys}  # noqa: C420 (there may be neither)
        parts = parameters | buffers | (statistics or {})
        with self.mixed(), self.drawing(batch):
            output = self.call.functional(self.training_module, parts, self.call.inputs(batch)).to(self.dtype)
        for name in statistics or {}:
            statistics[name] = parts[name]  # type: ignore[index]
        return output

    def drawing(self, batch: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward pass in training that answers its calls for random numbers."""
        return KeyedRandomness(batch["key"]) if self.traits.random else contextlib.nullcontext()

    def mixed(self) -> torch.autocast:
        """The context of a forward pass in training; nothing is cached in it: threads share that cache."""
        return torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16", cache_enabled=False)

    def evaluate(self, row: Tensor, x: Inputs) -> Tensor:
        """Evaluation-mode output [B, …] of the row [d] for inputs, see `Calling.inputs`."""
        return self.call.functional(self.evaluation_module, self.unflatten(row) | self.statistics_of(row), x)

    def objective(self, output: Tensor, batch: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """The scalar a client descends: mean (or weighted mean) loss plus ridge."""
        value = weighted_mean(self.loss(output, batch), batch.get("weight"))
        if self.ridge:
            value = value + 0.5 * self.ridge * sum(p.square().sum() for p in parameters)
        return value

    def check(self, batch: Mapping[str, Tensor], classes: int | None, dataset: str) -> None:
        """Run two samples through model and loss, so that a mismatch ends the run before its first round.

        Args:
            batch: 'x' [2, *shape] prepared inputs, 'y' [2, …] where there are targets, and further inputs.
            classes: how many outputs cross-entropy needs.
            dataset: its name, for the message.
        """
        row, x, y, inputs = self.initial([0])[0], batch["x"], batch.get("y"), self.call.inputs(batch)
        try:
            output = self.evaluate(row, inputs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            unfit = f"model does not fit dataset={dataset}, whose inputs have shape {list(x.shape[1:])}"
            raise ConfigError(f"{unfit}: {str(error).splitlines()[0]}") from error
        if classes is not None and y is not None and self.loss is LOSSES["cross_entropy"]:
            expected = (*y.shape, classes)
            if output.shape != expected and output.dim() > 2 and output.movedim(1, -1).shape == expected:
                self.call.classes_second = True
                output = self.evaluate(row, inputs)
            if tuple(output.shape) != expected:
                raise ConfigError(
                    f"model returns shape {list(output.shape)} for {len(x)} inputs, but dataset={dataset} has "
                    f"{classes} classes: expected {list(expected)}"
                )
        try:
            losses = self.loss(output, batch)
        except KeyError as error:
            raise ConfigError(f"model.loss needs {error}, which dataset={dataset} does not have") from error
        except (RuntimeError, ValueError, IndexError) as error:
            what = str(error).splitlines()[0]
            raise ConfigError(f"model.loss does not fit the model's output on dataset={dataset}: {what}") from error
        if losses.shape != (len(x),):
            raise ConfigError(f"model.loss returns shape {list(losses.shape)}; it must give one number per sample, [B]")
        self._know(probe(self.training_module, inputs, self.call))
        row, self._checked = self.initial([0])[0] if self.statistics else row, batch
        with self._untouched():
            self.traits.evaluation_unvmapped = why_not(
                lambda: second_of_two(self.evaluate, row, inputs), lambda: self.evaluate(row, inputs)
            )

    @functools.cached_property
    def unvmapped(self) -> str | None:
        """Why rows cannot go through one vmapped pass of training; None where they can, or before `check`.

        Found out when asked for: what differentiates under vmap takes seconds to load.
        """
        if self._checked is None:
            return None
        row = self.initial([0])[0]
        keyed = dict(self._checked) | {"key": torch.zeros((), dtype=torch.int64, device=self.device)}

        def loss(parameters: dict[str, Tensor], row: Tensor, batch: dict[str, Tensor]) -> Tensor:
            output = self.predict(parameters, batch, self.statistics_of(row))
            return self.objective(output, batch, list(parameters.values()))

        def functionally(row: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return torch.cat([g.reshape(-1) for g in grad(loss)(self.unflatten(row), row, batch).values()])

        def plainly() -> Tensor:
            leaves = {name: value.detach().clone().requires_grad_() for name, value in self.unflatten(row).items()}
            with torch.enable_grad():
                found = torch.autograd.grad(loss(leaves, row, keyed), list(leaves.values()), materialize_grads=True)
            return torch.cat([g.reshape(-1) for g in found])

        with self._untouched():
            reason = why_not(lambda: second_of_two(functionally, row, keyed), plainly)  # deep ones: by rounding?
        return reason if reason != OTHER or self.dtype == torch.float64 else self.in_double().unvmapped

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """Passes within the block, in full precision, may leave their tensors in the modules."""
        kept, precision, self.precision = (self.training_module, self.evaluation_module), self.precision, "full"
        self.training_module, self.evaluation_module = map(copy.deepcopy, kept)
        try:
            yield
        finally:
            (self.training_module, self.evaluation_module), self.precision = kept, precision
