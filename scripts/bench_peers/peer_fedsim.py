"""fedsim: a whole run with its run folder, so that sampling, metrics, event files and checkpoints are in the time."""

from __future__ import annotations

import functools
import tempfile

import numpy as np
import torch
import workload as w

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import UniformK
from fedsim.data.datasets import Dataset
from fedsim.local import SGD
from fedsim.run.tracking import Result, Tracking
from fedsim.strategies import FedAvg

asked = w.options()
clock = w.Clock(asked)


def timed(simulation: Simulation, folder: str) -> Result:
    """The run, whose clock ticks whenever the local work of a round is done: from one tick to the next is a whole
    round. What the run does before its first round, such as trying its parts, hands out no work."""
    steps = simulation.run_as_generator(folder, tracking=Tracking(progress="none"))
    try:
        work = next(steps)
        while True:
            done = work.trainer.run_local_steps(work)
            clock.tick()
            work = steps.send(done)
    except StopIteration as end:
        result: Result = end.value
        return result


x, y = w.data(asked.workload)
flat = torch.from_numpy(x).flatten(0, 1), torch.from_numpy(y).flatten()
simulation = Simulation(
    Dataset("noise", *flat, classes=w.CLASSES),
    functools.partial(w.torch_model, asked.workload),
    clients=w.CLIENTS,
    availability=UniformK(w.ACTIVE),
    strategy=FedAvg(),
    local=SGD(lr=w.LR, epochs=1, batch_size=w.BATCH),
    rounds=clock.total,
    evaluation=EvaluationOptions(every=clock.total, client_samples=1),
    execution=Execution(device="cpu"),
)
start = simulation.initial_state().model[0].numpy()
with tempfile.TemporaryDirectory() as folder:
    result = timed(simulation, folder)
end = result.state.model[0].numpy()
steps = result.samples / w.BATCH
setting = simulation.trainer.executor_choice.describe()
w.report(clock, np.array(start), np.array(end), steps, setting, torch.get_num_threads(), ["torch"])
