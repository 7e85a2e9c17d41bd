"""An engine's target for models whose rows cannot join a batch: it has one row at a time."""

from __future__ import annotations

from typing import Any, ClassVar

from specmm.core.processors import Processor
from specmm.core.target import TargetOutput
from specmm.hf.models.rows import Reading, RowsTarget, why_no_rows
from specmm.hf.prompts.prompt import VLMPrompt, padded

READ = (  # the attributes that hold a prompt that was read
    *("prompt", "begins", "first", "offsets", "places", "last", "each", "way"),
    *("cache", "past", "recurrent", "history", "context", "steps", "spent", "logits"),
)


class SingleTarget(RowsTarget):
    """A model as the target of an engine with one row, which takes over a whole prompt's state."""

    joins: ClassVar[bool] = False
    reads_ragged = False
    packs = False

    def open(self, scratch: int, rows: int = 1) -> None:
        """Begin without a row; reads a token so that drafters can size their memory."""
        self.scratch = scratch
        self.processor.rows.clear()
        self.make_room(VLMPrompt({**padded([[0]])}, 1).to(self.device, self.dtype), scratch)

    def join(self) -> None:
        self.processor.rows.append(Processor(0.0))

    def leave(self, row: int) -> None:
        self.processor.rows.pop()

    def take(self, row: int, reading: Reading, source: int = 0) -> TargetOutput:
        output = reading.output_of(source)
        self.started = reading.alone
        for name in READ:
            setattr(self, name, getattr(reading.alone, name))
        self.processor.rows[row] = reading.alone.processor.rows[source]
        return output

    def room_for(self, length: int) -> int:
        """As the parent's, limited so that rotary embeddings do not change within an answer."""
        family = self.family
        bounds = [family.room]
        if family.turning_point is not None and length <= family.turning_point:
            bounds.append(family.turning_point)
        if family.stretched_after is not None:
            bounds.append(family.stretched_after)
        return min(bounds)


def engine_target(model: Any, name: str) -> RowsTarget:
    """The engine's target for ``model``, called ``name``, with many rows or with one."""
    single = SingleTarget(model, name)
    return single if why_no_rows(single.family, single.way) else RowsTarget(model, name)
