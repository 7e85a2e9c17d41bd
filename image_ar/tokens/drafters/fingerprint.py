"""Which target a drafter was trained for, as a short hash of the target's weights."""

from __future__ import annotations

from specmm.checkpoints import fingerprint
from specmm.image_ar.tokens.gpt import Transformer


def target_fingerprint(model: Transformer) -> str:
    """Twelve hexadecimal digits of the head and of the first and last layer."""
    weights, last = model.state_dict(), model.config.n_layer - 1
    names = (
        "output.weight",
        "layers.0.attention.wo.weight",
        f"layers.{last}.feed_forward.w2.weight",
    )
    return fingerprint(*(weights[name] for name in names))
