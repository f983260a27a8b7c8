"""The catalogue: the committed page is what classes and tests say now, and the command prints it."""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.app.commands import algorithms as catalogue
from fedsim.app.commands import run_subcommand
from fedsim.app.config import groups

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "algorithms_page.py"))
ONE = "4 d bytes down, 4 d bytes up"
KNOWN = {(one.group, one.name): one for one in catalogue.algorithms()}


def test_the_page_is_up_to_date_and_has_every_algorithm() -> None:
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert page == SCRIPT["page"](), "out of date: python scripts/algorithms_page.py writes it again"
    for group in catalogue.LISTED_GROUPS:
        for name in groups()[group]:
            assert name in catalogue.NON_ALGORITHMS or f"\n| [`{name}`](#{group}{name}) | " in page, f"{group}={name}"


SAID = {
    "strategy=fedavgm": ("Hsu et al. 2019", "velocity: a row of the server", ONE, "nothing"),
    "strategy=fedavg_known": ("Perazzone et al. 2022; fedawe §7", "nothing", ONE, "the true p_i^t are known"),
    "strategy=scaffold": (
        "Karimireddy et al., ICML 2020",
        "memory: a row of each client, mean: a row of the server",
        "8 d bytes down, 8 d bytes up",
        "local none of adam, fedala, momentum",
    ),
    "strategy=q_ffl": (
        "Li, Sanjabi, Beirami and Smith, ICLR 2020",
        "nothing",
        ONE,
        "clients answer for all their data",
    ),
    "local=pfedme": ("Dinh et al. 2020, Alg. 1", "personal: a row of each client", "nothing more", "nothing"),
    "local=fedbabu": ("Oh et al., ICLR 2022", "nothing", "nothing more", "columns that keep something"),
    "local=fedrod": ("Chen and Chao, ICLR 2022", "head: a part of a row of each client", "nothing more", "classes"),
    "columns=lg_fedavg": (
        "Liang et al., 2020",
        "own columns: a part of a row of each client",
        "4 bytes of every number that travels, down and up",
        "a model of several layers",
    ),
    "columns=fedbn": (
        "Li et al., ICLR 2021",
        "own columns: a part of a row of each client",
        "4 bytes of every number that travels, down and up",
        "a model with batch normalisation",
    ),
    "uplink=topk": (
        "Aji and Heafield 2017",
        "ef14: a row of each client",
        "80 bytes up where d = 1000",
        "clients that send (not local_only)",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_is_what_classes_say_and_do(name) -> None:
    one = KNOWN[tuple(name.split("="))]
    assert (one.paper, one.kept_tensors_text, one.traffic_text, one.assumptions_text) == SAID[name]
    assert KNOWN["strategy", "p_fedavg"].assumptions_text == "availability=full"


def test_tests_are_found_through_the_tables_they_go_through() -> None:
    found = list(SCRIPT["shown"](KNOWN["strategy", "fednova"]))
    assert any("with equal work proximal fednova is fedprox" in text for text in found)
    assert any("every round follows the formula" in text for text in SCRIPT["shown"](KNOWN["strategy", "feddc"]))


def test_the_command_lists_all_and_says_all_of_one(capsys) -> None:
    run_subcommand("algorithms", [])
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for _, name in KNOWN)
    run_subcommand("algorithms", ["strategy=fedavgm", "topk"])
    said = capsys.readouterr().out
    assert said.startswith(
        "strategy=fedavgm: FedAvg with momentum on the server\n\nv ← β v + mean_{i∈A} G_i, weighted by w_i;"
    )
    assert "\nuplink=topk: top-k: only the k largest coordinates of every row are sent\n\nSends the k numbers" in said
    assert "remembers  ef14: a row of each client\n" in said
    with pytest.raises(SystemExit, match=r"fedsim algorithms: NAME='fedavgn' is unknown.*did you mean 'fedavg'"):
        run_subcommand("algorithms", ["fedavgn"])


FORMULAS = (
    "follows_the_formula", "as_the_formula_says", "what_the_formula_says", "follows_the_rule", "follows_the_algorithm",
    "autograd", "by_hand",
)  # fmt: skip
BY_ANOTHER_NAME = {  # classes whose formula a test plays again under a name of its own
    "Adam": "test_an_optimiser_is_torchs_own",
    "Clip": "test_rows_are_no_longer_than_the_norm",
    "DFO": "test_every_client_walks_by_the_losses_it_hears",
    "FedRep": "test_fedrep_trains_the_head_first_and_fedbabu_never",
    "GaussianNoise": "test_noise_is_that_of_each_client_and_round",
    "LabelFlip": "test_who_flips_labels_trains_on_the_others",
    "LocalOnly": "test_local_only_is_every_client_for_itself",
    "Mimic": "test_mimic_copies_who_stands_out_as_a_plain_loop_has_it",
    "Momentum": "test_an_optimiser_is_torchs_own",
    "PFL": "test_without_a_projection_pfl_is_sgd_and_with_one_it_stays_inside",
    "RRM": "test_clients_descend_on_the_draw_of_the_last_deployment",
    "RobustServer": "test_every_round_is_the_servers_step_along_the_rules_aggregate",
    "TreeNoise": "test_a_rounds_rows_share_what_the_tree_adds_in_it",
}


def formula_tests(name: str) -> list[str]:
    """Tests that play the formula of a class again."""
    return [test for test, _ in formula_files(name)]


def formula_files(name: str) -> list[tuple[str, Path]]:
    """Those tests and their files."""
    found = [(test, file) for test, file, words in SCRIPT["tests"]() if name in words]
    return [
        (test, file)
        for test, file in found
        if test == BY_ANOTHER_NAME.get(name) or any(words in test for words in FORMULAS)
    ]


COMPARISONS = {"assert_close", "allclose", "assert_allclose", "assert_array_equal", "approx", "equal", "array_equal"}


def defined(file: Path) -> dict[str, ast.stmt]:
    """What a module of tests defines, the modules beside it that it imports, and its fixtures."""
    given: dict[str, ast.stmt] = {}
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node in body:
        imported = [node.module] if isinstance(node, ast.ImportFrom) else []
        imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for beside in (file.parent / f"{name}.py" for name in imported):
            given |= defined(beside) if beside.is_file() else {}
    if file.name.startswith("test_") and (file.parent / "conftest.py").is_file():
        given |= defined(file.parent / "conftest.py")
    given |= {name: node for node in body for name in SCRIPT["names"](node)}
    for node in body:  # a fixture may have a name of its own
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    given[str(keyword.value.value)] = node
    return given


def reached(test: str, file: Path) -> list[ast.AST]:
    """The statements of a test and of all that it names in its module or beside it, annotations left out."""
    given = defined(file)
    seen, waiting, nodes = {test}, [given[test]], list[ast.AST]()
    while waiting:
        for node in ast.walk(waiting.pop()):
            nodes.append(node)
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "arg", None)))
            if isinstance(name, str) and name in given and name not in seen:
                seen.add(name)
                waiting.append(given[name])
    annotations = {
        id(inner)
        for node in nodes
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if annotation is not None
        for inner in ast.walk(annotation)
    }
    asked = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        for inner in ast.walk(node.args[1])
    }
    return [node for node in nodes if id(node) not in annotations | asked]


def builds(nodes: list[ast.AST], name: str) -> bool:
    """Is the class called, or handed on (in a table, to functools.partial) to be called?"""
    return any(isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) for node in nodes)


def compares(nodes: list[ast.AST]) -> bool:
    """Is something compared with other numbers?"""
    calls = {getattr(node.func, "attr", getattr(node.func, "id", "")) for node in nodes if isinstance(node, ast.Call)}
    return bool(calls & COMPARISONS)


KINDS = {
    one.kind.__name__: one.kind for one in KNOWN.values() if one.group in ("strategy", "local", "uplink", "attack")
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_algorithm_has_a_test_of_its_formula(name: str) -> None:
    """It builds the class and compares numbers, under a name that says so, or is listed by its name."""
    found = [reached(test, file) for test, file in formula_files(name)]
    assert any(builds(nodes, name) and compares(nodes) for nodes in found), formula_tests(name)


def test_tests_that_only_name_a_class_do_not_count(tmp_path: Path) -> None:
    assert not formula_tests("SomethingNew")
    assert set(BY_ANOTHER_NAME.values()) <= {test for test, _, _ in SCRIPT["tests"]()}
    file = tmp_path / "test_it.py"
    file.write_text(
        "def test_a(x: FedAvg) -> None:\n    assert isinstance(x, FedAvg)\n"
        "def test_b() -> None:\n    run(FedAvg())\n"
        "CASES = [FedAvg]\ndef test_c() -> None:\n    assert 1.0 == approx(CASES[0]())\n"
    )
    assert not builds(reached("test_a", file), "FedAvg")
    assert builds(reached("test_b", file), "FedAvg")
    assert not compares(reached("test_b", file))
    assert builds(reached("test_c", file), "FedAvg")
    assert compares(reached("test_c", file))


NUM_PROCESSES = 12


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process need fork")
@pytest.mark.parametrize("part", range(NUM_PROCESSES))
def test_the_test_of_a_formula_notices_a_thousandth(part: int) -> None:
    """An algorithm whose every result is off by 10⁻³ fails one of its tests."""
    root, names = Path(__file__).parents[2], sorted(KINDS)[part::NUM_PROCESSES]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests" / "scripts"))),
        "OMP_NUM_THREADS": "1",
    }
    tests_by_kind = {
        f"{KINDS[name].__module__}:{name}": [f"{file}::{test}" for test, file in formula_files(name)] for name in names
    }
    command = [sys.executable, str(Path(__file__).parent / "broken_algorithm.py"), json.dumps(tests_by_kind)]
    ended = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=800)
    outcomes = json.loads(ended.stdout)
    assert list(outcomes) == list(tests_by_kind)
    for kind, (code, output) in outcomes.items():
        assert code == 1, f"{kind} may be broken: {' '.join(tests_by_kind[kind])}"
        assert "\nFAILED " in output, output
