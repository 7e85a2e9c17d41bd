"""A target whose rows join and leave between rounds, and whose prompts are read in pieces.

Shape letters: B rows, k tokens of a piece, S slots, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specmm.core.processors import History, Processor, check_finite, extremes, not_finite
from specmm.core.rows import Joining
from specmm.core.state import with_one, without
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.models.families import WAYS, Family, Way
from specmm.hf.models.probe import way_of
from specmm.hf.models.target import Context, ProbsProcessor, VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.loading.hardware import out_of_memory

NEAR = 256  # tokens by which the room of rows grows


class RowProcessors:
    """A processor for each row of a batch; rows of equal ones are asked together.

    Where one fails, its rows draw token 0, and ``failed`` says why until the next forward.
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
        """Rows were checked when they were made."""

    def probs(
        self, logits: Tensor, history: History, tree: DraftTree | None, out: Tensor | None = None
    ) -> Tensor:
        """Distributions [B, N, V] of ``logits`` [B, N, V]."""
        groups: list[tuple[ProbsProcessor, list[int]]] = []
        for number, row in enumerate(self.rows):
            alike = next((rows for one, rows in groups if _alike(one, row)), None)
            if alike is None:
                groups.append((row, [number]))
            else:
                alike.append(number)
        self.failed = {}
        if len(groups) == 1 and isinstance(groups[0][0], Processor):
            return groups[0][0].probs(logits, history, tree)
        kind = torch.promote_types(logits.dtype, torch.float32)
        found = torch.empty_like(logits, dtype=kind)
        for own, rows in groups:
            some = torch.tensor(rows, device=logits.device)
            part = None if tree is None else _part(tree, some)
            try:
                found[some] = own.probs(logits[some], history.rows(some), part)
            except Exception as error:
                if out_of_memory(error):
                    raise
                self.failed |= dict.fromkeys(rows, error)
                found[some] = torch.eye(1, found.shape[-1], device=found.device)
        return found


def _alike(one: ProbsProcessor, other: ProbsProcessor) -> bool:
    """Whether two rows may be asked together: plain processors know nothing of their row."""
    return one is other or (isinstance(one, Processor) and one == other)


def _part(tree: DraftTree, some: Tensor) -> DraftTree:
    """``some`` rows [n] of a ``tree``."""
    shape = tree.shape
    if not shape.shared:
        shape = TreeShape(shape.parents[some], shape.depth, shape.width)
    return DraftTree(tree.tokens[some], shape)


class RowsTarget(VLMTarget):
    """A model as the target of an engine.

    It begins without rows. Each one that joins takes the prompt of a :class:`Reading`. Raises
    ``ValueError`` for models that :func:`why_no_rows` rules out.
    """

    processor: RowProcessors
    started: RowsTarget

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(model, RowProcessors(), name)
        if reason := why_no_rows(self.family, self.way):
            raise ValueError(f"rows of {name} cannot join others: {reason}")
        self.scratch = 1

    @cached_property
    def reads_ragged(self) -> bool:
        """Whether prompts of several lengths can be read at once."""
        if self.family.chains_only:
            return False
        prompt = VLMPrompt({**padded([[0, 0], [0]])}, 1).to(self.device, self.dtype)
        try:
            return way_of(self.model, prompt, self._probing) == WAYS[0]
        except ValueError:
            return False

    def open(self, scratch: int, rows: int = 1) -> None:
        """Without rows, with room for trees of ``scratch`` nodes; and for so many ``rows``, where
        room costs nothing.
        """
        self.scratch = scratch
        self.processor.rows.clear()
        room = min(NEAR, self.family.room)
        prompt = VLMPrompt({**padded([[0]])}, room - 1).to(self.device, self.dtype)
        if self.family.chains_only:  # what its layers hold is known once they have run
            self.prefill(prompt, scratch)
        else:
            self.make_room(prompt, scratch)
        self.history = History(self.prompt.input_ids, self.prompt.lengths, room)
        for part in self._members:
            part.leave(0)
        if self.device.type == "cpu":
            self.cache.widen(rows=rows)
        self._each_row(lambda x, dim: without(x, 0, dim))

    @property
    def _members(self) -> list[Joining]:
        """What holds something of each row."""
        states = [] if self.recurrent is None else [self.recurrent]
        return [self.cache, self.history, *states]

    def _each_row(self, change: Callable[[Tensor, int], Tensor]) -> None:
        """Change what is there of each row, along its dimension of rows."""
        self.offsets = change(self.offsets, -1)
        self.begins = change(self.begins, 0)
        self.places = change(self.places, 0)

    def widen(self, room: int) -> None:
        """Rows of ``room`` tokens have room."""
        room = -(-room // NEAR) * NEAR
        if room <= self.cache.size.capacity:
            return
        more = room - self.cache.size.capacity
        self.cache.widen(room)
        self.history.tokens = torch.nn.functional.pad(self.history.tokens, (0, more))
        self.places = torch.arange(self.cache.slots, device=self.device).repeat(len(self.begins), 1)

    def join(self) -> None:
        """One more row, the last, which then takes a reading."""
        self.processor.rows.append(Processor(0.0))
        for part in self._members:
            part.join()
        self._each_row(with_one)

    def leave(self, row: int) -> None:
        """Without ``row``, whose place the last one takes."""
        rows = self.processor.rows
        rows[row] = rows[-1]
        rows.pop()
        for part in self._members:
            part.leave(row)
        self._each_row(lambda x, dim: without(x, row, dim))

    def take(self, row: int, reading: Reading, source: int = 0) -> TargetOutput:
        """The prompt ``source`` of ``reading`` begins in ``row``; the output after it."""
        alone = reading.alone
        self.started = reading.row(source)
        self.widen(reading.room)
        self.processor.rows[row] = alone.processor.rows[source]
        self.take_row(row, alone, source)
        return reading.output_of(source)

    def spoilt(self) -> dict[int, Exception]:
        """The rows whose logits were not finite in the last forward, or whose processor failed."""
        finite = (self.logits < float("inf")).flatten(1).all(1)  # what is not allowed is -inf
        rows = (~finite).nonzero()[:, 0].tolist()
        return dict.fromkeys(rows, not_finite(self.name)) | self.processor.failed

    def without_cache(self) -> RowsTarget:
        """What drafters read of a prompt, without the memory of its keys and values."""
        found = copy.copy(self)
        for name in ("cache", "past", "history", "logits"):
            vars(found).pop(name, None)
        return found

    def _probs(self, logits: Tensor, tree: DraftTree | None) -> Tensor:
        self.logits = logits  # [B, N, V], for those who ask how likely a token was
        return super()._probs(logits, tree)

    def read_on(self, ids: Tensor, last: bool) -> TargetOutput | None:
        """Read the next tokens ``ids`` [1, k] of a prompt; the output after them if they are the
        ``last``.
        """
        count = ids.shape[1]
        states, positions = self.tree_states(ids, TreeShape.chain(count - 1, self.device))
        kept = torch.arange(count, device=self.device)[None]
        self.cache.keep(kept, torch.full_like(self.begins, count))
        hidden = self._drafters_states(states)
        if self.context is not None:
            self.context = _longer(self.context, hidden, self.embed(ids))
        if not last:
            return None
        return self._output(states[:, -1:], hidden[:, -1:], None, positions[:, -1:])


def _longer(context: Context, hidden: Tensor, embeddings: Tensor) -> Context:
    """``context`` of a text that goes on with tokens of these states and embeddings."""
    count = hidden.shape[1]
    return Context(
        torch.cat([context.hidden, hidden], 1),
        torch.cat([context.embeddings, embeddings], 1),
        context.lengths + count,
        torch.nn.functional.pad(context.image_mask, (0, count)),
    )


def why_no_rows(family: Family, way: Way) -> str:
    """Why rows of such a model cannot join others; empty where they can."""
    if family.turning_point is not None or family.stretched_after is not None:
        return "its positions depend on the length of a text"
    if not any(family.layer_sizes):
        return "it has layers with states alone"
    if family.reads_pictures_apart:
        return "its layers attend to all pictures of a batch side by side"
    own = way.whole or (way.left and not family.chains_only)
    return "its own generate prepares each step" if own else ""


class Reading:
    """A prompt being read by itself, or several short ones at once: ``processors`` are theirs,
    ``most`` the tokens of the largest piece, ``room`` those that prompt and answer may have.
    """

    def __init__(
        self,
        target: RowsTarget,
        prompt: VLMPrompt,
        processors: Sequence[ProbsProcessor],
        room: int,
        most: int,
    ) -> None:
        self.target = target
        self.alone: RowsTarget = copy.copy(target)
        self.alone.__dict__.pop("started", None)
        self.alone.processor = RowProcessors(processors)
        self.prompt = prompt
        self.room = room
        self.most = most
        self.read = 0  # tokens of a prompt by itself
        self.left = prompt.input_ids.shape[1]
        self.output: TargetOutput | None = None  # of the last token

    def resume(self, arrays: Sequence[Tensor], context: Context | None) -> None:
        """Take over what is known of the first tokens: their keys and values ``arrays`` [A, n, H,
        D], and what drafters read of them. No picture may come after them.
        """
        alone, prompt = self.alone, self.prompt
        count = arrays[0].shape[1]
        alone.make_room(prompt, self.most)
        for own, known in zip(alone.cache.arrays, arrays, strict=True):
            own[:, 0, :count] = known
        alone.cache.lengths[:] = count
        alone.offsets = alone.family.positions(prompt)[1]
        alone.history = History(prompt.input_ids, prompt.lengths, 1)
        alone.context = context
        self.read, self.left = count, self.left - count

    @torch.inference_mode()
    def go_on(self, count: int) -> None:
        """Read ``count`` more tokens, or all that there are; a prompt with pictures is read whole,
        and so are several, and prompts of models with states.
        """
        prompt, alone = self.prompt, self.alone
        mrope = alone.wants_context and alone.family.mrope  # positions are kept by whole prompts
        whole = len(prompt.lengths) > 1 or (bool(prompt.vision) and not self.read) or mrope
        whole |= alone.family.chains_only
        count = self.left if whole else min(count, self.left)
        if self.read:
            count = min(count, self.most)
        ids = prompt.input_ids[:, self.read : self.read + count]
        last = count == self.left
        self.target.starting_row = True  # drafters' hooks are of the target itself
        try:
            self.output = self._piece(ids, last)
        finally:
            self.target.starting_row = False
        self.read += count
        self.left -= count

    def _piece(self, ids: Tensor, last: bool) -> TargetOutput | None:
        prompt, alone = self.prompt, self.alone
        if self.read:
            return alone.read_on(ids, last)
        left = self.left - ids.shape[1]
        part = prompt if last else VLMPrompt({"input_ids": ids}, left)
        output = alone.prefill(part, 0 if last else self.most)
        if why_no_rows(alone.family, alone.way):
            raise ValueError(
                f"prompts of this kind are read by {alone.name}'s own preparation, and cannot "
                "join others"
            )
        alone.prompt = prompt
        alone.history = History(prompt.input_ids, prompt.lengths, 1)
        alone.begins = prompt.begins.clone()
        return output if last else None

    def output_of(self, number: int) -> TargetOutput:
        """The output of the last token of prompt ``number``, once all are read.

        Raises what its processor raised, and ``ValueError`` for logits that are not finite.
        """
        assert self.output is not None
        if number in self.alone.processor.failed:
            raise self.alone.processor.failed[number]
        some = slice(number, number + 1)
        ends = extremes(self.alone.logits[some])
        check_finite(ends, f"{self.alone.name} in round 0")
        return TargetOutput(self.output.probs[some], self.output.hidden[some], ends)

    def row(self, number: int) -> RowsTarget:
        """What drafters read of prompt ``number``, as that of a target of its own."""
        if len(self.prompt.lengths) == 1:
            return self.alone
        found = copy.copy(self.alone)
        length = int(self.prompt.lengths[number])
        some = slice(number, number + 1)
        found.prompt = VLMPrompt({"input_ids": self.prompt.input_ids[some, :length]}, 1)
        found.offsets = self.alone.offsets[..., some]
        found.begins = self.alone.begins[some]
        found.history = self.alone.history.rows(torch.tensor([number], device=found.device))
        if (context := self.alone.context) is not None:
            parts = (context.hidden, context.embeddings)
            hidden, embeddings = (part[some, :length] for part in parts)
            mask, positions = context.image_mask[some, :length], context.positions
            positions = None if positions is None else positions[:, some, :length]
            found.context = Context(hidden, embeddings, context.lengths[some], mask, positions)
        return found
