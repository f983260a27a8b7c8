"""Display names of strategies, settings and metrics as papers print them, and replacements given by the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsim.core.errors import ConfigError

# Classes whose name in the paper is no Python name; the other classes are named as in their papers.
CLASS_DISPLAY_NAMES = {
    "AFACD": "AFA-CD",
    "AFACS": "AFA-CS",
    "AmplifiedFedAvg": "Amplified FedAvg",
    "AmplifiedScaffold": "Amplified SCAFFOLD",
    "CA2FL": "CA²FL",
    "CAFed": "CA-Fed",
    "CentredClipping": "centred clipping",
    "Debiasing": "debiasing",
    "FedAvgAll": "FedAvg over all clients",
    "FedAvgKnown": "FedAvg with known p",
    "Focus": "FOCUS",
    "LocalOnly": "local training only",
    "Median": "coordinate-wise median",
    "MultiKrum": "Multi-Krum",
    "NormBound": "norm bounding",
    "PFedAvg": "P-FedAvg",
    "PowerOfChoice": "Power-of-Choice",
    "QFFL": "q-FFL",
    "RobustServer": "robust server",
    "Scaffold": "SCAFFOLD",
    "TrimmedMean": "trimmed mean",
}
KEY_DISPLAY_NAMES = {"lr": "learning rate", "server_lr": "server learning rate"}


def class_display_name(choice: str, target: str) -> str:
    """Return the printed name of a group's choice: its words, or the class's name if the choice is named after it or
    is `custom`.

    Args:
        choice: the choice, such as fedavg_known, or the class's name.
        target: the path of the class.
    """
    name = target.rpartition(".")[2]
    if choice == "custom" or choice.replace("_", "").lower() == name.lower():
        return CLASS_DISPLAY_NAMES.get(name, name)
    return choice.replace("_", " ")


def key_display_name(key: str) -> str:
    """Return the printed name of a setting: 'learning rate' for lr, 'partition alpha' for partition.alpha."""
    return KEY_DISPLAY_NAMES.get(key, key.replace(".", " ").replace("/", " ").replace("_", " "))


@dataclass
class UserDisplayNames:
    """The display names that the user chose.

    Attributes:
        names: old name → new name; an old name is that of a setting, its value or a metric, or its printed name.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    _used_names: set[str] = field(default_factory=set)
    _seen_names: dict[str, None] = field(default_factory=dict)

    def __call__(self, name: str, *other_names: str) -> str:
        """Return the user's name for something with these names; the first of them if there is none."""
        for candidate in (name, *other_names):
            self._seen_names[candidate] = None
            if candidate in self.names:
                self._used_names.add(candidate)
                return self.names[candidate]
        return name

    def check(self) -> None:
        """Refuse names that were not used; called after the table is complete.

        Raises:
            ConfigError: the table does not contain an old name.
        """
        for name in self.names:
            if name not in self._used_names:
                raise ConfigError(
                    f"--rename {name}={self.names[name]}: the table has no {name}; it has {', '.join(self._seen_names)}"
                )
