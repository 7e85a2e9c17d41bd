"""Block drafters of one LlamaGen side by side: overlap with the target by level, and cost.

``python -m benchmarks.block_overlap FOLDER…`` measures the drafter of ``pocket/llamagen`` and those
in the folders, on pictures that the target draws anew; writes ``block_overlap.csv``. The overlap Σ
min(p, q) is how likely a draft is kept where all before it were. Proposals are timed interleaved,
on what one round of a picture gives. Shape letters: M pictures, T tokens, K levels.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, Row, environment, generators, load_pipeline, write_results
from specmm.decode import decode
from specmm.drafter import Feedback
from specmm.guidance import Guidance
from specmm.image_ar.tokens.drafters.block import BlockDrafter, BlockHead
from specmm.image_ar.tokens.loading import load_block
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.methods import AR
from specmm.processors import Processor
from specmm.randomness import Uniforms, UniformSource
from specmm.recipes.training.block_drafter import block_loss
from specmm.recipes.training.llamagen_drafters import seen_by
from specmm.tree import DraftTree, TreeShape
from specmm.verify import Recursive

PICTURES = 96
FIRST_SEED = 777_000
AT_ONCE = 16
APART = 4  # places between anchors
REPEATS = 400
TIMED_ROUND = 15


def main(folders: list[str], out: Path = RESULTS) -> int:
    """Measure and write."""
    pipe = load_pipeline("pocket/llamagen", torch.float32)
    heads = {"shipped": pipe.drafters["block"]}
    heads |= {Path(x).name: load_block(Path(x) / "block", pipe.transformer) for x in folders}
    labels = torch.arange(PICTURES) % pipe.transformer.config.num_classes
    tokens = fresh(pipe, labels)
    overlaps = {name: overlap(head, pipe, labels, tokens) for name, head in heads.items()}
    times = milliseconds({name: proposal(head, pipe) for name, head in heads.items()})
    rows = [_row(name, head, overlaps[name], times[name]) for name, head in heads.items()]
    write_results(out, "block_overlap", rows, environment(pictures=PICTURES, repeats=REPEATS))
    return 0


def _row(name: str, head: BlockHead, overlap: Tensor, times: list[float]) -> Row:
    low, median, high = statistics.quantiles(times, n=4)
    return {
        "drafter": name,
        "memory": head.config.memory,
        "surroundings": head.config.surroundings,
        "parameters": sum(weight.numel() for weight in head.parameters()),
        **{f"overlap_{level + 1}": float(x) for level, x in enumerate(overlap)},
        "mean_overlap": float(overlap.mean()),
        "draft_ms": median,
        "draft_ms_low": low,
        "draft_ms_high": high,
    }


def fresh(pipe: LlamaGenPipeline, labels: Tensor) -> Tensor:
    """Tokens [M, T] of a picture of each of ``labels`` [M], drawn by plain decoding."""
    given: dict[str, Any] = dict(method=AR(), batch_size=96, output_type="latent")
    seeds = range(FIRST_SEED, FIRST_SEED + len(labels))
    return pipe(classes=labels.tolist(), generator=generators(seeds), **given).tokens


@torch.no_grad()
def overlap(head: BlockHead, pipe: LlamaGenPipeline, labels: Tensor, tokens: Tensor) -> Tensor:
    """Mean overlap by level [K] over anchors of pictures ``tokens`` [M, T] of ``labels`` [M]."""
    target = pipe.transformer
    levels = head.config.levels
    at = torch.arange(0, target.config.block_size - levels, APART)
    found = []
    for classes, pictures in zip(labels.split(AT_ONCE), tokens.split(AT_ONCE), strict=True):
        seen = seen_by(target, classes, pictures, head.config.aux_layers)
        places = at.expand(len(classes), -1)
        temperature = pipe.settings.temperature
        given = (seen, lambda x, _: target.output(x), places, head.rotary, temperature)
        found.append(block_loss(head, *given)[1])
    return torch.stack(found).mean(0)


def proposal(head: BlockHead, pipe: LlamaGenPipeline) -> Callable[[], object]:
    """What drafts a chain after one round of a picture, again and again."""
    processor = Processor(pipe.settings.temperature)
    target = LlamaGenTarget(pipe.transformer, Guidance(), processor)
    drafter = BlockDrafter(head, target, TreeShape.chain(head.config.levels), rejected_weight=0.3)
    propose = drafter.propose
    seen: list[tuple[Feedback, UniformSource, Tensor]] = []

    def noted(feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        seen.append((feedback, uniforms, drafter.cache.lengths.clone()))
        return propose(feedback, uniforms)

    drafter.propose = noted  # type: ignore[method-assign]
    uniforms = Uniforms.from_seeds([0])
    rounds = decode(target, drafter, Recursive(), Prompt(torch.tensor([3])), 144, uniforms)
    for _ in zip(range(TIMED_ROUND), rounds, strict=False):
        pass
    feedback, source, lengths = seen[-1]

    @torch.inference_mode()
    def once() -> object:
        drafter.cache.lengths.copy_(lengths)
        return propose(feedback, source)

    return once


def milliseconds(ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Of each of ``ways``, in turn."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            found[name].append(1e3 * (time.perf_counter() - start))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
