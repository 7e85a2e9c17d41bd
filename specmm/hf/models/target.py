"""Runs an unchanged transformers model as a target of the core.

The prompt goes through the model's own forward with its pictures; trees and steps go straight to
its decoder with the core's cache as ``past_key_values``, additive masks and explicit positions.
Under guidance every sample has two rows; the rows of unconditional prompts come last.

Shape letters: B batch, G guidance branches, R = G·B rows, N tree nodes, L prompt positions, S
slots, H heads, D head width, C width, F layers read, V vocabulary.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache

from specmm.core.cache import Cache, CacheSize, branched
from specmm.core.guidance import AllowedTokens, Guidance
from specmm.core.processors import History, Processor, extremes
from specmm.core.sorting import largest
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.models.aux_states import AuxStates
from specmm.hf.models.cache_layers import as_transformers
from specmm.hf.models.families import WAYS, Family, Way
from specmm.hf.models.mixers import StateLayer
from specmm.hf.models.probe import check_model, own_noise, way_of
from specmm.hf.models.states import States
from specmm.hf.prompts.prompt import VLMPrompt as VLMPrompt
from specmm.kernels.tree_attention import Mask, RaggedMask, TreeMask
from specmm.kernels.tree_attention.interface import PLACEHOLDER
from specmm.loading.hardware import check_holds_numbers
from specmm.verify.rule import VerifyResult

Past: TypeAlias = tuple[TransformersCache, States | None]


class ProbsProcessor(Protocol):
    """Turns logits to distributions: :class:`specmm.core.processors.Processor` or transformers'."""

    @property
    def greedy(self) -> bool:
        """Whether every distribution is a point mass."""

    @property
    def stateful(self) -> bool:
        """Whether distributions depend on the tokens seen."""

    def check_vocabulary(self, size: int) -> None:
        """Raise ``ValueError`` when the options do not suit V."""

    def probs(
        self, logits: Tensor, history: History, tree: DraftTree | None, out: Tensor | None = None
    ) -> Tensor:
        """Distributions [B, N, V] of logits [B, N, V]; ``out`` may be written to."""


@dataclass
class Context:
    """The prompt's states for drafters: ``hidden`` [B, L, C] states after the final norm, or [B, L,
    F·C] of the layers that a drafter reads; ``embeddings`` [B, L, C] the decoder's inputs
    (projected pictures at image positions); ``lengths`` [B]; ``image_mask`` [B, L] bool;
    ``positions`` [3, B, L] with M-RoPE.
    """

    hidden: Tensor
    embeddings: Tensor
    lengths: Tensor
    image_mask: Tensor
    positions: Tensor | None = None


class VLMTarget:
    """A transformers model with a cache; one instance serves one batch at a time.

    Drafters that read the prompt set ``wants_context``; the prefill then stores a :class:`Context`.
    ``family`` gives the model's parts if its own forward does not use them, ``way`` how to run it.
    Raises ``ValueError`` for a model that cannot be a target (see ``probe``; with a given family
    the model is not checked), and for guidance with M-RoPE or with layers that attend to only a
    part of the text.
    """

    state: ClassVar[tuple[str, ...]] = (
        "cache",
        "begins",
        "offsets",
        "places",
        "first",
        "each",
        "history",
    )

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProbsProcessor,
        name: str = "vlm",
        family: Family | None = None,
        guidance: Guidance | None = None,
        allowed: AllowedTokens | None = None,
        way: Way = WAYS[0],
    ) -> None:
        check_holds_numbers(model, name)
        self.model = model.eval() if model.training else model
        self.processor = processor
        self.name = name
        self.family = family or Family.of(model)
        self.guidance = guidance
        self.branches = 1 if guidance is None else guidance.branches  # G
        self.allowed = allowed
        self.way = way
        self.asks = family is None
        if self.asks:
            self.way = check_model(model, self._probing)
        odd = self.family.partial or self.family.mrope or self.family.chains_only
        if self.branches > 1 and (odd or self.way != WAYS[0]):
            raise ValueError(
                f"cfg must be at most 1 for {name}: it has layers with states or that attend part "
                "of the text, or M-RoPE"
            )
        processor.check_vocabulary(self.family.vocabulary)
        self.wants_context = False
        self.context: Context | None = None
        self.likeliest = 0  # tokens after each node that a drafter reads
        self.aux: AuxStates | None = None  # the states that drafters read in place of the last ones
        self.steps = 0  # plain ones
        self.running = False  # a forward of this target, not of another on the same model
        self.starting_row = False  # while a restarted row's prompt is read
        self.started: VLMTarget  # the latest such row by itself, for drafters to read
        self.spent: Tensor | None = None  # distributions whose memory the next greedy ones take
        self.first: Tensor | None = None  # slots [B], where padding comes before them
        self.each: dict[str, Any] = {}  # the whole model's arguments for every token, [B, 1, ...]
        self.cache: Cache
        self.recurrent: States | None  # for layers with states
        self.prompt: VLMPrompt
        self.history: History

    def _probing(self, way: Way) -> VLMTarget:
        """An unchecked target of the same model, run in some ``way``."""
        return VLMTarget(self.model, Processor(1.0), "probe", self.family, way=way)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self._weight.dtype

    @property
    def _weight(self) -> Tensor:
        embedding = getattr(self.family.decoder.get_input_embeddings(), "weight", None)
        return next(self.family.decoder.parameters()) if embedding is None else embedding

    @property
    def noise(self) -> dict[str, str]:
        """A note for certificates if the model's own forwards differ, as in quantised models."""
        return own_noise(self.family.model)

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Ids that stand for picture content and are never drafted."""
        return self.family.image_tokens

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., C] of drafted or chosen ``tokens`` [...]."""
        return self.family.embedding(tokens)

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., V] of post-final-norm ``states`` [..., C]."""
        return self.family.logits(states)

    def read_layers(self, layers: Sequence[int], normed: bool = False) -> None:
        """Let drafters read the concatenated outputs [R, N, F·C] of ``layers``, counted from 0,
        instead of the states that the head reads; the last layer's output after the final norm if
        ``normed``.

        No ``layers``: the head's states. Raises ``ValueError`` for layers the model does not have.
        """
        self.aux = None
        if not layers:
            return
        blocks = self.family.layers
        if min(layers) < 0 or max(layers) >= len(blocks):
            raise ValueError(
                f"drafter must read layers 0 to {len(blocks) - 1} of {self.name}, got "
                f"{list(layers)}; use one trained for it"
            )
        target = weakref.ref(self)  # the hooks must not keep it alive

        def listens() -> bool:
            reader = target()
            return reader is not None and (reader.running or reader.starting_row)

        norms = {len(blocks) - 1: self.family.decoder} if normed else {}
        self.aux = AuxStates([norms.get(i, blocks[i]) for i in layers], listens)

    @torch.inference_mode()
    def prefill(self, prompt: VLMPrompt, scratch: int) -> TargetOutput:
        """Run ``prompt`` through the whole model; see :class:`specmm.core.target.Target`.

        Raises ``ValueError`` when prompt and answer exceed the model's positions or placeholders do
        not fit pictures, for a prompt that the model reads in a way we cannot reproduce, and under
        guidance for a prompt without an unconditional one.
        """
        self.check(prompt, scratch)
        if self.asks and self.branches == 1:
            self.way = way_of(self.model, prompt, self._probing)
        self.make_room(prompt, scratch)
        self.cache.aim(0, prompt.width)
        inputs = self._body_inputs(prompt)
        inputs[self.family.cache_name] = self.past
        finding = nullcontext() if self.recurrent is None else self.recurrent.prefill()
        with self._watch_embeddings(prompt), self._runs(), finding:
            states, output = self.family.run(inputs)  # [R, L, C]
        if self.way.left and self.way.whole:
            self.each = self.family.each_token(self.each, output)
        hidden = self._drafters_states(states)
        if self.context is not None:
            self.context.hidden = self.ordered(hidden)
            self.context.embeddings = self.ordered(self.context.embeddings)
            if self.context.positions is not None:
                moved = self.context.positions.expand(-1, len(states), -1).permute(1, 2, 0)
                self.context.positions = self.ordered(moved).permute(2, 0, 1)
        self.cache.lengths += self.begins
        self.history = History(
            prompt.input_ids, prompt.lengths, prompt.room - prompt.input_ids.shape[1]
        )
        last = (self.begins - 1)[:, None]
        rows = torch.arange(len(states), device=self.device)[:, None]
        columns = branched(last, self.branches)  # [R, 1]
        return self._output(states[rows, columns], hidden[rows, columns], None, last)

    def _drafters_states(self, states: Tensor) -> Tensor:
        """The states that drafters read, from the forward that returned ``states`` [R, N, C]."""
        return states if self.aux is None else self.aux.context()

    def ordered(self, states: Tensor) -> Tensor:
        """The prefill's ``states`` [R, L, ...] with padding moved to the right."""
        if self.first is None:
            return states
        column = torch.arange(states.shape[1], device=self.device)
        order = (column + self.first[:, None]) % states.shape[1]
        return states[torch.arange(len(states), device=self.device)[:, None], order]

    def make_room(self, prompt: VLMPrompt, scratch: int) -> None:
        """An empty cache for ``prompt``, its answer and ``scratch``."""
        self.check(prompt, scratch)
        self.prompt = prompt
        self.steps = 0  # plain ones
        self.spent = None
        vars(self).pop("started", None)
        self.begins = prompt.begins.clone()  # [B], where answers begin
        size = CacheSize(
            layers=tuple(layer for layer in self.family.layer_sizes if layer is not None),
            batch=len(prompt.input_ids),
            branches=self.branches,
            capacity=prompt.room,
            scratch=scratch,
        )
        self.cache = self._new_cache(size)
        self.past, self.recurrent = self._new_past(size.batch)
        slots = torch.arange(self.cache.slots, device=self.device)
        self.places = slots.repeat(len(prompt.input_ids), 1)  # in its text, by slot
        self.last = self._last_position(prompt.room)
        self.first = None
        self.each = {}
        self.offsets = torch.zeros_like(self.begins)

    def _new_past(self, batch: int) -> Past:
        """The cache as the model takes it, and the states in it."""
        sizes = self.family.layer_sizes
        past = as_transformers(self.cache.layers, sizes, self.family.cache_kinds)
        if not self.family.chains_only:
            return past, None
        layers = [layer for layer in past.layers if isinstance(layer, StateLayer)]
        return past, States(self.family.decoder, layers, batch * self.branches, self.branches)

    def _body_inputs(self, prompt: VLMPrompt) -> dict[str, Any]:
        """The arguments of the model's body for ``prompt``; sets the offsets of later positions."""
        if self.branches > 1:
            return self._both_branches(prompt)
        if self.way.left:
            return self._as_generate(prompt)
        where, self.offsets = self.family.positions(prompt)
        mask = prompt.inputs["attention_mask"] if prompt.padded else None
        ids = {"input_ids": prompt.input_ids, "attention_mask": mask}
        return {**prompt.vision, **prompt.types, **ids, **where}

    def _as_generate(self, prompt: VLMPrompt) -> dict[str, Any]:
        """The prefill as the model's generate runs it: padded at the left, its own preparation."""
        inputs, first = prompt.at_left()
        if prompt.padded:
            self.first = first
            self.places -= first[:, None]
            self._hide(torch.arange(prompt.width, device=self.device) < first[:, None])
        self.begins.fill_(prompt.width)
        own_inputs, following = self.family.own_inputs(inputs, self.past)
        self.offsets = following - prompt.width
        self.each = inputs
        return own_inputs

    def _hide(self, padding: Tensor) -> None:
        """Hide each row's slots of ``padding`` [R, L], which precede the prompt."""
        spare = self.cache.size.capacity - padding.shape[1]
        self.cache.hidden_prefix = nn.functional.pad(padding, (0, spare))

    def _both_branches(self, prompt: VLMPrompt) -> dict[str, Any]:
        """The prefill of both branches: ids, mask and positions. All rows end where answers begin;
        slots before a shorter row are hidden.
        """
        ids, first = prompt.branches()  # [R, L], [R]
        column = torch.arange(prompt.width, device=self.device)
        hidden = column < first[:, None]
        if bool(hidden.any()):
            self._hide(hidden)
        visible = (column <= column[:, None]) & ~hidden[:, None]
        visible |= torch.eye(prompt.width, dtype=torch.bool, device=self.device)
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        self.offsets = -first
        return prompt.vision | {
            "input_ids": ids,
            "attention_mask": bias.masked_fill_(~visible, float("-inf"))[:, None],
            "position_ids": (column - first[:, None]).clamp(min=0),
        }

    @torch.inference_mode()
    def start_row(self, row: int, prompt: VLMPrompt) -> TargetOutput:
        """Begin ``prompt``, of one sample, in ``row``; as ``BatchingTarget.start_row``."""
        row_target = copy.copy(self)
        row_target.__dict__.pop("started", None)  # or every row that ever began would be kept
        self.started = row_target
        self.starting_row = True
        try:
            output = row_target.prefill(prompt, 0)
        finally:
            self.starting_row = False
        self.take_row(row, row_target)
        return output

    def take_row(self, row: int, row_target: VLMTarget, source: int = 0) -> None:
        """Replace ``row`` by the row ``source`` of ``row_target``: its cache, tokens, positions."""
        self.cache.take(row, row_target.cache, source)
        self.history.take(row, row_target.history, source)
        if self.recurrent is not None and row_target.recurrent is not None:
            self.recurrent.take(row, row_target.recurrent)
        if row_target.offsets.ndim > self.offsets.ndim:  # the first row with positions in parts
            self.offsets = self.offsets.expand(len(row_target.offsets), -1).clone()
        from_rows = slice(source, None, len(row_target.begins))
        self.offsets[..., row :: len(self.begins)] = row_target.offsets[..., from_rows]
        self.begins[row] = row_target.begins[source]
        self.places[row] = torch.arange(self.cache.slots, device=self.device)
        if self.first is not None:
            self.first[row] = 0

    def score(self, tree: DraftTree) -> TargetOutput:
        """One tree-attention forward; a caller in inference mode may compile it."""
        self.tree = tree
        with self._chain(tree):
            states, positions = self.tree_states(tree.tokens, tree.shape)
        return self._output(states, self._drafters_states(states), tree, positions)

    def tree_states(self, tokens: Tensor, shape: TreeShape) -> tuple[Tensor, Tensor]:
        """States [R, N, C] of the nodes ``tokens`` [B, N] of a tree, stored in the scratch region,
        and their positions [B, N].
        """
        mask, positions = self.aim(shape)
        return self.states(tokens, positions, mask), positions

    def aim(self, shape: TreeShape) -> tuple[Tensor | TreeMask | RaggedMask, Tensor]:
        """Let the next forward store a tree in the scratch region; returns its attention mask and
        the nodes' positions [B, N].
        """
        cache = self.cache
        cache.aim_at_tree(shape.size)
        as_tree = self.family.takes_trees
        mask = cache.tree_mask(shape) if as_tree else cache.tree_bias(shape.ancestors)
        return mask, cache.lengths[:, None] + shape.depths

    def _chain(self, tree: DraftTree) -> AbstractContextManager[None]:
        """A context for scoring ``tree``: layers with states store the data that a commit needs."""
        if self.recurrent is None:
            return nullcontext()
        self.check_tree(tree.shape.width)
        return self.recurrent.chain(tree.shape.size, self.past)

    def check_tree(self, width: int) -> None:
        """Raise ``ValueError`` if this model cannot score trees of ``width`` children a node."""
        if width > 1 and self.family.chains_only:
            raise ValueError(
                f"drafts for {self.name} must be chains, got a tree with up to {width} children "
                "of a node: its layers have states, which move along one path; give a tree such as "
                "chain(5), or leave it out"
            )

    def commit(self, result: VerifyResult) -> None:
        """Keep the accepted nodes."""
        self.cache.keep(result.path, result.kept)
        if self.recurrent is not None:
            self.recurrent.commit(result.kept)
        if self.processor.stateful:
            self.history.append(self.tree.tokens.gather(1, result.path.clamp(min=0)), result.kept)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step. All rows write the same slot, after the longest prompt, so slices serve;
        without padding no mask is needed.
        """
        slot = self.prompt.width + self.steps
        self.cache.aim(slot, slot + 1)
        if self.recurrent is not None:
            self.recurrent.settle()
        if self.processor.stateful:
            self.history.append(tokens[:, None], torch.ones_like(tokens))
        positions = (self.begins + self.steps)[:, None]
        self.steps += 1
        states = self.states(tokens[:, None], positions, self._step_bias(slot))
        return self._output(states, states, None, positions)

    def states(self, tokens: Tensor, positions: Tensor, bias: Mask) -> Tensor:
        """Post-final-norm states [R, N, C] of ``tokens`` [B, N], stored where the cache aims.

        ``positions`` [1 or B, N] count tokens and are clamped to the last one; ``bias`` [R, 1, N,
        S] is the additive mask of full attention, or a tree's mask for models that take it.
        """
        positions = positions.clamp(max=self.last)  # a block may reach beyond the text's end
        if isinstance(bias, TreeMask | RaggedMask):
            masks: dict[str, Any] = {"attention_mask": PLACEHOLDER, "tree_mask": bias}
        elif bias is None and tokens.shape[1] == 1 and self.family.takes_trees:
            masks = {"attention_mask": PLACEHOLDER}  # or the model looks for masks to make
        else:
            masks = {"attention_mask": self._masks(bias, positions)}
        if len(positions) > 1:
            positions = branched(positions, self.branches)
        where = self.where(positions)
        options = {**masks, self.family.cache_name: self.past}
        if "position_ids" in self.family.takes:
            options["position_ids"] = where
        with self._runs():
            if self.way.whole:
                nodes = tokens.shape[1]
                arguments = {k: v.expand(-1, nodes, *v.shape[2:]) for k, v in self.each.items()}
                return self.family.run({"input_ids": tokens, **options, **arguments})[0]
            inputs = branched(self.embed(tokens), self.branches)
            states: Tensor = self.family.decoder(
                inputs_embeds=inputs, use_cache=True, **options
            ).last_hidden_state
            return states

    def where(self, positions: Tensor) -> Tensor:
        """The decoder's position argument for ``positions`` [1 or R, N], which count tokens."""
        return self.family.spread(positions + self.offsets[..., None])

    @contextmanager
    def _runs(self) -> Iterator[None]:
        """Within the block, a forward of this target runs, for hooks on the shared model."""
        self.running = True
        try:
            yield
        finally:
            self.running = False

    def _masks(self, bias: Tensor | None, positions: Tensor) -> Any:
        """``bias`` as the model's layers take it, with a mask for each kind of attention layer."""
        if not self.family.partial or bias is None:
            return self.family.masks(bias, positions, positions)
        first = self.cache.layers[0].first
        if self.first is not None:
            positions = positions - self.first[:, None]
        self.places[:, first : first + positions.shape[1]] = positions
        return self.family.masks(bias, positions, self.places[:, : bias.shape[-1]])

    def _output(
        self, states: Tensor, hidden: Tensor, tree: DraftTree | None, positions: Tensor
    ) -> TargetOutput:
        """Distributions of ``states`` [R, N, C] of tokens at ``positions`` [B, N]; drafters read
        ``hidden`` [R, N, ...].
        """
        logits = self._logits(states)
        ends = extremes(logits)
        guided = self.guided(logits, positions)
        best = largest(guided, self.likeliest)[1] if self.likeliest else None
        return TargetOutput(self._probs(guided, tree), hidden, ends, best)

    def _logits(self, states: Tensor) -> Tensor:
        """Logits [R, N, V] of ``states`` [R, N, C]."""
        return self.head(states)

    def guided(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Guided logits [B, N, V] of tokens at ``positions`` [B, N] from ``logits`` [R, N, V]."""
        if self.guidance is not None and self.branches > 1:
            logits = self.guidance.mix(logits.float(), positions, self.begins[:, None])
        if self.allowed is not None:
            logits = self.allowed(logits, positions - self.begins[:, None] + 1)
        return logits

    def _probs(self, logits: Tensor, tree: DraftTree | None) -> Tensor:
        """Processed distributions of ``logits``; greedy ones reuse their memory each time."""
        spent = self.spent if self.spent is not None and self.spent.shape == logits.shape else None
        probs = self.processor.probs(logits, self.history, tree, spent)
        reused = isinstance(self.processor, Processor) and self.processor.greedy
        self.spent = probs if reused else None
        return probs

    def _step_bias(self, slot: int) -> Tensor | None:
        """Additive mask [R, 1, 1, slot + 1] that hides prompts' padding; None without padding."""
        prefix = self.cache.hidden_prefix
        if not self.prompt.padded and not self.family.partial and prefix is None:
            return None
        column = torch.arange(slot + 1, device=self.device)
        shut = (column >= self.begins[:, None]) & (column < self.prompt.width)
        shut = branched(shut, self.branches)
        if prefix is not None:
            shut = shut | prefix[:, : slot + 1]
        bias = torch.zeros(shut.shape, dtype=self.cache.dtype, device=self.device)
        return bias.masked_fill_(shut, float("-inf"))[:, None, None]

    def _new_cache(self, size: CacheSize) -> Cache:
        cache = Cache(size, self.dtype, self.device)
        # by place the slots of layers with windows say which token they hold
        cache.near = self.device.type == "cpu" and not self.family.partial
        return cache

    def check(self, prompt: VLMPrompt, scratch: int = 0) -> None:
        """Raise ``ValueError`` for a ``prompt`` that is too long, lacks the unconditional prompt
        that guidance needs, or has unknown tokens; ``scratch`` nodes are drafted at a time.
        """
        if self.branches > 1 and self.asks and prompt.vision:
            raise ValueError(f"cfg must be at most 1 for pictures, got {', '.join(prompt.vision)}")
        if self.branches > 1 and prompt.unconditional is None:
            raise ValueError("cfg above 1 needs an unconditional prompt, got none")
        if self.branches == 1 and prompt.unconditional is not None:
            raise ValueError("cfg of 1 takes no unconditional prompt, got one")
        room = self.family.room
        pictures = " or give fewer or smaller pictures" if prompt.vision else ""
        longest = int(prompt.begins.max())
        if longest + prompt.max_new_tokens > room:
            raise ValueError(
                f"prompt and answer must fit the {room} positions of {self.name}, got {longest} "
                f"prompt tokens and max_new_tokens {prompt.max_new_tokens}; shorten one of them"
                f"{pictures}"
            )
        rows = self.family.rows
        beyond = prompt.input_ids[prompt.input_ids >= rows] if rows else prompt.input_ids[:0]
        if token := max((i for i in beyond.tolist() if i not in self.image_tokens), default=0):
            raise ValueError(
                f"prompt must hold only the {rows} tokens that {self.name} has, got {token}, "
                "which only its tokenizer knows; leave it out, or give the model more rows "
                "(resize_token_embeddings)"
            )
        turn = self.family.turning_point
        total = longest + prompt.max_new_tokens
        stretched = self.family.stretched_after
        if scratch and stretched is not None and total > stretched:
            raise ValueError(
                f"drafts must lie within the first {stretched} positions of {self.name}, got a "
                f"text of {total}: after them its rotary embeddings depend on a text's length; "
                "use method='ar', or YaRN"
            )
        if turn is not None and int(prompt.lengths.min()) <= turn < total:
            raise ValueError(
                f"a prompt within the first {turn} positions of {self.name} must have its answer "
                f"there, too, got {total} positions: after these, all positions turn by other "
                "factors; give fewer max_new_tokens"
            )

    def _last_position(self, total: int) -> int:
        """The last position that a block may use, in a text with room for ``total`` tokens."""
        turn = self.family.turning_point or self.family.stretched_after
        return (self.family.room if turn is None or total > turn else turn) - 1

    @contextmanager
    def _watch_embeddings(self, prompt: VLMPrompt) -> Iterator[None]:
        """Store a context of ``prompt`` if a drafter wants one; a hook reads the embeddings."""
        self.context = None
        if not self.wants_context:
            yield
            return
        stand_ins = torch.tensor(self.image_tokens, dtype=torch.int64, device=self.device)
        images = torch.isin(prompt.input_ids, stand_ins) & prompt.mask

        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            embeddings = kwargs.get("inputs_embeds")
            if embeddings is None:  # a model without pictures embeds its tokens itself
                embeddings = self.embed(kwargs["input_ids"])
            self.context = Context(embeddings, embeddings, prompt.lengths, images)

        def see_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert self.context is not None
            self.context.positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]

        watch = [self.family.decoder.register_forward_pre_hook(see, with_kwargs=True)]
        if self.family.mrope:  # rotary embeddings take the three parts alone
            rotary = self.family.decoder.rotary_emb
            watch.append(rotary.register_forward_pre_hook(see_positions, with_kwargs=True))
        try:
            yield
        finally:
            for handle in watch:
                handle.remove()
