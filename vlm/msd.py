"""Method ``msd``: an MSD head drafts EAGLE-2's tree of point masses, or a static tree of recorded
distributions; and which tree ``auto`` chooses.

The prompt's slots are decoupled (see ``msd_head``), wherever and however many its pictures are: the
target tells. In every round the slots of the committed tokens are run again on the target's own
hidden states.

Shape letters: B batch, L prompt positions, n nodes, C width, V vocabulary, D levels, K ranks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specmm import methods
from specmm.autotune import WIDEST, AcceptanceCounter, Plan, planned
from specmm.cache import Cache, CacheSize, alike
from specmm.decode import EndTokens, decode
from specmm.drafter import DeferredDrafter, Feedback
from specmm.growth import Growth
from specmm.hf.drafting import Assembly, Verification
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import Context, VLMTarget
from specmm.processors import Processor
from specmm.randomness import Uniforms, UniformSource
from specmm.shape.eagle2 import Dynamic
from specmm.shape.sequoia import best_tree
from specmm.shape.trees import Siblings, spine, static_tree
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape
from specmm.verify import Recursive
from specmm.vlm.msd_head import Acceptance, MSDHead

logger = logging.getLogger(__name__)
RELEASED = Dynamic(top_k=10, depth=5, total=59)
SIZES = (3, 4, 8, 12, 16, 24)  # nodes of the trees that a plan compares, the root included
ROOM = 24  # tokens of answer that measuring needs


class MSDDrafter:
    """Drafts with an :class:`MSDHead` for ``target``.

    ``tree``, ``sampled`` and ``siblings`` are those of :class:`specmm.growth.Growth`; greedy
    decoding never samples. Raises ``ValueError`` when the head's width or vocabulary is not the
    target's.
    """

    def __init__(
        self,
        head: MSDHead,
        target: VLMTarget,
        tree: TreeShape | Dynamic = RELEASED,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        _check_sizes(head, target)
        self.head = head.eval()
        self.target = target
        target.wants_context = True
        sampled = sampled and not target.processor.greedy
        self.growth = Growth(tree, sampled, head.config.vocab_size, target.device, siblings)
        self.max_nodes = self.growth.max_nodes
        self.max_depth = self.growth.max_depth
        self.probs = target.processor if isinstance(target.processor, Processor) else Processor()

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Make a cache as roomy as the target's and read the prompt."""
        hidden = feedback.output.hidden
        config = self.head.config
        size = CacheSize(
            layers=alike(config.num_hidden_layers, config.num_key_value_heads, config.head_dim),
            batch=len(feedback.token),
            branches=1,
            capacity=self.target.cache.size.capacity,
            scratch=self.growth.scratch,
        )
        self.cache = Cache(size, hidden.dtype, hidden.device)
        self.clock = clock
        self.growth.begin(self.cache)
        self.state = self._read_prompt(self.target, feedback.token, self.cache)  # [B, C]

    def start_row(self, row: int) -> None:
        """Read the new prompt but for its last slot: the next round reads that with a token."""
        alone = self.target.started
        ids = alone.prompt.input_ids
        size = dataclasses.replace(self.cache.size, batch=1, scratch=0, capacity=ids.shape[1])
        slots = Cache(size, self.cache.dtype, alone.device)
        self._read_prompt(alone, ids[:, -1], slots)
        slots.lengths -= 1
        self.cache.take(row, slots)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The tree after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        state = self.state
        if feedback.result is not None:
            state = self.growth.read_committed(self, feedback)
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
        """Store the prompt's slots; the state [B, C] predicted after the sampled ``token`` [B]."""
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
    """For each slot [B, L] the embedding [B, L, C] of the position after it, and whether that is a
    picture's.

    For the last slot of each row it is ``last`` [B, C], of the token after the prompt.
    """
    order = torch.arange(context.embeddings.shape[1], device=last.device)
    ends = order == context.lengths[:, None] - 1  # [B, L]
    embeddings = torch.where(ends[..., None], last[:, None], context.embeddings.roll(-1, 1))
    return embeddings, context.image_mask.roll(-1, 1) & ~ends


def _check_sizes(head: MSDHead, target: VLMTarget) -> None:
    """Raise ``ValueError`` unless dtype, width and vocabulary are those of ``target``'s head."""
    if not isinstance(head, MSDHead):
        raise ValueError(
            f"drafter must be an MSD head, got {type(head).__name__}; load one with load_msd"
        )
    output = target.family.head.weight
    dtype = head.embed_tokens.weight.dtype
    if dtype != output.dtype:
        raise ValueError(
            f"drafter must have the target's dtype {output.dtype}, got {dtype}; "
            f"head.to({output.dtype})"
        )
    vocabulary, width = output.shape
    for what, found, wanted in (
        ("width", head.config.hidden_size, width),
        ("vocabulary", head.config.vocab_size, vocabulary),
    ):
        if found != wanted:
            raise ValueError(
                f"drafter must have the target's {what} {wanted}, got {found}; "
                "use one trained for it"
            )


def make(method: methods.MSD, target: VLMTarget, drafter: MSDHead, tokenizer: object) -> Assembly:
    """The parts of method ``msd``: EAGLE-2's tree, or one of fixed shape that is drawn.

    Where drafts must be chains, the default trees are chains as deep.
    """
    if target.family.chains_only:
        method = as_chains(method)
    if not method.sampled:
        target.check_tree(method.top_k)
        tree = Dynamic(method.top_k, method.depth, method.total)
        return Assembly(DeferredDrafter(MSDDrafter(drafter, target, tree, False)), Recursive())
    verification = Verification.of(method.rule, target)
    shape = static_tree(method.tree, target.device)
    target.check_tree(shape.width)
    made = MSDDrafter(drafter, target, shape, *verification.drawn)
    return Assembly(DeferredDrafter(made), verification.rule)


def as_chains(method: methods.MSD) -> methods.MSD:
    """``method`` with chains where it has the default trees, which the log says."""
    plain = methods.MSD()
    found = method
    if method.sampled and method.tree == plain.tree:
        found = dataclasses.replace(method, tree=(1,) * len(plain.tree))
    elif not method.sampled and (method.top_k, method.total) == (plain.top_k, plain.total):
        found = dataclasses.replace(method, top_k=1, total=method.depth + 2)
    if found is not method:
        logger.info("layers with states take chains: %s drafts as %s", method.name, found)
    return found


def choose_method(
    target: VLMTarget, head: MSDHead, prompt: VLMPrompt, plans: dict[Any, Plan], kind: methods.MSD
) -> methods.VQAMethod:
    """Method ``auto``: MSD with the tree that should be fastest here, or plain decoding.

    Acceptance comes with the head, seconds are measured on the first prompt of each batch size;
    ``plans`` keeps the plans.
    """
    key = (len(prompt.lengths), target.processor.greedy, torch.get_num_threads())
    if key not in plans:
        plans[key] = _plan(target, head, prompt)
    shape = plans[key].shape
    if shape is None:
        return methods.AR()
    return dataclasses.replace(kind, sampled=True, tree=tuple(int(p) for p in shape.parents[0]))


def _plan(target: VLMTarget, head: MSDHead, prompt: VLMPrompt) -> Plan:
    acceptance = head.acceptance
    if not acceptance:
        return Plan(None, 1.0, 1.0, "the drafter's acceptance was never measured")
    longer = dataclasses.replace(prompt, max_new_tokens=max(prompt.max_new_tokens, ROOM))
    try:
        target.check(longer)
    except ValueError as error:
        return Plan(None, 1.0, 1.0, f"no room to measure ({error})")
    table = acceptance[min(acceptance) if target.processor.greedy else max(acceptance)]
    if target.family.chains_only:
        table = tuple(level[:1] for level in table)
    shapes = [best_tree(table, n, len(table))[0] for n in SIZES]
    seeds = range(len(prompt.lengths))
    uniforms = Uniforms([torch.Generator(target.device).manual_seed(seed) for seed in seeds])

    def drafter(shape: TreeShape) -> MSDDrafter:
        return MSDDrafter(head, target, shape)

    return planned(target, drafter, shapes, Recursive(), longer, uniforms, table)


def measure_acceptance(
    target: VLMTarget,
    head: MSDHead,
    prompts: Iterable[VLMPrompt],
    ends: Sequence[int],
    levels: int = 6,
) -> Acceptance:
    """Acceptance [D, K] by level and rank over exact answers to ``prompts``, until ``ends``.

    Where drafts must be chains K is 1.
    """
    chains = target.family.chains_only
    shape = spine((1,) * levels if chains else WIDEST[:levels])
    counter = AcceptanceCounter(MSDDrafter(head, target, shape), shape)
    for i, prompt in enumerate(prompts):
        uniforms = Uniforms.from_seeds(range(i, i + len(prompt.lengths)))
        stop = EndTokens(ends, target.device)
        length = prompt.max_new_tokens
        for _ in decode(target, counter, Recursive(), prompt, length, uniforms, stop=stop):
            pass
    return counter.table()
