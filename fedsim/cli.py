"""The `fedsim` command: a Hydra application whose errors are one sentence."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim import checks
from fedsim.checkpoint import NAME as CHECKPOINT
from fedsim.config import build, config_folder, flatten, groups, keys, register_resolvers
from fedsim.errors import ConfigError, DivergenceError, OutputError
from fedsim.tracking.result import Result
from fedsim.tracking.tracker import Stopped

log = logging.getLogger(__name__)


def main() -> None:
    """Entry point of `fedsim` and `python -m fedsim`."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us instead of being printed by Hydra
    sys.path.insert(0, os.getcwd())  # a user's own package is found, as with `python -m`
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("fedsim").setLevel(logging.INFO)
    register_resolvers()
    try:
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(_job)()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"fedsim: {explain(error)}")


def _job(cfg: DictConfig) -> None:
    """One run; a sweep has several."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    log.info("run: %s", folder)
    choices = {k: v for k, v in HydraConfig.get().runtime.choices.items() if not k.startswith("hydra") and v}
    try:
        result = run(cfg, folder, choices)
    except ConfigError as error:
        sys.exit(f"fedsim: {error}")
    except DivergenceError as error:
        sys.exit(f"fedsim: {error}\nfedsim: the last good checkpoint is kept in {folder}")
    except OutputError as error:
        sys.exit(f"fedsim: {error}; make room there, and go on with the same command and resume={folder}")
    except Stopped as stop:
        sys.exit(f"fedsim: {stop}; go on with the same command and resume={folder}")
    print(report(result))


def run(cfg: DictConfig, folder: Path, choices: dict[str, str]) -> Result:
    """Build and run one configuration in its run folder; `choices` are its groups', for the table of runs."""
    resume = str(cfg.resume)
    there = (folder / CHECKPOINT).exists()
    if there and resume == "never":
        raise ConfigError(
            f"out={folder} already holds a run; add resume=auto to go on with it, resume=overwrite to start "
            "it afresh, or choose another out"
        )
    if not there and resume not in ("never", "auto", "overwrite"):
        raise ConfigError(f"resume={resume}: no checkpoint there; use resume=auto with out=FOLDER, or an existing run")
    simulation, tracking, identity = build(cfg)
    scalars = {k: v for k, v in flatten(identity) if isinstance(v, (int, float)) and not isinstance(v, bool)}
    yaml = OmegaConf.to_yaml(cfg, resolve=True)
    return simulation.run(folder, resume != "overwrite", tracking, identity, choices | scalars, yaml)


def report(result: Result) -> str:
    """What a finished run prints."""
    lines = [f"  {name:24} {mean:.4g}" + (f" ± {std:.2g}" if std else "") for name, (mean, std) in result.final.items()]
    speed = result.samples / max(result.seconds, 1e-9)
    return "\n".join(
        [
            f"after {result.history[-1]['round']} rounds in {result.seconds:.1f} s ({speed:,.0f} samples/s):",
            *lines,
            f"saved in {result.folder}",
            f"curves:  tensorboard --logdir {result.folder}",
        ]
    )


def explain(error: Exception) -> str:
    """Hydra's message as one sentence that suggests what was meant."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(match[1].split("@")[0])
    if match := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        group, choice = match[1], match[2]
        options = groups().get(group, [])
        return f"{group}={choice} is unknown; choose one of {', '.join(options)}{checks.nearest(choice, options)}"
    return " ".join(text.split("\n")[0].split())


def _unknown_key(name: str) -> str:
    known = keys()
    if name in known:
        return f"{name} exists only with {' or '.join(known[name])}"
    if name in groups():
        return f"{name} does not belong to the chosen {name.rpartition('/')[0]}"
    options = [*known, *groups()]
    return f"{name} is not a setting{checks.nearest(name, options)} (fedsim --help lists groups and keys)"
