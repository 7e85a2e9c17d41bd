"""The methods by name and their options: one frozen dataclass each.

``specmm methods`` prints them by family, with what each claims.
"""

from __future__ import annotations

from typing import Any, TypeAlias, get_args

from specmm.methods.base import (
    AR,
    Auto,
    Choice,
    Composed,
    Declared,
    Draft,
    Methods,
    Tree,
    TreeName,
    check_rejected_weight,
    filed,
    keyed,
    label,
    plain_option,
)
from specmm.methods.images import GSD, SJD, CoDe, CSpD, Eagle, Lantern, LanternPP, Speculative
from specmm.methods.language import (
    DEER,
    MSD,
    MTP,
    AnswerSJD,
    Assistant,
    Block,
    DiffuSpec,
    Eagle3,
    PromptLookup,
    Recycle,
    SpecDiff,
    Suffix,
    TextDraft,
    Verdict,
    VLMDraft,
)
from specmm.methods.making import by_hand, make

__all__ = [
    "AR",
    "CONTINUOUS",
    "DEER",
    "GENERATE",
    "GSD",
    "IMAGE_TOKENS",
    "MSD",
    "MTP",
    "SCALES",
    "SJD",
    "TEXT",
    "TRANSFORMERS_IMAGES",
    "VQA",
    "AnswerSJD",
    "Assistant",
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
    "Eagle3",
    "GenerateMethod",
    "Lantern",
    "LanternPP",
    "Method",
    "Methods",
    "PromptLookup",
    "Recycle",
    "ScalesMethod",
    "SpecDiff",
    "Speculative",
    "Suffix",
    "TextDraft",
    "TextMethod",
    "TransformersImageMethod",
    "Tree",
    "TreeName",
    "VLMDraft",
    "VQAMethod",
    "Verdict",
    "by_hand",
    "check_rejected_weight",
    "filed",
    "keyed",
    "label",
    "make",
    "plain_option",
    "resolve",
]

Method: TypeAlias = AR | SJD | GSD | Speculative | Eagle | Lantern | LanternPP | Draft | Auto
# of questions and of texts
LanguageMethod: TypeAlias = (
    AR
    | TextDraft
    | Eagle3
    | MTP
    | Assistant
    | Block
    | PromptLookup
    | Suffix
    | Recycle
    | Draft
    | Auto
)
VQAMethod: TypeAlias = AR | VLMDraft | MSD | AnswerSJD | Verdict | LanguageMethod
TextMethod: TypeAlias = AR | DiffuSpec | SpecDiff | DEER | LanguageMethod
GenerateMethod: TypeAlias = AR | VLMDraft | MSD | TextMethod
# models that draw picture tokens, of which none has a trained drafter
TransformersImageMethod: TypeAlias = AR | SJD | GSD | Draft | Auto | PromptLookup
ScalesMethod: TypeAlias = AR | CoDe | Auto
ContinuousMethod: TypeAlias = AR | CSpD

IMAGE_TOKENS = Methods("image tokens", get_args(Method), relaxes=True)
SCALES = Methods("scales", get_args(ScalesMethod))
CONTINUOUS = Methods("continuous tokens", get_args(ContinuousMethod))
TRANSFORMERS_IMAGES = Methods(
    "picture tokens of transformers", get_args(TransformersImageMethod), relaxes=True
)
VQA = Methods("questions about pictures", get_args(VQAMethod))
TEXT = Methods("text", get_args(TextMethod))
GENERATE = Methods("generate of transformers", get_args(GenerateMethod), listed=False)


def resolve(method: str | Method, **options: Any) -> Method:
    """The image-token method of a name, or a method object, with ``options``.

    Raises ``ValueError`` with a suggestion for a name or an option that is not known.
    """
    made: Method = make(IMAGE_TOKENS, method, **options)
    return made
