"""DiffuSpec's lattice, paths and lengths against the published cases.

Shape letters: K block, V vocabulary.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from specmm.diffusion_drafters.diffusion_chains import AdaptiveLength, Search, draft
from specmm.diffusion_drafters.lattice_search import Lattice, Objective, beam_path, prune
from tests.unit.diffusion.lattice_naive import best_paths

ALL = 10**6  # a beam as wide as that holds every path
PARITY = Path(__file__).parents[1] / "parity" / "dlm"
CPS = json.loads((PARITY / "cps_cases.json").read_text())["cases"]
ADL = json.loads((PARITY / "adl_cases.json").read_text())["cases"]


class Table:
    """The case's n-gram model."""

    def __init__(self, order, log_probs):
        self.order, self.table = order, log_probs

    def log_probs(self, contexts, tokens):
        found = []
        for context in contexts:
            row = self.table
            for token in context[len(context) - self.order + 1 :]:
                row = row[token]
            found.append([row[token] for token in tokens])
        return found


@pytest.fixture(params=CPS, ids=lambda case: case["id"])
def case(request):
    return request.param


def parts(case):
    """The block, the lattice, it with the end token kept as in the paper, and the objective."""
    log_probs = torch.tensor(case["dlm_logprobs"], dtype=torch.float64)
    proxy = Table(case["ngram"]["order"], case["ngram"]["logprobs"])
    bare = prune(log_probs, case["tau"], case["M_max"])
    new = [case["eos"] not in row for row in bare.tokens]
    ends = log_probs[:, case["eos"]].tolist()
    kept = Lattice(
        [row + [case["eos"]] * own for row, own in zip(bare.tokens, new, strict=True)],
        [row + [end] * own for row, own, end in zip(bare.scores, new, ends, strict=True)],
        bare.likeliest,
    )
    return log_probs, bare, kept, Objective(proxy, case["prefix"], case["lam"])


def same(found, wanted):
    assert list(found.tokens) == wanted["path"]
    assert found.score == pytest.approx(wanted["score"], abs=2e-6)


def test_the_lattice(case):
    _, bare, kept, _ = parts(case)
    wanted = case["expected"]
    assert kept.tokens == wanted["candidate_sets"]
    assert [len(row) for row in bare.tokens] == wanted["n_by_mass"]
    assert bare.likeliest == wanted["raw_argmax"]
    assert bare.before(case["eos"]) == wanted["L_gen"]
    first = wanted["first_eos_index_1based"]
    assert (first or case["k"] + 1) == bare.before(case["eos"]) + 1


def test_the_best_paths(case):
    log_probs, bare, kept, objective = parts(case)
    wanted, end = case["expected"], case["eos"]
    for name, lattice in {
        "literal": kept,
        "literal_no_forced_eos": bare,
        "truncated_at_raw_eos": kept.first(bare.before(end) + 1),
        "literal_unpruned": prune(log_probs, 1, case["V"]),
    }.items():
        same(best_paths(lattice, objective, end=end)[0], wanted[name])
    free = kept.without(end).first(bare.before(end))
    same(best_paths(free, objective)[0], wanted["no_eos_up_to_L_gen"])
    same(beam_path(free, objective, ALL), wanted["no_eos_up_to_L_gen"])


def test_beams(case):
    _, _, lattice, objective = parts(case)
    wanted, end = case["expected"], case["eos"]
    paths = best_paths(lattice, objective, end=end)
    for name in (
        name for name in wanted if name.startswith("beam_") and name != "beam_B_is_optimal"
    ):
        width = None if name == "beam_inf" else int(name.removeprefix("beam_"))
        found = best_paths(lattice, objective, width, end)[0]
        same(found, wanted[name])
        assert (found.tokens[-1] == end) == wanted[name]["finished"]
    best = best_paths(lattice, objective, case["B"], end)[0].rank == paths[0].rank
    assert best == wanted["beam_B_is_optimal"]
    assert len(paths) == wanted["n_paths"]
    if wanted["margin"] is not None:  # there is a second path
        assert paths[0].score - paths[1].score == pytest.approx(wanted["margin"], abs=3e-6)


def test_a_draft_says_what_is_in_front_of_the_end_and_then_the_end(case):
    log_probs, *_, objective = parts(case)
    search = Search(case["tau"], case["M_max"], case["lam"], width=ALL)
    found = draft(log_probs, case["prefix"], case["eos"], objective.proxy, search)
    wanted = case["expected"]
    ends = [case["eos"]] if wanted["L_gen"] < case["k"] else []
    assert list(found.tokens) == wanted["no_eos_up_to_L_gen"]["path"] + ends
    assert found.generated == wanted["L_gen"]


@pytest.mark.parametrize("case", ADL, ids=lambda case: case["id"])
def test_lengths(case):
    control = AdaptiveLength(case["k_min"], case["k_max"], case["delta"], case["rho"])
    assert control.length == case["rows"][0]["k_next"]
    for row in case["rows"][1:]:
        control.observe(row["L_gen"], row["L_acc"])
        assert math.isclose(control.generated, row["ema_gen"], abs_tol=1e-8)
        assert math.isclose(control.accepted, row["ema_acc"], abs_tol=1e-8)
        assert control.length == row["k_next_floor_of_real"]
