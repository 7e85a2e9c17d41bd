"""Third-party drafters: how they are made, and how each tree that they propose is checked.

Such a drafter is a :class:`specmm.core.drafter.Drafter`, or a class or function that makes one from
a target, a :class:`DraftRequest` and its own options.

Shape letters: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specmm import methods
from specmm.core.drafter import Drafter, Feedback
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.extending.registry import Open, Registry, maker_of, name_of, parse_spec, whole
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings, Tree
from specmm.verify.rule import Rule

USUAL = "chain(4)"  # the tree of drafters that do not say which (as their ``tree``)
SUMS = 1e-3  # the error of a recorded distribution's sum: bfloat16 has 8 bits


@dataclass(frozen=True)
class DraftRequest:
    """A request to a drafter: trees of the shape ``tree``. If ``sampled``, drafts are drawn,
    siblings as ``siblings`` says; otherwise they are chosen (point masses).
    """

    tree: TreeShape | Dynamic
    sampled: bool
    siblings: Siblings


def _checked(name: str, thing: Any) -> Any:
    """``thing``; raises ``ValueError`` if it is not a drafter."""
    if is_drafter(thing):
        return thing
    raise ValueError(
        "drafter must be a class or a function of (target, request), or have begin, propose, "
        f"max_nodes and max_depth, got {name}, a {type(thing).__name__}; see "
        "specmm.core.drafter.Drafter"
    )


def is_drafter(thing: object) -> bool:
    """Whether ``thing`` is a drafter or makes one; a network or a name is not."""
    thing = whole(thing)
    if isinstance(thing, str | nn.Module):
        return False
    both = callable(getattr(thing, "propose", None)) and callable(getattr(thing, "begin", None))
    return both or inspect.isroutine(thing)


OTHERS = Open[Any]("drafter", {}, _checked)


def of_others(spec: object) -> bool:
    """Whether ``spec`` is a third-party drafter or its name, such as ``echo(order=2)``."""
    if not isinstance(spec, str):
        return is_drafter(spec)
    return spec.partition("(")[0].strip() in OTHERS  # a folder's name may have brackets of any kind


def with_own(registry: Registry, method: Any, drafter: Any) -> tuple[Any, Any]:
    """``method`` (None: plain decoding) with the third-party ``drafter``, and None as the drafter
    to load; for any other ``drafter`` both unchanged.
    """
    if drafter is None or not of_others(drafter):
        return method, drafter
    return methods.by_hand(registry, method or methods.AR(), drafter), None


def usual_tree(spec: object) -> Tree:
    """The tree that the drafter of ``spec`` declares as its default."""
    thing = OTHERS[parse_spec(spec)[0]] if isinstance(spec, str) else spec
    tree: Tree = getattr(whole(thing), "tree", USUAL)
    return tree


def make_drafter(spec: object, target: Any, request: DraftRequest) -> OutsideDrafter:
    """The third-party drafter of ``spec``, an object or a name, made for ``target``.

    Raises ``ValueError`` for options that it does not take, for a result that is not a drafter, and
    for a drafter that cannot make a requested dynamic tree.
    """
    name, values, options = parse_spec(spec) if isinstance(spec, str) else (name_of(spec), [], {})
    thing = OTHERS[name] if isinstance(spec, str) else _checked(name, spec)
    if not inspect.isclass(thing) and hasattr(thing, "propose"):
        if values or options:
            raise ValueError(f"drafter {name} is an object and takes no options, got {spec}")
        return OutsideDrafter(thing, name, maker_of(thing))
    signature = inspect.signature(thing)
    try:
        signature.bind(target, request, *values, **options)
    except TypeError as error:
        others = ", ".join(str(parameter) for parameter in list(signature.parameters.values())[2:])
        raise ValueError(f"drafter {name} takes ({others}), got {spec}: {error}") from error
    try:
        drafter = thing(target, request, *values, **options)
    except AttributeError as error:
        if not isinstance(request.tree, Dynamic):
            raise
        raise ValueError(
            f"drafter {name} must make trees that grow, got {error}; give one of fixed shape, as "
            "tree=chain(3)"
        ) from error
    return OutsideDrafter(drafter, name, maker_of(thing))


class OutsideDrafter:
    """The drafter ``inner``, called ``name``, by ``maker``; its trees are checked.

    Its seconds are counted here, whatever it does with its clock. ``recorded``: whether a tree had
    distributions; ``varied``: whether such trees had several shapes.
    """

    def __init__(self, inner: Drafter, name: str, maker: str) -> None:
        _checked(name, inner)
        self.inner = inner
        self.name = name
        self.maker = maker
        self.max_nodes = int(inner.max_nodes)
        self.max_depth = int(inner.max_depth)
        self.coupled = bool(getattr(inner, "coupled", False))
        self.recorded = self.varied = False
        self.needed: Siblings | None = None  # by the rule so called; any that are recorded
        self.rule = ""
        self._shape: TreeShape | None = None  # the last
        self._drawn: set[tuple[int, ...]] = set()  # parents of drawn trees: the first, and another

    def serve(self, rule: Rule) -> None:
        """From now on refuse trees whose siblings are not drawn as ``rule`` requires."""
        others = bool(maker_of(rule))
        self.rule = rule.name
        self.needed = getattr(rule, "siblings", None) or ("distinct" if others else None)

    def __str__(self) -> str:
        """For certificates."""
        return f"drafter {self.name}" + (f" of {self.maker}" if self.maker else "")

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        self.clock = clock
        with clock("draft"):
            self.inner.begin(feedback, Clock())

    def start_row(self, row: int) -> None:
        inner: Any = self.inner  # methods ask whether it has that
        inner.start_row(row)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        with self.clock("draft"):
            tree = self.inner.propose(feedback, uniforms)
        self._check(tree, feedback)
        self.recorded |= tree.probs is not None
        return tree

    def _check(self, tree: DraftTree, feedback: Feedback) -> None:
        """Raise ``ValueError`` for a tree that breaks what the drafter declares."""
        if not isinstance(tree, DraftTree):
            raise ValueError(f"{self} must propose a DraftTree, got a {type(tree).__name__}")
        shape = tree.shape
        if shape.size > self.max_nodes or shape.depth > self.max_depth:
            raise ValueError(
                f"{self} must propose at most {self.max_nodes} nodes and {self.max_depth} levels, "
                f"as its max_nodes and max_depth say, got {shape.size} and {shape.depth}"
            )
        self._check_shape(tree)
        if not torch.equal(tree.tokens[:, 0], feedback.token):
            raise ValueError(f"{self} must put feedback.token at node 0, got other tokens there")
        size = feedback.output.probs.shape[-1]
        if bool(((tree.tokens < 0) | (tree.tokens >= size)).any()):
            raise ValueError(f"{self} must draft tokens in [0, {size}), got {_range(tree.tokens)}")
        if tree.probs is not None and shape.size > 1:
            chosen = (shape.ranks > 0) & (self.needed == "likeliest and one")
            self._check_probs(tree.tokens[:, 1:], tree.probs[:, 1:], size, chosen[:, 1:])
            if shape.width > 1 and self.needed is not None:
                self._check_siblings(tree, tree.probs, self.needed)

    def _check_shape(self, tree: DraftTree) -> None:
        """Check depth and width of a new shape; note shapes with recorded distributions."""
        shape = tree.shape
        if shape is self._shape and shape.fixed:
            return
        self._shape = shape
        rows = {tuple(row) for row in shape.parents.tolist()}
        for row in rows:
            real = TreeShape.from_parents(row)
            if real.depth > shape.depth or real.width > shape.width:
                raise ValueError(
                    f"{self} must propose trees of the depth and width that their shapes say, "
                    f"{shape.depth} and {shape.width}, got {real.depth} and {real.width}"
                )
        if tree.probs is not None:
            self._drawn |= rows
            self.varied = len(self._drawn) > 1
            self._drawn = set(list(self._drawn)[:2])

    def _check_siblings(self, tree: DraftTree, probs: Tensor, needed: Siblings) -> None:
        """Raise ``ValueError`` unless ``probs`` [B, N, V] suit siblings drawn as ``needed``."""
        earlier = tree.shape.earlier_siblings  # [1 or B, N, N]
        # of each node, the probability of every other's token
        chances = probs.gather(-1, tree.tokens[:, None].expand(-1, tree.shape.size, -1))
        if needed == "independent":
            first = earlier.int().argmax(-1).expand(len(probs), -1)  # a first sibling's own is 0
            off = (probs - probs.take_along_dim(first[..., None], 1)).abs().sum(-1)
            wrong = (off > SUMS) & earlier.any(-1)
        elif needed == "distinct":
            wrong = (chances > 0) & earlier
        else:  # the others are chosen, and the first is none of them
            wrong = (chances > 0) & earlier.mT & ~earlier.any(-1)[..., None]
        if bool(wrong.any()):
            raise ValueError(
                f"{self} must draw siblings as request.siblings says, {needed!r}, which rule "
                f"{self.rule} needs, got others by what it records; draw them so (draw_siblings "
                "does), or use rule recursive"
            )

    def _check_probs(self, tokens: Tensor, probs: Tensor, size: int, chosen: Tensor) -> None:
        """Check that ``tokens`` [B, N] can come from ``probs`` [B, N, V], or were ``chosen``."""
        if probs.shape[-1] != size:
            raise ValueError(
                f"{self} must record distributions over {size} tokens, got {probs.shape[-1]}"
            )
        if not bool((probs >= 0).all()):
            raise ValueError(f"{self} must record probabilities from 0 to 1, got {_range(probs)}")
        sums = probs.sum(-1)
        if bool(((sums - 1).abs() > SUMS).any()):
            raise ValueError(
                f"{self} must record distributions whose sums are 1, got {_range(sums)}; divide "
                "them by their sums"
            )
        if bool(((probs.gather(-1, tokens[..., None])[..., 0] <= 0) & ~chosen).any()):
            raise ValueError(
                f"{self} must draw every draft from the distribution it records, got one of "
                "probability 0; record what it was drawn from, given its earlier siblings"
            )


def _range(values: Tensor) -> str:
    return f"{values.min().item():.4g} to {values.max().item():.4g}"
