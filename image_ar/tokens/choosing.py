"""What method ``auto`` takes for picture tokens.

Acceptance by level and rank is the model's (``settings.json``, measured when it was made); seconds
are this machine's, on the real model, for this batch size, measured once per process. Where nothing
can be planned, and where relaxed methods may be taken, whole pictures are drawn by all in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from specmm import autotune, methods
from specmm.autotune import Candidate, Measured, Plan, Rival
from specmm.decode import decode, decode_plain
from specmm.drawing import DrawingTarget
from specmm.image_ar.tokens.assemble import Method, PictureParts, assemble, llamagen
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.randomness import Uniforms
from specmm.shape.sequoia import best_tree
from specmm.tree import TreeShape
from specmm.verify import Recursive
from specmm.watching import tell

# nodes of the trees that auto considers, with the root; matrix kernels like multiples of 4
SIZES = (3, 4, 8, 12, 16, 24)
# the rule that acceptance by level and rank describes
PLANNED = methods.Speculative(rule="recursive")
# methods without a tree to choose, whose tau is measured as the drafters are trained, by setting
JACOBI: dict[str, Method] = {"sjd": methods.SJD()}
UNPLANNED: tuple[Method, ...] = (*JACOBI.values(), methods.PromptLookup(), methods.Speculative())
BORROWING = ((2.0, 10), (5.0, 20), (20.0, 60), (40.0, 100))  # λ and k of LANTERN++
PICTURES = 3  # drawn by each method in a race
MARGIN = 0.05  # what a method must gain at least
BEHIND = 0.7  # of another's speed: what is slower, and no nearer to the target, leaves a race


def settled(
    method: Method, target: DrawingTarget, parts: PictureParts, batch: int
) -> tuple[Any, str]:
    """``method``, or what auto takes in its place for ``batch`` pictures at a time, and why."""
    if not isinstance(method, methods.Auto):
        return method, ""
    made = planned_for(target, parts, batch, method)
    return method_of(made), made.reason


def ran_as(method: Method, decided: Method) -> str:
    """The name of a run by what ``method`` was ``decided`` to be."""
    return f"{method.name}: {decided}" if isinstance(method, methods.Auto) else str(method.name)


def method_of(plan: Plan) -> Method:
    """The speculative method with the planned tree, or what is run instead."""
    if plan.shape is None:
        return plan.draft_free or methods.AR()
    return replace(PLANNED, tree=tuple(int(p) for p in plan.shape.parents[0]))


def planned_for(
    target: DrawingTarget, parts: PictureParts, batch: int, auto: methods.Auto | None = None
) -> Plan:
    """The plan for ``batch`` pictures at a time, made once per process and kept in ``parts``.

    Where the block drafter's acceptance is not known, or there is none, all that serve are
    measured: SJD, a lookup where prompts are tokens, the block drafter. Where
    ``auto`` allows relaxed methods they are measured as well, beside the best of the exact ones.
    """
    threads = torch.get_num_threads()
    relaxed = auto if auto is not None and auto.relaxes else None
    guided = target.guidance if relaxed else target.guidance.branches  # speed knows no scale
    key = (batch, guided, threads, target.processor, target.length, relaxed)
    if key not in parts.plans:
        given = (target, parts, batch)
        parts.plans[key] = _relaxed(*given, relaxed.tv) if relaxed else _exact(*given)
    return parts.plans[key]


def _exact(target: DrawingTarget, parts: PictureParts, batch: int) -> Plan:
    """The plan of exact methods alone."""
    if not parts.acceptance or "block" not in parts.drafters:
        return _raced(target, parts, batch)
    head = parts.head("block")
    uniforms = Uniforms.from_seeds(range(batch), target.device)

    def drafter_of(shape: TreeShape) -> BlockDrafter:
        return BlockDrafter(head, llamagen(target), shape, rejected_weight=PLANNED.rejected_weight)

    shapes = candidates(parts)
    prompt = target.any_prompt(batch)
    rivals = jacobi(target, parts)
    return autotune.planned(
        target, drafter_of, shapes, Recursive(), prompt, uniforms, parts.acceptance, rivals=rivals
    )


def jacobi(target: DrawingTarget, parts: PictureParts) -> list[Rival]:
    """Methods that draft from the target's own distributions, where their tau is known: of drawn
    pictures.
    """
    if target.processor.greedy:
        return []
    known = {JACOBI[name]: tau for name, tau in parts.taus.items() if name in JACOBI}
    serve = serving(list(known), target, parts)
    return [Rival(method, assemble(method, target, parts)[1], known[method]) for method in serve]


def candidates(parts: PictureParts) -> list[TreeShape]:
    """The trees to choose from: Sequoia's for the block drafter's acceptance."""
    head = parts.head("block")
    device = next(head.parameters()).device
    return [best_tree(parts.acceptance, n, head.config.levels)[0].to(device) for n in SIZES]


def _raced(target: DrawingTarget, parts: PictureParts, batch: int) -> Plan:
    """The exact method that nothing is planned for, or plain decoding."""
    race = Race(target, parts, batch)
    race.run(serving(UNPLANNED, target, parts))
    return race.plan("the model has no block drafter or no measured acceptance")


def _relaxed(target: DrawingTarget, parts: PictureParts, batch: int, tv: float) -> Plan:
    """The fastest method off by at most ``tv`` a token, or the plan of exact methods."""
    planned = planned_for(target, parts, batch)
    exact = method_of(planned)
    race = Race(target, parts, batch, tv)
    race.run([exact, *serving(relaxed_methods(), target, parts)])
    made = race.plan(f"total variation of at most {tv:g} a token allowed")
    gains = race.gains()
    worth = (1 + MARGIN) * gains.get(exact, 1.0)  # of what leaves the target's distribution
    if made.draft_free is None or gains[made.draft_free] <= worth:
        return replace(planned, candidates=made.candidates)
    return made


def relaxed_methods() -> list[Method]:
    """Those whose certificate is "bounded", from little borrowed mass to much."""
    borrowing = (methods.LanternPP(lambda_=x, k=k) for x, k in BORROWING)
    return [methods.GSD(), *borrowing, methods.Lantern(drafter="block")]


def serving(some: Sequence[Method], target: DrawingTarget, parts: PictureParts) -> list[Method]:
    """Those of ``some`` that ``target`` can be drawn by."""
    found: list[Method] = []
    for method in some:
        try:
            assemble(method, target, parts)
        except ValueError:  # a small picture, layers that cannot be left out, no drafter
            continue
        found.append(method)
    return found


@dataclass
class Record:
    """What a method took in a race: seconds and tau of each call, and its total variation."""

    seconds: list[float] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)
    excess: float = 0.0
    tokens: float = 0.0

    @property
    def tv(self) -> float:
        """Measured bound on the total variation a token, 0 for exact methods."""
        return self.excess / self.tokens if self.tokens else 0.0


@dataclass
class Race:
    """Whole pictures by several methods in turn, compared by the median ratios of their seconds.

    One whose total variation a token is measured above ``tv`` leaves. Where relaxed methods take
    part, so does one that falls far behind another that is no further from the target.
    """

    target: DrawingTarget
    parts: PictureParts
    batch: int
    tv: float = 0.0
    records: dict[Method, Record] = field(default_factory=dict)
    left: list[Candidate] = field(default_factory=list)  # those that are out

    @cached_property
    def prompt(self) -> Any:
        """What all draw."""
        return self.target.any_prompt(self.batch)

    def run(self, others: Sequence[Method]) -> None:
        """Draw ``PICTURES`` batches by plain decoding and by ``others``."""
        plain = methods.AR()
        self.records = {method: Record() for method in dict.fromkeys([plain, *others])}
        done = 0
        for i in range(PICTURES):
            for method, record in self.records.items():
                self._draw(method, record, i)
                done += 1
                tell(Measured(done, max(done, PICTURES * len(self.records))))
            self._let_go()

    def _let_go(self) -> None:
        """Take those out that leave."""
        gains = self.gains()
        leaving = {method: self._leaves(method, gains) for method in self.records}
        leaving[methods.AR()] = ""
        self.left += [self._candidate(m, gains, why) for m, why in leaving.items() if why]
        self.records = {m: record for m, record in self.records.items() if not leaving[m]}

    def _leaves(self, method: Method, gains: dict[Method, float]) -> str:
        """Why ``method`` leaves; "" if it stays."""
        own = self.records[method]
        if own.tv > self.tv:
            return f"its total variation is above {self.tv:g}"
        nearer = [gains[other] for other, r in self.records.items() if r.tv <= own.tv]
        if self.tv > 0 and gains[method] < BEHIND * max(nearer):
            return "another is much faster and no further from the model"
        return ""

    def _candidate(self, method: Method, gains: dict[Method, float], left: str = "") -> Candidate:
        record = self.records[method]
        return Candidate(method, gains[method], statistics.median(record.taus), record.tv, left)

    def candidates(self) -> tuple[Candidate, ...]:
        """All but plain decoding, those that left last."""
        gains = self.gains()
        racing = [m for m in self.records if m != methods.AR()]
        return *(self._candidate(method, gains) for method in racing), *self.left

    def _draw(self, method: Method, record: Record, i: int) -> None:
        length = self.target.length
        uniforms = Uniforms.from_seeds(range(i, i + self.batch), self.target.device)
        steps = None
        if method.drafts:
            own, drafter, rule = assemble(method, self.target, self.parts)
            steps = decode(own, drafter, rule, self.prompt, length, uniforms)
        begin = time.perf_counter()
        *_, end = steps or decode_plain(self.target, self.prompt, length, uniforms)
        record.seconds.append(time.perf_counter() - begin)
        record.taus.append(end.stats.tau)
        record.excess += float(end.excess)
        record.tokens += float(end.measured)

    def gains(self) -> dict[Method, float]:
        """Speed over plain decoding by method."""
        plain = self.records[methods.AR()].seconds
        return {
            method: statistics.median(p / s for p, s in zip(plain, record.seconds, strict=True))
            for method, record in self.records.items()
        }

    def plan(self, why: str) -> Plan:
        """The fastest if it gains enough, else plain decoding."""
        gains = self.gains()
        gains.pop(methods.AR())
        best = max(gains, key=lambda method: gains[method], default=methods.AR())
        if gains.get(best, 1.0) <= 1 + MARGIN:
            said = ", ".join(f"{method.name} {gain:.2f}x" for method, gain in gains.items())
            plain = f"plain decoding: {why}, and measured were {said}"
            return Plan(None, 1.0, 1.0, plain, candidates=self.candidates())
        record = self.records[best]
        off = f", total variation {record.tv:.3f} a token" if record.tv else ""
        reason = f"{best.name}: {why}; {gains[best]:.2f}x plain decoding{off} measured"
        tau = statistics.median(record.taus)
        gain = gains[best]
        return Plan(None, tau, gain, reason, draft_free=best, candidates=self.candidates())
