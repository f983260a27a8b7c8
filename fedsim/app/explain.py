"""Turn Hydra's error messages into one sentence that suggests a remedy."""

from __future__ import annotations

import re

import yaml
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException
from omegaconf.errors import UnsupportedInterpolationType as Unsupported

from fedsim.app import commands
from fedsim.app.comments import comments_by_key
from fedsim.app.config import config_folder, groups, keys
from fedsim.core import checks
from fedsim.core.settings import flatten_settings

INTERPOLATION_ERRORS = (InterpolationKeyError, InterpolationResolutionError, Unsupported)
# Launchers and sweepers that an extra installs → the name of the extra.
EXTRA_BY_CHOICE = {
    "hydra/launcher/joblib": "joblib",
    "hydra/launcher/submitit_local": "submitit",
    "hydra/launcher/submitit_slurm": "submitit",
    "hydra/launcher/ray": "ray",
    "hydra/sweeper/optuna": "optuna",
}


def explain_hydra_error(error: BaseException) -> str:
    """Return one sentence for an error of Hydra or OmegaConf."""
    text = str(error)
    if isinstance(error, OverrideParseException) and "missing EQUAL" not in text:
        reason = without_line_breaks(text)
        return f"{error.override} cannot be read ({reason}); quote what the shell or Hydra takes for its own"
    if match := re.search(r"hydra_plugins\.hydra_(\w+?)_(launcher|sweeper)\b", text):
        return _missing_extra_text(match[1], f"this hydra/{match[2]}")
    if match := re.search(r"Ambiguous value for argument '([^'=]+)=([^']*)'", text):
        return _explain_several_values(match[1], match[2])
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key_text(match[1].split("@")[0])
    if match := re.search(r"Error merging override (.*)", text):
        return _wrong_type_text(match[1])
    if isinstance(error, INTERPOLATION_ERRORS):
        return _explain_interpolation_error(error)
    if match := re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", text):
        return _unknown_choice_text(match[1], match[2], re.findall(r"^\t(\w+)$", text, re.M))
    if match := re.search(r"Error parsing override '([^'=]+)'\nmissing EQUAL", text):
        group_choices = [f"{group}={choice}" for group, choices in groups().items() for choice in choices]
        exact = [option for option in group_choices if option.endswith(f"={match[1]}")]
        suggestion_text = checks.did_you_mean(exact) or checks.nearest_name_hint(
            match[1], [*commands.COMMAND_DESCRIPTIONS, *keys(), *groups(), *group_choices]
        )
        return f"{match[1]!r} lacks a value; set key=value or group=choice{suggestion_text}"
    return without_line_breaks(text.split("\n")[0])


def unresolvable_setting_reason(cfg: DictConfig) -> str | None:
    """Return one sentence about a setting that refers to another setting or to the environment and cannot be
    resolved."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    interpolations = {
        key: v for key, v in flatten_settings({str(k): v for k, v in raw.items()}) if isinstance(v, str) and "${" in v
    }
    unresolved_errors: dict[str, OmegaConfBaseException] = {}
    for key in interpolations:
        try:
            OmegaConf.select(cfg, key)
        except OmegaConfBaseException as error:
            unresolved_errors[key] = error
    for key, reason in sorted(
        unresolved_errors.items(), key=lambda item: f"${{{item[0]}}}" not in interpolations[item[0]]
    ):
        references = re.findall(r"\$\{([\w.]+)\}", interpolations[key])
        if not any(
            reference in unresolved_errors and reference != key for reference in references
        ) or "Recursive" in str(reason):
            return f"{key}={interpolations[key]}: {_explain_interpolation_error(reason)}"
    return None


def _explain_interpolation_error(error: BaseException) -> str:
    """Explain why an interpolation cannot be resolved, and what would work."""
    text = without_line_breaks(str(error).split("\n")[0])
    if match := re.search(r"Environment variable '([^']+)' not found", text):
        return (
            f"the environment variable {match[1]} is not set; export it, or write ${{oc.env:{match[1]},VALUE}} with "
            "what to take then"
        )
    if match := re.search(r"Interpolation key '([^']+)' not found", text):
        return (
            f"{match[1]} is not a "
            f"setting{checks.nearest_name_hint(match[1], keys()) or '; give one that is, or a value'}"
        )
    if "Recursive" in text:
        return "this leads back to itself; give a value"
    if match := re.search(r"Unsupported interpolation type (\S+)", text):
        return f"there is no {match[1]}; use oc.env:NAME, oc.decode, or the name of a setting"
    return text


def _wrong_type_text(override: str) -> str:
    """Explain a value of the wrong type, such as a mapping in place of a list or number."""
    key = override.partition("=")[0].lstrip("+~").partition(".")[0]
    content = yaml.safe_load((config_folder() / "config.yaml").read_text(encoding="utf-8"))
    default_text = yaml.safe_dump(content[key], default_flow_style=True).split("\n")[0] if key in content else ""
    return f"{override} cannot be set there" + (
        f"; a value of {key} looks like {key}={default_text}" if default_text else ""
    )


def without_line_breaks(text: str) -> str:
    """Return a text without line breaks."""
    return " ".join(text.split())


def composition_error_text(error: ValueError | OSError) -> str:
    """Return one sentence about the error that kept Hydra from composing the configuration or from creating the run
    folder."""
    if isinstance(error, OSError):
        return f"out={error.filename} cannot be made ({error.strerror}); choose another folder"
    return f"the command cannot be composed ({without_line_breaks(str(error))}); fedsim --help lists groups and keys"


def _explain_several_values(name: str, values: str) -> str:
    hint = "" if name in groups() else f", or for a list write '{name}=[{values}]'"
    return f"{name}={values} are several values; add -m for a run of each{hint}"


def _missing_extra_text(extra: str, feature: str) -> str:
    return f"{feature} is an extra; pip install 'fedsim-torch[{extra}]'"


def _unknown_choice_text(group: str, choice: str, existing_choices: list[str]) -> str:
    if f"{group}/{choice}" in EXTRA_BY_CHOICE:
        return _missing_extra_text(EXTRA_BY_CHOICE[f"{group}/{choice}"], f"{group}={choice}")
    extras = [name.rpartition("/")[2] for name in EXTRA_BY_CHOICE if name.startswith(f"{group}/")]
    options = sorted({*groups().get(group, []), *existing_choices, *extras})
    return f"{group}={choice} is unknown; choose one of {', '.join(options)}{checks.nearest_name_hint(choice, options)}"


def _unknown_key_text(name: str) -> str:
    choices_by_key = keys()
    if name in choices_by_key:
        return f"{name} exists only with {' or '.join(choices_by_key[name])}"
    if name in groups():
        return _misplaced_group_text(name)
    return f"{name} is not a setting{_nearest_key_hint(name)} (fedsim --help lists groups and keys)"


def _misplaced_group_text(name: str) -> str:
    """Explain that availability/base needs an availability process with `base` among its defaults."""
    outer_group, _, inner_group = name.rpartition("/")
    if not outer_group:
        return f"{name} takes the name of a choice, one of {', '.join(groups()[name])}; keys in it go by {name}.KEY="
    fitting_choices = []
    for choice in groups().get(outer_group, []):
        with open(config_folder() / outer_group / f"{choice}.yaml", encoding="utf-8") as file:
            defaults = (yaml.safe_load(file) or {}).get("defaults", [])
        if any(isinstance(entry, dict) and inner_group in entry for entry in defaults):
            fitting_choices.append(choice)
    return (
        f"{name} does not belong to the chosen {outer_group}; it goes with {outer_group}={', '.join(fitting_choices)}"
    )


def _nearest_key_hint(name: str) -> str:
    """Return '; did you mean …?' for a key: a top-level key, one with the same last word, or a similar one."""
    options = [*keys(), *groups()]
    top_level_keys, last_component = (
        [option for option in options if not {".", "/"} & set(option)],
        name.rpartition(".")[2],
    )
    if "." not in name and (suggestion_text := checks.nearest_name_hint(name, top_level_keys)):
        return suggestion_text
    nested_matches = [option for option in keys() if option.rpartition(".")[2] == last_component]
    matches_in_section = [option for option in nested_matches if option.partition(".")[0] == name.partition(".")[0]]
    similar_keys = [
        key
        for key, comment in comments_by_key(config_folder() / "config.yaml").items()
        if _key_as_words(name) in comment
    ]
    return (
        checks.did_you_mean(matches_in_section or nested_matches)
        or checks.nearest_name_hint(name, options)
        or checks.did_you_mean(similar_keys)
    )


def _key_as_words(name: str) -> str:
    """Return a key as words, as a comment would write it: learning_rate → learning rate."""
    return name.replace("_", " ").lower()
