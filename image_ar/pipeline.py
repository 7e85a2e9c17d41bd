"""``ImagePipeline``: pictures from an autoregressive image model, by any of its methods, with a certificate.

Shape letters: B pictures of a batch, h latent side, T = h² tokens a picture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from PIL import Image
from torch import Tensor

from specmm import __version__, methods, zoo
from specmm.certificate import Certificate, of_rule
from specmm.decode import Progress, decode, decode_plain
from specmm.image_ar.settings import Settings, choose_dtype, class_ids, sample_generators
from specmm.image_ar.tokens.assemble import Parts, assemble
from specmm.image_ar.tokens.captions import CaptionEncoder, left_pad
from specmm.image_ar.tokens.drafters.files import load_drafters, save_drafters
from specmm.image_ar.tokens.gpt import Transformer
from specmm.image_ar.tokens.layout import column_major
from specmm.image_ar.tokens.loading import load_gpt, load_vq, save_gpt, save_vq
from specmm.image_ar.tokens.target import Guidance, LlamaGenTarget, Prompt
from specmm.image_ar.tokens.tuning import choose_method
from specmm.image_ar.tokens.vq import VQModel, to_uint8
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.stats import Stats

Callback = Callable[["ImagePipeline", int, int, dict[str, Any]], dict[str, Any]]


@dataclass
class ImageOutput(BaseOutput):  # type: ignore[misc]
    """``images`` (PIL, or uint8 [B, R, R, 3] arrays), ``tokens`` [B, T], ``stats``, ``certificate``, ``method``."""

    images: Any
    tokens: Tensor
    stats: Stats
    certificate: Certificate
    method: str


@dataclass
class _Run:
    """Sums over the batches of one call."""

    tokens: list[Tensor] = field(default_factory=list)
    pictures: list[Tensor] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    method: str = ""
    excess: float = 0.0
    measured: float = 0.0


class ImagePipeline(DiffusionPipeline):  # type: ignore[misc]
    """A token image model (LlamaGen), its tokenizer and its drafters behind one call.

    >>> pipe = ImagePipeline.from_pretrained("pocket/llamagen", method="lantern++")
    >>> out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0))
    """

    def __init__(
        self,
        transformer: Transformer,
        vq: VQModel,
        drafters: dict[str, Any] | None = None,
        settings: Settings | None = None,
        method: str | methods.Method = "ar",
        text_encoder: CaptionEncoder | None = None,
        name: str = "llamagen",
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, vq=vq)
        if vq.config.codebook_size != transformer.config.vocab_size:
            raise ValueError(
                f"tokenizer and transformer must share a codebook, got {vq.config.codebook_size} codes "
                f"and {transformer.config.vocab_size} tokens"
            )
        self.settings, self.text_encoder, self.name = settings or Settings(), text_encoder, name
        codebook = vq.quantize.embedding.weight.detach()
        self.parts = Parts(drafters or {}, codebook, self.settings.trees, self.settings.acceptance)
        self.method = methods.resolve(method)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.Method = "ar",
        torch_dtype: torch.dtype | None = None,
        text_encoder: str | Path | None = None,
    ) -> ImagePipeline:
        """A pipeline of a folder, a pocket name or a hub id; the dtype defaults to this machine's fastest."""
        resolved, folder = methods.resolve(method), zoo.find(name)
        transformer = load_gpt(folder / "transformer")
        dtype = torch_dtype or choose_dtype(sum(p.numel() for p in transformer.parameters()))
        transformer = transformer.to(dtype)
        drafters = load_drafters(folder / "drafters", transformer)
        for module in (transformer, *drafters.values()):
            column_major(module)
        captions = CaptionEncoder(text_encoder, tokens=transformer.config.cls_token_num) if text_encoder else None
        return cls(
            transformer,
            load_vq(folder / "vq"),
            drafters,
            Settings.read(folder),
            resolved,
            captions,
            str(name),
        )

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write everything ``from_pretrained`` reads, with the official parameter names, in safetensors."""
        folder = Path(folder)
        save_gpt(self.transformer, folder / "transformer", dtype)
        save_vq(self.vq, folder / "vq", dtype)
        save_drafters(self.parts.drafters, folder / "drafters", self.transformer, dtype)
        self.settings.write(folder)
        index = {"_class_name": "ImagePipeline", "_specmm_version": __version__, "family": "llamagen"}
        (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")

    @property
    def device(self) -> torch.device:
        """Where the transformer lives."""
        return self.transformer.output.weight.device

    def to(self, *args: Any, **kwargs: Any) -> ImagePipeline:
        """Move transformer, tokenizer and drafters to a device or dtype."""
        super().to(*args, **kwargs)
        for head in self.parts.drafters.values():
            head.to(self.device, self.transformer.dtype)
        self.parts.codebook = self.vq.quantize.embedding.weight.detach()
        self.parts.made.clear()
        self.parts.plans.clear()
        return self

    def __call__(
        self,
        classes: Sequence[str | int] | None = None,
        prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        method: str | methods.Method | None = None,
        cfg: float | None = None,
        cfg_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        batch_size: int = 8,
        output_type: str = "pil",
        callback_on_step_end: Callback | None = None,
    ) -> ImageOutput:
        """Draw ``num_images_per_prompt`` pictures of every class or prompt.

        What is not given comes from the model's settings. ``generator`` is one for all (each picture gets a seed from
        it) or one a picture; a picture depends on its own seed only, not on the batch. Raises ``ValueError`` for an
        unknown class or method and for options out of range.
        """
        if output_type not in ("pil", "np", "latent"):
            raise ValueError(f"output_type must be 'pil', 'np' or 'latent', got {output_type!r}")
        if batch_size < 1 or num_images_per_prompt < 1:
            raise ValueError(
                f"batch_size and num_images_per_prompt must be at least 1, got {batch_size} and {num_images_per_prompt}"
            )
        target = self.target(cfg, cfg_interval, temperature, top_k, top_p)
        prompts = self._prompts(classes, prompt, num_images_per_prompt)
        chosen = self.method if method is None else methods.resolve(method)
        generators = sample_generators(generator, len(prompts.condition), self.device)
        run = _Run()
        with self.progress_bar(total=len(generators)) as bar:
            for first in range(0, len(generators), batch_size):
                rows = slice(first, first + batch_size)
                mask = None if prompts.mask is None else prompts.mask[rows]
                part = Prompt(prompts.condition[rows], mask)
                certificate = self._batch(
                    target, part, generators[rows], chosen, run, output_type, callback_on_step_end
                )
                bar.update(len(part.condition))
        pictures: Any = torch.cat(run.pictures).cpu().numpy() if run.pictures else np.empty(0)
        images = [Image.fromarray(p) for p in pictures] if output_type == "pil" else pictures
        return ImageOutput(
            images=images, tokens=torch.cat(run.tokens), stats=run.stats, certificate=certificate, method=run.method
        )

    def target(
        self,
        cfg: float | None = None,
        cfg_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> LlamaGenTarget:
        """The transformer as a target under these options, the model's settings standing in for what is None."""
        chosen = self.settings.with_options(
            cfg=cfg, cfg_interval=cfg_interval, temperature=temperature, top_k=top_k, top_p=top_p
        )
        processor = Processor(chosen.temperature, chosen.top_k, chosen.top_p)
        return LlamaGenTarget(self.transformer, Guidance(chosen.cfg, chosen.cfg_interval), processor, self.name)

    @torch.inference_mode()
    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Pictures [B, R, R, 3] uint8 of tokens [B, T], one by one: batches of other sizes round otherwise."""
        side = self.transformer.config.grid
        rows = tokens.unflatten(1, (side, side)).split(1)
        return torch.cat([to_uint8(self.vq.decode_code(row)) for row in rows])

    def _batch(
        self,
        target: LlamaGenTarget,
        prompt: Prompt,
        generators: list[torch.Generator],
        method: methods.Method,
        run: _Run,
        output_type: str,
        callback: Callback | None,
    ) -> Certificate:
        """Decode one batch into ``run`` and say what the run so far may claim."""
        run.method = method.name
        if isinstance(method, methods.Auto):
            method = choose_method(target, self.parts, len(generators))
            run.method = f"auto: {method}"
        steps, rule = self._loop(target, prompt, generators, method)
        for i, progress in enumerate(steps):
            if callback is not None:
                callback(self, i, int(progress.counts.min()), {"tokens": progress.tokens})
        tokens = progress.tokens[:, : target.length]
        run.tokens.append(tokens)
        run.stats.add(progress.stats)
        run.excess += float(progress.excess)
        run.measured += float(progress.measured)
        if output_type != "latent":
            run.pictures.append(self.decode_tokens(tokens))
        if rule is None:
            return Certificate("exact", "plain decoding of the target", 0.0)
        return of_rule(rule.name, rule.exact, run.excess / run.measured if run.measured else None)

    def _loop(
        self, target: LlamaGenTarget, prompt: Prompt, generators: list[torch.Generator], method: methods.Method
    ) -> tuple[Iterator[Progress], Any]:
        uniforms = Uniforms(generators)
        if isinstance(method, methods.AR):
            return decode_plain(target, prompt, target.length, uniforms), None
        target, drafter, rule = assemble(method, target, self.parts)
        return decode(target, drafter, rule, prompt, target.length, uniforms), rule

    def _prompts(self, classes: Sequence[str | int] | None, prompt: str | Sequence[str] | None, repeats: int) -> Prompt:
        if bool(classes) == bool(prompt):
            raise ValueError("give either classes or prompt, at least one of them and not both")
        if classes:
            if self.transformer.config.model_type != "c2i":
                raise ValueError("this model draws from captions, give prompt='…' instead of classes")
            ids = class_ids(classes, self.settings.classes, self.transformer.config.num_classes)
            return Prompt(torch.tensor(ids, device=self.device).repeat_interleave(repeats))
        if self.transformer.config.model_type != "t2i" or self.text_encoder is None:
            raise ValueError("prompt needs a text-to-image model and from_pretrained(…, text_encoder=T5 folder)")
        texts = [prompt] if isinstance(prompt, str) else list(prompt or [])
        batch = self.text_encoder(texts)
        features, mask = left_pad(batch.features, batch.mask)
        features = features.to(self.device, self.transformer.output.weight.dtype)
        return Prompt(features.repeat_interleave(repeats, 0), mask.to(self.device).repeat_interleave(repeats, 0))
