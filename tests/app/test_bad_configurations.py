"""Bad configurations: one sentence each, no traceback, and no round starts.

`CONFIGURATIONS` is the table: what is wrong, and what the answer says.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bad_input import MEAN, answer

CONFIGURATIONS: list[tuple[list[str], str]] = [
    # the command line itself
    (["ronds=3"], "ronds is not a setting; did you mean 'rounds'?"),
    (["strategy=fedaw"], "strategy=fedaw is unknown; choose one of"),
    (["stratgy"], "'stratgy' lacks a value; set key=value or group=choice; did you mean 'strategy'?"),
    (["hydra/launcher=slrum"], "did you mean 'slurm'?"),
    (["strategy=custom"], "strategy._target_ is missing; set strategy._target_=package.module.Class"),
    (["strategy._target_=fedsim.strategies.LocalOnly"], "strategy=custom leaves out the keys"),
    (["inf"], "did you mean 'info'?"),
    (["dataset=MNIST"], "did you mean 'mnist'?"),
    (["model=cnn"], "did you mean 'leaf_cnn', 'svhn_cnn' or 'cifar10_cnn'?"),
    (["fedpbc"], "did you mean 'strategy=fedpbc'?"),
    (["partition.alhpa=1"], "did you mean 'partition.alpha'?"),
    (["availability.gamma=1"], "did you mean 'availability.trajectory.gamma'?"),
    (["alpha=1"], "did you mean 'dataset.alpha', 'local.alpha' or 'model.alpha'?"),
    (["learning_rate=1"], "did you mean 'lr'?"),
    (["availability.base=groups"], "a value where a choice is wanted; set availability/base=groups"),
    (["+foo=1"], "foo is not a setting"),
    (["partition=iid", "partition.alpha=1"], "partition.alpha exists only with partition=dirichlet"),
    (["strategy.momentum=0.9"], "strategy.momentum"),
    (["rounds"], "rounds"),
    (["lr=[0.1"], "lr=[0.1"),
    (["strategy=null"], "Config group override must be a string"),
    (["~model"], "model"),
    (["lr=${nowhere}"], "lr=${nowhere}: nowhere is not a setting; give one that is, or a value"),
    (
        ["lr=${oc.env:FEDSIM_NOPE}"],
        "lr=${oc.env:FEDSIM_NOPE}: the environment variable FEDSIM_NOPE is not set",
    ),
    (
        ["lr=${oc.env:FEDSIM_NOPE,0.1}"],
        "lr='0.1' must be a number or a list, each entry a number, without quotes; of the",
    ),
    (["partition.alpha='1'"], "partition.alpha='1' must be a number, without quotes"),
    (["-m", "lr=0.1,0.2", "rounds=${oc.env:FEDSIM_NOPE}"], "rounds=${oc.env:FEDSIM_NOPE}: the environment variable"),
    (["seeds={a:1}"], "seeds={a:1} cannot be set there; a value of seeds looks like seeds=[0]"),
    (["seeds=0,1"], "seeds=0,1 are several values; add -m for a run of each, or for a list write 'seeds=[0,1]'"),
    (["model={a:1}"], "model takes the name of a choice, one of char_lstm"),
    (
        ["strategy=[fedavg,fedvarp]"],
        "[fedavg,fedvarp] are several choices, not one; add -m and strategy=fedavg,f",
    ),
    (["experiment=nowhere"], "experiment=nowhere is unknown"),
    # the run
    (["rounds=abc"], "rounds='abc' must be a whole number"),
    (["rounds=0"], "rounds=0 must be a whole number of at least 1"),
    (["rounds=2.5"], "rounds=2.5 must be a whole number"),
    (["rounds=99999999999999999999"], "rounds=99999999999999999999 must be a whole number below 2^63"),
    (["clients=-3"], "clients=-3"),
    (["clients=100000"], "clients=100000"),
    (["seeds=[]"], "seeds=[] must be a non-empty list"),
    (["seeds=7"], "seeds=7 must be a list"),
    (["seeds=[0,-1]"], "seeds=-1"),
    (["seeds=[0,a]"], "seeds=[0, 'a'] must be a list, each entry a whole number"),
    (["eval_every=0"], "eval_every=0"),
    (["evaluate=best"], "evaluate='best' is unknown; choose one of global, client_mean"),
    (["metrics=auroc"], "metrics='auroc' must be a list of names of torchmetrics' metrics"),
    (["metrics=[f1]"], "metrics: 'f1' is not a metric of torchmetrics"),
    (["metrics=[{name:f1_score,avarage:macro}]"], "f1_score has no argument 'avarage'; did you mean 'average'?"),
    (["metrics=[mean_squared_error]"], "mean_squared_error does not fit outputs [10] and targets []"),
    (
        ["metrics=[auroc]", *MEAN],
        "metrics: auroc needs labels, but the targets of dataset=gaussian_mean are not labels",
    ),
    (["metrics=[{_target_:nowhere.f}]"], "_target_='nowhere.f' cannot be imported"),
    (["metrics=[auroc]", "objective=test_aurok"], "did you mean 'test_auroc'?"),
    (["start=ps"], "start=ps, but no performatively stable point is known"),
    (["objective=accuracy"], "objective=accuracy is not a metric"),
    (["start=warm"], "start='warm' is unknown"),
    (["on_nonfinite=ignore"], "on_nonfinite='ignore' is unknown; choose one of stop, drop_client, drop_replicate"),
    (["device=abacus"], "device='abacus' is unknown; choose one of auto, cpu, cuda, mps, xpu, or cuda:1"),
    (["device=cuda:99"], "device='cuda:99' is not usable here"),
    (["resume=nowhere"], "resume=nowhere: no checkpoint there"),
    (["resume=true"], "resume=True names no folder; resume=auto goes on with a run in out"),
    # local training
    (["lr=0"], "lr=0 must be positive"),
    (["lr=fast"], "lr='fast' must be a number"),
    (["lr=nan"], "lr=nan must be a finite number"),
    (["lr=[0.1,0.2]"], "lr has 2 entries, but there are 1 seeds"),
    (["lr=[]"], "lr"),
    (["batch_size=0"], "batch_size=0"),
    (
        ["dataset=pricing", "partition=natural", "model=mean", "batch_size=1000000000000"],
        "batch_size=1000000000000: one client's batch needs",
    ),
    (["batch_size=many"], "batch_size='many' must be a whole number below 2^63 or null"),
    (["local_steps=2", "local_epochs=2"], "mutually exclusive"),
    (["local.sampling=random"], "local.sampling='random' is unknown"),
    (["local.clip=0"], "local.clip=0"),
    (["local.drop_last=maybe"], "local.drop_last='maybe' must be true or false"),
    (["local=apfl", "local.alpha=1.5"], "local.alpha=1.5 must lie between 0 and 1"),
    (["local=pfedme", "local.inner_steps=0.5"], "local.inner_steps=0.5"),
    (["local=pofl", "local.history=0"], "local.history=0"),
    (
        ["local=pofl", "local.history=1000000000"],
        "local.history=1000000000 needs 29,057 GiB for 12 clients' models",
    ),
    # who holds what, and who is there
    (["partition.alpha=0"], "partition.alpha=0"),
    (["partition.alpha=x"], "partition.alpha='x' must be a number"),
    (["partition=natural"], "partition"),
    (["partition.validation=1.5"], "partition.validation=1.5"),
    (["availability=uniform_k", "availability.k=30"], "availability.k=30 exceeds clients=12"),
    (["availability.base.p=1.5"], "availability.base.p=1.5"),
    (["availability.base.p=[1]"], "availability.base.p=[1] must be a number"),
    (["availability=sine", "availability.trajectory.gamma=2"], "availability.trajectory.gamma=2"),
    (["availability=trace"], "availability.path is missing"),
    (["availability=trace", "availability.path=nowhere.csv"], "availability.path=nowhere.csv does not exist"),
    (["strategy=p_fedavg"], "is defined under one law alone; use availability=full"),
    (["strategy.server_lr=-1"], "strategy.server_lr=-1 must be positive"),
    (["strategy.server_lr=[0.1,0.2]"], "strategy.server_lr has 2 entries, but there are 1 seeds; give one per seed"),
    (["strategy.server_lr=[1,-1]", "seeds=[0,1]"], "strategy.server_lr[1]=-1 must be positive"),
    (["strategy.server_lr=[]"], "strategy.server_lr=[] has no entries"),
    (["strategy=fedawe", "strategy.clip=[1,null]"], "strategy.clip=[1, None] must be a number or a list"),
    (["strategy=fedavgm", "strategy.momentum=[0.5,1.5]"], "strategy.momentum[1]=1.5 must lie between 0 and 1"),
    (["strategy=fedasync", "strategy.alpha=[0.1,0.2]"], "strategy.alpha=[0.1, 0.2] must be a number"),
    (
        ["strategy=robust_server", "strategy.server.server_lr=[0.1,0.2]"],
        "strategy.server.server_lr has 2 entries, but there are 1 seeds",
    ),
    (["local=apfl", "local.alpha=[0.1,0.2,0.3]"], "local.alpha has 3 entries, but there are 1 seeds"),
    (["strategy=robust_server", "strategy/rule=krum", "strategy.rule.bad=-1"], "strategy.rule.bad=-1 must not be"),
    (["strategy=robust_server", "strategy/rule=krum", "strategy.rule.bad=30"], "lower strategy.rule.bad or"),
    (["strategy=robust_server", "strategy.server.server_lr=-1"], "strategy.server.server_lr=-1 must be positive"),
    (["strategy.weighting=size"], "strategy.weighting='size' is unknown"),
    (["strategy=scaffold", "local=apfl", "local.mix=sum"], "local.mix='sum' is unknown"),
    (["personal.over=all"], "add partition.validation=0.2"),
    (["partition.validation=0.2", "personal.newcomers=12"], "personal.newcomers=12 leaves none of clients=12"),
    (
        ["partition.validation=0.2", "personal.newcomers=2", "availability=uniform_k", "availability.k=11"],
        "availability.k=11 exceeds the 10 of clients=12 that are no newcomers (personal.newcomers=2)",
    ),
    (
        [*MEAN, "clients=3", "personal.newcomers=1", "shift=location", "shift.epsilons=[0.1,0.2]"],
        "shift.epsilons has 2 entries, but clients=3; give one per client",
    ),
    (["availability=trace", "availability.path=pipe"], "availability.path=pipe cannot be read as CSV (it is a pipe or"),
    (["out=pipe"], "out=pipe"),
    # model, data and what moves them
    (["model=custom"], "model._target_ is missing"),
    (
        ["model=custom", "model._target_=bad_models.BegunIll"],
        "BegunIll is initialised with non-finite values",
    ),
    (["model=custom", "model._target_=no.such.Net"], "model._target_='no.such.Net' cannot be imported"),
    (["model=custom", "model._target_=os.getcwd"], "model._target_='os.getcwd' is of the package os, which config"),
    (["model=custom", "model._target_=os.system", "+model.command=touch stolen"], "is of the package os, which conf"),
    (
        ["model=custom", "model._target_=torch.os.system", "+model.command=touch stolen"],
        "is not an nn.Module that conf",
    ),
    (["model=custom", "model._target_=torch.nn.os.system.__call__", "+model.command=touch stolen"], "underscore"),
    (["model=custom", "model._target_=fedsim.core.files.os.system"], "is not an nn.Module that configurations may bui"),
    (["model=custom", "model._target_=fedsim.models.losses.torch.hub.load"], "leads to the package torch, and that"),
    (["model=custom", "model._target_=fedsim.models.kinds.TORCH"], "has no attribute 'TORCH'"),
    (["model=custom", "model._target_=builtins.exec", "+model.source=1/0"], "is of the package builtins"),
    (["model=custom", "model._target_=torch.load", "+model.f=x"], "'torch.load' is not an nn.Module that"),
    (
        ["strategy=custom", "strategy._target_=fedsim.data.partition.IID"],
        "is not a Strategy that configurations may build",
    ),
    (["strategy=custom", "strategy._target_=bad_models.BegunIll"], "is a class, but not a Strategy; derive it from"),
    (
        ["dataset=custom", "dataset._target_=fedsim.models.MLP"],
        "is not a fedsim.data.datasets.Dataset that configurations",
    ),
    (["+strategy._args_=[1]"], "strategy._args_=[1]: objects are built of named arguments; leave it out"),
    (["+strategy.inner={_target_:fedsim.strategies.FedAvg}"], "stands where no object is wanted; leave it out"),
    (["model=custom", "model._target_=torch.nn.Linear", "+model.trust_remote_code=true"], "runs code of a repository"),
    (["model.loss=os.system"], "model.loss='os.system' is of the package os"),
    (["strategy=custom", "strategy._target_=subprocess.run"], "strategy._target_='subprocess.run' is of the package"),
    (["+local.inner.deep={_target_:os.system,command:touch stolen}"], "local.inner.deep._target_='os.system' is of"),
    (["+local.many=[{x:{_target_:shutil.rmtree,path:x}}]"], "local.many.x._target_='shutil.rmtree' is of the package"),
    (["metrics=[{_target_:os.system}]"], "metrics: _target_='os.system' is of the package os"),
    (["tracking.observers=[{_target_:os.system,command:touch stolen}]"], "'os.system' is of the package os"),
    (["tracking.observers=[{_target_:fedsim.run.tracking.metrics_csv.MetricsCSV}]"], "is not an Observer that"),
    (["trusted=os"], "trusted='os' must be a list of packages' names"),
    (["trusted=[1]"], "trusted=[1] must be a list of packages' names"),
    (["+strategy._partial_=true"], "strategy._partial_=true leaves an object half made"),
    (["model=mlp", "model.hidden=[0]"], "model.hidden"),
    (["model=mlp", "model.hidden=wide"], "model.hidden='wide' must be a list"),
    (["model=mlp", "model.hidden=[4000000000000]"], "need more memory than there is"),
    (["model=mean"], "model"),
    (["model.loss=hinge"], "model.loss='hinge' is unknown"),
    (["model.loss=-1"], "model.loss=-1 is unknown; choose one of cross_entropy"),
    (["model.loss=''"], "model.loss='' is unknown"),
    (["model.ridge=-1"], "model.ridge=-1 must not be negative"),
    (["dataset=mnist", "dataset.root=nowhere"], "FEDSIM_DATA"),
    (["dataset._target_=no.such.Data"], "dataset._target_='no.such.Data' cannot be imported"),
    ([*MEAN, "dataset.means=[1,2]"], "dataset.means"),
    ([*MEAN, "clients=2", "dataset.means=[1,nan]"], "dataset.means[1]=nan must be a finite number"),
    ([*MEAN, "dataset.std=-1"], "dataset.std=-1"),
    (["strategy=fedawe", "strategy.clipped=all"], "strategy.clipped='all'"),
    ([*MEAN, "dataset.seed=abc"], "dataset.seed='abc' must be a whole number"),
    ([*MEAN, "shift=location", "shift.epsilon=1.5"], "shift.epsilon"),
    ([*MEAN, "local_epochs=1"], "local_epochs"),
    (["shift=location"], "shift"),
    (["shift=strategic", "shift.seed=-1"], "shift.seed=-1"),
    (["contamination=gaussian", "contamination.fraction=2"], "contamination.fraction=2"),
    # how it runs, and what is written
    (["trainer.executor=threads"], "trainer.executor='threads' is unknown"),
    (["trainer.chunk=large"], "trainer.chunk='large' must be 'auto' or a whole number"),
    (["trainer.dtype=float16"], "trainer.dtype='float16' is unknown"),
    (["trainer.memory=tape"], "trainer.memory='tape' is unknown"),
    (["trainer.precision=bf16", "trainer.dtype=float64"], "trainer.precision=bf16 is for trainer.dtype=float32"),
    (["trainer.compile=graph", "device=cpu"], "trainer.compile=graph needs a GPU, and the device is cpu"),
    (["tracking.checkpoint_every=0"], "tracking.checkpoint_every=0"),
    (["tracking.client_samples=0"], "client_samples=0"),
    (["tracking.progress=bar"], "tracking.progress='bar' is unknown"),
    (["tracking.tensorboard=maybe"], "tracking.tensorboard='maybe' must be true or false"),
    (["tracking.observers=wandb"], "tracking.observers='wandb' must be a list"),
    (["tracking.observers=[wand]"], "tracking.observers='wand' is unknown"),
    (["tracking.observers=[{_target_:nope.X}]"], "tracking.observers._target_='nope.X' cannot be imported"),
    (["stop.target=0.9"], "stop.target=0.9 must be metrics and values"),
    (["stop.target={accuracy:0.9}"], "stop.target='accuracy' is unknown"),
    (["stop.target={test_accuracy:most}"], "stop.target.test_accuracy='most' must be a finite number"),
    (["stop.patience=3"], "stop.patience=3 has no metric to compare"),
    (["stop.seconds=0"], "stop.seconds=0 must be positive"),
    (["out=file"], "out=file"),
    (["out=file/below"], "out=file/below"),
    (["out=/proc/none"], "out=/proc/none"),
    (["out="], "out='' names no folder"),
    (["out=' '"], "names no folder"),
    (["out=true"], "out=True names no folder"),
    (["out=[a]"], "names no folder; give one, such as out=outputs/first"),
    (["out={a:1}"], "names no folder"),
    (["out=."], "out=. holds a config.yaml that no run wrote"),
    (["resume="], "resume='' names no folder"),
    (["resume=[auto]"], "names no folder"),
    (["-m", "out="], "out='' names no folder"),
    (["-m", "out=true"], "out=True names no folder"),
    (["hydra.run.dir=x"], "hydra.run.dir=x is not where a run writes; set out=x"),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("arguments", "message"), CONFIGURATIONS, ids=lambda value: "" if isinstance(value, str) else " ".join(value)
)
def test_a_bad_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("file", "config.yaml"):
        Path(name).write_text("mine")
    os.mkfifo("pipe")
    said = answer(monkeypatch, *arguments)
    assert said is not None
    assert message in said
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"file", "config.yaml"}


def test_the_table_is_as_long_as_it_was_promised() -> None:
    assert len(CONFIGURATIONS) >= 165
