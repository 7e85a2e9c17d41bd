"""Method ``mtp``: the target's own multi-token prediction layers draft chains or trees.

Layer k reads a token and the state that layer k - 1 predicted for the token before it. The first
layer reads the target's own states; beyond the last layer's depth, that layer continues from its
own predictions (as FastMTP trains it, arXiv 2509.18362), where transformers' ``use_mtp`` stops.
Some models' layers read the target's own states at every depth (``mtp_layouts``). Each layer runs
once a round (``mtp_growth``).

Picture tokens are read by their picture embeddings. A slot's rotary position is its own token's
plus one: for text that is the next token's position, as in transformers. With M-RoPE, for which
transformers has no drafting, this is vLLM's convention shifted by one; a shift does not change
attention.

Shape letters: B rows, K layers, N tokens, L prompt positions, C width, S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm import methods
from specmm.core.cache import Cache, CacheSize
from specmm.core.drafter import DeferredDrafter, DrafterVocabulary, Feedback
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.drafting import Assembly, drafting_probs
from specmm.hf.drafters.features import shift_of, with_row
from specmm.hf.drafters.mtp_growth import LayerGrowth
from specmm.hf.drafters.mtp_layers import LayerSlots, MtpLayers, layers_of
from specmm.hf.drafters.trees import check_unguided, trees_of
from specmm.hf.models.target import VLMTarget
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings


class MtpDrafter:
    """Drafts with the ``layers`` of ``target``.

    ``tree``, ``sampled`` and ``siblings``: see :class:`specmm.core.growth.Growth`; greedy decoding
    never samples.
    """

    def __init__(
        self,
        layers: MtpLayers,
        target: VLMTarget,
        tree: TreeShape | Dynamic,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        layers.model.follow(target.model)
        self.layers = layers
        self.windows = layers.windows()
        self.target = target
        target.wants_context = True
        sampled = sampled and not target.processor.greedy
        vocabulary = DrafterVocabulary(target.family.vocabulary)
        self.growth = LayerGrowth(layers.count, tree, sampled, vocabulary, target.device, siblings)
        self.max_nodes = self.growth.max_nodes
        self.max_depth = self.growth.max_depth
        self.probs = drafting_probs(target, vocabulary)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Make a cache as roomy as the target's and read the prompt."""
        size = CacheSize(
            layers=self.layers.sizes[: self.growth.count],
            batch=len(feedback.token),
            branches=1,
            capacity=self.target.cache.size.capacity,
            scratch=self.growth.scratch,
        )
        self.clock = clock
        self.cache = Cache(size, self.target.dtype, self.target.device)
        self.slots = LayerSlots(self.layers, self.windows, self.cache)
        self.growth.begin(self.cache)
        self.shift = shift_of(self.target)
        states = self._read_prompt(self.target, feedback.token, self.cache)
        self.growth.last = _at_slots(states, self.cache.lengths - 1)

    def start_row(self, row: int) -> None:
        """Read the new prompt but for its last slot: the next round reads that with a token."""
        row_target = self.target.started
        ids = row_target.prompt.input_ids
        size = dataclasses.replace(self.cache.size, batch=1, scratch=0, capacity=ids.shape[1])
        slots = Cache(size, self.cache.dtype, row_target.device)
        states = self._read_prompt(row_target, ids[:, -1], slots)
        slots.lengths -= 1
        self.cache.take(row, slots)
        self.growth.last[row] = _at_slots(states, (slots.lengths - 1).clamp(min=0))[0]
        self.shift = with_row(self.shift, row, shift_of(row_target))

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        state = self.growth.read_committed(self, feedback)
        return self.growth.grow(self, feedback.token, state, uniforms)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """The target's output head [B, N, V] on the ``states`` [B, N, C]."""
        with self.clock("draft"):
            return self.target.head(self.layers.predicted(states)).float()

    def read(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor, depth: int
    ) -> Tensor:
        """States [B, N, C] that layer ``depth`` (at most the last) predicts after ``tokens``
        [B, N].

        ``hidden`` [B, N, C]: states of the tokens before them.
        """
        with self.clock("draft"):
            embeddings = self.target.family.plain_embedding(tokens)
            self.slots.aim(positions, positions + 1 + self.shift[..., None], bias)
            return self.slots.run(min(depth, self.growth.count - 1), embeddings, hidden)

    def _read_prompt(self, target: VLMTarget, token: Tensor, cache: Cache) -> Tensor:
        """Store the slots of prompt and ``token`` [B]; states [B, L, K, C] of all layers."""
        context = target.context
        assert context is not None, "the target keeps a context for drafters that want one"
        with self.clock("draft"):
            embeddings = self._next_embeddings(target, token)
            length = embeddings.shape[1]
            cache.aim(0, length)
            cache.lengths += context.lengths
            order = torch.arange(length, device=token.device)
            bias = torch.full((length, length), float("-inf"), dtype=cache.dtype).triu(1)
            positions = order + shift_of(target)[..., None]
            if context.positions is not None:
                positions = context.positions
            slots = LayerSlots(self.layers, self.windows, cache)
            slots.aim(order[None], positions + 1, bias.to(token.device)[None, None])
            states = [slots.run(0, embeddings, context.hidden)]
            for number in range(1, self.growth.count):
                before = F.pad(states[-1][:, :-1], (0, 0, 1, 0))
                states.append(slots.run(number, embeddings, before))
            return torch.stack(states, 2)

    def _next_embeddings(self, target: VLMTarget, token: Tensor) -> Tensor:
        """Embeddings [B, L, C] of the token after each slot of the prompt, finally ``token`` [B].

        Pictures are embedded as for the decoder.
        """
        context = target.context
        assert context is not None
        ends = (context.lengths - 1)[:, None]
        ids = target.prompt.input_ids.roll(-1, 1).scatter(1, ends, token[:, None])
        embeddings = target.family.plain_embedding(ids)
        pictures = context.image_mask.roll(-1, 1).scatter(1, ends, False)
        return torch.where(pictures[..., None], context.embeddings.roll(-1, 1), embeddings)


def _at_slots(states: Tensor, slots: Tensor) -> Tensor:
    """``states`` [B, L, K, C] at ``slots`` [B]: [B, K, C]."""
    return states[torch.arange(len(states), device=slots.device), slots]


def make(method: methods.MTP, target: VLMTarget, drafter: object, tokenizer: object) -> Assembly:
    """The parts of method ``mtp``; ``drafter``, if given, replaces the checkpoint's layers.

    Raises ``ValueError`` for anything else.
    """
    check_unguided(method, target)
    layers = layers_of(target.model) if drafter is None else drafter
    if not isinstance(layers, MtpLayers):
        raise ValueError(
            f"drafter must be MTP layers, got a {type(layers).__name__}; leave it out, or give a "
            "folder that holds some"
        )
    tree, drawn, rule = trees_of(method, target)
    return Assembly(DeferredDrafter(MtpDrafter(layers, target, tree, *drawn)), rule)
