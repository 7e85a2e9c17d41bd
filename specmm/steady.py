"""The old name of :mod:`specmm.batch_invariant`, which works for one release."""

import warnings

from specmm.batch_invariant import batch_invariant as steady
from specmm.registry import OldName

__all__ = ["steady"]

warnings.warn(
    "specmm.steady.steady is called specmm.batch_invariant.batch_invariant now",
    OldName,
    stacklevel=2,
)
