"""From VAR's logits to tokens: guidance by scale, top-k and top-p, temperature, and three ways to
Draw the uniforms.

Every way takes one generator a picture, so that a picture's uniforms do not depend on its batch;
``release`` has the official one, which takes a generator for all. Source: VAR (arXiv 2404.02905),
released sampler. Shape letters: B batch, T tokens of a scale, V vocabulary, K scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specmm.processors import Processor
from specmm.randomness import Uniforms, UniformSource, categorical


@dataclass(frozen=True)
class Sampling:
    """Options of one run; ``temperature`` may differ by scale, and divides after the filters, not
    before.

    Guidance grows over the scales: at scale k logits are (1 + t) cond - t null with t = ``cfg`` · k
    / (K - 1), so 0 is none. ``more_smooth`` feeds soft codes to the next scale: prettier pictures,
    another distribution, that no temperature changes. Raises ``ValueError`` on options out of
    range.
    """

    cfg: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    temperature: float | tuple[float, ...] = 1.0
    more_smooth: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.cfg < float("inf"):
            raise ValueError(
                f"cfg must be finite and at least 0, got {self.cfg}, use 0 for no guidance"
            )
        for value in (
            self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)
        ):
            Processor(value, self.top_k, self.top_p)
            if self.more_smooth and value == 0:
                raise ValueError(
                    "more_smooth must be off at temperature 0: its soft codes are drawn at any temperature"
                )

    def check(self, vocabulary: int, scales: int) -> None:
        """Raise ``ValueError`` when these options do not fit a model of V tokens and K scales."""
        self.filter.check_vocabulary(vocabulary)
        if isinstance(self.temperature, tuple) and len(self.temperature) != scales:
            raise ValueError(
                f"temperature must be one or one for each of {scales} scales, got {self.temperature}"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """The options that shape the distribution, for certificates: those of the filters that are
        on.
        """
        smooth = {"more_smooth": True} if self.more_smooth else {}
        return self.filter.settings | {"temperature": self.temperature, "cfg": self.cfg} | smooth

    @property
    def filters(self) -> bool:
        """Whether top-k or top-p take anything away."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def filter(self) -> Processor:
        """Top-k and top-p."""
        return Processor(1.0, self.top_k, self.top_p)

    def weight(self, k: int, scales: int) -> float:
        """The guidance weight t at scale ``k``."""
        return self.cfg * progress(k, scales)

    def temperature_at(self, k: int) -> float:
        """The temperature at scale ``k``."""
        return self.temperature[k] if isinstance(self.temperature, tuple) else self.temperature

    def masked(self, logits: Tensor) -> Tensor:
        """``logits`` [B, T, V] with -inf for what top-k and then top-p take away; equals stay
        together.
        """
        if not self.filters:
            return logits
        return logits.masked_fill(logits < self.filter.threshold(logits), float("-inf"))

    def weights(self, logits: Tensor, k: int) -> Tensor:
        """The distribution of scale ``k`` up to a factor, [B, T, V]: what is taken away is
        multiplied by 0.

        (A CPU multiplies twice as fast as it fills by a mask.)
        """
        temperature = self.temperature_at(k)
        if temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = (logits if temperature == 1 else logits / temperature).softmax(-1)
        return probs * torch.ge(logits, self.filter.threshold(logits)) if self.filters else probs

    def probs(self, logits: Tensor, k: int) -> Tensor:
        """The distribution [B, T, V] that is sampled at scale ``k``."""
        weights = self.weights(logits, k)
        return weights / weights.sum(-1, keepdim=True)


def progress(k: int, scales: int) -> float:
    """How far up the schedule scale ``k`` is, in [0, 1]."""
    return k / max(scales - 1, 1)


class Choice(NamedTuple):
    """Tokens [B, T] of a scale, and the soft weights [B, T, V] over the codebook under
    ``more_smooth``.
    """

    tokens: Tensor
    weights: Tensor | None = None


class Sampler(Protocol):
    """Throws the uniforms, scale after scale."""

    def draw(self, logits: Tensor, k: int) -> Choice:
        """Choose the tokens of scale ``k`` from guided ``logits`` [B, T, V]."""


def soften(masked: Tensor, noise: Tensor, done: float) -> Tensor:
    """Weights [B, T, V] of ``more_smooth``: a Gumbel softmax that hardens as ``done`` goes from 0
    to 1.
    """
    temperature = max(0.27 * (1 - 0.95 * done), 0.005)
    return torch.add(noise, masked, alpha=1 + done).div_(temperature).softmax(-1)


def gumbel(uniforms: Tensor) -> Tensor:
    """Standard Gumbel noise of ``uniforms`` in [0, 1)."""
    return uniforms.log().neg_().log_().neg_()


class Inverse:
    """One uniform number a token, through the inverse of the cumulative distribution: the fastest
    way.
    """

    def __init__(self, sampling: Sampling, uniforms: UniformSource, scales: int) -> None:
        self.sampling, self.uniforms, self.scales = sampling, uniforms, scales

    def draw(self, logits: Tensor, k: int) -> Choice:
        """Choose the tokens of scale ``k``."""
        if self.sampling.more_smooth:
            masked = self.sampling.masked(logits)
            noise = gumbel(self.uniforms.draw(logits[0].numel()).view(logits.shape))
            weights = soften(masked, noise, progress(k, self.scales))
            return Choice(weights.argmax(-1), weights)
        if self.sampling.temperature_at(k) == 0:
            return Choice(logits.argmax(-1))
        return Choice(
            categorical(self.sampling.weights(logits, k), self.uniforms.draw(logits.shape[1]))
        )


class Race:
    """Gumbel noise for every place and token: the token is the argmax of logits plus noise.

    The noise of a scale stays the same until ``forget``, so that two models that choose with it
    agree as often as any coupling of this kind allows, and each of them alone follows its own
    distribution. Scales from ``coupled`` on, which one model alone draws, take a uniform number a
    token instead, as ``Inverse`` does.
    """

    def __init__(self, sampling: Sampling, uniforms: Uniforms, coupled: int) -> None:
        self.sampling, self.uniforms, self.coupled = sampling, uniforms, coupled
        self.noise: dict[int, Tensor] = {}

    def draw(self, logits: Tensor, k: int) -> Choice:
        """Choose the tokens of scale ``k`` with its noise, made at the first call: scales must
        first come in order.
        """
        if self.sampling.temperature_at(k) == 0:
            return Choice(logits.argmax(-1))
        if k not in self.noise:
            self.noise[k] = self._fresh(logits, k)
        if k >= self.coupled:
            return Choice(categorical(self.sampling.weights(logits, k), self.noise[k]))
        return Choice(
            (self.sampling.masked(logits) / self.sampling.temperature_at(k) + self.noise[k]).argmax(
                -1
            )
        )

    def _fresh(self, logits: Tensor, k: int) -> Tensor:
        """Gumbel noise [B, T, V], or uniforms [B, T] where nothing is coupled."""
        if k >= self.coupled:
            return self.uniforms.draw(logits.shape[1])
        return gumbel(self.uniforms.draw(logits[0].numel()).view(logits.shape))

    def forget(self, k: int) -> None:
        """Drop the noise of scales below ``k``."""
        self.noise = {i: noise for i, noise in self.noise.items() if i >= k}
