"""From a method to the parts of the loop: drafter and rule for a target.

Shape letters: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specmm import methods
from specmm.drafter import Drafter, Late
from specmm.growth import Dynamic
from specmm.shape.static import named, spine
from specmm.tree import TreeShape
from specmm.verify import Recursive, Rule
from specmm.vlm.drafters.lookup import PromptLookupDrafter
from specmm.vlm.drafters.model import ModelDrafter, padded, text_only
from specmm.vlm.prompt import VLMPrompt, on_device
from specmm.vlm.target import VLMTarget
from specmm.vlm.translation import Translation

ENCODED = "mm_encoder_outputs"  # generate's own reading of the pictures, handed to a custom_generate


@dataclass
class SmallModel:
    """A transformers ``model`` that drafts, and its own ``processor`` (a text model's tokenizer), if any."""

    model: Any
    processor: Any = None

    @property
    def vocabulary(self) -> int:
        """Its tokens, padding included."""
        return int(self.model.config.get_text_config().vocab_size)


class Assembly(NamedTuple):
    """Drafter and rule of the loop."""

    drafter: Drafter
    rule: Rule


def assemble(method: methods.VQAMethod, target: VLMTarget, drafter: Any = None, tokenizer: Any = None) -> Assembly:
    """The parts of a speculative ``method``; ``drafter`` is what it drafts with, ``tokenizer`` the target's.

    A drafter that must read the prompt begins late: many answers about a picture are one word.

    Raises ``ValueError`` for a method that drafts nothing and for a drafter that does not fit.
    """
    device = target.device
    match method:
        case methods.PromptLookup():
            return Assembly(PromptLookupDrafter(target, method.ngram, method.length), Recursive())
        case methods.TextDraft():
            blind = _blind(_small(drafter), target, static_shape(method.tree, device), tokenizer)
            return Assembly(Late(blind), Recursive())
        case methods.VLMDraft():
            seeing = _seeing(_small(drafter), target, static_shape(method.tree, device), tokenizer)
            return Assembly(Late(seeing), Recursive())
        case methods.MSD():
            from specmm.vlm.drafters.msd import MSDDrafter

            tree = (
                static_shape(method.tree, device)
                if method.sampled
                else Dynamic(method.top_k, method.depth, method.total)
            )
            return Assembly(Late(MSDDrafter(drafter, target, tree, method.sampled)), Recursive())
        case _:
            raise ValueError(f"method {method.name!r} drafts nothing")


def _small(drafter: Any) -> SmallModel:
    if not isinstance(drafter, SmallModel) and not isinstance(drafter, torch.nn.Module):
        raise ValueError(f"drafter must be a transformers model, got {type(drafter).__name__}; load one and give it")
    return drafter if isinstance(drafter, SmallModel) else SmallModel(drafter)


def static_shape(tree: methods.Tree, device: Any) -> TreeShape:
    """A named tree, parents (from -1 on), or children by level of a spine."""
    if isinstance(tree, str):
        return named(tree, device)
    wanted = tree or (1, 1, 1, 1)
    return TreeShape.from_parents(wanted, device) if wanted[0] == -1 else spine(wanted, device)


def _blind(small: SmallModel, target: VLMTarget, shape: TreeShape, tokenizer: Any) -> ModelDrafter:
    """A language model; with a tokenizer that is not the target's it is shown text and its drafts are translated."""
    images, own = target.image_tokens, small.processor
    translation = translated(own, tokenizer, target, small.vocabulary)
    if translation is None or not translation.foreign:
        return ModelDrafter(small.model, target, shape, lambda prompt: text_only(prompt, images), translation)

    def read(prompt: VLMPrompt) -> dict[str, Any]:
        rows = [[t for t in row if t not in images] for row in prompt.rows()]
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return padded([own.encode(text) or [0] for text in texts], prompt.input_ids.device)

    return ModelDrafter(small.model, target, shape, read, translation)


def _seeing(small: SmallModel, target: VLMTarget, shape: TreeShape, tokenizer: Any) -> ModelDrafter:
    """A vision-language model, shown pictures and question by its own processor, or the target's inputs."""
    own = small.processor

    def read(prompt: VLMPrompt) -> dict[str, Any]:
        if own is None or prompt.source is None:
            if ENCODED in prompt.inputs:
                raise ValueError(
                    "method 'vlm-draft' needs the pictures, got the target's own reading of them: generate encodes "
                    "them before it calls us; use VQAPipeline, or msd or text-draft here"
                )
            return prompt.inputs
        return on_device(prompt.source.inputs(own), prompt.input_ids.device)

    translation = translated(getattr(own, "tokenizer", None), tokenizer, target, small.vocabulary)
    return ModelDrafter(small.model, target, shape, read, translation)


def translated(own: Any, tokenizer: Any, target: VLMTarget, vocabulary: int) -> Translation | None:
    """Between the ``tokenizer`` of the target and a drafter's ``own`` of ``vocabulary`` tokens; None where it has none.

    Raises ``ValueError`` for a drafter with its own tokenizer where the target's is not given.
    """
    if own is None:
        return None
    if tokenizer is None:
        raise ValueError(
            "a drafter with a tokenizer of its own needs the target's, got none; give tokenizer=…, or the drafter "
            "without its own if it reads the target's tokens"
        )
    if own.get_vocab() == tokenizer.get_vocab():
        return Translation.same(vocabulary, target.family.vocabulary, padding=None)
    return Translation.between(tokenizer, own, target.family.vocabulary)
