"""Keys, and for each a composition in which another value of it changes what a run gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from small_runs import SHIFTED

BASE = [
    "rounds=5", "eval_every=1", "clients=12", "seeds=[3]", "local_steps=3", "trainer.dtype=float64",
    "trainer.executor=loop", "lr=0.05", "tracking.progress=none", "tracking.tensorboard=false", "batch_size=4",
]  # fmt: skip
AVAILABILITY = ["availability=bernoulli", "availability/base=lognormal"]
JUDGED = ["partition.validation=0.2", "personal.over=all"]
JOINED = ["partition.validation=0.2", "personal.newcomers=2", "personal.newcomer_epochs=2"]
BERNOULLI = ["availability=bernoulli"]
MOVED = [*SHIFTED["location"], "shift=location", "shift.references=none"]
PRICES = [*SHIFTED["demand"], "shift=demand", "shift.references=none"]
GROUPS = [*SHIFTED["contribution"], "shift=contribution", "shift.references=none"]
LINES = [*SHIFTED["response"], "shift=response", "shift.references=none"]
TWO = [*SHIFTED["group_mean"], "shift=group_mean", "shift.references=none"]
TIMED = ["clock=devices", "clock.compute_spread=1.0"]
LATE = ["delay=uniform"]
LINEAR = ["dataset=regression_groups", "partition=natural"]
PEOPLE = ["dataset=table", "dataset.path=people.csv", "dataset.target=ill"]
OWNED = [*PEOPLE, "dataset.client=who", "partition=natural", "clients=3"]
WORDS = ["dataset=text", "dataset.path=play.txt", "partition=natural", "model=char_lstm", "model.hidden=4", "clients=2"]
TEXTS = [
    "dataset=text_table",
    "dataset.path=people.csv",
    "dataset.text=who",
    "dataset.target=ill",
    "model=text_classifier",
    "model.width=8",
]
LOGGED = ["availability=log", "availability.path=log.csv", "availability.round=5"]
ROUNDS = ["availability=table", "availability.path=rounds.csv"]
NARROW = ["capacity=heterofl", "model=mlp", "model.hidden=[6]"]
TRACED = ["availability=trace", "availability.path=columns.csv"]
HUB = ["dataset=hub", "dataset.path=csv", "dataset.data_files=people.csv", "dataset.x=[age,dose]", "dataset.y=ill"]
FAKE = ["dataset=torch", "dataset.train._target_=torchvision.datasets.FakeData", "+dataset.train.size=60"]
PICTURES = [*FAKE, "+dataset.train.image_size=[3,8,8]"]
PETS = ["dataset=image_folder", "dataset.path=pets"]
COLOUR = ["partition=iid", *PICTURES]
WINDOW = ["local.growing=true", "local.history=2"]
REPLAYED = ["drift=replay", "drift.path=drift.csv"]
DRIFTED = [
    *SHIFTED["location"],
    "availability=full",
    "drift=abrupt",
    "drift.at=[2]",
    "drift.size=3",
    "strategy=feddrift",
]
SPLIT = ["strategy=cfl", "availability=full", "evaluate=client_mean"]
ADAPTIVE = ["local=profl", *PRICES, *WINDOW, "local.adaptive_samples=true", "local.max_samples=40"]

# What automatic values do not reach: key → what stands beside it, and the other value.
WHERE: dict[str, tuple[list[str], str]] = {
    "seeds": ([], "[4]"),
    "local_epochs": (["local_steps=null", "local_epochs=1"], "2"),
    "evaluate": ([], "client_mean"),
    "diagnostics": ([], "[drift]"),
    "attack.clients": (["attack=sign_flip"], "[0,1,2]"),
    "attack.direction": (["attack=min_max", "attack.fraction=0.4"], "sign"),
    "availability.floor": ([*BERNOULLI, "availability/base=uniform", "availability.base.p=0.1"], "0.9"),
    "availability.k": (["availability=uniform_k", "availability.k=3"], "4"),
    "availability.law": (["availability=device_sessions", "availability.shape=0.6"], "weibull"),
    "availability.shape": (["availability=device_sessions", "availability.law=weibull"], "0.5"),
    "availability.initial": (["availability=arrivals"], "1.0"),
    "availability.rate": (["availability=arrivals", "availability.initial=0"], "9.0"),
    "availability.batch": (["availability=arrivals", "availability.initial=0"], "3"),
    "availability.joins": (["availability=arrivals", "clients=3"], "[1,0,9]"),
    "availability.leaves": (["availability=arrivals", "availability.initial=1", "clients=3"], "[1,0,9]"),
    "availability.lifetime": (["availability=arrivals", "availability.initial=1"], "0.5"),
    "availability.order": (["availability=arrivals"], "number"),
    "availability.path": (LOGGED, "later.csv"),
    "availability.round": (LOGGED, "3"),
    "availability.client": (LOGGED, "other"),
    "availability.start": (LOGGED, "begun"),
    "availability.end": (LOGGED, "done"),
    "availability.cover": (LOGGED, "1.0"),
    "availability.begin": (LOGGED, "8"),
    "availability.until": (LOGGED, "12"),
    "availability.repeat": ([*LOGGED, "rounds=7"], "false"),
    "availability.match": (LOGGED, "draw"),
    "availability.unknown": ([*LOGGED, "clients=11"], "ignore"),
    "availability.missing": ([*LOGGED, "clients=13"], "away"),
    "availability.available": (ROUNDS, "null"),
    "availability.header": (TRACED, "false"),
    "availability.base.high": ([*BERNOULLI, "availability/base=class_correlated"], "0.6"),
    "availability.base.p": ([*BERNOULLI, "availability/base=uniform", "availability.base.p=0.5"], "0.9"),
    "availability.trajectory.zones": (["availability=sine", "availability.trajectory.period=4"], "2"),
    "capacity.widths": (NARROW, "[0.5]"),
    "capacity.shares": (NARROW, "[5,1,1]"),
    "capacity.assign": (NARROW, "size"),
    "capacity.channels": (NARROW, "rolling"),
    "capacity.redraw": (NARROW, "true"),
    "columns.stays": (["model=mlp", "model.hidden=[4]", "columns=by_name", "columns.stays=[bias]"], "[weight]"),
    "contamination.clients": (["contamination=gaussian", "contamination.fraction=0.5"], "[1]"),
    "dataset.features": (PEOPLE, "[dose]"),
    "dataset.path": (PEOPLE, "others.csv"),
    "dataset.task": (PEOPLE, "regression"),
    "dataset.classes": (PEOPLE, "3"),
    "dataset.inputs": (["dataset=arrays", "dataset.path=bytes.npz"], "numbers"),
    "dataset.channels": (["dataset=arrays", "dataset.path=cubes.npz"], "last"),
    "dataset.min_samples": ([*PEOPLE, "dataset.client=age", "partition=natural", "clients=all"], "9"),
    "dataset.means": (["dataset=gaussian_mean", "partition=natural", "model=mean", "clients=3"], "[1,2,5]"),
    "dataset.weight_variance": (
        ["dataset=gaussian_mean", "partition=natural", "model=mean", "strategy.weighting=data"],
        "0.003",
    ),
    "dataset.x": (HUB, "[dose]"),
    "dataset.y": (HUB, "age"),
    "dataset.client": (["clients=3", "partition=natural", *PEOPLE, "dataset.client=who"], "null"),
    "dataset.data_files": (HUB, "others.csv"),
    "dataset.size": (PETS, "[2,2]"),
    "dataset.colours": (PETS, "rgb"),
    "dataset.fractions": (["dataset=regression_groups", "partition=natural"], "[0.1,0.9]"),
    "dataset.loss": (GROUPS, "squared"),
    "dataset.points": (["dataset=quadratics", "partition=natural", "model=mean", "clients=2"], "[[1],[3]]"),
    "dataset.slopes": (["dataset=regression_groups", "partition=natural"], "[1.0,5.0]"),
    "dataset.max_samples": (["dataset=synthetic", "partition=natural"], "60"),
    "dataset.target": (PEOPLE, "who"),
    "dataset.split": (PEOPLE, "part"),
    "dataset.test_path": (PEOPLE, "others.csv"),
    "dataset.categories": (PEOPLE, "ordinal"),
    "dataset.max_categories": (PEOPLE, "2"),
    "dataset.missing": ([*PEOPLE, "dataset.path=holes.csv"], "drop"),
    "dataset.strategic": ([*PEOPLE, "partition=iid", "shift=strategic", "shift.references=none"], "[dose]"),
    "dataset.text": (TEXTS, "'{age} {dose}'"),
    "dataset.by": (WORDS, "speaker"),
    "dataset.unit": ([*WORDS, "dataset.length=3"], "words"),
    "dataset.vocabulary": (WORDS, "3"),
    "dataset.speaker": ([*WORDS, "dataset.by=speaker"], r"'^(\w)'"),
    "dataset.augment.per": ([*COLOUR, "dataset/augment=crop_flip"], "batch"),
    "local.epochs": (["local_steps=null", "local_epochs=1"], "2"),
    "local.sampling": ([], "replacement"),
    "local.drop_last": (["local_steps=null", "local_epochs=1", "batch_size=50"], "false"),
    "local.state": (["local=adam"], "client"),
    "local.decoupled": (["local=adam", "local.weight_decay=0.1"], "true"),
    "local.alpha": (["local=apfl", *JUDGED], "0.75"),
    "local.adaptive": (["local=apfl", *JUDGED], "true"),
    "local.alpha_every": (["local=apfl", *JUDGED, "local.adaptive=true"], "step"),
    "local.mix": (["local=apfl", "model=mlp", "model.hidden=[4]", *JUDGED], "outputs"),
    "local.personal_lr": (["local=apfl", *JUDGED], "0.01"),
    "local.alpha_decay": (["local=apfl", *JUDGED, "local.adaptive=true"], "0.9"),
    "local.adapt_steps": (["local=perfedavg", *JUDGED], "3"),
    "local.box": (["local=pfl", *PRICES], "[0,0.1]"),
    "local.rcond": (["local=pofl", *PRICES, *WINDOW], "0.9"),
    "local.growing": (["local=pofl", *PRICES, "local.history=9"], "true"),
    "local.variance": (["local=pofl", *MOVED, *WINDOW], "9.0"),
    "local.settled": (["local=profl", *PRICES, "local.adaptive_samples=true", "local.max_samples=40"], "0.9"),
    "local.server_derivative": (["local=profl", *PRICES, *WINDOW], "true"),
    "local.max_samples": (ADAPTIVE, "9"),
    "local.schedule.unit": (["local/schedule=inverse"], "round"),
    "model.ridge": ([], "0.5"),
    "model.embedding": (WORDS, "3"),
    "model.hidden": (["model=mlp", "model.hidden=[4]"], "[5]"),
    "model.layers": (["model=vit", "model.width=8"], "1"),
    "model.last_bias": (["model=svhn_cnn", *COLOUR, "+dataset.train.image_size=[3,32,32]"], "default"),
    "model.norm": (["model=resnet18", *COLOUR, "clients=2"], "group"),
    "model.small_images": (["model=resnet18", *COLOUR, "clients=2"], "false"),
    "model.width": (["model=vit", "model.layers=1"], "8"),
    "model.heads": (["model=vit", "model.layers=1", "model.width=8"], "2"),
    "partition.form": (["partition=dirichlet"], "proportional"),
    "partition.min_of_class": (["partition=dirichlet", "partition.form=proportional"], "20"),
    "attack.since": (["attack=sign_flip", "attack.fraction=0.5"], "3"),
    "attack.warmup": (["attack=mimic", "attack.fraction=0.5", "attack.warmup=1"], "3"),
    "availability.reshuffle": (["availability=cyclic", "availability.groups=3", "availability.length=1"], "members"),
    "availability.trajectory.gamma": (
        ["availability=sine", "availability/base=uniform", "availability.base.p=0.6"],
        "0.9",
    ),
    "clock.deadline": (TIMED, "0.011"),
    "clock.devices": (["clock=devices"], "devices.csv"),
    "clock.compute_law": ([*TIMED, "clock.compute_spread=1"], "pareto"),
    "clock.late": ([*TIMED, "clock.deadline=0.011"], "partial"),
    "clock.link_spread": (["clock=devices", "clock.up=1000"], "1.0"),
    "columns.travels": (["model=mlp", "model.hidden=[4]", "columns=by_name", "columns.travels=[weight]"], "[bias]"),
    "contamination.entry": ([*LINEAR, "contamination=gaussian", "contamination.fraction=0.5"], "y"),
    "local.explore": (["local=plugin", *PRICES, "local.explore=6"], "9"),
    "local.spread": (["local=plugin", *PRICES, "local.explore=6"], "0.3"),
    "local.horizon": (["local=stateful_perfgd", *PRICES, "local.history=1", "shift.inertia=0.5"], "0"),
    "local.layers": (["local=fedala", "model=mlp", "model.hidden=[4]", *JUDGED], "2"),
    "local.margin": (["local=fedlc"], "balanced"),
    "local.server_method": (["local=profl", *PRICES, *WINDOW, "local.server_derivative=true"], "regression"),
    "local.estimator": (["local=pofl", *PRICES, *WINDOW], "none"),
    "local.deals": (["local=pg", *PRICES, *WINDOW], "one"),
    "local.history": (["local=pofl", *PRICES, *WINDOW], "4"),
    "metrics": ([], "[f1_score]"),
    "strategy.isolation": ([*DRIFTED, "strategy.isolation=1"], "3"),
    "strategy.delta": ([*DRIFTED, "strategy.isolation=1"], "100"),
    "partition.distribution": (["partition=matched"], "[0.6,0.4,0,0,0,0,0,0,0,0]"),
    "partition.exponent": (["partition=quantity", "partition.law=power"], "2.0"),
    "partition.min_size": (["partition=quantity", "partition.sigma=2.0"], "60"),
    "partition.shuffle": (["dataset=synthetic", "dataset.clients=24", "partition=grouped"], "false"),
    "partition.turns": (["partition=feature_rotation"], "2"),
    "personal.over": (["partition.validation=0.2"], "all"),
    "personal.at": (["local=apfl", *JUDGED], "end"),
    "personal.localize": (["strategy=scaffold", *JUDGED], "sgd"),
    "personal.newcomers": (JOINED, "3"),
    "personal.newcomer_epochs": (JOINED, "3"),
    "personal.train_samples": (JUDGED, "5"),
    "drift.size": (["drift=abrupt", "drift.at=[1]"], "3.0"),
    "drift.spread": (["drift=linear"], "0.9"),
    "drift.at": (["drift=abrupt", "drift.at=[1]"], "[9]"),
    "drift.path": (REPLAYED, "brief.csv"),
    "drift.between": (REPLAYED, "linear"),
    "drift.repeat": (["drift=replay", "drift.path=brief.csv"], "true"),
    "drift.alternate": (["drift=abrupt", "drift.at=[1,2]"], "true"),
    "drift.rounds_of_clients": (["drift=by_client", "clients=3"], "[0,1,1]"),
    "drift.first": (["drift=by_client", "drift.first=1", "drift.last=1"], "0"),
    "drift.last": (["drift=by_client", "drift.first=0", "drift.last=0"], "9"),
    "drift.factors": (["drift=linear", "clients=3"], "[0.1,0.2,0.3]"),
    "drift.direction": ([*SHIFTED["location"], "drift=linear"], "[2.0]"),
    "drift.plane": ([*SHIFTED["group_mean"], "dataset.dimension=2", "drift=linear", "drift.moves=rotation"], "[1,0]"),
    "drift.moves": (["drift=linear", "drift.speed=5"], "targets"),
    "drift.seed": (["drift=linear", "drift.spread=0.9"], "9"),
    "drift.references": ([*SHIFTED["location"], "drift=linear"], "none"),
    "shift.box": (MOVED[:-1], "[0,0.1]"),
    "shift.budget": ([*GROUPS, "shift.form=budget"], "30.0"),
    "shift.constant": ([*GROUPS, "shift.form=loss"], "9.0"),
    "shift.samples": ([*GROUPS, "shift.form=loss"], "10"),
    "shift.epsilons": ([*MOVED, "clients=3"], "[0.1,0.2,0.3]"),
    "shift.reach": (["shift=elastic", "shift.references=none", "shift.reluctance=0"], "0.001"),
    "shift.target": (["shift=strategic", "shift.references=none"], "2"),
    "shift.redraw": ([*MOVED, "shift.deploy=round"], "3"),
    "start": (MOVED, "erm"),
    "stop.target": ([], "{test_accuracy:0.05}"),
    "stop.seconds": ([], "0.000001"),
    "stop.virtual_seconds": (TIMED, "0.000001"),
    "stop.patience": (["stop.metric=train_loss", "lr=50"], "1"),
    "strategy.average": (
        [
            "strategy=p_fedavg",
            "availability=full",
            "dataset=gaussian_mean",
            "dataset.weight_variance=0.003",
            "partition=natural",
            "model=mean",
        ],
        "plain",
    ),
    "clock.power": (["clock=devices"], "2.0"),
    "clock.joules_down": (["clock=devices"], "2.0"),
    "clock.joules_up": (["clock=devices"], "2.0"),
    "clock.rejoin": (["clock=events", "clock.failure=0.5"], "3.0"),
    "clock.shared_down": (["clock=events"], "1000.0"),
    "clock.shared_up": (["clock=events"], "1000.0"),
    "clock.concurrency": (["clock=events", "strategy=fedasync", "clock.concurrency=3"], "1"),
    "strategy.max_staleness": (["clock=events", "strategy=aced", "strategy.max_staleness=9"], "0"),
    "strategy.a": ([*LATE, "strategy=fedasync"], "2.0"),
    "strategy.b": ([*LATE, "strategy=fedasync", "strategy.discount=hinge"], "0.0"),
    "strategy.discount": ([*LATE, "strategy=fedasync"], "constant"),
    "strategy.window": (["strategy=amplified_fedavg", "strategy.window=2"], "3"),
    "strategy.amplification": (["strategy=amplified_fedavg", "strategy.window=2"], "2.0"),
    "strategy.bad": (["strategy=multi_krum", "strategy.bad=1"], "3"),
    "strategy.candidates": (["strategy=power_of_choice", "strategy.k=2"], "9"),
    "strategy.empty": (["strategy=focus", *BERNOULLI, "availability/base=uniform", "availability.base.p=0.05"], "skip"),
    "strategy.explore_least": (["strategy=oort", "strategy.k=4", "strategy.decay=0.1"], "0.8"),
    "strategy.norm": (["strategy=norm_bound"], "0.01"),
    "strategy.radius": (["strategy=centred_clipping"], "0.01"),
    "uplink.clip.norm": (["uplink=clip"], "0.01"),
    "uplink.clip.rate": (["uplink=clip", "uplink.clip.quantile=0.5"], "0.9"),
    "uplink.gaussian.rate": (["uplink=gaussian", "uplink.gaussian.quantile=0.5"], "0.9"),
    "uplink.gaussian.count_noise": (["uplink=gaussian", "uplink.gaussian.quantile=0.5"], "3.0"),
    "local.baseline": (["local=dfo", *PRICES, "local.points=1", "local.radius=0.9", "lr=0.001"], "true"),
    "local.radius": (["local=dfo", *PRICES, "local_steps=4", "lr=0.001"], "0.9"),
    "shift.features": ([*TWO, "dataset.dimension=3"], "[0]"),
    "stop.metric": (["stop.patience=2", "stop.metric=test_loss", "lr=5"], "test_accuracy"),
    "strategy.clipped": (["strategy=fedawe", "strategy.clip=0.01", "strategy.server_lr=0.5"], "mean"),
    "strategy.require_full": (["strategy=scaffnew", "work=geometric", *BERNOULLI], "false"),
    "strategy.probability": (["strategy=scaffnew", "work=geometric", "availability=full"], "0.9"),
    "strategy.rule.bad": (["strategy=robust_server", "strategy/rule=multi_krum", "strategy.rule.bad=1"], "3"),
    "strategy.rule.norm": (["strategy=robust_server", "strategy/rule=norm_bound"], "0.01"),
    "uplink.clip.quantile": (["uplink=clip", "uplink.clip.norm=0.01"], "0.2"),
    "uplink.clip.count_noise": (["uplink=clip", "uplink.clip.norm=0.01", "uplink.clip.quantile=0.5"], "3.0"),
    "dataset.augment.border": ([*COLOUR, "dataset/augment=crop_flip", "dataset.standardise=true"], "mean"),
    "dataset.separator": (PEOPLE, "';'"),
    "dataset.train": ([*HUB, "dataset.data_files={train:people.csv,other:others.csv}"], "other"),
    "dataset.test": ([*HUB, "dataset.data_files={train:people.csv,other:others.csv}"], "other"),
    "model.loss": (LINEAR, "half_squared_distance"),
    "on_nonfinite": (["seeds=[3,4]", "lr=[0.05,1.7e308]"], "drop_replicate"),
    "stop.over": (["seeds=[3,4,5]", "lr=[0.0001,0.5,0.5]", "stop.target={test_accuracy:0.2}"], "mean"),
    "strategy.smoothness": (["strategy=ca_fed", "strategy.prior=0.1", "rounds=9"], "0.9"),
    "strategy.optimum": (["strategy=ca_fed", "strategy.prior=0.1", "rounds=9"], "-30.0"),
    "strategy.tolerance": (["strategy=ca_fed", "strategy.prior=0.1", "rounds=9"], "9.0"),
    "local.tolerance": (ADAPTIVE, "1.0e+6"),
    "local.failure": ([*ADAPTIVE, "local.tolerance=1.0e+4"], "1.0"),
    "local.curvature": ([*ADAPTIVE, "local.tolerance=1.0e+4"], "1.0e+6"),
    **{
        f"strategy.{key}": (["strategy=hetlora", "model=lora_mlp", "availability=full"], value)
        for key, value in (("ranks", "[3,4]"), ("assign", "size"), ("norm_weights", "false"))
    },
    **{
        f"strategy.{key}": (
            ["strategy=fedfomo", "strategy.downloads=1", "partition.validation=0.3", "availability=full"],
            value,
        )
        for key, value in (("downloads", "9"), ("exploration", "1.0"), ("exploration_decay", "0.3"))
    },
    "strategy.eps_1": ([*SPLIT, "strategy.eps_2=0"], "1.0e-9"),
    "strategy.eps_2": ([*SPLIT, "strategy.eps_1=100"], "0.0"),
    **{
        f"strategy.{key}": ([*SPLIT, "strategy.eps_1=100", "strategy.eps_2=0"], value)
        for key, value in (("max_clusters", "2"), ("start_round", "3"), ("gamma", "0.99"), ("linkage", "complete"))
    },
    "strategy.seed": (["strategy=dsgd", "strategy.topology=erdos_renyi", "strategy.mix=end"], "9"),
}

NUMBERS = "changes how numbers are computed or written, and not what they are"
FILES = "names files that this machine may lack"
# Keys that change no number, and why.
ELSEWHERE: dict[str, str] = {
    "device": NUMBERS, "deterministic": NUMBERS, "out": NUMBERS, "resume": NUMBERS,
    "trusted": "allows what is refused otherwise (tests/core/test_trusted_targets.py)",
    "when": "sets other keys (tests/app/test_per_choice.py)",
    "objective": "is for sweeps (tests/app/test_sweep.py)",
    "local.features": "names a layer of a network with several (tests/local/test_feature_rules.py)",
    "dataset.alpha": "moves no label, which is told (test_idle.py)",
    "dataset.root": FILES, "dataset.download": FILES,
    "trainer.precision": NUMBERS,
    "dataset.clients": "follows clients",
    "dataset.config": FILES,
    "model.every": "follows what the labels are",
    "model.name": "names another network (tests/models/test_zoo.py)",
    "model.weights": FILES,
    "dataset.writers": FILES,
    "dataset.shape": "gives the same numbers another shape (tests/data/datasets/own)",
    "strategy.scheme": "goes with a law of availability, and any other is refused (test_p_fedavg_laws.py)",
    "uplink.gaussian.delta": "is of the bound that is said (tests/uplink/test_private.py)",
    "uplink.tree.delta": "is of the bound that is said (tests/uplink/test_private.py)",
    **{f"partition.partitioner.{key}": "is of an extra's class" for key in ("num_partitions", "partition_by", "alpha")},
    "partition.attempts": "is how often a draw is repeated before the partition is refused",
    "shift.references_seconds": "is a limit of patience",
    "drift.references_seconds": "is a limit of patience",
    **{f"trainer.{key}": NUMBERS for key in ("executor", "trial", "chunk", "workers", "compile", "memory")},
    "trainer.cache_frozen": NUMBERS,
    **{f"tracking.{key}": NUMBERS for key in ("progress", "tensorboard", "checkpoint_every", "observers")},
}  # fmt: skip

EVENT = "says what becomes of something that does not happen in these small runs"
CHANCE = "changes a choice that is the same here by chance; another composition shows its effect"
# Keys whose values may change nothing in a small run without a word, and why.
UNHEARD: dict[str, str] = {
    **{f"availability.{key}": EVENT for key in ("unknown", "missing", "match", "header")},
    **{f"dataset.{key}": EVENT for key in ("missing", "max_categories", "min_samples", "classes")},
    "partition.min_size": EVENT, "clock.deadline": EVENT, "clock.first": EVENT, "strategy.empty": EVENT,
    "on_nonfinite": EVENT,
    "attack.since": CHANCE,
    "strategy.delta": CHANCE,
    "strategy.isolation": EVENT,
    "local.estimator": "names the law that auto chooses",
    **{f"strategy.{key}": "clusters that are far from both bounds are split with either" for key in ("eps_1", "gamma")},
    "dataset.augment.flip": "mirrors images that are the same either way",
    **{f"strategy.{key}": CHANCE for key in ("tolerance", "bad", "explore_least", "rule.bad")},
    **{f"local.{key}": "is of later steps than this run has" for key in ("weight_decay", "clip")},
}  # fmt: skip


def more_files(folder: Path) -> None:
    """Beside those of `own_files`."""
    people = (folder / "people.csv").read_text().splitlines()
    (folder / "others.csv").write_text("\n".join([people[0], *(f"9{line}" for line in people[1:])]))
    parts = ["train", "train", "test"]
    (folder / "people.csv").write_text(
        "\n".join([f"{people[0]},part", *(f"{line},{parts[n % 3]}" for n, line in enumerate(people[1:]))])
    )
    (folder / "brief.csv").write_text("round,displacement\n0,1.5\n1,0\n")
    (folder / "devices.csv").write_text("compute,up\n0.1,10\n0.3,20\n")
    clients = range(12)
    columns = [f"{k},{k},{k + 9},{k % 5},{11 - k},{k + 20}" for k in clients]
    (folder / "log.csv").write_text("\n".join(["client,from,to,begun,other,done", *columns]))
    (folder / "later.csv").write_text("\n".join(["client,from,to", *(f"{k},{40 - 3 * k},{45 - k}" for k in clients)]))
    (folder / "holes.csv").write_text("\n".join([people[0], *(f",{line[2:]}" for line in people[1:9]), *people[9:]]))
    speeches = [f"{name}.\n{name.lower() * 9} to {other}" for name in ("ANNE", "BERT") for other in "abcdefgh"]
    (folder / "play.txt").write_text("\n".join(speeches * 9))
    y = np.arange(60) % 3
    draw = np.random.default_rng(0)
    np.savez(folder / "bytes.npz", x=draw.integers(0, 255, (60, 4), dtype=np.uint8), y=y)
    np.savez(folder / "cubes.npz", x=draw.random((60, 3, 5, 3), dtype=np.float32), y=y)
