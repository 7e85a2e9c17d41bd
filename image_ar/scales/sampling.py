"""From VAR's logits to tokens: guidance by scale, top-k and top-p, temperature, and the samplers.

``InverseCDF`` takes one generator a picture, so that a picture's uniforms do not depend on its
batch. ``ReleaseSampler`` draws the same numbers in the same order as VAR's released code, with one
generator for the batch, for comparisons with recorded runs. Source: VAR (arXiv 2404.02905). Shape
letters: B batch, T tokens of a scale, V vocabulary, K scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specmm.core.processors import Processor
from specmm.core.randomness import UniformSource, categorical
from specmm.core.sorting import kth_largest, likeliest
from specmm.extending.kinds import check_at_least, check_flags
from specmm.image_ar.scales.scale_schedule import ScaleSchedule
from specmm.verify.exact import one_hot

Temperature = float | tuple[float, ...]  # one, or one for each scale


@dataclass(frozen=True)
class VARSettings:
    """Recommended sampling of a model, from ``settings.json`` beside it.

    ``cfg`` 0 is no guidance; ``classes`` are names by id; ``fid`` is the measured FID by CoDe's N
    (as text); ``n`` is the N that the two models were specialised for, -1 if none.
    """

    cfg: float = 1.5
    temperature: Temperature = 1.0
    top_k: int = 0
    top_p: float = 1.0
    more_smooth: bool = False
    classes: tuple[str, ...] = ()
    fid: dict[str, float] = field(default_factory=dict)
    n: int = -1


@dataclass(frozen=True)
class Sampling:
    """Options of one run; ``temperature`` divides after the filters, not before.

    Guidance grows over the scales: at scale k logits are (1 + t) cond - t null with t = ``cfg`` · k
    / (K - 1), so 0 is none. ``more_smooth`` feeds soft codes to the next scale: prettier pictures
    from another distribution, to which temperatures do not apply. Raises ``ValueError`` for options
    out of range.
    """

    cfg: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    temperature: Temperature = 1.0
    more_smooth: bool = False

    def __post_init__(self) -> None:
        check_at_least(0, ", use 0 for no guidance", cfg=self.cfg)
        check_flags(more_smooth=self.more_smooth)
        for value in self.by_scale:
            Processor(value, self.top_k, self.top_p)
            if self.more_smooth and value != 1:
                raise ValueError(
                    f"more_smooth must be off at temperature {value}, which does not change its "
                    "soft codes; leave it out, or give temperature=1"
                )

    def check(self, vocabulary: int, scales: int) -> None:
        """Raise ``ValueError`` when these options do not fit a model of V tokens and K scales."""
        self.filter.check_vocabulary(vocabulary)
        if isinstance(self.temperature, tuple) and len(self.temperature) != scales:
            raise ValueError(
                f"temperature must be one or one for each of {scales} scales, "
                f"got {self.temperature}"
            )

    @property
    def settings(self) -> dict[str, object]:
        """The options that shape the distribution, for certificates."""
        hottest = Processor(max(self.by_scale), self.top_k, self.top_p).settings
        settings: dict[str, object] = {**hottest, "temperature": self.temperature, "cfg": self.cfg}
        if self.more_smooth:
            del settings["temperature"]
            settings["more_smooth"] = True
        return settings

    @property
    def by_scale(self) -> tuple[float, ...]:
        """The temperatures by scale, or the one that all scales share."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    @property
    def filters(self) -> bool:
        """Whether top-k or top-p exclude anything."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def filter(self) -> Processor:
        """Top-k and top-p as one filter."""
        return Processor(1.0, self.top_k, self.top_p)

    def weight(self, k: int, scales: int) -> float:
        """The guidance weight t at scale ``k``."""
        return self.cfg * progress(k, scales)

    def temperature_at(self, k: int) -> float:
        """The temperature at scale ``k``."""
        return self.temperature[k] if isinstance(self.temperature, tuple) else self.temperature

    def masked(self, logits: Tensor) -> Tensor:
        """``logits`` [B, T, V] with -inf for what top-k and then top-p exclude; ties stay."""
        return self.filter.scores(logits)

    def weights(self, logits: Tensor, k: int) -> Tensor:
        """The distribution of scale ``k`` up to a factor, [B, T, V]."""
        temperature = self.temperature_at(k)
        if temperature == 0:
            return one_hot(likeliest(logits), logits)
        probs = (logits if temperature == 1 else logits / temperature).softmax(-1)
        # a CPU multiplies by the mask twice as fast as it fills by it
        return probs * torch.ge(logits, self.filter.threshold(logits)) if self.filters else probs

    def probs(self, logits: Tensor, k: int) -> Tensor:
        """The distribution [B, T, V] that is sampled at scale ``k``."""
        weights = self.weights(logits, k)
        return weights / weights.sum(-1, keepdim=True)


def progress(k: int, scales: int) -> float:
    """Position of scale ``k`` in the schedule, from 0 to 1."""
    return k / max(scales - 1, 1)


class ScaleTokens(NamedTuple):
    """Tokens [B, T] of a scale; under ``more_smooth`` weights [B, T, V] over the codebook, too."""

    tokens: Tensor
    weights: Tensor | None = None


class ScaleSampler(Protocol):
    """Chooses the tokens of scale after scale."""

    def draw(self, logits: Tensor, k: int) -> ScaleTokens:
        """The tokens of scale ``k`` from guided ``logits`` [B, T, V]."""


def soften(masked: Tensor, noise: Tensor, done: float) -> Tensor:
    """Weights [B, T, V] of ``more_smooth``: a Gumbel softmax, harder as ``done`` goes to 1."""
    temperature = max(0.27 * (1 - 0.95 * done), 0.005)
    return torch.add(noise, masked, alpha=1 + done).div_(temperature).softmax(-1)


def gumbel(uniforms: Tensor) -> Tensor:
    """Standard Gumbel noise of ``uniforms`` in [0, 1)."""
    return uniforms.log().neg_().log_().neg_()


@dataclass
class InverseCDF:
    """Draws each token by one uniform and the inverse cumulative distribution: the fastest way."""

    sampling: Sampling
    uniforms: UniformSource
    scales: int

    def draw(self, logits: Tensor, k: int) -> ScaleTokens:
        """The tokens of scale ``k`` from ``logits`` [B, T, V]."""
        if self.sampling.more_smooth:
            masked = self.sampling.masked(logits)
            noise = gumbel(self.uniforms.draw(logits[0].numel()).view(logits.shape))
            weights = soften(masked, noise, progress(k, self.scales))
            return ScaleTokens(likeliest(weights), weights)
        if self.sampling.temperature_at(k) == 0:
            return ScaleTokens(likeliest(logits))
        weights = self.sampling.weights(logits, k)
        return ScaleTokens(categorical(weights, self.uniforms.draw(logits.shape[1])))


@dataclass
class ReleaseSampler:
    """Top-k, top-p by sorting, multinomial, as released; a picture depends on its batch.

    Raises ``ValueError`` for a temperature of 0, by which the release divides.
    """

    sampling: Sampling
    generator: torch.Generator
    scales: int

    def __post_init__(self) -> None:
        if not all(map(self.sampling.temperature_at, range(self.scales))):
            raise ValueError(
                "temperature must be above 0 for the release's sampler, got 0; "
                "top_k=1 is its greedy"
            )

    def draw(self, logits: Tensor, k: int) -> ScaleTokens:
        """See ``ScaleSampler``; under ``more_smooth`` the drawn tokens stay unused, as released."""
        masked = sorted_mask(logits, self.sampling.top_k, self.sampling.top_p)
        probs = (masked / self.sampling.temperature_at(k)).softmax(-1)
        rows = probs.flatten(0, 1)
        drawn = torch.multinomial(rows, 1, replacement=True, generator=self.generator)
        tokens = drawn.view(probs.shape[:2])
        if not self.sampling.more_smooth:
            return ScaleTokens(tokens)
        noise = torch.empty_like(masked).exponential_(generator=self.generator).log_().neg_()
        return ScaleTokens(tokens, soften(masked, noise, progress(k, self.scales)))

    def burn(self, schedule: ScaleSchedule, batch: int, vocabulary: int, scales: int) -> None:
        """Use up the numbers that the released refiner draws for the first ``scales`` scales.

        The release discards them. ``multinomial`` draws one exponential a token, so no logits are
        needed. Raises ``ValueError`` under ``more_smooth``: no recorded run shows how many numbers
        it discards.
        """
        if scales and self.sampling.more_smooth:
            raise ValueError(
                "more_smooth must be off for the release's sampler with two models, got it on; "
                "leave it out"
            )
        for k in range(scales):
            shape = batch * schedule.tokens(k), vocabulary
            skipped = torch.empty(shape, dtype=torch.float32, device=self.generator.device)
            skipped.exponential_(generator=self.generator)


def sorted_mask(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """``logits`` [B, T, V] with -inf for excluded tokens; the sort breaks ties at top-p's edge."""
    if top_k:
        logits = logits.masked_fill(logits < kth_largest(logits, top_k), float("-inf"))
    if top_p == 1:
        return logits
    ascending, order = logits.sort(-1)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[..., -1] = False
    return logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
