"""Conversations about pictures that a drafter learns from: answered by the target itself, and read
by it once.

Shape letters: B batch, L positions, F layers read, C width.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from specmm.files import write_whole
from specmm.hf.aux_states import AuxStates
from specmm.hf.drafters.eagle3_head import layers_read
from specmm.hf.drafters.features import next_positions
from specmm.hf.target import VLMTarget
from specmm.recipes.training.eagle3 import Seen
from specmm.recipes.training.msd import Read
from specmm.vlm.pipeline import VQAPipeline

TEMPERATURES = (0.0, 1.0)  # of answers, in turn
AT_ONCE = 32  # questions answered together
LONGEST = 96  # tokens of an answer


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
    """Batches of ``lines`` as ``target`` sees them; each is computed when it is first used, and
    kept.
    """

    def __init__(self, target: VLMTarget, lines: Sequence[Any], read: Read, batch: int) -> None:
        self.target = target
        self.read = read
        self.parts = [lines[i : i + batch] for i in range(0, len(lines), batch)]
        self.kept: dict[int, Seen] = {}
        own = target.family.layers
        self.aux = AuxStates([own[i] for i in layers_read(len(own))], lambda: target.running)
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
        following, _ = next_positions(context, torch.zeros_like(context.embeddings[:, 0]))
        mask = F.pad(answers.to(target.device)[:, 1:], (0, 1))
        return Seen(following, target.ordered(self.aux.context()), context.hidden, mask)
