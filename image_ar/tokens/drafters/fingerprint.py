"""Which target a drafter was trained for, as a short hash of the target's weights."""

from __future__ import annotations

import hashlib

from torch import Tensor

from specmm.image_ar.tokens.gpt import Transformer

SAMPLES = 2048  # weights read of each of three matrices


def target_fingerprint(model: Transformer) -> str:
    """Twelve hexadecimal digits that tell targets apart.

    Only the signs of some weights of the head and of the first and last layer are hashed, so that a copy in another
    dtype is the same target.
    """
    weights, last = model.state_dict(), model.config.n_layer - 1
    names = ("output.weight", "layers.0.attention.wo.weight", f"layers.{last}.feed_forward.w2.weight")
    return hashlib.sha256(b"".join(_signs(weights[name]) for name in names)).hexdigest()[:12]


def _signs(weight: Tensor) -> bytes:
    """The shape of ``weight`` and the signs of at most SAMPLES entries, evenly spaced."""
    flat = weight.detach().flatten()
    signs = (flat[:: -(-len(flat) // SAMPLES)] < 0).cpu().numpy().tobytes()
    return f"{list(weight.shape)}".encode() + signs
