"""A target whose rows join and leave between rounds, and whose prompts are read in pieces.

Shape letters: B rows, k tokens of a piece, S slots, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from specmm.core.processors import History, Processor, check_finite, extremes, not_finite
from specmm.core.rows import Joining
from specmm.core.state import with_one, without
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.models.cache_layers import packed
from specmm.hf.models.families import Family, Way
from specmm.hf.models.probe import way_of
from specmm.hf.models.target import Context, ProbsProcessor, VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.kernels.backend import backend
from specmm.kernels.tree_attention import Nodes, PackedMask, Part, TreeMask
from specmm.kernels.tree_attention.interface import PLACEHOLDER
from specmm.loading.hardware import out_of_memory

NEAR = 256  # tokens of a row that there is room for at first
FAR = 2048  # the same where room that is empty costs nothing


class RowProcessors:
    """A processor for each row of a batch; rows with equal processors are processed together.

    If a processor fails, its rows draw token 0, and ``failed`` holds the error until the next
    forward.
    """

    def __init__(self, rows: Sequence[ProbsProcessor] = ()) -> None:
        self.rows = list(rows)
        self.failed: dict[int, Exception] = {}

    @property
    def greedy(self) -> bool:
        """Whether every distribution is a point mass."""
        return all(row.greedy for row in self.rows)

    @property
    def stateful(self) -> bool:
        """Whether a row's distributions depend on the tokens seen."""
        return any(row.stateful for row in self.rows)

    def check_vocabulary(self, size: int) -> None:
        """Does nothing: rows were checked when they were made."""

    def probs(
        self, logits: Tensor, history: History, tree: DraftTree | None, out: Tensor | None = None
    ) -> Tensor:
        """Distributions [B, N, V] of ``logits`` [B, N, V]."""
        groups: list[tuple[ProbsProcessor, list[int]]] = []
        for number, row in enumerate(self.rows):
            alike = next((rows for shared, rows in groups if _alike(shared, row)), None)
            if alike is None:
                groups.append((row, [number]))
            else:
                alike.append(number)
        self.failed = {}
        if len(groups) == 1 and isinstance(groups[0][0], Processor):
            return groups[0][0].probs(logits, history, tree)
        kind = torch.promote_types(logits.dtype, torch.float32)
        probs = torch.empty_like(logits, dtype=kind)
        for processor, rows in groups:
            index = torch.tensor(rows, device=logits.device)
            part = None if tree is None else _tree_rows(tree, index)
            try:
                probs[index] = processor.probs(logits[index], history.rows(index), part)
            except Exception as error:
                if out_of_memory(error):
                    raise
                self.failed |= dict.fromkeys(rows, error)
                probs[index] = torch.eye(1, probs.shape[-1], device=probs.device)
        return probs


def _alike(one: ProbsProcessor, other: ProbsProcessor) -> bool:
    """Whether two rows may be processed together: plain processors do not depend on the row."""
    return one is other or (isinstance(one, Processor) and one == other)


def _tree_rows(tree: DraftTree, rows: Tensor) -> DraftTree:
    """The ``rows`` [n] of a ``tree``."""
    shape = tree.shape
    if not shape.shared:
        shape = TreeShape(shape.parents[rows], shape.depth, shape.width)
    return DraftTree(tree.tokens[rows], shape)


class RowsTarget(VLMTarget):
    """A model as the target of an engine.

    It begins without rows. Each row that joins takes the prompt of a :class:`Reading`. Raises
    ``ValueError`` for models that :func:`why_no_rows` rules out.
    """

    joins: ClassVar[bool] = True
    processor: RowProcessors
    started: RowsTarget  # the row that joined last, for its drafter

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(model, RowProcessors(), name)
        self.beside: list[Piece] = []  # read by the next forward, too
        self.drafted: Nodes | None = None  # nodes to score, if rows differ in drafts
        if self.joins and (reason := why_no_rows(self.family, self.way)):
            raise ValueError(f"rows of {name} cannot join a batch: {reason}")
        self.scratch = 1

    @cached_property
    def reads_ragged(self) -> bool:
        """Whether prompts of different lengths can be read at once."""
        if self.family.chains_only:
            return False
        prompt = VLMPrompt({**padded([[0, 0], [0]])}, 1).to(self.device, self.dtype)
        try:
            return way_of(self.model, prompt, self._probing) == self.way
        except ValueError:
            return False

    def open(self, scratch: int, rows: int = 1) -> None:
        """Begin without rows, with room for trees of ``scratch`` nodes, and for ``rows`` rows if
        memory is only reserved.
        """
        self.scratch = scratch
        self.processor.rows.clear()
        on_cpu = self.device.type == "cpu"
        near = NEAR if self.family.partial or not on_cpu else FAR
        room = min(near, self.family.room)
        prompt = VLMPrompt({**padded([[0]])}, room - 1).to(self.device, self.dtype)
        if self.family.chains_only:  # layers must run once before their states are known
            self.prefill(prompt, scratch)
        else:
            self.make_room(prompt, scratch)
        self.history = History(self.prompt.input_ids, self.prompt.lengths, room)
        for part in self._members:
            part.leave(0)
        if on_cpu:
            self.cache.widen(rows=rows)
        self._each_row(lambda x, dim: without(x, 0, dim))

    @property
    def _members(self) -> list[Joining]:
        """The objects that hold per-row state."""
        states = [] if self.recurrent is None else [self.recurrent]
        return [self.cache, self.history, *states]

    def _each_row(self, change: Callable[[Tensor, int], Tensor]) -> None:
        """Apply ``change`` to each tensor with a dimension of rows, and to that dimension."""
        self.offsets = change(self.offsets, -1)
        self.begins = change(self.begins, 0)
        self.places = change(self.places, 0)

    def widen(self, room: int) -> None:
        """Make room for rows of ``room`` tokens."""
        now = self.cache.size.capacity
        if room <= now:
            return
        step = now if self.cache.near else NEAR
        room = -(-room // step) * step
        added = room - now
        self.cache.widen(room)
        self.history.tokens = torch.nn.functional.pad(self.history.tokens, (0, added))
        self.places = torch.arange(self.cache.slots, device=self.device).repeat(len(self.begins), 1)

    def join(self) -> None:
        """Add a row at the end, which then takes a reading."""
        self.processor.rows.append(Processor(0.0))
        for part in self._members:
            part.join()
        self._each_row(with_one)

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""
        rows = self.processor.rows
        rows[row] = rows[-1]
        rows.pop()
        for part in self._members:
            part.leave(row)
        self._each_row(lambda x, dim: without(x, row, dim))

    def take(self, row: int, reading: Reading, source: int = 0) -> TargetOutput:
        """Begin prompt ``source`` of ``reading`` in ``row``; returns the output after it."""
        single = reading.alone
        self.started = reading.row(source)
        self.widen(reading.room)
        self.processor.rows[row] = single.processor.rows[source]
        self.take_row(row, single, source)
        return reading.output_of(source)

    def spoilt(self) -> dict[int, Exception]:
        """The rows whose logits were not finite in the last forward, or whose processor failed."""
        finite = (self.logits < float("inf")).flatten(1).all(1)  # excluded tokens are -inf
        rows = (~finite).nonzero()[:, 0].tolist()
        return dict.fromkeys(rows, not_finite(self.name)) | self.processor.failed

    def without_cache(self) -> RowsTarget:
        """A copy with the state of a prompt that drafters read, without keys and values."""
        target = copy.copy(self)
        for name in ("cache", "past", "history", "logits"):
            vars(target).pop(name, None)
        return target

    def _probs(self, logits: Tensor, tree: DraftTree | None) -> Tensor:
        self.logits = logits  # [B, N, V], for those who ask how likely a token was
        return super()._probs(logits, tree)

    def room_for(self, length: int) -> int:
        """Tokens that a prompt of ``length`` and its answer may have."""
        return self.family.room

    @property
    def resumes(self) -> bool:
        """Whether reading can resume after a stored prefix; not for layers with states."""
        return self.joins and not self.family.chains_only

    @property
    def packs(self) -> bool:
        """Whether one forward can process tokens of other caches beside the rows' tokens."""
        family = self.family
        return family.takes_trees and not (family.chains_only or self.way.whole or self.way.left)

    @property
    def reads_pieces(self) -> bool:
        """Whether texts can be read in pieces (chains); drafters need M-RoPE of whole prompts."""
        return self.packs and not (self.wants_context and self.family.mrope)

    def score(self, tree: DraftTree) -> TargetOutput:
        """As :meth:`VLMTarget.score`; the outputs of nodes that are not drafts are arbitrary."""
        if tree.sizes is not None:
            rows, most = tree.tokens.shape
            self.drafted = Nodes(rows, most, tree.sizes)
        try:
            return super().score(tree)
        finally:
            self.drafted = None

    def _logits(self, states: Tensor) -> Tensor:
        if self.drafted is None:
            return super()._logits(states)
        drafts = self.drafted.flat(states, 0)
        return self.drafted.rows_of(super()._logits(drafts[None])[0], 0)

    def tree_states(self, tokens: Tensor, shape: TreeShape) -> tuple[Tensor, Tensor]:
        """As :meth:`VLMTarget.tree_states`; the same forward reads the pieces ``beside``.

        Where PyTorch's attention runs, each row attends its own slots alone, and chains stay where
        they are written.
        """
        pieces, self.beside = self.beside, []
        if not pieces and self.drafted is None:
            return super().tree_states(tokens, shape)
        chains = backend(self.device) == "torch"
        ids = [tokens, *(piece.ids for piece in pieces)]
        targets = [self, *(piece.reading.alone for piece in pieces)]
        pairs = list(zip(targets, ids, strict=True))
        parts = [target.part(tokens_of, chains) for target, tokens_of in pairs]
        places = [target.places_of(tokens_of) for target, tokens_of in pairs]
        mask = PackedMask(parts)
        options: dict[str, Any] = {"attention_mask": PLACEHOLDER, "tree_mask": mask}
        options[self.family.cache_name] = packed([target.cache for target in targets], mask)
        if "position_ids" in self.family.takes:
            where = [one.where(row_ids) for one, row_ids in zip(targets, places, strict=True)]
            options["position_ids"] = mask.joined(where, where[0].ndim - 2).unsqueeze(-2)
        inputs = self.embed(mask.joined(ids)[None])
        with self._runs():
            states = self.family.decoder(inputs_embeds=inputs, use_cache=True, **options)
        by_target = mask.rows_of(states.last_hidden_state, 1)
        hidden = mask.rows_of(self._drafters_states(states.last_hidden_state), 1)
        if self.aux is not None:
            self.aux.seen[:] = [x if x is None else mask.rows_of(x, 1)[0] for x in self.aux.seen]
        for number, piece in enumerate(pieces, 1):
            piece.reading.take(piece.ids, by_target[number], hidden[number], places[number])
        return by_target[0], places[0]

    def part(self, tokens: Tensor, chains: bool) -> Part:
        """The chains of ``tokens`` [B, N], or fewer if rows differ in drafts, as a part of the next
        forward; ``chains``: they are written right behind their rows' tokens.
        """
        rows, most = tokens.shape
        nodes = self.drafted or Nodes(rows, most)
        if chains:
            sizes = [most] * rows if nodes.sizes is None else nodes.sizes.tolist()
            return Part(nodes, self.cache.aim_at_chains(sizes))
        mask = self.aim(TreeShape.chain(most - 1, self.device))[0]
        assert isinstance(mask, TreeMask), "where Triton's kernels run"
        return Part(nodes, mask)

    def places_of(self, tokens: Tensor) -> Tensor:
        """The places [B, N] in their texts of the next ``tokens`` [B, N]."""
        order = torch.arange(tokens.shape[1], device=self.device)
        return (self.cache.lengths[:, None] + order).clamp(max=self.last)

    def have_read(
        self, ids: Tensor, counts: Tensor, states: Tensor, hidden: Tensor, first: bool
    ) -> None:
        """Commit the next tokens ``ids`` [B, k] of prompts, ``counts`` [B] of each, after a forward
        that stored them in the scratch region and returned ``states`` [B, k, C]. ``first``: whether
        these are the first tokens.
        """
        kept = torch.arange(ids.shape[1], device=self.device).expand(len(ids), -1)
        self.cache.keep(kept, counts)
        images = torch.zeros_like(ids, dtype=torch.bool)
        new = Context(hidden, self.embed(ids), counts, images)
        if first:
            self.context = new if self.wants_context else None
        elif self.context is not None:
            self.context = _joined_contexts(self.context, new)


Hear: TypeAlias = Callable[[Tensor, Sequence[int]], None]


class Piece(NamedTuple):
    """The next tokens ``ids`` [B, k] of the prompts of a ``reading``."""

    reading: Reading
    ids: Tensor


def _joined_contexts(before: Context, after: Context) -> Context:
    """The contexts of two consecutive parts of a one-row text as one."""
    return Context(
        torch.cat([before.hidden, after.hidden], 1),
        torch.cat([before.embeddings, after.embeddings], 1),
        before.lengths + after.lengths,
        torch.cat([before.image_mask, after.image_mask], 1),
    )


def why_no_rows(family: Family, way: Way) -> str:
    """Why rows of a ``family``'s model, run this ``way``, cannot join a batch; empty: they can."""
    if family.turning_point is not None or family.stretched_after is not None:
        return "its positions depend on the length of a text"
    if not any(family.layer_sizes):
        return "it has layers with states alone"
    if family.reads_pictures_apart:
        return "its layers attend to all pictures of a batch side by side"
    pads_left = way.left and (way.whole or not family.chains_only)
    return "its own generate prepares each step" if pads_left else ""


class Reading:
    """A prompt that is being read by itself, or several short prompts at once. ``processors``: each
    prompt's own; ``most``: tokens of the largest piece; ``room``: most tokens of prompt and answer.
    A prompt's function in ``hear`` is called with the logits [n, V] that predict its tokens after
    the first.
    """

    def __init__(
        self,
        target: RowsTarget,
        prompt: VLMPrompt,
        processors: Sequence[ProbsProcessor],
        room: int,
        most: int,
        hear: Sequence[Hear | None] = (),
    ) -> None:
        self.target = target
        self.hear = hear
        self.alone: RowsTarget = copy.copy(target)  # with these prompts alone
        self.alone.__dict__.pop("started", None)
        self.alone.beside = []
        self.alone.processor = RowProcessors(processors)
        self.prompt = prompt
        self.room = room
        self.most = most
        self.read = 0  # tokens of a prompt by itself
        self.left = prompt.input_ids.shape[1]
        self.output: TargetOutput | None = None  # after the last token

    def resume(self, arrays: Sequence[Tensor], context: Context | None) -> None:
        """Take the first n tokens from storage: their keys and values ``arrays`` [A, n, H, D], and
        the ``context`` that drafters read. No picture may follow these tokens.
        """
        count = arrays[0].shape[1]
        self._open()
        for array, known in zip(self.alone.cache.arrays, arrays, strict=True):
            array[:, 0, :count] = known
        self.alone.cache.lengths[:] = count
        self.alone.context = context
        self.read, self.left = count, self.left - count

    def _open(self) -> None:
        """Make room for a prompt that will be read in pieces."""
        single, prompt = self.alone, self.prompt
        single.make_room(prompt, self.most)
        single.offsets = single.family.positions(prompt)[1]
        single.history = History(prompt.input_ids, prompt.lengths, 1)

    @property
    def packs(self) -> bool:
        """Whether the next piece can be read beside a round."""
        pictures = bool(self.prompt.vision) and not self.read
        return self.alone.reads_pieces and not pictures

    def next(self, count: int) -> Piece:
        """The next ``count`` tokens of a prompt, or as many as remain; several prompts are read
        whole. The forward that reads the piece calls :meth:`take`.
        """
        if not self.read:
            self._open()
        count = self.left if len(self.prompt.lengths) > 1 else min(count, self.left, self.most)
        return Piece(self, self.prompt.input_ids[:, self.read : self.read + count])

    def take(self, ids: Tensor, states: Tensor, hidden: Tensor, positions: Tensor) -> None:
        """Store the ``states`` [B, k, C] of tokens ``ids`` [B, k] that were read at ``positions``
        [B, k], and the ``hidden`` states that drafters read.
        """
        single = self.alone
        counts = (self.prompt.lengths - self.read).clamp(max=ids.shape[1])
        single.have_read(ids, counts, states, hidden, not self.read)
        for row, hear in enumerate(self.hear):
            text = self.prompt.input_ids[row, : int(self.prompt.lengths[row])]
            after = text[self.read + 1 : self.read + 1 + ids.shape[1]]
            if hear is not None:
                hear(single.head(states[row, : len(after)][None])[0], after.tolist())
        self.read += ids.shape[1]
        self.left -= ids.shape[1]
        if not self.left:
            rows, last = torch.arange(len(ids), device=single.device)[:, None], counts[:, None] - 1
            ends = states[rows, last], hidden[rows, last]
            self.output = single._output(*ends, None, positions.expand(len(ids), -1)[rows, last])

    @torch.inference_mode()
    def go_on(self, count: int) -> None:
        """Read ``count`` more tokens, or as many as remain. Prompts with pictures, several prompts
        at once, and prompts of models with states are read whole.
        """
        prompt, single = self.prompt, self.alone
        mrope = single.wants_context and single.family.mrope  # positions are kept by whole prompts
        at_once = len(prompt.lengths) > 1 or (bool(prompt.vision) and not self.read) or mrope
        at_once |= not single.resumes
        count = self.left if at_once else min(count, self.left)
        self.target.starting_row = True  # drafters' hooks are of the target itself
        try:
            if self.read or any(self.hear):
                ids = self.next(count).ids
                chain = TreeShape.chain(ids.shape[1] - 1, single.device)
                states, positions = single.tree_states(ids, chain)
                self.take(ids, states, single._drafters_states(states), positions)
            else:
                self._begin(count)
        finally:
            self.target.starting_row = False

    def _begin(self, count: int) -> None:
        """Read the first ``count`` tokens as the model itself does."""
        prompt, single = self.prompt, self.alone
        last = count == self.left
        if single.joins:
            ids = prompt.input_ids[:, :count]
            part = prompt if last else VLMPrompt({"input_ids": ids}, self.left - count)
            output = single.prefill(part, 0 if last else self.most)
            if why_no_rows(single.family, single.way):
                raise ValueError(
                    f"prompts of this kind cannot join a batch, because {single.name} prepares "
                    "them by itself"
                )
            single.prompt = prompt
            single.history = History(prompt.input_ids, prompt.lengths, 1)
            single.begins = prompt.begins.clone()
        else:  # the row will be just here
            answer = max(self.room - single.scratch - count, 1)
            output = single.prefill(replace(prompt, max_new_tokens=answer), single.scratch)
        self.output = output if last else None
        self.read, self.left = count, self.left - count

    def output_of(self, number: int) -> TargetOutput:
        """The output of the last token of prompt ``number``, after all tokens are read.

        Raises what its processor raised, and ``ValueError`` for logits that are not finite.
        """
        assert self.output is not None
        if number in self.alone.processor.failed:
            raise self.alone.processor.failed[number]
        one_row = slice(number, number + 1)
        ends = extremes(self.alone.logits[one_row])
        check_finite(ends, f"{self.alone.name} in round 0")
        return TargetOutput(self.output.probs[one_row], self.output.hidden[one_row], ends)

    def row(self, number: int) -> RowsTarget:
        """A target with only prompt ``number``, for drafters to read. If only one prompt was read,
        it is ``alone``, the target that read it.
        """
        if len(self.prompt.lengths) == 1:
            return self.alone
        reading = copy.copy(self.alone)
        length = int(self.prompt.lengths[number])
        one_row = slice(number, number + 1)
        reading.prompt = VLMPrompt({"input_ids": self.prompt.input_ids[one_row, :length]}, 1)
        reading.offsets = self.alone.offsets[..., one_row]
        reading.begins = self.alone.begins[one_row]
        reading.history = self.alone.history.rows(torch.tensor([number], device=reading.device))
        if (context := self.alone.context) is not None:
            parts = (context.hidden, context.embeddings)
            hidden, embeddings = (part[one_row, :length] for part in parts)
            mask, positions = context.image_mask[one_row, :length], context.positions
            positions = None if positions is None else positions[:, one_row, :length]
            reading.context = Context(hidden, embeddings, context.lengths[one_row], mask, positions)
        return reading
