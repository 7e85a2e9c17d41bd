"""The k-th largest of a row by Triton and by PyTorch against a full sort."""

import pytest
import torch

from specmm.core.processors import Processor
from specmm.kernels.top_k import MOST, kth_largest, naive, serves
from specmm.kernels.top_k.triton import LEAST

CASES = [(width, "normal") for width in (1, 2, 1024, 1500)]
CASES += [(100, kind) for kind in ("ties", "excluded", "wide")]


def rows(width, device, kind="normal"):
    """[2, 3, V] of a ``kind``."""
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(width))
    if kind == "ties":
        x = x.round()
    if kind == "excluded":
        x = x.masked_fill(x < 0.5, float("-inf"))
    if kind == "wide":
        x = x.sign() * x.abs().pow(30)
    return x.to(device)


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize(("width", "kind"), CASES)
def test_equals_a_full_sort(name, kind, width, device, monkeypatch):
    monkeypatch.setenv("SPECMM_KERNELS", name)
    x = rows(width, device, kind)
    for k in sorted({1, 2, width // 2, width - 1, width} & set(range(1, width + 1))):
        found = kth_largest(x, k)
        assert found.shape == (2, 3, 1) and torch.equal(found, naive.kth_largest(x, k))


def test_rows_that_are_not_contiguous(device, on_triton):
    x = rows(96, device).transpose(0, 1)[:, :, ::2]
    assert torch.equal(kth_largest(x, 7), naive.kth_largest(x, 7))


def test_nan_is_the_largest(device, on_triton):
    nan = torch.tensor([float("nan")], device=device)
    for one in (nan, nan.view(torch.int32).bitwise_or(LEAST).view(torch.float32)):
        x = torch.cat([one, one.new_tensor([1.0, 2.0])])[None]
        assert kth_largest(x, 1).isnan().all() and kth_largest(x, 2).item() == 2


def test_zeros_of_both_signs_are_one(device, on_triton):
    x = torch.tensor([[-0.0, 0.0, -1.0]], device=device)
    assert [kth_largest(x, k).item() for k in (1, 2, 3)] == [0, 0, -1]


def test_what_the_kernel_does_not_hold_is_pytorchs(device, on_triton):
    assert serves(rows(5, device))
    assert not serves(rows(5, device).double()) and not serves(rows(MOST + 1, device))
    assert kth_largest(rows(5, device).double(), 2).dtype == torch.float64


@pytest.mark.parametrize("k", [0, 6])
def test_k_out_of_range(k, device):
    with pytest.raises(ValueError, match=f"k must be in \\[1, 5\\], the size of a row, got {k}"):
        kth_largest(rows(5, device), k)


def test_the_operator_is_sound(device):
    torch.library.opcheck(torch.ops.specmm.kth_largest, (rows(9, device), 4))


def test_a_filter_takes_it(device, on_triton, monkeypatch):
    """Where numpy does not sort, as on a GPU."""
    monkeypatch.setattr("specmm.core.sorting.by_numpy", lambda x: False)
    logits = rows(300, device, "ties")
    found = Processor(0.7, 40)(logits)
    kept = logits >= naive.kth_largest(logits, 40)
    wanted = (logits / 0.7).masked_fill(~kept, float("-inf")).softmax(-1)
    assert kept.sum() > 6 * 40 and torch.equal(found, wanted)
