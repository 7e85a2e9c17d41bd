"""The loop's interface to a drafter: it sees the last round's results and proposes a tree.

Shape letters: B batch, R rows (all guidance branches), N nodes, D deepest level, C width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.core.cache import branched
from specmm.core.randomness import UniformSource
from specmm.core.state import with_one, without
from specmm.core.stats import Clock
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape, at_nodes
from specmm.extending.registry import maker_of
from specmm.verify.rule import Rule, VerifyResult


@dataclass
class Feedback:
    """The results of a round, rejected drafts included.

    ``output`` is the target's, ``token`` [B] the new root. After the first round there are also the
    scored ``tree``, its ``result``, and the committed ``tokens`` [B, D + 1] (only the first
    ``result.kept`` are real). Rows marked ``fresh`` [B] have just started. The rule ``accepted``
    [B] nodes; a row that ends may commit fewer. ``checks`` [3] are finite if the target's logits
    (the first two) and the drafter's distributions (the last) are.
    """

    output: TargetOutput
    token: Tensor
    tree: DraftTree | None = None
    result: VerifyResult | None = None
    tokens: Tensor | None = None
    fresh: Tensor | None = None
    accepted: Tensor | None = None
    checks: Tensor | None = None

    @property
    def drafted(self) -> tuple[DraftTree, VerifyResult]:
        """The tree and its result; only after a round."""
        assert self.tree is not None and self.result is not None
        return self.tree, self.result

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the next round may read, by name, without fixed tree shapes."""
        tree, result = self.drafted
        tensors = {
            "probs": self.output.probs,
            "hidden": self.output.hidden,
            "token": self.token,
            "nodes": tree.tokens,
            "parents": None if tree.shape.fixed else tree.shape.parents,
            "drawn_from": tree.probs,
            "path": result.path,
            "kept": result.kept,
            "next_token": result.next_token,
            "excess": result.excess,
            "tokens": self.tokens,
            "fresh": self.fresh,
            "accepted": self.accepted,
            "checks": self.checks,
        }
        return {name: value for name, value in tensors.items() if value is not None}

    def held(self, by: Mapping[str, Tensor]) -> Feedback:
        """A copy with its tensors replaced by those ``by`` name."""
        tree = self.drafted[0]
        shape = tree.shape
        if not shape.fixed:  # another object, since one keeps what is computed of it
            shape = TreeShape(by["parents"], shape.depth, shape.width)
        return Feedback(
            TargetOutput(by["probs"], by["hidden"]),
            by["token"],
            DraftTree(by["nodes"], shape, by.get("drawn_from"), tree.drafted),
            VerifyResult(by["path"], by["kept"], by["next_token"], by.get("excess")),
            by["tokens"],
            by.get("fresh"),
            by["accepted"],
            by.get("checks"),
        )

    def joined(self) -> Feedback:
        """A copy with one more row, which must then be started."""
        return self._each_row(with_one)

    def left(self, row: int) -> Feedback:
        """A copy without ``row``; the last row takes its place."""
        return self._each_row(lambda x: without(x, row))

    def _each_row(self, change: Callable[[Tensor], Tensor]) -> Feedback:
        shared = ("checks", "parents") if self.drafted[0].shape.shared else ("checks",)
        tensors = self.tensors()
        return self.held({k: x if k in shared else change(x) for k, x in tensors.items()})

    def continued(self, there: Tensor) -> Tensor:
        """``there`` [B, n] bool with False for rows that have just started."""
        return there if self.fresh is None else there & ~self.fresh[:, None]

    def kept_hidden(self) -> Tensor:
        """Hidden states [R, D + 1, C] of the path; only the first ``result.kept`` count."""
        assert self.result is not None
        hidden = self.output.hidden
        path = branched(self.result.path.clamp(min=0), len(hidden) // len(self.token))
        return at_nodes(hidden, path)


def committed(tree: DraftTree, result: VerifyResult) -> Tensor:
    """The tokens of a round [B, D + 1]: accepted drafts, then the recovered or bonus token."""
    drafts = tree.tokens[:, 1:]
    if not tree.shape.is_chain:
        drafts = tree.tokens.gather(1, result.path[:, 1:].clamp(min=0))
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    return tokens.scatter_(1, result.kept[:, None] - 1, result.next_token[:, None])


@dataclass(frozen=True)
class DrafterVocabulary:
    """A drafter's v tokens among the target's V = ``size``: ``ids`` [v], None if it has all V."""

    size: int
    ids: Tensor | None = None

    @property
    def count(self) -> int:
        """v."""
        return self.size if self.ids is None else len(self.ids)

    @cached_property
    def shift(self) -> Tensor | None:
        """The offset [v] from a draft's id to the target's id (EAGLE-3's ``d2t``)."""
        if self.ids is None:
            return None
        return self.ids - torch.arange(self.count, device=self.ids.device)

    def to_target(self, drafts: Tensor) -> Tensor:
        """The target's ids [...] of the drafter's."""
        return drafts if self.ids is None else self.ids[drafts]

    def spread(self, probs: Tensor) -> Tensor:
        """Distributions ``probs`` [..., v] as distributions [..., V] over the target's tokens."""
        if self.ids is None:
            return probs
        return probs.new_zeros(*probs.shape[:-1], self.size).index_copy_(-1, self.ids, probs)


class Drafter(Protocol):
    """Proposes trees of at most ``max_nodes`` nodes and ``max_depth`` levels of drafts.

    It holds its own state of the batch, which ``begin`` resets. If its drafts depend on an earlier
    round's drafts at the same places, ``coupled`` must be true: see :func:`check_rule`.
    """

    max_nodes: int
    max_depth: int

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch after the target's prefill."""

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The next tree, whose root is ``feedback.token``.

        Every node must record the distribution it was drawn from
        (:class:`specmm.core.tree.DraftTree`).
        """


def looks_ahead(rule: object) -> bool:
    """Whether ``rule`` may use later drafts to decide about an earlier one. Third-party rules that
    do not declare ``bottom_up`` are assumed to.
    """
    return bool(getattr(rule, "bottom_up", bool(maker_of(rule))))


def check_rule(drafter: Drafter, rule: Rule) -> None:
    """Raise ``ValueError`` if ``drafter`` couples its drafts with the last round's and ``rule``
    :func:`looks_ahead`: then the order of tests would depend on the drafts. Tells a third-party
    drafter, whose trees are checked, which siblings the ``rule`` needs.
    """
    if getattr(drafter, "coupled", False) and looks_ahead(rule):
        raise ValueError(
            "coupled drafts need a rule that tests a draft before those after it, got "
            f"{rule.name}, which may look ahead: use recursive, coupled=False or, for a rule of "
            "your own that does not, its bottom_up = False"
        )
    serve: Callable[[Rule], None] | None = getattr(drafter, "serve", None)
    if serve is not None:
        serve(rule)


@runtime_checkable
class BatchingDrafter(Protocol):
    """A drafter whose rows can start new samples while other rows continue.

    The next feedback marks such rows as ``fresh``; their round committed one token, the first.
    """

    def start_row(self, row: int) -> None:
        """Replace the sample in ``row`` by the prompt that the target has just prefilled."""


class NoDrafts:
    """Proposes roots only: plain decoding in a loop whose rows can start new samples."""

    max_nodes = 1
    max_depth = 0

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        self.shape = TreeShape.chain(0, feedback.token.device)

    def start_row(self, row: int) -> None:
        """See :class:`BatchingDrafter`."""

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        return DraftTree(feedback.token[:, None], self.shape)


class DeferredDrafter:
    """``inner``, which begins only after a first round without drafts.

    So answers of two tokens do not pay for the drafter's prefill.
    """

    state: ClassVar[tuple[str, ...]] = ("inner",)

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.max_nodes = inner.max_nodes
        self.max_depth = inner.max_depth

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Remember the feedback with which ``inner`` will begin."""
        self._start: tuple[Feedback, Clock] | None = (feedback, clock)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The root alone in the first round, then the trees of ``inner``."""
        if feedback.result is None:
            return DraftTree(feedback.token[:, None], TreeShape.chain(0, feedback.token.device))
        if self._start is not None:
            self.inner.begin(*self._start)
            self._start = None
            feedback = widened(feedback, self.max_depth)
        return self.inner.propose(feedback, uniforms)


def widened(feedback: Feedback, depth: int) -> Feedback:
    """``feedback`` of a round with fewer levels of drafts, padded to ``depth`` levels."""
    if feedback.result is None or feedback.tokens is None:
        return feedback
    more = (0, depth + 1 - feedback.tokens.shape[1])
    result = replace(feedback.result, path=F.pad(feedback.result.path, more, value=-1))
    return replace(feedback, result=result, tokens=F.pad(feedback.tokens, more))
