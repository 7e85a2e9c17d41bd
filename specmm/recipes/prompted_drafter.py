"""Block and EAGLE drafters of models of transformers that draw pictures from prompts.

Shape letters: M pictures, T tokens a picture.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.files import writable
from specmm.hf.picture_tokens import Layout, PictureTarget, picture_prompt
from specmm.image_ar.shared import write_settings
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.loading import load_block_for, save_drafters_of
from specmm.image_ar.transformers_pipeline import TransformersImagePipeline
from specmm.recipes.pictures import captioned
from specmm.recipes.training.block_drafter import (
    Batch,
    block_loss,
    fit_block,
    go_on_from,
    measure_acceptance,
    measure_taus,
    start_from,
)
from specmm.recipes.training.drawn_pictures import draw_all
from specmm.recipes.training.eagle_drafter import eagle_loss, fit_eagle
from specmm.recipes.training.encoding import CLASS_DROPOUT, to_float
from specmm.recipes.training.seen_pictures import SeenPictures
from specmm.training import Losses, batch_rows, seeded

AT_ONCE = 16  # pictures that are encoded
HELD = 32  # pictures at most that acceptance is measured on


def prompts_in(file: Path) -> list[str]:
    """The lines of ``file`` that say anything; raises ``ValueError`` where there is none."""
    if not file.is_file():
        raise ValueError(f"prompts must be a file with a prompt a line, got {file}")
    found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    if not any(found):
        raise ValueError(f"prompts must be a file with a prompt a line, got none in {file}")
    return [line for line in found if line]


@dataclass(frozen=True)
class Request:
    """What is to be learnt from: a folder ``data`` of pictures with texts, and ``drawn`` pictures
    (0: one of each) of the lines of a file of ``prompts``, drawn at the guidance scale ``cfg``
    (None: the model's) and kept in ``out``. Their ``size`` is height and width in pixels, both None
    for the model's usual one.
    """

    data: Path | None
    prompts: Path | None
    drawn: int
    cfg: float | None
    size: tuple[int | None, int | None]
    seed: int
    out: Path

    def asked(self) -> list[str]:
        """The prompt of each picture to draw, all before any comes again; raises ``ValueError`` for
        a file without one.
        """
        if self.prompts is None:
            return []
        found = prompts_in(self.prompts)
        rows = batch_rows(0, self.drawn or len(found), len(found), self.seed)
        return [found[i] for i in rows.tolist()]


@dataclass(frozen=True)
class Training:
    """``sizes`` are those of a :class:`BlockConfig`, of which an EAGLE head has ``inner`` alone,
    ``start`` is a block drafter's folder to go on from, ``options`` are those of ``fit_block`` or
    ``fit_eagle``.
    """

    kind: str  # block or eagle
    sizes: dict[str, Any]
    start: Path | None
    temperature: float
    options: dict[str, Any]


def train_prompted(model: Path, request: Request, training: Training) -> None:
    """Train a block drafter of the model in a folder and write it there, with the acceptance that
    was measured.

    Raises ``ValueError`` for a file without prompts, layers that the model does not have, and a
    drafter to go on from that is another target's.
    """
    texts = request.asked()
    parts = [_drawn(model, texts, request)] if texts else []
    pipe = TransformersImagePipeline.from_pretrained(model, device="cpu", dtype="float32")
    layout = pipe._layout(*request.size)
    if request.data is not None:
        shown, own = _encoded(pipe, request.data, layout)
        texts = texts + own
        parts.append(shown)
    head = _begun(pipe, training, request.seed)
    layers = head.config.aux_layers if isinstance(head, BlockHead) else ()
    seen = _seen(pipe, texts, torch.cat(parts), layers, layout)
    guided = (pipe.settings.cfg if request.cfg is None else request.cfg) > 1
    # more than a model's own training, for both guidance branches draft
    options = training.options | {"dropout": 3 * CLASS_DROPOUT if guided else 0.0}
    if isinstance(head, BlockHead):
        _fit_block(head, seen, training.temperature, request.out, options)
    else:
        _fit_eagle(head, seen, request.out, options)
    made = {training.kind: head}
    save_drafters_of(pipe.owner.fingerprint, made, model / "drafters", torch.bfloat16)
    if isinstance(head, BlockHead):
        judge = pipe.target(cfg=request.cfg, layout=layout)
        found = _accepted(head.eval(), judge, seen)
        found["taus"] = pipe.settings.taus | found["taus"]
        write_settings(dataclasses.replace(pipe.settings, **found), model)


def _fit_block(
    head: BlockHead, seen: SeenPictures, temperature: float, out: Path, options: dict[str, Any]
) -> None:
    logits, rotary = seen.logits, head.rotary_for(seen.target.sizes)

    @torch.compile
    def loss_of(read: Any, at: Tensor) -> tuple[Tensor, Tensor]:
        return block_loss(head, read, logits, at, rotary, temperature)

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        return loss_of(seen.batch(batch.rows, batch.dropped), batch.at)

    fit_block(head, (len(seen.tokens), seen.target.length), loss, out, **options)


def _fit_eagle(head: EagleHead, seen: SeenPictures, out: Path, options: dict[str, Any]) -> None:
    logits, rotary = seen.logits, head.rotary_for(seen.target.sizes)

    @torch.compile
    def loss_of(read: Any, shift: Tensor) -> Losses:
        return eagle_loss(head, read, logits, shift, rotary)

    def loss(rows: Tensor, mirrored: Tensor, dropped: Tensor, shift: Tensor) -> Losses:
        return loss_of(seen.batch(rows, dropped), shift)

    fit_eagle(head, (len(seen.tokens), seen.target.length), loss, out, **options)


def _accepted(head: BlockHead, judge: PictureTarget, seen: SeenPictures) -> dict[str, Any]:
    """The acceptance by level and rank over pictures of some of the prompts, and the tau of methods
    without a drafter, as the model's settings have them.
    """
    count = len(seen.tokens)
    held = range(0, count, -(-count // HELD))
    ids, away = ([rows[i] for i in held] for rows in seen.rows)
    together = picture_prompt(judge, ids, away)
    return {
        "acceptance": measure_acceptance(head, judge, together, range(len(ids))),
        "taus": measure_taus(judge, together, range(len(ids))),
    }


def _drawn(model: Path, texts: list[str], request: Request) -> Tensor:
    """Tokens [M, T] of a picture of each of ``texts``, drawn in the dtype that is fastest here."""
    pipe = TransformersImagePipeline.from_pretrained(model, device="cpu")
    key = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
    size = "x".join(map(str, request.size))
    name = f"{pipe.owner.fingerprint}-{key}-{request.cfg}-{size}-{request.seed}"
    kept = writable(request.out / "drawn" / name)
    options = dict(cfg=request.cfg, height=request.size[0], width=request.size[1])
    return draw_all(pipe, texts, kept, request.seed, **options)


@torch.no_grad()
def _encoded(
    pipe: TransformersImagePipeline, folder: Path, layout: Layout
) -> tuple[Tensor, list[str]]:
    """Tokens [M, T] of the pictures in ``folder``, and their texts."""
    if pipe.facts.encode is None:
        raise ValueError(f"{pipe.name} makes no tokens of pictures: leave data out, give prompts")
    size, encode = pipe.facts.encode(pipe.transformer, layout)
    images, texts = captioned(folder, size)
    parts = torch.from_numpy(images).split(AT_ONCE)
    return torch.cat([encode(to_float(part)) for part in parts]), texts


def _begun(pipe: TransformersImagePipeline, training: Training, seed: int) -> BlockHead | EagleHead:
    """A head that is to be trained for the model of ``pipe``."""
    network = pipe.transformer.requires_grad_(False)
    owner = pipe.owner
    sizes = training.sizes
    if training.kind == "eagle":
        with seeded(seed):
            return EagleHead(EagleConfig(owner.sizes, sizes["inner"] or None))
    before = None if training.start is None else load_block_for(owner, training.start)
    if before is not None:
        sizes = vars(before.config) | ({"inner": sizes["inner"]} if sizes["inner"] else {})
    with seeded(seed):
        head = BlockHead(BlockConfig(**sizes | {"target": owner.sizes}))
    start_from(head, network.get_decoder().norm.weight)
    if before is not None:
        go_on_from(head, before)
    return head


def _seen(
    pipe: TransformersImagePipeline,
    texts: list[str],
    tokens: Tensor,
    layers: tuple[int, ...],
    layout: Layout,
) -> SeenPictures:
    target = pipe.target(cfg=1.0, layout=layout)
    ids = {text: pipe._ids(text, target.layout) for text in set(texts)}
    away = {text: pipe._away(row, None, target.layout) for text, row in ids.items()}
    return SeenPictures(
        target, [ids[text] for text in texts], [away[text] for text in texts], tokens, layers
    )
