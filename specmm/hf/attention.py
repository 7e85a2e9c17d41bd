"""Tree attention for transformers' models where Triton runs.

Shape letters: none.
"""

from __future__ import annotations

import logging
from typing import Any

from specmm.kernels.backend import backend
from specmm.kernels.tree_attention.interface import NAME

LOGGER = logging.getLogger(__name__)


def use_tree_attention(model: Any) -> Any:
    """``model``, whose language model attends to trees by the kernel where Triton runs, without a
    mask.

    Elsewhere, and for models whose attention the kernel does not know (sliding windows, capped
    scores, sinks, or another implementation than transformers' own choice), it stays as it is:
    trees are then scored with dense masks. A vision tower keeps its attention.
    """
    if backend(model.device) != "triton":
        return model
    text = model.config.get_text_config()
    if why := _reason(text):
        LOGGER.warning("%s: trees are scored with dense masks, for %s", type(model).__name__, why)
        return model
    parts = [n for n in model.config.sub_configs if getattr(model.config, n, None) is text]
    model.set_attn_implementation({part: NAME for part in parts} if parts else NAME)
    return model


def _reason(text: Any) -> str:
    """Why the kernel cannot stand in for the attention of a model with the config ``text``."""
    if text._attn_implementation != "sdpa":
        return f"its attention is {text._attn_implementation}"
    if getattr(text, "attn_logit_softcapping", None):
        return "its attention scores are capped"
    sliding = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if sliding or (
        getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    ):
        return "it has layers that see a window"
    return ""
