"""What block drafters learn from: rows of text, partly the target's own, and what the target says
of them.

What it says is worked out when a row is first asked for and kept, for it is the slow part and never
changes.

Shape letters: R rows, B batch, L tokens of a row, F layers read, C width, V vocabulary.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from specmm.checkpoints import fingerprint
from specmm.decode import decode_plain
from specmm.diffusion_drafters.drafters.sources import AuxStates
from specmm.files import write_whole
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.training import batch_rows

AT_ONCE = 32  # rows the target continues together


@dataclass(frozen=True)
class Batch:
    """``tokens`` [B, L], ``context`` [B, L, F·C] what the layers read said, ``hidden`` [B, L, C]
    the last states.
    """

    tokens: Tensor
    context: Tensor
    hidden: Tensor


class Rows:
    """Rows ``tokens`` [R, L] and what ``target`` says of them; ``layers`` are those that a drafter
    reads.
    """

    def __init__(self, target: VLMTarget, tokens: Tensor, layers: Sequence[int] = ()) -> None:
        self.target, self.tokens = target, tokens.long()
        self.aux_layers = AuxStates([target.family.layers[i] for i in layers])
        width = target.family.config.hidden_size
        self.states = torch.empty(*tokens.shape, (len(layers) + 1) * width, dtype=torch.bfloat16)
        self.known = torch.zeros(len(tokens), dtype=torch.bool)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The rows of ``step``, on the target's device."""
        rows = batch_rows(step, size, len(self.tokens), seed)
        if not bool(self.known[rows].all()):
            self._ask(rows[~self.known[rows]].unique())
        device, width = self.target.device, self.target.family.config.hidden_size
        states = self.states[rows].to(device)
        return Batch(self.tokens[rows].to(device), states[..., width:], states[..., :width])

    @torch.inference_mode()
    def _ask(self, rows: Tensor) -> None:
        device = self.target.device
        with torch.autocast(device.type, torch.bfloat16):
            found = self.target.family.decoder(
                input_ids=self.tokens[rows].to(device), use_cache=False
            )
        parts = [
            found.last_hidden_state,
            *([self.aux_layers.context()] if self.aux_layers.seen else []),
        ]
        self.states[rows] = torch.cat(parts, dim=-1).to("cpu", torch.bfloat16)
        self.known[rows] = True


def frequent(tokens: Tensor, count: int) -> Tensor:
    """The ``count`` ids that stand most often in ``tokens``; raises ``ValueError`` where there are
    not as many.
    """
    seen = torch.bincount(tokens.flatten())
    if not 1 <= count <= int((seen > 0).sum()):
        raise ValueError(
            f"vocabulary must be 1 to the text's {int((seen > 0).sum())} different tokens, got {count}"
        )
    return seen.topk(count).indices


def save_whole(file: Path, tokens: Tensor) -> None:
    """Write ``tokens`` to ``file`` whole or not at all."""
    buffer = io.BytesIO()
    torch.save(tokens, buffer)
    write_whole(file, buffer.getvalue())


def drawn_rows(
    target: VLMTarget,
    prompts: Tensor,
    length: int,
    temperatures: Sequence[float],
    out: Path,
    seed: int = 0,
) -> Tensor:
    """``prompts`` [R, P] continued by the target to rows [R, L], at each of ``temperatures`` in
    turn.

    Kept in ``out`` batch by batch, so that a killed run goes on.
    """
    kept = out / f"drawn-{fingerprint(target.family.head.weight)}-{length}-{seed}"
    kept.mkdir(parents=True, exist_ok=True)
    found = []
    for i, part in enumerate(tqdm(prompts.split(AT_ONCE), desc="draw")):
        file = kept / f"{i:04d}-{len(part)}.pt"
        if not file.exists():
            own = VLMTarget(
                target.model, Processor(temperatures[i % len(temperatures)]), target.name
            )
            uniforms = Uniforms.from_seeds(
                [seed * 1_000_003 + AT_ONCE * i + row for row in range(len(part))]
            )
            wanted = length - part.shape[1]
            prompt = VLMPrompt({"input_ids": part.to(own.device)}, wanted)
            *_, end = decode_plain(own, prompt, wanted, uniforms)
            save_whole(file, torch.cat([part, end.tokens[:, :wanted].cpu()], dim=1).int())
        found.append(torch.load(file, weights_only=True))
    return torch.cat(found)
