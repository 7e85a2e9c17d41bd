"""Methods side by side in one process.

Their runs are interleaved, so that other load on the machine affects all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from PIL import Image
from tqdm import tqdm

from specmm import methods
from specmm.choose.threads import settled
from specmm.core.stats import Certificate, Stats, merged_certificate, quartiles, speedup
from specmm.hf.drafters.drafting import KINDS
from specmm.methods import label
from specmm.programs.compiled import NotCompiled
from specmm.runs.run import moving, place_of

if TYPE_CHECKING:
    from specmm.hf.answers.running import Pipeline
    from specmm.runs.run import Images

T = TypeVar("T")
Classes = Sequence[str | int]
Call = Callable[[Any, Any, int], Any]
"""What a pipeline gives for a method, a round's inputs and a seed."""


@dataclass
class Lane:
    """One method and its runs' results: the seconds and tokens of each, the stats of all, pictures
    with their records, and whether all of them were ``compiled``.
    """

    method: Any
    compiled: bool = True
    refused: str | None = None  # why it was not compiled, if that was asked for
    stats: Stats = field(default_factory=Stats)
    seconds: list[float] = field(default_factory=list)
    certificates: list[tuple[Certificate, int]] = field(default_factory=list)
    images: list[Image.Image] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)

    @property
    def each(self) -> list[float]:
        """Seconds a token of each run: texts of one prompt may have different lengths."""
        counts = [sum(row.numel() for row in tokens) for tokens in self.tokens]
        return [s / count for s, count in zip(self.seconds, counts, strict=True)]


class Quickest:
    """Calls ``call`` with ``compiled=True``, except for methods that refuse it; ``refused`` holds
    the reasons by label.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.refused: dict[str, str] = {}

    def __call__(self, method: Any, asked: Any, seed: int) -> Any:
        if label(method) not in self.refused:
            try:
                return self.call(method, asked, seed, compiled=True)
            except NotCompiled as error:
                self.refused[label(method)] = str(error)
        return self.call(method, asked, seed, compiled=False)


def race(
    pipe: Images,
    contenders: Sequence[methods.Method],
    rounds: Sequence[Classes],
    seed: int,
    compiled: bool = False,
    made: Callable[[Lane], None] | None = None,
    **wanted: Any,
) -> list[Lane]:
    """Every method draws every round's classes or prompts with the same seeds, in rotating order,
    ``compiled`` where possible; otherwise the lane says why not. ``made`` is called after each run.

    ``wanted`` says what pictures are like: height and width, where a model draws several sizes.
    """

    def draw(method: Any, classes: Classes, seed: int, compiled: bool = False) -> Any:
        options: dict[str, Any] = dict(wanted, batch_size=len(classes), compiled=compiled)
        with moving(bar, 1 / len(classes)):
            return pipe(**{pipe.takes: list(classes)}, method=method, seed=seed, **options)

    bar = _bar(len(contenders), len(rounds))
    call = Quickest(draw) if compiled else draw
    return raced(call, contenders, rounds, seed, bar, made)


def _bar(contenders: int, rounds: int) -> Any:
    """A progress bar for all runs, warm-up runs included."""
    return tqdm(total=contenders * (rounds + 1), unit="run", disable=None, leave=False)


def raced(
    call: Call | Quickest,
    contenders: Sequence[Any],
    rounds: Sequence[Any],
    seed: int,
    bar: Any = None,
    made: Callable[[Lane], None] | None = None,
) -> list[Lane]:
    """As :func:`race`, with any function ``call``, which may move the ``bar`` within a run.

    Each first runs one round that is not counted, so that caches, plans and memory are ready.
    """
    lanes = [Lane(method) for method in contenders]
    with bar or _bar(len(lanes), len(rounds)) as bar:
        ready = 0
        for lane in lanes:
            call(lane.method, rounds[0], seed)
            ready += 1
            bar.update(ready - bar.n)
        for i, asked in enumerate(rounds):
            for lane in in_turn(lanes, i):
                _once(call, lane, asked, seed + i)
                ready += 1
                bar.update(ready - bar.n)
                if made is not None:
                    made(lane)
    refused = call.refused if isinstance(call, Quickest) else {}
    for lane in lanes:
        lane.refused = refused.get(label(lane.method))
    return lanes


def in_turn(contenders: Sequence[T], i: int) -> list[T]:
    """All ``contenders``, rotated so that round ``i`` begins with another one than round i - 1."""
    first = i % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def _once(call: Call, lane: Lane, asked: Any, seed: int) -> None:
    start = time.perf_counter()
    out = call(lane.method, asked, seed)
    lane.seconds.append(time.perf_counter() - start)
    flags = out.compiled if isinstance(out.compiled, list) else [out.compiled]
    lane.compiled &= all(flags)
    lane.stats.add(out.stats)
    lane.certificates.append((out.certificate, sum(row.numel() for row in out.tokens)))
    lane.images += getattr(out, "images", [])
    lane.records += getattr(out, "records", [])
    lane.tokens.append(out.tokens)


def summary(lane: Lane, plain: Lane, batch: int) -> dict[str, Any]:
    """A lane next to plain decoding; seconds are medians of whole calls, pixels included.

    ``speedup`` compares seconds a token, and ``quartiles`` are of its ratios run by run.
    ``ideal`` is the speed-up of the token loop without host overhead: plain decoding's seconds a
    token times the tokens, over the seconds of their draft and verify forwards.
    """
    stats = lane.stats
    median = statistics.median(lane.seconds)
    baseline = statistics.median(plain.seconds)
    token_seconds = plain.stats.seconds / max(plain.stats.tokens, 1)
    certificate = merged_certificate(lane.certificates)
    assert certificate is not None
    return {
        "method": lane.method.name,
        "label": label(lane.method),
        "batch": batch,
        "runs": len(lane.seconds),
        "compiled": lane.compiled,
        "not_compiled": lane.refused,
        "seconds": median,
        "seconds_per_picture": median / batch,
        "seconds_per_token": statistics.median(lane.each),
        "baseline_seconds": baseline,
        "speedup": speedup(plain.each, lane.each),
        "quartiles": quartiles(plain.each, lane.each),
        "tokens": stats.tokens,
        "rounds": stats.rounds,
        "tau": stats.tau,
        "host_overhead": stats.host_overhead,
        "ideal": stats.tokens * token_seconds / (stats.draft_seconds + stats.verify_seconds),
        "certificate": certificate.as_dict(),
    }


def summaries(
    pipe: Images, lanes: Sequence[Lane], rounds: Sequence[Classes], batch: int
) -> list[dict[str, Any]]:
    """The summary of every lane, the first being plain decoding.

    "quality" holds the mean log-likelihood a token of the pictures under the target, None where
    tokens have none.
    """
    rows = []
    for lane in lanes:
        likelihood = None
        if pipe.log_likelihood is not None:
            pairs = zip(rounds, lane.tokens, strict=True)
            values = [pipe.log_likelihood(list(classes), tokens) for classes, tokens in pairs]
            likelihood = float(torch.cat(values).mean())
        row = summary(lane, lanes[0], batch)
        rows.append({**row, "quality": {"log_likelihood": likelihood}})
    return rows


def measure(
    pipe: Images,
    model: str,
    contenders: Sequence[methods.Method],
    batch: int,
    runs: int,
    seed: int,
    prompts: Sequence[str] = (),
    compiled: bool = False,
    **wanted: Any,
) -> list[dict[str, Any]]:
    """Plain decoding and ``contenders``, ``runs`` batches of classes or ``prompts`` in turn each: a
    row for each method. ``compiled`` and ``wanted`` as for :func:`race`.

    Raises ``ValueError`` for a model that draws from prompts without any, and for prompts of one
    that draws classes.
    """
    if bool(prompts) != (pipe.takes == "prompt"):
        advice = "leave prompts out" if prompts else "give --prompt"
        raise ValueError(f"{model} draws from {pipe.takes}, {advice}")
    for name in wanted.keys() - set(pipe.call_options):
        raise ValueError(f"--{name} does not serve models such as {model}; leave it out")
    asked: Sequence[str | int] = prompts or range(pipe.transformer.config.num_classes)
    rounds = batches(asked, batch, runs)
    with settled(pipe.transformer):
        lanes = race(pipe, with_plain(contenders), rounds, seed, compiled, **wanted)
        facts = facts_of(model, seed, pipe.transformer) | wanted
    return [{**row, **facts} for row in summaries(pipe, lanes, rounds, batch)]


def usual(pipe: Pipeline) -> list[Any]:
    """The methods for which a ``pipe`` of texts or answers has a drafter, and prompt lookup,
    without methods that draft pictures within answers.
    """
    aside = methods.AnswerSJD.name
    drafting = [name for name, kind in KINDS.items() if kind.make and name != aside]
    names = [name for name in drafting if name in pipe.registry and pipe.drafters.has(name)]
    return [methods.make(pipe.registry, name) for name in names]


def with_plain(contenders: Sequence[Any]) -> list[Any]:
    """Plain decoding, then the other ``contenders``."""
    plain = methods.AR()
    return [plain, *(method for method in contenders if method != plain)]


def batches(asked: Sequence[T], batch: int, runs: int) -> list[list[T]]:
    """Batches of ``asked``, which begins again where it ends."""
    return [[asked[(i * batch + j) % len(asked)] for j in range(batch)] for i in range(runs)]


def facts_of(model: str, seed: int, network: torch.nn.Module) -> dict[str, Any]:
    """Facts that all rows of a bench of ``model`` share."""
    return {"model": model, "seed": seed, **place_of(network), "outputs": []}
