"""The release's own sampler, draw for draw: one generator for the whole batch, for comparisons with recorded runs.

Shape letters: B batch, T tokens of a scale, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.image_ar.scales.ladder import Ladder
from specmm.image_ar.scales.sampling import Choice, Sampling, progress, soften


class Release:
    """Top-k, top-p by sorting, multinomial; a picture drawn so changes with its batch."""

    def __init__(self, sampling: Sampling, generator: torch.Generator, scales: int) -> None:
        self.sampling, self.generator, self.scales = sampling, generator, scales

    def draw(self, logits: Tensor, k: int) -> Choice:
        """Choose the tokens of scale ``k``; under ``more_smooth`` they are drawn first and go unused, as there."""
        masked = sorted_mask(logits, self.sampling.top_k, self.sampling.top_p)
        law = (masked / self.sampling.heat(k)).softmax(-1)
        tokens = torch.multinomial(law.flatten(0, 1), 1, replacement=True, generator=self.generator)
        if not self.sampling.more_smooth:
            return Choice(tokens.view(law.shape[:2]))
        noise = torch.empty_like(masked).exponential_(generator=self.generator).log_().neg_()
        return Choice(tokens.view(law.shape[:2]), soften(masked, noise, progress(k, self.scales)))

    def burn(self, ladder: Ladder, batch: int, vocabulary: int, scales: int) -> None:
        """Use the numbers that the released refiner draws for the first ``scales`` scales and throws away.

        A draw of ``multinomial`` is a race of exponentials, one a token, so no logits are needed for that.
        """
        for k in range(scales):
            torch.empty(batch * ladder.tokens(k), vocabulary).exponential_(generator=self.generator)


def sorted_mask(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """``logits`` [B, T, V] with -inf for what is taken away: of equals at the nucleus's edge the sort decides."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], float("-inf"))
    if top_p == 1:
        return logits
    ascending, order = logits.sort(-1)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[..., -1] = False
    return logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
