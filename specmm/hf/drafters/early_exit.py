"""A transformers target that runs without some of its layers, and method ``self``.

The decoder that drafts is a shallow copy of the target's, whose list of layers holds stand-ins for
those left out: they give back what they are given. So the model's own forward runs, with its masks,
positions and numbers of layers, and the target's modules are never changed.

Shape letters: B batch, G guidance branches, R = G·B rows, n nodes, S slots, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specmm import methods
from specmm.cache import Cache
from specmm.hf.drafting import Assembly
from specmm.hf.families import Family, empty_cache, plain_tokens
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.self_drafting import SelfDrafter, Skip, skipped
from specmm.verify import Block, Recursive

M = TypeVar("M", bound=nn.Module)
_outputs: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


class LeftOut(nn.Module):
    """In place of ``layer``: gives back the states it is given, as the first of ``outputs`` (0: by
    themselves).
    """

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a module of this one
        self.outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The states that ``layer`` would read."""
        states = args[0] if args else kwargs["hidden_states"]
        return (states, *[None] * (self.outputs - 1)) if self.outputs else states

    def __getattr__(self, name: str) -> Any:
        """What decoders ask of a layer, such as its kind of attention."""
        return getattr(self.__dict__["layer"], name)


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


def without(family: Family, skip: Skip) -> Family:
    """The ``family`` of the same model without the layers ``skip``."""
    outputs = outputs_of_layers(family)
    layers = nn.ModuleList(
        LeftOut(layer, outputs) if number in skip else layer
        for number, layer in enumerate(family.layers)
    )
    decoder = replaced(family.decoder, family.layers, layers)
    body = replaced(family.body, family.decoder, decoder)
    return dataclasses.replace(family, decoder=decoder, body=body)


def outputs_of_layers(family: Family) -> int:
    """How many outputs a layer has; 0 for states by themselves. Asked of one forward a model."""
    if family.model not in _outputs:
        found: list[Any] = []
        first = family.layers[0]
        handle = first.register_forward_hook(lambda _, __, output: found.append(output))
        ids = plain_tokens(family.model.config, 1)[None].to(family.model.device)
        given = {"input_ids": ids, family.cache_name: empty_cache(family.model)}
        try:
            with torch.inference_mode():
                family.body(**given, use_cache=True)
        finally:
            handle.remove()
        _outputs[family.model] = len(found[0]) if isinstance(found[0], tuple) else 0
    return _outputs[family.model]


class LayeredTarget:
    """``target`` as one that runs without some of its layers; see :class:`Layered`.

    Raises ``ValueError`` for models whose layers have states or read what other layers stored.
    """

    def __init__(self, target: VLMTarget) -> None:
        _check(target)
        self.target = target
        self.views: dict[Skip, VLMTarget] = {}

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return len(self.target.family.layers)

    @property
    def cache(self) -> Cache:
        """That of the batch."""
        return self.target.cache

    def begin(self) -> None:
        """See :class:`specmm.self_drafting.Layered`: views are of a batch."""
        self.views = {}

    def logits(self, skip: Skip, tokens: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """See :class:`specmm.self_drafting.Layered`."""
        if skip not in self.views:
            view = self.views[skip] = copy.copy(self.target)
            view.family = without(self.target.family, skip)
        view = self.views[skip]
        return view.guided(view.head(view.states(tokens, positions, bias)), positions)


def _check(target: VLMTarget) -> None:
    family = target.family
    kind = target.model.config.model_type
    if family.chains_only:
        raise ValueError(
            f"method 'self' needs layers that keep keys only, got a {kind} model, whose layers have "
            "states, which drafts would move; use prompt-lookup or a method with a drafter"
        )
    if None in family.layer_sizes and not family.reads_pictures_apart:
        raise ValueError(
            f"method 'self' needs layers that read their own keys, got a {kind} model, whose layers "
            "read those of others; use prompt-lookup or a method with a drafter"
        )
    if target.way.whole and family.body is family.model:
        raise ValueError(
            f"method 'self' needs a model with a body, got a {kind} model, which runs with its head"
        )


def make(
    method: methods.SelfDraft, target: VLMTarget, drafter: object, tokenizer: object
) -> Assembly:
    """The parts of method ``self``: chains, by block verification where they are drawn."""
    layered = LayeredTarget(target)
    skip = skipped(layered.layers, method.exit, method.skip)
    own = target.processor
    processor = own if isinstance(own, Processor) else Processor(float(not own.greedy))
    made = SelfDrafter(layered, processor, skip, method.length, method.sure, target.device)
    return Assembly(made, Recursive() if own.greedy else Block())
