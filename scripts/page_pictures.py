"""Draw the pictures of the pages: badges, and those of the pages that explain (docs/assets).

python scripts/page_pictures.py [--out docs/assets]

The curves of the performative points and the law of the bias are formulas; the dots are runs of fedsim, seconds each.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from fedsim import EvaluationOptions, Simulation, Tracking
from fedsim.app.commands.algorithms import algorithms
from fedsim.availability import Availability, Bernoulli, Full, Groups
from fedsim.data.datasets import GaussianMean
from fedsim.data.drift import Linear
from fedsim.data.partition import Natural
from fedsim.local import PFL, SGD, PoFL
from fedsim.models import Mean
from fedsim.shift import Location
from fedsim.strategies import MIFA, FedAU, FedAvg, Strategy

ROOT = Path(__file__).parents[1]
DARK, TEAL, RED, GOLD, GREY = "#263238", "#00897b", "#c62828", "#ef8f00", "#90a4ae"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

# Two clients whose data react unequally: z ~ N(m_i + ε_i θ, 1), loss ½ (θ − z)².
CENTRES, SENSITIVITIES = (3.0, 1.0), (0.7, 0.1)
# Two groups of clients for the bias: half have their optimum at 0, half at 1.
RARE = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
RATE = 0.1  # of local steps on data that drift


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "assets", help="folder of the pictures")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, (label, value, colour) in badges().items():
        (folder / f"badge_{name}.svg").write_text(badge(label, value, colour), encoding="utf-8")
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.png", dpi=130, facecolor="white", metadata={"Software": None})


def badges() -> dict[str, tuple[str, str, str]]:
    """Name → label, value, colour; what they say stands in pyproject.toml and in the catalogue of algorithms."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r'^ *"Programming Language :: Python :: (3\.\d+)"', project, re.M)
    bound, licence = re.search(r'^ *"torch>=([\d.]+)', project, re.M), re.search(r'^license = "(.+)"', project, re.M)
    assert bound is not None
    assert licence is not None
    return {
        "python": ("python", f"{versions[0]} – {versions[-1]}", "#3776ab"),
        "pytorch": ("pytorch", f"≥ {bound[1]}", "#c8442a"),
        "license": ("license", licence[1], "#546e7a"),
        "algorithms": ("algorithms", str(len(algorithms())), TEAL),
    }


def badge(label: str, value: str, colour: str) -> str:
    """A small picture with a label and its value."""
    left, right = (round(7.2 * len(text) + 12) for text in (label, value))
    text = '<text y="14" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" fill="#fff"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {value}"><title>{label}: {value}</title>'
        f'<rect width="{left + right}" height="20" rx="3" fill="{colour}"/>'
        f'<path d="M3 0h{left - 3}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#444"/>'
        f'{text} x="{left / 2}">{label}</text>{text} x="{left + right / 2}">{value}</text></svg>\n'
    )


def matrix() -> Figure:
    """A round: rows are gathered, trained together, and reduced to the next model."""
    figure = Figure((8.6, 3.7), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 18), ylim=(-1.5, 6.3), aspect="equal")
    axes.axis("off")
    draw = np.random.default_rng(3)
    present = [True, False, True, True, False, True]
    for row in range(6):
        shade = draw.uniform(0.15, 0.95, 6)
        _cells(axes, 0.5, 5 - row, shade if present[row] else shade * 0.25, TEAL if present[row] else GREY)
        axes.text(0.2, 5.3 - row, f"{row}", ha="right", va="center", color=DARK, fontsize=8)
    for place, row in enumerate(row for row in range(6) if present[row]):
        for x, tint in ((6.5, 0.45), (10.5, 0.8)):
            _cells(axes, x, 4 - place, draw.uniform(tint - 0.3, tint + 0.15, 6), TEAL if x < 10 else GOLD)
        _arrow(axes, (3.7, 5.3 - row), (6.3, 4.3 - place))
    _arrow(axes, (9.75, 2.8), (10.35, 2.8))
    _arrow(axes, (13.75, 2.8), (14.35, 2.8))
    _cells(axes, 14.5, 2.5, draw.uniform(0.4, 0.95, 6), RED)
    for x, text in (
        (2.1, "clients × parameters\n[m, d]; pale: absent"),
        (8.1, "start: the cohort's rows\n[n, d]"),
        (12.1, "end: after local steps,\none vmapped model"),
        (16.1, "next model: a sum\nover rows [d]"),
    ):
        axes.text(x, -0.25, text, ha="center", va="top", color=DARK, fontsize=9)
    return figure


def _cells(axes: Axes, x: float, y: float, shades: np.ndarray, colour: str) -> None:
    for number, shade in enumerate(shades):
        place = (x + 0.53 * number, y)
        axes.add_patch(Rectangle(place, 0.5, 0.62, facecolor=colour, alpha=float(np.clip(shade, 0.05, 1)), lw=0))


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=DARK, lw=0.8))


def stable_and_optimal() -> tuple[float, float]:
    """θ^PS and θ^PO of the two clients, in closed form."""
    m, gain = np.array(CENTRES), 1 - np.array(SENSITIVITIES)
    return float(m.sum() / gain.sum()), float((gain * m).sum() / (gain**2).sum())


def performative_risk(theta: np.ndarray, deployed: np.ndarray) -> np.ndarray:
    """Mean loss of θ on the data that react to another, deployed model."""
    centres = np.array(CENTRES)[:, None] + np.array(SENSITIVITIES)[:, None] * deployed
    return 0.5 * ((theta - centres) ** 2).mean(0) + 0.5


def performative_points() -> Figure:
    """Left: risks as formulas; right: two rules of fedsim on the same problem."""
    stable, optimal = stable_and_optimal()
    figure = Figure((8.6, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    theta = np.linspace(0.2, 5.0, 300)
    left.plot(
        theta, performative_risk(theta, theta), color=DARK, lw=2, label="performative risk of θ: its data react to it"
    )
    for deployed in (1.0, stable):
        risk = performative_risk(theta, np.full_like(theta, deployed))
        style = {"color": GREY, "ls": "--", "lw": 1.2}
        left.plot(
            theta, risk, **style, label="risk of θ on data that react\nto a fixed model" if deployed == 1 else None
        )
    for value, name, colour, at in ((stable, "θ^PS", RED, (12, -16)), (optimal, "θ^PO", TEAL, (-32, 18))):
        height = performative_risk(np.array([value]), np.array([value]))[0]
        left.plot(value, height, "o", color=colour, ms=8)
        left.annotate(_label(name), (value, height), at, textcoords="offset points", color=colour, fontsize=12)
    left.set(xlabel="θ", ylabel="loss", ylim=(0.9, 5.2))
    left.legend(frameon=False, fontsize=8, loc="upper center")
    for rule, name, colour in (
        (PFL(lr=0.1, steps=1, batch_size=5000), "local=pfl", RED),
        (PoFL(lr=0.1, steps=1, batch_size=5000, history=10), "local=pofl", TEAL),
    ):
        right.plot(*_trained(rule), color=colour, lw=1.8, label=name)
    for value, name, colour in ((stable, "θ^PS", RED), (optimal, "θ^PO", TEAL)):
        right.axhline(value, color=colour, lw=0.8, ls=":")
        right.text(122, value, _label(name), color=colour, va="center", fontsize=12)
    right.set(xlabel="round", ylabel="θ of the server", xlim=(0, 120))
    right.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def _label(name: str) -> str:
    return rf"$\theta^{{\mathrm{{{name[2:]}}}}}$"


def _trained(rule: SGD) -> tuple[list[int], list[float]]:
    """Rounds, and the server's θ there."""
    data = GaussianMean(clients=2, means=list(CENTRES))
    thetas: list[float] = []
    tracking = Tracking(
        progress="none", observers=[lambda seen: thetas.append(float(next(iter(seen.model(0).values()))))]
    )
    Simulation(
        data,
        Mean,
        clients=2,
        partition=Natural(),
        shift=Location(epsilons=list(SENSITIVITIES)),
        availability=Full(),
        local=rule,
        rounds=120,
        evaluation=EvaluationOptions(every=1),
    ).run(tracking=tracking)
    return list(range(len(thetas))), thetas


def participation_bias() -> Figure:
    """Where training ends as half of the clients participate less and less."""
    figure = Figure((7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    p = np.linspace(0.03, 1, 200)
    axes.plot(p, 1 / (1 + p), color=GREY, lw=1.2, label="minimiser of Σ p_i F_i")
    axes.axhline(0.5, color=DARK, lw=0.8, ls=":", label="optimum of the federation")
    strategies: tuple[tuple[str, Callable[[], Strategy], str, str], ...] = (
        ("fedavg", FedAvg, RED, "o"),
        ("fedau", FedAU, GOLD, "s"),
        ("mifa", MIFA, TEAL, "^"),
    )
    for name, made, colour, marker in strategies:
        ends = [_ended(made(), Bernoulli(Groups(p0=rare, p1=1.0))) for rare in RARE]
        means, spread = np.mean(ends, 1), np.std(ends, 1, ddof=1)
        axes.errorbar(RARE, means, spread, color=colour, fmt=marker, ms=6, capsize=2, lw=1, label=f"strategy={name}")
    axes.set(
        xlabel="participation probability of the clients whose optimum is 0 (the others: 1)",
        ylabel="θ of the server",
        ylim=(0.35, 1.05),
    )
    axes.legend(frameon=False, fontsize=9)
    return figure


def _ended(strategy: Strategy, availability: Availability) -> list[float]:
    """θ after 400 rounds, per seed."""
    data = GaussianMean(clients=20, means=[0.0] * 10 + [1.0] * 10, std=0.2)
    simulation = Simulation(
        data,
        Mean,
        clients=20,
        partition=Natural(),
        availability=availability,
        local=SGD(lr=0.01, steps=5, batch_size=20),
        strategy=strategy,
        rounds=400,
        seeds=[0, 1, 2],
        evaluation=EvaluationOptions(every=400),
    )
    return [float(value) for value in simulation.run(tracking=Tracking(progress="none")).state.model[:, 0]]


def lag(speed: float, epsilon: np.ndarray, steps: int) -> np.ndarray:
    """The tracking error at rest under a linear drift, v / ((1 − ε)(1 − ρ)), of clients whose data react to each of E
    local steps.
    """
    return speed / ((1 - epsilon) * (1 - (1 - RATE * (1 - epsilon)) ** steps))


def drift_and_reaction() -> Figure:
    """The tracking error by the strength of the reaction, as a formula and in runs."""
    figure = Figure((7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    epsilon, reactions = np.linspace(-1, 0.85, 200), (-1.0, -0.5, 0.0, 0.4, 0.8)
    for (steps, speed), colour in {(5, 0.05): TEAL, (1, 0.05): GOLD, (1, 0.2): RED}.items():
        axes.plot(epsilon, lag(speed, epsilon, steps), color=colour, lw=1.4)
        errors = [tracked(speed, reaction, steps) for reaction in reactions]
        axes.plot(reactions, errors, "o", color=colour, ms=6, label=f"v = {speed:g}, E = {steps}")
    axes.set(xlabel="sensitivity ε of the data to the model", ylabel="tracking error", yscale="log")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def tracked(speed: float, epsilon: float, steps: int) -> float:
    """The tracking error after 400 rounds."""
    simulation = Simulation(
        GaussianMean(clients=2, mean=1.0, variance=0.0, std=0.0),
        Mean,
        clients=2,
        partition=Natural(),
        shift=Location(epsilon),
        drift=Linear(speed),
        availability=Full(),
        local=SGD(lr=RATE, steps=steps, batch_size=1),
        rounds=400,
        evaluation=EvaluationOptions(every=400),
    )
    return float(simulation.run(tracking=Tracking(progress="none")).history[-1]["tracking_error"])


PICTURES: dict[str, Callable[[], Figure]] = {
    "matrix": matrix,
    "performative_points": performative_points,
    "participation_bias": participation_bias,
    "drift_and_reaction": drift_and_reaction,
}


if __name__ == "__main__":
    main()
