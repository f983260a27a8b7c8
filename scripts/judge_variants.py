"""How often `fedsim judge` errs: 40 null variants of FedAvg and 10 with a mechanism, written here, judged one by one.

Null variants compute FedAvg, up to names, a factor of the server's step, noise on the initial model, or terms without
effect. The others treat absent clients differently (memory, weights by participation). All are judged beside FedAvg in
a setting where availability is correlated with the labels, in an order that mixes both kinds, with one ledger for all.
Started again with the same --out, the script goes on behind the last variant that was judged.

usage: python scripts/judge_variants.py [--out judge_variants] [--rounds 60] [--most 50] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import bench_record
import torch

from fedsim.core.files import nan_to_none
from fedsim.studies.judgement.judge import Contest, judge
from fedsim.studies.judgement.verdict import MECHANISM_VERDICT

HEAD = '''"""{about}"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedsim.core import rng
from fedsim.strategies import State, Strategy


'''
PLAIN = """class {name}(Strategy):
    def __init__(self{parameters}):
{body}

    def aggregate(self, state, report, t):
{steps}
"""
STORED = ("name", "real", "verdict", "verdicts", "try", "seconds", "intervals", "chosen")
FACTORS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.5, 2.0, 3.0, 5.0, 10.0)
RENAMED = (
    "return replace(state, model=state.model - {eta}report.cohort.mean(report.innovation))",
    "step = report.cohort.mean(report.innovation)\nreturn replace(state, model=state.model - {eta}step)",
    "sent = report.cohort.mean(report.end)\nstay = report.cohort.mean(report.start)\n"
    "return replace(state, model=state.model + {eta}(sent - stay))",
    "pull = -report.innovation\nreturn replace(state, model=state.model + {eta}report.cohort.mean(pull))",
    "half = report.cohort.mean(0.5 * report.innovation)\nreturn replace(state, model=state.model - {eta}(half + half))",
    "step = report.cohort.mean(report.innovation.flip(1)).flip(1)\n"
    "return replace(state, model=state.model - {eta}step)",
    "weights = torch.full_like(report.innovation[:, 0], 7.0)\n"
    "step = report.cohort.mean(report.innovation, weights)\nreturn replace(state, model=state.model - {eta}step)",
    "ones = torch.ones_like(report.innovation)\ncount = report.cohort.sum(ones).clamp(min=1)\n"
    "step = report.cohort.sum(report.innovation) / count\nreturn replace(state, model=state.model - {eta}step)",
    "middle = report.innovation.shape[1] // 2\n"
    "blocks = [report.cohort.mean(block) for block in (report.innovation[:, :middle], report.innovation[:, middle:])]\n"
    "return replace(state, model=state.model - {eta}torch.cat(blocks, 1))",
    "more, less = report.cohort.mean(3 * report.innovation), report.cohort.mean(2 * report.innovation)\n"
    "return replace(state, model=state.model - {eta}(more - less))",
)
WITHOUT_EFFECT = (
    "model = state.model - {eta}step\nreturn replace(state, model=model + 0.0 * step.square())",
    "length = step.norm(dim=1, keepdim=True).clamp(min=1e-12)\n"
    "return replace(state, model=state.model - {eta}(step / length) * length)",
    "step = step.clamp(-1e6, 1e6)\nreturn replace(state, model=state.model - {eta}step)",
    "centre = state.model.mean(dim=1, keepdim=True)\n"
    "return replace(state, model=(state.model - centre - {eta}step) + centre)",
    "momentum = 0.0 * step\nreturn replace(state, model=state.model - {eta}(momentum + step))",
    "length = step.norm(dim=1, keepdim=True).clamp(min=1e-12)\n"
    "return replace(state, model=state.model - {eta}(1e6 / length).clamp(max=1.0) * step)",
    "return replace(state, model=state.model - {eta}torch.nan_to_num(step, nan=0.0))",
    "wave = torch.sin(torch.arange(step.shape[1], dtype=step.dtype, device=step.device))\n"
    "return replace(state, model=(state.model + wave) - {eta}step - wave)",
    "decay = 0.0\nreturn replace(state, model=(1 - decay) * state.model - {eta}(step + decay * state.model))",
    "order = step[0].argsort()\nstep = step[:, order][:, order.argsort()]\n"
    "return replace(state, model=state.model - {eta}step)",
)
MEMORY = """@dataclass
class Remembered(State):
    memory: torch.Tensor
    seen: torch.Tensor
    average: torch.Tensor


class {name}(Strategy):
    def __init__(self, server_lr=1.0):
        self.server_lr = server_lr

    def initial(self, model, federation):
        seen = torch.zeros(federation.num_memory_rows, dtype=model.dtype, device=model.device)
        return Remembered(model, federation.zeros(model.shape[1], dtype=model.dtype), seen, torch.zeros_like(model))

    def aggregate(self, state, report, t):
        cohort, federation = report.cohort, report.cohort.federation
        old = cohort.gather(state.memory)
{steps}
        return replace(state, model=state.model - self.server_lr * step, average=average)
"""
STORE = "cohort.scatter(state.memory, report.innovation)\\nstate.seen[cohort.rows] += 1\\naverage = state.average\\n"
SHARE = "share = federation.mean_over_clients((state.seen > 0).to(step.dtype))[:, None].clamp(min=1e-6)\\n"
FREQUENCY = (
    "state.seen[cohort.rows] += 1\\naverage = state.average\\nfrequency = ((state.seen[cohort.rows] + 1) / (t + 2))\\n"
)
MECHANISMS = {
    "Memory": STORE + "step = federation.mean_over_clients(state.memory)",
    "MemoryOfSeen": STORE + "step = federation.mean_over_clients(state.memory)\\n" + SHARE + "step = step / share",
    "VarianceReduced": "fresh = cohort.mean(report.innovation - old)\\n"
    "step = fresh + federation.mean_over_clients(state.memory)\\n" + STORE,
    "Frequency": FREQUENCY + "step = cohort.sum(report.innovation, 1 / (federation.clients * frequency))",
    "FrequencyNormalised": FREQUENCY + "step = cohort.mean(report.innovation, 1 / frequency)",
    "Probability": "average = state.average\\n"
    "step = cohort.sum(report.innovation, 1 / (federation.clients * cohort.probability))",
    "ProbabilityNormalised": "average = state.average\\nstep = cohort.mean(report.innovation, 1 / cohort.probability)",
    "SlowMemory": "mixed = torch.where("
    "state.seen[cohort.rows, None] > 0, 0.5 * old + 0.5 * report.innovation, report.innovation)\\n"
    "cohort.scatter(state.memory, mixed)\\nstate.seen[cohort.rows] += 1\\naverage = state.average\\n"
    "step = federation.mean_over_clients(state.memory)",
    "MemoryWithMomentum": STORE
    + "average = 0.5 * state.average + 0.5 * federation.mean_over_clients(state.memory)\\nstep = average",
    "HalfMemory": STORE
    + "step = 0.7 * federation.mean_over_clients(state.memory) + 0.3 * cohort.mean(report.innovation)",
}


def indented(text: str) -> str:
    """Lines of a method's body."""
    return "\n".join(f"        {line}" for line in text.replace("\\n", "\n").strip().splitlines())


def plain(name: str, about: str, steps: str, with_rate: bool, more: str = "") -> str:
    """A module with a variant that has no memory."""
    parameters, body, eta = ("", "pass", "")
    if with_rate:
        parameters, body, eta = ", server_lr=1.0", "self.server_lr = server_lr", "self.server_lr * "
    text = PLAIN.format(
        name=name, parameters=parameters, body=indented(body), steps=indented(steps.replace("{eta}", eta))
    )
    return HEAD.format(about=about) + text + more


def variants() -> list[tuple[str, bool, str]]:
    """Class name, whether it has a mechanism, and source of all variants, both kinds mixed."""
    null = []
    for number in range(10):
        rate = number % 2 == 0
        null.append((f"Renamed{number}", plain(f"Renamed{number}", "FedAvg.", RENAMED[number], rate)))
        scaled = f"step = {FACTORS[number]} * report.cohort.mean(report.innovation)\n"
        scaled += "return replace(state, model=state.model - {eta}step)"
        null.append((f"Rescaled{number}", plain(
            f"Rescaled{number}", "FedAvg with a factor.", scaled, rate
        )))  # fmt: skip
        noise = f"""
    def initial(self, model, federation):
        seeds = torch.as_tensor(federation.seeds, device=model.device)
        keys = rng.row_keys(seeds, rng.Purpose.STRATEGY, torch.full_like(seeds, {number}), 0)
        return State(model + 0.01 * rng.normal(keys[:, None], torch.arange(model.shape[1])).to(model.dtype))
"""
        null.append(
            (f"Reseeded{number}", plain(f"Reseeded{number}", "FedAvg from elsewhere.", RENAMED[0], rate, noise))
        )
        ineffective = "step = report.cohort.mean(report.innovation)\n" + WITHOUT_EFFECT[number]
        null.append((f"Ineffective{number}", plain(f"Ineffective{number}", "FedAvg and terms.", ineffective, rate)))
    real = [
        (name, HEAD.format(about="Not FedAvg.") + MEMORY.format(name=name, steps=indented(steps)))
        for name, steps in MECHANISMS.items()
    ]
    mixed: list[tuple[str, bool, str]] = []
    for number, (name, source) in enumerate(real):
        mixed += [(name, True, source), *((n, False, s) for n, s in null[4 * number : 4 * number + 4])]
    return mixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("judge_variants"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--most", type=int, default=50, help="variants, of those that are not judged yet")
    parser.add_argument("--only", help="classes, separated by commas")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fedsim").setLevel(logging.ERROR)
    package = options.out / "judged_variants"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text('"""Variants of FedAvg."""\n')
    sys.path.insert(0, str(options.out.resolve()))
    rows: list[dict[str, Any]] = []
    written = options.only.split(",") if options.only else None
    for name, real, source in variants():
        if written is not None and name not in written:
            continue
        module, result = package / f"{name.lower()}.py", options.out / f"{name}.json"
        if not module.exists() or module.read_text() != source:
            module.write_text(source)
        if not result.exists():
            if not options.most:
                continue
            options.most -= 1
            begin = time.monotonic()
            path = f"judged_variants.{name.lower()}.{name}"
            judgement = judge(path, ("fedavg",), Contest(rounds=options.rounds), options.out / "judge")
            seconds = time.monotonic() - begin
            content = {"name": name, "real": real, "seconds": seconds} | judgement.as_json()
            result.write_text(json.dumps(nan_to_none(content), indent=1))
            print(f"{name} ({'real' if real else 'null'}, {seconds:.0f} s): {judgement.sentence}", flush=True)
        content = json.loads(result.read_text())
        rows.append({key: content[key] for key in STORED})
    null, reals = ([row for row in rows if row["real"] == kind] for kind in (False, True))
    summary = {
        "null": len(null), "false_positives": sum(row["verdict"] == MECHANISM_VERDICT for row in null),
        "real": len(reals), "found": sum(row["verdict"] == MECHANISM_VERDICT for row in reals),
        "found_on": {
            kind.name: sum(row["verdicts"][kind.name] == MECHANISM_VERDICT for row in reals)
            for kind in Contest().environments
        },
        "most_seconds": max((row["seconds"] for row in rows), default=0.0),
    }  # fmt: skip
    print(summary)
    bench_record.save(options.json, [{"summary": summary, "variants": rows}], rounds=options.rounds)


if __name__ == "__main__":
    main()
