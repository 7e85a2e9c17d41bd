"""The block drafter's network: wider feed-forward layers, and training that goes on from a narrower
one.

Shape letters: R rows, T positions, C width.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specmm.core.decode import decode
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.tree import TreeShape
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockDrafter, BlockHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.loading import load_block, save_drafter, target_fingerprint
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.recipes.drafter import block_loss, go_on_from, seen_by
from specmm.verify import Recursive
from tests.tiny.parts import random_weights

GPT = GPTConfig(
    dim=32, n_layer=2, n_head=2, vocab_size=20, block_size=16, num_classes=3, multiple_of=16
)


def head(inner: int = 0, seed: int = 0) -> BlockHead:
    torch.manual_seed(seed)
    return BlockHead(BlockConfig(3, 2, GPT, (1,), inner)).eval()


def states(drafter: BlockHead) -> torch.Tensor:
    """[R, T, C] of fixed inputs, every position seeing those before it."""
    uniforms = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 32, generator=uniforms)
    bias = torch.full((5, 5), float("-inf")).triu(1)[None, None]
    return drafter.read(drafter(x, torch.arange(5)[None], bias), torch.arange(10).view(2, 5))


@torch.inference_mode()
def test_a_wider_drafter_begins_as_the_one_it_goes_on_from() -> None:
    narrow, wide = head(), head(160, seed=1)
    assert not torch.allclose(states(wide), states(narrow), atol=1e-2)
    go_on_from(wide, narrow)
    torch.testing.assert_close(states(wide), states(narrow))
    with pytest.raises(ValueError, match="got one with 3 levels, 2 layers of 160 units"):
        go_on_from(narrow, wide)
    with pytest.raises(ValueError, match="got one with 4 levels"):
        go_on_from(wide, BlockHead(BlockConfig(4, 2, GPT, (1,))))


@torch.no_grad()
def test_further_levels_ask_as_the_last_one() -> None:
    short, long = head(), BlockHead(BlockConfig(5, 2, GPT, (1,)))
    go_on_from(long, short)
    assert torch.equal(long.slots[:3], short.slots)
    assert torch.equal(long.slots[3:], short.slots[-1].expand(2, -1))


def test_its_new_units_learn() -> None:
    wide = head(160)
    go_on_from(wide, head(seed=1))
    states(wide).square().sum().backward()
    added = wide.layers[0].feed_forward.w2.weight.grad[:, GPT.ffn_dim :]
    assert bool((added != 0).any())


@torch.inference_mode()
def test_the_width_is_kept_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(2)
    target, wide = Transformer(GPT).eval(), head(160)
    save_drafter(wide, tmp_path, fingerprint=target_fingerprint(target))
    assert torch.equal(states(load_block(tmp_path, target)), states(wide))
    facts = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {"inner": 48}))
    with pytest.raises(ValueError, match=r"feed_forward\.w"):
        load_block(tmp_path, target)


CHAIN = TreeShape.chain(3), (0, 1, 2, 3)
TREE = TreeShape.from_parents([-1, 0, 0, 0, 1, 3, 5]), (0, 3, 5, 6)  # and a path of it


@torch.no_grad()
@pytest.mark.parametrize(("shape", "path"), [CHAIN, TREE], ids=["chain", "tree"])
def test_what_is_drafted_is_what_was_learnt(shape: TreeShape, path: tuple[int, ...]) -> None:
    """In every round of a picture: the recorded distribution of each draft that has no earlier
    sibling is that which training compares with the target's, after the same tokens.
    """
    model = random_weights(Transformer(GPT), 4, 0.3)
    target = LlamaGenTarget(model, Guidance(), Processor())
    head = random_weights(BlockHead(BlockConfig(3, 2, GPT, (1,))), 4, 0.3)
    drafter = BlockDrafter(head, target, shape)
    alone = [int(shape.ranks[0, node]) == 0 for node in path[1:]]
    trees = []
    propose = drafter.propose

    def noted(*given: Any) -> Any:
        tree = propose(*given)
        trees.append((int(drafter.cache.lengths) - 1, tree))
        return tree

    drafter.propose = noted
    labels = torch.tensor([2])
    uniforms = Uniforms.from_seeds([1])
    *_, end = decode(target, drafter, Recursive(), Prompt(labels), 16, uniforms)
    logits = torch.randn(1, 16, 20, generator=torch.Generator().manual_seed(5))
    inside = [(root, tree) for root, tree in trees if root + 3 < 16]
    assert any(root >= 4 for root, _ in inside)  # below the first row
    for root, tree in inside:
        drafts = tree.tokens[:, path]
        tokens = torch.cat([end.tokens[:, :root], drafts, end.tokens[:, root + 4 : 16]], dim=1)
        seen = replace(seen_by(model, labels, tokens, (1,)), logits=logits)
        at = torch.tensor([[root]])
        overlap = block_loss(head, seen, model.output, at)
        probs = logits[0, root + 1 : root + 4].softmax(-1)
        wanted = torch.minimum(probs, tree.probs[0, path[1:]]).sum(-1)
        torch.testing.assert_close(overlap[1][alone], wanted[alone])
