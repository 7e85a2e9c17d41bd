"""``TransformersImagePipeline``: pictures from a model of transformers that draws token by token.

Shape letters: B pictures of a batch, T tokens a picture, H and W pixels of its sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import DiffusionPipeline
from torch import Tensor

from specmm import methods, zoo
from specmm.decode import Progress, decode, decode_plain
from specmm.drafter import Drafter
from specmm.guidance import Guidance
from specmm.hardware import choose_dtype, prepack
from specmm.hf.drafters.prompt_lookup import PromptLookupDrafter
from specmm.hf.picture_tokens import Decoder, Layout, PictureModel, PictureTarget, picture_prompt
from specmm.hf.pretrained import load_model, load_tokenizer, use_tree_attention
from specmm.hf.prompt import VLMPrompt
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.pipeline import picture_type
from specmm.image_ar.shared import (
    SETTINGS,
    Callback,
    Drawn,
    ImageOutput,
    PicturePipeline,
    check_call,
    draw_batches,
    read_settings,
    with_options,
    write_settings,
)
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.image_ar.tokens.pipeline import LlamaGenSettings
from specmm.image_ar.tokens.row_parallel import decode_rows, rows_certificate
from specmm.processors import Processor
from specmm.randomness import Uniforms, sample_generators
from specmm.stats import Certificate, rule_certificate
from specmm.turns import in_its_turn
from specmm.verify import GreedyMatch, Recursive, Rule
from specmm.verify.rule import make_rule


class TransformersImagePipeline(PicturePipeline[methods.Method], DiffusionPipeline):  # type: ignore[misc]
    """A model of transformers that draws pictures, and its tokenizer, after one call.

    Methods are ``ar``, ``sjd``, ``gsd``, ``zipar`` and ``prompt-lookup``. Several threads may share
    one.

    >>> pipe = ImagePipeline.from_pretrained("path/to/chameleon", method="sjd")
    >>> out = pipe(prompt="a red barn", generator=torch.Generator().manual_seed(0))
    """

    sampling_options = ("cfg", "cfg_interval", "temperature", "top_k", "top_p")
    takes = "prompt"
    batch_invariant = False  # a prompt's padding depends on the longest of its batch

    def __init__(
        self,
        transformer: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        facts: PictureModel,
        folder: Path,
        method: str | methods.Method = "ar",
        name: str = "pictures",
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, tokenizer=tokenizer)
        self.facts = facts
        self.folder = folder
        self.name = name
        given = (folder / SETTINGS).exists()
        self.settings = (
            read_settings(LlamaGenSettings, folder) if given else LlamaGenSettings(cfg=facts.cfg)
        )
        self.method = methods.make(methods.TRANSFORMERS_IMAGES, method)
        self._decoder: Decoder | None = None

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.Method = "ar",
        torch_dtype: torch.dtype | None = None,
        text_encoder: str | Path | None = None,
        device: torch.device | str = "cpu",
    ) -> TransformersImagePipeline:
        """A pipeline of a folder or hub id; the dtype defaults to the device's fastest.

        Raises ``ValueError`` for ``text_encoder``: these models read prompts themselves.
        """
        if text_encoder is not None:
            raise ValueError(f"text_encoder must be None for {name}, which reads prompts itself")
        folder = zoo.find(name, zoo.TRANSFORMERS)
        facts = picture_type(folder)
        if facts is None:
            raise ValueError(f"{folder} must hold a model of transformers that draws pictures")
        kind = getattr(transformers, facts.architecture)
        model = load_model(kind, folder, dtype=torch_dtype or "auto")
        size = sum(p.numel() for p in model.parameters())
        model = model.to(device, torch_dtype or choose_dtype(size, device=device)).eval()
        prepack(use_tree_attention(model))
        return cls(model, load_tokenizer(folder), facts, folder, method, str(name))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model, tokenizer and settings; a decoder beside the model is not copied."""
        self.transformer.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        write_settings(self.settings, Path(folder))

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.transformer.device

    @in_its_turn(lambda pipe: pipe.transformer)
    def __call__(
        self,
        prompt: str | Sequence[str],
        num_images_per_prompt: int = 1,
        negative_prompt: str | None = None,
        height: int | None = None,
        width: int | None = None,
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
        """Draw ``num_images_per_prompt`` pictures of every prompt.

        What is not given comes from the model's settings; guidance leads away from
        ``negative_prompt``, or from what the model has in its place. ``height`` and ``width`` are
        pixels, both or none, for models that draw several sizes. ``generator`` is one for all or
        one a picture; a picture's uniforms depend on its own seed only. ``output_type`` "latent"
        gives tokens alone. Raises ``ValueError`` for an empty list of prompts, an unknown method,
        options out of range, a size that the model does not draw, and pixels where the folder has
        nothing to decode tokens with.
        """
        check_call(output_type, batch_size, num_images_per_prompt)
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not texts:
            raise ValueError("prompt must name at least one picture, got none")
        chosen = self.method
        if method is not None:
            chosen = methods.make(methods.TRANSFORMERS_IMAGES, method)
        decoder = None if output_type == "latent" else self.decoder()
        layout = self._layout(height, width)
        target = self.target(cfg, cfg_interval, temperature, top_k, top_p, layout)
        rows = [self._ids(text, layout) for text in texts for _ in range(num_images_per_prompt)]
        away = [self._away(ids, negative_prompt, layout) for ids in rows]
        generators = sample_generators(generator, len(rows), self.device)

        def draw(part: slice) -> Drawn:
            batch = picture_prompt(target, rows[part], away[part])
            steps, rule = self._loop(target, batch, chosen, Uniforms(generators[part]))
            for i, progress in enumerate(steps):
                if callback_on_step_end is not None:
                    state = {"tokens": progress.tokens}
                    callback_on_step_end(self, i, int(progress.counts.min()), state)
            tokens = progress.tokens[:, : target.length]
            images = None if decoder is None else self._pixels(decoder, tokens, layout)
            measured = float(progress.measured)
            claim = Certificate("exact", "plain decoding of the target", 0.0)
            if rule is not None:
                excess = float(progress.excess) / measured if measured else None
                claim = rule_certificate(rule.name, rule.exact, excess)
            elif chosen.name == methods.ZipAR.name:
                claim = rows_certificate(target, chosen.window)
            return Drawn(tokens, images, progress.stats, claim, chosen.name, measured)

        bar = self.progress_bar(total=len(rows))
        settings = target.processor.settings | target.guidance.settings
        return draw_batches(draw, len(rows), batch_size, output_type, bar, settings)

    def target(
        self,
        cfg: float | None = None,
        cfg_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        layout: Layout | None = None,
    ) -> PictureTarget:
        """The model as a target under these options, and the model's settings for what is None."""
        options = dict(cfg=cfg, cfg_interval=cfg_interval, temperature=temperature)
        chosen = with_options(self.settings, **options, top_k=top_k, top_p=top_p)
        processor = Processor(chosen.temperature, chosen.top_k, chosen.top_p)
        guidance = Guidance(chosen.cfg, chosen.cfg_interval)
        return PictureTarget(self.transformer, self.facts, processor, guidance, self.name, layout)

    def to(self, *args: Any, **kwargs: Any) -> TransformersImagePipeline:
        """Move the model to a device or dtype; the decoder is made anew there."""
        super().to(*args, **kwargs)
        self._decoder = None
        return self

    def decoder(self) -> Decoder:
        """What turns tokens into pixels; raises ``ValueError`` where the folder has nothing."""
        if self._decoder is None:
            self._decoder = self.facts.decode(self.transformer, self.folder)
        return self._decoder

    @torch.inference_mode()
    def _pixels(self, decoder: Decoder, tokens: Tensor, layout: Layout) -> Tensor:
        """[B, H, W, 3] uint8, one by one: batches of other sizes round otherwise."""
        return torch.cat([to_uint8(decoder(row, layout)) for row in tokens.split(1)])

    def _layout(self, height: int | None = None, width: int | None = None) -> Layout:
        """That of pictures of this size; raises ``ValueError`` for one that is not drawn."""
        if height is None and width is None:
            return self.facts.layout(self.transformer, None)
        if height is None or width is None:
            raise ValueError(f"give both height and width, got {height} and {width}")
        return self.facts.layout(self.transformer, (height, width))

    def _ids(self, text: str, layout: Layout) -> list[int]:
        return self.facts.ids(self.transformer, self.tokenizer, text, layout)

    def _away(self, ids: Sequence[int], negative: str | None, layout: Layout) -> list[int]:
        """What guidance leads away from, for a prompt of ``ids``."""
        if negative is None and self.facts.away is not None:
            return self.facts.away(self.transformer, self.tokenizer, ids)
        return self._ids(negative or "", layout)

    def _loop(
        self, target: PictureTarget, prompt: VLMPrompt, method: Any, uniforms: Uniforms
    ) -> tuple[Iterator[Progress], Rule | None]:
        if method.name == methods.ZipAR.name:
            return decode_rows(target, prompt, method.window, uniforms), None
        if not method.drafts:
            return decode_plain(target, prompt, target.length, uniforms), None
        drafter: Drafter
        rule: Rule = GreedyMatch() if target.processor.greedy else Recursive()
        if method.name == methods.PromptLookup.name:
            drafter = PromptLookupDrafter(target, method.ngram, method.length)
        else:
            drafter = JacobiDrafter(target, method.window, method.init)
            if not target.processor.greedy:
                rule = make_rule(method.choice.rule)
        return decode(target, drafter, rule, prompt, target.length, uniforms), rule
