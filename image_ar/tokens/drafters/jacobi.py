"""Speculative Jacobi decoding: drafts without a drafter (SJD, Teng et al. 2024, arXiv 2410.01699).

The window after the root is a chain. A round's forward gives the target's distribution at every
place of the window under the drafts before it; whatever is not kept is drawn afresh from these
newest distributions, and the next round verifies it.

Why that is exact: the distribution of every draft is settled before its uniform is drawn, as a
function of what earlier rounds revealed (kept tokens, all drafts, the recovered token), and no
uniform is used twice; so given all that was revealed the draft has the distribution the tree
records, under any exact rule. A draft kept over a round would not: rules that work bottom-up look
at every draft of a round, so the round's outcome tells about it.

A place that enters the window has no such distribution yet. ``init`` says what it begins with
(the paper's section 4.3): the distribution of the last place scored (``"last"``), the token to the
``"left"`` or ``"above"``, or any token (``"random"``). A neighbour's token is a point mass: it is
settled by what was drawn before it, the earlier drafts of the window included.

Shape letters: B batch, W window, N = W + 1 nodes, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.drafter import Feedback
from specmm.drawing import DrawingTarget
from specmm.image_ar.tokens.raster import left_neighbours, upper_neighbours
from specmm.methods.images import Init, check_init
from specmm.randomness import UniformSource, categorical
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape
from specmm.verify.exact import one_hot


class JacobiDrafter:
    """Drafts a chain of ``window`` tokens from the target's distributions of the round before.

    Places that enter the window begin with what ``init`` says. Raises ``ValueError`` for a window
    that does not fit into a picture and for an unknown ``init``.
    """

    def __init__(self, target: DrawingTarget, window: int = 16, init: Init = "last") -> None:
        if not 1 <= window < target.length:
            raise ValueError(f"window must be in [1, {target.length - 1}], got {window}")
        self.target = target
        check_init(init)
        self.init = init
        self.shape = TreeShape.chain(window, target.device)
        self.window = window
        self.max_nodes = window + 1
        self.max_depth = window

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch."""
        token = feedback.token
        self.order = torch.arange(self.window, device=token.device)
        with torch.inference_mode(False):  # as a cache's: a compiled round writes them
            # what is drawn and drafted of each row, by place, and the root's place
            self.tokens = token.new_zeros(len(token), self.target.length + self.window + 1)
            self.root = torch.zeros_like(token)

    def start_row(self, row: int) -> None:
        """Nothing to do: the next feedback tells."""

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Draw the window after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        probs = self._newest(feedback)
        if self.init == "last":
            drafts = categorical(probs[:, 1:], uniforms.draw(self.window))
        else:
            self._read(feedback)
            drafts = self._guessed(feedback, probs, uniforms.draw(self.window))
        return DraftTree(torch.cat([feedback.token[:, None], drafts], dim=1), self.shape, probs)

    def _newest(self, feedback: Feedback) -> Tensor:
        """The window's newest distributions [B, N, V]: the last place's where there is none."""
        newest = feedback.output.probs
        probs = newest.new_zeros(len(newest), self.window + 1, newest.shape[-1])
        probs[:, 1:] = newest[:, -1:]
        if feedback.result is not None:
            # the node that predicts each place
            source = feedback.result.kept[:, None] + self.order  # [B, W]
            place = source.clamp(max=self.window)[..., None].expand(-1, -1, newest.shape[-1])
            probs[:, 1:] = newest.gather(1, place)
        return probs

    def _read(self, feedback: Feedback) -> None:
        """Note what the last round drew."""
        if feedback.result is None or feedback.tokens is None:
            self.tokens[:, 0] = feedback.token
            return
        before = self.root
        if feedback.fresh is not None:
            before = torch.where(feedback.fresh, -1, before)
        steps = torch.arange(1, self.window + 2, device=before.device)
        self.tokens.scatter_(1, before[:, None] + steps, feedback.tokens)
        self.root.copy_(before + feedback.result.kept)

    def _scored(self, feedback: Feedback) -> Tensor:
        """How many places of the window [B] have a distribution from the last round."""
        if feedback.result is None:
            return torch.zeros_like(self.root)
        scored = (self.window + 1 - feedback.result.kept).clamp(max=self.window)
        return scored if feedback.fresh is None else scored.masked_fill(feedback.fresh, 0)

    def _guessed(self, feedback: Feedback, probs: Tensor, uniforms: Tensor) -> Tensor:
        """Drafts [B, W] by ``uniforms`` from ``probs`` [B, N, V], which are changed to what the
        places that enter the window are drawn from.
        """
        places = self.root[:, None] + 1 + self.order
        known = self.root + self._scored(feedback)
        enters = places > known[:, None]
        if self.init == "random":
            flat = _anything(self.target, places, probs)
            probs[:, 1:] = torch.where(enters[..., None], flat, probs[:, 1:])
            return categorical(probs[:, 1:], uniforms)
        drafts = categorical(probs[:, 1:], uniforms)
        self.tokens.scatter_(1, places, drafts)
        source = NEIGHBOURS[self.init](places, known, self.target)
        guesses = self.tokens.gather(1, source.clamp(min=0))
        guessed = enters & (source >= 0)
        probs[:, 1:] = torch.where(guessed[..., None], one_hot(guesses, probs), probs[:, 1:])
        return torch.where(guessed, guesses, drafts)


NEIGHBOURS = {"left": left_neighbours, "above": upper_neighbours}


def _anything(target: DrawingTarget, places: Tensor, like: Tensor) -> Tensor:
    """The uniform distribution [B, W, V] over the tokens that may come at ``places`` [B, W]."""
    if target.allowed is None:
        return torch.full_like(like[:, 1:], 1 / like.shape[-1])
    masks = target.allowed.at(places).to(like.dtype)
    return masks / masks.sum(-1, keepdim=True)
