"""The largest of a row, searched in chunks as on a GPU."""

import pytest
import torch

from specmm.core.sorting import by_chunks, largest


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("chunks", [2, 16])
@pytest.mark.parametrize("ties", [False, True])
def test_chunks_give_what_a_whole_row_gives(ties, chunks, k):
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(k))
    x = x.round() if ties else x
    values, places = by_chunks(x, k, chunks)
    assert torch.equal(values, x.topk(k).values)
    assert torch.equal(x.gather(-1, places), values)
    assert all(len(set(row)) == k for row in places.flatten(0, 1).tolist())


def test_on_a_cpu_it_is_topk():
    x = torch.randn(2, 16384, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(largest(x, 5), x.topk(5), strict=True))
