"""Where blocks come from: a diffusion language model that reads the tokens, or a drafter that reads
hidden states.

A source gives logits over the target's vocabulary, over the tokens it knows of it, or what
``follow`` makes such logits of; tokens that the two do not share are barred before any softmax.

Shape letters: B batch, K block, S what is said of a place (logits or what they are made of), M
committed tokens of a round, N tree nodes, L prompt positions, F layers read, C width, R size of a
memory, v the drafter's vocabulary, V the target's.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.diffusion_drafters.models.dflash import DFlash, check_layers
from specmm.diffusion_drafters.models.masked import DiffusionLM, block_logits
from specmm.diffusion_drafters.recorded_drafts import DrafterVocabulary, NextLogits
from specmm.drafter import Feedback
from specmm.hf.target import VLMTarget
from specmm.hf.translation import Translation
from specmm.processors import History


class BlockSource(Protocol):
    """Predicts the tokens after the root, all at once. ``longest`` is the most it can (None: no
    limit), ``end`` the target's id of the token that ends a text for it, ``known`` says what its v
    tokens are. ``follow``, where there is one, makes of what the source says of a position the
    logits after the tokens that were drafted before it.
    """

    longest: int | None
    end: int | None
    known: DrafterVocabulary
    follow: NextLogits | None

    def begin(self, feedback: Feedback, most: int) -> None:
        """Start a batch after the target's prefill, with rounds of at most ``most`` drafts."""
        ...

    def start_row(self, row: int) -> None:
        """Read the prompt that the target has just admitted to ``row``."""
        ...

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        """Logits [B, K, v] of the ``block`` positions after ``feedback.token``, or what ``follow``
        makes logits of [B, K, S]; to be called once a round.
        """
        ...


class DiffusionSource:
    """A diffusion language model for ``target``: it reads all tokens afresh each round, or the last
    it has room for.

    ``translation`` maps the target's tokens to the model's (None: the same ones); without one, a
    ``ValueError`` is raised when the vocabularies differ by more than padding.
    """

    longest: int | None = None
    follow: NextLogits | None = None

    def __init__(
        self, model: DiffusionLM, target: VLMTarget, translation: Translation | None = None
    ) -> None:
        self.model, self.target = model, target
        self.translation = shared_tokens(translation, model.vocabulary, model.mask, target)
        self.end, self.known = (
            ends_with(self.translation, model.end),
            DrafterVocabulary(target.family.vocabulary),
        )

    def begin(self, feedback: Feedback, most: int) -> None:
        """Read the prompts."""
        if most >= self.model.room:
            raise ValueError(
                f"block must be shorter than the drafter's {self.model.room} positions, got {most}"
            )
        prompt = self.target.prompt
        self.history = History(
            prompt.input_ids, prompt.lengths, prompt.room - prompt.input_ids.shape[1] + most
        )
        self.history.append(feedback.token[:, None], torch.ones_like(feedback.token))

    def start_row(self, row: int) -> None:
        """Read the prompt admitted."""
        self.history.take(row, self.target.started.history)

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        """Logits [B, K, V] of the block; see :class:`BlockSource`."""
        if feedback.result is not None and feedback.tokens is not None:
            self.history.append(feedback.tokens, feedback.result.kept)
        return self.behind(feedback.token.new_empty(len(feedback.token), 0), block)

    def behind(self, drafted: Tensor, block: int) -> Tensor:
        """Logits [B, K, V] of the ``block`` positions after the tokens so far and ``drafted`` [B,
        M] ones.
        """
        count = drafted.shape[1]
        tokens, lengths = self._window(self.model.room - block - count)
        where = lengths[:, None] + torch.arange(count, device=lengths.device)
        tokens, lengths = F.pad(tokens, (0, count)).scatter(1, where, drafted), lengths + count
        ragged = bool((lengths != tokens.shape[1]).any())
        found = block_logits(
            self.model, self.translation.to_drafter(tokens), block, lengths if ragged else None
        )
        return self.translation.from_drafter(found)

    def latest(self, row: int, count: int) -> list[int]:
        """The last ``count`` tokens of a row at most, the root last."""
        stop = int(self.history.lengths[row])
        return self.history.tokens[row, max(stop - count, 0) : stop].tolist()

    def _window(self, most: int) -> tuple[Tensor, Tensor]:
        """The last ``most`` tokens of each row at most [B, P], padded at the right, and how many
        those are [B].
        """
        lengths = self.history.lengths.clamp(max=most)
        first = self.history.lengths - lengths
        order = torch.arange(int(lengths.max()), device=lengths.device)
        return self.history.tokens.gather(1, first[:, None] + order), lengths


def shared_tokens(
    translation: Translation | None, vocabulary: int, mask: int, target: VLMTarget
) -> Translation:
    """``translation``, or that of a drafter with ``target``'s tokens; whatever stands for ``mask``
    is never drafted.

    Raises ``ValueError`` when there is none and the vocabularies differ by more than padding.
    """
    found = translation or Translation.same(vocabulary, target.family.vocabulary)
    strangers = (found.ids == mask).nonzero()[:, 0].tolist()
    found.ban([*strangers, *target.image_tokens])
    return found


def ends_with(translation: Translation, end: int | None) -> int | None:
    """The target's token for the drafter's ``end``; None where there is none."""
    if end is None:
        return None
    same = ((translation.ids == end) & translation.shared).nonzero()
    return int(same[0]) if len(same) else None


def drafter_vocabulary(model: DFlash, vocabulary: int) -> DrafterVocabulary:
    """Which of the target's ``vocabulary`` tokens a DFlash drafter knows.

    Raises ``ValueError`` for one that has tokens, pairs or a memory of its own, of another
    vocabulary.
    """
    own = any(part is not None for part in (model.ids, model.markov, model.recurrent))
    if len(model.t2d) != vocabulary and own:
        raise ValueError(
            f"drafter must be of the target's {vocabulary} tokens, got one of {len(model.t2d)}"
        )
    return DrafterVocabulary(vocabulary, model.ids)


class DFlashSource:
    """A DFlash drafter of ``target``: its context is what chosen layers of the target said of the
    committed tokens.

    Raises ``ValueError`` for a target that has not the layers, the width or the mask token's
    embedding.
    """

    longest: int | None
    end: int | None = None
    follow: NextLogits | None = None

    def __init__(self, model: DFlash, target: VLMTarget) -> None:
        layers, width = target.family.layers, model.fc.weight.shape[0]
        check_layers(model.config.layers, len(layers))
        found = (target.family.config.hidden_size, target.family.vocabulary)
        if found[0] != width or found[1] <= model.config.mask:
            raise ValueError(
                f"drafter must have the target's width {found[0]} and a mask among its {found[1]} tokens, "
                f"got width {width} and mask {model.config.mask}"
            )
        self.model = copy.copy(
            model
        )  # the same weights, but a cache of its own: several runs may go on in turn
        self.target, self.longest = target, model.config.block - 1
        read = [layers[i] for i in model.config.layers]
        self.aux_layers, self.newcomer = (
            AuxStates(read, lambda: target.running),
            AuxStates(read, lambda: target.starting_row),
        )
        self.lasts: dict[
            int, Tensor
        ] = {}  # of rows that begin anew: the context [F·C] of the prompt's last token
        self.known = drafter_vocabulary(model, found[1])
        ids = torch.arange(found[1], device=target.device) if model.ids is None else model.ids
        never = torch.tensor([model.config.mask, *target.image_tokens], device=ids.device)
        self.barred = torch.isin(ids, never).nonzero()[:, 0]  # of the drafter's tokens
        self.head = target.family.logits_of(model.ids)
        if model.markov is not None or model.recurrent is not None:
            self.follow = self._behind
        if model.recurrent is not None:
            self.said = model.recurrent.table(
                target.family.decoder.get_input_embeddings().weight
            )  # [V, R]

    def begin(self, feedback: Feedback, most: int) -> None:
        """Read what the target's layers said of the prompts."""
        prompt = self.target.prompt
        self.model.begin(len(prompt.lengths), prompt.room, most + 1)
        self.model.read_prompt(self.aux_layers.context(), prompt.lengths)

    def start_row(self, row: int) -> None:
        """Read the prompt admitted, but for its last token: the next round reads that as what it
        committed.
        """
        context, alone = self.newcomer.context(), copy.copy(self.model)
        alone.begin(1, context.shape[1], 1)
        alone.read_prompt(context, self.target.started.prompt.lengths)
        alone.cache.lengths -= 1
        self.model.cache.take(row, alone.cache)
        self.lasts[row] = context[0, -1]

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        """What is said of the block [B, K, S]; see :class:`BlockSource`."""
        if feedback.result is not None:
            path = feedback.result.path.clamp(min=0)
            context = self.aux_layers.context()  # [B, N, F·C]
            for row in list(self.lasts):
                context[row, 0] = self.lasts.pop(row)
            kept = context.gather(1, path[..., None].expand(-1, -1, context.shape[-1]))
            self.model.read(kept, feedback.result.kept)
        masks = feedback.token.new_full(
            (len(feedback.token), self.model.config.block - 1), self.model.config.mask
        )
        states = self.model.draft(
            self.target.embed(torch.cat([feedback.token[:, None], masks], dim=1))
        )
        states = states[:, 1 : block + 1]
        return (
            self._scored(states)
            if self.model.recurrent is None
            else self.model.recurrent.places(states)
        )

    def _scored(self, states: Tensor) -> Tensor:
        """Logits [..., v] of ``states`` [..., C], -inf where nothing may be drafted."""
        return self.head(states).float().index_fill_(-1, self.barred, float("-inf"))

    def _behind(
        self, place: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`NextLogits`: with a memory ``place`` holds a state, without one logits."""
        if self.model.recurrent is not None:
            state, memory = self.model.recurrent(place, F.embedding(before, self.said), memory)
            place = self._scored(state)
        return (
            place if self.model.markov is None else place + self.model.pairs(before).float()
        ), memory


class AuxStates:
    """What ``layers`` gave in their latest forward, seen by hooks that go when this object goes.

    ``listens`` says whether a forward counts: others may use the same layers.
    """

    def __init__(self, layers: list[Any], listens: Callable[[], bool] = lambda: True) -> None:
        self.seen: list[Tensor | None] = [None] * len(layers)
        for place, layer in enumerate(layers):
            handle = layer.register_forward_hook(_recorder(self.seen, place, listens))
            weakref.finalize(self, handle.remove)

    def context(self) -> Tensor:
        """The layers' outputs side by side, [B, L or N, F·C]."""
        return torch.cat([states for states in self.seen if states is not None], dim=-1)


def _recorder(seen: list[Tensor | None], place: int, listens: Callable[[], bool]) -> Any:
    def record(_: Any, args: Any, output: Any) -> None:
        if listens():
            seen[place] = output if isinstance(output, Tensor) else output[0]

    return record
