"""Tree attention by Triton and by SDPA against float64, one query at a time.

Shape letters: R rows, B rows of lengths, H query heads, K key/value heads, T nodes, S slots, D head
width.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from specmm.core.tree import TreeShape
from specmm.kernels.tree_attention import (
    RaggedMask,
    TreeMask,
    attend,
    dense,
    interface,
    naive,
    tree_attention,
)
from specmm.kernels.tree_attention.masks import ragged

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Case:
    nodes: int
    slots: int
    lengths: tuple
    heads: int = 2
    kv: int = 2
    width: int = 32
    dtype: torch.dtype = torch.float32
    layout: str = "slots first"
    branches: int = 1
    splits: int = 1
    shared: bool = True
    hidden: bool = False

    def __str__(self):
        extra = (
            [self.layout[:1], f"x{self.splits}"]
            + ["shared"] * self.shared
            + ["hidden"] * self.hidden
        )
        heads, dtype = f"{self.heads}over{self.kv}", str(self.dtype)[6:]
        size = [f"T{self.nodes}", f"S{self.slots}", heads, f"D{self.width}", dtype]
        return "-".join([*size, *extra])


HALF = dict(dtype=torch.bfloat16)
CASES = [
    Case(1, 100, (63,)),
    Case(7, 63, (50, 0), heads=4, kv=2, width=24, branches=2),
    Case(26, 257, (230, 100), heads=6, kv=2, width=48, splits=3, shared=False),
    Case(63, 320, (257,), heads=3, kv=1, width=80, dtype=torch.float16, splits=2),
    Case(100, 200, (63, 100), heads=1, kv=1, width=40, layout="heads first", shared=False),
    Case(257 - 1, 260, (3,), heads=1, kv=1, width=64, dtype=torch.bfloat16),
    Case(9, 300, (257, 290), heads=8, kv=1, width=256, **HALF, layout="heads first", splits=4),
    Case(5, 140, (100, 64), heads=2, kv=2, width=100, dtype=torch.float16, hidden=True, branches=2),
    Case(33, 40, (0, 0), heads=2, kv=2, width=128, dtype=torch.float16, splits=2),
    Case(65, 130, (65, 1), heads=2, kv=1, width=72, shared=False, hidden=True),
    Case(12, 90, (60, 33), heads=2, kv=1, width=16, shared=False, branches=2),
]


def arguments(case, random_shape, device, poison=float("nan")):
    """Arguments of the operator; slots that are nobody's, and everything around the used part, hold
    ``poison``.
    """
    generator = torch.Generator().manual_seed(case.nodes)
    rows, first = len(case.lengths) * case.branches, case.slots - case.nodes
    shape = random_shape(1 if case.shared else len(case.lengths), case.nodes, generator)

    def cache():
        data = torch.full((rows, case.slots, case.kv, case.width), poison)
        for row in range(rows):
            length = case.lengths[row % len(case.lengths)]
            for begin, end in ((0, length), (first, case.slots)):
                data[row, begin:end] = torch.randn(
                    end - begin, case.kv, case.width, generator=generator
                )
        if case.layout == "slots first":
            return data.to(device, case.dtype).transpose(1, 2)
        return data.transpose(1, 2).contiguous().to(device, case.dtype)

    q = torch.randn(rows, case.nodes, case.heads, case.width, generator=generator).to(
        device, case.dtype
    )
    hidden = None
    if case.hidden:
        hidden = torch.rand(rows, first, generator=generator).to(device) < 0.3
    lengths = torch.tensor(case.lengths, device=device)
    words = shape.ancestor_words.contiguous()
    return q.transpose(1, 2), cache(), cache(), words, lengths, first, case.width**-0.5, hidden


def exactly(q, keys, values, words, lengths, first, scale, hidden=None):
    return naive.tree_attention(q, keys, values, TreeMask(words, lengths, first, hidden), scale)


def error(found, exact):
    """Relative error in the Frobenius norm."""
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_float64_whatever_lies_in_unused_memory(
    case, random_shape, device, on_triton, monkeypatch
):
    given = arguments(case, random_shape, device)
    monkeypatch.setattr(torch.Tensor, "new_empty", nan_empty)
    found = tree_attention(*given, splits=case.splits)
    assert found.dtype == case.dtype and found.is_contiguous()
    assert error(found, exactly(*given)) < TOLERANCE[case.dtype]


def nan_empty(self, *size, dtype=None, **options):
    fresh = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
    return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense_equals_float64(case, random_shape, device, monkeypatch):
    monkeypatch.setenv("SPECMM_KERNELS", "torch")
    given = arguments(case, random_shape, device, poison=0.0)
    assert error(tree_attention(*given), exactly(*given)) < TOLERANCE[case.dtype]


def test_the_test_rejects_a_mask_with_one_wrong_bit(random_shape, device, on_triton):
    given = list(arguments(CASES[2], random_shape, device))
    exact = exactly(*given)
    given[3] = given[3].clone()
    given[3][0, 20, 0] ^= 1 << 20  # the node no longer sees itself
    assert error(tree_attention(*given), exact) > 10 * TOLERANCE[torch.float32]


def test_queries_that_see_nothing_give_zeros(device, on_triton, monkeypatch):
    q = torch.randn(1, 1, 2, 16, device=device)
    nothing = torch.zeros(1, 2, 1, dtype=torch.int64, device=device)
    none = torch.zeros(1, dtype=torch.int64, device=device)
    for name in ("triton", "torch"):
        monkeypatch.setenv("SPECMM_KERNELS", name)
        for splits in (1, 2):
            assert not tree_attention(q, q, q, nothing, none, 0, 1.0, splits=splits).any()


@pytest.mark.parametrize("length", [0, 37])
def test_a_chain_is_causal_attention(length, device, on_triton):
    nodes, generator = 30, torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, 2, 2, length + nodes, 32, generator=generator).to(device)
    expected = attend(q, k, v, None, causal=True)[:, :, length:]
    words = TreeShape.chain(nodes - 1, device).ancestor_words
    lengths = torch.tensor([length], device=device)
    found = attend(q[:, :, length:], k, v, TreeMask(words, lengths, length))
    assert error(found, expected.double()) < TOLERANCE[torch.float32]


def test_permuting_siblings_permutes_outputs(device, on_triton):
    shape = TreeShape.from_parents([-1, 0, 0, 0, 1, 2, 3], device)
    # node i of the other tree is order[i] of this one
    order = torch.tensor([0, 3, 1, 2, 6, 4, 5], device=device)
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 1, 2, 27, 24, generator=generator).to(device)
    mask = TreeMask(shape.ancestor_words, torch.tensor([20], device=device), 20)
    moved = [torch.cat([x[:, :, :20], x[:, :, 20:][:, :, order]], dim=2) for x in (k, v)]
    one, other = attend(q[:, :, 20:], k, v, mask), attend(q[:, :, 20:][:, :, order], *moved, mask)
    torch.testing.assert_close(one[:, :, order], other, rtol=1e-5, atol=1e-6)


def test_addresses_beyond_32_bits(device, on_triton):
    """Rows, heads, slots and values 2^31 elements apart; only the touched pages of the memory
    exist.
    """
    far = 2**31 + 64
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 6 * far:
        pytest.skip("needs 13 GB of GPU memory")
    memory = torch.empty(2 * far + 4096, dtype=torch.float16, device=device)
    small = [torch.randn(2, 1, 6, 16, dtype=torch.float16, device=device) for _ in range(2)]
    words, lengths = TreeShape.chain(2, device).ancestor_words, torch.tensor([3], device=device)
    q = torch.randn(2, 1, 3, 16, dtype=torch.float16, device=device)
    expected = tree_attention(q, *small, words, lengths, 3, 1.0)
    for strides in ((far, 16, 16), (1024, 16, far // 5)):
        keys, values = (memory[at:].as_strided((2, 1, 6, 16), (*strides, 1)) for at in (0, 256))
        keys.copy_(small[0])
        values.copy_(small[1])
        assert torch.equal(tree_attention(q, keys, values, words, lengths, 3, 1.0), expected)


def test_no_graph_break(random_shape, device, on_triton):
    case = CASES[1]
    given = arguments(case, random_shape, device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q, keys, values, words, lengths, first):
        return attend(2 * q, keys, values, TreeMask(words, lengths, first)) + 1

    mask = TreeMask(given[3], given[4], given[5])
    torch.testing.assert_close(
        layer(*given[:6]), attend(2 * given[0], given[1], given[2], mask) + 1
    )
    torch.library.opcheck(tree_attention, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(1, 3, 2, 8)}, "keys and values must be"),
        ({3: torch.zeros(1, 2, 2, dtype=torch.int64)}, "words must be"),
        ({5: 9}, r"first in \[0, 8\]"),
        ({7: torch.zeros(1, 3)}, "hidden must be bool"),
        ({1: torch.zeros(1, 2, 10, 16)[..., ::2]}, "last axis"),
        ({0: torch.zeros(1, 2, 2, 300)}, "head width"),
    ],
)
def test_mistakes_are_one_line(change, message):
    given = [torch.zeros(1, 2, 2, 8), *(torch.zeros(1, 2, 10, 8) for _ in range(2))]
    words, starts = torch.ones(1, 2, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    given += [words, starts, 8, 1.0, None]
    for place, value in change.items():
        given[place] = value
    with pytest.raises(ValueError, match=message):
        tree_attention(*given)


def test_dense_masks_follow_the_lengths_of_each_row():
    words = TreeShape.from_parents([-1, 0, 0]).ancestor_words
    hidden = torch.tensor([[True, False], [False, False]])
    mask = dense.dense_mask(TreeMask(words, torch.tensor([2, 0]), 4, hidden), 2, 8)
    wanted = [[0, 1, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0, 1, 0]]
    assert mask[0, 0].int().tolist() == wanted
    found = mask[1, 0].int().tolist()
    assert found == [[0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0, 1, 0]]


@pytest.mark.parametrize(
    ("said", "found"), [({}, 65536), ({"shared_memory_per_block_optin": 101376}, 101376)]
)
def test_shared_memory_is_what_the_gpu_says(said, found, monkeypatch):
    """ROCm's properties say nothing of it."""
    from specmm.kernels.tree_attention.triton import shared_memory

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**said))
    assert shared_memory(torch.device("cuda")) == found


@pytest.mark.parametrize("kv", [1, 4])
@pytest.mark.parametrize("branches", [1, 2])
def test_rows_of_very_different_lengths_are_attended_in_groups(kv, branches):
    """As under the whole mask, and what lies behind a row's own tokens is not even read."""
    generator = torch.Generator().manual_seed(kv)
    lengths = [40, 55, 1900, 60, 2, 300, 1800]
    rows, nodes, first, width = branches * len(lengths), 5, 1920, 64
    bias = torch.full((rows, 1, nodes, first + nodes), float("-inf"))
    for row in range(rows):
        bias[row, ..., : lengths[row % 7]] = 0
    bias[1, ..., :3] = float("-inf")  # padding
    bias[..., first:] = torch.full((nodes, nodes), float("-inf")).triu(1)
    q = torch.randn(rows, 4, nodes, width, generator=generator)
    keys, values = torch.randn(2, rows, kv, first + nodes, width, generator=generator)
    all_heads = (x.repeat_interleave(4 // kv, 1) for x in (keys, values))
    wanted = attend(*(x.double() for x in (q, *all_heads, bias)))
    mask = ragged(bias, lengths, first, 2**12)
    assert isinstance(mask, RaggedMask)
    spans = [group[:3] for group in mask.groups]
    assert spans[:3] == [(0, 2, 55), (2, 3, first), (3, 5, 60)]
    assert [start for start, *_ in spans[1:]] == [stop for _, stop, _ in spans[:-1]]
    for start, stop, slots in spans:
        keys[start:stop, :, slots:first] = values[start:stop, :, slots:first] = float("nan")
    assert (attend(q, keys, values, mask) - wanted).abs().max() < 1e-5
    module = SimpleNamespace(num_key_value_groups=4 // kv)
    out, _ = interface.forward(module, q, keys, values, interface.PLACEHOLDER, tree_mask=mask)
    assert (out.transpose(1, 2) - wanted).abs().max() < 1e-5
    alike = bias[:2, ..., :65].clone()
    assert ragged(alike, [40, 55], 60, 2**12) is alike
