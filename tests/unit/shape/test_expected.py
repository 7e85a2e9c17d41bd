import pytest
import torch

from specmm.core.tree import TreeShape
from specmm.shape.sequoia import expected_tau, rank_table, reach
from specmm.shape.trees import branching, make_tree

ACCEPT = [0.5, 0.2, 0.1]


def test_chain_is_a_geometric_sum():
    assert expected_tau(TreeShape.chain(3), [0.8]).item() == pytest.approx(1 + 0.8 + 0.64 + 0.512)


def test_root_alone_commits_one_token():
    assert expected_tau(TreeShape.chain(0), [0.8]).item() == 1.0


def test_levels_multiply():
    goes_on = sum(ACCEPT)
    assert expected_tau(branching([3, 3]), ACCEPT).item() == pytest.approx(1 + goes_on + goes_on**2)


def test_equals_a_walk_over_all_outcomes():
    shape = make_tree("mc_sim_7b_63")
    children = {
        n: [c for c in range(shape.size) if shape.parents[0, c] == n] for n in range(shape.size)
    }

    def tau(node):
        return 1 + sum(
            a * tau(c) for a, c in zip([0.5, 0.2, 0.1, 0.05], children[node], strict=False)
        )

    assert expected_tau(shape, [0.5, 0.2, 0.1, 0.05]).item() == pytest.approx(tau(0))


def test_table_by_depth_and_what_it_lacks_counts_zero():
    assert expected_tau(TreeShape.chain(3), [[0.9], [0.5]]).item() == pytest.approx(1 + 0.9 + 0.45)
    assert expected_tau(branching([3]), [0.5]).item() == pytest.approx(1.5)


def test_rows_with_their_own_shapes():
    shape = TreeShape(torch.tensor([[-1, 0, 1, 2], [-1, 0, 0, 0]]), depth=3, width=3)
    torch.testing.assert_close(
        expected_tau(shape, ACCEPT), torch.tensor([1.875, 1.8], dtype=torch.float64)
    )
    assert reach(shape, ACCEPT)[1].tolist() == pytest.approx([1, 0.5, 0.2, 0.1])


@pytest.mark.parametrize("bad", [[0.9, 0.2], [-0.1], [], [float("nan")], [[[0.1]]]])
def test_rejects_what_is_no_sub_distribution(bad):
    with pytest.raises(ValueError, match="rank acceptance must be"):
        rank_table(bad, 2)
