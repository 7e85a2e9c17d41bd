"""The interface of acceptance rules, the rules by name, and the step from a rule's decisions to a
result.

A rule is deterministic. From the drafts and the target's distributions it computes *decisions*: the
probability of keeping each node, and the distribution of the next token wherever the path may end.
:func:`sample_result` then compares them with uniforms. All randomness is there, so that tests can
enumerate the outcomes of the real rules (tests/unit/verify).

Shape letters: B batch, N nodes, M nodes tested bottom-up, V vocabulary, D deepest level.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.core.randomness import UniformSource, categorical
from specmm.core.tree import DraftTree, TreeShape
from specmm.extending.kinds import check_kind
from specmm.extending.registry import (
    OPTION,
    Open,
    maker_of,
    name_of,
    named,
    parse_spec,
    summary,
    unknown,
)
from specmm.shape.trees import Siblings


@dataclass
class Decisions:
    """A rule's decisions about one tree.

    Top-down rules (``order`` is None): ``accept[b, n]`` is the probability that node n is kept,
    given that its parent is kept and its earlier siblings are rejected.
    Bottom-up rules: nodes are tested in ``order``, [M] or [B, M], and the first one accepted ends
    the path; ``accept[b, n]`` is given that all nodes earlier in the order are rejected.

    ``after`` holds the distribution of the next token, of any positive total, for a path that ends
    at node n: [B, N, V], or a function from last nodes [B] to distributions [B, V]. The function
    saves time: residuals are a rule's largest cost, and only one of them is sampled.

    ``excess`` [B, N], if measured, bounds the total variation between what a relaxed rule emits
    after node n and the target's distribution there. It is the probability that the rule and its
    strict counterpart differ when they run on the same uniforms.
    """

    accept: Tensor
    after: Tensor | Callable[[Tensor], Tensor]
    order: Tensor | None = None
    excess: Tensor | None = None

    def probs_after(self, node: Tensor) -> Tensor:
        """The next token's distribution [B, V] for paths that end at ``node`` [B]."""
        if isinstance(self.after, Tensor):
            return self.after[torch.arange(len(node), device=node.device), node]
        return self.after(node)

    @property
    def next_probs(self) -> Tensor:
        """The next token's distribution after every node, [B, N, V]."""
        if isinstance(self.after, Tensor):
            return self.after
        rows, nodes = self.accept.shape
        every = torch.arange(nodes, device=self.accept.device).expand(rows, -1)
        return torch.stack([self.after(node) for node in every.unbind(1)], dim=1)


@dataclass
class VerifyResult:
    """The outcome of a round.

    ``path`` [B, D + 1] holds the nodes kept, the root first, padded with -1; ``kept`` [B] counts
    them (at least 1). ``next_token`` [B] is the recovered or bonus token. ``excess`` [B, D + 1] is
    the measured excess after each node of the path, 0 past its end.
    """

    path: Tensor
    kept: Tensor
    next_token: Tensor
    excess: Tensor | None = None


class Rule(Protocol):
    """An acceptance rule. ``name`` and ``exact`` may be plain attributes or dataclass fields."""

    @property
    def name(self) -> str:
        """The name in reports."""

    @property
    def exact(self) -> bool:
        """Whether the output has the target's distribution."""

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """The decisions about ``tree`` for the target's processed distributions ``p`` [B, N, V].

        With ``measure`` a relaxed rule also computes its excess.
        """


def draw_uniforms(shape: TreeShape, source: UniformSource) -> Tensor:
    """The uniforms of a round [B, N + 1]: one for each node, then one for the next token.

    A root without drafts takes one number from the ``source``, as plain decoding does.
    """
    if shape.size == 1:
        return F.pad(source.draw(1), (1, 0))
    return source.draw(shape.size + 1)


def sample_result(decisions: Decisions, shape: TreeShape, uniforms: Tensor) -> VerifyResult:
    """The path and the next token that ``uniforms`` [B, N + 1] select."""
    hit = uniforms[:, :-1] < decisions.accept  # strict: probability 0 is never accepted
    hit[:, 0] = True
    path, kept, last = selected(shape, hit, decisions.order)
    next_token = categorical(decisions.probs_after(last), uniforms[:, -1])
    excess = None
    if decisions.excess is not None:
        excess = decisions.excess.gather(1, path.clamp(min=0)).masked_fill(path < 0, 0.0)
    return VerifyResult(path, kept, next_token, excess)


Path: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""A path [B, D + 1] padded with -1, its number of nodes [B], and its last node [B]."""


def selected(shape: TreeShape, hit: Tensor, order: Tensor | None = None) -> Path:
    """The path that ``hit`` [B, N] (root included) selects: from the root down or, with ``order``
    [M] or [B, M], up to the first node in that order that is hit.
    """
    find = _along_a_chain if shape.is_chain else _through_a_tree
    return find(shape, hit, order)


def _along_a_chain(shape: TreeShape, hit: Tensor, order: Tensor | None) -> Path:
    """The path that ``hit`` [B, N] selects on a chain: `_through_a_tree` in fewer operations."""
    last = hit.cumprod(1).sum(1) - 1 if order is None else _first_hit(hit, order)
    nodes = shape.depths
    return torch.where(nodes <= last[:, None], nodes, -1), last + 1, last


def _through_a_tree(shape: TreeShape, hit: Tensor, order: Tensor | None) -> Path:
    """The path that ``hit`` [B, N] selects, from the root down or by ``order``."""
    if order is None:
        on_path = _path_from_the_root(shape, hit)
    else:
        on_path = _path_of_the_first_hit(shape, hit, order)
    reached = on_path * (shape.depths + 1)  # [B, N]: depth + 1 on the path, 0 off it
    kept, last = reached.max(1)
    return _nodes_by_depth(reached, shape.depth), kept, last


def _path_from_the_root(shape: TreeShape, hit: Tensor) -> Tensor:
    """Nodes kept [B, N] by a top-down rule: nodes that are chosen with all their ancestors."""
    earlier_hit = (shape.earlier_siblings & hit[:, None]).any(-1)
    missed = ~hit | earlier_hit
    return ~(shape.ancestors & missed[:, None]).any(-1)


def _path_of_the_first_hit(shape: TreeShape, hit: Tensor, order: Tensor) -> Tensor:
    """Nodes kept [B, N] by a bottom-up rule: up to the first hit of ``order`` [M] or [B, M]."""
    last = _first_hit(hit, order)
    row = torch.arange(len(last), device=last.device)
    return shape.ancestors.expand(len(last), -1, -1)[row, last]


def _first_hit(hit: Tensor, order: Tensor) -> Tensor:
    """The first node [B] of ``order`` [M] or [B, M], and of the root after them, that is hit."""
    order = F.pad(order.expand(len(hit), -1), (0, 1))  # the root (0) comes last
    first = hit.gather(1, order).int().argmax(1, keepdim=True)  # argmax takes the first of equals
    return order.gather(1, first).squeeze(1)


def _nodes_by_depth(reached: Tensor, depth: int) -> Tensor:
    """The path [B, D + 1], padded with -1, of ``reached`` [B, N]."""
    path = reached.new_full((len(reached), depth + 2), -1)
    nodes = torch.arange(reached.shape[1], device=reached.device).expand_as(reached)
    path.scatter_(1, reached, nodes)
    return path[:, 1:]  # nodes off the path went to the spare first column


def endings(shape: TreeShape, decisions: Decisions) -> Tensor:
    """The probability [B, N] that the path ends at each node, given the drafts."""
    if decisions.order is None:
        return _endings_from_the_root(shape, decisions.accept)
    order = decisions.order.expand(len(decisions.accept), -1)
    tested = decisions.accept.gather(1, order)
    before = F.pad((1 - tested).cumprod(1), (1, 0), value=1.0)  # [B, M + 1]: all earlier rejected
    ends = torch.zeros_like(decisions.accept).scatter(1, order, tested * before[:, :-1])
    ends[:, 0] = before[:, -1]
    return ends


def _endings_from_the_root(shape: TreeShape, accept: Tensor) -> Tensor:
    """:func:`endings` of a top-down rule: reached, and all children refused."""
    refuse = (1 - accept)[:, None]  # [B, 1, N]
    chosen = accept * torch.where(shape.earlier_siblings, refuse, 1.0).prod(-1)
    chosen[:, 0] = 1
    reached = torch.where(shape.ancestors, chosen[:, None], 1.0).prod(-1)
    nodes = torch.arange(shape.size, device=accept.device)
    child_of = shape.parents[:, None, :] == nodes[:, None]  # [1 or B, N, N]: column's parent is row
    return reached * torch.where(child_of, refuse, 1.0).prod(-1)


RuleName: TypeAlias = str | Any
"""A rule by name, as ``typical(epsilon=0.2)``, or one of others: an object or its class."""


@dataclass(frozen=True)
class RuleKind:
    """An entry of :data:`RULES`: the rule's class as ``"module:name"`` or a third-party class, and
    the drafts that it needs.

    ``siblings`` says how siblings are drawn; None: drafts are the likeliest tokens, without
    probabilities. ``relaxed`` rules relax greedy decoding, too; rules of ``codes`` compare codes of
    an image tokenizer. Third-party classes may declare these three themselves.
    """

    place: Any
    siblings: Siblings | None
    what: str
    relaxed: bool = False
    codes: bool = False
    preset: Mapping[str, str] = field(default_factory=dict)  # options that the name stands for

    @property
    def rule(self) -> Any:
        """The rule's class, or a rule object."""
        return named(f"specmm.verify.{self.place}") if isinstance(self.place, str) else self.place

    @classmethod
    def of_others(cls, name: str, rule: Any) -> RuleKind:
        """The entry of a third-party ``rule``; raises ``ValueError`` if it is not a rule."""
        declared = isinstance(getattr(rule, "exact", None), bool)
        if not (declared and callable(getattr(rule, "decisions", None))):
            raise ValueError(
                "rule must have decisions(tree, p, *, measure=False) and exact, True or False, "
                f"got {name}; see specmm.verify.rule.Rule"
            )
        siblings: Any = getattr(rule, "siblings", "distinct")
        if siblings is not None and siblings not in get_args(Siblings):
            raise unknown(f"way to draw siblings of rule {name}", siblings, get_args(Siblings))
        rule_class = rule if inspect.isclass(rule) else type(rule)
        if not issubclass(rule_class, Hashable):
            raise ValueError(
                f"rule {name} must be hashable, because calls share it, got a "
                f"{rule_class.__name__}; make it a @dataclass(frozen=True)"
            )
        relaxed, codes = (bool(getattr(rule, flag, False)) for flag in ("relaxed", "codes"))
        if relaxed and rule.exact:
            raise ValueError(f"rule {name} must not be both exact and relaxed; leave one out")
        return cls(rule, siblings, summary(rule) or name, relaxed, codes)


def _released(place: str, name: str) -> RuleKind:
    """The entry of the rule with the residual of its authors' code."""
    preset = {"residual": "release", "name": f"{name}-release"}
    summary_line = f"{name} as in the authors' released code, for comparisons"
    return RuleKind(place, "distinct", summary_line, relaxed=True, codes=True, preset=preset)


# A new rule of ours is a class with ``decisions`` and one entry here.
OURS: Mapping[str, RuleKind] = {
    "recursive": RuleKind("exact:Recursive", "distinct", "siblings in turn, each with min(1, p/q)"),
    "specinfer": RuleKind(
        "exact:Recursive",
        "independent",
        "SpecInfer: siblings drawn with replacement, tested in turn",
    ),
    "traversal": RuleKind(
        "bottom_up:Traversal",
        "distinct",
        "traversal verification: leaves first, accepts the most tokens",
    ),
    "block": RuleKind("bottom_up:Block", "distinct", "block verification: accepts a chain jointly"),
    "greedy-multi-draft": RuleKind(
        "exact:GreedyMultiDraft", "likeliest and one", "the likeliest tokens and one that is drawn"
    ),
    "point-mass": RuleKind("exact:PointMass", None, "the likeliest tokens, kept with p(x)"),
    "matching": RuleKind(
        "matching:Matching", None, "a draft is kept if plain decoding draws it: the same tokens"
    ),
    "typical": RuleKind(
        "relaxed:Typical", None, "Medusa's typical acceptance: an entropy-based threshold"
    ),
    "grouped": RuleKind(
        "grouped:Grouped", "distinct", "GSD: tokens about as likely share their mass", codes=True
    ),
    "lantern": RuleKind(
        "lantern:Lantern",
        "distinct",
        "a token may borrow from its nearest codes",
        relaxed=True,
        codes=True,
    ),
    "lantern-release": _released("lantern:Lantern", "lantern"),
    "lantern++": RuleKind(
        "lantern:LanternPP",
        "distinct",
        "LANTERN with the borrowed mass capped at (λ - 1) p(x)",
        relaxed=True,
        codes=True,
    ),
    "lantern++-release": _released("lantern:LanternPP", "lantern++"),
}
RULES = Open("rule", OURS, RuleKind.of_others)


def rule_kind(spec: RuleName) -> RuleKind:
    """The entry of the rule ``spec``, an object or a name; ``ValueError`` with a suggestion."""
    if not isinstance(spec, str):
        return RuleKind.of_others(name_of(spec), spec)
    name, _, _ = parse_spec(spec)
    if name not in RULES:
        raise unknown("rule", name, RULES)
    return RULES[name]


def make_rule(spec: RuleName, **given: Any) -> Rule:
    """The rule of ``spec``, such as ``typical(epsilon=0.2)``, with arguments ``given`` that text
    cannot express.

    Raises ``ValueError`` for an unknown name or option, and for an option of a wrong kind.
    """
    kind = rule_kind(spec)
    name, values, options = parse_spec(spec) if isinstance(spec, str) else (name_of(spec), [], {})
    if not inspect.isclass(kind.rule):
        if values or options or given:
            raise ValueError(f"rule {name} is an object and takes no options, got {spec}")
        rule_object: Rule = kind.rule
        if not maker_of(rule_object) and getattr(rule_object, "greedy", False):
            raise ValueError(
                f"rule {name} serves only greedy decoding, which uses it by default, got sampling; "
                "leave it out"
            )
        return rule_object
    rule: Any = kind.rule
    hidden = {"name", "exact", *given, *kind.preset}
    parameters = inspect.signature(rule).parameters
    visible = [option for option in parameters if option not in hidden]
    strange = [str(value) for value in values] + [key for key in options if key not in visible]
    if strange:
        raise unknown(f"option of rule {name}", strange[0], visible or ["(none)"], OPTION)
    for option, value in options.items():
        check_kind(parameters[option].annotation, **{option: value})
    instance: Rule = rule(**{**kind.preset, **options, **given})
    return instance
