"""A CUDA graph's stand-in on a processor: operators of a function, run again on the same memory.

As of a graph, Python is not run again, and what waits for a value on the host is refused.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATEN = torch.ops.aten
WAITS = {
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN._unique2.default,
}
BY_INDEX = {ATEN.index.Tensor, ATEN.index_put_.default}
EMPTY = {ATEN.empty.memory_format, ATEN.new_empty.default, ATEN.empty_like.default}


class Tape(TorchDispatchMode):
    """Notes operators while it is on; ``replay`` runs them again."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        masked = function in BY_INDEX and any(x.dtype == torch.bool for x in tensors(args[1]))
        if function in WAITS or masked:
            raise RuntimeError(f"{function} waits for the device")
        out = function(*args, **kwargs)
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        fresh = [x for x in tensors(out) if x.untyped_storage().data_ptr() not in given]
        if function in EMPTY:  # what is in it is nobody's, and others may give it another size
            return out
        if function._schema.is_mutable or fresh:
            self.operators.append((function, args, kwargs, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.operators:
            found = function(*args, **kwargs)
            for there, value in zip(tensors(out), tensors(found), strict=True):
                if there.data_ptr() != value.data_ptr():
                    there.copy_(value)


def tensors(value):
    """Those anywhere in ``value``, but for what is packed for a processor."""
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor) and not x.is_mkldnn]


def record_on_tape(function, pool=None):
    """As :func:`specmm.programs.graphs.record_on_gpu`; the first replay is the recording. Nothing
    of what is computed on the way is freed: a ``pool`` has no part in it.
    """
    tape = Tape()
    with tape:
        function()
    ran = [True]

    def replay():
        if ran:
            ran.clear()
        else:
            record_on_tape.replays += 1
            tape.replay()

    record_on_tape.records += 1
    return replay


record_on_tape.records = record_on_tape.replays = 0
