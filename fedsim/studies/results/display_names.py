"""Names as papers print them: of strategies, of settings and of metrics, and the user's own in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsim.core.errors import ConfigError

# Classes whose papers write the name in another way than Python can; of the others the class's name is the paper's.
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


def class_name(choice: str, target: str) -> str:
    """How a paper prints a choice of a group: by its class, where it is the class's own name, else by its words.

    Args:
        choice: as it was given, such as fedavg_known; or the class's name.
        target: the path of the class.
    """
    name = target.rpartition(".")[2]
    if choice.replace("_", "").lower() == name.lower():
        return CLASS_DISPLAY_NAMES.get(name, name)
    return choice.replace("_", " ")


def key_name(key: str) -> str:
    """How a paper prints a setting: 'learning rate' for lr, 'partition alpha' for partition.alpha."""
    return KEY_DISPLAY_NAMES.get(key, key.replace(".", " ").replace("/", " ").replace("_", " "))


@dataclass
class UserDisplayNames:
    """The user's own names.

    Attributes:
        names: old name → new one; an old name is that of a setting, of its value, of a metric or of what is printed
            for one of these.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    _used_names: set[str] = field(default_factory=set)
    _seen_names: dict[str, None] = field(default_factory=dict)

    def __call__(self, name: str, *other_names: str) -> str:
        """The user's name for what goes by these names; the first of them where there is none."""
        for candidate in (name, *other_names):
            self._seen_names[candidate] = None
            if candidate in self.names:
                self._used_names.add(candidate)
                return self.names[candidate]
        return name

    def check(self) -> None:
        """After everything was named.

        Raises:
            ConfigError: an old name stands nowhere.
        """
        for name in self.names:
            if name not in self._used_names:
                raise ConfigError(
                    f"--rename {name}={self.names[name]}: the table has no {name}; it has {', '.join(self._seen_names)}"
                )
