"""Ways in which a drafter is commonly taken wrongly, each as the reading that undoes it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from specmm.diffusion_drafters.models.dflash_config import Reach
from specmm.hf.drafters.eagle3 import BoundEagle3
from specmm.hf.drafters.eagle3_head import Eagle3Head, layers_read
from specmm.hf.target import VLMTarget
from specmm.recipes.dflash import layers_read as block_layers
from specmm.recipes.following import BlockReading, Evidence, HeadReading, Reading
from specmm.vlm.msd import MSDHead

WINDOWS = (128, 256, 512, 1024, 2048, 4096)  # tokens that a drafter may have learnt to attend
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # bases of rotary positions
FACTORS = (2.0, 4.0, 8.0, 16.0)  # by which positions may have been interpolated
BLOCKS = (4, 8, 16, 32)  # places of blocks
Fields = dict[str, Any]  # of a reading


@dataclass(frozen=True)
class Change:
    """A way of taking a drafter that is not its own: what it is ``named``, what it would mean
    (``hint``), and the ``reading``.
    """

    named: str
    hint: str
    reading: Reading


def changes(reading: Reading, seen: Evidence) -> Iterator[Change]:
    """All that are tried for the drafter of ``reading``."""
    yield from _of_states(reading, seen)
    yield from _of_vocabulary(reading, seen)
    if isinstance(reading, BlockReading):
        yield from _of_block(reading, seen)
    if isinstance(reading, HeadReading):
        yield from _of_attention(reading, seen)
        head = getattr(reading.network, "head", getattr(reading.network, "run", None))
        if isinstance(head, Eagle3Head):
            yield from _of_eagle3(reading, head, seen.target)
        if isinstance(head, MSDHead):
            yield from _of_msd(reading, head, seen.target)


def _of_states(reading: Reading, seen: Evidence) -> Iterator[Change]:
    """Which states are read, and of which token."""
    layers, most = reading.layers, len(seen.layers)
    named = "the layers that its config names are {}: they count {}"
    for by, said in ((1, "states before layers, or from 1"), (-1, "outputs, or from 0")):
        moved = tuple(i + by for i in layers)
        if layers and min(moved) >= 0 and max(moved) < most:
            where = f"one too {'low' if by > 0 else 'high'}"
            yield Change(
                f"layers {by:+d}", named.format(where, said), replace(reading, layers=moved)
            )
    if len(layers) > 1:
        other = replace(reading, layers=layers[::-1])
        yield Change("layers reversed", "the layers read are named in another order", other)
        block = isinstance(reading, BlockReading) and len(layers) < most
        usual = block_layers(seen.target, len(layers)) if block else layers_read(most)
        if len(usual) == len(layers) and usual != layers:
            hint = f"it reads {'DFlash' if block else 'EAGLE'}'s own {list(usual)}"
            yield Change("usual layers", hint, replace(reading, layers=usual))
    norm = "the states that it learnt from were {} the target's last norm"
    states = {True: "after", False: "before"}
    for normed, where in states.items():
        last = not isinstance(reading, BlockReading) or most - 1 in layers
        own = layers or normed is False or reading.normed is False
        if reading.normed is not normed and own and (normed or last or reading.normed):
            other = replace(reading, normed=normed)
            yield Change(f"states {where} the norm", norm.format(where), other)
    for late in (-1, 1):
        if reading.late + late in (-1, 0, 1):
            where = "next" if late < 0 else "former"
            other = replace(reading, late=reading.late + late)
            yield Change(f"state of the {where} token", "token and state are paired one off", other)


def _of_attention(reading: HeadReading, seen: Evidence) -> Iterator[Change]:
    """What is attended, and at which positions."""
    for window, said, hint in _windows(seen):
        if window != reading.window:
            yield Change(said, hint, replace(reading, window=window))
    if bool(seen.image.any()) and not reading.network.parts:
        where = "with" if reading.skips else "without"
        other = replace(reading, skips=not reading.skips)
        yield Change(f"positions {where} pictures", "it counts its slots otherwise", other)


def _windows(seen: Evidence) -> Iterator[tuple[int, str, str]]:
    """Tokens that may be attended (0: all), what that is called and what it would mean."""
    yield 0, "no window", "it learnt to attend all"
    for window in WINDOWS:
        if window < seen.tokens.shape[1]:
            yield window, f"window {window}", "it learnt to attend so many tokens"


def _of_block(reading: BlockReading, seen: Evidence) -> Iterator[Change]:
    """What a DFlash drafter may have learnt otherwise."""
    for named, hint, fields in (*_of_blocks(reading, seen), *_of_masks(reading, seen)):
        yield Change(named, hint, replace(reading, **fields))
    model = reading.network
    for named, hint, made in _turned(model, seen.target):
        yield Change(named, hint, replace(reading, network=made))
    for table, of in (("embed_tokens", "embeddings"), ("lm_head", "head")):
        if getattr(model, table) is not None:
            made = copy.copy(model)
            made._modules = {**model._modules, table: None}
            hint = "those in its file are of another"
            yield Change(f"the target's {of}", hint, replace(reading, network=made))
    for named, made in _repaired(model):
        yield Change(named, HINTS["rotary pairs"], replace(reading, network=made))


def _of_blocks(reading: BlockReading, seen: Evidence) -> Iterator[tuple[str, str, Fields]]:
    """How long its blocks are, what they see, and which of their places drafts what."""
    own = reading.reaches or (Reach(),) * len(reading.network.layers)
    causal = any(reach.causal for reach in own)
    for window, said, hint in _windows(seen):
        reaches = (Reach(window - 1 if window else None, causal=causal),) * len(own)
        if reaches != own:
            yield said, hint, {"reaches": reaches}
    said = "blocks that see all of themselves" if causal else "causal blocks"
    other = tuple(replace(reach, causal=not causal) for reach in own)
    yield said, "places see others of their block", {"reaches": other}
    size = reading.size
    for length in sorted({*BLOCKS, size - 1, size + 1, 2 * size, size // 2} - {size}):
        if length > (not reading.anchor):
            yield f"blocks of {length}", "it learnt blocks of that length", {"size": length}
    said = f"sample_from_anchor {not reading.anchor}".lower()
    whose = "the token after its own" if reading.anchor else "its own token"
    yield said, f"places do not draft {whose}", {"anchor": not reading.anchor}


def _of_masks(reading: BlockReading, seen: Evidence) -> Iterator[tuple[str, str, Fields]]:
    """Which token its masks are: its config's, one of the target's own, or one beside."""
    told = seen.target.model.config.get_text_config(decoder=True)
    ends = [getattr(told, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    listed = [i for one in ends for i in (one if isinstance(one, list) else [one])]
    around = [reading.mask - 1, reading.mask + 1, 0, seen.probs.shape[-1] - 1]
    for mask in dict.fromkeys([reading.network.config.mask, *listed, *around]):
        if mask is not None and mask != reading.mask and 0 <= mask < seen.probs.shape[-1]:
            yield f"mask token {mask}", "its masks were another token", {"mask": mask}


def _turned(head: Any, target: VLMTarget) -> Iterator[tuple[str, str, Any]]:
    """``head`` on the same weights with rotary positions other than its own."""
    for said, parameters in _ropes(dict(head.config.sizes.rope_parameters), target):
        made = copy.copy(head)
        made._modules = dict(head._modules)
        sizes: Any = copy.deepcopy(head.config.sizes)
        sizes.rope_parameters = parameters
        made.turns = type(head.turns)(sizes).to(head.fc.weight.device)
        yield said, f"it learnt with {said}, its config says otherwise", made


def _of_vocabulary(reading: Reading, seen: Evidence) -> Iterator[Change]:
    """Which tokens its logits are of."""
    ids = reading.ids
    if ids is None:
        return
    size = seen.probs.shape[-1]
    count = torch.arange(len(ids), device=ids.device)
    tables = {
        "d2t as ids": ("d2t holds ids, not differences", ids - count),
        "d2t as differences": ("d2t holds differences, not ids", ids + count),
        "sorted ids": ("its tokens are in ascending order", ids.sort().values),
        "the first ids": ("it drafts the first of the target's tokens, d2t is of another", count),
        "ids + 1": ("its tokens are counted from 1", ids + 1),
        "ids - 1": ("its tokens are counted from 0", ids - 1),
    }
    for said, (hint, other) in tables.items():
        if not torch.equal(other, ids) and int(other.min()) >= 0 and int(other.max()) < size:
            yield Change(said, hint, replace(reading, ids=other))


def _of_eagle3(reading: HeadReading, head: Eagle3Head, target: VLMTarget) -> Iterator[Change]:
    """What its config says of an EAGLE-3 head."""
    config = head.config

    def other(named: str, hint: str, made: Eagle3Head) -> Change:
        return Change(named, hint, replace(reading, network=BoundEagle3(made, target)))

    flags = ["norm_before_residual", "norm_output"]
    flags += ["picture_embeddings"] if target.family.image_tokens else []
    for flag in flags:
        value = not getattr(config, flag)
        yield other(
            f"{flag} {value}".lower(), "its config says otherwise", _with(head, flag, value)
        )
    if config.own_embeddings:
        made = _with(head, "own_embeddings", False)
        yield other("the target's embeddings", "those in its file are of another", made)
    if config.own_head and int(config.sizes.hidden_size) == target.family.config.hidden_size:
        made = _with(head, "own_head", False)
        yield other("the target's head", "the one in its file is of another", made)
    for said, hint, made in _turned(head, target):
        yield other(said, hint, made)
    for named, made in _repaired(head):
        yield other(named, HINTS["rotary pairs"], made)
    made = copy.deepcopy(head)
    swapped(made.layers[0].self_attn)
    yield other(NAMES["halves", False], HINTS["halves"], made)


def _of_msd(reading: HeadReading, head: MSDHead, target: VLMTarget) -> Iterator[Change]:
    """What an MSD head may have learnt otherwise."""

    def other(named: str, hint: str, made: MSDHead) -> Change:
        return Change(named, hint, replace(reading, network=made.bound(target)))

    turned = replace(reading, as_text=not reading.as_text)
    yield Change("pictures as text" if turned.as_text else "pictures apart", "slots differ", turned)
    dim = torch.arange(0, head.config.head_dim, 2, dtype=torch.float32) / head.config.head_dim
    theirs = float((target.family.config.rope_parameters or {}).get("rope_theta", 1e4))
    for theta in {*THETAS, theirs} - {head.config.rope_theta}:
        made = copy.copy(head)
        made.frequencies = (theta**-dim).to(head.frequencies.device)
        yield other(f"rope_theta {theta:g}", f"it learnt with {theta:g}", made)
    for factor in FACTORS:
        for scale in (factor, 1 / factor):
            made = copy.copy(head)
            made.frequencies = head.frequencies / scale
            yield other(f"positions over {scale:g}", "scaled positions", made)
    made = copy.deepcopy(head)
    made.fc.weight.data = torch.cat(made.fc.weight.data.chunk(2, 1)[::-1], 1)
    yield other(NAMES["halves", False], HINTS["halves"], made)
    for named, made in _repaired(head):
        yield other(named, HINTS["rotary pairs"], made)


NAMES = {
    ("rotary pairs", False): "rotary pairs of neighbours",
    ("rotary pairs", True): "rotary pairs of halves",
    ("halves", False): "state before embedding",
}
HINTS = {
    "rotary pairs": "its q_proj and k_proj were exported for the other order of rotary pairs",
    "halves": "it reads token and state in the other order",
}


def _with(head: Eagle3Head, flag: str, value: bool) -> Eagle3Head:
    """``head``, on the same weights, of a config with ``flag``."""
    made = copy.copy(head)
    changed: dict[str, Any] = {flag: value}
    made.config = replace(head.config, **changed)
    return made


def _ropes(own: dict[str, Any], target: VLMTarget) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rotary positions other than a drafter's ``own``."""
    theirs = dict(target.family.config.rope_parameters or {})
    theta = float(own.get("rope_theta", 1e4))
    if theirs.get("rope_type", "default") not in ("default", "mrope"):
        yield f"the target's {theirs['rope_type']} positions", theirs
    for base in sorted({*THETAS, float(theirs.get("rope_theta", 1e4))} - {theta}):
        yield f"rope_theta {base:g}", {**own, "rope_theta": base}
    if own.get("rope_type", "default") != "default":
        yield "unscaled positions", {"rope_type": "default", "rope_theta": theta}
    for factor in FACTORS:
        yield f"positions over {factor:g}", {**own, "rope_type": "linear", "factor": factor}


def _repaired(head: Any) -> Iterator[tuple[str, Any]]:
    """``head`` with its rotary pairs in the other order, either way."""
    for inverse in (False, True):
        made = copy.deepcopy(head)
        for layer in made.layers:
            repaired(layer.self_attn, inverse)
        yield NAMES["rotary pairs", inverse], made


@torch.no_grad()
def repaired(attention: Any, inverse: bool) -> None:
    """Reorder rotary pairs from neighbours to halves, or back."""
    width = attention.head_dim
    for name in ("q_proj", "k_proj", "q_norm", "k_norm"):
        part = getattr(attention, name, None)
        for values in (getattr(part, "weight", None), getattr(part, "bias", None)):
            if values is not None:
                heads = values.data.unflatten(0, (-1, width))
                parts = (2, -1) if inverse else (-1, 2)
                values.data = heads.unflatten(1, parts).transpose(1, 2).flatten(0, 2).contiguous()


@torch.no_grad()
def swapped(attention: Any) -> None:
    """Swap the halves that q, k and v read."""
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(attention, name).weight
        weight.data = torch.cat(weight.data.chunk(2, 1)[::-1], 1)
