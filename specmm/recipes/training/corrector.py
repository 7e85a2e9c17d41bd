"""Training of a corrector on the drafts that its target rejects while it draws by Jacobi decoding.

Shape letters: M places, R rows, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specmm.cache import branched
from specmm.decode import decode
from specmm.drafter import Feedback
from specmm.drawing import DrawingTarget
from specmm.image_ar.tokens.drafters.corrector import Corrector, CorrectorConfig
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter, rejected_draft
from specmm.methods import SJD
from specmm.randomness import Uniforms, UniformSource
from specmm.stats import Clock
from specmm.training import Losses, batch_rows, fit, seeded
from specmm.tree import DraftTree
from specmm.verify import Recursive

AT_ONCE = 32  # pictures
PLACES = 32  # a picture of a step


@dataclass(frozen=True)
class Replaced:
    """Places after a draft that was rejected: the tokens ``new`` [M] and ``old`` [M] in front of
    each, and the target's states [M, C] after either.
    """

    new: Tensor
    old: Tensor
    stale: Tensor
    true: Tensor

    def rows(self, some: Tensor) -> Replaced:
        """``some`` of them."""
        return Replaced(self.new[some], self.old[some], self.stale[some], self.true[some])


class ReplacedTokens:
    """Wraps a Jacobi drafter and notes what its target said of first places, before and after the
    token in front of them was replaced.
    """

    def __init__(self, drafter: JacobiDrafter, width: int) -> None:
        self.drafter = drafter
        self.width = width
        self.max_nodes = drafter.max_nodes
        self.max_depth = drafter.max_depth
        self.coupled = drafter.coupled
        self.noted: list[Replaced] = []
        self.pending: tuple[Tensor, Replaced] | None = None

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """See :class:`specmm.drafter.Drafter`."""
        self.pending = None
        self.drafter.begin(feedback, clock)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Note the last round, then let the drafter draft."""
        if feedback.result is not None:
            self._note(feedback)
        return self.drafter.propose(feedback, uniforms)

    def _note(self, feedback: Feedback) -> None:
        _, result = feedback.drafted
        goes_on = result.kept > 0
        old = rejected_draft(feedback, self.width)
        branches = len(old.state) // len(old.token)
        if self.pending is not None:
            rejected, found = self.pending
            true = feedback.output.hidden[:, 0, : self.width].bfloat16()
            shown = branched(rejected & goes_on, branches)
            self.noted.append(Replaced(found.new, found.old, found.stale, true).rows(shown))
        stale = old.state[:, 0].bfloat16()
        new, before = (branched(x, branches) for x in (feedback.token, old.token[:, 0]))
        self.pending = goes_on & old.there[:, 0], Replaced(new, before, stale, stale)


def replaced(
    target: DrawingTarget, prompt_of: Callable[[range], Any], pictures: int, seed: int
) -> Replaced:
    """What is replaced while ``target`` draws so many ``pictures`` by Jacobi decoding; the prompt
    of some of them is ``prompt_of`` these.
    """
    target.read_layers(())
    usual = SJD()
    window = min(usual.window, target.length - 1)
    found = []
    for first in tqdm(range(0, pictures, AT_ONCE), desc="draw"):
        some = range(first, min(first + AT_ONCE, pictures))
        drafter = JacobiDrafter(target, window, usual.init, usual.coupled)
        noting = ReplacedTokens(drafter, target.sizes.dim)
        uniforms = Uniforms.from_seeds([1_000_003 * seed + i for i in some], target.device)
        for _ in decode(target, noting, Recursive(), prompt_of(some), target.length, uniforms):
            pass
        # one by one, small tensors among a run's large ones keep memory from being given back
        found.append(gathered(noting.noted))
    return gathered(found)


def gathered(parts: Sequence[Replaced]) -> Replaced:
    """All ``parts`` as one."""
    names = ("new", "old", "stale", "true")
    return Replaced(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def train_corrector(
    target: DrawingTarget,
    places: Replaced,
    out: Path,
    *,
    inner: int,
    steps: int,
    batch: int,
    lr: float,
    overlap_weight: float,
    seed: int,
) -> Corrector:
    """Train on ``places``, at the target's temperature; resumes from ``out/checkpoint.pt``."""
    with seeded(seed):
        corrector = Corrector(CorrectorConfig(target.sizes, inner))
    target.network.requires_grad_(False)
    temperature = target.processor.temperature or 1.0

    def step(i: int) -> Losses:
        rows = batch_rows(i, batch * PLACES, len(places.new), seed)
        cross_entropy, overlap = corrector_loss(target, corrector, places.rows(rows), temperature)
        return {"loss": cross_entropy + overlap_weight * (1 - overlap), "overlap": overlap.detach()}

    fit(corrector, step, out=out, steps=steps, lr=lr)
    return corrector.eval()


def corrector_loss(
    target: DrawingTarget, corrector: Corrector, places: Replaced, temperature: float
) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy and mean overlap Σ min(p, q) of the target's distributions at ``places``
    with the corrected ones, both at ``temperature``.
    """
    dtype = target.dtype
    with torch.no_grad():
        new, old = (target.embed(tokens)[:, None] for tokens in (places.new, places.old))
        probs = _log_probs(target, places.true[:, None].to(dtype), temperature).exp()
    states = corrector(places.stale[:, None].to(dtype), new, old)
    drafted = _log_probs(target, states, temperature)
    overlap = torch.minimum(probs, drafted.exp()).sum(-1).mean()
    return -(probs * drafted).sum(-1).mean(), overlap


def _log_probs(target: DrawingTarget, states: Tensor, temperature: float) -> Tensor:
    """log p [M, 1, V] of ``states`` [M, 1, C]."""
    return (target.head(states).float() / temperature).log_softmax(-1)
