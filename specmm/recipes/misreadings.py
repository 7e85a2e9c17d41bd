"""Common misreadings of a drafter's interface, each as the reading that would correct it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.diffusion_drafters.models.dflash_config import Reach
from specmm.hf.drafters.eagle3_head import Eagle3Head, layers_read
from specmm.hf.drafters.mtp_layers import MtpLayers
from specmm.hf.models.target import VLMTarget
from specmm.recipes.dflash import layers_read as block_layers
from specmm.recipes.following import BlockReading, Evidence, HeadReading, LayerReading, Reading
from specmm.vlm.msd import MSDHead

WINDOWS = (128, 256, 512, 1024, 2048, 4096)  # tokens that a drafter may have learnt to attend
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # bases of rotary positions
FACTORS = (2.0, 4.0, 8.0, 16.0)  # factors by which positions may have been interpolated
BLOCKS = (4, 8, 16, 32)  # places of blocks
PAIRS = ("rotary pairs of neighbours", "rotary pairs of halves")  # by ``inverse`` of repaired
HALVES = "state before embedding"
NORMS = "norms of token and state exchanged"  # names of changes of MTP layers, as are the next two
REVERSED, ALONE = "MTP layers reversed", "the first layer alone"
HANDED = ("the target's states at every depth", "predictions after the first layer")
NORMED = ("predictions before their norm", "predictions after their norm")
Tried: TypeAlias = Iterator[tuple[str, str, Any]]
"""Names, hints, and fields of a reading or a network in place of its own."""


@dataclass(frozen=True)
class Change:
    """A changed reading of a drafter: its name (``named``), a ``hint`` at the likely mistake, and
    the ``reading``.
    """

    named: str
    hint: str
    reading: Reading


def changes(reading: Reading, seen: Evidence) -> Iterator[Change]:
    """All changes to try for the drafter of ``reading``."""
    kinds: list[Callable[[Any, Evidence], Tried]] = [_of_states, _of_vocabulary]
    if isinstance(reading, LayerReading):
        kinds += [_of_layers]  # positions, tables and the order of rotary pairs are the target's
    else:
        of_blocks = isinstance(reading, BlockReading)
        kinds += [_of_blocks, _of_masks] if of_blocks else [_of_attention]
        kinds += [_of_network]
    for kind in kinds:
        for named, hint, fields in kind(reading, seen):
            yield Change(named, hint, replace(reading, **fields))


def _head(reading: Reading) -> Any:
    """The module that drafts."""
    network = reading.network
    return getattr(network, "head", getattr(network, "run", network))


def _of_states(reading: Reading, seen: Evidence) -> Tried:
    """Changes of the states that it reads, and of the tokens that these belong to."""
    layers, most = reading.layers, len(seen.layers)
    for by, where, counted in (
        (1, "low", "states before layers, or from 1"),
        (-1, "high", "outputs, or from 0"),
    ):
        moved = tuple(i + by for i in layers)
        if layers and min(moved) >= 0 and max(moved) < most:
            hint = f"the layers that its config names are one too {where}: they count {counted}"
            yield f"layers {by:+d}", hint, {"layers": moved}
    if len(layers) > 1:
        hint = "the layers read are named in another order"
        yield "layers reversed", hint, {"layers": layers[::-1]}
        block = isinstance(reading, BlockReading) and len(layers) < most
        usual = block_layers(seen.target, len(layers)) if block else layers_read(most)
        if len(usual) == len(layers) and usual != layers:
            hint = f"it reads {'DFlash' if block else 'EAGLE'}'s own {list(usual)}"
            yield "usual layers", hint, {"layers": usual}
    for normed, where in ((True, "after"), (False, "before")):
        last = not isinstance(reading, BlockReading) or most - 1 in layers
        other_norm = layers or normed is False or reading.normed is False
        if reading.normed is not normed and other_norm and (normed or last or reading.normed):
            hint = f"the states that it learnt from were {where} the target's last norm"
            yield f"states {where} the norm", hint, {"normed": normed}
    for by, where in ((-1, "next"), (1, "former")):
        late = reading.late + by
        if abs(late) <= 1:
            hint = "token and state are paired one off"
            yield f"state of the {where} token", hint, {"late": late}


def _of_vocabulary(reading: Reading, seen: Evidence) -> Tried:
    """Changes of the tokens for which logits stand."""
    ids = reading.ids
    if ids is None:
        return
    size = seen.probs.shape[-1]
    count = torch.arange(len(ids), device=ids.device)
    for named, hint, other in (
        ("d2t as ids", "d2t holds ids, not differences", ids - count),
        ("d2t as differences", "d2t holds differences, not ids", ids + count),
        ("sorted ids", "its tokens are in ascending order", ids.sort().values),
        ("the first ids", "it drafts the first of the target's tokens, d2t is of another", count),
        ("ids + 1", "its tokens are counted from 1", ids + 1),
        ("ids - 1", "its tokens are counted from 0", ids - 1),
    ):
        if not torch.equal(other, ids) and int(other.min()) >= 0 and int(other.max()) < size:
            yield named, hint, {"ids": other}


def _of_attention(reading: HeadReading, seen: Evidence) -> Tried:
    """Changes of attention, of positions, and of how pictures are read."""
    for window, named, hint in _windows(seen):
        if window != reading.window:
            yield named, hint, {"window": window}
    if bool(seen.image.any()) and not reading.network.parts:
        where = "with" if reading.skips else "without"
        hint = "it counts its slots otherwise"
        yield f"positions {where} pictures", hint, {"skips": not reading.skips}
    if isinstance(_head(reading), MSDHead):
        where = "apart" if reading.as_text else "as text"
        yield f"pictures {where}", "slots differ", {"as_text": not reading.as_text}


def _windows(seen: Evidence) -> Iterator[tuple[int, str, str]]:
    """Sizes of attention windows in tokens (0: all), each with a name and a hint."""
    yield 0, "no window", "it learnt to attend all"
    for window in WINDOWS:
        if window < seen.tokens.shape[1]:
            yield window, f"window {window}", "it learnt to attend so many tokens"


def _of_blocks(reading: BlockReading, seen: Evidence) -> Tried:
    """Other block lengths, other masks within a block, and places that draft their own token
    instead of the next one, or the reverse.
    """
    reaches_read = reading.reaches or (Reach(),) * len(reading.network.layers)
    causal = any(reach.causal for reach in reaches_read)
    for window, named, hint in _windows(seen):
        reaches = (Reach(window - 1 if window else None, causal=causal),) * len(reaches_read)
        if reaches != reaches_read:
            yield named, hint, {"reaches": reaches}
    named = "blocks that see all of themselves" if causal else "causal blocks"
    reversed_reaches = tuple(replace(reach, causal=not causal) for reach in reaches_read)
    yield named, "places see others of their block", {"reaches": reversed_reaches}
    size = reading.size
    for length in sorted({*BLOCKS, size - 1, size + 1, 2 * size, size // 2} - {size}):
        if length >= (1 if reading.anchor else 2):  # a place drafts its own token, or the next
            yield f"blocks of {length}", "it learnt blocks of that length", {"size": length}
    named = f"sample_from_anchor {not reading.anchor}".lower()
    whose = "the token after its own" if reading.anchor else "its own token"
    yield named, f"places do not draft {whose}", {"anchor": not reading.anchor}


def _of_masks(reading: BlockReading, seen: Evidence) -> Tried:
    """Changes of the mask token: the config's, one of the target's own, or a neighbour."""
    config = seen.target.model.config.get_text_config(decoder=True)
    ends = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    listed = [i for end in ends for i in (end if isinstance(end, list) else [end])]
    around = [reading.mask - 1, reading.mask + 1, 0, seen.probs.shape[-1] - 1]
    for mask in dict.fromkeys([reading.network.config.mask, *listed, *around]):
        if mask is not None and mask != reading.mask and 0 <= mask < seen.probs.shape[-1]:
            yield f"mask token {mask}", "its masks were another token", {"mask": mask}


def _of_layers(reading: LayerReading, seen: Evidence) -> Tried:
    """Changes of MTP layers: their order, the order of inputs, the states that they pass on."""
    layers = reading.network
    stack: list[Any] = list(layers.model.layers)
    norms = relayered(layers, stack, lambda layer: {"enorm": layer.hnorm, "hnorm": layer.enorm})
    tried = {HALVES: relayered(layers, stack, _swapped), NORMS: norms}
    if len(stack) > 1:
        tried |= {REVERSED: relayered(layers, stack[::-1]), ALONE: relayered(layers, stack[:1])}
    for named, variant in tried.items():
        yield named, "its weights are named otherwise", {"network": variant}
    hint = "layers after the first learnt to read them"
    yield HANDED[not layers.chained], hint, {"network": replace(layers, chained=not layers.chained)}
    if layers.chained and stack[0].post_norm is not None:
        after = () if reading.norms else tuple(layer.post_norm for layer in stack)
        variant = relayered(layers, stack, lambda _: {"use_post_norm": not after})
        yield NORMED[not after], hint, {"network": variant, "norms": after}


def relayered(
    layers: MtpLayers, new: Sequence[Any], parts: Callable[[Any], Mapping[str, Any]] = lambda _: {}
) -> MtpLayers:
    """``layers`` with copies of the layers ``new``, which share weights but for their ``parts``."""
    model = sharing(layers.model)
    model.layers = nn.ModuleList(map(sharing, new))
    for layer, before in zip(model.layers, new, strict=True):
        for name, part in parts(before).items():
            setattr(layer, name, part)
    return replace(layers, model=model)


def _swapped(layer: Any) -> dict[str, Any]:
    """The parts of an MTP layer that reads token and state in reversed order."""
    config = copy.copy(layer.config)
    config.mtp_hidden_states_first = not getattr(config, "mtp_hidden_states_first", False)
    return {"config": config}


def _of_network(reading: Reading, seen: Evidence) -> Tried:
    """Changes of the order of weights in its file, and of its config's values."""
    head = _head(reading)
    for named, hint, variant in _of_head(head, seen.target):
        bound = variant if isinstance(head, DFlash) else variant.bound(seen.target)
        yield named, hint, {"network": bound}


def _of_head(head: Any, target: VLMTarget) -> Tried:
    """Other heads in place of ``head``."""
    for inverse, named in enumerate(PAIRS):
        hint = "its q_proj and k_proj were exported for the other order of rotary pairs"
        yield named, hint, repaired(head, bool(inverse))
    if not isinstance(head, DFlash):
        yield HALVES, "it reads token and state in the other order", swapped(head)
    yield from (_turned_msd if isinstance(head, MSDHead) else _turned)(head, target)
    if isinstance(head, DFlash):
        tables = {"embed_tokens": "embeddings", "lm_head": "head"}
        for table, of in tables.items():
            if getattr(head, table) is not None:
                variant = altered(head)
                setattr(variant, table, None)
                yield f"the target's {of}", "those in its file are of another", variant
    if isinstance(head, Eagle3Head):
        yield from _of_eagle3(head, target)


def _of_eagle3(head: Eagle3Head, target: VLMTarget) -> Tried:
    """Changes of an EAGLE-3 head's config."""
    config = head.config
    flags = ["norm_before_residual", "norm_output"]
    flags += ["picture_embeddings"] if target.family.image_tokens else []
    for flag in flags:
        value = not getattr(config, flag)
        yield f"{flag} {value}".lower(), "its config says otherwise", altered(head, **{flag: value})
    if config.own_embeddings:
        variant = altered(head, own_embeddings=False)
        yield "the target's embeddings", "those in its file are of another", variant
    if config.own_head and int(config.sizes.hidden_size) == target.family.config.hidden_size:
        variant = altered(head, own_head=False)
        yield "the target's head", "the one in its file is of another", variant


def _turned(head: Any, target: VLMTarget) -> Tried:
    """``head`` with rotary positions other than its own."""
    rope = dict(head.config.sizes.rope_parameters)
    theirs = dict(target.family.config.rope_parameters or {})
    now = float(rope.get("rope_theta", 1e4))
    ropes = {f"rope_theta {base:g}": {**rope, "rope_theta": base} for base in _thetas(now, target)}
    if theirs.get("rope_type", "default") not in ("default", "mrope"):
        ropes[f"the target's {theirs['rope_type']} positions"] = theirs
    if rope.get("rope_type", "default") != "default":
        ropes["unscaled positions"] = {"rope_type": "default", "rope_theta": now}
    for factor in FACTORS:
        ropes[f"positions over {factor:g}"] = {**rope, "rope_type": "linear", "factor": factor}
    for named, parameters in ropes.items():
        variant = altered(head)
        sizes: Any = copy.deepcopy(head.config.sizes)
        sizes.rope_parameters = parameters
        variant.turns = type(head.turns)(sizes).to(head.fc.weight.device)
        yield named, f"it learnt with {named}, its config says otherwise", variant


def _turned_msd(head: MSDHead, target: VLMTarget) -> Tried:
    """An MSD head, whose config knows no scaled positions, with others."""
    dim = torch.arange(0, head.config.head_dim, 2, dtype=torch.float32) / head.config.head_dim
    for theta in _thetas(head.config.rope_theta, target):
        variant = altered(head)
        variant.frequencies = (theta**-dim).to(head.frequencies.device)
        yield f"rope_theta {theta:g}", f"it learnt with {theta:g}", variant
    for scale in (*FACTORS, *(1 / factor for factor in FACTORS)):
        variant = altered(head)
        variant.frequencies = head.frequencies / scale
        yield f"positions over {scale:g}", "scaled positions", variant


def _thetas(theta: float, target: VLMTarget) -> list[float]:
    """Bases of rotary positions other than the drafter's own ``theta``."""
    theirs = float((target.family.config.rope_parameters or {}).get("rope_theta", 1e4))
    return sorted({*THETAS, theirs} - {theta})


def sharing(module: Any) -> Any:
    """A copy of ``module`` that shares its weights; its parts may be replaced."""
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    return clone


def altered(head: Any, **config: Any) -> Any:
    """A copy of ``head`` that shares weights, with changes in ``config``; parts may be replaced."""
    clone = sharing(head)
    clone.config = replace(head.config, **config)
    return clone


@torch.no_grad()
def repaired(head: Any, inverse: bool) -> Any:
    """A copy of ``head`` with rotary pairs of neighbours made pairs of halves, or ``inverse``."""
    clone = copy.deepcopy(head)
    for layer in clone.layers:
        for name, values in layer.self_attn.named_parameters():
            if name.startswith(("q_proj", "k_proj", "q_norm", "k_norm")):
                heads = values.data.unflatten(0, (-1, layer.self_attn.head_dim))
                pairs = heads.unflatten(1, (2, -1) if inverse else (-1, 2))
                values.data = pairs.transpose(1, 2).flatten(0, 2).contiguous()
    return clone


@torch.no_grad()
def swapped(head: Any) -> Any:
    """A copy of ``head`` that reads token and state in reversed order."""
    clone = copy.deepcopy(head)
    readers: list[nn.Linear] = [clone.fc]
    if not isinstance(head, MSDHead):
        attention = clone.layers[0].self_attn
        readers = [attention.q_proj, attention.k_proj, attention.v_proj]
    for reader in readers:
        reader.weight.data = torch.cat(reader.weight.data.chunk(2, 1)[::-1], 1)
    return clone
