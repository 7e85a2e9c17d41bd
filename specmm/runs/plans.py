"""The planners' measurements on this machine, as a record for JSON and as lines for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specmm import methods
from specmm.choose.acceptance import WIDEST, AcceptanceCounter
from specmm.choose.contest import PLAIN, Candidate, Record, clock_of
from specmm.choose.costs import Expected, Plan, measured
from specmm.choose.threads import settled
from specmm.choose.traces import Trace, costs_of
from specmm.core.decode import Progress, decode, decode_plain
from specmm.core.randomness import Uniforms
from specmm.core.tree import TreeShape
from specmm.extending.outside import DraftRequest, make_drafter, of_others
from specmm.hf.drafters.drafting import row_uniforms
from specmm.loading.hardware import dtype_name
from specmm.methods import label
from specmm.methods.making import tree_of
from specmm.runs.run import Kind, Place, open_model, place_of, planning_bar
from specmm.shape.sequoia import best_tree
from specmm.shape.trees import spine, static_tree
from specmm.verify import Recursive

LEVELS = 6  # levels of the spine on which acceptance is measured
SIZES = (2, 3, 4, 6, 8, 12)  # nodes of the trees that are compared, with the root
Planned = tuple[dict[str, Any], list[str]]


def plan_model(
    model: str,
    batch: int,
    cfg: float | None,
    place: Place,
    drafter: str | None = None,
    prompt: str | None = None,
    tv: float | None = None,
    **wanted: Any,
) -> Planned:
    """The plan for ``model`` with ``batch`` pictures at a time of the size ``wanted`` (height,
    width), by its own drafters, a ``drafter`` in a folder, or a registered one by name. With ``tv``
    relaxed methods that deviate by at most that total variation are measured, too.

    Raises ``ValueError`` for a model of continuous tokens, for which there is nothing to plan, and
    for ``tv`` where no relaxed method takes part.
    """
    theirs = drafter is not None and of_others(drafter)
    pipe = open_model("images", model, place, drafter=None if theirs else drafter)
    if pipe.plans is None:
        raise ValueError(
            f"nothing is planned for models of continuous tokens such as {model}; specmm bench "
            "measures their methods"
        )
    if tv is not None and (theirs or pipe.plans == "scales"):
        raise ValueError(f"tv is for models of picture tokens and their own drafters, got {tv}")
    target = pipe.measured({"cfg": cfg}, prompt, **wanted)
    with settled(pipe.transformer):
        if pipe.plans == "scales":
            with planning_bar():
                return _by_n(model, batch, pipe.transformer.dtype, pipe.plan(batch, target))
        with planning_bar():
            if theirs:
                uniforms = Uniforms.from_seeds(range(batch), target.device)
                prompt = target.any_prompt(batch)
                asked = Asked(target, prompt, target.length, uniforms)
                record = _own(drafter, asked)
            else:
                from specmm.image_ar.tokens.choosing import record_of
                from specmm.image_ar.tokens.choosing import settled as chosen_for

                auto = methods.Auto() if tv is None else methods.Auto("bounded", tv)
                chosen_for(auto, target, pipe.parts, batch, share=math.inf)
                record = record_of(target, pipe.parts, batch, auto)
        return _said(model, batch, place_of(pipe.transformer), record)


def plan_language(
    model: str, asked: Sequence[Any], place: Place, drafter: str | None, **options: Any
) -> Planned:
    """Method ``auto``'s choice, after trying all methods, for continuing the texts ``asked`` or
    answering pairs of a picture and a question; or the speeds of a third-party ``drafter``'s trees.
    """
    kind: Kind = "text" if isinstance(asked[0], str) else "questions"
    pipe = open_model(kind, model, place, "auto" if drafter is None else None, drafter)
    arguments = (list(asked),) if kind == "text" else tuple(map(list, zip(*asked, strict=True)))
    with settled(pipe.model), planning_bar():
        facts = place_of(pipe.model)
        if drafter is not None and of_others(drafter):
            target, prompt = pipe.prepared(*arguments, **options)
            length = prompt.max_new_tokens
            text = Asked(target, prompt, length, row_uniforms(prompt))
            return _said(model, len(asked), facts, _own(drafter, text))
        pipe.planned(*arguments, **options)
        [record] = pipe.records.values()
        return _said(model, len(asked), facts, record)


@dataclass(frozen=True)
class Asked:
    """The task on which drafters are tried: ``length`` tokens of ``target`` after ``prompt``."""

    target: Any
    prompt: Any
    length: int
    uniforms: Uniforms


def _own(drafter: object, asked: Asked) -> Record:
    """Measurements of a third-party ``drafter`` with the trees that are best for its acceptance by
    level and rank, which is measured first, on a wide spine.
    """
    target = asked.target
    chains = bool(getattr(getattr(target, "family", None), "chains_only", False))
    sampled = not target.processor.greedy

    def drafter_of(shape: TreeShape) -> Any:
        return make_drafter(drafter, target, DraftRequest(shape, sampled, "distinct"))

    def begin(method: Any) -> Iterator[Progress]:
        if not method.drafts:
            return decode_plain(target, asked.prompt, asked.length, asked.uniforms)
        own = drafter_of(shapes[method])
        return decode(target, own, Recursive(), asked.prompt, asked.length, asked.uniforms)

    levels = min(LEVELS, asked.length // 4)
    shape = spine((1,) * levels if chains else WIDEST[:levels], target.device)
    first = drafter_of(shape)
    if first.max_nodes != shape.size:
        raise ValueError(
            f"drafter {drafter} must draft the tree it is asked for to be planned, got "
            f"{first.max_nodes} nodes for {shape.size}; specmm bench measures it as it is"
        )
    counter = AcceptanceCounter(first, shape)
    for _ in decode(target, counter, Recursive(), asked.prompt, asked.length, asked.uniforms):
        pass
    trees = [best_tree(counter.table(), nodes, levels) for nodes in SIZES]
    shapes = {methods.Draft(drafter, tuple(tree.parents[0].tolist())): tree for tree, _ in trees}
    taus = {tree.size: tau for tree, tau in trees}
    candidates = [
        Candidate(method, taus[tree.size], tree.size, tree.depth) for method, tree in shapes.items()
    ]
    record = Record(candidates, now=clock_of(target.device))
    record.choose(begin, asked.length, asked.length, math.inf)
    return record


def _said(model: str, batch: int, facts: dict[str, Any], record: Record) -> Planned:
    """The measurements of a ``record``, for JSON and for people."""
    choice, reason = label(record.fastest()), record.reason()
    plan: dict[str, Any] = {"model": model, "batch": batch, **facts, "choice": choice}
    plan |= {"reason": reason, "plain_seconds_per_token": record.each(PLAIN.method)}
    lines = [f"{model}, {batch} at a time, {facts['dtype']}, {facts['threads']} threads"]
    costs = measured(record)
    parts = ("step", "host", "draft", "verify")
    plan["costs"] = None if costs is None else {name: getattr(costs, name) for name in parts}
    plan["candidates"] = [_tried(record, one) for one in record.order if one != PLAIN]
    lines.append(f"plain       {1000 * record.each(PLAIN.method):.2f} ms a token")
    lines += [f"candidate   {_about(row)}" for row in plan["candidates"]]
    gain = record.gain(record.fastest())
    return plan, [*lines, f"choice      {choice}, {gain:.2f}x plain decoding"]


def _tried(record: Record, one: Candidate) -> dict[str, Any]:
    """A candidate's measurements, for JSON; values are None if it was not tried."""
    method = one.method
    row = {
        "choice": label(method),
        "forecast": record.forecast(one),
        "left": record.left.get(method, ""),
    }
    if method not in record.samples:
        return row | {"speedup": None, "tau": None, "tv": None}
    tv = record.deviation(method)
    return row | {"speedup": record.gain(method), "tau": record.tau(method), "tv": tv}


def _about(row: dict[str, Any]) -> str:
    """A candidate for people."""
    parts = [row["choice"]]
    if row["speedup"] is not None:
        parts.append(f"{row['speedup']:.2f}x plain decoding, tau {row['tau']:.2f}")
    parts += [f"total variation {row['tv']:.3f} a token"] if row["tv"] else []
    return ", ".join(parts) + (f"; left, since {row['left']}" if row["left"] else "")


def plan_traced(file: Path, costs: Path | None, batch: int | None, trees: Sequence[str]) -> Planned:
    """The tree that should be fastest for the drafter of the trace in ``file`` if rounds of
    ``batch`` rows (None: each size in ``costs``) have these ``costs``; also the tokens a round of
    ``trees``.

    Raises ``ValueError`` for files of another kind, and for a batch that is not in the costs.
    """
    trace = Trace.load(file)
    found: dict[str, Any] = {"trace": str(file), **trace.facts, "plans": []}
    kept = [sum(row) for row in trace.table()]
    found |= {"kept_by_depth": kept, "kept_by_context": trace.by_context(), "trees": {}}
    lines = [f"{file}, {', '.join(f'{name} {value}' for name, value in trace.facts.items())}"]
    lines.append(f"kept by depth  {' '.join(f'{share:.0%}' for share in kept)}")
    contexts = [f"{share:.0%} after at most {most}" for most, share in trace.by_context().items()]
    lines.append(f"first drafts   {', '.join(contexts)} tokens")
    for name in trees:
        tau = trace.tau(static_tree(tree_of(name)))
        found["trees"][name] = tau
        lines.append(f"tree {name}: tau {tau:.2f}")
    if costs is None and not trees:
        raise ValueError("a trace is planned for a machine: give --costs FILE, or --tree")
    known = {} if costs is None else costs_of(costs)
    if batch is not None and costs is not None and batch not in known:
        said = ", ".join(map(str, known))
        raise ValueError(f"batch must be one that {costs} tells of ({said}), got {batch}")
    for rows in known if batch is None else known.keys() & {batch}:
        made, told = _traced(trace.plan(known[rows]))
        found["plans"].append({"batch": rows, **made})
        lines += [f"{rows} at a time:", *(f"  {line}" for line in told)]
    return found, lines


def _by_n(model: str, batch: int, dtype: torch.dtype, made: Any) -> Planned:
    """CoDe by N: predicted seconds and memory, and the N that method code takes."""
    facts = {"model": model, "batch": batch, "dtype": dtype_name(dtype)}
    head = f"{model}, {batch} at a time, {facts['dtype']}; memory without the tokenizer's"
    return {**facts, **made.as_dict()}, [head, *made.lines()]


def _traced(made: Plan) -> tuple[dict[str, Any], list[str]]:
    """The plan of a trace, for JSON and for people."""
    best = made.best
    parents = None if best is None else best.shape.parents[0].tolist()
    found = {
        "parents": parents,
        "tau": 1.0 if best is None else best.tau,
        "speedup": 1.0 if best is None else best.speedup,
        "candidates": [
            {"nodes": shape.size, "depth": shape.depth, "tau": tau, "speedup": speedup}
            for shape, speedup, tau in made.candidates
        ],
    }
    lines = [f"candidate   {_expected(one)}" for one in made.candidates]
    if best is None:
        return found, [*lines, "choice      plain decoding: no tree is expected to gain enough"]
    return found, [*lines, f"choice      {_expected(best)}", f"tree        parents {parents}"]


def _expected(one: Expected) -> str:
    """A tree's expected speed, for people."""
    size = f"{one.shape.size} nodes, depth {one.shape.depth}"
    return f"{size}: tau {one.tau:.2f}, {one.speedup:.2f}x plain decoding expected"
