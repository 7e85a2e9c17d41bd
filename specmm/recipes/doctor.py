"""Why few drafts are kept: a drafter beside its target's own answers, read as it is and in each way
in which its interface is commonly taken wrongly.

The target answers greedily; its states on these answers are computed once. A drafter then follows
them from every token at once, its own states below the first draft (as in training), so that all
of its chains are known without decoding. What a change gives is what it accepts more.

Shape letters: B answers, L positions, D drafts of a chain, C width, F layers read, V vocabulary, v
the drafter's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.chats.tokens import answered
from specmm.decode import EndTokens, decode_plain
from specmm.hf.aux_states import AuxStates
from specmm.hf.drafters.eagle3 import BoundEagle3
from specmm.hf.drafters.eagle3_head import Eagle3Head, layers_read
from specmm.hf.drafters.features import BoundNetwork, FeatureNetwork
from specmm.hf.drafting import KINDS, load_drafter, method_of, row_uniforms
from specmm.hf.pretrained import find, find_target, load_tokenizer, weights_folder
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.conversations import LONGEST, conversations
from specmm.recipes.features import rollout_bias
from specmm.recipes.recipe import Places
from specmm.recipes.settings import load_frozen, sees
from specmm.recipes.source import PROMPT, Data
from specmm.recipes.training.texts import text_stream, windows
from specmm.text.pipeline import TextPipeline
from specmm.vlm.msd import MSDHead

DEPTH = 5  # drafts of a chain
WINDOWS = (128, 256, 512, 1024, 2048, 4096)  # tokens that a drafter may have learnt to attend
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # bases of rotary positions
FACTORS = (2.0, 4.0, 8.0, 16.0)  # by which positions may have been interpolated
WORTH = 1.02  # times as many tokens a round: less is no reason to change anything
METHODS = ("eagle3", "msd", "mtp")  # of drafters that read the target's states


@dataclass(frozen=True)
class Evidence:
    """What a target read and thought: ``tokens`` [B, L] and their ``embeddings`` [B, L, C], of
    which ``image`` [B, L] are pictures', the outputs of all its ``layers`` and the last states
    ``hidden`` [B, L, C], where its answers ``begin`` [B], how ``long`` they are [B], and the
    ``probs`` [B, L, V] of the next token.
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
    def roots(self) -> Tensor:
        """Slots [B, L] after which there is a draft of an answer: the next token is of one, and
        not its last.
        """
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device) + 1
        after = place >= self.begin[:, None]
        return after & (place < (self.begin + self.long - 1)[:, None])


@torch.inference_mode()
def evidence(model: Any, prompt: VLMPrompt, ends: Sequence[int]) -> Evidence:
    """What ``model`` answers to ``prompt``, until ``ends``, and what it thinks by it."""
    target = VLMTarget(model, Processor(0.0), "target")
    given, prompt = prompt, prompt.to(target.device, target.dtype)
    stop = EndTokens(ends, target.device)
    length = prompt.max_new_tokens
    *_, end = decode_plain(target, prompt, length, row_uniforms(prompt), stop=stop)
    pictures = target.family.image_tokens  # no answer is read on after one
    texts = [
        list(takewhile(lambda i: i not in pictures, end.row(row).tolist()))
        for row in range(len(end.tokens))
    ]
    whole, _ = answered(given, texts, [[True] * len(ids) for ids in texts])
    target.wants_context = True
    aux = AuxStates(list(target.family.layers), lambda: target.running)
    target.prefill(replace(whole, max_new_tokens=1).to(target.device, target.dtype), 0)
    context = target.context
    assert context is not None
    return Evidence(
        target,
        whole.input_ids.to(target.device),
        context.embeddings,
        context.image_mask,
        [target.ordered(states) for states in aux.seen if states is not None],
        context.hidden,
        context.positions,
        prompt.lengths.to(target.device),
        torch.tensor([len(ids) for ids in texts], device=target.device),
        target.family.logits(context.hidden).float().softmax(-1),
    )


@dataclass(frozen=True)
class Reading:
    """How a drafter is taken: the ``network`` bound to its target, the target's ``layers`` whose
    outputs it reads (none: the last states; these ``normed`` or not: None as they are), of a token
    so many places ``late``, with attention to a ``window`` (0: to all), at positions of text alone
    (``skips``), of the tokens ``ids`` [v] (None: all).
    """

    network: BoundNetwork
    layers: tuple[int, ...]
    ids: Tensor | None
    normed: bool | None = None
    late: int = 0
    window: int = 0
    skips: bool = False
    as_text: bool = False  # pictures' slots like those of text

    @classmethod
    def of(cls, network: FeatureNetwork, target: VLMTarget) -> Reading:
        """``network`` as it drafts for ``target``.

        Raises ``ValueError`` where it does not fit, and for what cannot be followed.
        """
        bound = network.bound(target)
        if bound.pictures is not None or bound.mask is not None:
            raise ValueError(
                "doctor follows drafters that read every place and draft one token a pass, got one "
                "with picture_slots or a mask token"
            )
        return cls(bound, tuple(bound.layers), bound.vocabulary.ids)

    def states(self, seen: Evidence) -> Tensor:
        """What is read of the target [B, L, C or F·C]."""
        norm = final_norm(seen.target)
        if self.layers:
            each = [seen.layers[i] for i in self.layers]
            each = [norm(x) for x in each] if self.normed else each
            found = torch.cat(each, dim=-1)
        else:
            found = seen.layers[-1] if self.normed is False else seen.hidden
        return found.roll(self.late, 1) if self.late else found

    def places(self, seen: Evidence) -> Tensor:
        """Positions of the slots [1, L], [B, L] or [3, B, L]."""
        if self.network.parts and seen.positions is not None:
            return seen.positions
        place = torch.arange(seen.tokens.shape[1], device=seen.tokens.device)[None]
        return (place - seen.image.cumsum(1)).clamp(min=0) if self.skips else place


@dataclass(frozen=True)
class Followed:
    """Of each slot's draft at each depth, whether it is the target's own ``token`` [D, B, L], and
    the overlap Σ min(p, q) with the target's distribution [D, B, L].
    """

    seen: Evidence
    token: Tensor
    overlap: Tensor

    @property
    def tau(self) -> float:
        """Tokens a round of greedy chains, by following each answer as decoding would."""
        tokens = rounds = 0
        kept = self.token.cpu()
        ends = zip(self.seen.begin.tolist(), self.seen.long.tolist(), strict=True)
        for row, (begin, long) in enumerate(ends):
            at = 0  # the root, in the answer
            while at < long - 1:
                most = min(len(kept), long - 1 - at)
                slots = [bool(kept[k, row, begin + at - 1 + k]) for k in range(most)]
                accepted = slots.index(False) if False in slots else most
                gained = min(accepted + 1, long - 1 - at)
                tokens, rounds, at = tokens + gained, rounds + 1, at + accepted + 1
        return tokens / max(rounds, 1)

    @property
    def sampled(self) -> float:
        """Tokens a round at temperature 1, were all tokens as likely to be a root."""
        return 1 + sum(float(x) for x in self._along(self.overlap))

    @property
    def by_depth(self) -> list[float]:
        """How often a draft is kept at each depth, those before it kept."""
        found = [1.0, *(float(x) for x in self._along(self.token.float()))]
        return [b / a if a else 0.0 for a, b in pairwise(found)]

    def _along(self, values: Tensor) -> list[Tensor]:
        """The mean product of ``values`` [D, B, L] along each chain, by its length."""
        roots = self.seen.roots
        product = torch.ones_like(values[0])
        found = []
        for k in range(len(values)):
            product = product * values[k].roll(-k, 1)
            there = roots & roots.roll(-k, 1)  # its draft is of the answer, too
            there[:, len(there[0]) - k :] = False
            found.append(product[there].mean() if bool(there.any()) else product.new_zeros(()))
        return found

    def parts(self) -> dict[str, float]:
        """How often the first draft is kept, by what it is of."""
        place = torch.arange(self.token.shape[2], device=self.token.device).expand_as(self.token[0])
        roots = self.seen.roots
        begins = place < self.seen.begin[:, None]  # the root is an answer's first token
        middle = place[roots].float().median()
        kinds = {
            "second words of answers": begins,
            "later words": ~begins,
            f"after at most {int(middle)} tokens": place <= middle,
            "after more": place > middle,
        }
        first = self.token[0].float()
        found = {name: first[roots & own] for name, own in kinds.items()}
        return {name: float(values.mean()) for name, values in found.items() if len(values)}


@torch.inference_mode()
def followed(seen: Evidence, reading: Reading, depth: int = DEPTH) -> Followed:
    """The chains of a drafter taken by ``reading``, from every token of the answers."""
    network = reading.network
    length = seen.tokens.shape[1]
    following = _read(seen, network).roll(-1, 1)
    image = seen.image.roll(-1, 1)
    image = torch.zeros_like(image) if reading.as_text else image
    slots = [network.prompt_slots(following, reading.states(seen), image)]
    places = reading.places(seen)
    probs = seen.probs.roll(-1, 1)  # of the token that a slot's first draft is of
    wanted = probs.argmax(-1)
    tokens, overlaps = [], []
    for step in range(depth):
        bias = _bias(length, step, reading.window).to(slots[0])
        repeated = places.repeat(*([1] * (places.ndim - 1)), step + 1)
        states = network.run(torch.cat(slots, 1), repeated, bias)[:, -length:]
        logits = network.logits(states).float()
        best = logits.argmax(-1)
        own = probs if reading.ids is None else probs[..., reading.ids]
        tokens.append((best if reading.ids is None else reading.ids[best]) == wanted)
        overlaps.append(torch.minimum(own, logits.softmax(-1)).sum(-1))
        before = F.pad(states[:, :-1], (0, 0, 1, 0))
        slots.append(network.slots(following, before, step + 1))
    return Followed(seen, torch.stack(tokens), torch.stack(overlaps))


def _read(seen: Evidence, network: BoundNetwork) -> Tensor:
    """What a drafter reads of prompts and of their answers [B, L, C]."""
    place = torch.arange(seen.tokens.shape[1], device=seen.tokens.device)
    said = network.embed(seen.tokens.clamp(max=seen.probs.shape[-1] - 1))
    asked = network.prompt_embeddings(seen.tokens, seen.embeddings)
    return torch.where((place >= seen.begin[:, None])[..., None], said, asked)


def _bias(length: int, step: int, window: int) -> Tensor:
    """Additive mask [1, 1, (step + 1)·L, (step + 1)·L] of all slots up to a ``step``."""
    wide = (step + 1) * length
    rows = [
        F.pad(rollout_bias(length, k)[0, 0], (0, wide - (k + 1) * length), value=-torch.inf)
        for k in range(step + 1)
    ]
    found = torch.cat(rows)
    if window:
        place = torch.arange(length).repeat(step + 1)
        found = found.masked_fill(place[:, None] - place >= window, -torch.inf)
    return found[None, None]


def final_norm(target: VLMTarget) -> Callable[[Tensor], Tensor]:
    """The target's norm after its last layer; nothing where it has none of a usual name."""
    found = getattr(target.family.decoder, "norm", None)
    return found if isinstance(found, nn.Module) else lambda states: states


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
    yield from _of_attention(reading, seen)
    yield from _of_vocabulary(reading, seen)
    head = _head(reading.network)
    if isinstance(head, Eagle3Head):
        yield from _of_eagle3(reading, head, seen.target)
    if isinstance(head, MSDHead):
        yield from _of_msd(reading, head, seen.target)


def _head(network: BoundNetwork) -> Any:
    return getattr(network, "head", getattr(network, "run", None))


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
        usual = layers_read(most)
        if len(usual) == len(layers) and usual != layers:
            yield Change(
                "usual layers",
                f"it reads EAGLE's own {list(usual)}",
                replace(reading, layers=usual),
            )
    norm = "the states that it learnt from were {} the target's last norm"
    states = {True: "after", False: "before"}
    for normed, where in states.items():
        if reading.normed is not normed and (layers or normed is False or reading.normed is False):
            other = replace(reading, normed=normed)
            yield Change(f"states {where} the norm", norm.format(where), other)
    for late in (-1, 1):
        if reading.late + late in (-1, 0, 1):
            where = "next" if late < 0 else "former"
            other = replace(reading, late=reading.late + late)
            yield Change(f"state of the {where} token", "token and state are paired one off", other)


def _of_attention(reading: Reading, seen: Evidence) -> Iterator[Change]:
    """What is attended, and at which positions."""
    length = seen.tokens.shape[1]
    for window in (0, *(w for w in WINDOWS if w < length)):
        if window != reading.window:
            said = f"window {window}" if window else "no window"
            hint = "it learnt to attend so many tokens" if window else "it learnt to attend all"
            yield Change(said, hint, replace(reading, window=window))
    if bool(seen.image.any()) and not reading.network.parts:
        where = "with" if reading.skips else "without"
        other = replace(reading, skips=not reading.skips)
        yield Change(f"positions {where} pictures", "it counts its slots otherwise", other)


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


def _of_eagle3(reading: Reading, head: Eagle3Head, target: VLMTarget) -> Iterator[Change]:
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
    rope = dict(config.sizes.rope_parameters)
    for said, parameters in _ropes(rope, target):
        made = copy.copy(head)
        made._modules = dict(head._modules)
        sizes: Any = copy.deepcopy(config.sizes)
        sizes.rope_parameters = parameters
        made.turns = type(head.turns)(sizes).to(head.fc.weight.device)
        yield other(said, f"it learnt with {said}, its config says otherwise", made)
    for inverse in (False, True):
        made = copy.deepcopy(head)
        repaired(made.layers[0].self_attn, int(config.sizes.head_dim), inverse)
        yield other(NAMES["rotary pairs", inverse], HINTS["rotary pairs"], made)
    made = copy.deepcopy(head)
    swapped(made.layers[0].self_attn)
    yield other(NAMES["halves", False], HINTS["halves"], made)


def _of_msd(reading: Reading, head: MSDHead, target: VLMTarget) -> Iterator[Change]:
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
    for inverse in (False, True):
        made = copy.deepcopy(head)
        for layer in made.layers:
            repaired(layer.self_attn, head.config.head_dim, inverse)
        yield other(NAMES["rotary pairs", inverse], HINTS["rotary pairs"], made)


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


@torch.no_grad()
def repaired(attention: Any, width: int, inverse: bool) -> None:
    """Reorder rotary pairs from neighbours to halves, or back."""
    for projection in (attention.q_proj, attention.k_proj):
        for values in (projection.weight, projection.bias):
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


@dataclass(frozen=True)
class Diagnosis:
    """A drafter as it is, and the ``changes``, the best first: by tokens a round at temperature 1,
    of which few answers tell more than of greedy chains.
    """

    own: Followed
    changes: Sequence[tuple[Change, Followed]]

    @property
    def best(self) -> tuple[Change, Followed] | None:
        """The one change that is worth it; None where none is."""
        found = self.changes[0] if self.changes else None
        worth = found is not None and found[1].sampled > WORTH * self.own.sampled
        return found if worth else None


def diagnose(seen: Evidence, reading: Reading, depth: int = DEPTH) -> Diagnosis:
    """What is kept of the drafts of a drafter taken by ``reading``, and under each change."""
    own = followed(seen, reading, depth)
    tried = [(change, followed(seen, change.reading, depth)) for change in changes(reading, seen)]
    return Diagnosis(own, sorted(tried, key=lambda pair: -pair[1].sampled))


def doctor(
    model: str, drafter: str | None, data: Sequence[str] = (), questions: int = 16, seed: int = 0
) -> tuple[Diagnosis, str]:
    """What is kept of the drafts of a ``drafter`` (a folder; None: the only one of its kind beside
    the ``model``) on held-out ``questions`` of chats in ``data``, or on Python code for a text
    model without; and the drafter's folder.

    Raises ``ValueError`` for drafters that do not read the target's states.
    """
    folder = find_target(model)
    place = find(drafter) if drafter else _beside(folder)
    kind = method_of(place)
    if kind not in METHODS:
        raise ValueError(
            f"doctor follows drafters that read the target's states ({', '.join(METHODS)}), got "
            f"{place} of method {kind or 'none'}"
        )
    if sees(folder) and not data:
        raise ValueError("data must be given of chats that show pictures; give --data FILE")
    target = load_frozen(folder, "cpu", "float32")
    network = load_drafter(kind, place, target.model)
    with TemporaryDirectory() as out:
        prompt, ends = asked(folder, target, data, questions, Path(out), seed)
    seen = evidence(target.model, prompt, ends)
    return diagnose(seen, Reading.of(network, seen.target)), str(place)


def _beside(folder: Path) -> Path:
    """The drafter that lies beside the model in ``folder``."""
    places = [folder / "drafters" / KINDS[kind].place for kind in METHODS]
    found = [place for place in places if (place / "config.json").is_file()]
    if len(found) != 1:
        said = ", ".join(place.name for place in found) or "none"
        kinds = ", ".join(METHODS)
        raise ValueError(
            f"{folder} must have one drafter of {kinds} beside it, got {said}; name it"
        )
    return found[0]


def asked(
    folder: Path, target: VLMTarget, data: Sequence[str], count: int, out: Path, seed: int
) -> tuple[VLMPrompt, Sequence[int]]:
    """Questions that are not trained on, and the tokens that end answers."""
    if data:
        source = Data(Places(list(data), conversations), 0.5, None, "skip", None)
        opened = source.opened(folder, lambda: target, out, seed)
        return opened.prompts(count), opened.reader.stops
    words = load_tokenizer(weights_folder(folder))
    held = windows(text_stream(words, out, held_out=True), 0, count, PROMPT, seed)
    return VLMPrompt(padded(held.tolist()), LONGEST), TextPipeline(target.model, words).ends()
