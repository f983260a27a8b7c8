"""`fedsim export`: write a model of a run to a file that PyTorch or safetensors load without fedsim."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file
from fedsim.studies.results import Run, load

FILE_ENDINGS = (".safetensors", ".pt", ".pth")


def main(arguments: list[str]) -> None:
    """Write one model of a run."""
    parser = argparse.ArgumentParser("fedsim export", description=f"Write {COMMAND_DESCRIPTIONS['export']}.")
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run folder, finished or not")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="FILE.safetensors, or FILE.pt")
    parser.add_argument("--seed", type=int, help="seed of the replicate; may be omitted if there is only one")
    model_options = parser.add_mutually_exclusive_group()
    model_options.add_argument(
        "--best", action="store_true", help="the model of the best evaluation instead of the last"
    )
    model_options.add_argument("--client", type=int, metavar="I", help="client I's own model")
    options = parser.parse_args(arguments)
    if options.to.suffix not in FILE_ENDINGS:
        raise ConfigError(f"--to {options.to} must end in {', '.join(FILE_ENDINGS[:-1])} or {FILE_ENDINGS[-1]}")
    tensors = _requested_model(load(options.run), options)
    write_model(options.to, tensors)
    numbers = sum(value.numel() for value in tensors.values())
    print(f"{options.to}: {len(tensors)} tensors, {numbers:,} numbers")


def _requested_model(run: Run, options: argparse.Namespace) -> dict[str, Tensor]:
    if options.client is not None:
        return run.client_model(options.client, options.seed)
    return run.model(options.seed, "best" if options.best else "last")


def write_model(path: Path, model: dict[str, Tensor]) -> None:
    """Write a `state_dict` in the format of the file's suffix.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement_file(path, "wb") as file:
            if path.suffix == ".safetensors":  # which allows no shared tensors: tied weights are written twice
                file.write(save({name: value.clone() for name, value in model.items()}))
            else:
                torch.save(model, file)
    except OSError as error:
        raise ConfigError(f"--to {path} cannot be written ({error}); choose another file") from error
