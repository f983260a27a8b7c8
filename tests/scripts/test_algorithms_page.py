"""The catalogue: the committed page is what classes and tests say now, and the command prints it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from fedsim.app.commands import algorithms as catalogue
from fedsim.app.commands import answer
from fedsim.app.config import groups

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "algorithms_page.py"))
ONE = "4 d bytes down, 4 d bytes up"
KNOWN = {(one.group, one.name): one for one in catalogue.algorithms()}


def test_the_page_is_up_to_date_and_has_every_algorithm() -> None:
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert page == SCRIPT["page"](), "out of date: python scripts/algorithms_page.py writes it again"
    for group in catalogue.KINDS:
        for name in groups()[group]:
            assert name in catalogue.CHOSEN or f"\n| [`{name}`](#{group}{name}) | " in page, f"{group}={name}"


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
    assert (one.paper, one.remembers, one.sends, one.assumes) == SAID[name]
    assert KNOWN["strategy", "p_fedavg"].assumes == "availability=full"


def test_tests_are_found_through_the_tables_they_go_through() -> None:
    found = list(SCRIPT["shown"](KNOWN["strategy", "fednova"]))
    assert any("with equal work proximal fednova is fedprox" in text for text in found)
    assert any("every round follows the formula" in text for text in SCRIPT["shown"](KNOWN["strategy", "feddc"]))


def test_the_command_lists_all_and_says_all_of_one(capsys) -> None:
    answer("algorithms", [])
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for _, name in KNOWN)
    answer("algorithms", ["strategy=fedavgm", "topk"])
    said = capsys.readouterr().out
    assert said.startswith(
        "strategy=fedavgm: FedAvg with momentum on the server\n\nv ← β v + mean_{i∈A} G_i, weighed by w_i;"
    )
    assert "\nuplink=topk: the largest numbers of every row alone\n\nSends the k numbers" in said
    assert "remembers  ef14: a row of each client\n" in said
    with pytest.raises(SystemExit, match=r"fedsim algorithms: NAME='fedavgn' is unknown.*did you mean 'fedavg'"):
        answer("algorithms", ["fedavgn"])


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
    "PG": "test_pg_weighs_the_mixtures_answer_by_one_derivative",
    "RRM": "test_clients_descend_on_the_draw_of_the_last_deployment",
    "RobustServer": "test_every_round_is_the_servers_step_along_the_rules_aggregate",
    "TreeNoise": "test_a_rounds_rows_share_what_the_tree_adds_in_it",
}


def formula_tests(name: str) -> list[str]:
    """Tests that play the formula of a class again."""
    found = [test for test, _, words in SCRIPT["tests"]() if name in words]
    return [test for test in found if test == BY_ANOTHER_NAME.get(name) or any(words in test for words in FORMULAS)]


def test_every_algorithm_has_a_test_of_its_formula() -> None:
    """A new choice has one too, under a name that says so, or is listed with the name of its test."""
    kinds = {one.kind.__name__ for one in KNOWN.values() if one.group in ("strategy", "local", "uplink", "attack")}
    assert not [name for name in sorted(kinds) if not formula_tests(name)]
    assert not formula_tests("SomethingNew")
    assert set(BY_ANOTHER_NAME.values()) <= {test for test, _, _ in SCRIPT["tests"]()}
