"""The release's own sampler, draw for draw: one generator for the whole batch, for comparisons with
recorded runs.

Shape letters: B batch, T tokens of a scale, V vocabulary, K scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specmm.image_ar.scales.sampling import Choice, Sampling, progress, soften
from specmm.image_ar.scales.scale_schedule import ScaleSchedule


class Release:
    """Top-k, top-p by sorting, multinomial; a picture drawn so changes with its batch.

    Raises ``ValueError`` for a temperature of 0, by which the release divides.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator, scales: int) -> None:
        if not all(map(sampling.temperature_at, range(scales))):
            raise ValueError(
                "temperature must be above 0 for the release's sampler, got 0; top_k=1 is its greedy"
            )
        self.sampling, self.generator, self.scales = sampling, generator, scales

    def draw(self, logits: Tensor, k: int) -> Choice:
        """Choose the tokens of scale ``k``; under ``more_smooth`` they are drawn first and go
        unused, as there.
        """
        masked = sorted_mask(logits, self.sampling.top_k, self.sampling.top_p)
        probs = (masked / self.sampling.temperature_at(k)).softmax(-1)
        tokens = torch.multinomial(
            probs.flatten(0, 1), 1, replacement=True, generator=self.generator
        )
        if not self.sampling.more_smooth:
            return Choice(tokens.view(probs.shape[:2]))
        noise = torch.empty_like(masked).exponential_(generator=self.generator).log_().neg_()
        return Choice(tokens.view(probs.shape[:2]), soften(masked, noise, progress(k, self.scales)))

    def burn(self, schedule: ScaleSchedule, batch: int, vocabulary: int, scales: int) -> None:
        """Use the numbers that the released refiner draws for the first ``scales`` scales and
        throws away.

        A draw of ``multinomial`` is a race of exponentials, one a token, so no logits are needed
        for that. Raises ``ValueError`` under ``more_smooth``, of which no run was recorded that
        would tell what is thrown away.
        """
        if scales and self.sampling.more_smooth:
            raise ValueError(
                "more_smooth must be off where the release's two models take turns, got it on"
            )
        for k in range(scales):
            shape = batch * schedule.tokens(k), vocabulary
            torch.empty(shape, device=self.generator.device).exponential_(generator=self.generator)


def in_turn(
    sampling: Sampling,
    state: Tensor,
    device: torch.device,
    schedule: ScaleSchedule,
    batch: int,
    vocabulary: int,
) -> Callable[[range], Release]:
    """A sampler for each model's turn: all begin with a generator in ``state``, as the release
    seeds both alike.
    """

    def sampler(steps: range) -> Release:
        generator = torch.Generator(device)
        generator.set_state(state)
        uniforms = Release(sampling, generator, len(schedule))
        uniforms.burn(schedule, batch, vocabulary, steps.start)
        return uniforms

    return sampler


def state_of(
    generator: torch.Generator | Sequence[torch.Generator] | None,
    device: torch.device,
    pictures: int,
    at_once: int,
) -> Tensor:
    """Where the numbers of a run begin: the state of the one generator, which is left as it is.

    Raises ``ValueError`` unless there is one, on ``device``, and all ``pictures`` are drawn
    ``at_once``.
    """
    if isinstance(generator, Sequence) or pictures > at_once:
        raise ValueError(
            f"release draws one batch from one generator: give one and a batch_size of at least {pictures}, "
            f"got batch_size {at_once}"
        )
    if generator is None:
        generator = torch.Generator(device)
        generator.seed()
    if generator.device.type != device.type:
        raise ValueError(
            f"release needs a generator on {device}, where the models are, got one on {generator.device}"
        )
    return generator.get_state()


def sorted_mask(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """``logits`` [B, T, V] with -inf for what is taken away: of equals at the nucleus's edge the
    sort decides.
    """
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], float("-inf"))
    if top_p == 1:
        return logits
    ascending, order = logits.sort(-1)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[..., -1] = False
    return logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
