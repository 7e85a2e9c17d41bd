"""From a method to the three parts of the loop: target, drafter, rule.

Shape letters: V codebook size, E code width, K neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar, cast

from torch import Tensor

from specmm import methods
from specmm.choose.contest import Record
from specmm.core.drafter import Drafter, looks_ahead
from specmm.core.drawing import DrawingTarget
from specmm.core.processors import Processor
from specmm.extending.kinds import check_whole
from specmm.extending.outside import OTHERS, DraftRequest, make_drafter, of_others, usual_tree
from specmm.extending.registry import named, parse_spec, unknown
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.image_ar.tokens.drafters.eagle import EagleDrafter
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.image_ar.tokens.loading import DrafterHead
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.methods.base import DRAFTERS as PLACES
from specmm.methods.images import Init
from specmm.shape.trees import make_tree, static_tree
from specmm.verify import GreedyMatch, Rule, neighbour_table
from specmm.verify.rule import RuleKind, RuleName, make_rule, rule_kind

T = TypeVar("T")
Method: TypeAlias = methods.Method | methods.PromptLookup
DEFAULT_TREE = (3, 2, 2, 1, 1)
ANY = "any"  # drafter: the one given, else the first of the trained ones, EAGLE's head on its tree
TRAINED = ("eagle", "block")


@dataclass
class PictureParts:
    """The parts from which methods are assembled.

    Drafters by kind; the codebook [W, E] and the ascending ids [W] of its tokens (None: all
    tokens); recommended trees by method (children by level of a spine); the block drafter's
    measured acceptance by level and rank. ``taus``: block efficiencies of methods without a choice
    of tree, by name. ``given``: the kind of the drafter that the user passed in. ``records`` hold
    the measurements of method auto, and ``made`` the shapes, rules and programs that calls share,
    both keyed by all that they depend on.
    """

    drafters: Mapping[str, DrafterHead] = field(default_factory=dict)
    codebook: Tensor | None = None
    code_ids: Tensor | None = None
    trees: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    acceptance: tuple[tuple[float, ...], ...] = ()
    taus: Mapping[str, float] = field(default_factory=dict)
    given: str | None = None
    records: dict[Hashable, Record] = field(default_factory=dict)
    made: dict[Hashable, object] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of ``make``, called only the first time for each ``key``."""
        if key not in self.made:
            self.made[key] = make()
        return cast(T, self.made[key])

    def serves(self, method: Any) -> bool:
        """Whether there is the drafter that ``method`` takes, if it takes a trained one."""
        choice: methods.Choice | None = getattr(method, "choice", None)
        if choice is None or choice.drafter not in (*TRAINED, ANY):
            return True
        return choice.drafter in self.drafters or (choice.drafter == ANY and bool(self.drafters))

    def take_given(self, kind: str) -> None:
        """Note that the user passed the drafter ``kind``; discard the model's own acceptance."""
        self.given = kind
        if kind == "block":
            self.acceptance = ()

    @property
    def any(self) -> str:
        """The kind that ``ANY`` stands for."""
        return self.given or next((kind for kind in TRAINED if kind in self.drafters), "block")

    def head(self, kind: str) -> Any:
        """The drafter called ``kind``; raises ``ValueError`` when the model has none."""
        if kind not in self.drafters:
            names = ", ".join(sorted(self.drafters)) or "none"
            raise ValueError(
                f"this model has no {kind!r} drafter (it has: {names}); "
                "use method sjd or ar, or train one for a LlamaGen"
            )
        return self.drafters[kind]


def assemble(
    method: Method, target: DrawingTarget, parts: PictureParts
) -> tuple[DrawingTarget, Drafter, Rule]:
    """The parts of the loop for a ``method`` that drafts, not ``auto``. The returned target may be
    another view of the model than ``target``.
    """
    choice: methods.Choice | None = getattr(method, "choice", None)
    if choice is None:
        raise ValueError(f"method {method.name!r} drafts nothing")
    if choice.drafter == ANY:
        tree = choice.tree if parts.any == "eagle" else None
        choice = replace(choice, drafter=parts.any, tree=tree)
    third_party = not isinstance(choice.drafter, str) or of_others(choice.drafter)
    make = _outside if third_party else DRAFTERS.get(choice.drafter)
    if make is None:
        raise unknown("drafter", choice.drafter, [*DRAFTERS, *OTHERS])
    kind = rule_kind(choice.rule)
    greedy = target.processor.greedy
    target.read_layers(())  # the drafter says which it reads
    if kind.relaxed and greedy:
        # LANTERN relaxes the softmax of the raw logits, then takes its mode
        target = target.with_processor(Processor())
    sampled = kind.siblings is not None and not greedy
    drafter = make(choice, method.name, target, parts, sampled)

    def rule() -> Rule:
        return _rule(choice.rule, kind, target, parts, greedy)

    if not isinstance(choice.rule, str):  # third-party: equal objects may behave differently
        return target, drafter, rule()
    return target, drafter, parts.once((choice.rule, greedy), rule)


def _rule(
    spec: RuleName, kind: RuleKind, target: DrawingTarget, parts: PictureParts, greedy: bool
) -> Rule:
    """The rule of ``spec``; rules of codes get the table of neighbours, greedy ones match."""
    if greedy and not kind.relaxed:
        return GreedyMatch()
    if not kind.codes:
        return make_rule(spec)
    options = parse_spec(spec)[2] if isinstance(spec, str) else {}
    k = options.get("k", kind.rule.k)
    check_whole(k=k)
    if not k and not kind.relaxed:
        return make_rule(spec)
    table, first = _neighbours(parts, k, target)
    extra = {"greedy": greedy} if kind.relaxed else {}
    rule = make_rule(spec, table=table, offset=first, **extra)
    residual = getattr(rule, "residual", "corrected")
    if residual != "corrected" and target.undrawable is not None and not greedy:
        raise ValueError(
            f"residual must be 'corrected' for {target.name}, got {residual!r}: after a rejection "
            "the release may draw any token, here also words, which are not pictures"
        )
    return rule


def _neighbours(parts: PictureParts, k: int, target: DrawingTarget) -> tuple[Tensor, int]:
    """Nearest codes [W, K + 1] of every code, checked against the target's, and the first code's
    id.

    Ids between two codes' ids also get rows; their neighbours are a token without any mass to
    borrow.
    """
    size = target.codes
    if parts.codebook is None or len(parts.codebook) != size:
        got = "none" if parts.codebook is None else f"{len(parts.codebook)} codes"
        raise ValueError(
            f"the neighbour table must be of the target's codebook of {size} codes, got {got}"
        )
    if not 0 <= k < size - 1:
        raise ValueError(f"k must be in [0, {size - 2}] for a codebook of {size} codes, got {k}")
    near = neighbour_table(parts.codebook.float(), k + 1)
    ids = parts.code_ids
    if ids is None:
        return near, 0
    first = int(ids[0])
    nowhere = first if target.undrawable is None else target.undrawable
    table = near.new_full((int(ids[-1]) - first + 1, k + 1), nowhere - first)
    table[ids - first] = ids[near] - first
    return table, first


def llamagen(target: DrawingTarget) -> LlamaGenTarget:
    """``target``, for which there is a trained drafter: only a LlamaGen has any."""
    return cast(LlamaGenTarget, target)


def _block(
    choice: methods.Choice, name: str, target: DrawingTarget, parts: PictureParts, sampled: bool
) -> Drafter:
    """The block drafter on a tree of fixed shape, cut to the levels it has."""
    device = target.device
    head = parts.head("block").to(device, target.dtype)  # the model may have moved without it
    usual = parts.trees.get(name, DEFAULT_TREE)[: head.config.levels]
    tree = usual if choice.tree is None else choice.tree
    key = methods.keyed(tree), device
    shape = parts.once(key, lambda: static_tree(tree, device, parts.acceptance))
    siblings = rule_kind(choice.rule).siblings or "distinct"
    return BlockDrafter(head, llamagen(target), shape, sampled, choice.rejected_weight, siblings)


def _eagle(
    choice: methods.Choice, name: str, target: DrawingTarget, parts: PictureParts, sampled: bool
) -> Drafter:
    """EAGLE's head on a tree of fixed shape, or on a tree that it grows every round."""
    tree = make_tree(choice.tree or parts.trees.get(name, DEFAULT_TREE), target.device)
    siblings = rule_kind(choice.rule).siblings or "distinct"
    head = parts.head("eagle").to(target.device, target.dtype)
    return EagleDrafter(head, llamagen(target), tree, sampled, siblings)


def _jacobi(
    choice: methods.Choice, name: str, target: DrawingTarget, parts: PictureParts, sampled: bool
) -> Drafter:
    """The Jacobi drafter: the target itself, on a chain of at most a picture's length. By default
    drafts are coupled if the rule allows it. Under a relaxed rule, first drafts are drawn from the
    last place's distribution, because the rule would accept too many copies of neighbours.
    """
    kind = rule_kind(choice.rule)
    coupled = not looks_ahead(kind.rule)
    init: Init = "last" if kind.relaxed else methods.SJD.init
    method = choice.method or methods.SJD(coupled=coupled, init=init)
    window = min(_chain(choice, method.window), target.length - 1)
    return JacobiDrafter(target, window, method.init, method.coupled)


def _chain(choice: methods.Choice, usual: int) -> int:
    """The number of tokens drafted; raises ``ValueError`` for a tree that is not a chain."""
    shape = static_tree(choice.tree or f"chain({usual})")
    if shape.width > 1:
        raise ValueError(
            f"drafter {choice.drafter} needs a chain, as chain({usual}), got {choice.tree}"
        )
    return shape.depth


def _lookup(
    choice: methods.Choice, name: str, target: DrawingTarget, parts: PictureParts, sampled: bool
) -> Drafter:
    """The prompt lookup drafter, which searches the prompt and the picture so far."""
    if not target.prompted:
        raise ValueError(
            f"drafter prompt-lookup needs a prompt of tokens, which {target.name} does not have; "
            "use sjd"
        )
    method = choice.method or methods.PromptLookup(length=_chain(choice, 8))
    drafter: Drafter = named(PLACES[choice.drafter])(target, method.ngram, method.length)
    return drafter


def _outside(
    choice: methods.Choice, name: str, target: DrawingTarget, parts: PictureParts, sampled: bool
) -> Drafter:
    """A third-party drafter."""
    tree = usual_tree(choice.drafter) if choice.tree is None else choice.tree
    key = methods.keyed(tree), target.device
    shape = parts.once(key, lambda: make_tree(tree, target.device))
    siblings = rule_kind(choice.rule).siblings or "distinct"
    return make_drafter(choice.drafter, target, DraftRequest(shape, sampled, siblings))


DRAFTERS = {"block": _block, "eagle": _eagle, "jacobi": _jacobi, "prompt-lookup": _lookup}
