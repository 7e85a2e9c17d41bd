"""What the planners measure on this machine, as a record for JSON and as lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specmm import methods
from specmm.autotune import WIDEST, AcceptanceCounter, Candidate, Plan, planned
from specmm.choose.threads import in_use, settled
from specmm.choose.traces import Trace, costs_of
from specmm.decode import decode
from specmm.hardware import LARGE, choose_dtype
from specmm.hf.drafting import row_uniforms
from specmm.outside import DraftRequest, make_drafter, of_others
from specmm.randomness import Uniforms
from specmm.runs.run import Kind, Place, label, open_model, place_of, planning_bar, tree_of
from specmm.shape.sequoia import best_tree
from specmm.shape.trees import spine, static_tree
from specmm.tree import TreeShape
from specmm.verify import Recursive

if TYPE_CHECKING:
    from specmm.runs.run import Images

LEVELS = 6  # of the spine on which a drafter's acceptance is measured
ROOM = 48  # tokens of text that measuring needs
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
    """What is planned for ``model``, ``batch`` pictures at a time, ``wanted`` so (height, width);
    for a ``drafter`` in a folder, or for one of one's own by name. With ``tv`` relaxed methods that
    are off by at most so much are measured as well.

    Raises ``ValueError`` for a model of continuous tokens, for which there is nothing to plan, and
    for ``tv`` where no relaxed method takes part.
    """
    own = drafter is not None and of_others(drafter)
    pipe = open_model("images", model, place, drafter=None if own else drafter)
    if pipe.plans is None:
        raise ValueError(
            f"nothing is planned for models of continuous tokens such as {model}; specmm bench "
            "measures their methods"
        )
    if tv is not None and (own or pipe.plans == "scales"):
        raise ValueError(f"tv is for models of picture tokens and their own drafters, got {tv}")
    target = pipe.measured({"cfg": cfg}, prompt, **wanted)
    with settled(pipe.transformer):
        if pipe.plans == "scales":
            with planning_bar():
                return _by_n(model, batch, pipe.transformer.dtype, pipe.plan(batch, target))
        if not own:
            auto = methods.Auto() if tv is None else methods.Auto("bounded", tv)
            return _trees(pipe, model, batch, target, auto)
        uniforms = Uniforms.from_seeds(range(batch), target.device)
        asked = Asked(target, target.any_prompt(batch), target.length, uniforms, target.processor)
        return _made(model, batch, place_of(pipe.transformer), *_own(drafter, asked))


def plan_language(
    model: str, asked: Sequence[Any], place: Place, drafter: str | None, **options: Any
) -> Planned:
    """What method ``auto`` measures and takes to continue the texts ``asked``, or to answer pairs
    of a picture and a question; or the plan of a ``drafter`` of one's own.
    """
    kind: Kind = "text" if isinstance(asked[0], str) else "questions"
    pipe = open_model(kind, model, place, "auto" if drafter is None else None, drafter)
    given = (list(asked),) if kind == "text" else tuple(map(list, zip(*asked, strict=True)))
    with settled(pipe.model):
        facts = place_of(pipe.model)
        if drafter is not None and of_others(drafter):
            target, prompt = pipe.prepared(*given, **options)
            text = Asked(target, prompt, ROOM, row_uniforms(prompt), target.processor)
            return _made(model, len(asked), facts, *_own(drafter, text))
        with planning_bar():
            said = pipe.planned(*given, **options)
        made = [(str(key[0]), plan) for key, plan in pipe.plans.items()]
        return _made(model, len(asked), facts, said, made)


@dataclass(frozen=True)
class Asked:
    """What a plan is measured on: ``length`` tokens of ``target`` after ``prompt``."""

    target: Any
    prompt: Any
    length: int
    uniforms: Uniforms
    processor: Any


def _own(drafter: object, asked: Asked) -> tuple[str, list[tuple[str, Plan]]]:
    """The tree of a ``drafter`` of one's own that should be fastest, and its plan.

    Its acceptance by level and rank is measured first, on a wide spine.
    """
    target = asked.target
    chains = bool(getattr(getattr(target, "family", None), "chains_only", False))
    sampled = not asked.processor.greedy

    def drafter_of(shape: TreeShape) -> Any:
        return make_drafter(drafter, target, DraftRequest(shape, sampled, "distinct"))

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
    acceptance = counter.table()
    trees = (best_tree(acceptance, nodes, levels)[0] for nodes in SIZES)
    shapes = list({tree.size: tree for tree in trees}.values())  # what is never kept adds no node
    given = (asked.prompt, asked.uniforms, acceptance)
    with planning_bar():
        made = planned(target, drafter_of, shapes, Recursive(), *given)
    tree = None if made.shape is None else tuple(made.shape.parents[0].tolist())
    chosen = methods.AR() if tree is None else methods.Draft(drafter, tree)
    return f"{label(chosen)} ({made.reason})", [(str(drafter), made)]


def _made(
    model: str, batch: int, facts: dict[str, Any], said: str, made: Sequence[tuple[str, Plan]]
) -> Planned:
    """A record of the plans ``made`` by drafter, and of what is taken, as ``said``."""
    found: dict[str, Any] = {"model": model, "batch": batch, **facts}
    found |= {"choice": said.removeprefix("auto: "), "plans": []}
    lines = [f"{model}, {batch} at a time, {facts['dtype']}, {facts['threads']} threads"]
    for name, one in made:
        found["plans"].append({"of": name, **_record(one)})
        lines += [f"{name}:", *(f"  {line}" for line in _lines(one))]
    return found, [*lines, f"choice  {found['choice']}"]


def plan_published(
    large: int, small: int, resolution: int, batch: int, cfg: float | None, place: Place
) -> Planned:
    """CoDe by N for VARs of two published depths, without weights and without the tokenizer."""
    from specmm.image_ar.scales.sampling import Sampling
    from specmm.image_ar.scales.tuning import plan_of_sizes
    from specmm.image_ar.scales.var import check_published, published

    check_published(large, small, resolution)
    if str(place.device) != "cpu":
        raise ValueError(
            f"published sizes are measured on the CPU, got {place.device}; leave --device out"
        )
    dtype = place.dtype or choose_dtype(LARGE, long=True)
    sampling = Sampling(1.5 if cfg is None else cfg, 900, 0.95)
    pair = published(large, resolution), published(small, resolution)
    title = f"VAR-d{large} and VAR-d{small} at {resolution} px, tokens only"
    with planning_bar():
        made = plan_of_sizes(*pair, batch, sampling, dtype)
    return _by_n(title, batch, dtype, made)


def plan_traced(file: Path, costs: Path | None, batch: int | None, trees: Sequence[str]) -> Planned:
    """The tree that should be fastest for the drafter of the trace in ``file``, where rounds of
    ``batch`` rows (None: each that is there) take what ``costs`` say; the tokens a round of
    ``trees``, too.

    Raises ``ValueError`` for files that are none, and for a batch that the costs do not tell of.
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
        made = trace.plan(known[rows])
        found["plans"].append({"batch": rows, **_record(made)})
        lines += [f"{rows} at a time:", *(f"  {line}" for line in _lines(made))]
    return found, lines


def _by_n(model: str, batch: int, dtype: torch.dtype, made: Any) -> Planned:
    """CoDe by N: predicted seconds and memory, and the N that method code takes."""
    facts = {"model": model, "batch": batch, "dtype": str(dtype).removeprefix("torch.")}
    head = f"{model}, {batch} at a time, {facts['dtype']}; memory without the tokenizer's"
    return {**facts, **made.as_dict()}, [head, *made.lines()]


def _trees(pipe: Images, model: str, batch: int, target: Any, auto: methods.Auto) -> Planned:
    """What method auto measures and takes, and the very seconds that it decided on."""
    from specmm.image_ar.tokens.choosing import method_of, planned_for

    with planning_bar():
        made = planned_for(target, pipe.parts, batch, auto)
    chosen = method_of(made)
    said = chosen.name if made.shape is not None else label(chosen)  # a tree has its own line
    found = {
        "model": model,
        "batch": batch,
        "dtype": str(target.dtype).removeprefix("torch."),
        **in_use().as_dict(),
        "choice": said,
        **_record(made),
    }
    lines = [f"{model}, {batch} at a time, {found['dtype']}, {found['threads']} threads"]
    lines += _lines(made, f"{said}: ")
    return found, lines


def _record(made: Plan) -> dict[str, Any]:
    """A plan for JSON."""
    cost = made.costs
    parts = ("step", "host", "draft", "verify")
    return {
        "costs": None if cost is None else {name: getattr(cost, name) for name in parts},
        "parents": None if made.shape is None else made.shape.parents[0].tolist(),
        "tau": made.expected_tau,
        "speedup": made.expected_speedup,
        "reason": made.reason,
        "candidates": [{**one._asdict(), "choice": _name(one)} for one in made.candidates],
    }


def _lines(made: Plan, chosen: str = "") -> list[str]:
    """A plan for people; ``chosen`` is put before its reason."""
    lines = []
    if made.costs is not None:
        cost = made.costs
        lines += [
            f"plain step  {1000 * cost.step:.2f} ms, host {1000 * cost.host:.2f} ms a round",
            f"draft       {_row(cost.draft, 'levels')}",
            f"verify      {_row(cost.verify, 'nodes')}",
        ]
    lines += [f"candidate   {_about(one)}" for one in made.candidates]
    lines.append(f"choice      {chosen}{made.reason}")
    if made.shape is not None:
        parents = made.shape.parents[0].tolist()
        lines.append(f"tree        parents {parents}, tau {made.expected_tau:.2f} expected")
    return lines


def _name(one: Candidate) -> str:
    """A candidate's tree, or its method."""
    if isinstance(one.choice, TreeShape):
        return f"{one.choice.size} nodes, depth {one.choice.depth}"
    return label(one.choice)


def _about(one: Candidate) -> str:
    """A candidate for people."""
    found = [f"{_name(one)}: {one.speedup:.2f}x plain decoding"]
    found += [] if one.tau is None else [f"tau {one.tau:.2f}"]
    found += [f"total variation {one.tv:.3f} a token"] if one.tv else []
    return ", ".join(found) + (f"; left, since {one.left}" if one.left else "")


def _row(seconds: Any, unit: str) -> str:
    return ", ".join(f"{size} {unit} {1000 * s:.2f} ms" for size, s in sorted(seconds.items()))
