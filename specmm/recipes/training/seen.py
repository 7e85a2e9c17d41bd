"""What feature drafters learn from: texts, and conversations about pictures that the target itself
may have answered, as the target sees them.

Shape letters: B batch, L positions, F layers read, C width.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from specmm.files import write_whole
from specmm.hf.aux_states import AuxStates
from specmm.hf.drafters.features import next_positions
from specmm.hf.target import VLMTarget
from specmm.recipes.training.drawn_rows import Rows
from specmm.recipes.training.msd import Read
from specmm.vlm.pipeline import VQAPipeline

TEMPERATURES = (0.0, 1.0)  # of answers, in turn
AT_ONCE = 32  # questions answered together
LONGEST = 96  # tokens of an answer


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


class SeenTexts:
    """Batches of ``rows`` of text [R, L] as ``target`` sees them.

    Every place counts that has a next token.
    """

    def __init__(
        self, target: VLMTarget, rows: Tensor, layers: Sequence[int], batch: int, seed: int
    ) -> None:
        self.target = target
        self.rows = Rows(target, rows, layers)
        self.size = batch
        self.seed = seed

    def batch(self, step: int) -> Seen:
        """That of a ``step``, on the target's device."""
        found = self.rows.batch(step, self.size, self.seed)
        mask = torch.ones_like(found.tokens, dtype=torch.bool)
        mask[:, -1] = False
        following = self.target.embed(found.tokens.roll(-1, 1))
        context = found.context if self.rows.aux_layers.seen else found.hidden
        seen = Seen(following, context, found.hidden, mask)
        return seen.to(self.target.device, self.target.dtype)


def answered_lines(pipe: VQAPipeline, lines: Sequence[Any], share: float, out: Path) -> list[Any]:
    """``lines`` (:class:`specmm.recipes.conversations.Line`), the first of each so many answered by
    the target itself, at ``TEMPERATURES`` in turn.

    Kept in ``out`` part by part, so that an interrupted run continues.
    """
    kept = out / "answers"
    kept.mkdir(parents=True, exist_ok=True)
    found: list[Any] = []
    parts = [lines[i : i + AT_ONCE] for i in range(0, len(lines), AT_ONCE)]
    for i, part in enumerate(tqdm(parts, desc="answer")):
        own = part[: round(share * len(part))]
        file = kept / f"{i:04d}-{len(own)}.json"
        if own and not file.exists():
            texts = pipe(
                [line.images for line in own],
                [line.question for line in own],
                temperature=TEMPERATURES[i % len(TEMPERATURES)],
                max_new_tokens=LONGEST,
                seed=i,
            ).answers
            write_whole(file, json.dumps(texts).encode())
        texts = json.loads(file.read_text()) if own else []
        found += [dataclasses.replace(x, answer=text) for x, text in zip(own, texts, strict=True)]
        found += part[len(own) :]
    return found


class SeenConversations:
    """Batches of ``lines`` as ``target`` sees them, of whose tokens those of answers count.

    ``layers`` of it are read. Each batch is computed when it is first used, and kept.
    """

    def __init__(
        self, target: VLMTarget, lines: Sequence[Any], read: Read, layers: Sequence[int], batch: int
    ) -> None:
        self.target = target
        self.read = read
        self.parts = [lines[i : i + batch] for i in range(0, len(lines), batch)]
        self.kept: dict[int, Seen] = {}
        own = [target.family.layers[i] for i in layers]
        self.aux = AuxStates(own, lambda: target.running)
        target.wants_context = True

    def batch(self, step: int) -> Seen:
        """That of a ``step``, on the target's device."""
        number = step % len(self.parts)
        if number not in self.kept:
            self.kept[number] = self._compute(self.parts[number]).to("cpu", torch.bfloat16)
        return self.kept[number].to(self.target.device, self.target.dtype)

    def _compute(self, lines: Sequence[Any]) -> Seen:
        target = self.target
        prompt, answers = self.read(lines)
        target.prefill(prompt.to(target.device, target.dtype), 0)
        context = target.context
        assert context is not None
        following, image = next_positions(context, torch.zeros_like(context.embeddings[:, 0]))
        mask = F.pad(answers.to(target.device)[:, 1:], (0, 1))
        states = target.ordered(self.aux.context()) if self.aux.seen else context.hidden
        return Seen(following, states, context.hidden, mask, image)
