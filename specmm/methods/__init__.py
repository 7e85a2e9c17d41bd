"""The methods by name and their options: one frozen dataclass each.

``specmm methods`` prints them by family, with what each claims.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias, get_args

from specmm.methods.base import (
    AR,
    Auto,
    Choice,
    Composed,
    Declared,
    Draft,
    Tree,
    TreeName,
    check_rejected_weight,
    current_option,
    make,
    registry,
)
from specmm.methods.continuous import CSpD
from specmm.methods.language import (
    DEER,
    MSD,
    Block,
    DiffuSpec,
    PromptLookup,
    SpecDiff,
    TextDraft,
    Verdict,
    VLMDraft,
)
from specmm.methods.scales import CoDe, ScaleSpeculative
from specmm.methods.tokens import SJD, Eagle, Lantern, LanternPP, Speculative

__all__ = [
    "AR",
    "CONTINUOUS",
    "DEER",
    "GENERATE",
    "IMAGE_TOKENS",
    "MSD",
    "SCALES",
    "SJD",
    "TEXT",
    "TRANSFORMERS_IMAGES",
    "VQA",
    "Auto",
    "Block",
    "CSpD",
    "Choice",
    "CoDe",
    "Composed",
    "ContinuousMethod",
    "Declared",
    "DiffuSpec",
    "Draft",
    "Eagle",
    "GenerateMethod",
    "Lantern",
    "LanternPP",
    "Method",
    "PromptLookup",
    "ScaleSpeculative",
    "ScalesMethod",
    "SpecDiff",
    "Speculative",
    "TextDraft",
    "TextMethod",
    "TransformersImageMethod",
    "Tree",
    "TreeName",
    "VLMDraft",
    "VQAMethod",
    "Verdict",
    "check_rejected_weight",
    "current_option",
    "make",
    "resolve",
    "resolve_continuous",
    "resolve_scales",
    "resolve_vqa",
]

Method: TypeAlias = AR | SJD | Speculative | Eagle | Lantern | LanternPP | Draft | Auto
VQAMethod: TypeAlias = AR | TextDraft | VLMDraft | MSD | PromptLookup | Verdict | Draft | Auto
TransformersImageMethod: TypeAlias = AR | SJD | PromptLookup  # models that draw picture tokens
ScalesMethod: TypeAlias = AR | CoDe | ScaleSpeculative | Auto
ContinuousMethod: TypeAlias = AR | CSpD
TextMethod: TypeAlias = (
    AR | DiffuSpec | SpecDiff | DEER | Block | TextDraft | PromptLookup | Draft | Auto
)
GenerateMethod: TypeAlias = (
    AR
    | TextDraft
    | VLMDraft
    | MSD
    | PromptLookup
    | DiffuSpec
    | SpecDiff
    | DEER
    | Block
    | Draft
    | Auto
)

IMAGE_TOKENS = registry(get_args(Method))
VQA = registry(get_args(VQAMethod))
TRANSFORMERS_IMAGES = registry(get_args(TransformersImageMethod))
SCALES = registry(get_args(ScalesMethod))
CONTINUOUS = registry(get_args(ContinuousMethod))
TEXT = registry(get_args(TextMethod))
GENERATE = registry(get_args(GenerateMethod))

resolve = partial(make, IMAGE_TOKENS)
resolve_vqa = partial(make, VQA)
resolve_scales = partial(make, SCALES)
resolve_continuous = partial(make, CONTINUOUS)
