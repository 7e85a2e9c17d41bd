"""Rounding that does not depend on the batch: same values as PyTorch's, same bits for a row alone
and among others.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.programs.batch_invariant import batch_invariant


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 11, 16, 64])
@pytest.mark.parametrize(
    "sizes", [(160, 640), (640, 160), (192, 768), (768, 192), (1280, 320), (16, 128), (192, 1)]
)
def test_rows_of_products(rows: int, sizes: tuple[int, int]) -> None:
    x = normal(64, sizes[0])
    weight = normal(sizes[1], sizes[0], seed=1)
    bias = normal(sizes[1], seed=2)
    with batch_invariant():
        whole, some = F.linear(x, weight, bias), F.linear(x[:rows, None], weight, bias)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    assert some.shape == (rows, 1, sizes[1]) and torch.equal(some[:, 0], whole[:rows])


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("mask", ["none", "causal", "float", "bool", "broadcast"])
def test_attention_of_few_queries(queries: int, mask: str) -> None:
    q, k, v = normal(8, 5, queries, 32), normal(8, 5, 37, 32, seed=1), normal(8, 5, 37, 32, seed=2)
    shut = normal(8, 1, 1 if mask == "broadcast" else queries, 37, seed=3) > 1
    bias = torch.zeros(shut.shape).masked_fill_(shut, -torch.inf)
    given = {"none": None, "causal": None, "float": bias, "bool": ~shut, "broadcast": bias}[mask]
    options = {"is_causal": mask == "causal", "scale": 0.3}
    with batch_invariant():
        whole = F.scaled_dot_product_attention(q, k, v, given, **options)
        own = given if given is None else given[5:6]
        alone = F.scaled_dot_product_attention(*(x[5:6] for x in (q, k, v)), own, **options)
    torch.testing.assert_close(whole, F.scaled_dot_product_attention(q, k, v, given, **options))
    assert torch.equal(alone, whole[5:6])


def test_convolutions_take_pictures_one_by_one() -> None:
    x, weight = normal(5, 16, 12, 12), normal(16, 16, 3, 3, seed=1)
    with batch_invariant():
        whole, one = F.conv2d(x, weight, padding=1), F.conv2d(x[2:3], weight, padding=1)
        single = F.conv2d(x[2], weight, padding=1)
    torch.testing.assert_close(whole, F.conv2d(x, weight, padding=1), atol=1e-4, rtol=1e-3)
    assert torch.equal(one[0], whole[2]) and single.shape == (16, 12, 12)


def test_arguments_may_be_given_by_pytorchs_names() -> None:
    """As diffusers gives those of attention."""
    x, weight, bias = normal(5, 16, 12, 12), normal(16, 12, seed=1), normal(16, seed=2)
    kernel = normal(16, 16, 3, 3, seed=3)
    for function, given in (
        (F.linear, dict(input=x, weight=weight, bias=bias)),
        (F.scaled_dot_product_attention, dict(query=x, key=x, value=x, attn_mask=None)),
        (F.scaled_dot_product_attention, dict(query=x[:, :, :1], key=x, value=x)),
        (F.conv2d, dict(input=x, weight=kernel, bias=bias, padding=1)),
    ):
        plain = function(**given)
        with batch_invariant():
            torch.testing.assert_close(function(**given), plain, atol=1e-4, rtol=1e-3)


def test_other_dtypes_are_left_alone() -> None:
    x, weight = normal(3, 64).bfloat16(), normal(32, 64, seed=1).bfloat16()
    plain = F.linear(x, weight)
    with batch_invariant():
        assert torch.equal(F.linear(x, weight), plain)


def test_threads_do_not_matter() -> None:
    x, weight, kept = normal(40, 1280), normal(320, 1280, seed=1), torch.get_num_threads()
    found = []
    with batch_invariant():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(F.linear(x, weight))
    torch.set_num_threads(kept)
    assert torch.equal(*found)
