"""The accepted path of every row moves after its committed tokens, in all layers at once."""

from specmm.kernels.kv_commit.op import commit as commit
from specmm.kernels.kv_commit.op import kv_commit as kv_commit
