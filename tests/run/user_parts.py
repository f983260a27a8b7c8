"""Parts that users might write, each run in several ways that must agree.

    python tests/run/user_parts.py                          # one line per part, and a summary
    python tests/run/user_parts.py --count 60 --seed 1      # a sample
    python tests/run/user_parts.py --only "schedule"        # those whose kind or name matches
    python tests/run/user_parts.py --folded                 # jobs of one seed, alone and folded into one federation

The parts are source text in `user_parts_sources`. Each is loaded as a new module for each simulation, as in a new
process, and trained on five clients of two seeds in double precision. A verdict is `right` (all of these agree: other
global seeds, clients one at a time and in two threads, a second simulation of the same objects, another simulation in
lockstep, a resumed run, each seed alone, and a FedAvg by hand or the part of fedsim that it should equal), `refused`
(one sentence before anything is written), `stopped` (one sentence in a later round), `told` (with --folded: the jobs
were not folded, for a reason in the log, and a class counts its objects), `WRONG` or `TRACEBACK`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import random
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim import ConfigError, DivergenceError, Simulation, Tracking, run_together
from fedsim.core import rng
from fedsim.core.errors import RunError
from fedsim.data.datasets import Dataset
from fedsim.evaluation import EvaluationOptions
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.run.fold import FoldedJobs, FoldJob, foldable_run_steps
from fedsim.run.together import LockstepRunner
from fedsim.trainer import Execution, run_to_completion

SOURCES = Path(__file__).parent / "user_parts_sources"
GOOD = ("right", "refused", "stopped", "told")
SIZES = (9, 2, 5, 13, 1)
SEEDS, ROUNDS, HALF = (0, 1), 8, 4
QUIET = Tracking(progress="none", tensorboard=False)
Numbers = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A part.

    Attributes:
        kind: its group.
        name: what is peculiar about it.
        harmless: must it run?
        code: which defines `make()`, the arguments of a simulation.
    """

    kind: str
    name: str
    harmless: bool
    code: str

    @property
    def label(self) -> str:
        return f"{self.kind}: {self.name}"

    def load(self, folder: Path) -> ModuleType:
        """A new module, as in a new process."""
        name = re.sub(r"\W+", "_", f"part_{self.kind}_{self.name}")
        path = folder / f"{name}.py"
        if not path.exists():
            path.write_text((SOURCES / "prelude.txt").read_text() + "\n" + self.code)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


def cases() -> list[Case]:
    """All of them."""
    found = []
    for path in sorted(SOURCES.glob("*.txt")):
        for block in re.split(r"^=== ", path.read_text(), flags=re.M)[1:]:
            heading, _, code = block.partition("\n")
            kind, name, expected = (text.strip() for text in heading.split("|"))
            found.append(Case(kind, name, expected == "ok", code))
    return found


def sample(count: int, seed: int) -> list[Case]:
    """So many of them, drawn."""
    return random.Random(seed).sample(cases(), count)


def data() -> Dataset:
    """Unequal clients, one of them with one sample."""
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    x = draw.standard_normal((len(owners), 3)) + owners[:, None] / 4
    y = x @ [1.0, -2.0, 0.5] + owners
    return Dataset("unequal", torch.as_tensor(x), torch.as_tensor(y), loss="squared", owners=torch.as_tensor(owners))


def simulation(
    parts: dict[str, Any], seeds: tuple[int, ...] = SEEDS, lr: float | list[float] = 0.1, **execution: Any
) -> Simulation:
    settings: dict[str, Any] = {
        "local": SGD(lr=lr, steps=2, batch_size=6), "rounds": ROUNDS, "clients": len(SIZES), "seeds": seeds,
        "execution": Execution(dtype="float64", **execution),
        "evaluation": EvaluationOptions(every=HALF, client_samples=99),
    }  # fmt: skip
    parts = dict(parts)
    dataset, model = parts.pop("dataset", data()), parts.pop("model", Linear)
    return Simulation(dataset, model, **(settings | parts))


def numbers(result: Any) -> Numbers:
    """The last model, and the columns of all evaluations but those of real time."""
    columns = [name for name in result.history[0] if name not in ("seconds", "round")]
    out = {name: np.array([float(row[name]) for row in result.history]) for name in columns}
    return out | {"model": result.state.model.detach().double().numpy().copy()}


def difference(one: Numbers, other: Numbers, tolerance: float, names: Any = None) -> str | None:
    """The first name under which they differ, and by how much."""
    for name in one if names is None else names:
        a, b = one[name], other[name]
        if a.shape != b.shape or not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return name if a.shape != b.shape else f"{name} by {np.nanmax(np.abs(a - b)):.2g}"
    return None


class HandObjective:
    """The loss of a linear model and its gradient, by hand."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.loss = loss

    def gradient(self, params: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = params.detach().clone().requires_grad_()
            losses = self.loss((batch["x"] @ point[:3] + point[3])[:, None], batch)
            weight = batch.get("weight")
            loss = losses.mean() if weight is None else (losses * weight).sum() / weight.sum()
            (gradient,) = torch.autograd.grad(loss, point)
        return gradient, loss.detach()


@torch.no_grad()
def by_hand(case: Case, run: Simulation, folder: Path) -> Numbers:
    """FedAvg, one client at a time, each client and round with parts of a new module."""
    models, memory = run.model.initial(run.federation.seeds).clone(), dict[str, Tensor]()
    objective: Any = HandObjective(run.model.loss)
    for t in range(ROUNDS):
        means = []
        for r in range(len(SEEDS)):
            ends = []
            for client in range(len(SIZES)):
                parts = case.load(folder).make()
                rule = parts.get("local") or SGD(lr=0.1, steps=2, batch_size=6)
                shift, contamination = parts.get("shift"), parts.get("contamination")
                rule.setup(run.data, run.shift, run.model)
                if shift is not None:
                    shift.setup(run.federation, run.data, run.model)
                if contamination is not None:
                    contamination.setup(run.federation, run.dataset)
                memory = memory or {name: value.clone() for name, value in rule.memory(run.federation, 4).items()}
                row = r * len(SIZES) + client
                carry = {"params": models[r].clone()} | {name: value[row].clone() for name, value in memory.items()}
                carry |= {name: value[0] for name, value in rule.round_state(models[r][None].clone()).items()}
                for step, batch in batches(run, r, client, t):
                    if shift is not None:
                        theta = models[r].clone() if shift.deploy == "round" else carry["params"].clone()
                        batch = shift(batch, theta)
                    if contamination is not None:
                        keys = chunk_of(run, r, client, t).keys.step_keys(rng.Purpose.CONTAMINATION, step, slice(0, 1))
                        rotten = contamination.at(t)({name: value[None] for name, value in batch.items()}, keys)
                        batch = {name: value[0] for name, value in rotten.items()}
                    lr = torch.tensor(rule.rates[0] * rule.schedule.factor(t, step, 2), dtype=torch.float64)
                    if step == 0 and rule.has_round_start:
                        carry = rule.on_round_start(carry, batch, lr, objective)
                    carry, _ = rule.step(dict(carry), batch, lr, objective)
                ends.append(carry["params"])
                for name in memory:
                    memory[name][row] = carry[name]
            means.append(torch.stack(ends).mean(0))
        models = torch.stack(means)
    return {"model": models.numpy()}


def chunk_of(run: Simulation, replicate: int, client: int, t: int) -> Any:
    """The batches of one client of one seed."""
    counts = np.zeros((len(SEEDS), len(SIZES)))
    counts[replicate, client] = 1
    cohort = run.federation.make_cohort(counts, np.ones_like(counts), t)
    return run.trainer.batches.plan(cohort, t).chunk(np.array([0]))


def batches(run: Simulation, replicate: int, client: int, t: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Steps and batches without padding."""
    chunk = chunk_of(run, replicate, client, t)
    for step in range(int(chunk.steps[0])):
        batch = chunk.batch(step, 0, 1, torch.float64)
        yield step, {name: value[0] for name, value in batch.items() if name != "weight"}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (what parts might draw from)
    random.seed(seed)


def ways(case: Case, folder: Path) -> dict[str, tuple[Callable[[], Numbers], float]]:
    """Runs that must give what the first one gives, and to which tolerance."""

    def make() -> dict[str, Any]:
        return case.load(folder).make()

    def again(**execution: Any) -> Numbers:
        seed_all(7)
        return numbers(simulation(make(), **execution).run(tracking=QUIET))

    def same_objects() -> Numbers:
        parts = make()
        simulation(parts).run(tracking=QUIET)
        return numbers(simulation(parts).run(tracking=QUIET))

    def in_company() -> Numbers:
        parts = make()
        return numbers(run_together([simulation(parts), simulation(parts, (5, 3))])[0])

    def resumed() -> Numbers:
        def ends_early(event: Any) -> str | None:
            return "half of the rounds" if event.round == HALF else None

        tracking = Tracking(progress="none", tensorboard=False, observers=[ends_early])
        simulation(make()).run(folder / "resumed", tracking=tracking)
        seed_all(11)
        return numbers(simulation(make()).run(folder / "resumed", resume=True, tracking=QUIET))

    return {
        "other global seeds": (again, 0),
        "clients in two threads": (lambda: again(executor="loop", workers=2, chunk=2), 1e-8),
        "a second simulation of the same objects": (same_objects, 0),
        "another simulation in lockstep": (in_company, 1e-8),
        "resumed": (resumed, 0),
    }


def verdict(case: Case, of: Callable[[Case, Path], tuple[str, str]] | None = None) -> tuple[str, str]:
    """The word, and what is to be said of it."""
    folder = Path(tempfile.mkdtemp())
    try:
        return (of or _verdict)(case, folder)
    except ConfigError as error:
        if "\n" in str(error) or (folder / "run").exists():
            return "TRACEBACK", f"several lines, or a folder: {error}"
        return "refused", str(error)
    except (RunError, DivergenceError) as error:
        return "stopped", str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "TRACEBACK", f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verdict(case: Case, folder: Path) -> tuple[str, str]:
    seed_all(0)
    run, problems = simulation(case.load(folder).make()), []
    first = numbers(run.run(folder / "run", tracking=QUIET))
    for name, (way, tolerance) in ways(case, folder).items():
        try:
            differs = difference(first, way(), tolerance)
        except (RunError, DivergenceError):
            continue  # other seeds may stop, or diverge
        except ConfigError as error:
            differs = None if "lockstep" in name else f"refused: {error}"  # or be refused
        except Exception as error:
            differs = f"{type(error).__name__}: {str(error)[:120]}"
        problems += [f"{name}: {differs}"] if differs else []
    of_seed = {name: value[1:] if name == "model" else value[1 :: len(SEEDS)] for name, value in first.items()}
    with contextlib.suppress(ConfigError, RunError, DivergenceError):  # it may be refused for one seed
        alone = numbers(simulation(case.load(folder).make(), (SEEDS[1],)).run(tracking=QUIET))
        if differs := difference(of_seed, alone, 1e-8):
            problems.append(f"seed {SEEDS[1]} alone: {differs}")
    module = case.load(folder)
    if case.kind in ("shift", "local", "contamination", "schedule") and not hasattr(module, "no_naive"):
        if differs := difference(first, by_hand(case, run, folder), 1e-8, ("model",)):
            problems.append(f"by hand: {differs}")
    elif hasattr(module, "plain"):
        plain = numbers(simulation(module.plain()).run(tracking=QUIET))
        if differs := difference(first, plain, 1e-8, ("model",)):
            problems.append(f"the part of fedsim: {differs}")
    return ("WRONG", "; ".join(problems)) if problems else ("right", "")


def folded(module: ModuleType, jobs: list[tuple[int, float]]) -> list[Any]:
    """What comes of jobs of a seed and a learning rate each that are folded into one federation. As in
    hydra/launcher=lockstep, one process builds all objects, those of the federation after those of the jobs."""
    waiting = [FoldJob(foldable_run_steps(simulation(module.make(), (seed,), lr))) for seed, lr in jobs]
    for job in waiting:
        job.start()
    if waiting[0].waiting_run is not None and waiting[0].waiting_run.unfoldable_reason() is None:
        seeds, rates = zip(*jobs, strict=True)
        shared = rates[0] if len(set(rates)) == 1 else list(rates)
        for _, error in LockstepRunner[None]()(
            [FoldedJobs(waiting, lambda: simulation(module.make(), seeds, shared)).generate_round_tasks]
        ):
            assert error is None, error
    else:
        for job in waiting:
            job.resume(False)
    for job in waiting:
        if not job.has_ended:
            try:
                job.record_outcome(run_to_completion(job.steps))
            except Exception as error:
                job.record_outcome(error)
    return [job.outcome for job in waiting]


def fold_verdict(case: Case, folder: Path) -> tuple[str, str]:
    """A part in jobs of one seed, each alone in a new process and folded with others: of other seeds, and of the same
    seed with another learning rate."""
    problems, said = [], io.StringIO()
    handler = logging.StreamHandler(said)
    for name, jobs in (("seeds", [(0, 0.1), (5, 0.1)]), ("rates", [(0, 0.1), (0, 0.3)])):
        if name == "rates" and "local" in case.load(folder).make():
            continue  # which has the rate that it was written with
        seed_all(0)
        with at_information(handler):
            outcomes = folded(case.load(folder), jobs)
        for number, outcome in enumerate(outcomes):
            seed, lr = jobs[number]
            try:
                alone = numbers(simulation(case.load(folder).make(), (seed,), lr).run(tracking=QUIET))
            except (ConfigError, RunError, DivergenceError) as error:
                if number == 0 and isinstance(error, ConfigError):
                    raise
                continue
            if isinstance(outcome, (ConfigError, RunError)):
                continue
            differs = repr(outcome) if isinstance(outcome, Exception) else difference(alone, numbers(outcome), 1e-8)
            problems += [f"{name}, job {number}: {differs}"] if differs else []
    if problems and "two objects made of the same settings differ" in said.getvalue():
        return "told", said.getvalue()  # not folded; the numbers are those of a class that counts its objects
    return ("WRONG", "; ".join(problems)) if problems else ("right", "")


@contextlib.contextmanager
def at_information(handler: logging.Handler) -> Iterator[None]:
    """Within the block what folds log goes to the handler."""
    logger = logging.getLogger("fedsim.run.fold")
    before, disabled = logger.level, logging.root.manager.disable
    logger.setLevel(logging.INFO), logger.addHandler(handler), logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        logger.setLevel(before), logger.removeHandler(handler), logging.disable(disabled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="how many, drawn; all of them unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="regular expression")
    parser.add_argument("--folded", action="store_true", help="jobs that are folded, in place of the other ways")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    chosen = cases() if given.count is None else sample(given.count, given.seed)
    words: Counter[str] = Counter()
    for case in chosen:
        if re.search(given.only, case.label):
            word, message = verdict(case, fold_verdict if given.folded else None)
            word = "FALSE REFUSAL" if case.harmless and word != "right" and word in GOOD else word
            words[word] += 1
            print(f"{word:13} {case.label:70} {message[:300]}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in words.most_common()))


if __name__ == "__main__":
    main()
