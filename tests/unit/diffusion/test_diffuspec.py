"""Lattices, searches, the n-gram proxy and lengths at their edges.

Shape letters: K block, V vocabulary.
"""

import math

import pytest
import torch
from safetensors.torch import save_file

from specmm.core.sorting import LARGE
from specmm.diffusion_drafters.diffusion_chains import AdaptiveLength, Search, draft
from specmm.diffusion_drafters.lattice_search import Objective, beam_path, prune
from specmm.diffusion_drafters.ngram import NGram
from specmm.recipes.diffusion import fit_proxy
from tests.unit.diffusion.lattice_naive import best_paths

TEXTS = [[0, 1, 2, 3, 1, 2, 4], [1, 2, 3, 0], [], [4]]
END = 5


def block(seed, count=4, vocabulary=6):
    return torch.randn(
        count, vocabulary, generator=torch.Generator().manual_seed(seed)
    ).log_softmax(-1)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_wide_beam_finds_the_best_of_every_path(order, seed):
    objective = Objective(fit_proxy(TEXTS, 6, order), [0, 1], 0.4)
    lattice = prune(block(seed), 0.9, 4)
    best = best_paths(lattice, objective)[0]
    assert beam_path(lattice, objective, 10**4) == best
    assert beam_path(lattice, objective, 1).rank >= best.rank


@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_the_beam_is_that_of_one_that_makes_every_path(seed, width, weight):
    probs = block(seed, 5)
    probs[2] = -math.log(6)  # paths as good as one another
    objective, lattice = Objective(fit_proxy(TEXTS, 6, 2), [0, 1], weight), prune(probs, 1, 6)
    found, wanted = (beam_path(lattice, objective, width), best_paths(lattice, objective, width)[0])
    assert found.tokens == wanted.tokens and found.score == pytest.approx(wanted.score)


def test_equal_tokens_are_taken_by_number():
    flat = torch.full((2, 6), 1 / 6).log()
    assert prune(flat, 0.6, 3).tokens == [[0, 1, 2]] * 2
    assert prune(flat, 0.3, 3).tokens == [[0, 1]] * 2
    objective = Objective(NGram(1, 6, {}), [], 1.0)
    assert beam_path(prune(flat, 1, 6), objective).tokens == (0, 0)


def test_tokens_of_no_probability_are_never_offered():
    barred = block(0).masked_fill(torch.arange(6) > 1, -math.inf).log_softmax(-1)
    lattice = prune(barred, 1, 6)
    assert all(sorted(row) == [0, 1] for row in lattice.tokens)
    barred[2] = -math.inf
    assert len(prune(barred, 0.8)) == 2


@pytest.mark.parametrize("vocabulary", [LARGE, LARGE + 1, 3 * LARGE])
def test_large_vocabularies_are_pruned_as_small_ones(vocabulary):
    probs = (
        torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
        .mul(3)
        .log_softmax(-1)
    )
    probs[1, 100:] = -math.inf
    probs[2, 7] = probs[2, 8000] = 0.5  # a tie
    best = probs.sort(dim=1, descending=True, stable=True)
    found = prune(probs, 1.0, 15)
    assert found.tokens == best.indices[:, :15].tolist()
    assert found.scores == best.values[:, :15].tolist()


def test_drafts_of_odd_blocks():
    proxy, only_end = fit_proxy(TEXTS, 6), torch.full((3, 6), -9.0)
    only_end[:, END] = 0
    assert draft(only_end, [0], END, proxy, Search()).tokens == (END,)
    assert draft(torch.full((3, 6), -math.inf), [0], END, proxy, Search()).tokens == ()
    assert draft(block(0)[:0], [0], END, proxy, Search()).tokens == ()
    free = draft(block(1), [], None, proxy, Search())
    # no end token, and a prefix shorter than the proxy's order
    assert len(free.tokens) == free.generated == 4


@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_proxy_is_a_distribution_and_prefers_what_it_read(order):
    proxy = fit_proxy(TEXTS, 6, order)
    for probs in proxy.log_probs([[], [1], [1, 2], [5, 5], [0, 1, 2], [3, 1, 2]], range(6)):
        assert math.fsum(map(math.exp, probs)) == pytest.approx(1)
    if order > 1:
        assert proxy.log_probs([[1]], [2]) > proxy.log_probs([[1]], [3])


def test_witten_and_bell_by_hand():
    proxy = fit_proxy([[0, 1, 0, 1, 0, 2]], 4, 2)
    unigram = (2 + 3 / 4) / (6 + 3)  # token 1, seen twice; three kinds among six tokens
    assert proxy.log_probs([[0]], [1])[0] == pytest.approx([math.log((2 + 2 * unigram) / (3 + 2))])
    assert proxy.log_probs([[]], [3])[0] == pytest.approx([math.log(3 / 4 / 9)])
    assert proxy.log_probs([[0]], [4]) == proxy.log_probs([[0]], [3]), (
        "models pad their vocabularies"
    )
    wanted = [*proxy.log_probs([[0]], [1, 3]), *proxy.log_probs([[]], [1, 3])]
    assert proxy.log_probs([[0], []], [1, 3]) == wanted


def test_the_proxy_is_saved_as_tensors(tmp_path):
    proxy = fit_proxy(TEXTS, 6, 3, least=2)
    proxy.save(tmp_path / "proxy.safetensors")
    again = NGram.load(tmp_path / "proxy.safetensors")
    assert again.counts == proxy.counts and (again.order, again.vocabulary) == (3, 6)
    assert again.log_probs([[1, 2]], range(6)) == proxy.log_probs([[1, 2]], range(6))
    assert (1, 2) in proxy.counts and (2, 4) not in proxy.counts and (4,) in proxy.counts
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="n-gram model"):
        NGram.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: prune(block(0), 0), "got 0 and 15"),
        (lambda: prune(block(0), 0.5, 0), "got 0.5 and 0"),
        (lambda: prune(block(0)[0]), r"got \[6\]"),
        (lambda: beam_path(prune(block(0)), Objective(NGram(1, 6, {}), []), 0), "width"),
        (lambda: Objective(NGram(1, 6, {}), [], 1.5), "got 1.5"),
        (lambda: fit_proxy([[6]], 6), "got 6 to 6"),
        (lambda: fit_proxy([[-1, 2]], 6), "got -1 to 2"),
        (lambda: fit_proxy([], 6, 0), "order"),
        (lambda: AdaptiveLength(5, 4), "got 5 and 4"),
        (lambda: AdaptiveLength(0, 4), "got 0 and 4"),
        (lambda: AdaptiveLength(rate=0), "got 0 and 10"),
        (lambda: AdaptiveLength(step=-1), "got 0.5 and -1"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
