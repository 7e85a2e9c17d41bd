"""``MARPipeline``: pictures from a model of continuous tokens, by any of its methods.

Shape letters: B pictures of a batch, L tokens a picture, S head steps, C token width, R pixels a
side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from specmm import methods, zoo
from specmm.choose.when_compiled import Compiled
from specmm.core.derived import Derived
from specmm.core.stats import Certificate
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.calls import Callback, Classes, SoFar
from specmm.image_ar.continuous.chain_speculation import ChainSpeculation
from specmm.image_ar.continuous.cspd import (
    CSpDBatch,
    CSpDModel,
    DraftWindow,
    ReleaseRule,
    StreamNumbers,
    decode_release,
)
from specmm.image_ar.continuous.diffusion import NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import ChainHead, check_plain
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
from specmm.image_ar.continuous.masked_decode import (
    Ancestral,
    Deterministic,
    MARProgress,
    MARSampler,
    PlainSampler,
    decode_mar,
)
from specmm.image_ar.continuous.orders import (
    CFGSchedule,
    MARSettings,
    Solver,
    log_uniforms,
    normals,
    random_orders,
)
from specmm.image_ar.continuous.programs import HeadPrograms, MARGraphs, check
from specmm.image_ar.files import read_settings, with_options
from specmm.image_ar.shared import Batch, Drawn, ImageOutput, PicturePipeline, made_when_asked
from specmm.loading.hardware import Place, choose_dtype, dtype_name
from specmm.programs.graphs import captures

HEAD_STEPS = 16  # the default window of cspd's variant ``exact``
ITERATIONS = 8  # and of ``release``
PLAIN = Certificate("exact", "plain sampling of the target", 0.0)
DDIM = Certificate(
    "heuristic",
    "DDIM leaves out the noise that the target's steps add, and with it the temperature",
)
EXACT = Certificate(
    "exact",
    "every step of every token's chain is kept or drawn by a maximal coupling "
    "with the target's own head",
    0.0,
)
RELEASE = Certificate(
    "heuristic",
    "the release's rule: the target does not see the drafts of a window, the factor of the spreads "
    "is upside down, densities are widened, and what follows a rejection is kept",
)


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
    steps_option = "num_iter"
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

        The small model comes from the same folder, unless ``small`` names another folder or id.
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

    def save_pretrained(
        self, folder: str | Path, dtype: torch.dtype | None = None, **diffusers: Any
    ) -> None:
        super().save_pretrained(folder, dtype, **diffusers)
        if self.small is not None:
            pair_with(self.vae, Path(folder))

    def moved(self) -> None:
        self.heads: dict[str, Derived[ChainHead]] = {}
        self.programs: HeadPrograms | None = None
        self.graphs: MARGraphs | None = None

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
        seed: int | Sequence[int] | None = None,
        **elsewhere: Any,
    ) -> ImageOutput:
        """Draw ``num_images_per_prompt`` pictures of every class; ``tokens`` are [B, L, C].

        Tokens are in raster order. ``class_labels`` is another name of ``classes``, and
        ``guidance_scale`` of ``cfg``. Options default to the model's settings. ``head_steps`` as a
        number is spaced as in the settings; a string is a spec for ``NoiseSchedule.of``. ``seed``
        or ``generator`` is one a picture, or the first one's: seeds of the others follow. A
        picture's numbers depend on its own seed only, not on the batch. ``elsewhere`` takes
        diffusers' arguments of other pipelines that change nothing here. Raises ``ValueError`` for
        an unknown class or method, for options out of range and for a method without the small
        model it needs.
        """
        output: ImageOutput = self.called(locals())
        return output

    @property
    def side(self) -> int:
        """Pixels along a side of a picture."""
        return int(self.transformer.config.img_size)

    def draw(self, batch: Batch[methods.ContinuousMethod]) -> Drawn:
        steps, claim = self._steps(batch)
        for i, progress in enumerate(steps):
            if interrupted := batch.watch(i, so_far, progress):
                break
        tokens = progress.tokens
        return Drawn(tokens, tokens, progress.stats, claim, whole=not interrupted)

    def _steps(
        self, batch: Batch[methods.ContinuousMethod]
    ) -> tuple[Iterator[MARProgress], Certificate]:
        """The loop that draws ``batch``, and the run's certificate."""
        settings: MARSettings = batch.target
        quick: HeadPrograms | MARGraphs | None = None if batch.on is settings else batch.on
        orders = random_orders(batch.generators, self.transformer.config.seq_len)
        if isinstance(batch.method, methods.CSpD):
            if settings.solver != "ddpm":
                raise ValueError(
                    "solver must be 'ddpm' for cspd, which compares the distributions of its "
                    f"steps, got {settings.solver!r}"
                )
            if batch.method.variant != "exact":
                return self._between_models(batch.method, batch, orders)
        head = self.head(settings.head_steps)
        normal = normals(batch.generators)
        sampler: MARSampler
        # a chain without noise has nothing to couple
        if isinstance(batch.method, methods.CSpD) and settings.temperature > 0:
            numbers = (normal, log_uniforms(batch.generators))
            window, warmth = batch.method.window or HEAD_STEPS, settings.temperature
            programs = None if quick is None else quick.speculation
            sampler, claim = ChainSpeculation(head, *numbers, window, warmth, programs), EXACT
        elif settings.solver == "ddim":
            sampler, claim = Deterministic(head, normal), DDIM
        else:
            sampler, claim = Ancestral(head, normal, settings.temperature), PLAIN
        if quick is not None and isinstance(sampler, PlainSampler):
            sampler.run = quick.chains(sampler)
        conditions = None if quick is None else quick.conditions
        parts = (self.transformer, batch.of, orders, sampler, settings, conditions)
        return decode_mar(*parts), claim

    def _between_models(
        self, method: methods.CSpD, batch: Batch[methods.ContinuousMethod], orders: Tensor
    ) -> tuple[Iterator[MARProgress], Certificate]:
        """Whole tokens drafted by the small model, as in the release.

        Raises ``ValueError`` where there is no small model, and for temperature 0.
        """
        settings: MARSettings = batch.target
        variant = f"variant {method.variant!r}"
        if self.small is None:
            raise ValueError(
                f"cspd's {variant} needs a small model beside the target, there is none"
            )
        if settings.temperature == 0:
            raise ValueError(f"temperature must be above 0 for {variant}, got 0: its σ would be 0")
        window = DraftWindow(method.window or ITERATIONS, method.prefill)
        normal = normals(batch.generators)
        log_uniform = log_uniforms(batch.generators)
        count, length = orders.shape
        steps = len(self.head(settings.head_steps).schedule) + 1
        width = self.transformer.config.token_dim
        noise = normal.draw([length] * count, steps * width).view(count, length, steps, width)
        numbers = [StreamNumbers(normal, log_uniform, b, count) for b in range(count)]
        target, draft = (
            CSpDModel(model, batch.of, count, settings) for model in (self.transformer, self.small)
        )
        both = CSpDBatch(target, draft, orders, noise, numbers)
        return decode_release(both, ReleaseRule(method.relax), window), RELEASE

    def claimed(self, target: MARSettings) -> Mapping[str, object]:
        """The certificate's settings, with the dtype unless it is float32."""
        dtype = self.transformer.dtype
        rounded = {} if dtype == torch.float32 else {"dtype": dtype_name(dtype)}
        return target.claimed | rounded

    def quick(
        self, target: MARSettings, method: methods.ContinuousMethod, batch: int
    ) -> HeadPrograms | MARGraphs:
        """CUDA graphs on a GPU, else compiled programs of the head."""
        head = self.head(target.head_steps)
        check(method, target, head, batch, self.transformer.config.seq_len)
        if not captures(head.device):
            self.programs = self.programs or HeadPrograms(head.device)
            return self.programs
        if self.graphs is None or self.graphs.spent:
            self.graphs = MARGraphs(self.transformer)
        return self.graphs

    @torch.inference_mode()
    def head(self, spec: str) -> ChainHead:
        """The target's head with ``spec`` steps; raises ``ValueError`` as ``check_plain`` does."""
        net = self.transformer.head
        check_plain(net)
        derived = self.heads.setdefault(spec, Derived())
        return derived.of(list(net.parameters()), lambda: ChainHead(net, NoiseSchedule.of(spec)))

    def options_of(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        steps = self.settings.spaced(sampling.get("head_steps"))
        return super().options_of({**sampling, "head_steps": steps})

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
            self.transformer.embed_classes(None, 1)  # raises for a model without guidance
        self.head(chosen.head_steps)  # raises for wrong steps and for a changed head
        return chosen

    @torch.inference_mode()
    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Pictures [B, R, R, 3] uint8 of tokens [B, L, C]; see ``pixels``."""
        latents = unpatchify(tokens, self.transformer.config.patch_size)
        return torch.cat([to_uint8(self.vae.decode_scaled(row)) for row in latents.split(1)])

    pixels = decode_tokens


def so_far(progress: MARProgress) -> SoFar:
    """A copy of the tokens drawn so far, 0 where none is drawn yet."""
    pictures, length = progress.tokens.shape[:2]
    return SoFar(progress.count, pictures * progress.count / length, progress.tokens.clone())


if TYPE_CHECKING:
    MARPipeline: TypeAlias = MARPictures

__getattr__ = made_when_asked(MARPictures)
