"""The declarations of every method, and the choice of its parts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_type_hints

from specmm.extending.kinds import check_kind, shown
from specmm.extending.registry import (
    OPTION,
    Registry,
    name_of,
    named,
    names_of_others,
    registered,
    unknown,
    whole,
)

TreeName = str | tuple[int, ...]  # see specmm/shape/trees.py
Tree = TreeName | None  # None: the tree that the model's maker recommends
Own = Any  # a name, or an object of one's own: see specmm.register

TV = 0.2  # total variation a token that auto allows where relaxed methods may be taken
FEATURES = "specmm.hf.drafters.features:FeatureDrafter"
SMALL = "specmm.hf.drafters.small_model:ModelDrafter"
DRAFTERS = {  # the class of each drafter that takes trees and rules, which is asked what it can do
    "block": "specmm.image_ar.tokens.drafters.block:BlockDrafter",
    "eagle": "specmm.image_ar.tokens.drafters.eagle:EagleDrafter",
    "jacobi": "specmm.image_ar.tokens.drafters.jacobi:JacobiDrafter",
    "prompt-lookup": "specmm.hf.drafters.prompt_lookup:PromptLookupDrafter",
    "text-draft": SMALL,
    "vlm-draft": SMALL,
    "msd": FEATURES,
    "eagle3": FEATURES,
    "mtp": "specmm.hf.drafters.mtp:MtpDrafter",
    "assistant": "specmm.hf.drafters.assistant:AssistantDrafter",
    "deer": "specmm.diffusion_drafters.block_drafters:SourceDrafter",
}


class _Checked(type):
    """The metaclass of methods, which checks the kinds of their options."""

    def __call__(cls, *values: Any, **options: Any) -> Any:
        hints = get_type_hints(cls)
        known: Any = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        kinds = {field.name: hints[field.name] for field in known}
        if strange := [name for name in options if kinds and name not in kinds]:
            raise TypeError(str(unknown(f"option of {cls.__name__}", strange[0], kinds, OPTION)))
        for name, value in (dict(zip(kinds, values, strict=False)) | options).items():
            # names of drafters are those that may be typed: another may be one's own
            check_kind(kinds.get(name) if name != "drafter" else None, **{name: value})
        return super().__call__(*values, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The options, for ``help`` and editors: this class's ``__call__`` would hide them."""
        found = inspect.signature(cls.__init__)  # type: ignore[misc]
        options = list(found.parameters.values())[1:]
        return found.replace(parameters=options, return_annotation=inspect.Signature.empty)


class Declared(metaclass=_Checked):
    """Properties that a method declares, so that no code needs to check its type."""

    name: ClassVar[str]
    claims: ClassVar[str] = "exact"  # the claim of its runs; each run's certificate is binding
    drafts: ClassVar[bool] = True
    streams: ClassVar[bool] = True  # one model answers, token by token
    here: ClassVar[str] = ""  # speed over plain decoding in benchmarks/results, if it seldom pays

    @property
    def timed(self) -> bool:
        """Whether it decides by seconds measured on this machine."""
        return False

    @property
    def one_generator(self) -> bool:
        """Whether all pictures share one generator, as in the authors' released code."""
        return False

    @property
    def can_refill(self) -> bool:
        """Whether a row that has ended may take the next sample while other rows go on."""
        return False

    @property
    def static_shapes(self) -> bool:
        """Whether rounds have the same shapes or one of a few, so that they can be compiled."""
        return False

    @property
    def captured(self) -> bool:
        """Whether a round can be one graph of a GPU: nothing in it is decided by the host."""
        return self.static_shapes

    @property
    def ignored(self) -> tuple[str, ...]:
        """Options that have no effect under the values of the others."""
        return ()


@dataclass(frozen=True)
class Choice:
    """Drafter, tree and rule of a method of image tokens, by name, and the drafter's option.

    A drafter with several options has them of its ``method``.
    """

    drafter: Own
    tree: Own
    rule: Own
    rejected_weight: float = 0.0
    method: Any = None


class Composed(Declared):
    """A method that is a choice of drafter, tree and rule; the drafter decides what it can do."""

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        raise NotImplementedError

    @property
    def can_refill(self) -> bool:
        """Whether its drafter's rows can; EAGLE's head and small models read all at once."""
        return hasattr(_class_of(self.choice.drafter), "start_row")

    @property
    def static_shapes(self) -> bool:
        """True for drafters whose trees have the same number of nodes and levels every round."""
        return self.choice.drafter in ("block", "eagle", "any", "jacobi")


def label(method: Any) -> str:
    """The ``method``'s name, and its options that are not the default ones: ``block(length=4)``."""
    values = {f.name: (getattr(method, f.name), f.default) for f in fields(method)}
    changed = [
        f"{name}={plain_option(value)}"
        for name, (value, default) in values.items()
        if value != default
    ]
    return f"{method.name}({', '.join(changed)})" if changed else str(method.name)


def plain_option(value: object) -> object:
    """An option's ``value``, or the display name of a third-party object."""
    return value if isinstance(value, str | int | float | tuple | None) else name_of(value)


class Itself:
    """``value``, equal to nothing but itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def filed(method: Any) -> Hashable:
    """Cache key of a ``method``: its options by value, third-party objects by identity, since equal
    objects may behave differently.
    """
    found = [getattr(method, one.name) for one in fields(method)]
    return type(method), *map(keyed, found)


def keyed(value: Any) -> Hashable:
    """``value`` as a part of a cache's key: by value if it is plain, else by identity."""
    plain = (str, int, float, bool, tuple, type(None))
    return value if type(value) in plain else Itself(value)


@dataclass(frozen=True)
class AR(Declared):
    """Plain decoding: one token a step."""

    name: ClassVar[str] = "ar"
    drafts: ClassVar[bool] = False
    can_refill: ClassVar[bool] = True  # answers and texts: a plain batch of pictures ends at once
    static_shapes: ClassVar[bool] = True


@dataclass(frozen=True)
class Auto(Declared):
    """Measures this machine and takes the fastest exact method, plain decoding included.

    With ``certificate`` "bounded" relaxed methods of picture tokens may be taken as well, if their
    total variation a token is measured to be at most ``tv``.
    """

    name: ClassVar[str] = "auto"
    timed: ClassVar[bool] = True
    certificate: Literal["exact", "bounded"] = "exact"
    tv: float = TV

    def __post_init__(self) -> None:
        if self.tv != TV and not self.relaxes:
            raise ValueError("tv needs certificate bounded: exact methods are off by nothing")
        if not 0 < self.tv <= 1:
            raise ValueError(
                f"tv must be a total variation a token above 0 and at most 1, got {self.tv}"
            )

    @property
    def relaxes(self) -> bool:
        """Whether relaxed methods may be taken."""
        return self.certificate == "bounded"


@dataclass(frozen=True)
class Draft(Composed):
    """Any drafter, tree and rule together; other methods are such choices with defaults.

    ``specmm methods`` lists them. ``tree`` None is the tree that the model's maker recommends.
    Answers and texts are drafted by the drafters of their methods: ``msd``, ``text-draft``,
    ``block`` and so on. Each may be a third party's: a name registered with
    :func:`specmm.register`, or the object itself.
    """

    name: ClassVar[str] = "draft"
    claims: ClassVar[str] = "as its rule"
    drafter: Own = "block"
    tree: Own = None
    rule: Own = "recursive"
    rejected_weight: float = 0.0

    def __post_init__(self) -> None:
        check_rejected_weight(self.rejected_weight)

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        return Choice(self.drafter, self.tree, self.rule, self.rejected_weight)


def _class_of(drafter: Own) -> Any:
    """The class of the ``drafter`` of this name, or of a third-party one; None if there is none."""
    if not isinstance(drafter, str):
        return whole(drafter)
    name = drafter.partition("(")[0].strip()
    if name in DRAFTERS:
        return named(DRAFTERS[name])
    return registered("drafter", name) if name in names_of_others("drafter") else None


def check_rejected_weight(weight: float) -> None:
    """Raise ``ValueError`` unless 0 <= ``weight`` < 1, the weight of rejected positions."""
    if not 0 <= weight < 1:
        raise ValueError(
            "rejected_weight must be in [0, 1), the weight of the target's distributions at "
            f"rejected positions, got {weight}"
        )


class Methods(Registry):
    """The methods of a ``family`` of models. Errors tell another family's method from a misspelt
    one. ``relaxes`` says whether auto may take the family's relaxed methods.
    """

    families: ClassVar[dict[str, Methods]] = {}  # the families listed by ``specmm methods``

    def __init__(
        self, family: str, kinds: Iterable[type[Any]], listed: bool = True, relaxes: bool = False
    ) -> None:
        super().__init__("method", {kind.name: f"specmm.methods:{kind.__name__}" for kind in kinds})
        self.family = family
        self.relaxes = relaxes
        if listed:
            self.families[family] = self

    def get(self, name: str) -> Any:
        others = [family for family, one in self.families.items() if name in one.entries]
        if name in self.entries or not others:
            return super().get(name)
        raise ValueError(
            f"method {name!r} is for {' and '.join(others)}, not for {self.family}; choose from: "
            f"{', '.join(sorted(self.entries))}"
        )

    def check(self, method: Any) -> None:
        """Raise ``ValueError`` for an option of ``method`` that would change nothing here."""
        if isinstance(method, Auto) and method.relaxes and not self.relaxes:
            raise ValueError(
                f"certificate of auto must be exact for {self.family}, got bounded: auto takes "
                "relaxed methods of picture tokens alone; leave it out"
            )
        for name in getattr(method, "ignored", ()):
            if (got := getattr(method, name)) != getattr(type(method)(), name):
                other = "sampled=True" if hasattr(method, "sampled") else "a tree, as chain(4)"
                raise ValueError(
                    f"{name} of {method.name} must come with a drawn tree of fixed shape, "
                    f"got {shown(got)} alone; give {other}, too"
                )
