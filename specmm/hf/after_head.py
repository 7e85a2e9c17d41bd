"""What a model's class does to its logits after the output head: nothing, a scale, a cap, or both.

The config does not tell: the same name divides in one class and multiplies in the next, and a
vision-language class may ignore what its text model heeds. So the model's own forward is asked:
numbers that we know are put beside its head's output, and what becomes of them is read.

Shape letters: B batch, T positions, P known numbers, V vocabulary.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

LARGE = 2.0**60  # where a cap of any size is reached
SMALL = 2.0**-10
KNOWN = (SMALL, LARGE, -LARGE, -300.0, -30.0, -3.0, 0.0, 0.3, 3.0, 30.0, 300.0)  # P
ROUNDINGS = 16  # of a few products and a tanh

_measured: WeakKeyDictionary[Any, AfterHead] = WeakKeyDictionary()


@dataclass(frozen=True)
class AfterHead:
    """Logits times ``scale``, then held within ``cap`` of 0 by a tanh (None: they are not)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """``logits`` [...] of the head as the model's class gives them."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def after_head(model: Any) -> AfterHead:
    """What ``model`` does after its head, by one forward over one token the first time it is asked.

    Raises ``ValueError`` when that is neither a factor nor a cap.
    """
    if model not in _measured:
        forward(model, plain_tokens(model.config, 1)[None])
    return _measured[model]


def forward(model: Any, input_ids: Tensor) -> Tensor:
    """The model's own logits [B, T, V] of ``input_ids`` [B, T]; ``after_head`` is measured, too.

    Raises ``ValueError`` when that is neither a factor nor a cap.
    """
    known = torch.tensor(KNOWN, dtype=torch.float64, device=model.device)
    me, asked = threading.get_ident(), []

    def add_known(_: Any, __: Any, logits: Tensor) -> Tensor | None:
        if threading.get_ident() != me:  # another's forward on the same model
            return None
        asked.append(logits)
        ours = known[None, :, None].expand(len(logits), -1, logits.shape[-1])
        return torch.cat([logits.to(known.dtype), ours], dim=1)

    handle = model.get_output_embeddings().register_forward_hook(add_known)
    try:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    finally:
        handle.remove()
    if len(asked) != 1:
        raise ValueError(f"its head must be run once a forward, it was run {len(asked)} times")
    _measured[model] = _fitted(known, logits[0, -len(KNOWN) :])
    return logits[:, : -len(KNOWN)]


def plain_tokens(config: Any, count: int) -> Tensor:
    """So many ids [count] of the vocabulary, none of them special nor standing for pictures."""
    special = _special(config) | _special(config.get_text_config())
    size = int(config.get_text_config().vocab_size)
    order = (*range(size // 2, size), *range(size // 2))
    plain = list(islice((i for i in order if i not in special), count))
    return torch.tensor((plain * count)[:count])


def _special(config: Any) -> set[int]:
    """The ids that ``config`` names."""
    said = (v for name, v in vars(config).items() if name.endswith(("_token_id", "_token_index")))
    return {i for v in said for i in (v if isinstance(v, list) else [v]) if isinstance(i, int)}


def _fitted(known: Tensor, found: Tensor) -> AfterHead:
    """The factor and the cap that make ``found`` [P, V] of ``known`` [P], all tokens alike."""
    values = found[:, 0].double()
    small, large = float(values[0]), float(values[1])
    rounding = ROUNDINGS * torch.finfo(found.dtype).eps
    cap = large if abs(large) < abs(small) / SMALL * LARGE / 2 else None
    scale = (small if cap is None else cap * float(torch.atanh(values[0] / cap))) / SMALL
    fitted = AfterHead(1.0 if abs(scale - 1) <= rounding else scale, cap)
    wanted = fitted(known).to(found.dtype)[:, None].expand_as(found)
    if not torch.allclose(found, wanted, rtol=rounding, atol=rounding):
        raise ValueError("it does more to its logits after the head than to scale and to cap them")
    return fitted
