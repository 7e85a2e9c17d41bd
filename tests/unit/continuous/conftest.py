"""A closed-form head: the exact denoiser of Gaussian tokens, and the tiny model of the parity
files.
"""

import pytest
import torch

from recipes.training.diffusion import log_variance
from specmm.image_ar.continuous import chain_round
from specmm.image_ar.continuous.diffusion import NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import ChainHead, HeadCondition
from tests.tiny import recorded


class GaussianHead:
    """Answers as a perfect head for tokens ~ N(mean, std²) would; ``wide`` adds to v, so that σ is
    not the posterior's.

    Stands for a ``BoundHead`` of R rows and for the ``head`` after it.
    """

    guided, device = False, torch.device("cpu")

    def __init__(self, schedule, mean, std, rows, wide=0.0):
        self.level = schedule.alphas_cumprod.flip(0).float()
        self.schedule, self.mean, self.std, self.rows, self.wide = schedule, mean, std, rows, wide
        self.head, self.channels, self.calls = self, len(mean), 0

    def __len__(self):
        return self.rows

    def _answer(self, level, x):
        spread = level * self.std**2 + 1 - level
        eps = (1 - level).sqrt() * (x - level.sqrt() * self.mean) / spread
        return eps, torch.full_like(x, self.wide)

    def at(self, k, x):
        return self._answer(self.level[k], x)

    def window(self, rows, first, x):
        steps = (torch.tensor(first)[:, None] + torch.arange(x.shape[1])).clamp(
            max=len(self.level) - 1
        )
        return self._answer(self.level[steps][:, :, None], x)

    def probs(self):
        """Mean and standard deviation of the token that the sampled chain ends in, by its linear
        recursion.
        """
        s = self.schedule
        level = s.alphas_cumprod
        mean = torch.zeros_like(self.mean).double()
        std = torch.ones_like(self.mean).double()
        for i in reversed(range(len(level))):
            spread = level[i] * self.std.double() ** 2 + 1 - level[i]
            # x0 predicted = offset + gain · x
            gain = level[i].sqrt() * self.std.double() ** 2 / spread
            offset = self.mean.double() * (1 - level[i]) / spread
            c1, c2 = s.posterior_mean_coef1[i], s.posterior_mean_coef2[i]
            mean = c1 * (offset + gain * mean) + c2 * mean
            noise = log_variance(
                s, torch.full((1, 1), self.wide, dtype=torch.float64), torch.tensor([i])
            ).exp()[0, 0]
            std = ((c1 * gain + c2) ** 2 * std**2 + (noise if i else 0)).sqrt()
        return mean, std


@pytest.fixture
def gaussian():
    return GaussianHead


@pytest.fixture(scope="session")
def tiny_mar():
    return recorded.tiny_mar()


@pytest.fixture(scope="session")
def conditions():
    """Conditions z [6, 48] of the parity file and of "no class" beside them."""
    return recorded.tensors("cspd/mar_tiny")["loop.cfg.z"]


@pytest.fixture(scope="session")
def bind(tiny_mar, conditions):
    """The tiny head bound to ``rows`` copies of one condition, at guidance ``scale`` (1: none)."""

    def make(rows, scale=1.0, spec="ddim100", row=0):
        head = ChainHead(tiny_mar.head, NoiseSchedule.of(spec))
        cond, uncond = conditions[row], conditions[row + 6]
        z = cond[None] if scale == 1.0 else torch.stack([cond, uncond])
        return head.bind(HeadCondition(z.expand(rows, -1, -1), scale))

    return make


@pytest.fixture
def frozen(monkeypatch):
    """Drafts by the target's last answer without its trend, which are kept less often: a missing
    residual shows. As a mere answer they know nothing of how sure it is.
    """

    def alone(clean, step, out, excess):
        return clean, 0 * step

    monkeypatch.setattr(chain_round, "predicted", alone)


@pytest.fixture
def drop_residual(monkeypatch):
    """Makes a broken twin: a rejected step is drawn from the target."""

    def nothing(p, q, step, lost, numbers):
        lost[...] = False

    return lambda: monkeypatch.setattr(chain_round, "draw_residual", nothing)
