"""The block drafter's network: wider feed-forward layers, and training that goes on from a narrower
one.

Shape letters: R rows, T positions, C width.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.loading import load_block, save_drafter, target_fingerprint
from specmm.recipes.training.block_drafter import go_on_from

GPT = GPTConfig(
    dim=32, n_layer=2, n_head=2, vocab_size=20, block_size=16, num_classes=3, multiple_of=16
)


def head(inner: int = 0, seed: int = 0) -> BlockHead:
    torch.manual_seed(seed)
    return BlockHead(BlockConfig(3, 2, GPT, (1,), inner)).eval()


def states(drafter: BlockHead) -> torch.Tensor:
    """[R, T, C] of fixed inputs, every position seeing those before it."""
    uniforms = torch.Generator().manual_seed(0)
    x, bias = (
        torch.randn(2, 5, 32, generator=uniforms),
        torch.full((5, 5), float("-inf")).triu(1)[None, None],
    )
    return drafter.read(drafter(x, torch.arange(5)[None], bias), torch.arange(10).view(2, 5))


@torch.inference_mode()
def test_a_wider_drafter_begins_as_the_one_it_goes_on_from() -> None:
    narrow, wide = head(), head(160, seed=1)
    assert not torch.allclose(states(wide), states(narrow), atol=1e-2)
    go_on_from(wide, narrow)
    torch.testing.assert_close(states(wide), states(narrow))
    with pytest.raises(ValueError, match="at most 96 wide, got one with 3 levels"):
        go_on_from(narrow, wide)
    with pytest.raises(ValueError, match="got one with 2 levels"):
        go_on_from(wide, BlockHead(BlockConfig(2, 2, GPT, (1,))))


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
