"""Options of the evaluation of clients' own models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.core.constraints import Count, CountOrZero, OneOf, Validated
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError

SCORED_CLIENTS_CHOICES = ("none", "all", "online", "honest")
EVALUATION_TIMES = ("start", "end")
LOCALIZE_METHODS = ("rule", "sgd")
SCORING_OPTIONS = "{at}.over=all, online or honest, or {at}.newcomers"


@dataclass
class Personal(Validated):
    """Attributes:

    over: clients whose models are scored at every evaluation: 'all' except newcomers, those that were 'online' in
        the last round (apfl §5; before the first round: all), the 'honest' ones, whom no attack makes Byzantine, or
        'none', which costs nothing.
    at: when personal models are scored: at the 'start' of a round, mixed with or computed from the server's model;
        or at the 'end' of its local steps, after which they are discarded like the localized ones (apfl's program
        measures both before averaging).
    localize: how a client's localized model is computed: by the local 'rule' with everything the strategy sends, as
        in training; or by as many plain steps of 'sgd' from the same row, on the same samples and at the same rates
        (apfl §5, where SCAFFOLD's model too is fine-tuned by "local SGD": no control variate, no proximal term).
    newcomers: this number of clients (the last ones) do not participate in training; after it they receive x^T,
        train locally for `newcomer_epochs` epochs, and are scored after each (apfl Fig. 6). 0: none.
    newcomer_epochs: epochs of their training; for a stream, rounds of local steps.
    train_samples: number of a client's training samples on which its training loss is measured.
    """

    effective_if = (
        *(
            EffectiveIf(option, lambda component, run: component.active, SCORING_OPTIONS)
            for option in ("at", "localize", "train_samples")
        ),
        EffectiveIf("newcomer_epochs", lambda component, run: component.newcomers > 0, "{at}.newcomers"),
    )

    over: Annotated[str, OneOf(*SCORED_CLIENTS_CHOICES)] = "none"
    at: Annotated[str, OneOf(*EVALUATION_TIMES)] = "start"
    localize: Annotated[str, OneOf(*LOCALIZE_METHODS)] = "rule"
    newcomers: CountOrZero = 0
    newcomer_epochs: Count = 5
    train_samples: Count = 20

    @property
    def active(self) -> bool:
        """Whether any evaluation is requested."""
        return self.over != "none" or self.newcomers > 0

    def check(self, clients: int, validation: bool, attacked: bool) -> None:
        """Check that models can be scored.

        Args:
            clients: m.
            validation: whether there are validation samples, split off by the partition or drawn from a stream.
            attacked: whether an attack makes some clients Byzantine.
        """
        if self.over == "honest" and not attacked:
            raise ConfigError(
                "personal.over=honest leaves out Byzantine clients, and attack=none has none; use personal.over=all"
            )
        if self.newcomers >= clients:
            raise ConfigError(
                f"personal.newcomers={self.newcomers} leaves none of clients={clients} to train; lower it"
            )
        if self.active and not validation:
            option = f"over={self.over}" if self.over != "none" else f"newcomers={self.newcomers}"
            raise ConfigError(
                f"personal.{option} needs validation samples of every client; add partition.validation=0.2"
            )
