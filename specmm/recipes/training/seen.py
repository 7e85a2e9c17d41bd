"""What feature drafters learn from: texts and chats, as the target sees them.

Shape letters: B batch, L positions, F layers read, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.hf.aux_states import AuxStates
from specmm.hf.drafters.features import next_positions
from specmm.hf.target import VLMTarget
from specmm.recipes.training.msd import Read
from specmm.training import batch_rows


@dataclass(frozen=True)
class Seen:
    """What the target saw and thought: ``embeddings`` [B, L, C] of the next positions, ``context``
    [B, L, F·C] of the layers read (of none: ``hidden``), the last states ``hidden`` [B, L, C], and
    which slots count, ``mask`` [B, L]. ``image`` [B, L] tells which next positions are pictures'
    (None: none is).
    """

    embeddings: Tensor
    context: Tensor
    hidden: Tensor
    mask: Tensor
    image: Tensor | None = None

    @torch.inference_mode(False)
    def to(self, device: torch.device | str, dtype: torch.dtype) -> Seen:
        """A copy that may be learnt from, on ``device``, its states in ``dtype``."""
        return Seen(
            self.embeddings.to(device, dtype, copy=True),
            self.context.to(device, dtype, copy=True),
            self.hidden.to(device, dtype, copy=True),
            self.mask.to(device, copy=True),
            None if self.image is None else self.image.to(device, copy=True),
        )


class SeenRows:
    """Batches of ``rows`` as ``target`` sees them, of whose tokens those that ``read`` tells count.

    ``layers`` of it are read. Each batch is computed when it is first used, and kept; every epoch
    they come in another order.
    """

    def __init__(
        self,
        target: VLMTarget,
        rows: Sequence[Any] | Tensor,
        read: Read,
        layers: Sequence[int],
        batch: int,
        seed: int,
    ) -> None:
        self.target = target
        self.read = read
        self.rows = rows
        self.size = batch
        self.seed = seed
        self.kept: dict[int, Seen] = {}
        own = [target.family.layers[i] for i in layers]
        self.aux = AuxStates(own, lambda: target.running)
        target.wants_context = True

    def batch(self, step: int) -> Seen:
        """That of a ``step``, on the target's device."""
        count = -(-len(self.rows) // self.size)
        number = int(batch_rows(step, 1, count, self.seed))
        if number not in self.kept:
            part = self.rows[number * self.size : (number + 1) * self.size]
            self.kept[number] = self._compute(part).to("cpu", torch.bfloat16)
        return self.kept[number].to(self.target.device, self.target.dtype)

    def _compute(self, rows: Sequence[Any] | Tensor) -> Seen:
        target = self.target
        prompt, answers = self.read(rows)
        target.prefill(prompt.to(target.device, target.dtype), 0)
        context = target.context
        assert context is not None
        following, image = next_positions(context, torch.zeros_like(context.embeddings[:, 0]))
        mask = F.pad(answers.to(target.device)[:, 1:], (0, 1))
        states = target.ordered(self.aux.context()) if self.aux.seen else context.hidden
        return Seen(following, states, context.hidden, mask, image)
