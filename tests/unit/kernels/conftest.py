"""What the kernels' tests share: the device, the choice of Triton, random trees."""

import pytest
import torch

from specmm.core.tree import TreeShape
from specmm.kernels.backend import VARIABLE


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def on_triton(monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")


@pytest.fixture
def random_shape(device):
    """A function of (rows, nodes, generator): trees whose parents are drawn among all earlier
    nodes.
    """

    def draw(rows, nodes, generator):
        trees = [
            TreeShape.from_parents(
                [-1, *(int(torch.randint(n, (), generator=generator)) for n in range(1, nodes))],
                device,
            )
            for _ in range(rows)
        ]
        parents = torch.cat([tree.parents for tree in trees])
        return TreeShape(parents, max(t.depth for t in trees), max(t.width for t in trees))

    return draw
