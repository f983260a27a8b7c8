"""What can be told of the clients beside the columns that every run has; each is measured where it is asked for.

| name | columns | cost |
|---|---|---|
| fairness | variance, Jain's index and best tenth of the clients' accuracies | none |
| worst5, best20 | mean over so many per cent of the clients | none |
| absent | accuracy of those who were not there in the last round, and of those who never were | a number per client |
| drift | how far local work takes clients from the server's model | one pass over the last round's models |
| staleness | rounds since each client took part: τ_max, τ_avg | three numbers per client |
| power | how far the evaluated model moves the data that answer it | moving a sample of all clients twice |
| stability | how far it is from the best one on the data that answer it | a minimisation of the risk |
| utility | how far clients' losses have fallen per round in which they could take part | as much; m a round |

Accuracies are those on what was held out of each client, as near to its use as the run has them: of the test set, else
validation samples, else a subsample of what it trains on. The columns' names say which. Where there are no labels
they are losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.evaluation.spread import FAIRNESS, SHARE

NAMES = ("fairness", "absent", "drift", "staleness", "utility")
ANSWERS = ("power", "stability")  # of data that answer a model (`fedsim.evaluation.performative.answer`)


def check(names: Any) -> None:
    """Refuse what is no list of diagnostics.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"diagnostics={names!r} must be a list, such as [fairness,staleness]")
    for name in names:
        match = SHARE.fullmatch(str(name))
        if match is None:
            checks.choice("diagnostics", name, (*NAMES, *ANSWERS, "worst5", "best20"))
        elif not 1 <= int(match[2]) <= 100:
            raise ConfigError(f"diagnostics={name}: the share of the clients must be 1 to 100 per cent, such as worst5")
    if len(set(names)) < len(names):
        raise ConfigError(f"diagnostics={list(names)} names one twice")


def spreads(names: Sequence[str]) -> list[str]:
    """Those of them that say how the clients' numbers differ, as `spread` names them."""
    share_names = [name for name in names if SHARE.fullmatch(name)]
    return list(dict.fromkeys([*(FAIRNESS if "fairness" in names else ()), *share_names]))
