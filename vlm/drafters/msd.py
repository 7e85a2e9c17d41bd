"""Drafting with an MSD head: EAGLE-2's tree of point masses, or a static tree whose distributions
are recorded.

The prompt's slots are decoupled (see ``msd_head``), wherever and however many its pictures are: the
target tells. Every round the slots of the committed tokens are run again on the target's own hidden
states.

Shape letters: B batch, L prompt positions, n nodes, C width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specmm import methods
from specmm.cache import Cache, CacheSize
from specmm.drafter import DeferredDrafter, Feedback
from specmm.growth import Growth
from specmm.hf.drafting import Assembly, Verification
from specmm.hf.target import Context, VLMTarget
from specmm.processors import Processor
from specmm.randomness import UniformSource
from specmm.shape.eagle2 import Dynamic
from specmm.shape.names import static_tree
from specmm.shape.sampled import Siblings
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape
from specmm.verify import Recursive
from specmm.vlm.drafters.msd_head import MSDHead

RELEASED = Dynamic(top_k=10, depth=5, total=59)


class MSDDrafter:
    """Drafts with an :class:`MSDHead` for ``target``; ``tree``, ``sampled`` and ``siblings`` are
    those of :class:`specmm.growth.Growth`, and greedy decoding never samples.

    Raises ``ValueError`` when the head's width or vocabulary is not the target's.
    """

    def __init__(
        self,
        head: MSDHead,
        target: VLMTarget,
        tree: TreeShape | Dynamic = RELEASED,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        check_sizes(head, target)
        self.head, self.target = head.eval(), target
        target.wants_context = True
        sampled = sampled and not target.processor.greedy
        self.growth = Growth(tree, sampled, head.config.vocab_size, target.device, siblings)
        self.max_nodes, self.max_depth = self.growth.max_nodes, self.growth.max_depth
        self.probs = target.processor if isinstance(target.processor, Processor) else Processor()

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch: a cache as roomy as the target's, the attention masks of the tree, and the
        prompt read.
        """
        hidden, config = feedback.output.hidden, self.head.config
        size = CacheSize(
            layers=config.num_hidden_layers,
            heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            batch=len(feedback.token),
            branches=1,
            capacity=self.target.cache.size.capacity,
            scratch=self.growth.scratch,
        )
        self.cache, self.clock = Cache(size, hidden.dtype, hidden.device), clock
        self.growth.begin(self.cache)
        self.state = self._read_prompt(self.target, feedback.token, self.cache)  # [B, C]

    def start_row(self, row: int) -> None:
        """Read the prompt admitted, but for its last slot: the next round reads that with the first
        token.
        """
        alone, size = self.target.started, replace(self.cache.size, batch=1, scratch=0)
        slots = Cache(
            replace(size, capacity=alone.prompt.input_ids.shape[1]),
            self.cache.data.dtype,
            alone.device,
        )
        self._read_prompt(alone, alone.prompt.input_ids[:, -1], slots)
        slots.lengths -= 1
        self.cache.take(row, slots)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Draft the tree after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        state = (
            self.state if feedback.result is None else self.growth.read_committed(self, feedback)
        )
        return self.growth.grow(self, feedback.token, state, uniforms)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """The target's output head [B, n, V] on predicted ``states`` [B, n, C]."""
        with self.clock("draft"):
            return self.target.head(states).float()

    def read(self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """One pass of the head over text slots of ``tokens`` [B, n] and ``hidden`` [B, n, C]."""
        with self.clock("draft"):
            slots = self.head.text_slots(self.head.embed_tokens(tokens), hidden)
            return self.head(slots, positions, bias, self.cache.layers)

    def _read_prompt(self, target: VLMTarget, token: Tensor, cache: Cache) -> Tensor:
        """Store the prompt's slots; the state predicted after the first sampled ``token`` [B] is
        [B, C].
        """
        context = target.context
        assert context is not None, "the target keeps a context for drafters that want one"
        with self.clock("draft"):
            embeddings, image = next_positions(context, self.head.embed_tokens(token))
            cache.aim(0, embeddings.shape[1])
            cache.lengths += context.lengths
            slots = self.head.prompt_slots(embeddings, context.hidden, image)
            states = self.head(slots, memory=cache.layers)
        return states[torch.arange(len(token), device=token.device), context.lengths - 1]


def next_positions(context: Context, last: Tensor) -> tuple[Tensor, Tensor]:
    """What each slot [B, L] reads of the position after it: its embedding [B, L, C], whether it is
    a picture's.

    The last slot of each row reads ``last`` [B, C], the embedding of the token after the prompt.
    """
    order = torch.arange(context.embeddings.shape[1], device=last.device)
    ends = order == context.lengths[:, None] - 1  # [B, L]
    embeddings = torch.where(ends[..., None], last[:, None], context.embeddings.roll(-1, 1))
    return embeddings, context.image_mask.roll(-1, 1) & ~ends


def check_sizes(head: MSDHead, target: VLMTarget) -> None:
    """Raise ``ValueError`` when width or vocabulary of ``head`` are not those of ``target``'s
    output head.
    """
    if not isinstance(head, MSDHead):
        raise ValueError(
            f"drafter must be an MSD head, got {type(head).__name__}; load one with load_msd"
        )
    weights = head.embed_tokens.weight.dtype, target.family.head.weight.dtype
    if weights[0] != weights[1]:
        raise ValueError(
            f"drafter must have the target's dtype {weights[1]}, got {weights[0]}; head.to({weights[1]})"
        )
    vocabulary, width = target.family.head.weight.shape
    for what, found, wanted in (
        ("width", head.config.hidden_size, width),
        ("vocabulary", head.config.vocab_size, vocabulary),
    ):
        if found != wanted:
            raise ValueError(
                f"drafter must have the target's {what} {wanted}, got {found}; use one trained for it"
            )


def make(method: methods.MSD, target: VLMTarget, drafter: Any, tokenizer: Any) -> Assembly:
    """The parts of method ``msd``: EAGLE-2's tree, or one of fixed shape that is drawn."""
    if not method.sampled:
        tree = Dynamic(method.top_k, method.depth, method.total)
        return Assembly(DeferredDrafter(MSDDrafter(drafter, target, tree, False)), Recursive())
    verification = Verification.of(method.rule, target)
    made = MSDDrafter(drafter, target, static_tree(method.tree, target.device), *verification.drawn)
    return Assembly(DeferredDrafter(made), verification.rule)
