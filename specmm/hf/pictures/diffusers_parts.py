"""Loads networks from diffusers folders, with an error if weights are missing.

diffusers' own ``from_pretrained`` initialises missing weights at random, or leaves them out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specmm.loading.checkpoints import check_names

ADVICE = "fetch it again, or give output_type='latent' for tokens alone"


def load_part(kind: Any, folder: Path, **options: Any) -> Any:
    """The network in ``folder`` by ``kind``, a class of diffusers; ``options`` go to its
    ``from_pretrained``.

    Raises ``ValueError`` naming weights that are missing, and for files that are missing, damaged
    or of another network.
    """
    try:
        network, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise unreadable(folder, error) from error
    missing = sorted(report["missing_keys"])
    check_names({"missing": missing}, kind.__name__, folder, ADVICE)
    return network


def unreadable(folder: Path, error: Exception) -> ValueError:
    """Our error for diffusers' ``error`` about a ``folder`` that it cannot read."""
    reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
    return ValueError(f"{folder} must hold all parts that make pixels, got: {reason}; {ADVICE}")
