"""Answers of alternating text and pictures, by models that write both (Chameleon, Anole).

Such a model begins a picture with one token, draws it token by token and ends it with another. Its
transformers class masks picture tokens in answers; here they are allowed. In text, tokens are
allowed as in the class itself; inside a picture, only picture tokens until it is complete, and then
its end (as Anole, arXiv 2407.06135, masks its logits). A picture may begin only if all of it fits
into the answer.

The progress of an open picture is one number: -1 in text, else the picture tokens so far.

Shape letters: B batch, N tree nodes, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree
from specmm.extending.registry import named
from specmm.hf.models.target import ProbsProcessor, VLMTarget
from specmm.hf.pictures.picture_tokens import Decoder, Painting, PictureModel
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.verify.rule import VerifyResult

WRITERS = {"chameleon": "specmm.hf.pictures.chameleon:CHAMELEON"}  # descriptions by model type
PIXELS = "specmm.image_ar.autoencoder:to_uint8"
DRAFTING = ("prompt-lookup", "sjd")  # the methods that draft such answers
SERVING = ("ar", *DRAFTING, "auto")
TEXT = -1  # no picture is open
IN_TEXT, IN_FULL_TEXT, IN_PICTURE, AT_END = range(4)  # the masks of tokens, by where they come


def writer_of(model: PreTrainedModel, name: str = "the model") -> PictureModel:
    """The description of ``model``; raises ``ValueError`` for one that writes text alone."""
    kind = model.config.model_type
    if kind not in WRITERS:
        raise ValueError(
            f"draw=True needs a model that writes text and pictures in turn "
            f"({', '.join(WRITERS)}), got {name} of type {kind!r}; leave draw out"
        )
    writer: PictureModel = named(WRITERS[kind])
    return writer


class Grammar:
    """The tokens allowed at each place of an answer with pictures.

    ``begin`` and ``end`` are the ids around a picture of ``length`` T tokens of ``pictures`` [V].
    """

    def __init__(self, begin: int, end: int, length: int, pictures: Tensor) -> None:
        self.begin = begin
        self.end = end
        self.length = length
        self.pictures = pictures
        masks = torch.stack([~pictures, ~pictures, pictures, torch.zeros_like(pictures)])
        masks[IN_FULL_TEXT, begin] = False
        masks[AT_END, end] = True
        self.masks = masks  # [4, V]
        self.codes = frozenset(pictures.nonzero()[:, 0].tolist())

    @classmethod
    def of(cls, model: PreTrainedModel, name: str) -> Grammar:
        """The grammar of ``model``; raises ``ValueError`` for a model that cannot draw."""
        facts = writer_of(model, name)
        assert facts.marks is not None, "it is among WRITERS"
        begin, end = facts.marks(model)
        layout = facts.layout(model, None)
        return cls(begin, end, layout.length, layout.allowed.masks[0].to(model.device))

    def of_words(self) -> Grammar:
        """A copy for answers in which no picture may begin."""
        grammar = copy.copy(self)
        grammar.masks = self.masks.clone()
        grammar.masks[IN_TEXT, self.begin] = False
        return grammar

    def check_room(self, max_new_tokens: int) -> None:
        """Raise ``ValueError`` if no picture fits into answers of ``max_new_tokens``."""
        if max_new_tokens < self.length + 2:
            raise ValueError(
                f"max_new_tokens must be at least {self.length + 2} for answers with pictures, "
                f"each {self.length} tokens between two, got {max_new_tokens}"
            )

    def after(self, opened: Tensor, tokens: Tensor) -> Tensor:
        """Progress of pictures [...] after one more of ``tokens`` [...]."""
        closed = (opened == TEXT) | (tokens == self.end)
        states = torch.where(closed, TEXT, (opened + 1).clamp(max=self.length))
        return torch.where(tokens == self.begin, 0, states)

    def after_text(self, ids: Sequence[int]) -> int:
        """Progress after a prompt of ``ids``, which may hold whole pictures in any form."""
        begins = [i for i, token in enumerate(ids) if token == self.begin]
        if not begins or self.end in ids[begins[-1] :]:
            return TEXT
        return min(len(ids) - begins[-1] - 1, self.length)

    def along(self, opened: Tensor, tree: DraftTree) -> Tensor:
        """Progress [B, N] after each node of ``tree``, whose root follows ``opened`` [B]."""
        root = self.after(opened, tree.tokens[:, 0])[:, None]
        parents = tree.shape.parents.clamp(min=0).expand_as(tree.tokens)
        states = root.expand_as(tree.tokens)
        for _ in range(tree.shape.depth):  # level by level
            states = self.after(states.gather(1, parents), tree.tokens)
            states = torch.cat([root, states[:, 1:]], dim=1)
        return states

    def masked(self, logits: Tensor, opened: Tensor, left: Tensor) -> Tensor:
        """``logits`` [B, N, V] with ``-inf`` for tokens not allowed at the progress ``opened``
        [B, N], if ``left`` [B or 1, N] tokens remain in the answer.
        """
        fits = left >= self.length + 2
        states = torch.where(fits, IN_TEXT, IN_FULL_TEXT)
        states = torch.where(opened == TEXT, states, IN_PICTURE)
        states = states.masked_fill(opened == self.length, AT_END)
        return logits.masked_fill(~self.masks[states], float("-inf"))

    def parts(self, ids: Sequence[int]) -> list[tuple[bool, list[int]]]:
        """The ``ids`` of an answer as runs of text and pictures, and whether each is a picture.

        The tokens around pictures belong to neither.
        """
        parts: list[tuple[bool, list[int]]] = []
        apart = True
        for token in ids:
            if token in (self.begin, self.end):
                apart = True
                continue
            drawn = token in self.codes
            if apart or drawn != parts[-1][0]:
                parts.append((drawn, []))
            parts[-1][1].append(token)
            apart = False
        return parts


class InterleavedTarget(VLMTarget):
    """A model whose answers hold pictures, by its :class:`Grammar`."""

    def __init__(
        self, model: PreTrainedModel, processor: ProbsProcessor, name: str = "vlm"
    ) -> None:
        self.grammar = Grammar.of(model, name)
        super().__init__(model, processor, name)
        self.opened: Tensor  # [B], after what is in the cache
        self.at: Tensor  # [B, N], after each token that is being scored

    @property
    def length(self) -> int:
        """T."""
        return self.grammar.length

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., V], picture tokens included, which the model's class masks."""
        return self.family.all_logits(states)

    def prefill(self, prompt: VLMPrompt, scratch: int) -> TargetOutput:
        """See :class:`specmm.hf.models.target.VLMTarget`; a prompt may end with the token that
        begins a picture.

        Raises ``ValueError`` for a prompt that ends inside a picture, and for answers too short for
        the picture that it begins.
        """
        self.grammar.check_room(prompt.max_new_tokens)
        begun = [self.grammar.after_text(row) for row in prompt.rows()]
        if max(begun) > 0:
            raise ValueError(
                f"a prompt must hold whole pictures, got one that ends after {max(begun)} tokens "
                "of one; leave them out"
            )
        self.opened = torch.tensor(begun, device=self.device)
        self.at = self.opened[:, None]
        return super().prefill(prompt, scratch)

    def start_row(self, row: int, prompt: VLMPrompt) -> TargetOutput:
        output = super().start_row(row, prompt)
        row_target: Any = self.started
        self.opened[row] = row_target.opened[0]
        return output

    def score(self, tree: DraftTree) -> TargetOutput:
        self.at = self.grammar.along(self.opened, tree)
        return super().score(tree)

    def commit(self, result: VerifyResult) -> None:
        """Keep the accepted nodes."""
        super().commit(result)
        last = result.path.gather(1, (result.kept[:, None] - 1).clamp(min=0))
        state = self.at.gather(1, last)[:, 0]
        self.opened = torch.where(result.kept > 0, state, self.opened)  # 0: a row that has ended

    def step(self, tokens: Tensor) -> TargetOutput:
        self.opened = self.grammar.after(self.opened, tokens)
        self.at = self.opened[:, None]
        return super().step(tokens)

    def guided(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, N, V], ``-inf`` for tokens not allowed after ``positions`` [B, N]."""
        drawn = positions - self.begins[:, None] + 1
        remaining = self.prompt.max_new_tokens - drawn
        return self.grammar.masked(super().guided(logits, positions), self.at, remaining)


class PictureReader:
    """Splits answers of ``model`` into texts and pictures; its decoder is read from ``folder``."""

    def __init__(self, model: PreTrainedModel, folder: Path, name: str = "the model") -> None:
        self.facts = writer_of(model, name)
        self.model = model
        self.folder = folder
        self.grammar = Grammar.of(model, name)
        self._decoder: Decoder | None = None

    def check(self, max_new_tokens: int) -> None:
        """Raise ``ValueError`` unless ``max_new_tokens`` fit a picture that can be decoded."""
        self.grammar.check_room(max_new_tokens)
        self.decoder()

    def decoder(self) -> Decoder:
        """The decoder from tokens to pixels, read once; ``ValueError`` if the folder has none."""
        if self._decoder is None:
            self._decoder = self.facts.decode(self.model, self.folder)
        return self._decoder

    def text(self, ids: Sequence[int], decode: Callable[[list[int]], str], placeholder: str) -> str:
        """The text of ``ids`` with a ``placeholder`` for each picture."""
        parts = self.grammar.parts(ids)
        return "".join(placeholder if drawn else decode(run) for drawn, run in parts)

    @torch.inference_mode()
    def pictures(self, answers: Sequence[Sequence[int]]) -> list[list[Image.Image]]:
        """The pictures of each of ``answers``, in order.

        Raises ``ValueError`` if the folder has no decoder for them.
        """
        spans = [[run for drawn, run in self.grammar.parts(row) if drawn] for row in answers]
        complete = [[run for run in row if len(run) == self.grammar.length] for row in spans]
        if not any(complete):
            return [[] for _ in answers]
        decode = self.decoder()
        layout = self.facts.layout(self.model, None)
        painting = Painting("", torch.Generator(), {})

        def picture(run: list[int]) -> Image.Image:
            tokens = torch.tensor([run], device=self.model.device)
            pixels = named(PIXELS)(decode(tokens, layout, painting))
            return Image.fromarray(pixels[0].cpu().numpy())

        return [[picture(run) for run in row] for row in complete]
