"""CSpD as its paper describes it: what the target sees, what a rejection discards, and how it ends."""

import numpy as np
import pytest
import torch

from specmm.image_ar.continuous.chain import ChainHead
from specmm.image_ar.continuous.cspd import Side, StreamDice, Window
from specmm.image_ar.continuous.decode import Plan
from specmm.image_ar.continuous.noise import log_uniforms, normals
from specmm.image_ar.continuous.orders import iterations
from specmm.image_ar.continuous.paper import _Paper, decode_paper

ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(0))[None]


def plan(num_iter=6, **options):
    return Plan(num_iter, "ddim8", **options)


def noise(seed=0):
    return torch.randn(1, 16, 9, 4, generator=torch.Generator().manual_seed(seed))


def sides(model, how, scale=1.0):
    target = Side(model, torch.tensor([3]), 1, how)
    return target, Side(model, torch.tensor([3] if scale == 1.0 else [5]), 1, how)


def dice(seed=0):
    random = [torch.Generator().manual_seed(seed)]
    return StreamDice(normals(random), log_uniforms(random), 0, 1)


class Scripted:
    """Accepts (-1) or rejects (2) by turns, and takes any proposal."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def uniform(self, rows):
        return np.full(rows, self.answers.pop(0) if self.answers else -1.0)

    def normal(self, rows, width):
        return np.zeros((rows, width))


@pytest.mark.parametrize("cfg", [1.0, 2.5])
def test_the_target_sees_the_drafts_before_each_position(tiny_mar, cfg):
    how = plan(cfg=cfg)
    run = _Paper(*sides(tiny_mar, how), ORDER, noise(), dice())
    parts = iterations(16, 6, cfg)
    run.target_makes(parts[0])
    drafts = [run._make(run.draft, part) for part in parts[1:4]]
    for part, made, ends in zip(parts[1:4], drafts, run._score(parts[1:4], [d.wanted for d in drafts]), strict=True):
        alone = run.target.ask(run.tokens, ORDER[:, part.last :], made.wanted)
        tokens, _ = run.target.chains(alone, part.scale, noise()[0, made.wanted[0]].transpose(0, 1))
        np.testing.assert_allclose(ends.mean, tokens.numpy(), atol=1e-4, rtol=1e-4)


def test_a_drafter_that_is_the_target_is_always_kept(tiny_mar):
    *_, last = decode_paper(*sides(tiny_mar, plan()), ORDER, noise(), dice(), Window(2, 0.2))
    assert last.stats.acceptance == 1
    assert last.stats.rounds == 2 + 2  # two of the target's own, four drafted two at a time
    assert last.count == 16 and last.tokens.isfinite().all()


def test_a_rejection_discards_what_was_drafted_behind_it(tiny_mar):
    parts = iterations(16, 6)
    run = _Paper(*sides(tiny_mar, plan(), 2.0), ORDER, noise(), Scripted(-1.0, 1e30))
    assert run.round(parts[:4]) == 2
    again = _Paper(*sides(tiny_mar, plan(), 2.0), ORDER, noise(), Scripted())
    assert again.round(parts[:4]) == 4


def test_rejected_tokens_are_replaced_and_never_zero(tiny_mar):
    how = plan()
    *_, last = decode_paper(*sides(tiny_mar, how, 2.0), ORDER, noise(), dice(1), Window(4, 0.05))
    assert last.stats.acceptance < 1
    assert last.tokens.abs().sum(-1).min() > 0


@pytest.mark.parametrize(("size", "prefill"), [(0, 0.05), (4, -0.1), (4, 1.5)])
def test_windows_that_make_no_sense(size, prefill):
    with pytest.raises(ValueError, match="window must be at least 1"):
        Window(size, prefill)


def test_heads_share_one_schedule(tiny_mar):
    target, _ = sides(tiny_mar, plan())
    assert isinstance(target.head, ChainHead) and len(target.steps.keep) == 8
