"""Whether ``specmm doctor`` finds out in which way a drafter is read wrongly.

    python -m benchmarks.doctor my-coder my-llava --data chats.jsonl

Each head beside the models is read wrongly on purpose in twelve or more ways, one at a time; a way
is found if the change that undoes it is named first. Beside it the tokens a round that are forecast
and those that chains by our own decoding have.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.common import RESULTS, Out, Row, environment, merged, write_results
from specmm.core.decode import EndTokens, decode
from specmm.core.tree import TreeShape
from specmm.diffusion_drafters.block_drafters import DrawnTreeDrafter
from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.diffusion_drafters.models.dflash_config import Reach
from specmm.diffusion_drafters.sources import DFlashSource
from specmm.hf.drafters.drafting import KINDS, load_drafter, row_uniforms
from specmm.hf.drafters.eagle3_head import Eagle3Head
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.drafters.mtp import MtpDrafter
from specmm.hf.drafters.mtp_layers import MtpLayers
from specmm.hf.models.target import VLMTarget
from specmm.recipes import doctor, following
from specmm.recipes.following import (
    BlockReading,
    Evidence,
    HeadReading,
    LayerReading,
    Reading,
    evidence,
    final_norm,
    reading_of,
)
from specmm.recipes.misreadings import (
    HALVES,
    HANDED,
    NORMED,
    NORMS,
    PAIRS,
    REVERSED,
    altered,
    changes,
    repaired,
    swapped,
)
from specmm.recipes.settings import load_frozen
from specmm.verify import Recursive


def spoils(reading: Reading, head: Any, seen: Evidence) -> Iterator[tuple[str, Reading]]:
    """Ways of reading ``head`` wrongly, each by the name of the change that undoes it."""
    yield from _of_states(reading, seen)
    if isinstance(reading, BlockReading):
        yield from _of_block(reading)
        return
    if isinstance(reading, LayerReading):
        yield from _of_layers(reading, seen)
        return
    assert isinstance(reading, HeadReading)
    yield "no window", replace(reading, window=16)
    if bool(seen.image.any()) and not reading.network.parts:
        yield "positions with pictures", replace(reading, skips=True)
    found = _of_eagle3 if isinstance(head, Eagle3Head) else _of_msd
    for name, made in found(head, seen):
        yield name, replace(reading, network=made.bound(seen.target))
    if not isinstance(head, Eagle3Head):
        yield "pictures apart", replace(reading, as_text=True)


def _of_states(reading: Reading, seen: Evidence) -> Iterator[tuple[str, Reading]]:
    if layers := reading.layers:
        for by in (1, -1):
            moved = tuple(i + by for i in layers)
            if min(moved) >= 0 and max(moved) < len(seen.layers):
                yield f"layers {-by:+d}", replace(reading, layers=moved)
        yield "layers reversed", replace(reading, layers=layers[::-1])
    if not layers:
        yield "states after the norm", replace(reading, normed=False)
    elif isinstance(final_norm(seen.target), nn.Module):
        yield "states before the norm", replace(reading, normed=True)
    yield "state of the next token", replace(reading, late=1)
    yield "state of the former token", replace(reading, late=-1)
    if reading.ids is not None:
        most = seen.probs.shape[-1] - 1
        yield "ids - 1", replace(reading, ids=(reading.ids + 1).clamp(max=most))


def _of_block(reading: BlockReading) -> Iterator[tuple[str, Reading]]:
    model, sizes = reading.network, reading.network.config.sizes
    if not reading.reaches:
        yield "no window", replace(reading, reaches=(Reach(15),) * len(model.layers))
        causal = (Reach(causal=True),) * len(model.layers)
        yield "blocks that see all of themselves", replace(reading, reaches=causal)
    yield f"blocks of {reading.size}", replace(reading, size=reading.size * 2)
    yield f"mask token {reading.mask}", replace(reading, mask=reading.mask - 1)
    yield f"sample_from_anchor {reading.anchor}".lower(), replace(reading, anchor=True)
    for name, made in _misturned(model, sizes):
        yield name, replace(reading, network=made)
    for inverse in (False, True):
        yield PAIRS[not inverse], replace(reading, network=repaired(model, inverse))


def _of_layers(reading: LayerReading, seen: Evidence) -> Iterator[tuple[str, Reading]]:
    undone = {name: name for name in (REVERSED, HALVES, NORMS)}
    undone |= dict(zip(HANDED, HANDED[::-1], strict=True))
    undone |= dict(zip(NORMED, NORMED[::-1], strict=True))
    for change in changes(reading, seen):
        if change.named in undone:
            yield undone[change.named], change.reading


def _misturned(head: Any, sizes: Any) -> Iterator[tuple[str, Any]]:
    """``head`` with other rotary positions than its own ``sizes`` say."""
    ropes = {
        f"rope_theta {sizes.rope_parameters['rope_theta']:g}": {"rope_theta": 1e6},
        "unscaled positions": {"rope_type": "linear", "factor": 8.0},
    }
    for name, rope in ropes.items():
        other: Any = copy.deepcopy(sizes)
        other.rope_parameters = {**sizes.rope_parameters, **rope}
        made = altered(head, sizes=other)
        made.turns = type(head.turns)(other)
        yield name, made


def _of_eagle3(head: Eagle3Head, seen: Evidence) -> Iterator[tuple[str, Eagle3Head]]:
    config, sizes = head.config, head.config.sizes
    for flag in ("norm_output", "norm_before_residual"):
        value = getattr(config, flag)
        yield f"{flag} {value}".lower(), altered(head, **{flag: not value})
    if config.picture_embeddings and bool(seen.image.any()):
        yield "picture_embeddings true", altered(head, picture_embeddings=False)
    yield from _misturned(head, sizes)
    if not config.own_embeddings:
        made = altered(head, own_embeddings=True)
        count = int(config.sizes.vocab_size)
        table = seen.target.embed(torch.arange(count, device=seen.tokens.device)).roll(7, 0)
        made.embed_tokens = nn.Embedding(*table.shape, _weight=table.clone())
        yield "the target's embeddings", made
    yield from _reordered(head)


def _of_msd(head: Any, seen: Evidence) -> Iterator[tuple[str, Any]]:
    config = head.config
    dim = torch.arange(0, config.head_dim, 2) / config.head_dim
    made = copy.copy(head)
    made.config = replace(config, rope_theta=1e6)
    made.frequencies = 1e6**-dim
    yield f"rope_theta {config.rope_theta:g}", made
    made = copy.copy(head)
    made.frequencies = head.frequencies / 8
    yield "positions over 0.125", made
    yield from _reordered(head)


def _reordered(head: Any) -> Iterator[tuple[str, Any]]:
    """``head`` with parts of its weights in another order."""
    yield HALVES, swapped(head)
    for inverse in (False, True):
        yield PAIRS[not inverse], repaired(head, inverse)


def drafter_of(head: Any, target: VLMTarget, shape: TreeShape) -> Any:
    """What drafts trees of ``shape`` with a ``head`` of any kind."""
    if isinstance(head, DFlash):
        return DrawnTreeDrafter(DFlashSource(head, target), target, shape)
    kind = MtpDrafter if isinstance(head, MtpLayers) else FeatureDrafter
    return kind(head, target, shape)


@torch.inference_mode()
def decoded(head: Any, seen: Evidence, prompt: Any, ends: list[int]) -> float:
    """Tokens a round of greedy chains by our own decoding."""
    config = getattr(head, "config", None)
    depth = min(following.DEPTH, getattr(config, "longest", following.DEPTH))
    drafter = drafter_of(head, seen.target, TreeShape.chain(depth, seen.tokens.device))
    stop, length = EndTokens(ends, seen.tokens.device), prompt.max_new_tokens
    rounds = decode(
        seen.target, drafter, Recursive(), prompt, length, row_uniforms(prompt), stop=stop
    )
    *_, end = rounds
    return float(end.stats.tau)


def main(
    models: list[Path],
    data: Annotated[list[str] | None, typer.Option(help="Chats, for models that see.")] = None,
    questions: int = 12,
    out: Out = RESULTS,
) -> None:
    """Spoil every head beside the models and write what is found."""
    rows: list[Row] = []
    for folder in models:
        target = load_frozen(folder, "cpu", "float32")
        with TemporaryDirectory() as place:
            chats = data or [] if doctor.sees(folder) else []
            asked = doctor.asked(folder, target, chats, questions, Path(place), 0)
        seen = evidence(target.model, asked.prompt, asked.ends)
        for kind in doctor.METHODS:
            beside = folder / "drafters" / KINDS[kind].place
            if not (beside / "config.json").is_file():
                continue
            head = load_drafter(kind, beside, target.model)
            reading = reading_of(head, seen.target)
            own = doctor.diagnose(seen, reading)
            facts = {"model": folder.name, "head": kind}
            took = decoded(head, seen, asked.prompt, list(asked.ends))
            forecast = {"forecast": round(own.own.tau, 3), "decoded": round(took, 3)}
            best = own.best[0].named if own.best else ""
            rows.append(facts | {"spoilt": "", "named": best} | forecast)
            print(rows[-1])
            for name, wrong in spoils(reading, head, seen):
                found = doctor.diagnose(seen, wrong)
                left = {"forecast": round(found.own.tau, 3), "found": _named(found) == name}
                rows.append(facts | {"spoilt": name, "named": _named(found)} | left)
                print(rows[-1])
    now = environment(questions=questions)
    rows = [row | {key: now[key] for key in ("git", "date")} for row in rows]
    rows = merged(out, "doctor", rows, ("model", "head", "spoilt"))
    write_results(out, "doctor", rows, now)


def _named(found: doctor.Diagnosis) -> str:
    return found.changes[0][0].named


if __name__ == "__main__":
    typer.run(main)
