"""Attention of draft trees over a ragged committed prefix: ``attend``, the operator after it and
its mask.
"""

from specmm.kernels.tree_attention.op import Mask as Mask
from specmm.kernels.tree_attention.op import TreeMask as TreeMask
from specmm.kernels.tree_attention.op import attend as attend
from specmm.kernels.tree_attention.op import tree_attention as tree_attention
