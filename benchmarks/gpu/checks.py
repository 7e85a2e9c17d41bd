"""Correctness on the device before timing: attention, commit, acceptance, and no host syncs.

Shape letters: R rows, T tree nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.contenders import flex, ours, sdpa
from benchmarks.gpu.shapes import Inputs, Shape, random_tree
from specmm.kernels.acceptance import accept, by_rule
from specmm.kernels.kv_commit import commit, naive
from specmm.kernels.tree_attention import attend

TOLERANCE = 1e-2  # relative error of bfloat16 outputs, in the Frobenius norm


def exact(given: Inputs) -> Tensor:
    """Attention in float64 under the dense mask."""
    group = given.q.shape[1] // given.keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (given.keys, given.values))
    scores = given.q.double() @ keys.transpose(-1, -2) * given.q.shape[-1] ** -0.5
    return scores.masked_fill(~given.dense(), float("-inf")).softmax(-1) @ values


def attention_error(shape: Shape, device: torch.device) -> dict[str, float]:
    """Relative errors of every way to attend ``shape``."""
    given = Inputs.random(shape, device)
    truth = exact(given)
    ways = {"ours": ours, "sdpa": sdpa}
    if shape.nodes == 26 and device.type == "cuda":  # a compilation each
        ways["flex"] = flex
    return {
        name: float((way(given)().double() - truth).norm() / truth.norm())
        for name, way in ways.items()
    }


def check_commit(device: torch.device) -> None:
    """Accepted paths move as one entry at a time would."""
    data = torch.randn(8, 4, 64, 6, 80, device=device).bfloat16()
    path = torch.tensor([[0, 2, 5, -1], [0, 1, 3, 7]], device=device)
    kept = torch.tensor([3, 4], device=device)
    lengths = torch.tensor([17, 40], device=device)
    expected = data.clone()
    naive.kv_commit(expected, path, kept, lengths, 48)
    commit(data, path, kept, lengths, 48)
    if not torch.equal(data, expected):
        raise ValueError("KV commit differs from its reference")


def drafts(rows: int, nodes: int, vocabulary: int, device: torch.device) -> tuple[Tensor, ...]:
    """Target probs, tokens, parents, uniforms and draft probs of random trees."""
    generator = torch.Generator(device).manual_seed(0)
    probs = (
        torch.randn(2, rows, nodes, vocabulary, device=device, generator=generator)
        .mul(2)
        .softmax(-1)
    )
    tokens = probs[1].flatten(0, 1).multinomial(1, generator=generator).view(rows, nodes)
    uniforms = torch.rand(rows, nodes + 1, device=device, generator=generator)
    return probs[0], tokens, random_tree(nodes, device).parents, uniforms, probs[1]


def check_acceptance(device: torch.device, rows: int = 512) -> float:
    """The share of rows with the result of the core's rules: rounding decides a few."""
    probs, tokens, parents, uniforms, drawn = drafts(rows, 26, 4096, device)
    found = accept(probs, tokens, parents, uniforms, 26, drawn)
    expected = by_rule(probs, tokens, parents, uniforms, 26, drawn, None, False)
    same = torch.stack(
        [(a == b).view(len(a), -1).all(1) for a, b in zip(found, expected, strict=True)]
    ).all(0)
    share = float(same.double().mean())
    if share < 0.98:
        raise ValueError(
            f"fused acceptance agrees on {share:.1%} of the rows, expected 98% or more"
        )
    return share


def syncs_in_a_round(device: torch.device) -> int:
    """Host syncs of attention, acceptance and commit in one round; the first round compiles."""
    given = Inputs.random(Shape("LlamaGen-XL", 1024, 26, 2), device)
    probs, tokens, parents, uniforms, drawn = drafts(2, 26, 16384, device)
    data = torch.zeros(8, 2, 1100, 20, 64, device=device, dtype=torch.bfloat16)
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            attend(given.q, given.keys, given.values, given.mask)
            path, kept, _ = accept(probs, tokens, parents, uniforms, 26, drawn)
            commit(data, path, kept, given.mask.lengths, 1050)
        except RuntimeError as error:
            print(error)
            return 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return 0
