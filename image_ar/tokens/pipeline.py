"""``LlamaGenPipeline``: pictures from a token image model, by any of its methods, with a
certificate.

Shape letters: B pictures of a batch, h latent side, T = h² tokens a picture, D levels of a block
drafter, K ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor

from specmm import methods, zoo
from specmm.choose.when_compiled import Compiled
from specmm.extending.kinds import either, texts_of
from specmm.extending.outside import with_own
from specmm.image_ar.autoencoder import VQModel, to_uint8
from specmm.image_ar.calls import Callback, Classes, Tell, labels_of, listed
from specmm.image_ar.files import read_settings
from specmm.image_ar.shared import ImageOutput, made_when_asked
from specmm.image_ar.tokens.assemble import PictureParts
from specmm.image_ar.tokens.captions import CaptionEncoder
from specmm.image_ar.tokens.gpt import Transformer
from specmm.image_ar.tokens.loading import (
    DrafterHead,
    DrafterHeads,
    kind_of,
    load_drafters,
    load_gpt,
    load_vq,
    save_drafters,
)
from specmm.image_ar.tokens.running import TokenPictures
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt, StaticTarget, log_likelihood
from specmm.loading.hardware import Place, choose_dtype, prepack

# With continuous batching one loop draws as many pictures as so many batches
TURNS = 8
GREY = 226


@dataclass(frozen=True)
class LlamaGenSettings:
    """The content of ``settings.json``: recommended sampling, class names by id, recommended trees
    (children by level) by method, the block drafter's acceptance by level and rank [D, K] (the
    probability that this child is the accepted one), and the ``taus`` of methods without a choice
    of tree.
    """

    cfg: float = 1.0
    cfg_interval: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    classes: tuple[str, ...] = ()
    trees: dict[str, tuple[int, ...]] = field(default_factory=dict)
    acceptance: tuple[tuple[float, ...], ...] = ()
    taus: dict[str, float] = field(default_factory=dict)


class LlamaGenPictures(TokenPictures):
    """A token image model (LlamaGen), its tokenizer and its drafters.

    Several threads may share one: calls are answered in the order they come.

    >>> pipe = LlamaGenPipeline.from_pretrained("pocket/llamagen", method="lantern++")
    >>> out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0))
    """

    vq: VQModel
    family = "llamagen"
    registry = methods.IMAGE_TOKENS
    saved = ("transformer", "vq")
    static = StaticTarget
    _optional_components: ClassVar[list[str]] = ["drafters"]

    def __init__(
        self,
        transformer: Transformer,
        vq: VQModel,
        drafters: Mapping[str, DrafterHead] | None = None,
        settings: LlamaGenSettings | None = None,
        method: str | methods.Method = "ar",
        text_encoder: CaptionEncoder | None = None,
        name: str = "llamagen",
    ) -> None:
        super().__init__(settings or LlamaGenSettings(), method, name)
        heads = dict((drafters or {}).items())
        self.register_modules(transformer=transformer, vq=vq, drafters=DrafterHeads(heads))
        if vq.config.codebook_size != transformer.config.vocab_size:
            raise ValueError(
                "tokenizer and transformer must share a codebook, got "
                f"{vq.config.codebook_size} codes and {transformer.config.vocab_size} tokens"
            )
        self.text_encoder = text_encoder
        self.parts = PictureParts(
            heads,
            vq.quantize.embedding.weight.detach(),
            trees=self.settings.trees,
            acceptance=self.settings.acceptance,
            taus=self.settings.taus,
        )

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.Method = "ar",
        torch_dtype: torch.dtype | str | None = None,
        text_encoder: str | Path | None = None,
        device: torch.device | str | None = None,
        drafter: Any = None,
        *,
        dtype: torch.dtype | str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
    ) -> Self:
        """A pipeline of a folder, pocket name or hub id, on this machine's best device and in its
        fastest dtype unless they are given; ``dtype`` is another name of ``torch_dtype``.

        The tokenizer stays in float32, whatever the transformer's dtype. ``drafter`` is a
        third-party drafter (see :func:`specmm.register`), or a folder with a block drafter or an
        EAGLE head outside the model's ``drafters/``. ``revision`` and ``cache_dir``: for hub ids.
        """
        place = Place.named(device, dtype, torch_dtype)
        method, drafter = with_own(methods.IMAGE_TOKENS, method, drafter)
        resolved = methods.resolve(method)
        source = zoo.Source(revision=revision, cache_dir=cache_dir)
        folder = zoo.find(name, source=source)
        chosen = place.dtype or partial(choose_dtype, device=place.where)
        transformer = load_gpt(folder / "transformer", dtype=chosen)
        # before the weights move: the fingerprint that drafters are checked by is read on the CPU
        drafters = {}
        if drafter is not None or (folder / "drafters").is_dir():
            drafters = load_drafters(transformer, folder, drafter)
        for module in (transformer, *drafters.values()):
            prepack(module.to(place.where))
        vq = load_vq(folder / "vq").to(place.where)
        settings = read_settings(LlamaGenSettings, folder)
        captions = None
        if text_encoder:
            captions = CaptionEncoder(text_encoder, tokens=transformer.config.cls_token_num)
        pipe = cls(transformer, vq, drafters, settings, resolved, captions, str(name))
        if drafter is not None:
            pipe.parts.take_given(kind_of(drafter))
        return pipe

    def save_pretrained(
        self, folder: str | Path, dtype: torch.dtype | None = None, **diffusers: Any
    ) -> None:
        super().save_pretrained(folder, dtype, **diffusers)
        save_drafters(self.parts.drafters, Path(folder) / "drafters", self.transformer, dtype)

    @property
    def takes(self) -> Literal["classes", "prompt"]:
        """Classes or prompts, as the transformer was trained."""
        return "classes" if self.transformer.config.model_type == "c2i" else "prompt"

    @property
    def side(self) -> int:
        """Pixels along a side of a picture."""
        return self.grid * self.vq.config.downsampling

    def moved(self) -> None:
        super().moved()
        self.parts.codebook = self.vq.quantize.embedding.weight.detach()

    def __call__(
        self,
        classes: Classes | None = None,
        prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        method: str | methods.Method | None = None,
        drafter: Any = None,
        tree: Any = None,
        rule: Any = None,
        cfg: float | None = None,
        cfg_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        batch_size: int = 8,
        output_type: str = "pil",
        callback_on_step_end: Callback | None = None,
        compiled: Compiled = False,
        *,
        class_labels: Classes | None = None,
        guidance_scale: float | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = None,
        return_dict: bool = True,
        seed: int | Sequence[int] | None = None,
        **elsewhere: Any,
    ) -> ImageOutput:
        """Draw ``num_images_per_prompt`` pictures of every class or prompt.

        ``drafter``, ``tree`` and ``rule`` replace the method's: names, or your own objects (see
        :func:`specmm.register`). ``class_labels`` is another name of ``classes``, and
        ``guidance_scale`` of ``cfg``. Other options default to the model's settings. ``seed`` or
        ``generator`` is one a picture, or the first one's: seeds of the others follow. A picture's
        numbers depend on its own seed only, not on the batch. ``elsewhere`` takes diffusers'
        arguments of other pipelines that change nothing here. ``compiled`` runs steps and rounds as
        programs of ``torch.compile``, about twice as fast on a CPU after some tens of seconds at
        the first call for a method, its options and a batch size; "auto" does so once it pays
        (:mod:`specmm.choose.when_compiled`), after which near ties may be decided differently.
        Raises ``ValueError`` for an unknown class or method, for options out of range and without a
        compiler.
        """
        output: ImageOutput = self.called(locals())
        return output

    def turns(self, method: methods.Method, tell: Tell | None) -> int:
        continuous = method.drafts and method.can_refill and tell is None
        return TURNS if continuous else 1

    def log_likelihood(self, classes: Sequence[str | int], tokens: Tensor) -> Tensor:
        """Mean log-probability a token [B] of ``tokens`` [B, T] of ``classes``; see
        :func:`specmm.image_ar.tokens.target.log_likelihood`.
        """
        return log_likelihood(self.target(), Prompt(labels_of(self, classes)), tokens)

    def target(
        self,
        cfg: float | None = None,
        cfg_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> LlamaGenTarget:
        """The transformer as a target; options that are None default to the model's settings."""
        filters = dict(temperature=temperature, top_k=top_k, top_p=top_p)
        sampled = self.sampled(cfg=cfg, cfg_interval=cfg_interval, **filters)
        return LlamaGenTarget(self.transformer, *sampled, self.name)

    @torch.inference_mode()
    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Pictures [B, R, R, 3] uint8 of tokens [B, T], grey where a callback's tokens are
        ``NOT_DRAWN``; see ``pixels``.
        """
        grid = tokens.unflatten(1, (self.grid, self.grid))
        rows = grid.clamp(min=0).split(1)
        pixels = torch.cat([to_uint8(self.vq.decode_code(row)) for row in rows])
        cell = self.vq.config.downsampling
        missing = (grid < 0).repeat_interleave(cell, 1).repeat_interleave(cell, 2)
        return pixels.masked_fill_(missing[..., None], GREY)

    pixels = decode_tokens

    def asked(self, args: Mapping[str, Any], target: Any) -> Prompt:
        """Classes or prompts; raises ``ValueError`` for the kind that the model does not take."""
        named = either("classes", args["classes"], "class_labels", args["class_labels"])
        classes = [] if named is None else listed(named)
        prompt = [] if args["prompt"] is None else texts_of("prompt", args["prompt"])
        repeats = args["num_images_per_prompt"]
        if bool(classes) == any(prompt):
            raise ValueError("give either classes or prompt, at least one of them and not both")
        if classes:
            if self.takes == "prompt":
                raise ValueError(
                    "this model draws from captions, give prompt='…' instead of classes"
                )
            return Prompt(labels_of(self, classes, repeats))
        if self.takes == "classes":
            raise ValueError("this model draws classes, give classes=… instead of prompt")
        if self.text_encoder is None:
            raise ValueError(
                "prompt needs a text encoder, got none: give from_pretrained(…, "
                "text_encoder=FOLDER), the T5's folder"
            )
        encoded = self.text_encoder(prompt)
        features = encoded.condition.to(self.device, self.transformer.dtype)
        assert encoded.mask is not None
        mask = encoded.mask.to(self.device)
        return Prompt(features.repeat_interleave(repeats, 0), mask.repeat_interleave(repeats, 0))


if TYPE_CHECKING:
    LlamaGenPipeline: TypeAlias = LlamaGenPictures

__getattr__ = made_when_asked(LlamaGenPictures)
