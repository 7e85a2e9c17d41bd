"""The largest of a row: in chunks as on a GPU, in columns and by numpy as on a CPU."""

import numpy as np
import pytest
import torch

from specmm.core.sorting import by_chunks, largest, likeliest


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


@pytest.mark.parametrize("width", [100, 8192, 16385])
def test_on_a_cpu_it_is_topk(width):
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(largest(x, 5), x.topk(5), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_likeliest_is_the_first_of_the_largest(dtype):
    x = torch.randint(0, 9, (2, 3, 50), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0, 31] = torch.nan
    found = likeliest(x)
    assert found[0, 0] == 31
    first = np.argmax(x.double().numpy() == x.double().numpy().max(-1, keepdims=True), -1)
    assert found.flatten()[1:].tolist() == first.flatten()[1:].tolist()
    assert likeliest(x[1, 1]) == found[1, 1]  # of no row but one, a tensor too


def test_a_programs_likeliest_is_the_same():
    x = torch.randint(0, 9, (4, 50), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(torch.compile(likeliest, backend="eager", fullgraph=True)(x), likeliest(x))
