"""``VARPipeline``: pictures from a next-scale model, alone or with a smaller one.

Shape letters: B pictures of a batch, K scales, L tokens of all scales, R pixels a side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, cast

import torch
from torch import Tensor

from specmm import methods, zoo
from specmm.choose.when_compiled import Compiled
from specmm.core.derived import placed, version
from specmm.core.randomness import Uniforms
from specmm.core.stats import Certificate, Clock, Stats
from specmm.core.turns import in_its_turn
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.calls import NOT_DRAWN, Callback, Classes, SoFar, labels_of
from specmm.image_ar.files import read_settings, with_options
from specmm.image_ar.scales.collaborative import (
    LARGE,
    Turn,
    alternate,
    certificate,
    code_turns,
    draw_picture,
)
from specmm.image_ar.scales.loading import (
    check_dtype,
    check_models,
    check_tokenizer,
    load_small_var,
    load_var,
    load_vqvae,
)
from specmm.image_ar.scales.next_scale import FeatureMap, log_likelihood
from specmm.image_ar.scales.sampling import (
    InverseCDF,
    ReleaseSampler,
    Sampling,
    ScaleSampler,
    ScaleTokens,
    VARSettings,
)
from specmm.image_ar.scales.tuning import CoDePlan, needed, plan_code, specialised
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.vqvae import VQVAE
from specmm.image_ar.shared import Batch, Drawn, ImageOutput, PicturePipeline, made_when_asked
from specmm.loading.hardware import LARGE as LARGE_MODEL
from specmm.loading.hardware import Place, choose_dtype, prepack
from specmm.programs.compiled import NotCompiled, Program, compiled
from specmm.programs.graphs import Graph, captures, prepare_programs

SOFT_CODES = Certificate(
    "heuristic", "as released, the picture is made from soft codes; tokens are sampled separately"
)
TIES = Certificate("heuristic", "as released, ties at the top-p boundary are broken by sort order")


class VARPictures(PicturePipeline[methods.ScalesMethod]):
    """A next-scale model (VAR), its tokenizer, and perhaps a small model that shares it.

    Threads may share one: calls are answered in the order they come.

    >>> pipe = VARPipeline.from_pretrained("pocket/var", method=specmm.methods.CoDe(n=2))
    >>> out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0))
    """

    vae: VQVAE
    small: VAR | None
    _optional_components: ClassVar[list[str]] = ["small"]
    sampling_options = ("cfg", "temperature", "top_k", "top_p", "more_smooth")
    family = "var"
    registry = methods.SCALES
    plans = "scales"

    def __init__(
        self,
        transformer: VAR,
        vae: VQVAE,
        small: VAR | None = None,
        settings: VARSettings | None = None,
        method: str | methods.ScalesMethod = "ar",
        name: str = "var",
    ) -> None:
        super().__init__(settings or VARSettings(), method, name)
        check_tokenizer(transformer, vae)
        if small is not None:
            check_models(transformer, small)
        vae.decoder.to(memory_format=torch.channels_last)  # a tenth faster, and the same values
        self.register_modules(transformer=transformer, vae=vae, small=small)
        self.measured_plans: dict[tuple[int, Sampling], CoDePlan] = {}
        self.programs: dict[VAR, tuple[object, Program]] = {}  # with the version of the weights
        self.graph: tuple[object, Graph] | None = None  # the last one, with its key

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.ScalesMethod = "ar",
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

        A scale has so many rows that on processors with AMX bfloat16 is faster for models of any
        size; on other processors it is never faster. The small model comes from the same folder,
        unless ``small`` names another folder, id or weights file. The folder's measurements (FID by
        N, and the N that its models are specialised for) apply only to its own pair of models.
        """
        if text_encoder is not None:
            raise ValueError("text_encoder must be left out: this model draws classes")
        resolved = methods.make(methods.SCALES, method)
        place = Place.named(device, dtype, torch_dtype)
        source = zoo.Source(revision=revision, cache_dir=cache_dir)
        folder = zoo.find(name, source=source)
        fast = place.dtype or choose_dtype(LARGE_MODEL, long=True, device=place.where)
        # a GPU counts wherever there is one: the pipeline may be moved to it later
        check_dtype(fast, torch.device("cuda") if torch.cuda.is_available() else place.where)
        transformer = load_var(folder / "transformer", dtype=fast)
        vae = load_vqvae(folder / "vae")
        second = load_small_var(small, vae, fast) if small is not None else None
        if second is None and (folder / "small").is_dir():
            second = load_var(folder / "small", dtype=fast)
        large = prepack(transformer.to(place.where, fast), long=True)
        if second is not None:
            second = prepack(second.to(place.where, fast), long=True)
        settings = read_settings(VARSettings, folder)
        if small is not None:
            settings = replace(settings, fid={}, n=-1)
        return cls(large, vae.to(place.where), second, settings, resolved, str(name))

    @classmethod
    def from_files(
        cls,
        transformer: str | Path,
        vae: str | Path,
        small: str | Path | None = None,
        settings: VARSettings | None = None,
        method: str | methods.ScalesMethod = "ar",
        torch_dtype: torch.dtype = torch.float32,
    ) -> Self:
        """A pipeline of published files (``var_d30.pth``, ``vae_ch160v4096z32.pth``, CoDe's pairs).

        The published tokenizer serves every resolution, with the transformer's scales.
        """
        large = load_var(transformer, dtype=torch_dtype)
        second = None if small is None else load_var(small, dtype=torch_dtype)
        vqvae = load_vqvae(vae, patch_nums=large.config.patch_nums)
        return cls(large, vqvae, second, settings, method)

    def timed(self, method: methods.ScalesMethod) -> bool:
        """Whether ``method`` depends on measured seconds; code of specialised models does not."""
        return method.timed and not (method.name == "code" and self.settings.n != -1)

    def runnable(self, usual: list[methods.ScalesMethod]) -> list[methods.ScalesMethod]:
        """The ``usual`` methods; without a small model only those that do not draft."""
        return [m for m in usual if self.small is not None or not m.drafts]

    def settle(
        self, method: methods.ScalesMethod, batch: int, sampling: Sampling, pictures: int = 1
    ) -> tuple[methods.ScalesMethod, str, None]:
        """``method`` with CoDe's N chosen, the reason, and no record."""
        match method:
            case methods.CoDe(n=-1):
                specialised_to = specialised(self.settings)
                if specialised_to is None:
                    plan = self.plan(batch, sampling)
                    specialised_to = plan.n, plan.reason
                return replace(method, n=specialised_to[0]), specialised_to[1], None
            case methods.Auto():
                return methods.AR(), "plain decoding: no other method is exact", None
        return method, "", None

    def moved(self) -> None:
        self.vae.quantize.float()  # f_hat stays in float32
        self.measured_plans.clear()
        self.programs.clear()
        self.graph = None

    def __call__(
        self,
        classes: Classes | None = None,
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
        compiled: Compiled = False,
        *,
        class_labels: Classes | None = None,
        guidance_scale: float | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = None,
        return_dict: bool = True,
        seed: int | Sequence[int] | None = None,
        **elsewhere: Any,
    ) -> ImageOutput:
        """Draw ``num_images_per_prompt`` pictures of every class; ``tokens`` are [B, L].

        ``class_labels`` is another name of ``classes``. ``guidance_scale`` is ``cfg`` + 1. Options
        default to the model's settings. ``seed`` or ``generator`` is one a picture, or the first
        one's: seeds of the others follow. A picture's numbers depend on its own seed only, not on
        the batch (neither does its rounding, in float32 on a CPU within
        ``specmm.programs.batch_invariant.batch_invariant()``, which takes longer). ``elsewhere``
        takes diffusers' arguments of other pipelines that change nothing here. ``compiled`` runs
        scales of few rows (up to 320, batches of one or a few) as programs of ``torch.compile``:
        pocket/var draws one picture in four fifths of the time (in bfloat16 in no less), after a
        quarter of a minute a scale at the first call for a batch size; "auto" does so once it pays
        (:mod:`specmm.choose.when_compiled`). Raises ``ValueError`` for an unknown class or method,
        for options out of range, for a method without the small model it needs, for ``release``
        with several generators or batches, and where there is no compiler.
        """
        output: ImageOutput = self.called(locals())
        return output

    def cfg_of(self, guidance_scale: float) -> float:
        return max(guidance_scale - 1, 0.0)

    def generators(
        self, args: Mapping[str, Any], method: methods.ScalesMethod, count: int
    ) -> list[torch.Generator]:
        """A generator for each picture, or the user's one generator for all, as in the release."""
        if not method.one_generator:
            return super().generators(args, method, count)
        several = isinstance(args["generator"] or args["seed"], Sequence)
        if several or count > args["batch_size"]:
            raise ValueError(
                "release draws one batch from one generator: give one and a batch_size of at least "
                f"{count}, got batch_size {args['batch_size']}"
            )
        return super().generators(args, method, 1) * count

    def target(
        self,
        cfg: float | None = None,
        temperature: float | Sequence[float] | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        more_smooth: bool | None = None,
    ) -> Sampling:
        """The options of a run, by default the settings'; ``ValueError`` for any out of range."""
        check_dtype(self.transformer.dtype, self.device)
        same_for_all = isinstance(temperature, str) or not isinstance(temperature, Sequence)
        s = with_options(
            self.settings,
            cfg=cfg,
            temperature=temperature if same_for_all else tuple(cast(Sequence[float], temperature)),
            top_k=top_k,
            top_p=top_p,
            more_smooth=more_smooth,
        )
        sampling = Sampling(s.cfg, s.top_k, s.top_p, s.temperature, s.more_smooth)
        sampling.check(self.transformer.config.vocab_size, len(self.transformer.config.schedule))
        return sampling

    def quick(self, target: Sampling, method: methods.ScalesMethod, batch: int) -> bool:
        """Prepare for programs, which are compiled when first needed; always True."""
        if not method.static_shapes:
            raise NotCompiled(f"compiled=True needs ar or code (a scale a pass), got {method}")
        prepare_programs(self.device)
        return True

    def claimed(self, target: Sampling) -> Mapping[str, object]:
        return target.settings

    @property
    def side(self) -> int:
        """Pixels along a side of a picture."""
        return int(self.transformer.config.patch_nums[-1] * self.vae.config.downsampling)

    def log_likelihood(self, classes: Sequence[str | int], tokens: Tensor) -> Tensor:
        """Mean log-probability (nats) a token [B] of ``tokens`` [B, L] of ``classes``."""
        labels = labels_of(self, classes)
        return log_likelihood(self.transformer, self.vae.quantize, labels, tokens, self.target())

    @in_its_turn(lambda pipe: pipe.transformer)
    def plan(self, batch: int, sampling: Sampling | None = None) -> CoDePlan:
        """Measured cost of ``code`` by N for ``batch`` pictures on this machine, and the N chosen;
        cached.

        Raises ``ValueError`` without a small model.
        """
        key = batch, sampling or self.target()
        if key not in self.measured_plans:
            models = self.transformer, needed(self.small, "code"), self.vae
            self.measured_plans[key] = plan_code(*models, *key, self.settings)
        return self.measured_plans[key]

    @torch.inference_mode()
    def decode(self, f_hat: Tensor) -> Tensor:
        """Pictures [B, R, R, 3] uint8 of f_hat; see ``pixels``."""
        return torch.cat([to_uint8(self.vae.decode(row)) for row in f_hat.split(1)])

    pixels = decode

    @torch.inference_mode()
    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Pictures [B, R, R, 3] uint8 of tokens [B, L], from the scales that are drawn in all of
        them (a callback's tokens are ``NOT_DRAWN`` beyond).
        """
        feature_map = FeatureMap(self.vae.quantize, len(tokens))
        for scale in feature_map.schedule.split(tokens):
            if bool((scale < 0).any()):
                break
            feature_map.add(ScaleTokens(scale))
        return self.decode(feature_map.f_hat)

    @torch.inference_mode()
    def draw(self, batch: Batch[methods.ScalesMethod]) -> Drawn:
        """Draw a batch scale by scale, until its end or an interrupt."""
        begin = time.perf_counter()
        clock = Clock()
        feature_map = FeatureMap(self.vae.quantize, len(batch.of))
        steps, claim = self._steps(batch, feature_map, clock)
        rounds = 0
        for _ in steps:
            rounds += 1
            if interrupted := batch.watch(rounds - 1, so_far, feature_map):
                break
        tokens = so_far(feature_map).tokens
        stats = Stats(
            tokens.numel(),
            rounds * len(batch.of),
            rounds,
            time.perf_counter() - begin,
            clock.seconds["draft"],
            clock.seconds["verify"],
        )
        return Drawn(tokens, feature_map.f_hat, stats, claim, whole=not interrupted)

    def _steps(
        self, batch: Batch[methods.ScalesMethod], feature_map: FeatureMap, clock: Clock
    ) -> tuple[Iterator[int], Certificate]:
        """The rounds of ``batch``, and the run's certificate."""
        sampling, method = batch.target, batch.method
        scales = len(feature_map.schedule)
        n = method.n if isinstance(method, methods.CoDe) else scales
        large = self.transformer
        # with all scales by the large model there may be no small one
        small = large if n == scales else needed(self.small, method.name)
        turns = code_turns(large, small, n)
        claim = certificate(turns, LARGE)
        quick = batch.on is not sampling
        if quick and not method.one_generator and captures(self.device):
            return self._replayed(turns, feature_map, batch, clock), claim
        if quick:
            turns = [replace(turn, blocks=self._blocks(turn.model)) for turn in turns]
        if method.one_generator and sampling.more_smooth:
            claim = SOFT_CODES
        elif method.one_generator and sampling.top_p < 1:
            claim = TIES
        sampler = self._sampler(batch, feature_map)
        return alternate(turns, feature_map, batch.of, sampling, sampler, clock), claim

    def _replayed(
        self,
        turns: list[Turn],
        feature_map: FeatureMap,
        batch: Batch[methods.ScalesMethod],
        clock: Clock,
    ) -> Iterator[int]:
        """All rounds at once, as one CUDA graph."""
        quantizer, sampling = self.vae.quantize, batch.target
        networks = *(turn.model for turn in turns), quantizer
        key = turns[0].scales, len(batch.of), sampling, placed(*networks)
        if self.graph is None or self.graph[0] != key:  # one at a time: it keeps its memory
            self.graph = key, Graph(partial(draw_picture, turns, quantizer, sampling))
        with clock("verify"):
            numbers = Uniforms(batch.generators).draw(feature_map.schedule.length)
            feature_map.tokens, feature_map.f_hat, ends = self.graph[1](batch.of, numbers)
            feature_map.ends = ends.cpu()
        for turn in turns:
            for k in turn.scales:
                feature_map.check(turn.model, k)
                feature_map.drawn = k + 1
                yield k

    def _sampler(
        self, batch: Batch[methods.ScalesMethod], feature_map: FeatureMap
    ) -> Callable[[range], ScaleSampler]:
        """The sampler for a turn's scales: one for both models, which draws a picture from its own
        generator, or the release's, where each model has a copy of the one generator of all.
        """
        schedule = feature_map.schedule
        if not batch.method.one_generator:
            shared = InverseCDF(batch.target, Uniforms(batch.generators), len(schedule))
            return lambda _: shared
        state = batch.generators[0].get_state()

        def sampler(scales: range) -> ReleaseSampler:
            generator = torch.Generator(self.device)
            generator.set_state(state)  # the release seeds both models alike
            release = ReleaseSampler(batch.target, generator, len(schedule))
            vocabulary = self.transformer.config.vocab_size
            release.burn(schedule, feature_map.batch, vocabulary, scales.start)
            return release

        return sampler

    def _blocks(self, model: VAR) -> Program:
        """The compiled blocks of ``model``; compiling may change logits by rounding."""
        now = version(model)
        if model not in self.programs or self.programs[model][0] != now:
            self.programs[model] = now, compiled(VAR.run, self.device)
        return self.programs[model][1]


def so_far(feature_map: FeatureMap) -> SoFar:
    """A copy of the scales drawn so far."""
    tokens = feature_map.tokens.clone()
    tokens[:, feature_map.schedule.starts[feature_map.drawn] :] = NOT_DRAWN
    share = feature_map.drawn / len(feature_map.schedule)
    return SoFar(feature_map.drawn, share * len(tokens), tokens)


if TYPE_CHECKING:
    VARPipeline: TypeAlias = VARPictures

__getattr__ = made_when_asked(VARPictures)
