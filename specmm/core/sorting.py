"""Selecting and sorting the largest of many numbers, faster than PyTorch's own operators.

Shape letters: R rows of V numbers, C chunks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specmm.kernels import top_k

CHUNKS = (128, 64, 32, 16)
LONG = range(8192, 20_000)  # numbers of a row; longer ones PyTorch splits itself
COLUMN = 32  # numbers
LARGE = 2**13  # numbers of a row from which columns pay


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices of ``x.topk(k)`` [..., k]; the order of ties is arbitrary.

    A GPU searches a row of up to some 20,000 numbers on one multiprocessor; so ``LONG`` rows are
    split into chunks, searched side by side, and then the chunks' results. A CPU searches columns.
    """
    width = x.shape[-1]
    if not x.is_cuda:
        values, places = by_columns(x.reshape(-1, width), k)
        return values.view(*x.shape[:-1], k), places.view(*x.shape[:-1], k)
    chunks = next((c for c in CHUNKS if width % c == 0 and width // c >= k), 1)
    if width not in LONG or chunks == 1:
        values, places = x.topk(k)
        return values, places
    return by_chunks(x, k, chunks)


def likeliest(x: Tensor) -> Tensor:
    """The index [...] of the largest of ``x`` [..., V]; on ties the first.

    NaN counts as the largest. On a CPU numpy is twenty times faster.
    """
    if not by_numpy(x):
        return x.argmax(-1)
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return torch.from_numpy(np.asarray(wide.numpy().argmax(-1)))


def weighed(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The indices of the ``k`` largest of ``logits`` [..., V], and their probabilities [..., k]."""
    values, places = largest(logits, k)
    return places, (values.float() - logits.float().logsumexp(-1, keepdim=True)).exp()


def by_chunks(x: Tensor, k: int, chunks: int) -> tuple[Tensor, Tensor]:
    """:func:`largest` by C = ``chunks`` chunks of V / C numbers, each of at least ``k``."""
    width = x.shape[-1] // chunks
    largest_of_chunks = x.unflatten(-1, (chunks, width)).topk(k)  # [..., C, k]
    values, indices = largest_of_chunks.values.flatten(-2).topk(k)
    places = largest_of_chunks.indices.flatten(-2).gather(-1, indices)
    return values, places + indices // k * width


def by_columns(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """:func:`largest` of rows [R, V], in a seventh of the time for V = 151,936 on a CPU.

    For large V, only the ``k`` columns of ``COLUMN`` numbers with the largest maxima are searched.
    This depends on V and k alone: a row's order of ties must not depend on other rows.
    """
    columns = x.shape[1] // COLUMN
    if x.shape[1] < LARGE or x.shape[1] % COLUMN or 4 * k > columns:
        values, places = x.topk(k)
        return values, places
    groups = x.reshape(len(x), COLUMN, columns)
    chosen = groups.amax(1).topk(k, sorted=False).indices
    values, indices = groups.gather(2, chosen[:, None].expand(-1, COLUMN, -1)).flatten(1).topk(k)
    return values, indices // k * columns + chosen.gather(1, indices % k)


def by_numpy(x: Tensor) -> bool:
    """Whether numpy, which is faster on a CPU, sorts ``x``; compiled programs cannot contain it."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def kth_largest(x: Tensor, k: int) -> Tensor:
    """The ``k``-th largest of ``x`` [..., V], [..., 1]; on a CPU numpy is ten times faster."""
    if not by_numpy(x):
        return top_k.kth_largest(x, k) if top_k.serves(x) else x.topk(k, dim=-1).values[..., -1:]
    index = x.shape[-1] - k
    return torch.from_numpy(np.partition(x.numpy(), index, axis=-1)[..., index : index + 1])


def descending(x: Tensor) -> Tensor:
    """``x`` [..., V], largest first; numpy sorts far faster on a CPU."""
    if not by_numpy(x):
        return x.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
