"""FedLab's standalone simulation: SyncServerHandler and SGDSerialClientTrainer in a StandalonePipeline."""

from __future__ import annotations

import fedlab_torchvision  # noqa: F401 (before FedLab)
import torch
import workload as w
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, TensorDataset

asked = w.options()
clock = w.Clock(asked)
steps = 0


class Noise:
    """A data loader for every client, as FedLab's data sets give them."""

    def __init__(self) -> None:
        self.x, self.y = map(torch.from_numpy, w.data(asked.workload))

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        return DataLoader(TensorDataset(self.x[client], self.y[client]), batch_size=batch_size, shuffle=True)


class Timed(StandalonePipeline):
    def evaluate(self) -> None:  # FedLab calls it after every round
        clock.tick()


def count(*_: object) -> None:
    global steps
    steps += 1


torch.manual_seed(0)
model = w.torch_model(asked.workload)
start = w.torch_vector(model)
trainer = SGDSerialClientTrainer(model, w.CLIENTS, cuda=False)
trainer.setup_dataset(Noise())
trainer.setup_optim(epochs=1, batch_size=w.BATCH, lr=w.LR)
trainer.optimizer.register_step_post_hook(count)
handler = SyncServerHandler(model, global_round=clock.total, sample_ratio=w.ACTIVE / w.CLIENTS, cuda=False)
Timed(handler, trainer).main()
end = handler.model_parameters.numpy()
setting = "StandalonePipeline, SGDSerialClientTrainer"
w.report(clock, start, end, steps, setting, torch.get_num_threads(), ["fedlab", "torch", "numpy"])
