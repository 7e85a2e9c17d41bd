"""Method ``eagle3``: an EAGLE-3 head of any released layout drafts for a target.

Shape letters: B batch, L prompt positions, n nodes, C width, F layers of the target that are read,
W the target's width, v the head's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.core.cache import LayerSize, Memory, alike
from specmm.core.drafter import DrafterVocabulary
from specmm.hf.drafters.eagle3_files import load_eagle3
from specmm.hf.drafters.eagle3_head import READ, Eagle3Head, layers_read
from specmm.hf.drafters.files import cast
from specmm.hf.drafters.files import check_target as check_fingerprint
from specmm.hf.models.cache_layers import as_transformers
from specmm.hf.models.target import VLMTarget
from specmm.loading.checkpoints import embeddings_of, read_json
from specmm.loading.hardware import prepack


class BoundEagle3:
    """``head`` as it drafts for ``target``; see :class:`specmm.hf.drafters.features.BoundNetwork`.

    Raises ``ValueError`` unless dtype, width, vocabulary and layers fit the target.
    """

    def __init__(self, head: Eagle3Head, target: VLMTarget) -> None:
        self.layers = check_target(head, target)
        self.head = head.eval()
        config = head.config
        sizes: Any = config.sizes
        self.target = target
        self.vocabulary = DrafterVocabulary(sizes.vocab_size, head.ids)
        self.parts = bool(config.sections)
        self.mask = self._mask() if config.mask is not None else None
        self.sizes: Sequence[LayerSize] = alike(
            sizes.num_hidden_layers, sizes.num_key_value_heads, sizes.head_dim
        )
        self._score: Callable[[Tensor], Tensor] | None = None
        if not config.own_head:
            self._score = target.family.logits_of(head.ids)
        self._memory: Sequence[Memory | None] | None = None
        self._past: Any = None

    @torch.inference_mode()
    def begin(self) -> None:
        if self._score is not None:
            self.target.family.logits_of(self.head.ids)  # brings its rows up to date
        if self.mask is not None:
            self.mask.copy_(self._mask())

    @torch.no_grad()
    def _mask(self) -> Tensor:
        """P-EAGLE's slot [1, 1, 2·C] for a token that is not known yet."""
        token = torch.tensor([[self.head.config.mask]], device=self.head.fc.weight.device)
        return self.slots(self.embed(token), self.head.mask_hidden, 0)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, n, C] of ``tokens`` [B, n], by the head's own table or the target's."""
        if self.head.config.own_embeddings:
            return self.head.embed_tokens(tokens)
        return self.target.embed(tokens)

    def prompt_embeddings(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        """The head's input embeddings [B, L, C] for the prompt's ``tokens`` [B, L].

        ``embeddings`` [B, L, W] are the target's, with its projected pictures. Released heads embed
        a picture's placeholder token: they know the picture only from the target's states.
        """
        if self.head.config.picture_embeddings:
            return embeddings
        return self.embed(tokens.clamp(max=self.vocabulary.size - 1))

    def prompt_slots(self, embeddings: Tensor, hidden: Tensor, image: Tensor) -> Tensor:
        """See the base class; text and pictures have the same kind of slot."""
        return self.slots(embeddings, hidden, 0)

    def slots(self, embeddings: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """Inputs of the head: the target's states are first mixed by ``fc``, predicted ones not."""
        return self.head.slots(embeddings, hidden if depth else self.head.mixed(hidden))

    def run(
        self,
        slots: Tensor,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
        memory: Sequence[Memory | None] | None = None,
    ) -> Tensor:
        if memory is not self._memory:
            self._memory = memory
            self._past = None if memory is None else as_transformers([m for m in memory if m])
        states: Tensor = self.head(slots, positions, bias, self._past)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Logits [B, n, v] of predicted ``states`` [B, n, C], by the head's or target's table."""
        if self._score is None:
            return self.head.logits(states)
        return self._score(self.head.read_out(states))


def load_for(folder: Path, target: PreTrainedModel, method: str) -> Eagle3Head:
    """The head in ``folder`` for the ``target`` model, in its dtype, with prepacked weights."""
    check_fingerprint(read_json(folder / "config.json"), target, folder)
    return prepack(cast(load_eagle3(folder).to(target.device), target.dtype))


def check_target(head: Eagle3Head, target: VLMTarget) -> tuple[int, ...]:
    """The layers, counted from 0, that ``head`` reads of ``target``.

    Raises ``ValueError`` unless dtype, width, vocabulary and layers are the target's.
    """
    config = head.config
    sizes: Any = config.sizes
    family = target.family
    width = int(family.config.hidden_size)
    table = embeddings_of(target.model)
    pairs = {
        "dtype": (head.fc.weight.dtype, target.dtype),
        "width": (config.state_width, width),
        "vocabulary": (int(sizes.vocab_size), family.vocabulary),
    }
    if not config.own_embeddings:
        pairs["embeddings' width"] = (int(sizes.hidden_size), int(table.shape[1]))
    if not config.own_head:
        pairs["head's width"] = (int(sizes.hidden_size), width)
    for name, (got, need) in pairs.items():
        if got != need:
            raise ValueError(
                f"drafter must have the target's {name} {need}, got {got}; use one trained for it"
            )
    return config.layers or _usual_layers(len(family.layers))


def _usual_layers(count: int) -> tuple[int, ...]:
    """The layers of a target of ``count`` layers that a head reads if its config names none."""
    layers = layers_read(count)
    if len(layers) != READ:
        raise ValueError(
            "drafter must say which layers it reads of a target of fewer than 7 layers, got a "
            f"target of {count} and no eagle_aux_hidden_state_layer_ids in its config.json"
        )
    return layers
