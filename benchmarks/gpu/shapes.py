"""What the kernels are measured on: attention shapes of published models, with random inputs.

Shape letters: R rows, H query heads, K key/value heads, T tree nodes, S committed tokens, D head
width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.core.tree import TreeShape
from specmm.kernels.tree_attention import TreeMask

MODELS = {
    "LLaVA-7B": (32, 32, 128),
    "Qwen2.5-VL-7B": (28, 4, 128),
    "LlamaGen-XL": (20, 20, 64),
}  # H, K, D
LENGTHS = (256, 1024, 4096, 16384, 32768)
NODES = (1, 8, 26, 64)
BATCHES = (1, 16)


@dataclass(frozen=True)
class Shape:
    """One case: a model, ``length`` S, ``nodes`` T, ``rows`` R."""

    model: str
    length: int
    nodes: int
    rows: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """H, K, D."""
        return MODELS[self.model]

    @property
    def bytes(self) -> int:
        """Least bytes moved in bfloat16: keys and values once, queries and outputs once."""
        heads, kv, width = self.sizes
        return (
            2 * self.rows * width * (2 * kv * (self.length + self.nodes) + 2 * heads * self.nodes)
        )


def every_shape(tiny: bool = False) -> Iterator[Shape]:
    """All cases, the short ones first; of ``tiny`` ones a few."""
    lengths, batches, nodes_of = ((32,), (1,), NODES[:2]) if tiny else (LENGTHS, BATCHES, NODES)
    for length, rows, nodes, model in itertools.product(lengths, batches, nodes_of, MODELS):
        yield Shape(model, length, nodes, rows)


@dataclass
class Inputs:
    """Queries [R, H, T, D], keys and values [R, K, S + T, D] as views of a cache, and the mask."""

    q: Tensor
    keys: Tensor
    values: Tensor
    mask: TreeMask
    ancestors: Tensor

    @classmethod
    def random(cls, shape: Shape, device: torch.device, seed: int = 0) -> Inputs:
        """A random tree after ``shape.length`` committed tokens in every row."""
        heads, kv, width = shape.sizes
        generator = torch.Generator(device).manual_seed(seed)
        options = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        q = torch.randn(shape.rows, heads, shape.nodes, width, **options)
        data = torch.randn(
            2, shape.rows, shape.length + shape.nodes, kv, width, **options
        ).transpose(2, 3)
        tree = random_tree(shape.nodes, device, seed)
        lengths = torch.full((shape.rows,), shape.length, device=device)
        return cls(
            q,
            data[0],
            data[1],
            TreeMask(tree.ancestor_words, lengths, shape.length),
            tree.ancestors,
        )

    def dense(self) -> Tensor:
        """The mask [1, 1, T, S + T] bool, made of the tree itself and not of its words."""
        committed = self.ancestors.new_ones(1, self.q.shape[2], self.mask.first)
        return torch.cat([committed, self.ancestors], dim=-1)[:, None]


def random_tree(nodes: int, device: torch.device, seed: int = 0) -> TreeShape:
    """A tree whose parents are drawn among all earlier nodes."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1, *(int(torch.randint(n, (), generator=generator)) for n in range(1, nodes))]
    return TreeShape.from_parents(parents, device)
