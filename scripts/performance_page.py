"""Write the figures of docs/figures/*.json into docs/performance.md and README.md.

python scripts/performance_page.py

`scripts/benches.py` measures them. In docs/performance.md a table stands between `<!--figures NAME-->` and
`<!--/figures-->`; in README.md rows of a table are found by their first cell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES, PAGE, README = ROOT / "docs" / "figures", ROOT / "docs" / "performance.md", ROOT / "README.md"
BLOCK = re.compile(r"(<!--figures (\w+)-->\n).*?(<!--/figures-->)", re.S)
Record = Mapping[str, Any]  # one file

EXECUTORS = ("auto", "fused", "grouped", "vmap", "loop")
MODELS = {
    "linear": "logistic, MNIST",
    "mlp": "MLP 2×200",
    "mlp_ln": "MLP with LayerNorm",
    "mlp_bn": "MLP with BatchNorm",
    "cnn_8": "CNN of 8 and 16 channels, MNIST",
    "cnn_16": "CNN of 16 and 32 channels, MNIST",
    "cnn_16_gn": "the same with GroupNorm",
    "leaf_cnn": "LEAF's CNN, 6.6 million parameters",
    "cifar10_cnn": "CIFAR-10 CNN",
    "cnn_gn": "CNN with GroupNorm",
    "cnn_bn": "CNN with BatchNorm",
    "resnet18_gn": "ResNet-18 with GroupNorm",
    "vit": "vision transformer",
    "char_lstm": "character LSTM, 40 tokens",
    "transformer": "transformer, 40 tokens",
}
PRODUCTS = {
    "b": "(b) logistic, batch 20",
    "c": "(c) MLP 2×200, batch 20",
    "d": "(d) SVHN CNN, batch 128",
    "p-cnn": "CNN of pfl-research's benchmark, batch 10",
}
PEERS = {
    "fedsim": "fedsim",
    "pfl2": "pfl {pfl}, 2 processes",
    "pfl": "pfl {pfl}",
    "fedjax": "FedJAX {fedjax}",
    "fedlab": "FedLab {fedlab}",
    "flwr": "Flower {flwr}, 2 Ray workers",
    "loop": "a plain loop over one module",
    "vmap": "only `torch.func.vmap`, without sampling",
}
EVENTS = {
    "cnn-fedasync": "MNIST CNN, `fedasync`",
    "cnn-fedbuff": "MNIST CNN, `fedbuff`, buffer of 10",
    "logistic-fedasync": "logistic, MNIST, `fedasync`",
    "logistic-fedbuff": "logistic, MNIST, `fedbuff`, buffer of 10",
}
SWEEPS = {"means": "Gaussian means", "logistic": "logistic regression, digits", "mlp": "MLP of 64 units, digits"}
WAYS = {
    "one by one": "one job after another",
    "joblib": "joblib, two processes",
    "lockstep": "`hydra/launcher=lockstep`",
    "lists": "one run with lists of rates",
}


def main() -> None:
    """Write both."""
    records = read()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), records), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), records), encoding="utf-8")


def read(folder: Path = FIGURES) -> dict[str, Record]:
    """Name → file."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def page(text: str, records: Mapping[str, Record]) -> str:
    """docs/performance.md with the figures of these files."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        record = records["rounds" if name == "population" else name]
        return "\n".join([match[1].rstrip(), "", *BLOCKS[name](record), "", provenance(name, record), "", match[3]])

    return BLOCK.sub(block, text)


def provenance(name: str, record: Record) -> str:
    """When and where the figures were measured, and by which code."""
    made, file = record["made"], "rounds" if name == "population" else name
    source = f"[figures/{file}.json](figures/{file}.json)"
    if "copied_from" in made:
        rows = [row for row in record["rows"] if name != "population" or row["workload"] == "f"]
        origins = {(row.get("date", made["date"]), row.get("commit", made["commit"])[:7]) for row in rows}
        dated = " and ".join(f"{date} (commit {commit})" for date, commit in sorted(origins))
        return f"*Recorded on {dated} on {made['machine']['cores']} cores, and not measured again since:\n{source}.*"
    machine, commit = made["machine"], made["commit"] or "unknown"
    return (
        f"*Measured on {made['date']} at commit {commit[:7]}{' with changes' * commit.endswith('+')} on "
        f"{machine['gpu'] or machine['processor'] or machine['platform']}, {machine['cores']} cores, torch "
        f"{made['versions']['torch']}: {source}.*"
    )


def digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def speed(value: float | None) -> str:
    """A ratio of times."""
    return "–" if value is None else f"{digits(value)}×"


def rounds_table(record: Record) -> list[str]:
    lines = ["| workload | speed-up over `common` | speed-up over `limit` |", "|---|---|---|"]
    for row in record["rows"]:
        common = speed(row["vs_common"])
        if "vs_seeds_one_after_another" in row:
            common += f", and {speed(row['vs_seeds_one_after_another'])} with one seed after another"
        if "more_seconds" in row:
            common = f"{more(row)} than the 1,000 alone, {row['peak_gib']:.1f} GiB in all"
        lines.append(f"| {row['what']} | {common} | {speed(row['vs_limit'])} |")
    return lines


def more(row: Record) -> str:
    """How much longer a round of a large population takes."""
    return f"{row['more_seconds'] * 1000:.0f} ms more"


def population_sentence(record: Record) -> list[str]:
    (row,) = (row for row in record["rows"] if row["workload"] == "f")
    return [
        "With one million clients of 8 samples each, of which 1,000 participate in a round, a run uses "
        f"{row['peak_gib']:.1f} GiB in",
        f"all; a round takes {more(row)} than that of the same 1,000 alone (`python scripts/bench.py --only f`).",
    ]


def executors_table(record: Record) -> list[str]:
    measured = [name for name in EXECUTORS if any(name in row["speed"] for row in record["rows"])]
    lines = [f"| | {' | '.join(f'`{name}`' for name in measured)} | `auto` chose |", "|---" * (len(measured) + 2) + "|"]
    for row in record["rows"]:
        speeds = [f"{row['speed'][name]:.2f}" if name in row["speed"] else "–" for name in measured]
        lines.append(f"| {MODELS[row['model']]} | {' | '.join(speeds)} | {row['chosen']} |")
    return lines


def peak_table(record: Record) -> list[str]:
    lines = [
        "| | fedsim's round | one raw model (`limit`) | `products` | `peak` | "
        "time of `products` as a share of fedsim's round |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        rates = " | ".join(f"{row['gflops'][name]:.0f}" for name in ("fedsim", "limit", "products", "peak"))
        lines.append(f"| {PRODUCTS[row['workload']]} | {rates} | {row['products_share_of_a_round'] * 100:.0f} % |")
    return lines


def peers(record: Record, workload: str) -> dict[str, Record]:
    """Contender → its row."""
    return {row["peer"]: row for row in record["rows"] if row["workload"] == workload}


def peers_table(record: Record) -> list[str]:
    mlp, cnn = peers(record, "p-mlp"), peers(record, "p-cnn")
    lines = ["| | MLP | speed-up of fedsim | CNN | speed-up of fedsim |", "|---|---|---|---|---|"]
    for peer, label in PEERS.items():
        rows = [mlp.get(peer, {}), cnn.get(peer, {})]
        versions = {name: number for row in rows for name, number in row.get("versions", {}).items()}
        cells = [label.format(**versions) if any(versions) else label.partition(" {")[0]]
        for row in rows:
            cells += [digits(row["seconds"]) if "seconds" in row else row.get("error", "–")]
            cells += [speed(row["fedsim_faster"]) if "fedsim_faster" in row else ""]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def sweeps_table(record: Record) -> list[str]:
    lines = [
        "| | | startup | total | memory | speed-up | speed-up without startup |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        for way, label in WAYS.items():
            of, first = row["ways"][way], way == "one by one"
            ratios = [digits(of["as_fast"]), digits(of["as_fast_without_start"])]
            memory = f"{of['gib']:.2f} GiB" + " each" * (way == "joblib")
            cells = [SWEEPS[row["workload"]] if first else "", label, f"{of['start']:.1f} s", f"{of['clock']:.1f} s"]
            cells += [memory, *(["1", "1"] if first else [f"{ratio}×" for ratio in ratios])]
            lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def memory_table(record: Record) -> list[str]:
    lines = ["| clients × model | size of the personal models | `device` | `disk` |", "|---|---|---|---|"]
    cases: dict[str, dict[str, Record]] = {}
    for row in record["rows"]:
        cases.setdefault(row["case"], {})[row["memory"]] = row
    for case, places in cases.items():
        row, used = places["device"], [f"{places[place]['process_mb']:,.0f} MB" for place in ("device", "disk")]
        lines.append(f"| {row['clients']:,} × {case} | {row['models_mb']:,.0f} MB | {' | '.join(used)} |")
    return lines


def events_table(record: Record) -> list[str]:
    lines = [
        "| | fedsim, updates per second | `usual` | `lean` | speed-up over `usual` | speed-up over `lean` |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        if row["workload"] in EVENTS:
            rates = [digits(row["updates_per_second"][name]) for name in ("fedsim", "usual", "lean")]
            ratios = [speed(row["ratio"][name]) for name in ("usual", "lean")]
            lines.append(f"| {EVENTS[row['workload']]} | {' | '.join(rates + ratios)} |")
    for row in record["rows"]:
        if "cost_ratio" in row:
            (large, fast), (small, slow) = row["updates_per_second"].items()
            lines += [
                "",
                f"With {row['in_flight']:,} clients in flight of a population of {large}, logistic regression and "
                f"`fedbuff` with a",
                f"buffer of 100, an update costs {speed(row['cost_ratio'])} as much as in a population of {small} "
                f"({digits(fast)} and {digits(slow)} updates",
                "per second).",
            ]
    return lines


def plan_table(record: Record) -> list[str]:
    """The planned runs, and how far the plans are off."""
    lines = ["| run | rounds measured | planned | took | ratio | memory | bytes |", "|---|--:|--:|--:|--:|--:|--:|"]
    for row in record["rows"]:
        cells = [f"{row['measured_rounds']:,} of {row['rounds']:,}"]
        cells += [f"{row['seconds'][name]:.0f} s" for name in ("planned", "run")]
        cells += [f"{row[name]['ratio']:.2f}" for name in ("seconds", "memory_gib", "bytes")]
        lines.append(f"| {row['composition']} | {' | '.join(cells)} |")
    counts = []
    for name, noun in (("seconds", "time"), ("memory_gib", "memory"), ("bytes", "bytes")):
        num_close = sum(0.75 <= row[name]["ratio"] <= 1.25 for row in record["rows"])
        counts.append(f"{noun} of {num_close}")
    return [*lines, "", f"Of {len(record['rows'])} runs, the plan is within 25 % for the {', the '.join(counts)}."]


GROWING = {
    "clients": "active clients",
    "population": "clients in all, 100 active",
    "parameters": "parameters",
    "seeds": "seeds",
    "jobs": "runs in lockstep",
    "ranks": "processes",
}


def growth_table(record: Record) -> list[str]:
    """Per axis: seconds and memory from the smallest to the largest size, overhead, cost of a unit, bend and slope."""
    lines = ["| what grows | from, to | a round | peak memory | overhead | per unit | bend | slope (expected) |"]
    lines.append("|---|---|---|---|--:|--:|--:|--:|")
    for row in record["rows"]:
        first, last = row["points"][0], row["points"][-1]
        cells = [GROWING[row["axis"]], f"{first['size']:,}, {last['size']:,}"]
        cells.append(" to ".join(f"{digits(1000 * point['seconds'])} ms" for point in (first, last)))
        memory = " to ".join(f"{point['peak_gib']:.2f} GiB" for point in (first, last))
        cells.append(
            "–" if row["axis"] == "ranks" else memory
        )  # there it is that of the process that starts the others
        grows = row["expected"] > 0
        cells.append(f"{digits(1000 * row['overhead_seconds'])} ms" if grows else "–")
        cells.append(f"{digits(1e6 * row['unit_seconds'])} µs" if grows else "–")
        cells.append("–" if row["bend"] is None else digits(row["bend"]))
        cells.append(f"{row['slope']:.2f} ({row['expected']:g})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def gpu_graph_table(record: Record) -> list[str]:
    """Seconds of a round of captured steps, and how they compare with the loops of `bench.py`."""
    lines = ["| workload | a round | speed-up over `common` | speed-up over `limit` |", "|---|--:|--:|--:|"]
    for row in record["rows"]:
        cells = [f"{row['seconds'] * 1000:.1f} ms", speed(row["vs_common"]), speed(row["vs_limit"])]
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return lines


def gpu_precision_table(record: Record) -> list[str]:
    """Seconds of a round in each precision, and how they compare with the other loops in the same precision."""
    lines = ["| workload | precision | a round | faster than in float32 | speed-up over `common` | over `limit` |"]
    lines.append("|---|---|--:|--:|--:|--:|")
    for row in record["rows"]:
        for precision in row["times_common"]:
            gain = row["gain"][precision]["fedsim"] if precision in row["gain"] else None
            cells = [row["what"], precision, f"{row['seconds'][f'fedsim {precision}'] * 1000:.0f} ms", speed(gain)]
            cells += [speed(row[name][precision]) for name in ("times_common", "times_the_limit")]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


BLOCKS: dict[str, Callable[[Record], list[str]]] = {
    "gpu_graph": gpu_graph_table,
    "gpu_precision": gpu_precision_table,
    "rounds": rounds_table,
    "population": population_sentence,
    "executors": executors_table,
    "grouped": executors_table,
    "peak": peak_table,
    "peers": peers_table,
    "sweeps": sweeps_table,
    "memory": memory_table,
    "events": events_table,
    "plan": plan_table,
    "growth": growth_table,
}


def readme(text: str, records: Mapping[str, Record]) -> str:
    """README.md with the figures of these files."""
    for question, cells in readme_rows(records).items():
        text, count = re.subn(
            rf"^\| {re.escape(question)} \|.*$", f"| {question} | {' | '.join(cells)} |", text, flags=re.M
        )
        if count != 1:
            raise ValueError(f"README.md has {count} rows that begin with: {question}")
    return text


def readme_rows(records: Mapping[str, Record]) -> dict[str, list[str]]:
    """First cell → the other cells of the rows that say what was measured."""
    mlp, cnn = (peers(records["peers"], workload) for workload in ("p-mlp", "p-cnn"))
    (million,) = (row for row in records["rounds"]["rows"] if row["workload"] == "f")
    ways = next(row["ways"] for row in records["sweeps"]["rows"] if row["workload"] == "means")
    pfl = {name: min(rows["pfl"]["seconds"], rows["pfl2"]["seconds"]) for name, rows in (("mlp", mlp), ("cnn", cnn))}
    best = min(cnn[peer]["fedsim_faster"] for peer in ("pfl", "pfl2", "fedjax", "fedlab"))
    return {
        "Are many small models fast?": [
            f"{digits(mlp['fedsim']['seconds'] * 1000)} ms per round, 50 of 1,000 clients, MLP",
            f"pfl-research {digits(pfl['mlp'] * 1000)}, FedJAX {digits(mlp['fedjax']['seconds'] * 1000)}, "
            f"FedLab {digits(mlp['fedlab']['seconds'] * 1000)}, Flower {digits(mlp['flwr']['seconds'] * 1000)} ms",
            "[performance](docs/performance.md#comparison-with-other-simulators): `scripts/bench_peers/run.py`",
        ],
        "And convolutions?": [
            f"{digits(cnn['fedsim']['seconds'])} s per round, speed-up {speed(best)}",
            f"pfl-research {digits(pfl['cnn'])}, FedLab {digits(cnn['fedlab']['seconds'])}, "
            f"FedJAX {digits(cnn['fedjax']['seconds'])} s",
            "[the same](docs/performance.md#comparison-with-other-simulators)",
        ],
        "A sweep of 12 rates, 3 seeds?": [
            f"{ways['lists']['clock']:.1f} s as a single run",
            f"{ways['one by one']['clock']:.1f} s one after another, {ways['joblib']['clock']:.1f} s with joblib",
            "[grids](docs/performance.md#a-grid-of-rates): `scripts/bench_sweeps.py`",
        ],
        "A million clients, 1,000 active?": [
            f"{more(million)} per round, {million['peak_gib']:.1f} GiB",
            "1,000 clients",
            "[populations](docs/performance.md#large-populations): `scripts/bench.py --only f`",
        ],
    }


if __name__ == "__main__":
    main()
