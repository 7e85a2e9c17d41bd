"""``MARPipeline``: pictures from a model of continuous tokens, by any of its methods.

Shape letters: B pictures of a batch, L tokens a picture, S head steps, C token width, R pixels a
side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from specmm import methods, zoo
from specmm.choose.when_compiled import Compiled, Turn, Works
from specmm.core.randomness import sample_generators
from specmm.extending.kinds import either
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.calls import Callback, Classes, check_call, labels_of, told
from specmm.image_ar.continuous.kl import AutoencoderKL
from specmm.image_ar.continuous.loading import (
    check_models,
    check_vae,
    load_kl,
    load_mar,
    load_small_mar,
    save_small_mar,
)
from specmm.image_ar.continuous.mar import MAR, unpatchify
from specmm.image_ar.continuous.orders import CFGSchedule, MARSettings, Solver
from specmm.image_ar.continuous.programs import HeadPrograms, MARGraphs
from specmm.image_ar.continuous.running import MARBatch, MARModels, steps_of
from specmm.image_ar.files import (
    read_settings,
    save_module,
    with_options,
    write_index,
    write_settings,
)
from specmm.image_ar.shared import (
    Drawn,
    ImageOutput,
    PicturePipeline,
    call_of_pipeline,
    draw_batches,
    made_when_asked,
)
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
        super().__init__()
        check_vae(transformer, vae)
        if small is not None:
            check_models(transformer, small)
        self.register_modules(transformer=transformer, vae=vae, small=small)
        self.settings = settings or MARSettings()
        self.name = name
        self.method = methods.make(methods.CONTINUOUS, method)
        self.models = MARModels(transformer, small)
        self.works = Works("mar")

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
        """Write everything ``from_pretrained`` reads, under the official names, in safetensors."""
        folder = Path(folder)
        save_module(self.transformer, folder / "transformer", dtype)
        save_module(self.vae, folder / "vae", dtype)
        if self.small is not None:
            save_small_mar(self.small, folder, self.vae, dtype)
        write_settings(self.settings, folder)
        write_index("MARPipeline", "mar", folder)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move models and autoencoder to a device or dtype."""
        super().to(*args, **kwargs)
        self.models = MARModels(self.transformer, self.small)
        self.works.clear()
        return self

    @call_of_pipeline
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
        check_call(output_type, batch_size, num_images_per_prompt)
        cfg = either("cfg", cfg, "guidance_scale", guidance_scale)
        wanted: Classes | None = either("classes", classes, "class_labels", class_labels)
        tell = told(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        settings = self.target(cfg, temperature, num_iter, head_steps, cfg_schedule, solver)
        chosen = self.method if method is None else methods.make(methods.CONTINUOUS, method)
        labels = labels_of(self, wanted, num_images_per_prompt)
        generators = sample_generators(generator, len(labels), self.device)

        count = len(labels)
        at_once = min(batch_size, count)
        turn = self.turn(compiled, settings, chosen, at_once)

        def draw(rows: slice) -> Drawn:
            own = generators[rows]
            fits = len(own) == at_once  # the last batch may be smaller: other programs
            with turn.batch(len(own), count - rows.start, fits) as quick:
                batch = MARBatch(labels[rows], own, settings, quick)
                steps, claim = steps_of(chosen, self.models, batch)
                for i, progress in enumerate(steps):
                    if tell is not None:
                        tell(i, progress.count, {"tokens": progress.tokens})
                tokens = progress.tokens
                images = None if output_type == "latent" else self.decode_tokens(tokens)
                return Drawn(tokens, images, progress.stats, claim, chosen.name)

        bar = self.progress_bar(total=count)
        rest = (settings.claimed | self._rounded, return_dict, turn.compiled)
        return draw_batches(draw, count, batch_size, output_type, bar, *rest)

    @property
    def _rounded(self) -> dict[str, object]:
        """The dtype that the claimed distribution is computed in, where it rounds much."""
        dtype = self.transformer.dtype
        return {} if dtype == torch.float32 else {"dtype": str(dtype).removeprefix("torch.")}

    def turn(
        self, compiled: Compiled, target: MARSettings, method: methods.ContinuousMethod, batch: int
    ) -> Turn[HeadPrograms | MARGraphs | None]:
        def quick() -> HeadPrograms | MARGraphs | None:
            return self.models.quick(method, target, batch)

        return self.works.begin(compiled, None, quick, self.transformer, (method, target, batch))

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
        """Pictures [B, R, R, 3] uint8 of tokens [B, L, C], one by one: batches round otherwise."""
        latents = unpatchify(tokens, self.transformer.config.patch_size)
        return torch.cat([to_uint8(self.vae.decode_scaled(row)) for row in latents.split(1)])


if TYPE_CHECKING:
    MARPipeline: TypeAlias = MARPictures

__getattr__ = made_when_asked(MARPictures)
