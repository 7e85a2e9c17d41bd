"""Methods side by side in one process.

Their runs are interleaved, so that whatever else the machine does affects all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from PIL import Image
from tqdm import tqdm

from specmm import methods
from specmm.runs.run import label, place_of
from specmm.stats import Certificate, Stats, merged_certificate

if TYPE_CHECKING:
    from specmm.image_ar.shared import ImageOutput
    from specmm.runs.run import Images

T = TypeVar("T")
Classes = Sequence[str | int]


@dataclass
class Lane:
    """One method and what its runs gave: wall seconds of each, summed stats, pictures, tokens."""

    method: methods.Method
    stats: Stats = field(default_factory=Stats)
    seconds: list[float] = field(default_factory=list)
    certificates: list[tuple[Certificate, int]] = field(default_factory=list)
    images: list[Image.Image] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)


def race(
    pipe: Images, contenders: Sequence[methods.Method], rounds: Sequence[Classes], seed: int
) -> list[Lane]:
    """Every method draws every round's classes or prompts with the same seeds, in rotating order.

    Each first draws one batch that is not counted, so that caches, plans and memory are ready.
    """
    lanes = [Lane(method) for method in contenders]
    with tqdm(total=len(lanes) * (len(rounds) + 1), unit="run", disable=None, leave=False) as bar:
        for lane in lanes:
            _draw(pipe, lane.method, rounds[0], seed)
            bar.update()
        for i, classes in enumerate(rounds):
            for lane in in_turn(lanes, i):
                _once(pipe, lane, classes, seed + i)
                bar.update()
    return lanes


def in_turn(contenders: Sequence[T], i: int) -> list[T]:
    """All ``contenders``, rotated so that round ``i`` begins with another one than round i - 1."""
    first = i % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def _once(pipe: Images, lane: Lane, classes: Classes, seed: int) -> None:
    start = time.perf_counter()
    out = _draw(pipe, lane.method, classes, seed)
    lane.seconds.append(time.perf_counter() - start)
    lane.stats.add(out.stats)
    lane.certificates.append((out.certificate, out.tokens.numel()))
    lane.images += out.images
    lane.tokens.append(out.tokens)


def _draw(pipe: Images, method: methods.Method, classes: Classes, seed: int) -> ImageOutput:
    generator = torch.Generator().manual_seed(seed)
    options = dict(generator=generator, method=method, batch_size=len(classes))
    return pipe(**{pipe.takes: list(classes)}, **options)


def summary(lane: Lane, plain: Lane, batch: int) -> dict[str, Any]:
    """A lane next to plain decoding; seconds are medians of whole calls, pixels included.

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
        "seconds": median,
        "seconds_per_picture": median / batch,
        "baseline_seconds": baseline,
        "speedup": baseline / median,
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
) -> list[dict[str, Any]]:
    """Plain decoding and ``contenders``, ``runs`` batches of classes or ``prompts`` in turn each: a
    row for each method.

    Raises ``ValueError`` for a model that draws from prompts without any, and for prompts of one
    that draws classes.
    """
    if bool(prompts) != (pipe.takes == "prompt"):
        advice = "leave prompts out" if prompts else "give --prompt"
        raise ValueError(f"{model} draws from {pipe.takes}, {advice}")
    plain = methods.AR()
    asked: Sequence[str | int] = prompts or range(pipe.transformer.config.num_classes)
    rounds = [[asked[(i * batch + j) % len(asked)] for j in range(batch)] for i in range(runs)]
    lanes = race(pipe, [plain, *(m for m in contenders if m != plain)], rounds, seed)
    facts = {
        "model": model,
        "seed": seed,
        **place_of(pipe.transformer),
        "threads": torch.get_num_threads(),
        "outputs": [],
    }
    return [{**row, **facts} for row in summaries(pipe, lanes, rounds, batch)]
