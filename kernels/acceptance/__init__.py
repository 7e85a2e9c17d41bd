"""A round's verdict in one launch: processed laws, LANTERN's neighbours, the walk over siblings, the next token."""

from specmm.kernels.acceptance.op import accept as accept
from specmm.kernels.acceptance.rules import decide_fused as decide_fused
