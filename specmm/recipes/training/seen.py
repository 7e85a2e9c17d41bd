"""The target's states on texts and chats, from which drafters learn.

The target's states are computed when a batch is first used. A limited number of bytes is stored on
disk; other states are recomputed each time, so that memory does not grow with the rows.

Shape letters: B batch, L positions, F layers read, C width.
"""

from __future__ import annotations

import shutil
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from specmm.hf.drafters.features import next_positions
from specmm.hf.models.aux_states import AuxStates
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.loading.files import writable
from specmm.loading.hardware import bfloat16_products
from specmm.recipes.loop import MUON, Losses, Run, batch_rows, fit, rank, share

GIB = 2**30
# Makes a batch of what was drawn: whole conversations, and which tokens are answers' [B, L] bool.
Read = Callable[[Any], tuple[VLMPrompt, Tensor]]


@dataclass(frozen=True)
class Seen:
    """The target's states on a batch: ``embeddings`` [B, L, C] of the next positions, ``context``
    [B, L, F·C] of the layers read (without layers: ``hidden``), the last states ``hidden`` [B, L,
    C], the ``mask`` [B, L] of slots whose next tokens are learnt, and ``tokens`` [B, L]. ``image``
    [B, L] marks next positions in pictures.
    """

    embeddings: Tensor
    context: Tensor
    hidden: Tensor
    mask: Tensor
    tokens: Tensor
    image: Tensor

    @property
    def learnt(self) -> Tensor:
        """A mask [B, L] of learnt tokens; never the first token, which no slot drafts."""
        return F.pad(self.mask[:, :-1], (1, 0))

    @torch.inference_mode(False)
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Seen:
        """A copy for training, on ``device``, with states in ``dtype`` (None: unchanged)."""
        return Seen(
            **{
                name: x.to(device, dtype if x.is_floating_point() else None, copy=True)
                for name, x in vars(self).items()
            }
        )

    def with_room(self, count: int) -> Seen:
        """This, padded by ``count`` positions a row for blocks at its end, unless all is learnt."""
        if bool(self.mask[:, :-1].all()):
            return self
        tensors = vars(self).items()
        return Seen(**{name: F.pad(x, (0, 0) * (x.ndim - 2) + (0, count)) for name, x in tensors})


def seen_of(
    target: VLMTarget, prompt: VLMPrompt, answers: Tensor, read: AuxStates | None = None
) -> Seen:
    """The states of ``target`` on the whole conversations in ``prompt``, whose ``answers`` [B, L]
    are learnt, with the layers that ``read`` records (None: no layers).
    """
    target.prefill(prompt.to(target.device, target.dtype), 0)
    context = target.context
    assert context is not None, "the target must want a context"
    following, image = next_positions(context, torch.zeros_like(context.embeddings[:, 0]))
    mask = F.pad(answers.to(target.device)[:, 1:], (0, 1))
    states = target.ordered(read.context()) if read and read.seen else context.hidden
    tokens = prompt.input_ids.to(target.device)
    return Seen(following, states, context.hidden, mask, tokens, image)


class KeptStates:
    """The stored states of batches, by number: at most ``limit`` bytes in ``folder``, which is
    created empty and removed at the end.
    """

    def __init__(self, folder: Path, limit: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = writable(folder)
        self.left = limit
        self.numbers: set[int] = set()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def of(self, number: int, compute: Callable[[], Seen]) -> Seen:
        """The states of batch ``number``, from the disk or from ``compute``."""
        file = self.folder / f"{number}.safetensors"
        if number in self.numbers:
            return Seen(**load_file(file))
        seen = compute()
        size = size_of(seen)
        if size <= self.left:
            try:
                save_file({name: x.cpu().contiguous() for name, x in vars(seen).items()}, file)
            except (OSError, SafetensorError):  # a full disk
                file.unlink(missing_ok=True)
                self.left = 0
            else:
                self.left -= size
                self.numbers.add(number)
        return seen


def size_of(seen: Seen) -> int:
    """The bytes of ``seen``."""
    return sum(x.nbytes for x in vars(seen).values())


class SeenRows:
    """The states of ``target`` on batches of ``rows``, which ``read`` makes with a mask of the
    tokens that are learnt.

    The drafter reads ``layers`` of it. At most ``keep`` GiB of states are stored in ``out``. Rows
    of similar ``lengths`` (none: all equal) form a batch, which otherwise would be half padding.
    Batches are reordered every epoch; an epoch's last batch is filled up with its first rows.
    """

    def __init__(
        self,
        target: VLMTarget,
        rows: Sequence[Any] | Tensor,
        read: Read,
        layers: Sequence[int],
        batch: int,
        seed: int,
        out: Path,
        keep: float,
        lengths: Sequence[int] = (),
    ) -> None:
        self.target = target
        self.read = read
        self.rows = rows
        self.size = batch
        self.seed = seed
        order = batch_rows(0, len(rows), len(rows), seed).tolist()
        lengths = lengths or [1] * len(rows)
        order.sort(key=lengths.__getitem__)
        self.order = torch.tensor(order)
        rank_here, processes = rank()
        self.kept = KeptStates(out / f"states-{rank_here}", keep * GIB / processes)
        own_layers = [target.family.layers[i] for i in layers]
        self.aux = AuxStates(own_layers, lambda: target.running)
        target.wants_context = True
        if not rank_here:
            first = share(self._places(0))
            longest = max(lengths[int(i)] for i in first)
            mean = sum(lengths) / len(lengths) / longest  # relative to a row of the first batch
            size = int(size_of(self._seen(0)) / len(first) * mean)
            fitting = min(int(keep * GIB / max(size, 1)), len(rows))
            note = f"states: {size / 2**20:.2f} MiB a row, those of {fitting} of {len(rows)} rows"
            tqdm.write(f"{note} are kept on the disk (keep={keep:g} GiB)", file=sys.stderr)

    def batch(self, step: int) -> Seen:
        """This process's share of the batch of a ``step``, on the target's device."""
        count = -(-len(self.rows) // self.size)
        seen = self._seen(int(batch_rows(step, 1, count, self.seed)))
        return seen.to(self.target.device, torch.float32)

    def _places(self, number: int) -> Tensor:
        return self.order[(number * self.size + torch.arange(self.size)) % len(self.rows)]

    def _seen(self, number: int) -> Seen:
        rows = [self.rows[int(i)] for i in share(self._places(number))]
        return self.kept.of(number, lambda: self._compute(rows))

    def _compute(self, rows: Sequence[Any]) -> Seen:
        device = self.target.device
        faster = device.type != "cpu" or bfloat16_products()
        with torch.autocast(device.type, torch.bfloat16, enabled=faster):
            return seen_of(self.target, *self.read(rows), self.aux).to(device, torch.bfloat16)


def learn(
    network: nn.Module,
    loss: Callable[[Seen, int], Losses],
    draw: Callable[[int], Seen],
    run: Run,
    **options: Any,
) -> None:
    """Train ``network`` in place by the ``loss`` of the batch that ``draw`` returns for each step,
    with autocast to bfloat16; ``options`` are those of :func:`specmm.recipes.loop.fit`.
    """

    def step(i: int) -> Losses:
        seen = draw(i)
        with torch.autocast(seen.hidden.device.type, torch.bfloat16):
            return loss(seen, i)

    fit(network, step, run, muon=MUON * run.lr, **options)
    network.eval()
