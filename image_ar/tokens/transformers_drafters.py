"""Drafters of models of transformers that draw pictures: what they must fit, and their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from specmm.checkpoints import fingerprint, read_json
from specmm.guidance import Guidance
from specmm.hf.picture_tokens import PictureModel, PictureTarget
from specmm.image_ar.tokens.drafters.block import BlockHead
from specmm.image_ar.tokens.loading import DrafterHead, Owner, load_block_for
from specmm.processors import Processor


def owner_of(model: PreTrainedModel, facts: PictureModel) -> Owner:
    """What drafters of ``model`` must fit; to be asked before its weights are packed.

    The fingerprint is of a matrix of the head that scores pictures and of the first and the last
    layer.
    """
    target = PictureTarget(model, facts, Processor(), Guidance())
    layers = target.family.layers
    parts: tuple[Any, ...] = (facts.head(model), layers[0], layers[-1])
    return Owner(target.sizes, fingerprint(*map(_matrix, parts)), model.device, model.dtype)


def _matrix(module: nn.Module) -> Tensor:
    """The last matrix of ``module``, which decides what comes out of it."""
    return [p for p in module.parameters() if p.ndim == 2][-1]


def load_drafters(
    owner: Owner, model: Path, drafter: str | Path | None = None
) -> dict[str, DrafterHead]:
    """The drafters in the folder of a ``model``, or a ``drafter`` in a folder of its own instead.

    Raises ``ValueError`` for a folder that holds none, and for a drafter of another target.
    """
    if drafter is None:
        own = model / "drafters" / "block"
        return {"block": load_block_for(owner, own)} if own.is_dir() else {}
    file = Path(drafter) / "config.json"
    kind = read_json(file).get("model") if file.is_file() else None
    if kind != BlockHead.__name__:
        raise ValueError(
            f"drafter must be a folder with a block drafter for pictures, got {drafter}; "
            "specmm train drafter makes one"
        )
    return {"block": load_block_for(owner, Path(drafter))}
