"""Drafters that predict the target's next state from a token and the state before it: EAGLE's kind
(MSD, EAGLE-3, layers for multi-token prediction).

They grow EAGLE-2's tree of point masses, or a static tree of recorded distributions; ``auto``
chooses which. A prompt's slot j carries position j + 1 with the target's own input embedding, so
pictures may be anywhere in it. In every round the slots of the committed tokens are recomputed from
the target's own hidden states.

Shape letters: B batch, L prompt positions, n nodes, C width, F layers of the target that are read,
v the drafter's vocabulary, D levels, K ranks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from specmm import methods
from specmm.choose.acceptance import WIDEST, AcceptanceCounter
from specmm.choose.contest import Candidate
from specmm.core.cache import Cache, CacheSize, LayerSize, Memory
from specmm.core.decode import EndTokens, decode
from specmm.core.drafter import DeferredDrafter, DrafterVocabulary, Feedback
from specmm.core.growth import Growth
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms, UniformSource
from specmm.core.state import with_one, without
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.drafting import Assembly, drafting_probs
from specmm.hf.drafters.files import Acceptance
from specmm.hf.drafters.parallel import MaskedPass
from specmm.hf.drafters.trees import drawn_trees
from specmm.hf.models.target import Context, VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.shape.eagle2 import Dynamic
from specmm.shape.sequoia import best_tree
from specmm.shape.trees import Siblings, spine
from specmm.verify import Recursive

Grown = TypeVar("Grown", methods.MSD, methods.Eagle3)

logger = logging.getLogger(__name__)
RELEASED = Dynamic(top_k=10, depth=5, total=59)
SIZES = (4, 8, 16)  # nodes of the trees that method auto tries, the root included


class FeatureNetwork(Protocol):
    """A drafting network; ``acceptance`` by temperature was measured after its training."""

    acceptance: dict[float, Acceptance]

    def bound(self, target: VLMTarget) -> BoundNetwork:
        """The network as it drafts for ``target``; raises ``ValueError`` if it does not fit."""


class BoundNetwork(Protocol):
    """A network that drafts for one target."""

    @property
    def sizes(self) -> Sequence[LayerSize]:
        """The size of each layer's cache entry for a token."""

    @property
    def vocabulary(self) -> DrafterVocabulary:
        """The tokens that it can draft."""

    @property
    def layers(self) -> Sequence[int]:
        """The target layers that it reads; empty: the states that the target's head reads."""

    @property
    def parts(self) -> bool:
        """Whether it uses the target's three-part M-RoPE positions, rather than slot numbers."""

    @property
    def mask(self) -> Tensor | None:
        """The slot [1, 1, ...] for a token not known yet, if one pass predicts several tokens."""

    def begin(self) -> None:
        """Recompute values derived from the target's weights, in place."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, n, C] of the target's ``tokens`` [B, n]."""

    def prompt_embeddings(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        """Input embeddings [B, L, C] of prompt ``tokens`` [B, L]; ``embeddings``: the target's."""

    def prompt_slots(self, embeddings: Tensor, hidden: Tensor, image: Tensor) -> Tensor:
        """Slots [B, L, ...] of the next positions' ``embeddings`` [B, L, C].

        ``hidden`` [B, L, C or F·C] are the target's states, ``image`` [B, L] tells where the next
        position is a picture's.
        """

    def slots(self, embeddings: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """Slots [B, n, ...] of tokens with ``embeddings`` [B, n, C].

        ``hidden`` are the target's states [B, n, C or F·C] at ``depth`` 0, and the network's
        predictions [B, n, C] below.
        """

    def run(
        self,
        slots: Tensor,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
        memory: Sequence[Memory | None] | None = None,
    ) -> Tensor:
        """Predicted states [B, n, C] of ``slots`` at ``positions`` [1 or B, n] (0 … n - 1), or in
        parts [3, B, n].

        Without ``bias`` the attention is causal over the given slots; else each layer attends to
        its ``memory`` under the additive ``bias`` [1 or B, 1, n, S].
        """

    def logits(self, states: Tensor) -> Tensor:
        """Logits [B, n, v] of predicted ``states`` [B, n, C]."""


class FeatureDrafter:
    """Drafts with a ``network`` for ``target``.

    ``tree``, ``sampled`` and ``siblings``: see :class:`specmm.core.growth.Growth`; greedy decoding
    never samples. Raises ``ValueError`` when the network does not fit the target.
    """

    state: ClassVar[tuple[str, ...]] = ("cache", "growth", "ahead", "shift")

    def __init__(
        self,
        network: FeatureNetwork,
        target: VLMTarget,
        tree: TreeShape | Dynamic = RELEASED,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        self.network = network.bound(target)
        self.target = target
        target.wants_context = True
        target.read_layers(self.network.layers)
        sampled = sampled and not target.processor.greedy
        vocabulary = self.network.vocabulary
        self.growth = Growth(tree, sampled, vocabulary, target.device, siblings)
        self.max_nodes = self.growth.max_nodes
        self.max_depth = self.growth.max_depth
        self.probs = drafting_probs(target, vocabulary)
        self.ahead: MaskedPass | None = None
        if self.network.mask is not None and self.max_depth > 1:
            self.ahead = MaskedPass(self.network.mask, self.max_depth, self._run)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Make a cache of the target's capacity and read the prompt."""
        hidden = feedback.output.hidden
        self.network.begin()
        self.clock = clock
        size = CacheSize(
            layers=self.network.sizes,
            batch=len(feedback.token),
            branches=1,
            capacity=self.target.cache.size.capacity,
            scratch=max(self.growth.scratch, self.ahead.scratch if self.ahead else 0),
        )
        self.cache = Cache.again(vars(self).get("cache"), size, hidden.dtype, hidden.device)
        self._resized()
        self.shift = shift_of(self.target)
        self.predicted = self._read(self.target, feedback.token, self.cache)  # [B, C]

    def start_row(self, row: int) -> None:
        """Read the new prompt except its last slot, which the next round reads with a token."""
        row_target = self.target.started
        ids = row_target.prompt.input_ids
        size = dataclasses.replace(self.cache.size, batch=1, scratch=0, capacity=ids.shape[1])
        slots = Cache(size, self.cache.dtype, row_target.device)
        self._read(row_target, ids[:, -1], slots)
        slots.lengths -= 1
        if self.target.cache.size.capacity > self.cache.size.capacity:
            self.cache.widen(self.target.cache.size.capacity)
            self._resized()
        self.cache.take(row, slots)
        self.shift = with_row(self.shift, row, shift_of(row_target))

    def join(self) -> None:
        """Add a row at the end, which is then started."""
        self.cache.join()
        self.shift = with_one(self.shift, -1)
        self._resized()

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""
        self.cache.leave(row)
        self.shift = without(self.shift, row, -1)
        self._resized()

    def weigh(self) -> None:
        """From now on, record the probability of each draft of a chain."""
        self.growth.weighs = True

    def absorb(self, feedback: Feedback) -> None:
        """Read the committed tokens of a round that was drafted by another drafter."""
        assert feedback.result is not None
        self.kept = feedback.result.kept
        self.growth.read_committed(self, feedback)

    def _resized(self) -> None:
        """Recreate the masks after the cache changed its size."""
        self.growth.begin(self.cache)
        if self.ahead is not None:
            self.ahead.begin(self.cache)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """A chain or tree from the state predicted after the committed tokens."""
        state = self.predicted
        if feedback.result is not None:
            self.kept = feedback.result.kept
            state = self.growth.read_committed(self, feedback)
        elif self.ahead is not None:
            with self.clock("draft"):
                self.ahead.read_alone()
        return self.growth.grow(self, feedback.token, state, uniforms)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Logits [B, n, v] of predicted ``states`` [B, n, C]."""
        with self.clock("draft"):
            return self.network.logits(states).float()

    def read(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor, depth: int
    ) -> Tensor:
        """States predicted after ``tokens``; a parallel head has them from its masks."""
        with self.clock("draft"):
            if self.ahead is not None and depth:
                return self.ahead.after(depth, tokens.shape[1])
            slots = self.network.slots(self.network.embed(tokens), hidden, depth)
            if self.ahead is not None:
                return self.ahead.read(slots, positions, bias, self.kept)
            return self._run(slots, positions, bias)

    def _run(self, slots: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """One pass over ``slots`` of tokens at ``positions`` [B, n] in their texts."""
        if self.network.parts:
            positions = self.target.family.spread(positions + self.shift[..., None])
        return self.network.run(slots, positions, bias, self.cache.layers)

    def _read(self, target: VLMTarget, token: Tensor, cache: Cache) -> Tensor:
        """Store the slots of the prompt, and of the sampled ``token`` [B] after it, in ``cache``.
        Returns the state [B, C] predicted after each row's last slot.
        """
        context = target.context
        assert context is not None, "the target keeps a context for drafters that want one"
        network = self.network
        with self.clock("draft"):
            prompt = network.prompt_embeddings(target.prompt.input_ids, context.embeddings)
            read = dataclasses.replace(context, embeddings=prompt)
            embeddings, image = next_positions(read, network.embed(token[:, None])[:, 0])
            slots = network.prompt_slots(embeddings, context.hidden, image)
            cache.aim(0, slots.shape[1])
            cache.lengths += context.lengths
            positions = context.positions if network.parts else None
            states = network.run(slots, positions, memory=cache.layers)
        return states[torch.arange(len(states), device=states.device), context.lengths - 1]


def next_positions(context: Context, last: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [B, L, C] of the position after each slot, and whether that is a picture's [B, L].

    After a row's last slot comes ``last`` [B, C], the embedding of the token after the prompt.
    """
    order = torch.arange(context.embeddings.shape[1], device=last.device)
    ends = order == context.lengths[:, None] - 1  # [B, L]
    embeddings = torch.where(ends[..., None], last[:, None], context.embeddings.roll(-1, 1))
    return embeddings, context.image_mask.roll(-1, 1) & ~ends


def shift_of(target: VLMTarget) -> Tensor:
    """Offsets [B] or [3, B] from a token's place in its text to its position."""
    offsets = target.offsets if target.offsets.ndim == 1 else target.offsets[-3:]
    return offsets + target.begins - target.prompt.lengths


def with_row(shift: Tensor, row: int, restarted: Tensor) -> Tensor:
    """``shift`` [B] or [3, B] in which a ``row`` that restarts has ``restarted`` [1] or [3, 1]."""
    if restarted.ndim > shift.ndim:  # the first row with positions in parts
        shift = shift.expand(len(restarted), -1).clone()
    shift[..., row] = restarted[..., 0]
    return shift


def make(method: Grown, target: VLMTarget, drafter: Any, tokenizer: object) -> Assembly:
    """The parts of a ``method``: with EAGLE-2's tree, or a sampled tree of fixed shape.

    If drafts must be chains, the default trees become chains of the same depth. Raises
    ``ValueError`` for a drafter of another method.
    """
    if getattr(drafter, "method", "") != method.name:
        raise ValueError(
            f"drafter must be one of method {method.name!r}, got {type(drafter).__name__}; give "
            "its folder or load one"
        )
    if target.family.chains_only:
        method = as_chains(method)
    if not method.sampled:
        target.check_tree(method.top_k)
        tree = Dynamic(method.top_k, method.depth, method.total)
        return Assembly(DeferredDrafter(FeatureDrafter(drafter, target, tree, False)), Recursive())
    shape, drawn, rule = drawn_trees(method.rule, method.tree, target)
    return Assembly(DeferredDrafter(FeatureDrafter(drafter, target, shape, *drawn)), rule)


def as_chains(method: Grown) -> Grown:
    """``method`` with chains in place of its default trees; logs the change."""
    plain = type(method)()
    chains = method
    if method.sampled and method.tree == plain.tree:
        chains = dataclasses.replace(method, tree=(1,) * len(plain.tree))
    elif not method.sampled and (method.top_k, method.total) == (plain.top_k, plain.total):
        chains = dataclasses.replace(method, top_k=1, total=method.depth + 2)
    if chains is not method:
        logger.info("layers with states take chains: %s drafts as %s", method.name, chains)
    return chains


def candidates(target: VLMTarget, network: FeatureNetwork, kind: Grown) -> list[Candidate]:
    """Candidates of ``kind`` for method ``auto``: Sequoia's trees for the ``network``'s measured
    acceptance, or the usual tree if it was never measured.
    """
    acceptance = network.acceptance
    if not acceptance:
        return [Candidate(kind)]
    table = acceptance[min(acceptance) if target.processor.greedy else max(acceptance)]
    if target.family.chains_only:
        table = tuple(level[:1] for level in table)
    listed = []
    for shape, tau in (best_tree(table, n, len(table)) for n in SIZES):
        method = dataclasses.replace(kind, sampled=True, tree=tuple(shape.parents[0].tolist()))
        listed.append(Candidate(method, tau, shape.size, shape.depth))
    return list(dict.fromkeys(listed))


def measure_acceptance(
    target: VLMTarget,
    network: FeatureNetwork,
    prompts: Iterable[VLMPrompt],
    ends: Sequence[int],
    levels: int = 10,
) -> Acceptance:
    """Acceptance [D, K] by level and rank over exact answers to ``prompts``, until ``ends``.

    If drafts must be chains, K is 1.
    """
    chains = target.family.chains_only
    shape = spine((1,) * levels if chains else WIDEST[:levels], target.device)
    counter = AcceptanceCounter(FeatureDrafter(network, target, shape), shape)
    for i, prompt in enumerate(prompts):
        uniforms = Uniforms.from_seeds(range(i, i + len(prompt.lengths)), target.device)
        stop = EndTokens(ends, target.device)
        length = prompt.max_new_tokens
        for _ in decode(target, counter, Recursive(), prompt, length, uniforms, stop=stop):
            pass
    return counter.table()


def acceptance_of(
    target: VLMTarget, network: FeatureNetwork, prompts: Sequence[VLMPrompt], ends: Sequence[int]
) -> dict[float, Acceptance]:
    """Acceptance by temperature, measured on answers to ``prompts``, for ``auto``'s plans."""
    tables = {}
    for temperature in (0.0, 1.0):
        judge = VLMTarget(target.model, Processor(temperature), target.name)
        tables[temperature] = measure_acceptance(judge, network, prompts, ends)
    return tables
