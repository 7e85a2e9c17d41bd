"""Methods side by side in one process: interleaved runs, so that whatever else the machine does
falls on all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specmm import methods
from specmm.runs.method_names import label
from specmm.runs.models import place_of
from specmm.stats import Certificate, merged_certificate

T = TypeVar("T")


@dataclass
class Lane:
    """One method and what its runs gave: wall seconds of each, summed stats, pictures and tokens."""

    method: methods.Method
    stats: Any
    seconds: list[float] = field(default_factory=list)
    certificates: list[tuple[Certificate, int]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)

    @property
    def certificate(self) -> Certificate:
        """That of all runs together."""
        found = merged_certificate(self.certificates)
        assert found is not None
        return found


def race(
    pipe: Any, contenders: Sequence[methods.Method], rounds: Sequence[Sequence[Any]], seed: int
) -> list[Lane]:
    """Every method draws the classes of every round with the same seeds, in turns that rotate.

    Each first draws one batch that is not counted: caches, plans, memory.
    """
    from tqdm import tqdm

    from specmm.stats import Stats

    lanes = [Lane(m, Stats()) for m in contenders]
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
    """All of ``contenders``, round ``i`` beginning with another one than the round before."""
    first = i % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def _once(pipe: Any, lane: Lane, classes: Sequence[Any], seed: int) -> None:
    start = time.perf_counter()
    out = _draw(pipe, lane.method, classes, seed)
    lane.seconds.append(time.perf_counter() - start)
    lane.stats.add(out.stats)
    lane.certificates.append((out.certificate, out.tokens.numel()))
    lane.images += out.images
    lane.tokens.append(out.tokens)


def _draw(pipe: Any, method: methods.Method, classes: Sequence[Any], seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return pipe(classes=list(classes), generator=generator, method=method, batch_size=len(classes))


def likelihood(pipe: Any, lane: Lane, rounds: Sequence[Sequence[Any]]) -> float | None:
    """Mean log-likelihood a token of the lane's pictures under the target; None for tokens that are
    no codes.
    """
    import torch

    if not hasattr(pipe, "log_likelihood"):
        return None
    values = [pipe.log_likelihood(list(c), t) for c, t in zip(rounds, lane.tokens, strict=True)]
    return float(torch.cat(values).mean())


def summary(lane: Lane, plain: Lane, batch: int) -> dict[str, Any]:
    """What a lane says next to plain decoding; seconds are medians of whole calls, pixels included.

    ``ideal`` is the speed-up of the token loop were there no host overhead: plain decoding's
    seconds a token times the tokens, over the seconds of their draft and verify forwards.
    """
    stats, median = lane.stats, statistics.median(lane.seconds)
    baseline = statistics.median(plain.seconds)
    token_seconds = plain.stats.seconds / max(plain.stats.tokens, 1)
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
        "certificate": lane.certificate.as_dict(),
    }


def runnable(pipe: Any, usual: list[Any]) -> list[Any]:
    """Those of the ``usual`` methods that this model has a drafter or a small model for."""
    if hasattr(pipe, "parts"):
        found = [m for m in usual if getattr(m, "drafter", None) in (None, *pipe.parts.drafters)]
        return found or [methods.SJD()]
    return [m for m in usual if not isinstance(m, methods.CoDe) or pipe.small is not None]


def measure(
    pipe: Any, model: str, contenders: Sequence[methods.Method], batch: int, runs: int, seed: int
) -> list[dict[str, Any]]:
    """Plain decoding and ``contenders``, ``runs`` batches of classes each: a row a method."""
    import torch

    if getattr(pipe.transformer.config, "model_type", "c2i") != "c2i":
        raise ValueError("bench draws classes, give a class-conditional model")
    plain, classes = methods.AR(), pipe.transformer.config.num_classes
    rounds = [[(i * batch + j) % classes for j in range(batch)] for i in range(runs)]
    lanes = race(pipe, [plain, *(m for m in contenders if m != plain)], rounds, seed)
    facts = {
        "model": model,
        "seed": seed,
        **place_of(pipe.transformer),
        "threads": torch.get_num_threads(),
        "outputs": [],
    }
    return [
        {
            **summary(lane, lanes[0], batch),
            "quality": {"log_likelihood": likelihood(pipe, lane, rounds)},
            **facts,
        }
        for lane in lanes
    ]
