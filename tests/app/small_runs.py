"""The overrides of a run of moments, and its configuration composed without the command line."""

from __future__ import annotations

from pathlib import Path

from bad_input import MEAN
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch import nn

from fedsim.app.config import config_folder, groups, register_resolvers

QUICK = ["rounds=2", "clients=12", "eval_every=1", "local_steps=2", "tracking.tensorboard=false"]

TEXT = f"dataset.path={Path(__file__).parents[2] / 'README.md'}"
COMPANY = {  # what a choice needs beside it
    "dataset=text": [TEXT, "partition=natural", "model=char_lstm", "model.hidden=4"],
    **{f"capacity={name}": ["model=mlp"] for name in ("federated_dropout", "fedrolex", "fjord", "heterofl")},
    "columns=fedper": ["model=mlp"],
    "columns=lg_fedavg": ["model=mlp"],
    "columns=by_name": ["columns.stays=[bias]"],
    "local=fedrep": ["model=mlp", "columns=fedper"],
    "local=fedbabu": ["model=mlp", "columns=fedper"],
    "local=fedproto": ["model=mlp"],
    "local=fedpac": ["model=mlp"],
    "strategy=fedpac": ["model=mlp", "local=fedpac"],
    "local=moon": ["model=mlp"],
    "strategy=fedex_lora": ["model=lora_mlp", "model.residual=true"],
    "strategy=flexlora": ["model=lora_mlp"],
    "strategy=hetlora": ["model=lora_mlp"],
    "strategy=rolora": ["model=lora_mlp"],
    "strategy=fedfomo": ["partition.validation=0.2"],
    "strategy=flora": ["model=lora_mlp", "model.residual=true"],
    "strategy=scaffnew": ["availability=full"],
    "local=rrm": ["shift=strategic", "shift.deploy=round", "shift.redraw=2"],
    "local=play": ["dataset=market", "partition=natural", "model=mean", "shift=players"],
    "local=plugin": ["shift=strategic", "local.explore=651"],
    **{
        f"{group}={choice}": ["strategy=robust_server"]
        for group in ("strategy/rule", "strategy/server")
        for choice in groups()[group]
    },
}
SHIFTED = {  # and a shift
    "location": MEAN,
    "group_mean": ["dataset=binary_gaussians", "partition=natural"],
    "players": ["dataset=market", "partition=natural", "model=mean"],
    "demand": ["dataset=pricing", "partition=natural", "model=mean"],
    "response": ["dataset=house_prices", "partition=natural", "model.bias=false"],
    "contribution": ["dataset=pricing_groups", "partition=natural", "model=mean"],
}


def company_of(choice: str) -> list[str]:
    """What a choice needs beside it in a run whose reference points are not computed."""
    group, _, name = choice.partition("=")
    if choice == "strategy=p_fedavg":
        return ["availability=full"]
    if choice == "shift=none":
        return []
    return [*SHIFTED.get(name, []), "shift.references=none"] if group == "shift" else COMPANY.get(choice, [])


def configuration(*overrides: str) -> DictConfig:
    register_resolvers()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", list(overrides))


class Normalised(nn.Sequential):
    """A model with batch normalisation, for any images."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
