"""KV commit by Triton and by index operators against one entry at a time.

Shape letters: A arrays, R rows, B rows of lengths, M moves, S slots, H heads, D head width.
"""

import pytest
import torch

from specmm.kernels.kv_commit import commit, kv_commit, naive

PATHS = [[0, 1, 3, -1], [0, 2, 4, 5], [0, -1, -1, -1]]


def arguments(device, heads, width, layout="slots first", behind=False, dtype=torch.float16):
    """A cache of two branches and its paths; ``behind``: the trees lie right after the longest row,
    so that what is moved overlaps with where it goes.
    """
    shape = (4, 6, 21, heads, width) if layout == "slots first" else (4, 6, heads, 21, width)
    data = torch.randn(shape, generator=torch.Generator().manual_seed(width)).to(device, dtype)
    data = data if layout == "slots first" else data.transpose(2, 3)
    lengths = torch.tensor([8, 9, 7] if behind else [10, 0, 7], device=device)
    kept = torch.tensor([3, 4, 0], device=device)  # a finished row keeps nothing
    return data, torch.tensor(PATHS, device=device), kept, lengths, 9 if behind else 14


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("heads", "width", "layout"),
    [(3, 24, "slots first"), (2, 63, "heads first"), (9, 257, "slots first")],
)
def test_commit_equals_one_entry_at_a_time(name, behind, heads, width, layout, device, monkeypatch):
    monkeypatch.setenv("SPECMM_KERNELS", name)
    given = arguments(device, heads, width, layout, behind)
    expected = given[0].clone()
    naive.kv_commit(expected, *given[1:])
    assert not torch.equal(expected, given[0])
    commit(*given)
    assert torch.equal(given[0], expected)


def test_only_the_wanted_slots_change(device, on_triton):
    data, path, kept, lengths, first = arguments(device, 2, 32)
    before = data.clone()
    commit(data, path, kept, lengths, first)
    changed = (data != before).flatten(3).any(-1)  # [A, R, S]
    for row in range(6):
        length = int(lengths[row % 3])
        assert changed[:, row].any(0).nonzero()[:, 0].tolist() == list(
            range(length, length + int(kept[row % 3]))
        )


def test_addresses_beyond_32_bits(device, on_triton):
    far = 2**31 + 64
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 3 * far:
        pytest.skip("needs 7 GB of GPU memory")
    # only the touched pages exist
    memory = torch.empty(far + 2**29, dtype=torch.uint8, device=device)
    data = memory.as_strided((2, 2, 8, 2, 16), (far, 2**28, 1024, 64, 1))
    data.copy_(torch.randint(256, (2, 2, 8, 2, 16), dtype=torch.uint8))
    given = [torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 1]), torch.tensor([1, 3])]
    expected = data.clone()
    naive.kv_commit(expected, *given, 5)
    commit(data, *(x.to(device) for x in given), 5)
    assert torch.equal(data, expected)


def test_no_graph_break(device, on_triton):
    given = arguments(device, 2, 32)
    expected = given[0].clone()
    naive.kv_commit(expected, *given[1:])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def round_end(data, path, kept, lengths):
        kv_commit(data, path, kept, lengths, 14)
        return lengths + kept

    lengths = round_end(*given[:4])
    assert torch.equal(given[0], expected) and torch.equal(lengths, given[3] + given[2])
    torch.library.opcheck(kv_commit, given, test_utils=("test_schema", "test_faketensor"))


def test_mistakes_are_one_line(device):
    data, path, kept, lengths, first = arguments(device, 2, 8)
    with pytest.raises(ValueError, match="R a multiple of the 3 paths"):
        kv_commit(data[:, :5], path, kept, lengths, first)
    with pytest.raises(ValueError, match=r"kept and lengths must be \[B\]"):
        kv_commit(data, path, kept[:2], lengths, first)
