"""Drafters of models of transformers that draw pictures: what they must fit."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from specmm.checkpoints import fingerprint
from specmm.guidance import Guidance
from specmm.hf.picture_tokens import PictureModel, PictureTarget
from specmm.image_ar.tokens.loading import Owner
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
