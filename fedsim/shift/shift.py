"""The interface of a performative shift: a reparameterised map from base samples and deployed parameters to samples.

A client's law is a map θ ↦ D_i(θ), written as a pushforward of base samples that do not depend on θ. If the gradient
flows through the map, autograd gives the exact performative gradient; if it is stopped, the gradient of the decoupled
risk (repeated minimisation). The map is written for ONE client; the trainer vmaps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.func import vmap

from fedsim.core import checks, rng
from fedsim.core.constraints import Count, Fraction, OneOf, Positive, Validated
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.placement import capacity_bytes
from fedsim.data.samples import ClientData
from fedsim.models import StatelessModel
from fedsim.shift.mixture import LagMixture

DEPLOYMENTS = ("step", "round")
REFERENCE_MODES = ("auto", "always", "none")
PER_CLIENT_ENTRIES = ("client", "row", "key", "deployed")  # per client of a batch, and not per sample
RUNNING_MODEL_KEY = "answered"  # the key of θ̃ in the memory
PAST_DEPLOYMENTS_KEY, DEPLOYMENT_COUNT_KEY, MIXTURE_SEED_KEY = "past_deployments", "deployments", "seed_of_mixture"
LAG_ENTRIES = {DEPLOYMENT_COUNT_KEY, MIXTURE_SEED_KEY, "round"}  # by which lags are drawn


class Shift(Validated, ABC):
    """A performative shift.

    Args:
        deploy: 'step': a client's data react to its current model at each local step (P-FedAvg, ProFL); 'round': they
            react to the server's model, once per round.
        inertia: λ ∈ [0, 1): the data react to θ̃ ← λ θ̃ + (1 − λ) θ instead of θ, updated at each deployment; θ̃ starts
            at the initial model (stateful performativity, Brown et al. 2022). 0 is the usual case, without memory.
        mixture: λ ∈ [0, 1): a fraction 1 − λ of the samples reacts to each deployment, and the others do not change.
            For linear shifts this has the same mean as inertia, with a larger variance. Or a list of fractions that
            react to the last deployments, newest first: with [0.5,0.5], redraw and local=rrm, clients minimise the risk
            on the mixture of their last two draws (affine risk minimisers; drawn anew from the same distributions). In
            mean estimation with mean sensitivity a this converges for −2 < a < 1, and with λ for −(1 + λ)/(1 − λ) < a <
            1; θ^PS does not change. Each sample is shifted separately. See `fedsim.shift.mixture`. 0 needs no memory;
            otherwise L models per client, or per replicate with deploy=round. Reference points and evaluation use only
            the newest deployment.
        redraw: N: the data react to the model deployed in rounds 0, N, 2N, … until the next of these rounds, and
            clients of a stream use the batch drawn at the deployment for all local steps: the inner rounds of repeated
            risk minimisation (Perdomo et al. 2020). Needs deploy=round. None: a deployment in every round, and a new
            batch at every step.
        references: whether θ^PS and θ^PO are computed before round 0, so that distances to them are reported: 'always',
            'none', or 'auto' (for small models, see `fedsim.evaluation.performative.references`).
        references_seconds: time limit for computing them, for all replicates together; None: no limit.
        box: [lowest, highest] value of a parameter, the set Θ that is searched; None: no bounds.

    Attributes (what rules that estimate the reaction of the data may know of it):
        estimator: the statistic of a client's distribution that reacts to θ, as in `local.estimator`; None: not
            declared.
        shifted_columns: indices of the components of the flattened x that change; None: all.
        nonsmooth: whether the map has kinks, on which a minimum of the performative risk may lie.
        groups, group_entry: K, if the fractions of groups change; and the entry of a batch that holds the group of a
            sample.
        knows_stored_samples: whether it looks up the clients' samples in `setup`, so that they must not drift.
        runs_unpadded: whether it needs batches without padding, one client at a time, as x − x.mean(0) does. A run
            detects this, and sets it on its copy of the shift (`fedsim.run.rehearsal`).
    """

    effective_if: EffectDeclarations = (
        EffectiveIf("box", lambda component, run: run.computes_shift_references, "{at}.references=auto or always"),
        EffectiveIf(
            "references_seconds", lambda component, run: run.computes_shift_references, "{at}.references=auto or always"
        ),
    )

    active = True
    estimator: str | None = None
    shifted_columns: Tensor | None = None
    groups: int | None = None
    group_entry: str = "y"
    nonsmooth: bool = False
    runs_unpadded: bool = False
    knows_stored_samples: bool = False
    redraw: int | None = None
    mixture: LagMixture | None = None

    def __init__(
        self,
        deploy: Annotated[str, OneOf(*DEPLOYMENTS)] = "step",
        inertia: Fraction = 0.0,
        references: Annotated[str, OneOf(*REFERENCE_MODES)] = "auto",
        box: Sequence[float] | None = None,
        references_seconds: Positive | None = 120.0,
        redraw: Count | None = None,
        mixture: Fraction | Sequence[Fraction] = 0.0,
    ) -> None:
        self.deploy = deploy
        self.inertia = inertia
        if inertia == 1:
            raise ConfigError(
                key="inertia", value=1, needs="means that data never react; use less than 1, or shift=none"
            )
        parsed_mixture = LagMixture(mixture)
        self.mixture = parsed_mixture if len(parsed_mixture) > 1 else None
        self.redraw = redraw
        if redraw is not None and deploy == "step":
            raise ConfigError(
                key="redraw",
                value=redraw,
                needs="is how often the server deploys; it needs {deploy}=round",
                mentions=("deploy",),
            )
        self.references = references
        self.references_seconds = references_seconds
        if box is not None and (
            len(box) != 2 or not checks.check_finite("box", box[0]) < checks.check_finite("box", box[1])
        ):
            raise ConfigError(
                f"{{box}}={list(box)} must be two numbers, the lower first, such as [-10,10]", mentions=("box",)
            )
        self.box = None if box is None else (float(box[0]), float(box[1]))

    def setup(self, federation: Federation, data: ClientData, model: StatelessModel) -> None:
        """Draw per-client sensitivities and refuse what cannot work.

        Args:
            federation: who exists.
            data: the clients' samples, which are moved.
            model: what is deployed.
        """

    def memory(self, federation: Federation, model: Tensor) -> dict[str, Tensor]:
        """What every client's data remember: name → [R·m, …], from the initial models [R, d]."""
        memory = {} if not self.inertia or self.deploy == "round" else {RUNNING_MODEL_KEY: federation.broadcast(model)}
        if self.mixture is None:
            return memory
        memory[MIXTURE_SEED_KEY] = federation.broadcast(federation.seed_of_replicate)
        if self.deploy == "step":
            needed_bytes = federation.num_memory_rows * len(self.mixture) * model.shape[1] * federation.dtype.itemsize
            if needed_bytes > capacity_bytes(federation.device, federation.storage):
                raise ConfigError(
                    f"shift.mixture keeps {len(self.mixture)} models for each of {federation.num_memory_rows} clients, "
                    f"{needed_bytes / 2**30:,.0f} GiB and more than there is; lower it, or set shift.deploy=round"
                )
            memory[PAST_DEPLOYMENTS_KEY] = federation.broadcast(self._repeat_for_lags(model))
            memory[DEPLOYMENT_COUNT_KEY] = federation.zeros(dtype=torch.int64)
        return memory

    def _repeat_for_lags(self, model: Tensor) -> Tensor:
        """[R, L, d] of [R, d]: before round 0 all samples react to the initial model."""
        assert self.mixture is not None
        return model[:, None].repeat(1, len(self.mixture), 1)

    def initial_server_memory(self, federation: Federation, model: Tensor) -> dict[str, Tensor]:
        """What all data of a replicate remember: name → [R, …]."""
        if self.deploy == "step":
            return {}
        memory = {RUNNING_MODEL_KEY: model.clone()} if self.inertia or self.redraw else {}
        return memory if self.mixture is None else memory | {PAST_DEPLOYMENTS_KEY: self._repeat_for_lags(model)}

    def deployed(self, server: dict[str, Tensor], model: Tensor, t: int = 0) -> Tensor | None:
        """[R, d] what all data react to in round t, at whose beginning the server's model is `model`; [R, L, d] with a
        mixture; None where clients deploy their own. `server` is `initial_server_memory`, updated in place."""
        if self.deploy == "step":
            return None
        newest_average = self._deployed_average_model(server, model, t)
        if self.mixture is None:
            return newest_average
        past_models = server[PAST_DEPLOYMENTS_KEY]
        if self.deployment_round(t) == t:
            past_models.copy_(torch.cat([newest_average[:, None], past_models[:, :-1]], dim=1))
        return past_models

    def _deployed_average_model(self, server: dict[str, Tensor], model: Tensor, t: int) -> Tensor:
        """[R, d] θ̃ of the latest deployment."""
        if not (self.inertia or self.redraw):
            return model
        average_model = server[RUNNING_MODEL_KEY]
        if self.deployment_round(t) < t:
            return average_model
        return average_model.lerp_(model, 1 - self.inertia) if self.inertia else average_model.copy_(model)

    def deployment_round(self, t: Any) -> Any:
        """The round whose deployment the data of round t react to; of a number, or of each in a tensor."""
        return t - t % (self.redraw or 1)

    @property
    def needs_round(self) -> bool:
        """Does the carry need 'round', by which lags are drawn?"""
        return self.mixture is not None and self.deploy == "round"

    def newest_deployment(self, theta: Tensor) -> Tensor:
        """[…, d] the latest of what `deployed` and `response_parameters` give."""
        return theta if self.mixture is None else theta[..., 0, :]

    def shift_batch(self, batch: dict[str, Tensor], carry: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        """One client's batch, moved by what `response_parameters` gave."""
        if self.mixture is None:
            return self(batch, theta)
        number = carry[DEPLOYMENT_COUNT_KEY] if self.deploy == "step" else self.deployment_round(carry["round"])
        key = rng.fold_in(rng.row_keys(carry[MIXTURE_SEED_KEY], rng.Purpose.MIXTURE, batch["client"]), number)
        return self.mixture.shift_batch(self, batch, theta, key)

    def response_parameters(self, carry: dict[str, Tensor], theta: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """The parameters a local step's data react to, [d] or [c, d] as the carry's: θ as deployed by the server, or
        else the carry's own, with a mixture [L, d] or [c, L, d]; and the carry with what is remembered of them."""
        if theta is not None:
            return carry, theta
        theta = carry["params"]
        if self.inertia:
            theta = torch.lerp(carry[RUNNING_MODEL_KEY], theta, 1 - self.inertia)
            carry = carry | {RUNNING_MODEL_KEY: theta}
        if self.mixture is None:
            return carry, theta
        past_models = torch.cat([theta[..., None, :], carry[PAST_DEPLOYMENTS_KEY][..., :-1, :]], dim=-2)
        return carry | {
            PAST_DEPLOYMENTS_KEY: past_models,
            DEPLOYMENT_COUNT_KEY: carry[DEPLOYMENT_COUNT_KEY] + 1,
        }, past_models

    @abstractmethod
    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        """Move one client's batch.

        Args:
            batch: 'x' [B, …], 'y' [B, …] where there are labels, 'client' [] the client's number, 'row' [] that of the
                virtual client, r·m + client, by which stored data differ; 'weight' [B] where the batch is padded.
            theta: [d] the deployed parameters.

        Returns:
            A batch like `batch`; the tensors given are left as they are.
        """

    def respond_differentiably(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        """As `__call__`, for references and evaluation: the same law, in a form that is differentiable in θ.

        A map that draws (which group a sample is of) gives all it may draw instead, with their probabilities as
        'weight' [B']; the batch may grow. A reparameterised map is its own smooth form.
        """
        return self(batch, theta)

    def respond_differentiably_all(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        """`respond_differentiably` of n clients: batch [n, B, …] and θ [n, d]. Where the shift is `runs_unpadded`, one
        client after the other, without padding; the results are padded again, with weight 0."""
        if not self.runs_unpadded:
            return vmap(self.respond_differentiably)(batch, theta)
        pairs = zip(unpadded_client_batches(batch), theta, strict=True)
        return pad_batches(
            [
                self.respond_differentiably(client_batch, point) if len(client_batch["x"]) else client_batch
                for client_batch, point in pairs
            ]
        )


def unpadded_client_batches(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The batches of n clients [n, B, …], one by one and without padding: only what has a positive weight."""
    weight = batch.get("weight")
    batches = []
    for n in range(len(batch["x"])):
        client_batch = {name: value[n] for name, value in batch.items()}
        if weight is not None:
            real_mask = weight[n] > 0
            del client_batch["weight"]
            client_batch = {
                name: value if name in PER_CLIENT_ENTRIES else value[real_mask] for name, value in client_batch.items()
            }
        batches.append(client_batch)
    return batches


def pad_batches(batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Batches of n clients [B_n, …] as one [n, B, …]; its 'weight' is 0 for padding."""
    width = max(len(batch["x"]) for batch in batches)
    columns: dict[str, list[Tensor]] = {name: [] for name in (*batches[0], "weight")}
    for batch in batches:
        size = len(batch["x"])
        weight = batch.get("weight", batch["x"].new_ones(size) if batch["x"].is_floating_point() else torch.ones(size))
        columns["weight"].append(torch.cat([weight, weight.new_zeros(width - size)]))
        for name, value in batch.items():
            if name == "weight":
                continue
            if value.dim() and len(value) == size and name not in PER_CLIENT_ENTRIES:
                value = (
                    torch.cat([value, value[:1].expand(width - size, *value.shape[1:])])
                    if size
                    else (value.new_zeros(width, *value.shape[1:]))
                )
            columns[name].append(value)
    return {name: torch.stack(values) for name, values in columns.items()}


class NoShift(Shift):
    """No performative shift: the data do not react."""

    active = False

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        return batch
