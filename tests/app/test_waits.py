"""Between evaluations no round makes the host wait for the device, whatever is chosen; what has to is named here.

Looked at on a CPU: operations whose outcome the host needs, and tensors that become host numbers.
"""

from __future__ import annotations

import traceback
from collections import Counter

import pytest
from small_runs import company_of, configuration
from torch import Tensor
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.app.build import build
from fedsim.app.config import groups

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
LEAVES = {Tensor.numpy, Tensor.tolist, Tensor.cpu, Tensor.item, Tensor.__array__}
ON_THE_HOST = {  # where tensors that leave never were on a device, or only on a CPU
    "run/delayed_updates.py",
    "run/divergence.py",  # of a GPU it looks when an evaluation or a checkpoint is due
    "data/samples/stored.py",
}
MAY_WAIT = {  # once a round: who is to take part, or how much each counts, is chosen on the host by what was learned
    "strategy=afl": {"strategies/afl.py"},
    "strategy=ca_fed": {"strategies/ca_fed.py"},
    "strategy=cfl": {"strategies/cfl.py"},
    "strategy=feddrift": {"strategies/feddrift.py"},  # clusters are merged
    "strategy=fedpac": {"strategies/fedpac.py"},
    "strategy=fedlaavg": {"core/federation.py"},
    "strategy=oort": {"strategies/selection.py"},
    "strategy=power_of_choice": {"core/federation.py"},
    # once a round: columns that a client lacks must not have moved, and it is counted how many it has
    **{f"capacity={name}": {"run/submodels.py"} for name in ("federated_dropout", "fedrolex", "fjord", "heterofl")},
    # once a sweep: how many there are depends on the data
    "local=profl": {"local/robust_gradient.py"},
}
GROUPS = ("availability", "drift", "shift", "local", "strategy", "strategy/rule", "uplink", "attack", "work", "delay",
          "columns", "capacity")  # fmt: skip
NOT_HERE = {
    "availability=trace",
    "availability=log",
    "availability=table",
    "drift=replay",
    "columns=fedbn",
}  # files, another model
CHOICES = [
    f"{group}={choice}"
    for group in GROUPS
    for choice in groups()[group]
    if choice != "custom" and f"{group}={choice}" not in NOT_HERE
]


class Watch(TorchFunctionMode):
    """Counts waits by the file of fedsim that they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.off = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in LEAVES:
            self.see()
        self.off = func is one_hot  # on a CPU it looks at its numbers, on a GPU it does not
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.off = False

    def see(self) -> None:
        frames = [frame.filename for frame in traceback.extract_stack() if "/fedsim/" in frame.filename]
        self.found[frames[-1].rpartition("/fedsim/")[2]] += not self.off


class Operations(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in WAITS:
            self.watch.see()
        return func(*args, **(kwargs or {}))


def waits(*overrides: str) -> set[str]:
    """The files in which the second round waits, its local work and what follows until the next one's."""
    own = ["clients=12", "rounds=4", "eval_every=1000", "local_steps=2", "trainer.compile=never"]
    silent = ["tracking.tensorboard=false", "tracking.progress=none"]
    steps = build(configuration(*own, *silent, *overrides))[0].run_as_generator()
    work = next(steps)
    work = steps.send(work.trainer.run_local_steps(work))
    with Watch() as watch, Operations(watch):
        work = steps.send(work.trainer.run_local_steps(work))
    steps.close()
    return {file for file, count in watch.found.items() if count} - ON_THE_HOST


@pytest.mark.sampled(3)
@pytest.mark.parametrize("choice", CHOICES)
def test_no_round_waits(choice: str) -> None:
    assert waits(choice, *company_of(choice)) == MAY_WAIT.get(choice, set())


def test_a_wait_is_seen() -> None:
    assert waits("strategy=oort")
    assert waits("local=profl", "shift=strategic", "local.bins=3")
