"""Other forms of what the fuzzer draws: settings of its choices, and what of a run is looked at.

Drawn apart from the choices themselves, so that a new form leaves the compositions of all numbers as they are.
"""

from __future__ import annotations

import random

from omegaconf import OmegaConf

from fedsim.app.config import config_folder, groups, keys

TRAJECTORIES = [[f"availability/trajectory={name}"] for name in ("sine", "staircase", "night", "jitter")]
FORMS: dict[str, list[list[str]]] = {  # choice → one of these beside it
    "strategy=mifa": [
        ["strategy.divide_by=seen"], ["strategy.age_power=0.5"], ["strategy.max_age=0"], ["strategy.memory=gradient"],
    ],
    "strategy=fedstale": [["strategy.probabilities=known"], ["strategy.beta=1"], ["strategy.cutoff=1"]],
    "strategy=mimic": [["strategy.first_round=available"], ["strategy.memory=gradient"]],
    "strategy=focus": [["strategy.empty=skip"]],
    "strategy=fedlaavg": [["strategy.select=random"], ["strategy.collect=1"], ["strategy.fraction=0.5"]],
    "strategy=amplified_fedavg": [["strategy.window=1"], ["strategy.window=2"]],
    "strategy=amplified_scaffold": [["strategy.window=1"], ["strategy.window=2", "strategy.correction=round"]],
    "strategy=debiasing": [["strategy.cap=1.2"]],
    "strategy=power_of_choice": [["strategy.k=1", "strategy.candidates=2"], ["strategy.loss=last"]],
    "strategy=oort": [["strategy.k=1"]],
    "strategy=ca_fed": [["strategy.tolerance=9"], ["strategy.smoothness=0.5", "strategy.prior=1"]],
    "strategy=f3ast": [["strategy.k=2"]],
    "strategy=dsgd": [
        ["strategy.topology=torus"], ["strategy.topology=erdos_renyi", "strategy.probability=0.9"],
        ["strategy.topology=star", "strategy.mix=end"], ["strategy.topology=complete", "strategy.degrees=there"],
    ],
    "strategy=cfl": [
        ["strategy.eps_1=100", "strategy.eps_2=0"],
        ["strategy.eps_1=100", "strategy.eps_2=0", "strategy.max_clusters=2", "strategy.linkage=complete"],
    ],
    "strategy=fedfomo": [["strategy.downloads=1"], ["strategy.downloads=2", "strategy.exploration=0"]],
    "strategy=ifca": [["strategy.k=3"], ["strategy.average=gradients"]],
    "strategy=feddrift": [
        ["strategy.delta=0.001", "strategy.isolation=1"], ["strategy.delta=0.001", "strategy.max_clusters=2"],
    ],
    "strategy=adaptive_window": [["strategy.delta=0.9", "strategy.max_window=2"], ["strategy.power=1"]],
    "strategy=fedasync": [["strategy.form=difference"], ["strategy.discount=hinge", "strategy.b=0"]],
    "strategy=fedbuff": [["strategy.buffer=2"], ["strategy.buffer=1", "strategy.discount=constant"]],
    "strategy=fedopt": [["strategy.optimizer=yogi"], ["strategy.optimizer=adagrad"]],
    "strategy=afl": [["strategy.average=false"]],
    "strategy=fedexp": [["strategy.average=false"]],
    "strategy=fedpbc": [["strategy.compute=active"]],
    "strategy=fedawe": [["strategy.clip=0.1"]],
    "strategy=centred_clipping": [["strategy.iterations=2", "strategy.radius=0.1"]],
    "strategy=norm_bound": [["strategy.norm=0.05"]],
    "strategy=rfa": [["strategy.iterations=2"]],
    "strategy=median": [["strategy.bucket=2"]],
    "availability=cyclic": [
        ["availability.reshuffle=order"], ["availability.reshuffle=members"], ["availability.length=2"],
    ],
    "availability=separation": [["availability.k=1"], ["availability.separation=2"], *TRAJECTORIES],
    "availability=markov": [["availability.persistence=[0.5,-0.1]"]],
    "availability=common_shock": [["availability.groups=2", "availability.persistence=0.5"], *TRAJECTORIES],
    "availability=common_factor": [["availability.groups=2", "availability.persistence=0.5"], *TRAJECTORIES],
    "availability=device_sessions": [
        ["availability.law=weibull", "availability.shape=0.6"], ["availability.law=lognormal"], *TRAJECTORIES,
    ],
    "availability=bernoulli": TRAJECTORIES,
    "availability=arrivals": [
        ["availability.lifetime=2"], ["availability.rate=0", "availability.lifetime=3"], *TRAJECTORIES,
    ],
    "local=dfo": [["local.points=1"], ["local.points=1", "local.baseline=true"]],
    "local=play": [["local.concept=stable"], ["local.concept=social"], ["local.slopes=known"]],
    "local=plugin": [["local.shared=true"]],
    "local=stateful_perfgd": [["local.horizon=1"], ["local.spread=0.1"]],
    "local=rrm": [["local.reg=0.5"]],
    "local=fedsam": [["local.adaptive=true"], ["local.rho=0.5"]],
    "local=fedlc": [["local.margin=balanced"]],
    "local=fedntd": [["local.temperature=3"], ["local.beta=0"]],
    "local=fedpac": [["local.head_steps=0"], ["local.lam=0.1"]],
    "local=fedproto": [["local.average=clients"], ["local.lam=0.1"]],
    "local=moon": [["local.mu=5"], ["local.mu=0"]],
    "local=fedala": [["local.mixing=0.5"]],
    "local=fedrod": [["local.tau=0.5"]],
    "local=ditto": [["local.penalty=2"]],
    "local=apfl": [["local.adaptive=true"], ["local.mix=outputs"]],
    "local=perfedavg": [["local.second_order=true"]],
    "local=pfedme": [["local.warm_start=true"]],
    "local=momentum": [["local.state=client"], ["local.nesterov=true"]],
    "local=adam": [["local.state=client"], ["local.decoupled=true", "local.weight_decay=0.1"]],
    "attack=min_max": [["attack.direction=sign"], ["attack.direction=std"]],
    "attack=mimic": [["attack.warmup=1"]],
    "attack=label_flip": [["attack.since=1"]],
    "uplink=topk": [["uplink.topk.feedback=ef21"], ["uplink.topk.k=3"]],
    "uplink=randk": [["uplink.randk.feedback=ef14"], ["uplink.randk.k=3"]],
    "uplink=sign": [["uplink.sign.feedback=none"], ["uplink.sign.scaled=false"]],
    "uplink=qsgd": [["uplink.qsgd.levels=1"]],
    "uplink=clip": [["uplink.clip.quantile=0.5"]],
    "uplink=gaussian": [["uplink.gaussian.per=client"],
                        ["uplink.gaussian.quantile=0.5", "uplink.gaussian.count_noise=2"]],
}  # fmt: skip
LISTS = {  # settings that may be one number per seed, of two seeds
    "strategy.server_lr": [0.9, 0.4], "strategy.server.server_lr": [0.9, 0.4], "strategy.mu": [0.0, 0.5],
    "strategy.momentum": [0.9, 0.2], "strategy.clip": [0.5, 0.1], "strategy.amplification": [1.5, 0.8],
    "strategy.beta1": [0.9, 0.5], "strategy.tau": [0.01, 0.1], "local.alpha": [0.25, 0.7],
}  # fmt: skip
PARTS = [["columns=fedper"], ["columns=lg_fedavg"], ["columns=by_name", "columns.stays=[bias]"]]
SEEN = ["fairness", "absent", "drift", "staleness", "utility"]
POWER = ("location", "demand", "group_mean", "elastic", "strategic")


def formed(number: int, own: list[str], late: bool) -> list[str]:
    """These overrides of a number, and more beside them; `late`: rows of its strategy may be."""
    draw, more = random.Random(f"forms of {number}"), []
    chosen = dict(text.split("=", 1) for text in own)
    if (rule := chosen["strategy"]) in groups()["strategy/rule"] and draw.random() < 0.4:  # given to another server
        given = [f"strategy/rule={rule}", f"strategy/server={draw.choice(groups()['strategy/server'])}"]
        own = [text.replace("strategy.bad", "strategy.rule.bad") for text in own if text != f"strategy={rule}"]
        return formed(number, [*own, "strategy=robust_server", *given], late=False)
    for text in own:
        group, _, name = text.partition("=")
        for one in name.strip("[]").split(",") if group == "uplink" else [name]:
            if draw.random() < 0.6 and (known := FORMS.get(f"{group}={one}")):
                more += draw.choice(known)
    if draw.random() < 0.3 and "weighting" in OmegaConf.load(
        config_folder() / "strategy" / f"{chosen['strategy']}.yaml"
    ):
        more += ["strategy.weighting=data"]
    if chosen["dataset"] == "digits":
        if chosen["model"] == "mlp" and "columns" not in chosen and draw.random() < 0.6:
            more += draw.choice(
                [["columns=fedper"], ["columns=lg_fedavg"], ["columns=by_name", "columns.stays=[bias]"]]
            )
        elif chosen["model"] == "linear" and draw.random() < 0.2:
            more += ["model=custom", "model._target_=small_runs.Normalised", "columns=fedbn"]
        elif chosen["model"] == "linear" and "shift" not in chosen and draw.random() < 0.3:
            more += ["shift=strategic", "shift.references=none"]
        more += ["partition.validation=0.3", "personal.over=all"] if draw.random() < 0.15 else []
    if late and "clock.deadline" in chosen and "delay" not in chosen and draw.random() < 0.5:
        more += ["clock.late=deliver"]
    if draw.random() < 0.3:
        more += [f"evaluate={draw.choice(['client_mean', '[client_mean,global]'])}"]
    if draw.random() < 0.25:
        looked = draw.sample(SEEN, 2) + (["power"] if chosen.get("shift") in POWER else [])
        more += [f"diagnostics=[{','.join(looked)}]"]
    if number % 4 == 1 and chosen["strategy"] != "oort":  # whose clip is a quantile
        choices = {text for text in own if text.startswith(("strategy", "local="))}
        more += [f"{key}={pair}" for key, pair in LISTS.items() if choices & set(keys()[key])]
    return [*own, *more]
