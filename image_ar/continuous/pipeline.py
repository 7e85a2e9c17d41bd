"""``MARPipeline``: pictures from a model of continuous tokens, by any of its methods.

Shape letters: B pictures of a batch, L tokens a picture, S head steps, C token width, R pixels a
side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from specmm import methods, zoo
from specmm.choose.when_compiled import Compiled
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.calls import Callback, Classes
from specmm.image_ar.continuous.kl import AutoencoderKL
from specmm.image_ar.continuous.loading import (
    check_models,
    check_vae,
    load_kl,
    load_mar,
    load_small_mar,
    pair_with,
)
from specmm.image_ar.continuous.mar import MAR, unpatchify
from specmm.image_ar.continuous.orders import CFGSchedule, MARSettings, Solver
from specmm.image_ar.continuous.programs import HeadPrograms, MARGraphs
from specmm.image_ar.continuous.running import MARModels, steps_of
from specmm.image_ar.files import read_settings, with_options
from specmm.image_ar.shared import Batch, Drawn, ImageOutput, PicturePipeline, made_when_asked
from specmm.loading.hardware import Place, choose_dtype


class MARPictures(PicturePipeline[methods.ContinuousMethod]):
    """A model of continuous tokens (MAR), its autoencoder, and perhaps a small model that shares
    it.

    Threads may share one: calls are answered in the order they come.

    >>> pipe = MARPipeline.from_pretrained("pocket/mar", method="cspd")
    >>> out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0))
    """

    vae: AutoencoderKL
    small: MAR | None
    family = "mar"
    registry = methods.CONTINUOUS
    _optional_components: ClassVar[list[str]] = ["small"]
    sampling_options = ("cfg", "temperature", "num_iter", "head_steps", "cfg_schedule", "solver")

    def __init__(
        self,
        transformer: MAR,
        vae: AutoencoderKL,
        small: MAR | None = None,
        settings: MARSettings | None = None,
        method: str | methods.ContinuousMethod = "ar",
        name: str = "mar",
    ) -> None:
        super().__init__(settings or MARSettings(), method, name)
        check_vae(transformer, vae)
        if small is not None:
            check_models(transformer, small)
        self.register_modules(transformer=transformer, vae=vae, small=small)
        self.moved()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.ContinuousMethod = "ar",
        torch_dtype: torch.dtype | str | None = None,
        small: str | Path | None = None,
        text_encoder: None = None,
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
    ) -> Self:
        """A pipeline of a folder, pocket name or hub id, on this machine's best device and in its
        fastest dtype unless they are given; ``dtype`` is another name of ``torch_dtype``.

        The small model is that of the folder, or ``small``: another model's folder, name or id.
        """
        if text_encoder is not None:
            raise ValueError("text_encoder must be left out: this model draws classes")
        resolved = methods.make(methods.CONTINUOUS, method)
        place = Place.named(device, dtype, torch_dtype)
        source = zoo.Source(revision=revision, cache_dir=cache_dir)
        folder = zoo.find(name, source=source)
        chosen = place.dtype or partial(choose_dtype, long=True, device=place.where)
        large = load_mar(folder / "transformer", dtype=chosen).to(place.where)
        vae = load_kl(folder / "vae")
        if small is None:
            second = load_small_mar(folder, vae, dtype=large.dtype)
        else:
            second = load_small_mar(zoo.find(small), vae, whole=True, dtype=large.dtype)
        second = None if second is None else second.to(place.where)
        settings = read_settings(MARSettings, folder)
        return cls(large, vae.to(place.where), second, settings, resolved, str(name))

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        super().save_pretrained(folder, dtype)
        if self.small is not None:
            pair_with(self.vae, Path(folder))

    def moved(self) -> None:
        self.models = MARModels(self.transformer, self.small)

    def __call__(
        self,
        classes: Classes | None = None,
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
        compiled: Compiled = False,
        *,
        class_labels: Classes | None = None,
        guidance_scale: float | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = None,
        return_dict: bool = True,
    ) -> ImageOutput:
        """Draw ``num_images_per_prompt`` pictures of every class; ``tokens`` are [B, L, C].

        Tokens are in raster order. ``class_labels`` is another name of ``classes``, and
        ``guidance_scale`` of ``cfg``. Options default to the model's settings; ``head_steps`` that
        are a number are spaced as the settings' are, a string is ``NoiseSchedule.of``'s.
        ``generator`` is one for all (each picture gets a seed from it) or one a picture; its
        uniforms depend on its own seed only, not on the batch. Raises ``ValueError`` for an unknown
        class or method, for options out of range and for a method without the small model it needs.
        """
        output: ImageOutput = self.called(locals())
        return output

    def draw(self, batch: Batch[methods.ContinuousMethod]) -> Drawn:
        steps, claim = steps_of(batch, self.models)
        for i, progress in enumerate(steps):
            if batch.tell is not None:
                batch.tell(i, progress.count, {"tokens": progress.tokens})
        return Drawn(progress.tokens, progress.tokens, progress.stats, claim)

    def claimed(self, target: MARSettings) -> Mapping[str, object]:
        """With the dtype that the claimed distribution is computed in, where it rounds much."""
        dtype = self.transformer.dtype
        rounded = {} if dtype == torch.float32 else {"dtype": str(dtype).removeprefix("torch.")}
        return target.claimed | rounded

    def quick(
        self, target: MARSettings, method: methods.ContinuousMethod, batch: int
    ) -> HeadPrograms | MARGraphs:
        return self.models.quick(method, target, batch)

    def steps(self, **wanted: Any) -> int:
        """Tokens of a picture."""
        return int(self.transformer.config.seq_len)

    def target(
        self,
        cfg: float | None = None,
        temperature: float | None = None,
        num_iter: int | None = None,
        head_steps: str | int | None = None,
        cfg_schedule: CFGSchedule | None = None,
        solver: Solver | None = None,
    ) -> MARSettings:
        """The options of a run, by default the settings'; ``ValueError`` for any out of range."""
        chosen = with_options(
            self.settings,
            cfg=cfg,
            temperature=temperature,
            num_iter=num_iter,
            head_steps=self.settings.spaced(head_steps),
            cfg_schedule=cfg_schedule,
            solver=solver,
        )
        if chosen.cfg != 1.0:
            self.transformer.embed_classes(None, 1)
        self.models.head(chosen.head_steps)
        return chosen

    @torch.inference_mode()
    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Pictures [B, R, R, 3] uint8 of tokens [B, L, C]; see ``pixels``."""
        latents = unpatchify(tokens, self.transformer.config.patch_size)
        return torch.cat([to_uint8(self.vae.decode_scaled(row)) for row in latents.split(1)])

    pixels = decode_tokens


if TYPE_CHECKING:
    MARPipeline: TypeAlias = MARPictures

__getattr__ = made_when_asked(MARPictures)
