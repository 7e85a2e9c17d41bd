"""Tree attention in Triton: a ragged prefix plus the tree's own keys, in one pass over the keys and
values.

A program serves one key/value head of one row, a tile of its queries (all query heads of the group,
packed) and one split of the prefix; the last split also takes the tree. The mask is read as int64
words, 64 ancestors each. Softmax is online, in fp32 and base 2. Splits are merged by a second
kernel, in order.

Shape letters: R rows, B rows of lengths, H query heads, K key/value heads, G = H / K, T tree nodes,
M = G T packed queries, S slots, D head width, W words, C splits.
"""

# Triton's functions take pointers and have no types to speak of
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmm.kernels.tree_attention.masks import TreeMask

WAVES = 2  # programs wanted for each multiprocessor before the prefix is split no further
LEAST_SPLIT = 256  # slots below which a split costs more than it saves
MOST_SPLIT = 8192  # slots of a split: the last ones, if longer, leave most of the GPU idle
AMPLE = 140 * 1024  # bytes of shared memory that hold three stages of the largest tile
SCANT = 64 * 1024  # every GPU has as much
# Sizes that change from call to call are not specialised: each would be compiled again when it is 1
# or a multiple of 16, while only strides gain from that
SIZES = ["first", "batch", "word_rows", "nodes", "splits", "hidden_width"]


@triton.jit
def _scores(q, k, scale, UPCAST: tl.constexpr):
    """Scores [M, N], fp32, of queries [M, D] and keys [N, D]; the interpreter lacks bf16 dots."""
    if UPCAST:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    return tl.dot(q, tl.trans(k), input_precision="ieee") * scale


@triton.jit
def _weigh(s, top, total):
    """Online softmax: weights [M, N] of ``s``, factor for earlier sums, new maximum and total."""
    new = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - safe[:, None])
    past = tl.exp2(top - safe)
    return p, past, new, total * past + tl.sum(p, 1)


@triton.jit
def _blend(acc, p, v, UPCAST: tl.constexpr):
    """``acc`` [M, D] plus the values ``v`` [N, D] weighted by ``p`` [M, N]."""
    if UPCAST:
        return tl.dot(p, v.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def _begin(
    q_ptr, nodes, q_row, q_head, q_node, KV: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """This program's row and key/value head; the nodes, heads and values of its M queries."""
    row = (tl.program_id(0) // KV).to(tl.int64)
    head = (tl.program_id(0) % KV).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    node = (m // GROUP).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    query = head * GROUP + m % GROUP
    at = q_row * row + query * q_head + node * q_node
    mask = (node < nodes)[:, None] & (d < D)[None]
    q = tl.load(q_ptr + at[:, None] + d[None], mask=mask, other=0.0)
    return row, head, node, query, q


@triton.jit
def _finish(acc, top, total, out, lse, at, d, live, D: tl.constexpr):
    """Store normalised rows ``at`` [M] and the logarithm (base 2) of their weight."""
    safe = tl.where(total > 0, total, 1.0)
    mask = live[:, None] & (d < D)[None]
    tl.store(
        out + at[:, None] * D + d[None], (acc / safe[:, None]).to(out.dtype.element_ty), mask=mask
    )
    tl.store(lse + at, tl.where(total > 0, top + tl.log2(safe), float("-inf")), mask=live)


@triton.jit(do_not_specialize=SIZES)
def _attend(
    q_ptr, k_ptr, v_ptr, words_ptr, lengths_ptr, hidden_ptr, out_ptr, lse_ptr,
    scale, first, batch, word_rows, nodes, splits, hidden_width,
    q_row, q_head, q_node, k_row, k_head, k_slot, v_row, v_head, v_slot,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HIDDEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head over one split of the prefix; the last also over the tree."""
    row, head, node, query, q = _begin(
        q_ptr, nodes, q_row, q_head, q_node, KV, GROUP, D, BLOCK_M, BLOCK_D
    )
    split = tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    live = node < nodes
    wide = d < D
    k_base = k_ptr + row * k_row + head * k_head
    v_base = v_ptr + row * v_row + head * v_head
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    length = tl.load(lengths_ptr + row % batch).to(tl.int32)
    part = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    for start in range(split * part, tl.minimum(length, (split + 1) * part), BLOCK_N):
        slot = start + column
        visible = slot < length
        if HIDDEN:
            known = visible & (slot < hidden_width)
            shut = tl.load(hidden_ptr + row * hidden_width + slot, mask=known, other=0)
            visible = visible & (shut == 0)
        slot = slot.to(tl.int64)
        mask = visible[:, None] & wide[None]
        k = tl.load(k_base + slot[:, None] * k_slot + d[None], mask=mask, other=0.0)
        v = tl.load(v_base + slot[:, None] * v_slot + d[None], mask=mask, other=0.0)
        s = tl.where(visible[None], _scores(q, k, scale, UPCAST), float("-inf"))
        p, past, top, total = _weigh(s, top, total)
        acc = _blend(acc * past[:, None], p, v, UPCAST)

    word_at = words_ptr + ((row % word_rows) * nodes + node) * W
    for start in range(0, tl.where(split == splits - 1, nodes, 0), BLOCK_N):
        # a tile never straddles two words
        word = tl.load(word_at + start // 64, mask=live, other=0)
        other = start + column
        visible = ((word[:, None] >> (other % 64)[None].to(tl.int64)) & 1) != 0
        slot = (first + other).to(tl.int64)
        mask = (other < nodes)[:, None] & wide[None]
        k = tl.load(k_base + slot[:, None] * k_slot + d[None], mask=mask, other=0.0)
        v = tl.load(v_base + slot[:, None] * v_slot + d[None], mask=mask, other=0.0)
        s = tl.where(visible, _scores(q, k, scale, UPCAST), float("-inf"))
        p, past, top, total = _weigh(s, top, total)
        acc = _blend(acc * past[:, None], p, v, UPCAST)
    at = ((row * nodes + node) * (KV * GROUP) + query) * splits + split
    _finish(acc, top, total, out_ptr, lse_ptr, at, d, live, D)


@triton.jit(do_not_specialize=["splits"])
def _merge(part_ptr, lse_ptr, out_ptr, splits, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One query's splits, added in order: a split without weight adds exactly nothing."""
    at = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    top = tl.full([], float("-inf"), tl.float32)
    for split in range(0, splits):
        top = tl.maximum(top, tl.load(lse_ptr + at * splits + split))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for split in range(0, splits):
        weight = tl.exp2(tl.load(lse_ptr + at * splits + split) - safe)
        total += weight
        acc += weight * tl.load(part_ptr + (at * splits + split) * D + d, mask=d < D, other=0.0)
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + at * D + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)


def tree_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: TreeMask, scale: float, splits: int = 0
) -> Tensor:
    """Attention [R, T, H, D]; for the arguments see the operator."""
    words, hidden = mask.words, mask.hidden
    rows, heads, nodes, width = q.shape
    kv, slots = keys.shape[1:3]
    group = heads // kv
    tile = _tile(group * nodes, width, q.element_size(), shared_memory(q.device))
    tiles = triton.cdiv(group * nodes, tile["BLOCK_M"])
    splits = splits or _splits(rows * kv * tiles, slots, q.device)
    out = q.new_empty(rows, nodes, heads, width)
    parts = out
    if splits > 1:
        parts = q.new_empty(rows, nodes, heads, splits, width, dtype=torch.float32)
    lse = q.new_empty(rows, nodes, heads, splits, dtype=torch.float32)
    shut = words if hidden is None else hidden.contiguous().view(torch.uint8)
    sizes = (
        *(scale * math.log2(math.e), mask.first, len(mask.lengths), len(words), nodes, splits),
        0 if hidden is None else hidden.shape[1],
        *q.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
    )
    options = dict(
        KV=kv,
        GROUP=group,
        D=width,
        HIDDEN=hidden is not None,
        UPCAST=q.dtype == torch.bfloat16 and q.device.type == "cpu",
        **tile,
    )
    grid = (rows * kv, tiles, splits)
    common = (mask.lengths, shut, parts, lse, *sizes)
    _attend[grid](q, keys, values, words, *common, W=words.shape[-1], **options)
    if splits > 1:
        block_d = tile["BLOCK_D"]
        _merge[(rows * nodes * heads,)](parts, lse, out, splits, D=width, BLOCK_D=block_d)
    return out


def _tile(queries: int, width: int, size: int, shared: int) -> dict[str, int]:
    """A program's tile sizes for ``queries`` of ``width`` numbers of ``size`` bytes, and the number
    of key tiles that it loads ahead.
    """
    block_d = max(16, triton.next_power_of_2(width))
    block_m = _queries(queries, block_d * size, shared)
    # measured on an H200: 32 keys of 128 numbers, but 64 for 32 queries, which take 1.4x with 32
    room = 16384 if block_m == 32 else 8192  # bytes
    return dict(
        BLOCK_M=block_m,
        BLOCK_N=min(64, max(16, room // (block_d * size))),
        BLOCK_D=block_d,
        num_stages=3 if shared >= AMPLE else 2,
    )


def _queries(wanted: int, size: int, shared: int) -> int:
    """Queries of ``size`` bytes in a tile: at most ``wanted``, in half of the shared memory."""
    fits = triton.next_power_of_2(shared // 2 // size + 1) // 2
    return min(64, max(16, fits), max(16, triton.next_power_of_2(wanted)))


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a program may take: 64 KiB on AMD's GPUs, 99 on NVIDIA's for
    consumers, 163 on an A100.
    """
    if device.type != "cuda":
        return AMPLE
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", SCANT))  # ROCm does not say


def _splits(programs: int, slots: int, device: torch.device) -> int:
    """C: enough to fill the GPU, from static sizes only, so that the host need not read lengths."""
    if device.type != "cuda":
        return 1
    enough = triton.cdiv(
        WAVES * torch.cuda.get_device_properties(device).multi_processor_count, programs
    )
    longest = triton.cdiv(slots, MOST_SPLIT)
    return max(1, longest, min(enough, slots // LEAST_SPLIT))
