"""Chains as programs: the tokens of single operators from the same numbers."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from specmm.image_ar.continuous import chain_program, orders
from specmm.image_ar.continuous import programs as compiling
from specmm.image_ar.continuous.chain_program import ChainProgram, run_rounds
from specmm.image_ar.continuous.chain_speculation import speculate
from specmm.image_ar.continuous.chain_windows import WindowTables
from specmm.image_ar.continuous.diffusion import ChainSteps, NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import ancestral
from specmm.image_ar.continuous.masked_decode import Ancestral
from specmm.image_ar.continuous.programs import HeadPrograms
from tests.unit.continuous.test_chain_speculation import streams

CPU = torch.device("cpu")
compiles = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")


@pytest.mark.slow
def test_plain_chains_are_those_of_single_steps(bind, traced):
    rows, scale, spec = 3, 2.0, "ddim20"
    steps = ChainSteps.ddpm(NoiseSchedule.of(spec))
    noise = torch.randn(21, rows, 4, generator=torch.Generator().manual_seed(0))
    programs = HeadPrograms(CPU)
    for temperature in (1.0, 0.7):  # one program
        wanted = ancestral(bind(rows, scale, spec), steps, noise, temperature)
        head = bind(rows, scale, spec)
        made = programs.chains(Ancestral(head.head, None, temperature))(head, noise)
        torch.testing.assert_close(made, wanted, atol=1e-4, rtol=1e-4)


def speculated(bind, rows, programs, scale=1.0, spec="ddim50", seed=5, each=1, temperature=1.0):
    """``each`` tokens of each of ``rows`` pictures, twice, their rounds, and the numbers left."""
    numbers = streams(seed, rows)
    tables = WindowTables(NoiseSchedule.of(spec), 8)
    made = [
        speculate(
            bind(rows * each, scale, spec, row),
            tables,
            [each] * rows,
            *numbers,
            temperature,
            programs,
        )
        for row in (0, 1)
    ]
    tokens = torch.stack([one.tokens for one in made])
    rest = [stream.draw([1] * rows, 3) for stream in numbers]
    return tokens, [one.row_calls for one in made], torch.cat(rest)


def same(bind, rows, programs, **options):
    """Tokens equal up to rounding after the same rounds, which used the same numbers."""
    wanted, made = (speculated(bind, rows, p, **options) for p in (None, programs))
    torch.testing.assert_close(made[0], wanted[0], atol=1e-3, rtol=1e-3)
    assert made[1] == wanted[1] and torch.equal(made[2], wanted[2])


KINDS = {"one": (1, dict(temperature=0.9)), "three, guided": (3, dict(scale=2.0, temperature=1.0))}
SEVERAL = {
    "four": (1, dict(temperature=0.9, each=4)),
    "two of three, guided": (3, dict(scale=2.0, each=2)),
    "three": (1, dict(each=3)),
}


@pytest.mark.slow
def test_rounds_are_those_of_single_operators(bind, traced):
    rows, options = KINDS["three, guided"]
    same(bind, rows, HeadPrograms(CPU).speculation, **options)


class Plainly:
    """Runs the functions of programs as they are."""

    def __init__(self):
        self.played = 0

    def rounds(self, *given):
        made = run_rounds(*given)
        self.played += int((made[4] - given[1][4]).sum())
        return made

    def __call__(self, *given):
        return ChainProgram(self.rounds, *given)


@pytest.mark.parametrize("kind", KINDS | SEVERAL)
def test_most_rounds_are_the_programs(bind, kind):
    rows, options = (KINDS | SEVERAL)[kind]
    programs = Plainly()
    same(bind, rows, programs, **options)
    rounds = sum(map(sum, speculated(bind, rows, None, **options)[1]))
    assert programs.played > 0.95 * rounds, "others need more proposals"


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize(("name", "value"), [("PROPOSED", 1), ("WIDEST", 0.01)])
def test_what_a_program_cannot_play_is_played_outside(bind, name, value, each, monkeypatch):
    monkeypatch.setattr(chain_program, name, value)
    same(bind, 3, Plainly(), temperature=0.9, each=each)


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("most", [(80, 1024), (16384, 20), (20, 1024), (16384, 5)])
@pytest.mark.parametrize("block", [50, 846, 16384])
def test_numbers_that_end_are_drawn_in_their_order(bind, block, most, each, monkeypatch):
    """By the program as by single operators; of 846 both streams end in one round."""
    monkeypatch.setattr(orders, "BLOCK", block)
    monkeypatch.setattr(chain_program, "MOST", most)
    programs = Plainly()
    same(bind, 2, programs, temperature=0.9, each=each, seed=7)


def test_chains_of_many_tokens_run_as_they_are(bind, monkeypatch):
    monkeypatch.setattr(compiling, "FEW", 2)
    programs = HeadPrograms(CPU)
    monkeypatch.setattr(programs, "chain", None)
    monkeypatch.setattr(programs, "rounds", None)
    same(bind, 3, programs.speculation)
    bound, noise = bind(3, spec="8"), torch.zeros(9, 3, 4)
    assert programs.chains(Ancestral(bound.head, None))(bound, noise).isfinite().all()


@pytest.mark.slow
@compiles
def test_built_rounds_are_those_of_single_operators(bind):
    """Whose distribution, and that of a broken twin, are in ``test_chain_speculation.py``."""
    rows, options = KINDS["one"]
    counters.clear()
    same(bind, rows, HeadPrograms(CPU).speculation, **options)
    assert counters["stats"]["unique_graphs"] == 1, "one program serves both"
