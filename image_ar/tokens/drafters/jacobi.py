"""Speculative Jacobi decoding: drafts without a drafter (SJD, Teng et al. 2024, arXiv 2410.01699).

The window after the root is a chain. A round's forward gives the target's distribution at every
place of the window under the drafts before it; from these newest distributions the next round's
drafts are drawn.

Without ``coupled`` all drafts are drawn again. Every draft's distribution is then fixed before its
uniform is drawn, as a function of everything earlier rounds revealed (accepted tokens, all drafts,
the recovered token), and no uniform is used twice. So, given all that was revealed, the draft has
the distribution the tree records, under any exact rule.

``coupled`` drafts change as rarely as possible (MC-SJD, So et al. 2025, arXiv 2510.24211, and the
adaptive continuation of SJD-PAC, arXiv 2603.18599): a draft x of distribution q stays with
probability min(1, p(x) / q(x)) under the newest p, and else is redrawn from norm((p - q)+). It then
has distribution p, and mostly follows the same tokens as before. That is exact for rules that test
a draft without looking at later ones: given all drafts at all earlier places, in all rounds, every
p of a place and the round that tests it are fixed, and its drafts are a chain of such couplings,
the last of which is the rule's. Bottom-up rules look at later drafts, so the round in which a place
is tested depends on its draft: see the enumeration in tests/unit/verify/test_jacobi.py.

A place that enters the window has no such distribution yet. ``init`` chooses its first one (the
paper's section 4.3): the distribution of the last place scored (``"last"``), the token to the
``"left"`` or ``"above"``, or any token (``"random"``). A neighbour's token is a point mass: it is
fixed by the tokens drawn before it, the earlier drafts of the window included.

Places are numbered in raster order. A row of ``line`` tokens has ``columns`` picture tokens and
then, in some models, one that ends it.

Shape letters: B batch, W window, N = W + 1 nodes, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specmm.core.drafter import Feedback
from specmm.core.drawing import DrawingTarget
from specmm.core.randomness import UniformSource, categorical
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape, at_nodes
from specmm.extending.kinds import check_kind
from specmm.methods.images import Init
from specmm.verify.exact import Trial, strict_step

# Share of the newest distribution at the first place of a coupled window. The token before it has
# just been replaced, so that the newest distribution is as much out of date as the one before, and
# what both agree on is kept more often: tau 2.52 instead of 2.41 on pocket/llamagen (window 11).
NEWEST = 0.6


class Earlier(NamedTuple):
    """The last round's drafts at a window's places: ``tokens`` [B, W], their distributions
    ``probs`` [B, W, V], and whether the place had a draft (``there`` [B, W] bool).
    """

    tokens: Tensor
    probs: Tensor
    there: Tensor


class JacobiDrafter:
    """Drafts a chain of ``window`` tokens from the target's distributions of the last round.

    ``init`` chooses the first draft of a place that enters the window. ``coupled`` needs a rule
    that works from the root down. Raises ``ValueError`` for a window that does not fit into a
    picture and for an unknown ``init``.
    """

    state: ClassVar[tuple[str, ...]] = ("order", "tokens", "root")

    def __init__(
        self, target: DrawingTarget, window: int = 16, init: Init = "last", coupled: bool = False
    ) -> None:
        if not 1 <= window < target.length:
            raise ValueError(f"window must be in [1, {target.length - 1}], got {window}")
        self.target = target
        check_kind(Init, init=init)
        self.init = init
        self.coupled = coupled
        self.steadied = coupled and not target.processor.greedy
        self.shape = TreeShape.chain(window, target.device)
        self.window = window
        self.max_nodes = window + 1
        self.max_depth = window

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch."""
        token = feedback.token
        self.order = torch.arange(self.window, device=token.device)
        with torch.inference_mode(False):  # as a cache's: a compiled round writes them
            # each row's drawn and drafted tokens, by place, and the root's place
            self.tokens = token.new_zeros(len(token), self.target.length + self.window + 1)
            self.root = torch.zeros_like(token)

    def start_row(self, row: int) -> None:
        """Does nothing: the next feedback holds all needed state."""

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """A window drawn by the target's last distributions, coupled to its last drafts."""
        earlier = self.earlier(feedback) if self.coupled else None
        probs = self.newest(feedback, earlier)
        if not self.coupled:
            drafts = categorical(probs[:, 1:], uniforms.draw(self.window))
        else:
            stay, draw = uniforms.draw(2 * self.window).chunk(2, dim=1)
            old, chance, residual = self.coupling(earlier, probs)
            drafts = torch.where(stay < chance, old, categorical(residual, draw))
        return self.begun(feedback, probs, drafts)

    def newest(self, feedback: Feedback, earlier: Earlier | None) -> Tensor:
        """Distributions [B, N, V] to draw the window from: the target's of the last round, shifted
        by the accepted tokens; for unscored places the last place's, or uniform.

        If ``steadied``, the first draft's is mixed with the ``earlier`` round's for that place.
        """
        newest = feedback.output.probs
        if feedback.result is None:
            probs = newest[:, -1:].repeat(1, self.window + 1, 1)
        else:
            # the node whose distribution is each place's; the root's own is never read
            source = feedback.result.kept[:, None] - 1 + self.shape.depths  # [B, N]
            probs = at_nodes(newest, source.clamp(0, self.window))
        if self.init != "last":
            self._read(feedback)
        if self.init == "random":
            places = self.root[:, None] + 1 + self.order
            flat = _anything(self.target, places, probs)
            enters = self.order >= self._scored(feedback)[:, None]
            probs[:, 1:] = torch.where(enters[..., None], flat, probs[:, 1:])
        if self.steadied and earlier is not None:
            before, there = earlier.probs[:, :1], earlier.there[:, :1]
            mixed = torch.lerp(before, probs[:, 1:2], NEWEST)
            probs[:, 1:2] = torch.where(there[..., None], mixed, probs[:, 1:2])
        return probs

    def earlier(self, feedback: Feedback) -> Earlier | None:
        """The last round's drafts at the window's places; None after a prefill."""
        if feedback.result is None:
            return None
        tree, result = feedback.drafted
        assert tree.probs is not None, "of this drafter's own tree"
        node = result.kept[:, None] + 1 + self.order
        there = feedback.continued(node <= self.window)
        node = node.clamp(max=self.window)
        return Earlier(tree.tokens.gather(1, node), at_nodes(tree.probs, node), there)

    def coupling(self, earlier: Earlier | None, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each place's draft of the last round [B, W], the probability that it stays, and the
        (unnormalised) distribution [B, W, V] of its replacement. Together they give ``probs`` [B,
        N, V].
        """
        now = probs[:, 1:]
        if earlier is None:
            never = torch.zeros_like(now[..., 0])
            return never.long(), never, now
        old, before, there = earlier
        chance, residual = strict_step(now, Trial(old, before * there[..., None], 0))
        return old, chance * there, residual

    def begun(self, feedback: Feedback, probs: Tensor, drafts: Tensor) -> DraftTree:
        """The tree of ``drafts`` [B, W] from ``probs`` [B, N, V]; at places that enter the window,
        copies of neighbours' tokens replace both.
        """
        if self.init in NEIGHBOURS:
            places = self.root[:, None] + 1 + self.order
            scored = self._scored(feedback)
            self.tokens.scatter_(1, places, drafts)
            source = NEIGHBOURS[self.init](places, self.root + scored, self.target)
            guesses = self.tokens.gather(1, source.clamp(min=0))
            guessed = (self.order >= scored[:, None]) & (source >= 0)
            drawn = probs[:, 1:].mul_(~guessed[..., None])
            drawn.scatter_add_(-1, guesses[..., None], guessed[..., None].to(probs.dtype))
            drafts = torch.where(guessed, guesses, drafts)
        return DraftTree(torch.cat([feedback.token[:, None], drafts], dim=1), self.shape, probs)

    def _read(self, feedback: Feedback) -> None:
        """Record the tokens that the last round drew."""
        if feedback.result is None or feedback.tokens is None:
            self.tokens[:, 0] = feedback.token
            return
        before = self.root
        if feedback.fresh is not None:
            before = torch.where(feedback.fresh, -1, before)
        places = before[:, None] + 1 + self.shape.depths
        self.tokens.scatter_(1, places, feedback.tokens)
        self.root.copy_(before + feedback.result.kept)

    def _scored(self, feedback: Feedback) -> Tensor:
        """The number [B] of the window's places that the last round scored."""
        if feedback.result is None:
            return torch.zeros_like(self.root)
        scored = (self.window + 1 - feedback.result.kept).clamp(max=self.window)
        return scored if feedback.fresh is None else scored.masked_fill(feedback.fresh, 0)


def left_neighbours(places: Tensor, known: Tensor, target: DrawingTarget) -> Tensor:
    """The place to the left of each of ``places`` [B, W], at most ``known`` [B].

    A picture's row that has no known place, and a token that ends a row, take their upper
    neighbours (:func:`upper_neighbours`).
    """
    left = torch.minimum(places - 1, known[:, None])
    column = places % target.line
    inside = (left >= places - column) & (column < target.columns)
    return torch.where(inside, left, upper_neighbours(places, known, target))


def upper_neighbours(places: Tensor, known: Tensor, target: DrawingTarget) -> Tensor:
    """The nearest place above each of ``places`` [B, W], at most ``known`` [B].

    Without such a place: the latest known place, or -1 for a token that ends a row.
    """
    latest = known[:, None]
    above = places - target.line
    ahead = (above - latest).clamp(min=0)  # as many rows up as it takes to be known
    above = above - (ahead + target.line - 1) // target.line * target.line
    if target.columns < target.line:
        latest = torch.where(places % target.line < target.columns, latest, -1)
    return torch.where(above >= 0, above, latest)


NEIGHBOURS = {"left": left_neighbours, "above": upper_neighbours}


def _anything(target: DrawingTarget, places: Tensor, like: Tensor) -> Tensor:
    """The uniform distribution [B, W, V] over the tokens allowed at ``places`` [B, W]."""
    if target.allowed is None:
        return torch.full_like(like[:, 1:], 1 / like.shape[-1])
    masks = target.allowed.at(places).to(like.dtype)
    return masks / masks.sum(-1, keepdim=True)
