"""Which rule accepts most at the same node budget, on the real model.

Point-mass trees, sampled trees with every multi-draft rule, and the relaxed rules. Budgets count
drafts without the root. Every rule runs every shape of a budget; the plot takes its best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.arithmetic import level_rates
from benchmarks.common import (
    Budget,
    Row,
    balanced_labels,
    dtype_name,
    environment,
    generators,
    label,
    load_pipeline,
)
from benchmarks.common import write_results as write
from benchmarks.settings import Options
from benchmarks.single import Recorder, single_position
from specmm import methods
from specmm.core.decode import decode
from specmm.core.randomness import Uniforms
from specmm.core.stats import Stats
from specmm.core.tree import TreeShape
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.shape.sequoia import best_tree
from specmm.shape.trees import spine
from specmm.verify import (
    Block,
    GreedyMultiDraft,
    Lantern,
    LanternPP,
    PointMass,
    Recursive,
    Rule,
    Traversal,
)
from specmm.verify import neighbour_table as nearest

BATCH = 16
GUESS = (
    (0.35, 0.15, 0.08, 0.05, 0.04, 0.03),
)  # acceptance by rank where the model's settings hold none
Maker = Callable[[Any, LlamaGenTarget, TreeShape], BlockDrafter]
INDEPENDENT: Maker = partial(BlockDrafter, siblings="independent")
GREEDY: Maker = partial(BlockDrafter, siblings="likeliest and one")


@dataclass(frozen=True)
class Contest:
    """A rule and its drafts; ``method`` names the quality samples of the same distribution."""

    name: str
    drafts: str
    rule: Rule
    make: Maker
    method: str | None = None


@dataclass
class Outcome:
    """What a run over all pictures gave."""

    stats: Stats = field(default_factory=Stats)
    excess: float = 0.0
    measured: float = 0.0


def measure_acceptance(options: Options) -> list[Row]:
    """Run both experiments; writes ``acceptance`` and ``single_position`` as rows come in."""
    torch.set_num_threads(options.threads)
    pipe = load_pipeline(options.model, options.dtype)
    classes = pipe.transformer.config.num_classes
    labels = torch.from_numpy(balanced_labels(torch.arange(classes).numpy(), options.pictures))
    facts = environment(
        model=str(options.model), dtype=dtype_name(pipe), pictures=options.pictures, batch=BATCH
    )
    chain = TreeShape.chain(min(3, pipe.parts.head("block").config.levels))
    recorder = Recorder(
        Recursive(), until=(pipe.transformer.config.block_size - 1) // (chain.depth + 1)
    )
    play(pipe, Contest("recorded", "without", recorder, BlockDrafter), chain, labels)
    table = _table(pipe)
    write(options.out, "single_position", single_position(*recorder.probs(), table), facts)
    rows: list[Row] = []
    budget = Budget(options.minutes)
    runs = list(schedule(pipe, options.budgets, table))
    for contest, nodes, form, shape in tqdm(runs, desc="acceptance", unit="run"):
        if budget.spent:
            break
        start = time.perf_counter()
        outcome = play(pipe, contest, shape, labels)
        row = _row(contest, nodes, form, shape, outcome)
        rows.append(row | {"seconds": time.perf_counter() - start, "pictures": len(labels)})
        write(options.out, "acceptance", rows, facts)
    return rows


def schedule(
    pipe: LlamaGenPipeline, budgets: tuple[int, ...], table: Tensor | None
) -> Iterator[tuple[Contest, int, str, TreeShape]]:
    """(contest, budget, form, shape), smaller budgets first; greedy multi-draft on spines only."""
    levels = pipe.parts.head("block").config.levels
    chain = TreeShape.chain(levels)
    yield (
        Contest("single draft", "sampled", Recursive(), BlockDrafter, "ar"),
        levels,
        "chain",
        chain,
    )
    yield Contest("block", "sampled", Block(), BlockDrafter), levels, "chain", chain
    for budget in budgets:
        for form, shape in shapes(budget, levels, pipe.parts.acceptance):
            for contest in contests(table):
                yield contest, budget, form, shape
        widths = widths_for(budget, levels, 0.7)
        greedy = Contest(
            "greedy multi-draft", "top k - 1 and a sample", GreedyMultiDraft(), GREEDY, "ar"
        )
        yield greedy, budget, "spine", spine(widths)
        yield greedy, budget, "spine below the likeliest", through_rank_one(widths)


def shapes(budget: int, levels: int, acceptance: Any) -> list[tuple[str, TreeShape]]:
    """A spine (top-heavy) and Sequoia's tree of ``budget`` drafts."""
    tree, _ = best_tree(acceptance or GUESS[0], budget + 1, levels)
    return [("spine", spine(widths_for(budget, levels, 0.7))), ("sequoia", tree)]


def through_rank_one(widths: tuple[int, ...]) -> TreeShape:
    """A spine whose chain goes on below the likeliest token: rank 1 where there is one."""
    parents = [-1]
    node = 0
    for width in widths:
        first = len(parents)
        parents += [node] * width
        node = first + (width > 1)
    return TreeShape.from_parents(parents)


def widths_for(budget: int, levels: int, ratio: float) -> tuple[int, ...]:
    """Children by level of a spine of ``budget`` nodes, each ``ratio`` of the last, in ``levels``.

    Every level has at least one; 1 spreads the nodes evenly, less puts more of them on top.
    """
    depth = min(levels, budget)
    share = [ratio**d for d in range(depth)]
    spare = budget - depth
    widths = [1 + int(spare * s / sum(share)) for s in share]
    for d in range(budget - sum(widths)):
        widths[d % depth] += 1
    return tuple(widths)


def contests(table: Tensor | None) -> list[Contest]:
    """Every rule on the drafts it is exact for; relaxed rules on sampled and point-mass trees."""
    exact = [
        Contest("point mass", "top k", PointMass(), _top, "ar"),
        Contest("recursive, without replacement", "sampled", Recursive(), BlockDrafter, "ar"),
        Contest("recursive, with replacement", "independent", Recursive(), INDEPENDENT, "ar"),
        Contest("traversal", "sampled", Traversal(), BlockDrafter, "ar"),
    ]
    return exact + (relaxed(table) if table is not None else [])


def relaxed(table: Tensor) -> list[Contest]:
    """LANTERN (δ) and LANTERN++ (λ) where the codebook has enough neighbours."""
    most = table.shape[1] - 1
    found = []
    for method in (methods.LanternPP(lambda_=2.0, k=10), methods.LanternPP(lambda_=3.0, k=10)):
        rule: Rule = LanternPP(table, min(method.k, most), method.lambda_)
        name = f"lantern++ λ={method.lambda_:g} k={min(method.k, most)}"
        found.append(Contest(name, "sampled", rule, BlockDrafter, label(method)))
    k = min(100, most)
    found += [
        Contest(f"lantern δ=0.1 k={k}", drafts, Lantern(table, k, 0.1), make)
        for drafts, make in (("sampled", BlockDrafter), ("top k", _top))
    ]
    return found


def _top(head: Any, target: LlamaGenTarget, shape: TreeShape) -> BlockDrafter:
    return BlockDrafter(head, target, shape, sampled=False)


def _table(pipe: LlamaGenPipeline) -> Tensor | None:
    codebook = pipe.parts.codebook
    return None if codebook is None else nearest(codebook.float(), min(101, len(codebook) - 1))


def play(pipe: LlamaGenPipeline, contest: Contest, shape: TreeShape, labels: Tensor) -> Outcome:
    """Decode pictures of ``labels`` [N] with the contest's drafter and rule, seeds 0 … N - 1."""
    target = pipe.target()
    outcome = Outcome()
    drafter = contest.make(pipe.parts.head("block"), target, shape)
    for first in range(0, len(labels), BATCH):
        part = labels[first : first + BATCH]
        uniforms = Uniforms(generators(range(first, first + len(part))))
        *_, progress = decode(target, drafter, contest.rule, Prompt(part), target.length, uniforms)
        outcome.stats.add(progress.stats)
        outcome.excess += float(progress.excess)
        outcome.measured += float(progress.measured)
    return outcome


def _row(contest: Contest, nodes: int, form: str, shape: TreeShape, outcome: Outcome) -> Row:
    tv = (
        0.0
        if contest.rule.exact
        else (outcome.excess / outcome.measured if outcome.measured else None)
    )
    rates = level_rates(outcome.stats.kept)
    return {
        "rule": contest.name,
        "drafts": contest.drafts,
        "exact": contest.rule.exact,
        "nodes": nodes,
        "form": form,
        "depth": shape.depth,
        "tau": outcome.stats.tau,
        "tv": tv,
        "method": contest.method,
        **{f"level_{d}": rate for d, rate in enumerate(rates, start=1)},
        "tree": [int(p) for p in shape.parents[0]],
    }
