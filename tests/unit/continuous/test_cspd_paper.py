"""CSpD as its paper describes it: what the target sees, and what a rejection discards."""

import numpy as np
import pytest
import torch

from specmm.image_ar.continuous.cspd import (
    CSpDBatch,
    CSpDModel,
    CSpDRun,
    DraftWindow,
    StreamNumbers,
    decode_paper,
)
from specmm.image_ar.continuous.masked_decode import head_conditions
from specmm.image_ar.continuous.orders import MARSettings, log_uniforms, normals

ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(0))[None]


def plan(num_iter=6, **options):
    return MARSettings(num_iter, "ddim8", **options)


def noise(seed=0):
    return torch.randn(1, 16, 9, 4, generator=torch.Generator().manual_seed(seed))


def sides(model, how, scale=1.0):
    target = CSpDModel(model, torch.tensor([3]), 1, how)
    return target, CSpDModel(model, torch.tensor([3] if scale == 1.0 else [5]), 1, how)


def uniforms(seed=0):
    random = [torch.Generator().manual_seed(seed)]
    return StreamNumbers(normals(random), log_uniforms(random), 0, 1)


class Scripted:
    """Accepts (-1) or rejects (2) by turns, and takes any proposal."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def uniform(self, rows):
        return np.full(rows, self.answers.pop(0) if self.answers else -1.0)

    def normal(self, rows, width):
        return np.zeros((rows, width))


def make(model, how, scale=1.0, numbers=None):
    batch = CSpDBatch(*sides(model, how, scale), ORDER, noise(), [numbers or uniforms()])
    return CSpDRun(batch)


@pytest.mark.parametrize("cfg", [1.0, 2.5])
def test_the_target_sees_the_drafts_before_each_position(tiny_mar, cfg):
    run, seen = make(tiny_mar, plan(cfg=cfg)), []
    compute = run.compute
    run.compute = lambda side, of: seen.append((side, compute(side, of))) or seen[-1][1]
    parts = run.batch.target.settings.iterations(16)
    before = run.tokens.clone()
    assert run.round({0: parts[:3]}) == {0: 3}
    for side, made in seen[:3]:
        assert side is run.batch.draft
        [drafted] = made
        before[0, drafted.where] = drafted.tokens
    side, checked = seen[3]
    assert side is run.batch.target and len(seen) == 4
    for part, made in zip(parts, checked, strict=False):
        classes = run.batch.target.classes
        given = before, ORDER[:, part.last :], classes, made.where[None]
        alone = head_conditions(tiny_mar, *given)
        tokens, _ = run.batch.target.chains(
            alone, part.scale, noise()[0, made.where].transpose(0, 1)
        )
        np.testing.assert_allclose(made.ends.mean, tokens.numpy(), atol=1e-4, rtol=1e-4)


def test_a_drafter_that_is_the_target_is_always_kept(tiny_mar):
    batch = CSpDBatch(*sides(tiny_mar, plan()), ORDER, noise(), [uniforms()])
    *_, last = decode_paper(batch, DraftWindow(2, 0.2))
    assert last.stats.acceptance == 1
    assert last.stats.rounds == 2 + 2  # two of the target's own, four drafted two at a time
    assert last.count == 16 and last.tokens.isfinite().all()


def test_a_rejection_discards_what_was_drafted_after_it(tiny_mar):
    parts = plan().iterations(16)
    run = make(tiny_mar, plan(), 2.0, Scripted(-1.0, 1e30))
    assert run.round({0: parts[:4]}) == {0: 2}
    again = make(tiny_mar, plan(), 2.0, Scripted())
    assert again.round({0: parts[:4]}) == {0: 4}


def test_rejected_tokens_are_replaced_and_never_zero(tiny_mar):
    batch = CSpDBatch(*sides(tiny_mar, plan(), 2.0), ORDER, noise(), [uniforms(1)])
    *_, last = decode_paper(batch, DraftWindow(4, 0.05))
    assert last.stats.acceptance < 1
    assert last.tokens.abs().sum(-1).min() > 0


@pytest.mark.parametrize("cfg", [1.0, 2.5])
def test_pictures_of_a_batch_are_those_alone(tiny_mar, cfg):
    how, window = plan(cfg=cfg), DraftWindow(3, 0.2)
    labels, wrong = torch.tensor([3, 5, 1]), torch.tensor([5, 5, 2])
    orders = torch.stack(
        [torch.randperm(16, generator=torch.Generator().manual_seed(b)) for b in range(3)]
    )
    start = torch.cat([noise(b) for b in range(3)])

    def draw(rows):
        random = [torch.Generator().manual_seed(b) for b in rows]
        streams = normals(random), log_uniforms(random)
        numbers = [StreamNumbers(*streams, b, len(rows)) for b in range(len(rows))]
        both = (CSpDModel(tiny_mar, of[rows], len(rows), how) for of in (labels, wrong))
        *_, last = decode_paper(CSpDBatch(*both, orders[rows], start[rows], numbers), window)
        return last

    whole, alone = draw([0, 1, 2]), [draw([b]) for b in range(3)]
    torch.testing.assert_close(
        whole.tokens, torch.cat([one.tokens for one in alone]), atol=1e-4, rtol=1e-4
    )
    assert whole.stats.rounds == sum(one.stats.rounds for one in alone)
    assert whole.stats.accepted == sum(one.stats.accepted for one in alone)
    assert len({one.stats.rounds for one in alone}) > 1


@pytest.mark.parametrize(("size", "prefill"), [(0, 0.05), (4, -0.1), (4, 1.5)])
def test_windows_that_make_no_sense(size, prefill):
    with pytest.raises(ValueError, match="window must be at least 1"):
        DraftWindow(size, prefill)
