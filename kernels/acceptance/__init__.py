"""A round's result in one launch: processed distributions, LANTERN's neighbours, the walk over
siblings, the next token.
"""

from specmm.kernels.acceptance.op import accept as accept
from specmm.kernels.acceptance.rules import decide_fused as decide_fused
