"""pfl-research as its own image benchmark uses it: FederatedAveraging on a SimulatedBackend, users weighted alike.

One process, or several under torchrun (its guide to distributed simulations).
"""

from __future__ import annotations

import os
import types

import numpy as np
import torch
import workload as w
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

asked = w.options()
clock = w.Clock(asked)
steps = torch.zeros(1, dtype=torch.int64)


def loss(self: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
    self.train()
    steps.add_(1)
    return torch.nn.functional.cross_entropy(self(x), y)


class Stopwatch(TrainingProcessCallback):
    def after_central_iteration(self, *args: object, **kwargs: object) -> tuple[bool, Metrics]:
        clock.tick()
        return False, Metrics()


np.random.seed(0)  # noqa: NPY002 (pfl draws users from this stream)
torch.manual_seed(0)
module = w.torch_model(asked.workload)
module.loss = types.MethodType(loss, module)
module.metrics = types.MethodType(lambda self, *args, **kwargs: {}, module)
start = w.torch_vector(module)
model = PyTorchModel(
    model=module, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0)
)
x, y = map(torch.from_numpy, w.data(asked.workload))
users = {i: (x[i], y[i]) for i in range(w.CLIENTS)}
training = FederatedDataset.from_slices(users, get_user_sampler("random", range(w.CLIENTS)))
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=clock.total,
        evaluation_frequency=clock.total + 1,
        train_cohort_size=w.ACTIVE,
        val_cohort_size=0,
    ),
    backend=SimulatedBackend(training_data=training, val_data=training, postprocessors=[WeightByUser()]),
    model=model,
    model_train_params=NNTrainHyperParams(local_learning_rate=w.LR, local_num_epochs=1, local_batch_size=w.BATCH),
    model_eval_params=None,
    callbacks=[Stopwatch()],
    send_metrics_to_platform=False,
)
processes = get_framework_module().distributed.world_size
if processes > 1:
    torch.distributed.all_reduce(steps)
if int(os.environ.get("RANK", 0)) == 0:
    setting = f"SimulatedBackend, {processes} process" + ("es" if processes > 1 else "")
    w.report(
        clock, start, w.torch_vector(module), int(steps), setting, torch.get_num_threads(), ["pfl", "torch", "numpy"]
    )
