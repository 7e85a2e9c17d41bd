"""Follows a drafter along its target's own answers: all of its chains, without decoding.

The target answers, and its states on these answers are computed once. A drafter then drafts from
every token at once, using its own states below the first draft (as in training).

Shape letters: B answers, L positions, D drafts of a chain, C width, F layers read, V vocabulary,
v the drafter's, R roots (tokens after which there is a draft), K ranks, A anchors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.chats.tokens import answered
from specmm.choose.traces import Trace
from specmm.core.cache import Cache, CacheSize
from specmm.core.decode import EndTokens, decode_plain
from specmm.core.drafter import DrafterVocabulary
from specmm.core.processors import Processor
from specmm.core.randomness import categorical
from specmm.core.sorting import largest, likeliest
from specmm.core.tree import TreeShape
from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.diffusion_drafters.models.dflash_config import Reach
from specmm.diffusion_drafters.sources import DFlashSource
from specmm.hf.drafters.drafting import drafting_probs, row_uniforms
from specmm.hf.drafters.features import BoundNetwork
from specmm.hf.drafters.mtp_layers import LayerSlots, MtpLayers
from specmm.hf.models.aux_states import AuxStates
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.recipes.dflash import blocks_after
from specmm.recipes.features import rollout_bias
from specmm.recipes.training.blocks import Anchors

DEPTH = 5  # drafts of a chain
RANKS = 6  # drafts of a token that are traced
LEVELS = 8  # levels that are traced
CACHED = 64  # roots whose distributions fit a processor's cache


@dataclass(frozen=True)
class Evidence:
    """A target's states on its answers: ``tokens`` [B, L] and their ``embeddings`` [B, L, C], of
    which ``image`` [B, L] belong to pictures, the outputs of all its ``layers`` and the last states
    ``hidden`` [B, L, C], where its answers ``begin`` [B], how ``long`` they are [B], and the
    ``probs`` [B, L, V] of the next token: the distributions that answers were drawn from or, for
    greedy answers, those at temperature 1.
    """

    target: VLMTarget
    tokens: Tensor
    embeddings: Tensor
    image: Tensor
    layers: Sequence[Tensor]
    hidden: Tensor
    positions: Tensor | None
    begin: Tensor
    long: Tensor
    probs: Tensor

    @property
    def place(self) -> Tensor:
        """The place of each slot, from 0: [1, L]."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]

    @property
    def roots(self) -> Tensor:
        """Slots [B, L] whose next token is an answer's, but not its last: a draft follows."""
        following = self.place + 1
        last = (self.begin + self.long - 1)[:, None]
        return (following >= self.begin[:, None]) & (following < last)

    def chains(self, values: Tensor) -> Tensor:
        """``values`` [D, B, L, …] along the chain of each root [R, D, …]; 0 beyond its answer."""
        rows, slots = self.roots.nonzero(as_tuple=True)
        last = (self.begin + self.long - 3)[rows]  # the slot of an answer's last draft
        depth = torch.arange(len(values), device=slots.device)
        slot = slots[:, None] + depth  # [R, D]
        chain = values[depth, rows[:, None], slot.clamp(max=values.shape[2] - 1)]
        inside = slot <= last[:, None]
        return chain * inside.view(*inside.shape, *([1] * (chain.ndim - 2)))


@torch.inference_mode()
def evidence(
    model: Any, prompt: VLMPrompt, ends: Sequence[int], temperature: float = 0.0
) -> Evidence:
    """The answers of ``model`` to ``prompt`` at a ``temperature``, until ``ends``, with its states
    and distributions on them.
    """
    target = VLMTarget(model, Processor(temperature), "target")
    on_cpu, prompt = prompt, prompt.to(target.device, target.dtype)
    stop = EndTokens(ends, target.device)
    length = prompt.max_new_tokens
    *_, end = decode_plain(target, prompt, length, row_uniforms(prompt), stop=stop)
    pictures = target.family.image_tokens  # no answer is read on after one
    texts = [
        list(takewhile(lambda i: i not in pictures, end.row(row).tolist()))
        for row in range(len(end.tokens))
    ]
    together, _ = answered(on_cpu, texts, [[True] * len(ids) for ids in texts])
    target.wants_context = True
    aux = AuxStates(list(target.family.layers), lambda: target.running)
    target.prefill(replace(together, max_new_tokens=1).to(target.device, target.dtype), 0)
    context = target.context
    assert context is not None
    return Evidence(
        target,
        together.input_ids.to(target.device),
        context.embeddings,
        context.image_mask,
        [target.ordered(states) for states in aux.seen if states is not None],
        context.hidden,
        context.positions,
        prompt.lengths.to(target.device),
        torch.tensor([len(ids) for ids in texts], device=target.device),
        Processor(temperature or 1.0)(target.family.logits(context.hidden)),
    )


@dataclass(frozen=True)
class Reading:
    """A way to read a drafter's interface: its ``network``, the target's ``layers`` whose outputs
    it reads (empty: the last states; ``normed`` or not, None: as usual), the places by which tokens
    are shifted (``late``), and the ``ids`` [v] of its tokens (None: all).
    """

    network: Any
    layers: tuple[int, ...]
    ids: Tensor | None
    normed: bool | None = None
    late: int = 0

    def drafted(self, seen: Evidence, depth: int) -> Iterator[Tensor]:
        """Yields logits [B, L, v] of the drafts at each depth, up to ``depth`` or the drafter's own
        depth: the draft of root slot r at depth k is at slot r + k.
        """
        raise NotImplementedError

    def states(self, seen: Evidence) -> Tensor:
        """The target's states [B, L, C or F·C] that the drafter reads."""
        norm = final_norm(seen.target)
        if self.layers:
            each = [self._layer(seen, i) for i in self.layers]
            each = [norm(x) for x in each] if self.normed else each
            states = torch.cat(each, dim=-1)
        else:
            states = seen.layers[-1] if self.normed is False else seen.hidden
        return states.roll(self.late, 1) if self.late else states

    def _layer(self, seen: Evidence, number: int) -> Tensor:
        return seen.layers[number]


@dataclass(frozen=True)
class HeadReading(Reading):
    """A head that predicts states one after the other, bound to its target, with attention to a
    ``window`` (0: everywhere). It may count positions without pictures (``skips``) and read
    pictures' slots ``as_text``.
    """

    network: BoundNetwork
    window: int = 0
    skips: bool = False
    as_text: bool = False

    def places(self, seen: Evidence) -> Tensor:
        """Positions of the slots [1, L], [B, L] or [3, B, L]."""
        if self.network.parts and seen.positions is not None:
            return seen.positions
        return (seen.place - seen.image.cumsum(1)).clamp(min=0) if self.skips else seen.place

    def drafted(self, seen: Evidence, depth: int) -> Iterator[Tensor]:
        network = self.network
        length = seen.tokens.shape[1]
        following = self._read(seen).roll(-1, 1)
        image = seen.image.roll(-1, 1) & (not self.as_text)
        slots = [network.prompt_slots(following, self.states(seen), image)]
        places = self.places(seen)
        for step in range(depth):
            bias = _bias(length, step, self.window).to(slots[0])
            repeated = places.repeat(*([1] * (places.ndim - 1)), step + 1)
            states = network.run(torch.cat(slots, 1), repeated, bias)[:, -length:]
            yield network.logits(states).float()
            before = F.pad(states[:, :-1], (0, 0, 1, 0))
            slots.append(network.slots(following, before, step + 1))

    def _read(self, seen: Evidence) -> Tensor:
        """The states of prompts and answers [B, L, C] that the head reads."""
        from_text = self.network.embed(seen.tokens.clamp(max=seen.probs.shape[-1] - 1))
        embeddings = self.network.prompt_embeddings(seen.tokens, seen.embeddings)
        return torch.where((seen.place >= seen.begin[:, None])[..., None], from_text, embeddings)


@dataclass(frozen=True)
class BlockReading(Reading):
    """A drafter of blocks of ``size`` places with the token ``mask``; the first place drafts, too,
    if it is the ``anchor``. Layers attend within their ``reaches`` (empty: everywhere).
    """

    network: DFlash
    size: int = 0
    mask: int = 0
    anchor: bool = False
    reaches: tuple[Reach, ...] = ()

    def drafted(self, seen: Evidence, depth: int) -> Iterator[Tensor]:
        source = DFlashSource(self._network(), seen.target)
        rows, slots = seen.roots.nonzero(as_tuple=True)
        first = seen.roots.int().argmax(1)  # [B]
        count = int(seen.roots.sum(1).max())
        length = seen.tokens.shape[1]
        order = torch.arange(count, device=slots.device)
        anchors = (first[:, None] + 1 + order).clamp(max=length - 1)  # [B, A]
        ids = seen.tokens.new_full((*anchors.shape, self.size), self.mask)
        ids[..., 0] = seen.tokens.gather(1, anchors)
        drawn = Anchors(anchors, self.size)
        embeddings = source.embed(ids.flatten(1))
        states = blocks_after(source.model, self.states(seen), embeddings, drawn, self.reaches)
        places = source.places(states[:, :, 0 if self.anchor else 1 :])
        memory = None
        for k, place in enumerate(places[:, :, :depth].unbind(2)):
            if source.next_logits is not None:
                before = seen.tokens.gather(1, (anchors + k).clamp(max=length - 1))
                place, memory = source.next_logits(place, before, memory)
            by_slot = place.new_zeros(len(place), length, place.shape[-1])
            slot = slots + k
            inside = slot < length
            anchor_states = place[rows, slots - first[rows]]
            yield by_slot.index_put((rows[inside], slot[inside]), anchor_states[inside])

    def _layer(self, seen: Evidence, number: int) -> Tensor:
        last = number == len(seen.layers) - 1 and self.network.config.normed
        return seen.hidden if last and self.normed is None else seen.layers[number]

    def _network(self) -> DFlash:
        """The network, set to draft the tokens of this reading."""
        ids = self.network.ids
        if self.ids is None or ids is None or torch.equal(self.ids, ids):
            return self.network
        network = copy.copy(self.network)
        network._buffers = dict(network._buffers)
        count = torch.arange(len(self.ids), device=self.ids.device)
        network.d2t = self.ids - count
        network.t2d = network.t2d.clone().fill_(len(count)).scatter(0, self.ids, count)
        return network


@dataclass(frozen=True)
class LayerReading(Reading):
    """MTP layers: each drafts at its depth, and the last one also at all deeper levels. If they
    pass on states without a norm, ``norms`` are applied before the head.
    """

    network: MtpLayers
    norms: Sequence[nn.Module] = ()

    def drafted(self, seen: Evidence, depth: int) -> Iterator[Tensor]:
        layers, target = self.network, seen.target
        rows, length = seen.tokens.shape
        size = CacheSize(layers.sizes, rows, 1, depth * length, 0)
        cache = Cache(size, target.dtype, target.device)
        slots = LayerSlots(layers, layers.windows(), cache)
        texts = target.family.plain_embedding(seen.tokens)
        following = torch.where(seen.image[..., None], seen.embeddings, texts).roll(-1, 1)
        places = seen.place if seen.positions is None else seen.positions
        read = self.states(seen)
        for step in range(depth):
            number = min(step, len(layers.model.layers) - 1)
            repeats = step - number  # times that the last layer has read its own predictions
            cache.aim(repeats * length, (repeats + 1) * length)
            bias = rollout_bias(length, repeats).to(following)
            slots.aim(seen.place, places + 1, bias)
            states = slots.run(number, following, read)
            predicted = layers.predicted(states)
            yield target.head(self.norms[number](predicted) if self.norms else predicted).float()
            read = F.pad(states[:, :-1], (0, 0, 1, 0))


def reading_of(network: Any, target: VLMTarget) -> HeadReading | BlockReading | LayerReading:
    """The usual reading of ``network`` (a result of
    :func:`specmm.hf.drafters.drafting.load_drafter`) for ``target``.

    Raises ``ValueError`` if it does not fit, and for drafters that cannot be followed.
    """
    if isinstance(network, MtpLayers):
        return LayerReading(network, (), None)
    if isinstance(network, DFlash):
        config = network.config
        DFlashSource(network, target)  # raises where it does not fit
        sizes: dict[str, Any] = dict(size=config.block, mask=config.mask, anchor=config.anchor)
        return BlockReading(network, config.layers, network.ids, **sizes, reaches=config.reaches)
    bound = network.bound(target)
    if bound.mask is not None:
        raise ValueError("doctor needs a drafter of one token a pass, got one with a mask token")
    return HeadReading(bound, tuple(bound.layers), bound.vocabulary.ids)


@dataclass(frozen=True)
class Followed:
    """For each slot's draft at each depth: whether it equals the target's token (``token`` [D, B,
    L]), and its ``overlap`` Σ min(p, q) with the target's distribution [D, B, L].
    """

    seen: Evidence
    token: Tensor
    overlap: Tensor

    @property
    def tau(self) -> float:
        """Tokens a round of greedy chains, by following each answer as decoding would."""
        return traced(self.seen, self.token[..., None], {}).tau(TreeShape.chain(len(self.token)))

    @property
    def sampled(self) -> float:
        """Tokens a round at temperature 1, if all tokens are equally likely to be roots."""
        products = self.seen.chains(self.overlap).cumprod(1)
        return 1 + float((products.sum(0) / self._in_answer.sum(0).clamp(min=1)).sum())

    @property
    def by_depth(self) -> list[float]:
        """How often a draft at each depth is accepted, given that all earlier drafts are."""
        accepted = self.seen.chains(self.token.float()).cumprod(1)
        tried = F.pad(accepted[:, :-1], (1, 0), value=1.0) * self._in_answer
        shares: list[float] = (accepted.sum(0) / tried.sum(0).clamp(min=1)).tolist()
        return shares

    @property
    def _in_answer(self) -> Tensor:
        """1 [R, D] where a chain's draft belongs to its answer, 0 beyond."""
        return self.seen.chains(torch.ones_like(self.overlap))

    def parts(self) -> dict[str, float]:
        """How often the first draft is accepted, by the part of the text that it is in."""
        depth, roots = self.seen.place.expand_as(self.token[0]), self.seen.roots
        begins = depth < self.seen.begin[:, None]  # the root is an answer's first token
        middle = depth[roots].float().median()
        kinds = {
            "second words of answers": begins,
            "later words": ~begins,
            f"after at most {int(middle)} tokens": depth <= middle,
            "after more": depth > middle,
        }
        first = self.token[0].float()
        parts = {name: first[roots & of_kind] for name, of_kind in kinds.items()}
        return {name: float(values.mean()) for name, values in parts.items() if len(values)}


@torch.inference_mode()
def followed(seen: Evidence, reading: Reading, depth: int = DEPTH) -> Followed:
    """The chains of a drafter under ``reading``, from every token of the answers."""
    probs = seen.probs.roll(-1, 1)  # distributions of the token of a slot's first draft
    target_tokens = likeliest(probs)
    ids = reading.ids
    target_probs = probs if ids is None else probs[..., ids]
    tokens, overlaps = [], []
    for logits in reading.drafted(seen, depth):
        best = likeliest(logits)
        tokens.append((best if ids is None else ids[best]) == target_tokens)
        overlaps.append(torch.minimum(target_probs, logits.softmax(-1)).sum(-1))
    return Followed(seen, torch.stack(tokens), torch.stack(overlaps))


@torch.inference_mode()
def trace(seen: Evidence, reading: Reading, facts: dict[str, Any], depth: int = LEVELS) -> Trace:
    """The acceptance of drafts by rank: for greedy answers of the likeliest tokens, else of drafts
    drawn without replacement and verified in turn.
    """
    vocabulary = DrafterVocabulary(seen.probs.shape[-1], reading.ids)
    ranks = min(RANKS, vocabulary.count)
    following_tokens = seen.tokens.roll(-2, 1)  # the token that a slot's first draft is of
    roots = seen.roots
    to_probs = drafting_probs(seen.target, vocabulary)
    probs = seen.probs.roll(-1, 1)[roots]  # [R, V]
    generator = torch.Generator(probs.device).manual_seed(0)
    matched = []
    for logits in reading.drafted(seen, depth):
        at_roots, following = logits[roots], following_tokens[roots]
        if seen.target.processor.greedy:
            matches = vocabulary.to_target(largest(at_roots, ranks)[1]) == following[:, None]
        else:
            parts = [x.split(CACHED) for x in (probs, at_roots, following)]
            matches_of_parts = [
                chances(p, vocabulary.spread(to_probs(x)), token, ranks, generator)
                for p, x, token in zip(*parts, strict=True)
            ]
            matches = torch.cat(matches_of_parts)
        empty = probs.new_zeros(*roots.shape, ranks)
        matched.append(empty.masked_scatter(roots[..., None], matches.float()))
    return traced(seen, torch.stack(matched), facts)


def traced(seen: Evidence, kept: Tensor, facts: dict[str, Any]) -> Trace:
    """The trace of acceptance probabilities ``kept`` [D, B, L, K] by slot."""
    counts = (seen.roots.sum(1).cpu(), seen.begin.cpu())
    return Trace(seen.chains(kept.float()).cpu(), *counts, facts)


def chances(p: Tensor, q: Tensor, tokens: Tensor, ranks: int, generator: torch.Generator) -> Tensor:
    """The probability [R, K] that the draft of each rank is accepted, if the next token is
    ``tokens`` [R], drawn from ``p`` [R, V], and drafts are drawn from ``q`` [R, V] without
    replacement and verified in turn (:class:`specmm.verify.Recursive`).

    An unbiased estimate: each rejected draft is drawn once instead of averaging over all.
    """
    at = tokens[:, None]
    probs = p.gather(1, at).clamp(min=1e-30)
    remaining = p.clone()  # the part of p that drafts so far have not taken
    columns = []
    for _ in range(ranks):
        offered = remaining.sum(1, keepdim=True) * q
        columns.append((torch.minimum(remaining, offered).gather(1, at) / probs)[:, 0])
        remaining -= offered
        refused = (-remaining).clamp_(min=0)
        uniform = torch.rand(len(p), generator=generator, device=p.device)
        token = categorical(refused, uniform)  # any where none can be refused: nothing is left then
        remaining.clamp_(min=0)
        q = q.scatter(1, token[:, None], 0.0)
        q /= q.sum(1, keepdim=True).clamp(min=1e-30)
    return torch.stack(columns, 1).clamp(0, 1)


def _bias(length: int, step: int, window: int) -> Tensor:
    """Additive mask [1, 1, (step + 1)·L, (step + 1)·L] of all slots up to a ``step``."""
    wide = (step + 1) * length
    rows = [
        F.pad(rollout_bias(length, k)[0, 0], (0, wide - (k + 1) * length), value=-torch.inf)
        for k in range(step + 1)
    ]
    bias = torch.cat(rows)
    if window:
        position = torch.arange(length).repeat(step + 1)
        bias = bias.masked_fill(position[:, None] - position >= window, -torch.inf)
    return bias[None, None]


def final_norm(target: VLMTarget) -> Callable[[Tensor], Tensor]:
    """The target's norm after its last layer; the identity if it has none of a usual name."""
    norm = getattr(target.family.decoder, "norm", None)
    return norm if isinstance(norm, nn.Module) else lambda states: states
