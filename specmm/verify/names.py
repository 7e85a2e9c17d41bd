"""The acceptance rules by name: what each claims, and how drafts must be drawn for it.

A new rule is a class with ``decisions`` (``rule.py``) and one entry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specmm.registry import unknown
from specmm.shape.sampled import Siblings
from specmm.spec import parse_spec
from specmm.verify.bottom_up import Block, Traversal
from specmm.verify.exact import GreedyMultiDraft, PointMass, Recursive
from specmm.verify.kseq import KSeq
from specmm.verify.lantern import Lantern, LanternPP
from specmm.verify.relaxed import Typical
from specmm.verify.rule import Rule


@dataclass(frozen=True)
class RuleKind:
    """A rule by name: its class, how the ``siblings`` it judges are drawn, what to say of it.

    Without ``siblings`` drafts are the likeliest tokens, and no probabilities of theirs are needed.
    ``relaxed`` rules relax greedy decoding, too. ``chains``: only one draft after each other.
    """

    rule: Any
    siblings: Siblings | None
    what: str
    relaxed: bool = False
    chains: bool = False
    preset: Mapping[str, str] = field(default_factory=dict)  # options that the name stands for


def _released(rule: type[Lantern | LanternPP], name: str) -> RuleKind:
    """The rule with what its authors' code draws from once a draft is rejected."""
    preset = {"residual": "release", "name": f"{name}-release"}
    what = f"{name} as its authors' code, for comparisons"
    return RuleKind(rule, "distinct", what, relaxed=True, preset=preset)


RULES: Mapping[str, RuleKind] = {
    "recursive": RuleKind(Recursive, "distinct", "siblings in turn, min(1, p/q) each"),
    "traversal": RuleKind(Traversal, "distinct", "from the leaves up, keeps the most"),
    "block": RuleKind(Block, "distinct", "a chain as a whole", chains=True),
    "k-seq": RuleKind(KSeq, "independent", "SpecTr's, siblings drawn independently"),
    "greedy-multi-draft": RuleKind(
        GreedyMultiDraft, "likeliest and one", "the likeliest tokens and one that is drawn"
    ),
    "point-mass": RuleKind(PointMass, None, "the likeliest tokens, kept with p(x)"),
    "typical": RuleKind(Typical, None, "Medusa's: what is likely enough is kept"),
    "lantern": RuleKind(Lantern, "distinct", "a token stands for its near codes", relaxed=True),
    "lantern-release": _released(Lantern, "lantern"),
    "lantern++": RuleKind(LanternPP, "distinct", "the same, bounded by p(x)", relaxed=True),
    "lantern++-release": _released(LanternPP, "lantern++"),
}


def rule_kind(spec: str) -> RuleKind:
    """The kind of rule that ``spec`` names; raises ``ValueError`` with a suggestion."""
    name, _, _ = parse_spec(spec)
    if name not in RULES:
        raise unknown("rule", name, RULES)
    return RULES[name]


def make_rule(spec: str, **given: Any) -> Rule:
    """The rule of ``spec``, as ``typical(epsilon=0.2)``; ``given`` is what options cannot say.

    Raises ``ValueError`` for a name or an option that is not known.
    """
    kind, (name, values, options) = rule_kind(spec), parse_spec(spec)
    known = [f.name for f in dataclasses.fields(kind.rule) if f.name not in {"name", "exact"}]
    known = [option for option in known if option not in given]
    strange = [str(value) for value in values] + [key for key in options if key not in known]
    if strange:
        raise unknown(f"option of rule {name}", strange[0], known or ["(none)"])
    made: Rule = kind.rule(**{**kind.preset, **options}, **given)
    return made


def is_exact(spec: str) -> bool:
    """Whether the rule of ``spec`` keeps the target's distribution."""
    return bool(rule_kind(spec).rule.exact)
