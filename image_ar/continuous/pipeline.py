"""``MARPipeline``: pictures from a model of continuous tokens, by any of its methods, with a
certificate.

Shape letters: B pictures of a batch, L tokens a picture, C token width, R pixels a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from specmm import methods, zoo
from specmm.dtypes import choose_dtype
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.continuous.assemble import Draw, Models, assemble
from specmm.image_ar.continuous.kl import AutoencoderKL
from specmm.image_ar.continuous.loading import load_kl, load_mar, save_kl, save_mar
from specmm.image_ar.continuous.mar import MAR, unpatchify
from specmm.image_ar.continuous.orders import CFGSchedule
from specmm.image_ar.continuous.pair import check_pair, check_vae, load_small, save_small
from specmm.image_ar.continuous.settings import Settings, Solver
from specmm.image_ar.output import (
    Callback,
    Drawn,
    ImageOutput,
    PicturePipeline,
    check_call,
    draw_batches,
)
from specmm.image_ar.settings import (
    class_labels,
    read_settings,
    with_options,
    write_index,
    write_settings,
)
from specmm.randomness import sample_generators
from specmm.turns import in_its_turn


class MARPipeline(PicturePipeline[methods.ContinuousMethod], DiffusionPipeline):  # type: ignore[misc]
    """A model of continuous tokens (MAR), its autoencoder, and perhaps a small model that shares
    it.

    Several threads may share one: calls are answered in the order they come.

    >>> pipe = MARPipeline.from_pretrained("pocket/mar", method="cspd")
    >>> out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0))
    """

    sampling_options = ("cfg", "temperature", "num_iter", "head_steps", "cfg_schedule", "solver")

    def __init__(
        self,
        transformer: MAR,
        vae: AutoencoderKL,
        small: MAR | None = None,
        settings: Settings | None = None,
        method: str | methods.ContinuousMethod = "ar",
        name: str = "mar",
    ) -> None:
        super().__init__()
        check_vae(transformer, vae)
        if small is not None:
            check_pair(transformer, small)
        self.register_modules(transformer=transformer, vae=vae, small=small)
        self.settings, self.name = settings or Settings(), name
        self.method, self.models = methods.resolve_continuous(method), Models(transformer, small)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.ContinuousMethod = "ar",
        torch_dtype: torch.dtype | None = None,
        small: str | Path | None = None,
        text_encoder: None = None,
        device: torch.device | str = "cpu",
    ) -> MARPipeline:
        """A pipeline of a folder, pocket name or hub id; the dtype defaults to the device's
        fastest.

        The small model is that of the folder, or ``small``: another model's folder, name or id.
        """
        if text_encoder is not None:
            raise ValueError("text_encoder must be left out: this model draws classes")
        resolved, folder = methods.resolve_continuous(method), zoo.find(name)
        transformer, vae = load_mar(folder / "transformer"), load_kl(folder / "vae")
        size = sum(p.numel() for p in transformer.parameters())
        dtype = torch_dtype or choose_dtype(size, long=True, device=device)
        second = (
            load_small(folder, vae)
            if small is None
            else load_small(zoo.find(small), vae, whole=True)
        )
        large = transformer.to(device, dtype)
        second = None if second is None else second.to(device, dtype)
        return cls(
            large, vae.to(device), second, read_settings(Settings, folder), resolved, str(name)
        )

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write everything ``from_pretrained`` reads, with the official parameter names, in
        safetensors.
        """
        folder = Path(folder)
        save_mar(self.transformer, folder / "transformer", dtype)
        save_kl(self.vae, folder / "vae", dtype)
        if self.small is not None:
            save_small(self.small, folder, self.vae, dtype)
        write_settings(self.settings, folder)
        write_index("MARPipeline", "mar", folder)

    @property
    def device(self) -> torch.device:
        """Where the transformer lives."""
        return self.transformer.mask_token.device

    @property
    def grid(self) -> int:
        """Tokens along a side."""
        return int(self.transformer.config.grid)

    def to(self, *args: Any, **kwargs: Any) -> MARPipeline:
        """Move models and autoencoder to a device or dtype."""
        super().to(*args, **kwargs)
        self.models.heads.clear()
        return self

    @in_its_turn(lambda pipe: pipe.transformer)
    def __call__(
        self,
        classes: str | int | Sequence[str | int],
        num_images_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        method: str | methods.ContinuousMethod | None = None,
        cfg: float | None = None,
        temperature: float | None = None,
        num_iter: int | None = None,
        head_steps: str | int | None = None,
        cfg_schedule: CFGSchedule | None = None,
        solver: Solver | None = None,
        batch_size: int = 8,
        output_type: str = "pil",
        callback_on_step_end: Callback | None = None,
    ) -> ImageOutput:
        """Draw ``num_images_per_prompt`` pictures of every class; ``tokens`` are [B, L, C] in
        raster order.

        What is not given comes from the model's settings. ``generator`` is one for all (each
        picture gets a seed from it) or one a picture; its uniforms depend on its own seed only, not
        on the batch. Raises ``ValueError`` for an unknown class or method, for options out of range
        and for a method without the small model it needs.
        """
        check_call(output_type, batch_size, num_images_per_prompt)
        settings = self.target(cfg, temperature, num_iter, head_steps, cfg_schedule, solver)
        chosen = self.method if method is None else methods.resolve_continuous(method)
        labels = class_labels(self, classes, num_images_per_prompt)
        generators = sample_generators(generator, len(labels), self.device)

        def draw(rows: slice) -> Drawn:
            what = Draw(labels[rows], generators[rows], settings.plan(), settings.solver)
            return self._batch(what, chosen, output_type, callback_on_step_end)

        bar = self.progress_bar(total=len(labels))
        return draw_batches(draw, len(labels), batch_size, output_type, bar, settings.claimed)

    def target(
        self,
        cfg: float | None = None,
        temperature: float | None = None,
        num_iter: int | None = None,
        head_steps: str | int | None = None,
        cfg_schedule: CFGSchedule | None = None,
        solver: Solver | None = None,
    ) -> Settings:
        """How the model is sampled under these options, its settings standing in for what is None."""
        steps = None if head_steps is None else str(head_steps)
        options: dict[str, Any] = dict(
            cfg=cfg, temperature=temperature, num_iter=num_iter, head_steps=steps
        )
        chosen = with_options(self.settings, **options, cfg_schedule=cfg_schedule, solver=solver)
        plan = chosen.plan()
        if plan.cfg != 1.0:
            self.transformer.embed_classes(None, 1)
        self.models.head(plan.head_steps)
        return chosen

    @torch.inference_mode()
    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Pictures [B, R, R, 3] uint8 of tokens [B, L, C], one by one: batches of other sizes round
        otherwise.
        """
        latents = unpatchify(tokens, self.transformer.config.patch_size)
        return torch.cat([to_uint8(self.vae.decode_scaled(row)) for row in latents.split(1)])

    def _batch(
        self,
        what: Draw,
        method: methods.ContinuousMethod,
        output_type: str,
        callback: Callback | None,
    ) -> Drawn:
        steps, certificate = assemble(method, self.models, what)
        for i, progress in enumerate(steps):
            if callback is not None:
                callback(self, i, progress.count, {"tokens": progress.tokens})
        tokens = progress.tokens
        images = None if output_type == "latent" else self.decode_tokens(tokens)
        return Drawn(tokens, images, progress.stats, certificate, method.name)
