"""``VARPipeline``: pictures from a next-scale model, alone or with a smaller one, with a
certificate.

Shape letters: B pictures of a batch, K scales, L tokens of all scales, R pixels a side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from specmm import methods, zoo
from specmm.certificate import Certificate
from specmm.collaborative import alternate, certificate
from specmm.dtypes import LARGE as MANY
from specmm.dtypes import choose_dtype
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.output import (
    Callback,
    Drawn,
    ImageOutput,
    PicturePipeline,
    check_call,
    draw_batches,
)
from specmm.image_ar.scales import tuning
from specmm.image_ar.scales.chooser import Chooser, needed
from specmm.image_ar.scales.drawing import LARGE, code_turns, turn
from specmm.image_ar.scales.feature_map import FeatureMap
from specmm.image_ar.scales.loading import load_var, load_vqvae, save_var, save_vqvae
from specmm.image_ar.scales.pair import check_dtype, check_pair, check_tokenizer, load_small
from specmm.image_ar.scales.quality import log_likelihood
from specmm.image_ar.scales.release import in_turn, state_of
from specmm.image_ar.scales.sampling import Inverse, Sampler, Sampling
from specmm.image_ar.scales.settings import Settings
from specmm.image_ar.scales.static import CompiledVAR, check_method
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.verified import Verified
from specmm.image_ar.scales.vqvae import VQVAE
from specmm.image_ar.settings import (
    class_labels,
    read_settings,
    with_options,
    write_index,
    write_settings,
)
from specmm.prepacked import lay_weights
from specmm.randomness import Uniforms, sample_generators
from specmm.stats import Clock, Stats
from specmm.turns import in_its_turn

SOFT = Certificate(
    "heuristic", "as released, tokens are drawn beside the soft codes that the picture is made of"
)
TIES = Certificate(
    "heuristic", "as released, a sort decides which equals of the nucleus's last token are left out"
)


class Job(NamedTuple):
    """A batch: labels [B] of its pictures, how they are sampled, their uniforms, whether programs
    run the scales, and the state of the generator that the release's sampler begins with, if it is
    to draw.
    """

    labels: Tensor
    sampling: Sampling
    uniforms: Uniforms
    compiled: bool
    state: Tensor | None


class VARPipeline(PicturePipeline[methods.ScalesMethod], DiffusionPipeline):  # type: ignore[misc]
    """A next-scale model (VAR), its tokenizer, and perhaps a small model that shares it, after one
    call.

    Several threads may share one: calls are answered in the order they come.

    >>> pipe = VARPipeline.from_pretrained("pocket/var", method=specmm.methods.CoDe(n=2))
    >>> out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0))
    """

    sampling_options = ("cfg", "temperature", "top_k", "top_p", "more_smooth")
    compiles = True
    plans = "scales"

    def __init__(
        self,
        transformer: VAR,
        vae: VQVAE,
        small: VAR | None = None,
        settings: Settings | None = None,
        method: str | methods.ScalesMethod = "ar",
        name: str = "var",
    ) -> None:
        super().__init__()
        check_tokenizer(transformer, vae)
        if small is not None:
            check_pair(transformer, small)
        vae.decoder.to(memory_format=torch.channels_last)  # a tenth faster, and the same values
        self.register_modules(transformer=transformer, vae=vae, small=small)
        self.settings, self.name, self.method = (
            settings or Settings(),
            name,
            methods.resolve_scales(method),
        )
        self.chooser = Chooser(transformer, small, vae, self.settings)
        self.programs: dict[VAR, CompiledVAR] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.ScalesMethod = "ar",
        torch_dtype: torch.dtype | None = None,
        small: str | Path | None = None,
        text_encoder: None = None,
        device: torch.device | str = "cpu",
    ) -> VARPipeline:
        """A pipeline of a folder, pocket name or hub id; the dtype defaults to the device's
        fastest.

        A scale has so many rows that bfloat16 pays at any size of model on a processor with AMX,
        and on no other. The small model is that of the folder, or ``small``: another model's
        folder, name, id, or a weights file. What was measured of the folder's own pair, FID by N
        and the N they are specialised for, is not taken for another.
        """
        if text_encoder is not None:
            raise ValueError("text_encoder must be left out: this model draws classes")
        resolved, folder = methods.resolve_scales(method), zoo.find(name)
        transformer, vae = load_var(folder / "transformer"), load_vqvae(folder / "vae")
        dtype = torch_dtype or choose_dtype(MANY, long=True, device=device)
        check_dtype(
            dtype, torch.device("cuda" if torch.cuda.is_available() else device)
        )  # it may be moved later
        second = load_small(small, vae) if small is not None else None
        if second is None and (folder / "small").is_dir():
            second = load_var(folder / "small")
        large = lay_weights(transformer.to(device, dtype), long=True)
        second = None if second is None else lay_weights(second.to(device, dtype), long=True)
        settings = read_settings(Settings, folder)
        settings = settings if small is None else replace(settings, fid={}, n=-1)
        return cls(large, vae.to(device), second, settings, resolved, str(name))

    @classmethod
    def from_files(
        cls,
        transformer: str | Path,
        vae: str | Path,
        small: str | Path | None = None,
        settings: Settings | None = None,
        method: str | methods.ScalesMethod = "ar",
        torch_dtype: torch.dtype = torch.float32,
    ) -> VARPipeline:
        """A pipeline of published files (``var_d30.pth``, ``vae_ch160v4096z32.pth``); CoDe's pairs
        load likewise.

        The published tokenizer serves every resolution: its scales are those of the transformer.
        """
        large = load_var(transformer, dtype=torch_dtype)
        second = None if small is None else load_var(small, dtype=torch_dtype)
        return cls(
            large, load_vqvae(vae, patch_nums=large.config.patch_nums), second, settings, method
        )

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write everything ``from_pretrained`` reads, with the official parameter names, in
        safetensors.
        """
        folder = Path(folder)
        save_var(self.transformer, folder / "transformer", dtype)
        save_vqvae(self.vae, folder / "vae", dtype)
        if self.small is not None:
            save_var(self.small, folder / "small", dtype)
        write_settings(self.settings, folder)
        write_index("VARPipeline", "var", folder)

    @property
    def device(self) -> torch.device:
        """Where the transformer lives."""
        return self.transformer.device

    def timed(self, method: methods.ScalesMethod) -> bool:
        """Not for method code where the models are specialised for an N."""
        return method.timed and not (method.name == "code" and self.settings.n != -1)

    def runnable(self, usual: list[methods.ScalesMethod]) -> list[methods.ScalesMethod]:
        """All of the ``usual`` methods with a small model, none without."""
        return [m for m in usual if self.small is not None or not m.drafts]

    def settle(
        self, method: methods.ScalesMethod, batch: int, sampling: Sampling
    ) -> tuple[methods.ScalesMethod, str]:
        """See :class:`PicturePipeline`."""
        return self.chooser.settle(method, batch, sampling)

    def to(self, *args: Any, **kwargs: Any) -> VARPipeline:
        """Move models and tokenizer to a device or dtype; sums of codes stay in float32."""
        super().to(*args, **kwargs)
        self.vae.quantize.float()
        self.chooser.clear()
        self.programs.clear()
        return self

    @in_its_turn(lambda pipe: pipe.transformer)
    def __call__(
        self,
        classes: str | int | Sequence[str | int],
        num_images_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        method: str | methods.ScalesMethod | None = None,
        cfg: float | None = None,
        temperature: float | Sequence[float] | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        more_smooth: bool | None = None,
        batch_size: int = 8,
        output_type: str = "pil",
        callback_on_step_end: Callback | None = None,
        compiled: bool = False,
    ) -> ImageOutput:
        """Draw ``num_images_per_prompt`` pictures of every class; ``tokens`` are [B, L], coarse to
        fine.

        What is not given comes from the model's settings. ``generator`` is one for all (each
        picture gets a seed from it) or one a picture; its uniforms depend on its own seed only, not
        on the batch (neither does its rounding, in float32 on a CPU within
        ``specmm.batch_invariant.batch_invariant()``, which takes a quarter to a half longer).
        ``compiled`` runs scales of few rows (up to 320, batches of one or a few) as programs of
        ``torch.compile``: pocket/var draws one picture in four fifths of the time, after a quarter
        of a minute a scale at the first call for a batch size. Raises ``ValueError`` for an unknown
        class or method, for options out of range, for a method without the small model it needs,
        for ``release`` with several generators or batches, and where there is no compiler.
        """
        check_call(output_type, batch_size, num_images_per_prompt)
        check_dtype(self.transformer.dtype, self.device)
        sampling = self.target(cfg, temperature, top_k, top_p, more_smooth)
        chosen = self.method if method is None else methods.resolve_scales(method)
        labels = class_labels(self, classes, num_images_per_prompt)
        at_once, state = min(batch_size, len(labels)), None
        if isinstance(chosen, methods.CoDe) and chosen.release:
            state = state_of(generator, self.device, len(labels), batch_size)
        generators = sample_generators(
            generator if state is None else None, len(labels), self.device
        )
        if compiled:
            check_method(chosen)
        settled, note = self.chooser.settle(chosen, at_once, sampling)
        name = f"{chosen.name}: {note}" if note else chosen.name

        def draw(rows: slice) -> Drawn:
            full = len(labels[rows]) == at_once  # programs for the rest would not pay
            job = Job(labels[rows], sampling, Uniforms(generators[rows]), compiled and full, state)
            return self._batch(job, settled, name, output_type, callback_on_step_end)

        bar = self.progress_bar(total=len(labels))
        return draw_batches(draw, len(labels), batch_size, output_type, bar, sampling.settings)

    def target(
        self,
        cfg: float | None = None,
        temperature: float | Sequence[float] | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        more_smooth: bool | None = None,
    ) -> Sampling:
        """The options of a run, the model's settings standing in for what is None; ``ValueError``
        out of range.
        """
        temperature = tuple(temperature) if isinstance(temperature, Sequence) else temperature
        given = dict(
            cfg=cfg, temperature=temperature, top_k=top_k, top_p=top_p, more_smooth=more_smooth
        )
        s = with_options(self.settings, **given)
        sampling = Sampling(s.cfg, s.top_k, s.top_p, s.temperature, s.more_smooth)
        sampling.check(self.transformer.config.vocab_size, len(self.transformer.config.schedule))
        return sampling

    def log_likelihood(self, classes: Sequence[str | int], tokens: Tensor) -> Tensor:
        """Mean log-probability a token [B] of ``tokens`` [B, L] of ``classes``; see
        ``quality.log_likelihood``.
        """
        labels = class_labels(self, classes)
        return log_likelihood(self.transformer, self.vae.quantize, labels, tokens, self.target())

    @in_its_turn(lambda pipe: pipe.transformer)
    def plan(self, batch: int, sampling: Sampling | None = None) -> tuning.Plan:
        """What ``code`` costs here by N at this batch, measured once, and the N it takes; ``specmm
        plan`` prints it.
        """
        return self.chooser.plan(batch, sampling or self.target())

    @torch.inference_mode()
    def decode(self, f_hat: Tensor) -> Tensor:
        """Pictures [B, R, R, 3] uint8 of sums of codes, one by one: batches of other sizes round
        otherwise.
        """
        return torch.cat([to_uint8(self.vae.decode(row)) for row in f_hat.split(1)])

    @torch.inference_mode()
    def _batch(
        self,
        job: Job,
        method: methods.ScalesMethod,
        name: str,
        output_type: str,
        callback: Callback | None,
    ) -> Drawn:
        feature_map = FeatureMap(self.vae.quantize, len(job.labels))
        clock, rounds, begin = Clock(), 0, time.perf_counter()
        steps, claim = self._steps(method, feature_map, job, clock)
        for _ in steps:
            rounds += 1
            if callback is not None:
                callback(self, rounds - 1, len(feature_map.tokens), {"tokens": feature_map.tokens})
        tokens, seconds = torch.cat(feature_map.tokens, dim=1), time.perf_counter() - begin
        parts = clock.seconds["draft"], clock.seconds["verify"]
        stats = Stats(tokens.numel(), rounds * len(job.labels), rounds, seconds, *parts)
        images = None if output_type == "latent" else self.decode(feature_map.sums[-1])
        return Drawn(tokens, images, stats, claim, name)

    def _steps(
        self, method: methods.ScalesMethod, feature_map: FeatureMap, job: Job, clock: Clock
    ) -> tuple[Iterator[int], Certificate]:
        """The rounds of a settled ``method``, and what it may claim."""
        labels, sampling = job.labels, job.sampling
        if isinstance(method, methods.ScaleSpeculative):
            models = self.transformer, needed(self.small, method.name)
            worker = Verified(
                *models, feature_map, labels, sampling, job.uniforms, method.window, method.until
            )
            return worker.rounds(clock), Certificate(
                "exact", "scales kept are the target's own draws", 0.0
            )
        large, sampler = self._quick(self.transformer, job), self._sampler(job, feature_map)
        if isinstance(method, methods.CoDe):
            whole = method.n == len(feature_map.schedule)  # which is the large model's alone
            small = large if whole else self._quick(needed(self.small, method.name), job)
            turns = code_turns(large, small, method.n, feature_map, labels, sampling, sampler)
        else:
            turns = [
                turn(
                    large,
                    LARGE,
                    range(len(feature_map.schedule)),
                    feature_map,
                    labels,
                    sampling,
                    sampler,
                )
            ]
        if job.state is not None and (sampling.more_smooth or sampling.top_p < 1):
            return alternate(turns, clock), SOFT if sampling.more_smooth else TIES
        return alternate(turns, clock), certificate(turns, LARGE)

    def _sampler(self, job: Job, feature_map: FeatureMap) -> Callable[[range], Sampler]:
        """Who draws the uniforms in a turn: the same for both models, but where each draws as the
        release does.
        """
        if job.state is not None:
            sizes = feature_map.schedule, len(job.labels), self.transformer.config.vocab_size
            return in_turn(job.sampling, job.state, self.device, *sizes)
        uniforms = Inverse(job.sampling, job.uniforms, len(feature_map.schedule))
        return lambda _: uniforms

    def _quick(self, model: VAR, job: Job) -> VAR:
        """``model``, with programs for its scales if ``job`` asks for them."""
        if not job.compiled:
            return model
        if model not in self.programs:
            self.programs[model] = CompiledVAR(model)
        return cast(VAR, self.programs[model])
