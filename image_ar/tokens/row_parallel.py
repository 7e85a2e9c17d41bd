"""ZipAR, row-parallel decoding: a row begins once the one above is ``window`` tokens ahead.

Source: He et al. 2024, arXiv 2412.04062 (with a fixed window). A round feeds the newest token of
every row that has begun and draws the next one of each; nothing is drafted or verified. A row's
first token is predicted by the last place of the row above. If that is not drawn yet, the upper
row's newest token stands in for it, or the token that must end the row; no other node sees its
keys, and they are replaced when the row ends. Every node sees all places fed before it, in raster
order.

So the output is not the target's distribution, and the certificate is ``heuristic``. With a window
of a row or more it is plain decoding. The schedule does not depend on the tokens drawn, so all
pictures of a batch advance together.

Shape letters: B batch, N nodes of a round, P nodes that predict, T tokens of a picture.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmm.core.decode import Progress, begun, check_output
from specmm.core.drawing import DrawingTarget
from specmm.core.randomness import Uniforms, categorical
from specmm.core.stats import Certificate, Clock, Stats


@dataclass(frozen=True)
class Round:
    """The nodes of a round by number: node i feeds the token drawn at ``sources[i]`` as if it were
    at ``places[i]``, the first of which may differ for ``stand_ins``. ``predicts`` are the nodes
    whose prediction is drawn from.
    """

    places: tuple[int, ...]
    sources: tuple[int, ...]
    predicts: tuple[int, ...]

    @property
    def stand_ins(self) -> tuple[bool, ...]:
        """Which nodes only stand in for a token that is not drawn yet."""
        return tuple(p != s for p, s in zip(self.places, self.sources, strict=True))


def rounds(rows: int, line: int, window: int) -> Iterator[Round]:
    """The rounds of a picture of ``rows`` of ``line`` tokens, whose first token is drawn."""
    drawn = [1] + [0] * (rows - 1)  # tokens of each row
    fed = [0] * rows
    while sum(drawn) < rows * line:
        nodes = [node for row in range(rows) for node in _nodes(row, drawn, fed, line, window)]
        places, sources, predicts = zip(*nodes, strict=True)
        yield Round(
            places, sources, tuple(i for i, drawn_from in enumerate(predicts) if drawn_from)
        )
        fed = list(drawn)
        for place, _, drawn_from in nodes:
            drawn[(place + 1) // line % rows] += drawn_from


def _nodes(
    row: int, drawn: list[int], fed: list[int], line: int, window: int
) -> Iterator[tuple[int, int, bool]]:
    """A row's nodes in a round: place, source, and whether the token after it is drawn."""
    newest = row * line + drawn[row] - 1
    next_waits = row + 1 < len(drawn) and not drawn[row + 1]
    if fed[row] < drawn[row]:
        yield newest, newest, drawn[row] < line or next_waits
    if next_waits and window <= drawn[row] < line:
        yield row * line + line - 1, newest, True


@torch.inference_mode()
def decode_rows(
    target: DrawingTarget, prompt: Any, window: int, uniforms: Uniforms, sync: bool = False
) -> Iterator[Progress]:
    """Draw a picture for every row of ``prompt``; yields as
    :func:`specmm.core.decode.decode_plain`.

    A progress has its tokens by place; places not drawn yet are 0. Raises ``ValueError`` for a
    window below 1 and for a picture that is not made of whole rows.
    """
    start = time.perf_counter()
    clock = Clock(sync)
    plan = _planned(target, window)
    with clock("verify"):
        output = target.prefill(prompt, 0)
        check_output(output, target.name)
    progress = begun(categorical(output.probs[:, -1], uniforms.draw(1)[:, 0]), target.length, 0)
    seen = torch.zeros(target.length, dtype=torch.bool, device=target.device)
    forced = _forced(target)
    kept: list[int] = []  # tokens of each round
    for part in plan:
        places, sources = (torch.tensor(x, device=seen.device) for x in (part.places, part.sources))
        tokens = torch.where(forced[places] < 0, progress.tokens[:, sources], forced[places])
        with clock("verify"):
            output = target.step_at(tokens, places, _mask(seen, part, places))
            check_output(output, target.name, len(kept) + 1)
        some = torch.tensor(part.predicts, device=seen.device)
        found = categorical(output.probs[:, some], uniforms.draw(len(some)))
        progress.tokens[:, places[some] + 1] = found
        progress.counts += len(some)
        kept.append(len(some))
        yield progress
    seconds = time.perf_counter() - start
    progress.stats = _stats(kept, len(progress.counts), seconds, clock)
    yield progress


def _planned(target: DrawingTarget, window: int) -> list[Round]:
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if target.length % target.line:
        raise ValueError(
            f"zipar draws pictures of whole rows of {target.line} tokens, got {target.length}; "
            "use sjd or ar"
        )
    return list(rounds(target.length // target.line, target.line, window))


def _forced(target: DrawingTarget) -> Tensor:
    """The only token allowed at each place [T], -1 if there are several."""
    places = torch.arange(target.length, device=target.device)
    if target.allowed is None:
        return torch.full_like(places, -1)
    masks = target.allowed.masks
    only = torch.where(masks.sum(1) == 1, masks.int().argmax(1), -1)  # by mask
    found: Tensor = only[target.allowed.places[places.clamp(max=len(target.allowed.places) - 1)]]
    return found


def _mask(seen: Tensor, part: Round, places: Tensor) -> Tensor:
    """Mask [N, T] of the places each node sees: fed ones up to its own, and itself. Marks real
    nodes as ``seen`` [T].
    """
    real = [place for place, other in zip(part.places, part.stand_ins, strict=True) if not other]
    seen[real] = True
    every = torch.arange(len(seen), device=seen.device)
    return (seen & (every < places[:, None])) | (every == places[:, None])


def _stats(kept: list[int], batch: int, seconds: float, clock: Clock) -> Stats:
    counts = [batch * kept.count(n + 1) for n in range(max(kept, default=0))]
    return Stats(
        tokens=batch * (1 + sum(kept)),
        rounds=batch * len(kept),
        batch_rounds=len(kept),
        seconds=seconds,
        verify_seconds=clock.seconds["verify"],
        kept=counts,
        prefilled=batch,
        kept_by_row=[[kept.count(n + 1) for n in range(len(counts))]] * batch,
    )


def rows_certificate(target: DrawingTarget, window: int) -> Certificate:
    """The certificate of a run with this ``window``."""
    if window >= target.line:
        return Certificate("exact", "plain decoding of the target, row after row", 0.0)
    reason = f"rows begin {window} tokens after those above, and nothing is verified"
    return Certificate("heuristic", reason)
