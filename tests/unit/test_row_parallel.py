"""Row-parallel decoding: its schedule, what each token sees, and where it is plain decoding.

Shape letters: B batch, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch

from specmm.core.decode import decode_plain
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.image_ar.tokens.row_parallel import decode_rows, rounds
from tests.unit.test_decode import CAPTIONED, SMALL, last, prompt_of, target_of

SIDE = SMALL.grid
SEEDS = [0, 1, 2]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize(("rows", "line"), [(5, 5), (3, 4), (1, 4), (4, 1)])
def test_every_place_is_drawn_once_after_the_window_above(rows, line, window):
    when = {0: 0}
    fed: dict[int, int] = {}
    for number, part in enumerate(rounds(rows, line, window), start=1):
        assert list(part.places) == sorted(part.places)
        for node, (place, source) in enumerate(zip(part.places, part.sources, strict=True)):
            assert when[source] < number  # what is fed is drawn
            if place == source:
                assert fed.setdefault(place, number) == number  # once
            else:  # the end of a row that has not been drawn yet
                assert place % line == line - 1 and place // line == source // line
                assert when.get(place, number) == number
            if node in part.predicts:
                assert place + 1 not in when
                when[place + 1] = number
    assert sorted(when) == list(range(rows * line))
    for row in range(1, rows):
        ready = when[(row - 1) * line + min(window, line) - 1]
        assert when[row * line] == ready + 1  # as soon as the window above is drawn
    total = max(when.values())
    assert total == line - 1 + (rows - 1) * min(window, line)


def naive_pictures(target, condition, window, seeds):
    """Tokens [B, T] by whole forwards without a cache, in which each token sees what it saw when it
    was fed.
    """
    config = target.model.config
    numbers = Uniforms.from_seeds(seeds)
    tokens = torch.zeros(len(condition), config.block_size, dtype=torch.int64)
    tokens[:, 0] = draw(predicted(target, condition, [])[:, -1], numbers.draw(1)[:, 0])
    fed: list[tuple[int, torch.Tensor, list[int]]] = []  # place, token, places it sees
    for part in rounds(config.grid, config.grid, window):
        nodes = list(zip(part.places, part.sources, strict=True))
        there = [place for place, _, _ in fed] + [p for p, source in nodes if p == source]
        new = [(p, tokens[:, s], [x for x in there if x < p]) for p, s in nodes]
        probs = predicted(target, condition, fed + new)
        for n in part.predicts:
            found = draw(probs[:, 1 + len(fed) + n], numbers.draw(1)[:, 0])
            tokens[:, part.places[n] + 1] = found
        fed += [node for node, (place, source) in zip(new, nodes, strict=True) if place == source]
    return tokens


def predicted(target, condition, fed):
    """Distributions [B, 1 + tokens, V] after the class and each token of ``fed``: place, token [B]
    and the places it sees.
    """
    places = [place for place, _, _ in fed]
    ids = torch.stack([token for _, token, _ in fed], 1) if fed else condition[:, None][:, :0]
    mask = torch.full((1 + len(fed), 1 + len(fed)), float("-inf"))
    mask.fill_diagonal_(0)
    mask[:, 0] = 0
    for i, (_, _, seen) in enumerate(fed, start=1):
        mask[i, [1 + places.index(x) for x in seen]] = 0
    positions = torch.tensor([[0, *(1 + place for place in places)]])
    branches = (condition, target.model.cls_embedding.unconditional(condition))
    cond, away = (
        target.model(target.model.embed(some, ids), positions, mask[None, None])[0]
        for some in branches
    )
    return target.processor(away + target.guidance.scale * (cond - away))


def draw(probs, numbers):
    cumulative = probs.double().cumsum(-1)
    return (cumulative <= numbers[:, None].double() * cumulative[:, -1:]).sum(-1)


@torch.inference_mode()
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_whole_forwards(window, temperature):
    target = target_of(SMALL, Processor(temperature), Guidance(2.0))
    prompt = prompt_of(SMALL, [0, 1, 2])
    end = last(decode_rows(target, prompt, window, Uniforms.from_seeds(SEEDS)))
    wanted = naive_pictures(target, prompt.condition, window, SEEDS)
    assert torch.equal(end.tokens, wanted)
    assert end.stats.tokens == 3 * SMALL.block_size == end.tokens.numel()
    assert end.stats.batch_rounds == SIDE - 1 + (SIDE - 1) * window
    assert end.stats.rounds == sum(end.stats.kept) == 3 * end.stats.batch_rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("config", [SMALL, CAPTIONED], ids=["classes", "captions"])
def test_a_window_of_a_row_is_plain_decoding(config, temperature):
    target = target_of(config, Processor(temperature), Guidance(2.0, 9))
    prompt = prompt_of(config, [0, 1, 2])
    plain = last(decode_plain(target, prompt, target.length, Uniforms.from_seeds(SEEDS)))
    for window in (SIDE, SIDE + 3):
        end = last(decode_rows(target, prompt, window, Uniforms.from_seeds(SEEDS)))
        assert torch.equal(end.tokens, plain.tokens)
        assert end.counts.tolist() == [target.length] * 3
    other = last(decode_rows(target, prompt, 1, Uniforms.from_seeds(SEEDS)))
    assert not torch.equal(other.tokens, plain.tokens)


@pytest.mark.parametrize("config", [SMALL, CAPTIONED], ids=["classes", "captions"])
def test_a_row_does_not_depend_on_its_batch(config):
    target = target_of(config, Processor(1.0, top_k=8), Guidance(2.0))

    def tokens(rows, seeds):
        prompt = prompt_of(config, rows)
        return last(decode_rows(target, prompt, 2, Uniforms.from_seeds(seeds))).tokens

    together = tokens([3, 1, 4], [7, 8, 9])
    assert len(together.unique(dim=0)) == 3
    for i in range(3):
        assert torch.equal(tokens([[3, 1, 4][i]], [7 + i])[0], together[i])


def test_windows_below_one_are_refused():
    target = target_of(SMALL, Processor())
    with pytest.raises(ValueError, match="window must be at least 1 token, got 0"):
        last(decode_rows(target, prompt_of(SMALL, [0]), 0, Uniforms.from_seeds([0])))
