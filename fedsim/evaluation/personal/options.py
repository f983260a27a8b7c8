"""What is asked about clients' own models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.core.constraints import Count, CountOrZero, OneOf, Validated
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError

OVER = ("none", "all", "online")
AT = ("start", "end")
LOCALIZE = ("rule", "sgd")


@dataclass
class Personal(Validated):
    """Attributes:

    over: whose models are scored at every evaluation: 'all' clients' but newcomers', those of the clients that were
        'online' in the last round (apfl §5; before the first round: all), or 'none', which costs nothing.
    at: when personal models are scored: at the 'start' of a round, mixed with or made of the server's model; or at the
        'end' of its local steps, with what these arrive at, like the localized ones and as little kept (apfl's program
        measures both before it averages).
    localize: how a client makes its localized model: by the local 'rule' and all that the strategy hands to it, as in
        training; or by as many plain steps of 'sgd' from the same row, on the same samples and at the same rates (apfl
        §5, where SCAFFOLD's model too is fine-tuned by "local SGD": no control variate, no proximal term).
    newcomers: the last so many clients take no part in training; at its end they get x^T, train for `newcomer_epochs`
        epochs each on its own, and are scored after each (apfl Fig. 6). 0: there are none.
    newcomer_epochs: of their training; of a stream, rounds of local steps.
    train_samples: samples of its own training data on which a client's training loss is measured.
    """

    effective_if = (
        EffectiveIf("at", lambda component, run: component.active, "{at}.over=all or online, or {at}.newcomers"),
        EffectiveIf("localize", lambda component, run: component.active, "{at}.over=all or online, or {at}.newcomers"),
        EffectiveIf(
            "train_samples", lambda component, run: component.active, "{at}.over=all or online, or {at}.newcomers"
        ),
        EffectiveIf("newcomer_epochs", lambda component, run: component.newcomers > 0, "{at}.newcomers"),
    )

    over: Annotated[str, OneOf(*OVER)] = "none"
    at: Annotated[str, OneOf(*AT)] = "start"
    localize: Annotated[str, OneOf(*LOCALIZE)] = "rule"
    newcomers: CountOrZero = 0
    newcomer_epochs: Count = 5
    train_samples: Count = 20

    @property
    def active(self) -> bool:
        """Is anything asked for?"""
        return self.over != "none" or self.newcomers > 0

    def check(self, clients: int, validation: bool) -> None:
        """Refuse what cannot be scored.

        Args:
            clients: m.
            validation: whether there are validation samples: split off by the partition, or drawn afresh.
        """
        if self.newcomers >= clients:
            raise ConfigError(
                f"personal.newcomers={self.newcomers} leaves none of clients={clients} to train; lower it"
            )
        if self.active and not validation:
            option = f"over={self.over}" if self.over != "none" else f"newcomers={self.newcomers}"
            raise ConfigError(
                f"personal.{option} needs validation samples of every client's own; add partition.validation=0.2"
            )
