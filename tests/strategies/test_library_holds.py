"""What every strategy must hold: replicates alone as together, any chunks, memory anywhere, resumed, on ranks."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field

import pytest
import torch
from naive_strategies import CLIENTS, SEEDS

from fedsim import Execution
from fedsim.availability.clock import Devices, UniformWork
from fedsim.core import Memory, ProcessRanks
from fedsim.evaluation.evaluated_models import EvaluatedModels
from fedsim.run.rehearsal import rehearse_run
from fedsim.strategies import (
    AFACD,
    AFACS,
    AFL,
    AREA,
    IFCA,
    MIFA,
    QFFL,
    AdaptiveWindow,
    AmplifiedFedAvg,
    AmplifiedScaffold,
    CAFed,
    Debiasing,
    FedAsync,
    FedAvgM,
    FedBuff,
    FedDC,
    FedDrift,
    FedDyn,
    FedExP,
    FedLaAvg,
    FedNova,
    FedStale,
    FedVARP,
    Flash,
    Focus,
    MimeLite,
    MimiC,
    Oort,
    PowerOfChoice,
    Scaffnew,
    Scaffold,
)

LIBRARY = {
    "fedavgm": lambda: FedAvgM(0.7, 0.5),
    "fednova": lambda: FedNova(0.8, "data"),
    "fedexp": lambda: FedExP(0.001),
    "flash": lambda: Flash(0.3, 0.6, 0.9, 0.1),
    "feddyn": lambda: FedDyn(0.3, "data"),
    "q_ffl": lambda: QFFL(2.0),
    "afl": lambda: AFL(0.9, 0.3),
    "mime_lite": lambda: MimeLite(0.8, 0.6, "data"),
    "feddc": lambda: FedDC(0.2),
    "focus": lambda: Focus(0.25, "skip", "data"),
    "fedstale": lambda: FedStale(0.5, 0.8, cutoff=3, weighting="data"),
    "mimic": lambda: MimiC(0.8, memory="gradient", weighting="data"),
    "area": lambda: AREA("data"),
    "mifa": lambda: MIFA(0.8, "gradient", weighting="data", divide_by="seen", age_power=0.5, max_age=2),
    "fedvarp": lambda: FedVARP(0.8, weighting="data"),
    "scaffold": lambda: Scaffold(0.8, weighting="data"),
    "scaffnew": lambda: Scaffnew(0.3, False, "data"),
    "amplified_fedavg": lambda: AmplifiedFedAvg(2, 1.4, "data"),
    "amplified_scaffold": lambda: AmplifiedScaffold(2, 1.4, weighting="data"),
    "debiasing": lambda: Debiasing(0.8, 2.0, "data"),
    "fedlaavg": lambda: FedLaAvg(0.25, "random", weighting="data"),
    "fedasync": lambda: FedAsync(0.7),
    "fedbuff": lambda: FedBuff(2, 0.8),
    "afa_cd": lambda: AFACD(0.1, "data"),
    "afa_cs": lambda: AFACS(0.1, weighting="data"),
    "power_of_choice": lambda: PowerOfChoice(1, 2),
    "oort": lambda: Oort(1, weighting="data"),
    "ifca": lambda: IFCA(2, 1.5, weighting="data"),
    "feddrift": lambda: FedDrift(0.001, 3, 1, weighting="data"),
    "adaptive_window": lambda: AdaptiveWindow(0.9, 1.0, 3, 1.0, weighting="data"),
    "ca_fed": lambda: CAFed(0.8, smoothness=0.4, weighting="data"),
}
CLOSE = {"rtol": 0, "atol": 1e-10}


def fields(state) -> dict[str, torch.Tensor]:
    return {part.name: getattr(state, part.name) for part in dataclasses.fields(state)}


@pytest.fixture(name="whole")
def whole_fixture(federated, play):
    """The states of an ordinary run, round by round."""
    return lambda name, **options: [fields(played.after) for played in play(federated(LIBRARY[name](), **options))]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", LIBRARY)
def test_a_strategy_holds_what_all_must_hold(name, whole, federated):
    """A run is compared with that of its second replicate alone; and with two ranks that give the state to another
    object of the strategy after every round, take two rows at a time and have their memory on disk."""
    expected = whole(name)
    assert not torch.equal(expected[0]["model"], expected[-1]["model"])
    for together, alone in zip(expected, whole(name, seeds=SEEDS[1:]), strict=True):
        for part, value in alone.items():
            torch.testing.assert_close(value, together[part][len(value) :], **CLOSE, msg=f"alone, {part}")
    for rank, state in enumerate(divided(federated, name)):
        for part, value in state.items():
            wanted = expected[-1][part]
            if value.shape != wanted.shape:
                wanted = wanted.unflatten(0, (len(SEEDS), CLIENTS))[:, rank::2].flatten(0, 1)
            torch.testing.assert_close(value, wanted, **CLOSE, msg=f"rank {rank}, {part}")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", sorted(LIBRARY.keys() - {"area", "ifca", "feddrift"}))
def test_clients_mean_is_that_of_the_models_they_received_last(name, federated, play):
    """Everybody begins with x^0; clients of AREA, IFCA and FedDrift have models of their own, see there."""
    simulation = federated(LIBRARY[name]())
    strategy, federation = simulation.strategy, simulation.federation
    models = EvaluatedModels(["client_mean"], strategy, federation, simulation.model.columns)
    state = simulation.initial_state()
    memory, has = Memory(), [[one] * CLIENTS for one in state.model.clone()]
    memory.evaluated |= models.memory(state.model)
    for played in play(simulation):
        cohort = played.report.cohort
        models.record_received_models(memory, played.after, cohort)
        for row, count in zip(cohort.host_index.rows, cohort.host_index.multiplicity, strict=True):
            r, i = divmod(int(row), CLIENTS)
            has[r][i] = played.after.model[r] if count else has[r][i]
        wanted = torch.stack([torch.stack(own).mean(0) for own in has])
        torch.testing.assert_close(models("client_mean", played.after, memory), wanted, **CLOSE)


def test_ranks_share_a_clock(whole, federated):
    """The slowest, and the quickest two, are those of all ranks; so is the number of steps each client draws."""
    options = {"clock": Devices(0.1, 0.8, 0.5, deadline=9.0, first=2), "clients_work": UniformWork()}
    expected = whole("fedavgm", **options)[-1]
    assert not torch.equal(expected["model"], whole("fedavgm")[-1]["model"])
    for state in divided(federated, "fedavgm", **options):
        torch.testing.assert_close(state["model"], expected["model"], **CLOSE)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LIBRARY)
def test_it_keeps_the_contract_that_somebodys_own_strategy_is_held_to(name, federated):
    strategy = LIBRARY[name]()
    strategy.__class__ = type("Own", (type(strategy),), {"__module__": "mypackage"})
    simulation = federated(strategy, execution=Execution(executor="loop", dtype="float64"))
    state = simulation.initial_state()
    rehearse_run(simulation, state, simulation.trainer.initial_memory(state.model))


@dataclass(frozen=True)
class Threads(ProcessRanks):
    """Ranks that are threads of this process."""

    slots: list = field(default_factory=lambda: [None, None], repr=False)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=60), repr=False)

    def all_gather_objects(self, value):
        self.slots[self.rank] = value
        self.barrier.wait()
        gathered = list(self.slots)
        self.barrier.wait()
        return gathered

    def all_reduce_sum(self, values):
        return values.copy_(sum(self.all_gather_objects(values.clone())))

    def all_gather_rows(self, values, lengths):
        return torch.cat(self.all_gather_objects(values))

    def broadcast_object(self, value):
        return self.all_gather_objects(value)[0]


FIRST = Threads(0, 2)
BOTH = (FIRST, dataclasses.replace(FIRST, rank=1))
# vmapped steps cannot run in threads
LOOPED = (
    "q_ffl",
    "afl",
    "mime_lite",
    "focus",
    "debiasing",
    "fedlaavg",
    "power_of_choice",
    "ca_fed",
    "ifca",
    "feddrift",
)
EXECUTORS = dict.fromkeys(LOOPED, "loop")


def divided(federated, name: str, **options) -> list[dict[str, torch.Tensor]]:
    """The last states of two ranks."""
    states, errors = [{}, {}], []

    def work(simulation, state) -> None:
        ranks = simulation.federation.ranks
        try:
            memory = simulation.trainer.initial_memory(state.model)
            for t in range(simulation.rounds):
                strategy = LIBRARY[name]()
                cohort = simulation.round_clock(strategy.cohort(state, simulation.availability.sample(t)), t)
                report = simulation.trainer.run(strategy.start(state, cohort), cohort, t, state.model, memory)
                state = strategy.aggregate(state, report, t)
                addresses = [value.data_ptr() for value in fields(state).values()]
                assert len(set(addresses)) == len(addresses), "two fields are one tensor"
            states[ranks.rank] = fields(state)
        except BaseException as error:
            errors.append(error)
            ranks.barrier.abort()

    how = Execution(dtype="float64", chunk=2, memory="disk", executor=EXECUTORS.get(name, "fused"))
    both = [federated(LIBRARY[name](), ranks=ranks, execution=how, **options) for ranks in BOTH]
    starts = [simulation.initial_state() for simulation in both]  # initial models are drawn from a global stream
    threads = [threading.Thread(target=work, args=pair) for pair in zip(both, starts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return states
