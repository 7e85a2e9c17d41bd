"""The exact variant: the tokens of plain decoding with the same noise, its distribution, and a
broken twin that is caught.
"""

import itertools

import pytest
import torch

from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.sampling import Sampling, ScaleTokens, SharedGumbel
from specmm.image_ar.scales.scale_schedule import PATCHES_256, PATCHES_512, ScaleSchedule
from specmm.image_ar.scales.scale_speculation import ScaleSpeculation, agreement, coarse_scales
from specmm.randomness import Uniforms
from specmm.stats import Clock
from tests.sampling import p_value as of_counts

LABELS = torch.tensor([3, 0, 7])


@torch.inference_mode()
def run(kind, large, small, vqvae, labels, sampling, seeds, window, until):
    feature_map = FeatureMap(vqvae.quantize, len(labels))
    worker = kind(
        large, small, feature_map, labels, sampling, Uniforms.from_seeds(seeds), window, until
    )
    return worker, list(worker.rounds(Clock()))


@pytest.mark.parametrize(("window", "until"), [(1, 1), (2, 4), (3, 5), (5, 5)])
def test_tokens_are_those_of_plain_decoding_with_the_same_noise(
    large, small, vqvae, plain, window, until
):
    for seed, sampling in enumerate(
        (Sampling(1.5, 20, 0.95), Sampling(0.0, 4), Sampling(3.0, temperature=0.0))
    ):
        seeds = [seed, seed + 10, seed + 20]
        race = SharedGumbel(sampling, Uniforms.from_seeds(seeds), until)
        wanted = plain(large, vqvae, LABELS, sampling, seeds, race)
        worker, rounds = run(
            ScaleSpeculation, large, small, vqvae, LABELS, sampling, seeds, window, until
        )
        assert all(
            torch.equal(a, b) for a, b in zip(worker.feature_map.tokens, wanted.tokens, strict=True)
        )
        torch.testing.assert_close(worker.feature_map.f_hats[-1], wanted.f_hats[-1])
        assert rounds[-1] == 5 and all(a < b for a, b in itertools.pairwise(rounds))


def test_a_perfect_drafter_verifys_a_window_and_one_scale_a_round(large, vqvae):
    worker, rounds = run(
        ScaleSpeculation, large, large, vqvae, LABELS, Sampling(1.0, 20), [1, 2, 3], 2, 5
    )
    assert rounds == [3, 5] and worker.accepted == [2, 2]


class Twin(ScaleSpeculation):
    """Keeps one draft too many: the first that differs."""

    def _verify(self, first, drafts):
        super()._verify(first, drafts)
        if drafts and self.accepted[-1] < len(drafts):
            self.feature_map.crop(self.done - 1)
            self.feature_map.add(ScaleTokens(drafts[self.accepted[-1]]))


class Deaf(ScaleSpeculation):
    """Keeps every choice of the pass, those after a wrong draft as well."""

    def _verify(self, first, drafts):
        stop = min(first + len(drafts), self.scales - 1)
        counts = [self.feature_map.schedule.tokens(k) for k in range(first, stop + 1)]
        logits = self.large.advance(self.feature_map, stop, first).split(counts, dim=1)
        self.feature_map.crop(first)
        for k, part in enumerate(logits, first):
            self.feature_map.add(self.sampler.draw(part, k))


@pytest.fixture(scope="module")
def duel(make):
    """Two models of two codes on 1 + 4 tokens, and the large one's distribution over all 32
    pictures.
    """
    sizes = dict(depth=1, vocab_size=2, patch_nums=(1, 2), embed_dim=32, num_heads=2)
    vqvae = make.vqvae((1, 2), 2)
    large = make.var(3, **sizes)
    small = make.var(4, **sizes)
    sampling = Sampling(1.0, temperature=1.5)
    return large, small, vqvae, sampling, exact_probs(large, vqvae, sampling)


@torch.inference_mode()
def exact_probs(model, vqvae, sampling):
    """Chance [32] of every picture by the large model, teacher-forced."""
    pictures = torch.tensor(list(itertools.product((0, 1), repeat=5)))
    labels, tokens = torch.full((32,), 3), [pictures[:, :1], pictures[:, 1:]]
    inputs = vqvae.quantize.inputs(tokens)
    cond, null = model(labels, inputs), model(torch.full_like(labels, 10), inputs)
    coarse = sampling.probs(cond[:, :1], 0)
    fine = sampling.probs(2 * cond[:, 1:] - null[:, 1:], 1)
    probs = torch.cat([coarse, fine], 1).gather(2, pictures[:, :, None])[..., 0].double().prod(1)
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    return probs / probs.sum()


def p_value(kind, duel, samples=400):
    large, small, vqvae, sampling, probs = duel
    pictures = []
    for seed in range(samples):
        worker, _ = run(kind, large, small, vqvae, torch.tensor([3]), sampling, [seed], 2, 2)
        pictures.append(torch.cat(worker.feature_map.tokens, 1)[0])
    return of_counts(probs, torch.stack(pictures) @ 2 ** torch.arange(4, -1, -1))


def test_distribution(duel):
    assert p_value(ScaleSpeculation, duel) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("twin", [Twin, Deaf])
def test_broken_twins_are_caught(duel, twin):
    assert p_value(twin, duel) < 1e-9


def test_agreement():
    tokens = [torch.zeros(2, 1), torch.zeros(2, 4)]
    assert (
        agreement(tokens, [ScaleTokens(t) for t in tokens] + [ScaleTokens(torch.zeros(2, 9))]) == 2
    )
    assert agreement(tokens, [ScaleTokens(tokens[0]), ScaleTokens(torch.ones(2, 4))]) == 1
    assert agreement([], [ScaleTokens(tokens[0])]) == 0
    for row in (0, 1):  # every picture of the batch must agree, not the first alone
        other = tokens[1].clone()
        other[row, 2] = 1
        assert agreement(tokens, [ScaleTokens(tokens[0]), ScaleTokens(other)]) == 1


def test_what_it_cannot_do(large, small, vqvae):
    for window, until in ((0, 2), (1, 0), (1, 6)):
        with pytest.raises(ValueError, match=f"got {window} and {until}"):
            run(ScaleSpeculation, large, small, vqvae, LABELS, Sampling(), [1, 2, 3], window, until)
    with pytest.raises(ValueError, match="more_smooth must be off"):
        smooth = Sampling(more_smooth=True)
        run(ScaleSpeculation, large, small, vqvae, LABELS, smooth, [1, 2, 3], 1, 1)


def test_coarse_scales_of_the_published_schedules():
    assert coarse_scales(ScaleSchedule(PATCHES_256)) == 6
    assert coarse_scales(ScaleSchedule(PATCHES_512)) == 5
