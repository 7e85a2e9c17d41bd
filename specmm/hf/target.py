"""A transformers vision-language model (or text model), as it is, as a target of the core.

The prompt goes through the model's own forward with its pictures; trees and steps go straight to
its decoder with the core's cache as ``past_key_values``, additive masks and explicit positions.

Shape letters: B batch, N tree nodes, L prompt positions, S slots, C width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specmm.cache import Cache, CacheSize
from specmm.hf.cache_slots import as_transformers
from specmm.hf.families import Family
from specmm.hf.probe import check_model
from specmm.hf.prompt import VLMPrompt as VLMPrompt
from specmm.kernels.tree_attention import Mask, TreeMask
from specmm.kernels.tree_attention.interface import PLACEHOLDER
from specmm.processors import History, Processor, check_finite
from specmm.target import TargetOutput
from specmm.tree import DraftTree
from specmm.verify.rule import VerifyResult


class ProbsProcessor(Protocol):
    """What a target needs of a processor: :class:`specmm.processors.Processor`, or transformers'
    own wrapped.
    """

    @property
    def greedy(self) -> bool:
        """Whether every distribution is a point mass."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether distributions depend on the tokens seen."""
        ...

    def check_vocabulary(self, size: int) -> None:
        """Raise ``ValueError`` when the options do not suit V."""
        ...

    def probs(
        self, logits: Tensor, history: History, tree: DraftTree | None, out: Tensor | None = None
    ) -> Tensor:
        """Distributions [B, N, V] of logits [B, N, V] in any dtype; ``out`` may be written to in
        place of fresh memory.
        """
        ...


@dataclass
class Context:
    """What drafters may read of the prompt: ``hidden`` [B, L, C] post-final-norm states,
    ``embeddings`` [B, L, C] the decoder's inputs (projected pictures at image positions),
    ``lengths`` [B] and ``image_mask`` [B, L] bool.
    """

    hidden: Tensor
    embeddings: Tensor
    lengths: Tensor
    image_mask: Tensor


class VLMTarget:
    """A transformers model with a cache; one instance serves one batch at a time.

    Drafters that read the prompt set ``wants_context``; the prefill then leaves a :class:`Context`.
    Raises ``ValueError`` for a model that cannot be one, unless it has been ``checked`` (see
    ``probe``).
    """

    def __init__(
        self, model: Any, processor: ProbsProcessor, name: str = "vlm", checked: bool = False
    ) -> None:
        self.model, self.processor, self.name = model.eval(), processor, name
        self.family = Family.of(model)
        if not checked:
            check_model(model, lambda: VLMTarget(model, Processor(1.0), "probe", checked=True))
        processor.check_vocabulary(self.family.vocabulary)
        self.wants_context = False
        self.context: Context | None = None
        self.calls = 0
        self.running = False  # a forward of this target, not of another on the same model
        self.starting_row = False  # that of a row that begins anew
        self.started: VLMTarget  # the latest such row by itself, for drafters to read
        self.spent: Tensor | None = (
            None  # greedy distributions of the forward before, which nobody reads any more
        )
        self.cache: Cache
        self.prompt: VLMPrompt
        self.history: History

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.family.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.family.head.weight.dtype

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Ids that stand for picture content and are never drafted."""
        return self.family.image_tokens

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., C] of text ``tokens`` [...]."""
        return self.family.decoder.get_input_embeddings()(tokens)

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., V] of post-final-norm ``states`` [..., C]."""
        return self.family.logits(states)

    @torch.inference_mode()
    def prefill(self, prompt: VLMPrompt, scratch: int) -> TargetOutput:
        """Run ``prompt`` through the whole model; see :class:`specmm.target.Target`.

        Raises ``ValueError`` when prompt and answer exceed the model's positions or placeholders do
        not fit pictures.
        """
        where, width = self.make_room(prompt, scratch), prompt.input_ids.shape[1]
        self.cache.aim(0, width)
        mask = prompt.inputs["attention_mask"] if prompt.padded else None
        with self._watch_embeddings(prompt), self._runs():
            states = self.family.body(
                input_ids=prompt.input_ids,
                attention_mask=mask,
                past_key_values=self.past,
                use_cache=True,
                **prompt.vision,
                **where,
            ).last_hidden_state  # [B, L, C]
        if self.context is not None:
            self.context.hidden = states
        self.cache.lengths += prompt.lengths
        self.history = History(prompt.input_ids, prompt.lengths, prompt.room - width)
        last = (prompt.lengths - 1)[:, None, None].expand(-1, 1, states.shape[-1])
        return self._output(states.gather(1, last), None)

    def make_room(self, prompt: VLMPrompt, scratch: int) -> dict[str, Any]:
        """An empty cache for ``prompt``, its answer and ``scratch``; the prompt's positions as the
        model takes them.
        """
        self.check(prompt)
        self.prompt, self.calls, self.spent = prompt, 0, None
        self.cache = self._new_cache(len(prompt.input_ids), prompt.room, scratch)
        self.past = as_transformers(self.cache)
        self.places = torch.arange(self.cache.slots, device=self.device).repeat(
            len(prompt.input_ids), 1
        )  # by slot
        self.last = self._last_position(prompt.room)
        where, self.offsets = self.family.positions(prompt)
        return where

    @torch.inference_mode()
    def start_row(self, row: int, prompt: VLMPrompt) -> TargetOutput:
        """Begin ``prompt``, of one sample, in ``row``; see
        :class:`specmm.target.BatchingTarget`.
        """
        alone = copy.copy(self)
        alone.__dict__.pop("started", None)  # or every row that ever began would be kept
        self.started = alone
        self.starting_row = True
        try:
            output = alone.prefill(prompt, 0)
        finally:
            self.starting_row = False
        self.cache.take(row, alone.cache)
        self.history.take(row, alone.history)
        self.offsets[row] = alone.offsets[0]
        return output

    def score(self, tree: DraftTree) -> TargetOutput:
        """One tree-attention forward, in whatever mode it is called: one that begins in a program
        breaks it.
        """
        cache, self.tree = self.cache, tree
        cache.aim(cache.size.capacity, cache.slots)
        positions = cache.lengths[:, None] + tree.shape.depths
        whole = self.family.takes_trees
        mask = cache.tree_mask(tree.shape) if whole else cache.tree_bias(tree.shape.ancestors)
        return self._output(self.states(tree.tokens, positions, mask), tree)

    def commit(self, result: VerifyResult) -> None:
        """Keep the accepted nodes."""
        self.cache.keep(result.path, result.kept)
        if self.processor.stateful:
            self.history.append(self.tree.tokens.gather(1, result.path.clamp(min=0)), result.kept)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step. All rows write the same slot, after the longest prompt: slices serve, and
        no mask where the prompts have one length.
        """
        slot = self.prompt.input_ids.shape[1] + self.calls - 1
        self.cache.aim(slot, slot + 1)
        if self.processor.stateful:
            self.history.append(tokens[:, None], torch.ones_like(tokens))
        positions = (self.prompt.lengths + self.calls - 1)[:, None]
        return self._output(self.states(tokens[:, None], positions, self._step_bias(slot)), None)

    def states(self, tokens: Tensor, positions: Tensor, bias: Mask) -> Tensor:
        """Post-final-norm states [B, N, C] of ``tokens`` [B, N], stored where the cache aims.

        ``positions`` [1 or B, N] count tokens, those beyond the last one count as it; ``bias`` [B,
        1, N, S] is the additive mask of full attention, or a tree's mask for models that take it.
        """
        positions = positions.clamp(max=self.last)  # a block may reach beyond the text's end
        if isinstance(bias, TreeMask):
            masks: dict[str, Any] = {"attention_mask": PLACEHOLDER, "tree_mask": bias}
        else:
            masks = {
                "attention_mask": self.family.masks(bias, self._within_window(bias, positions))
            }
        with self._runs():
            states: Tensor = self.family.decoder(
                inputs_embeds=self.embed(tokens),
                **masks,
                position_ids=self.family.spread(positions + self.offsets[:, None]),
                past_key_values=self.past,
                use_cache=True,
            ).last_hidden_state
        return states

    @contextmanager
    def _runs(self) -> Iterator[None]:
        self.running = True
        try:
            yield
        finally:
            self.running = False

    def _within_window(self, bias: Tensor | None, positions: Tensor) -> Tensor | None:
        """``bias`` of sliding layers: with every slot shut that lies a window or more after a node."""
        if not self.family.window or bias is None:
            return bias
        first = self.cache.layers[0].first
        self.places[:, first : first + positions.shape[1]] = positions
        far = positions[:, :, None] - self.places[:, None, : bias.shape[-1]] >= self.family.window
        return bias.masked_fill(far[:, None], float("-inf"))

    def _output(self, states: Tensor, tree: DraftTree | None) -> TargetOutput:
        logits = self.head(states)
        self._count(logits)
        return TargetOutput(self._probs(logits, tree), states)

    def _count(self, logits: Tensor) -> None:
        check_finite(logits, self.calls, self.name)
        self.calls += 1

    def _probs(self, logits: Tensor, tree: DraftTree | None) -> Tensor:
        spent = self.spent if self.spent is not None and self.spent.shape == logits.shape else None
        probs = self.processor.probs(logits, self.history, tree, spent)
        self.spent = (
            probs if isinstance(self.processor, Processor) and self.processor.greedy else None
        )
        return probs

    def _step_bias(self, slot: int) -> Tensor | None:
        """Additive mask [B, 1, 1, slot + 1] that hides the prompts' padding; None where nothing
        needs hiding.
        """
        if not self.prompt.padded and not self.family.window:
            return None
        column = torch.arange(slot + 1, device=self.device)
        shut = (column >= self.prompt.lengths[:, None]) & (column < self.prompt.input_ids.shape[1])
        bias = torch.zeros(shut.shape, dtype=self.cache.data.dtype, device=self.device)
        return bias.masked_fill_(shut, float("-inf"))[:, None, None]

    def _new_cache(self, batch: int, capacity: int, scratch: int) -> Cache:
        config = self.family.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = CacheSize(
            config.num_hidden_layers, heads, self.family.head_dim, batch, 1, capacity, scratch
        )
        return Cache(size, self.family.head.weight.dtype, self.device)

    def check(self, prompt: VLMPrompt) -> None:
        """Raise ``ValueError`` when ``prompt`` and its answer exceed the model's positions."""
        room, longest = int(self.family.config.max_position_embeddings), int(prompt.lengths.max())
        if longest + prompt.max_new_tokens > room:
            raise ValueError(
                f"prompt and answer must fit the {room} positions of {self.name}, got {longest} prompt tokens and "
                f"max_new_tokens {prompt.max_new_tokens}; shorten one of them or give fewer or smaller pictures"
            )

        turn, longest = self.family.turning_point, longest + prompt.max_new_tokens
        if turn is not None and int(prompt.lengths.min()) <= turn < longest:
            raise ValueError(
                f"prompt and answer must lie on one side of {self.name}'s {turn} positions, got {longest}: after them "
                "its positions turn by other factors, the prompt's too; give fewer max_new_tokens"
            )

    def _last_position(self, total: int) -> int:
        """The last position of a text of ``total`` tokens that a block may use, which may reach
        beyond its end.
        """
        turn = self.family.turning_point
        room = int(self.family.config.max_position_embeddings)
        return (room if turn is None or total > turn else turn) - 1

    @contextmanager
    def _watch_embeddings(self, prompt: VLMPrompt) -> Iterator[None]:
        """Leave a context of ``prompt`` if a drafter wants one: the decoder's inputs are seen by a
        hook.
        """
        self.context = None
        if not self.wants_context:
            yield
            return
        stand_ins = torch.tensor(self.image_tokens, dtype=torch.int64, device=self.device)
        images = torch.isin(prompt.input_ids, stand_ins) & prompt.mask

        def see(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            embeddings = kwargs.get("inputs_embeds")
            if embeddings is None:  # a model without pictures embeds its tokens itself
                embeddings = self.embed(prompt.input_ids)
            self.context = Context(embeddings, embeddings, prompt.lengths, images)

        handle = self.family.decoder.register_forward_pre_hook(see, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
