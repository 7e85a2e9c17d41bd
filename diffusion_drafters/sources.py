"""Sources of blocks: a diffusion language model that reads tokens, a DFlash drafter that reads
hidden states.

A source returns logits over the target's vocabulary or the drafter's part of it, or the inputs from
which ``next_logits`` computes such logits. Tokens that drafter and target do not share are masked
before any softmax.

Shape letters: B batch, K block, S width of a place (logits, or inputs for them), M drafted tokens,
N tree nodes, P prefix positions, F layers read, C width, R size of a memory, v the drafter's
vocabulary, V the target's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.core.drafter import DrafterVocabulary, Feedback
from specmm.core.processors import History
from specmm.diffusion_drafters.models.block_heads import DominoHead
from specmm.diffusion_drafters.models.dflash import DFlash, check_layers
from specmm.diffusion_drafters.models.masked import DiffusionLM, block_logits
from specmm.hf.drafters.translation import Translation
from specmm.hf.models.target import VLMTarget


class NextLogits(Protocol):
    """Computes the logits of a place of a block, given the previously drafted token."""

    def __call__(
        self, place: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [..., v] of ``place`` [..., S] after the target's tokens ``before`` [...], and the
        memory [..., R] for the next place, if the drafter has one.

        ``memory`` is the one returned for the previous place (None at the block's first place).
        """


class BlockSource(Protocol):
    """Predicts the tokens after the root, all at once.

    ``longest`` is the longest block (None: no limit), ``end`` the target's id of its end token,
    ``vocabulary`` the number of tokens that its logits cover.
    """

    longest: int | None
    end: int | None
    vocabulary: DrafterVocabulary

    @property
    def next_logits(self) -> NextLogits | None:
        """The function that computes a place's logits from the tokens drafted before it, if any."""

    def begin(self, feedback: Feedback, most: int) -> None:
        """Start a batch after the target's prefill, with rounds of at most ``most`` drafts."""

    def start_row(self, row: int) -> None:
        """Read the prompt with which the target has just started ``row``."""

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        """Logits [B, K, v] of the ``block`` positions after ``feedback.token``; called once a
        round.

        If the source has ``next_logits``, their inputs [B, K, S] instead.
        """


class DiffusionSource:
    """A diffusion language model for ``target`` that reads all tokens again in each round, or as
    many of the latest tokens as it has room for.

    ``translation`` maps the target's tokens to the model's (None: they are the same). Raises
    ``ValueError`` without one if the vocabularies differ by more than padding.
    """

    longest: int | None = None
    next_logits: NextLogits | None = None

    def __init__(
        self, model: DiffusionLM, target: VLMTarget, translation: Translation | None = None
    ) -> None:
        self.model = model
        self.target = target
        self.translation = shared_tokens(translation, model.vocabulary, model.mask, target)
        self.end = end_token(self.translation, model.end)
        self.vocabulary = DrafterVocabulary(target.family.vocabulary)

    def begin(self, feedback: Feedback, most: int) -> None:
        """See :class:`BlockSource`. Raises ``ValueError`` for a block the model cannot hold."""
        if most >= self.model.room:
            raise ValueError(
                f"block must be shorter than the drafter's {self.model.room} positions, got {most}"
            )
        prompt = self.target.prompt
        room = prompt.room - prompt.input_ids.shape[1] + most
        self.history = History(prompt.input_ids, prompt.lengths, room)
        self.history.append(feedback.token[:, None], torch.ones_like(feedback.token))

    def start_row(self, row: int) -> None:
        self.history.take(row, self.target.started.history)

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        if feedback.result is not None and feedback.tokens is not None:
            self.history.append(feedback.tokens, feedback.result.kept)
        return self.logits_after(feedback.token.new_empty(len(feedback.token), 0), block)

    def logits_after(self, drafted: Tensor, block: int) -> Tensor:
        """Logits [B, K, V] of the ``block`` positions after the text and ``drafted`` [B, M]."""
        count = drafted.shape[1]
        tokens, lengths = self._window(self.model.room - block - count)
        if count:
            where = lengths[:, None] + torch.arange(count, device=lengths.device)
            tokens = F.pad(tokens, (0, count)).scatter(1, where, drafted)
            lengths = lengths + count
        ragged = bool((lengths != tokens.shape[1]).any())
        read = self.translation.to_drafter(tokens)
        logits = block_logits(self.model, read, block, lengths if ragged else None)
        return self.translation.from_drafter(logits)

    def latest(self, row: int, count: int) -> list[int]:
        """At most the last ``count`` tokens of a row, ending with the root."""
        stop = int(self.history.lengths[row])
        return self.history.tokens[row, max(stop - count, 0) : stop].tolist()

    def _window(self, most: int) -> tuple[Tensor, Tensor]:
        """Each row's last tokens, at most ``most`` [B, P], right-padded, and their counts [B]."""
        lengths = self.history.lengths.clamp(max=most)
        first = self.history.lengths - lengths
        order = torch.arange(int(lengths.max()), device=lengths.device)
        return self.history.tokens.gather(1, first[:, None] + order), lengths


def shared_tokens(
    translation: Translation | None, vocabulary: int, mask: int, target: VLMTarget
) -> Translation:
    """``translation`` (None: the identity), without ``mask`` and the target's picture tokens.

    Raises ``ValueError`` for None if the vocabularies differ by more than padding.
    """
    shared = translation or Translation.same(vocabulary, target.family.vocabulary)
    masks = (shared.ids == mask).nonzero()[:, 0].tolist()
    shared.ban([*masks, *target.image_tokens])
    return shared


def end_token(translation: Translation, end: int | None) -> int | None:
    """The target's token for the drafter's ``end``; None if there is none."""
    if end is None:
        return None
    same = ((translation.ids == end) & translation.shared).nonzero()
    return int(same[0]) if len(same) else None


class DFlashSource:
    """A DFlash drafter of ``target``; its context is the states of chosen layers at the committed
    tokens.

    Raises ``ValueError`` for a target that lacks the layers, the width or the mask token's
    embedding, and for a drafter whose vocabulary or head belongs to another target.
    """

    state: ClassVar[tuple[str, ...]] = ("model",)
    longest: int | None
    end: int | None = None

    def __init__(self, model: DFlash, target: VLMTarget) -> None:
        check_dflash(model, target)
        family = target.family
        # The same weights with another cache: several runs may be interleaved.
        self.model = copy.copy(model)
        self.target = target
        self.dtype = model.fc.weight.dtype
        self.longest = model.config.longest
        target.wants_context = True
        # transformers' states of the last layer are those after the final norm
        target.read_layers(model.config.layers, model.config.normed)
        self.vocabulary = DrafterVocabulary(family.vocabulary, model.ids)
        ids = model.ids
        if ids is None:
            ids = torch.arange(family.vocabulary, device=target.device)
        never = torch.tensor([model.config.mask, *target.image_tokens], device=ids.device)
        self.barred = torch.isin(ids, never).nonzero()[:, 0]  # places among the drafter's tokens
        self.embed = model.embed_tokens or family.plain_embedding
        self.head, self.token_table = self._read_weights()

    def _read_weights(self) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
        """The head, and the table [V, R] if the drafter has our memory. Both derive from the
        target's weights and are recomputed in place when those change.
        """
        model, family = self.model, self.target.family
        head = model.lm_head or family.logits_of(model.ids)
        if model.recurrent is None:
            return head, None
        return head, model.recurrent.table(family.decoder.get_input_embeddings().weight)

    @property
    def next_logits(self) -> NextLogits | None:
        """The function that completes logits place by place, if the model has a head for it."""
        heads = (self.model.markov, self.model.recurrent, self.model.markov_head)
        return self._next_logits if any(head is not None for head in heads) else None

    def begin(self, feedback: Feedback, most: int) -> None:
        self._read_weights()
        prompt = self.target.prompt
        self.model.begin(len(prompt.lengths), prompt.room, most + 1)
        self.model.read_prompt(read_of(self.target), prompt.lengths)

    def start_row(self, row: int) -> None:
        """See :class:`BlockSource`; the prompt's last token is read in the next round."""
        context = read_of(self.target.started)
        row_model = copy.copy(self.model)
        del row_model.cache  # which is the batch's
        row_model.begin(1, context.shape[1], 1)
        row_model.read_prompt(context, self.target.started.prompt.lengths)
        row_model.cache.lengths -= 1
        self.model.cache.widen(self.target.cache.size.capacity)
        self.model.cache.take(row, row_model.cache)

    def join(self) -> None:
        """Add a row at the end, which is then started."""
        cache = self.model.cache
        cache.join()
        cache.near = cache.device.type == "cpu"

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""
        self.model.cache.leave(row)

    def absorb(self, feedback: Feedback) -> None:
        """Read the committed states of a round that was drafted by another drafter."""
        assert feedback.result is not None
        self.model.read(feedback.kept_hidden(), feedback.result.kept)

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        """See :class:`BlockSource`; one forward reads the last token and masks. With an ``anchor``
        the last token's own position predicts the first token.
        """
        if feedback.result is not None:
            self.absorb(feedback)
        config = self.model.config
        masks = feedback.token.new_full((len(feedback.token), config.block - 1), config.mask)
        ids = torch.cat([feedback.token[:, None], masks], dim=1)
        first = 0 if config.anchor else 1
        return self.places(self.model.draft(self.embed(ids))[:, first : block + first])

    def places(self, states: Tensor) -> Tensor:
        """Logits, or inputs for them, [..., S] from the ``states`` [..., C] of drafts."""
        if self.model.recurrent is not None:
            return self.model.recurrent.places(states)
        head = self.model.markov_head
        read = [] if head is None else [head.read(states)]
        return torch.cat([self._scored(states), *read], dim=-1)

    def _scored(self, states: Tensor) -> Tensor:
        """Logits [..., v] of ``states`` [..., C], -inf for tokens that are never drafted."""
        return self.head(states).float().index_fill_(-1, self.barred, float("-inf"))

    def _next_logits(
        self, place: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`NextLogits`: with our memory ``place`` holds a state, otherwise logits and
        what a release's heads have ``read`` there.
        """
        if self.model.recurrent is not None:
            assert self.token_table is not None
            tokens = F.embedding(before, self.token_table)
            state, memory = self.model.recurrent(place, tokens, memory)
            place = self._scored(state)
        logits, read = place.tensor_split([self.vocabulary.count], dim=-1)
        head = self.model.markov_head
        if head is not None:
            tokens = self.embed(before) if isinstance(head, DominoHead) else before
            added, memory = head(read.to(self.dtype), tokens, memory)
            logits = logits + added.float()
        if self.model.markov is not None:
            logits = logits + self.model.pairs(before).float()
        return logits, memory


def read_of(target: VLMTarget) -> Tensor:
    """The states [B, L, F·C] that a drafter reads of the prompt of ``target``."""
    assert target.context is not None, "the target keeps a context for drafters that want one"
    return target.context.hidden


def check_dflash(model: DFlash, target: VLMTarget) -> None:
    """Raise ``ValueError`` unless ``model`` can read and draft for ``target``."""
    check_layers(model.config.layers, len(target.family.layers))
    width = model.fc.weight.shape[0]
    own_width = target.family.config.hidden_size
    vocabulary = target.family.vocabulary
    if own_width != width or vocabulary <= model.config.mask:
        raise ValueError(
            f"drafter must have the target's width {own_width} and a mask among its {vocabulary} "
            f"tokens, got width {width} and mask {model.config.mask}"
        )
    parts = (model.ids, model.markov, model.recurrent, model.markov_head, model.lm_head)
    bound = any(part is not None for part in (*parts, model.embed_tokens))
    if bound and len(model.t2d) != vocabulary:
        raise ValueError(
            f"drafter must be of the target's {vocabulary} tokens, got one of {len(model.t2d)}"
        )
