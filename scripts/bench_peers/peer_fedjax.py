"""FedJAX: `fedjax.algorithms.fed_avg` on in-memory federated data, compiled client steps (its jit backend).

The CNN is the module of its own EMNIST example, which is the same network with another input.
"""

from __future__ import annotations

import os

import fedjax
import haiku as hk
import jax
import numpy as np
import workload as w
from fedjax.models.emnist import ConvDropoutModule

asked = w.options()
clock = w.Clock(asked)
x, y = w.data(asked.workload)
if asked.workload == "p-cnn":
    x = np.ascontiguousarray(np.moveaxis(x, 2, -1))  # channels come last in JAX


def mlp(batch: dict[str, jax.Array]) -> jax.Array:
    return hk.nets.MLP([128, w.CLASSES])(batch["x"])


def cnn(batch: dict[str, jax.Array], is_train: bool = True) -> jax.Array:
    return ConvDropoutModule(w.CLASSES)(batch["x"], is_train)


def loss(batch: dict[str, jax.Array], predictions: jax.Array) -> jax.Array:
    return fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], predictions)


conv = asked.workload == "p-cnn"
model = fedjax.create_model_from_haiku(
    transformed_forward_pass=hk.transform(cnn if conv else mlp),
    sample_batch={"x": x[0, :1], "y": y[0, :1]},
    train_loss=loss,
    train_kwargs={"is_train": True} if conv else None,
    eval_kwargs={"is_train": False} if conv else None,
)
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    fedjax.model_grad(model),
    fedjax.optimizers.sgd(w.LR),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=w.BATCH, num_epochs=1, seed=0),
)
clients = fedjax.InMemoryFederatedData({b"%04d" % i: {"x": x[i], "y": y[i]} for i in range(w.CLIENTS)})
sampler = fedjax.client_samplers.UniformGetClientSampler(clients, num_clients=w.ACTIVE, seed=0)
state = algorithm.init(model.init(jax.random.PRNGKey(0)))
start, steps = jax.flatten_util.ravel_pytree(state.params)[0], 0
for t in range(clock.total):
    sampler.set_round_num(t)
    cohort = sampler.sample()
    state, _ = algorithm.apply(state, cohort)
    jax.block_until_ready(state.params)
    clock.tick()
    steps += sum(-(-len(own) // w.BATCH) for _, own, _ in cohort)
end = jax.flatten_util.ravel_pytree(state.params)[0]
w.report(
    clock,
    np.asarray(start),
    np.asarray(end),
    steps,
    "fed_avg, jit backend",
    len(os.sched_getaffinity(0)),
    ["fedjax", "jax", "jaxlib", "dm-haiku", "numpy"],
)
