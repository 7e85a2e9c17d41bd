"""A transformers target that runs without some of its layers, and method ``self``.

The decoder that drafts is a shallow copy of the target's, whose list of layers holds stand-ins for
those left out: they give back what they are given. So the model's own forward runs, with its masks,
positions and numbers of layers, and the target's modules are never changed.

Shape letters: B batch, G guidance branches, R = G·B rows, n nodes, S slots, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specmm import methods
from specmm.cache import Cache
from specmm.derived import fact
from specmm.hf.drafting import Assembly, chain_rule
from specmm.hf.families import Family, empty_cache, plain_tokens
from specmm.hf.target import VLMTarget
from specmm.layered import Skip, skipped
from specmm.processors import Processor
from specmm.self_drafting import SelfDrafter

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Asked:
    """What was asked of a model: how many ``outputs`` a layer has (0: the states by themselves),
    and whether it ``resumes``: whether what it reads between two layers is the states alone.
    """

    outputs: int
    resumes: bool


class LeftOut(nn.Module):
    """In place of ``layer``: gives back the states it is given, or those that are ``given``, as the
    first of ``outputs`` (0: by themselves). What it was given last is ``seen``.
    """

    seen: Tensor

    def __init__(self, layer: nn.Module, outputs: int = 0) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, given=None)  # no module of this one, nor set as such
        self.outputs = outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The states that ``layer`` would read; without hooks, which cost more than all of this."""
        own = self.__dict__
        own["seen"] = args[0] if args else kwargs["hidden_states"]
        states = own["seen"] if own["given"] is None else own["given"]
        return (states, *[None] * (self.outputs - 1)) if self.outputs else states

    def __getattr__(self, name: str) -> Any:
        """What decoders ask of a layer, such as its kind of attention."""
        return getattr(self.__dict__["layer"], name)

    def give(self, states: Tensor) -> None:
        """Give back these ``states`` from now on."""
        self.__dict__["given"] = states


class Layers(nn.ModuleList):
    """Layers that decoders may slice without a new list of modules each time."""

    def __getitem__(self, index: Any) -> Any:
        """A layer, or some of them."""
        found = list(self._modules.values())
        return found[index]


def replaced(root: M, old: nn.Module, new: nn.Module) -> M:
    """``root`` with ``new`` for ``old`` within: itself, or a shallow copy that shares the rest."""
    if root is old:
        return new  # type: ignore[return-value]
    children = {
        name: replaced(child, old, new)
        for name, child in root.named_children()
        if any(module is old for module in child.modules())
    }
    if not children:
        return root
    found = copy.copy(root)
    found.__dict__["_modules"] = {**root._modules, **children}
    return found


def without(family: Family, skip: Skip, outputs: int) -> tuple[Family, dict[int, LeftOut]]:
    """The ``family`` of the same model without the layers ``skip``, and what is in their place."""
    left = {number: LeftOut(family.layers[number], outputs) for number in skip}
    layers = Layers(left.get(i, layer) for i, layer in enumerate(family.layers))
    decoder = replaced(family.decoder, family.layers, layers)
    body = family.body
    if body is not family.model:  # which is asked as a whole only where it has a body
        body = replaced(body, family.decoder, decoder)
    return dataclasses.replace(family, decoder=decoder, body=body), left


def asked(family: Family) -> Asked:
    """What there is to ask of the ``family``'s model, by three forwards over a token, once."""
    return fact(family.model, "early exit", lambda: _ask(family))


def _ask(family: Family) -> Asked:
    found: list[Any] = []
    handle = family.layers[0].register_forward_hook(lambda *call: found.append(call[-1]))
    try:
        _one_token(family)
    finally:
        handle.remove()
    outputs = len(found[0]) if isinstance(found[0], tuple) else 0
    return Asked(outputs, _resumes(family, outputs))


def _resumes(family: Family, outputs: int) -> bool:
    """Whether the second half of the layers on states of the first gives what all would."""
    count = len(family.layers)
    half = count // 2
    if not half:
        return False
    first, left = without(family, tuple(range(half, count)), outputs)
    whole = _one_token(family)
    _one_token(first)
    second, given = without(family, tuple(range(half)), outputs)
    given[half - 1].give(left[half].seen)
    return torch.allclose(_one_token(second), whole, rtol=1e-3, atol=1e-4)


def _one_token(family: Family) -> Tensor:
    """The decoder's states [1, 1, C] after a token."""
    ids = plain_tokens(family.model.config, 1)[None].to(family.model.device)
    cache = {family.cache_name: empty_cache(family.model)}
    with torch.inference_mode():
        if family.body is not family.model:
            return family.run({"input_ids": ids, **cache})[0]
        inputs = family.embedding(ids)
        states: Tensor = family.decoder(inputs_embeds=inputs, use_cache=True, **cache)[0]
        return states


class LayeredTarget:
    """``target`` as one that runs without some of its layers; see
    :class:`specmm.layered.Layered`.

    Raises ``ValueError`` for models whose layers have states or read what other layers or pictures
    have stored.
    """

    def __init__(self, target: VLMTarget) -> None:
        _check(target)
        self.target = target
        self.asked = asked(target.family)
        self.begin()

    @property
    def layers(self) -> int:
        return len(self.target.family.layers)

    @property
    def resumes(self) -> bool:
        return self.asked.resumes

    @property
    def cache(self) -> Cache:
        return self.target.cache

    def begin(self) -> None:
        """See :class:`Layered`: views are of a batch."""
        self.views: dict[Skip, tuple[VLMTarget, dict[int, LeftOut]]] = {}
        self.target.rest = None

    def logits(
        self, skip: Skip, tokens: Tensor, positions: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        view, left = self._view(skip)
        logits = view.head(view.states(tokens, positions, bias))
        return view.guided(logits, positions), left[skip[0]].seen

    def states(self, stop: int, tokens: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        view, left = self._view(tuple(range(stop, self.layers)))
        view.states(tokens, positions, bias)
        return left[stop].seen

    def resume(self, first: int, states: Tensor | None) -> None:
        self.target.rest = None
        if states is not None:
            view, left = self._view(tuple(range(first)))
            left[first - 1].give(states)
            self.target.rest = view.states

    def _view(self, skip: Skip) -> tuple[VLMTarget, dict[int, LeftOut]]:
        """The target without the layers ``skip``, and what is in their place."""
        if skip not in self.views:
            view = copy.copy(self.target)
            view.family, left = without(self.target.family, skip, self.asked.outputs)
            self.views[skip] = (view, left)
        return self.views[skip]


def _check(target: VLMTarget) -> None:
    family = target.family
    kind = target.model.config.model_type
    if family.chains_only:
        raise ValueError(
            f"method 'self' needs layers that keep keys only, got a {kind} model, whose layers "
            "have states, which drafts would move; use prompt-lookup or a method with a drafter"
        )
    if None in family.layer_sizes:
        raise ValueError(
            f"method 'self' needs layers that read their own keys of the text, got a {kind} model, "
            "some of which read others; use prompt-lookup or a method with a drafter"
        )
    if target.way.whole and family.body is family.model:
        raise ValueError(
            f"method 'self' needs a model with a body, got a {kind} model, which runs with its head"
        )


def make(
    method: methods.SelfDraft, target: VLMTarget, drafter: object, tokenizer: object
) -> Assembly:
    """The parts of method ``self``."""
    return Assembly(drafter_of(method, target), chain_rule(target))


def drafter_of(method: methods.SelfDraft, target: VLMTarget) -> SelfDrafter:
    """Chains by ``target`` itself, without the layers that ``method`` names."""
    layered = LayeredTarget(target)
    own = target.processor
    skip = skipped(layered.layers, method.exit, method.skip)
    processor = own if isinstance(own, Processor) else Processor(float(not own.greedy))
    return SelfDrafter(layered, processor, skip, method.length, target.device)
