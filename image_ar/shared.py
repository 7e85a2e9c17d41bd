"""Base of all image pipelines: a call, from its arguments to its pictures.

Shape letters: B pictures, R pixels a side.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from specmm import methods
from specmm.choose.contest import Record
from specmm.choose.when_compiled import Compiled, Turn, Works
from specmm.core.randomness import sample_generators
from specmm.core.stats import Certificate, Stats, merged_certificate, total
from specmm.core.turns import turns_of
from specmm.core.watching import is_watched, tell
from specmm.extending.kinds import check_numbers, either
from specmm.image_ar.calls import (
    TENSOR_INPUTS,
    Pictures,
    PicturesSoFar,
    Tell,
    Watch,
    check_call,
    check_saving,
    labels_of,
    pictures_as,
    refuse_elsewhere,
    told,
)
from specmm.image_ar.files import save_module, with_options, write_index, write_settings
from specmm.image_ar.records import Recorder, write_pictures
from specmm.loading.hardware import check_holds_numbers, check_multiplies, named_device
from specmm.zoo.model_files import digest_of_models

M = TypeVar("M", bound=methods.Declared)


@dataclass
class ImageOutput(Mapping[str, Any]):
    """``images`` (see :func:`specmm.image_ar.calls.pictures_as`), ``tokens`` [B, …], ``stats``,
    ``certificate``, ``method``; ``compiled`` [B] says which pictures ran compiled, and ``records``
    [B] hold the inputs from which each can be drawn again (:mod:`specmm.image_ar.records`).

    Fields can also be indexed by name and by number, as in diffusers' outputs.
    """

    images: Pictures
    tokens: Tensor
    stats: Stats
    certificate: Certificate
    method: str
    compiled: list[bool]
    records: list[dict[str, Any]]

    def to_tuple(self) -> tuple[Any, ...]:
        """All fields."""
        return tuple(getattr(self, name) for name in self)

    def save(self, *files: str | Path) -> None:
        """Write the pictures (of ``output_type`` "pil") to a PNG, WebP or JPEG ``file`` each, with
        their records: ``specmm generate --like FILE`` draws them again.

        Raises ``ValueError`` for another number of files or another kind.
        """
        write_pictures(self.images, self.records, files)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return dict(zip(self, self.to_tuple(), strict=True))[key]
        return self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return iter([field.name for field in fields(self)])

    def __len__(self) -> int:
        return len(fields(self))


@dataclass(frozen=True)
class Batch(Generic[M]):
    """Pictures drawn together: their classes or prompts (``of``), and a generator for each.

    ``method`` is fully resolved. ``target`` says how they are sampled; they are drawn ``on`` it or
    on its compiled form (the pipeline's ``quick``). ``rows`` pictures are drawn at once, further
    ones as rows end. ``ended`` is called with the number of rows that ended, and ``watch`` after
    each round; it returns whether to stop. The ``record`` of method auto stores the seconds.
    """

    of: Any
    generators: list[torch.Generator]
    method: M
    target: Any
    on: Any
    rows: int
    ended: Callable[[int], object]
    watch: Watch
    record: Record | None


@dataclass
class Drawn:
    """A batch: ``tokens`` [B, …], and the ``latents`` that its pixels are decoded from.

    ``measured``: the number of tokens over which the certificate's total variation is averaged.
    ``whole`` is False if the user interrupted: ``tokens`` then hold the tokens so far.
    """

    tokens: Tensor
    latents: Any
    stats: Stats
    certificate: Certificate
    measured: float = 1.0
    whole: bool = True


@dataclass
class Moving:
    """Moves the progress ``bar`` of a call of ``count`` pictures, ``done`` of which are finished.

    The bar may be a user's (``pipe.progress_bar``); only its ``update`` is called.
    """

    bar: Any
    count: int
    done: int = 0
    shown: float = 0.0  # pictures that the bar shows

    def needed(self) -> bool:
        """Whether the bar or a watcher shows moves; on a GPU each makes the host wait."""
        return is_watched() or not getattr(self.bar, "disable", False)

    def ended(self, count: int) -> None:
        """Count ``count`` more pictures as done; later moves no longer include them."""
        self.done += count

    def __call__(self, pictures: float = 0.0) -> None:
        now = self.done + math.floor(8 * pictures) / 8  # eighths add up without a remainder
        now = min(now, self.count)  # the last rows of a queue are done and in its batch still
        self.bar.update(now - self.shown)
        self.shown = now
        tell(PicturesSoFar(now))


class PicturePipeline(ABC, Generic[M]):
    """An image pipeline of any family; it declares its properties, so that no code checks its type.

    A family's class ``…Pictures`` defines the arguments of calls, settings, networks, and how a
    batch is drawn. Users get a ``…Pipeline`` (:func:`of_diffusers`). Commands, which need little of
    diffusers and should not wait seconds for its import, use :func:`alone`.
    """

    transformer: Any
    parts: Any  # drafters and plans, of token models
    family: ClassVar[str]
    registry: ClassVar[methods.Methods]
    saved: ClassVar[tuple[str, ...]] = ("transformer", "vae", "small")  # networks, and folders
    sampling_options: ClassVar[tuple[str, ...]]  # arguments of ``target``, and of a call
    call_options: ClassVar[tuple[str, ...]] = ()  # arguments of a call about pictures
    steps_option: ClassVar[str | None] = None  # diffusers' num_inference_steps
    paints: bool = False  # a diffusion model makes pixels, and is what ``guidance_scale`` is about
    batch_invariant: ClassVar[bool] = True  # within ``specmm.batch_invariant``, in float32
    plans: ClassVar[Literal["trees", "scales"] | None] = None  # what ``specmm plan`` measures
    _interrupt = False
    called_on: torch.device | None = None  # the device of calls, if networks rest on the CPU
    log_likelihood: Any = None  # a function of tokens, if they have a likelihood
    _callback_tensor_inputs: ClassVar[list[str]] = list(TENSOR_INPUTS)  # as in diffusers

    def __init__(self, settings: Any, method: Any, name: str, family: str | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.method: M = methods.make(self.registry, method)
        self.name = name
        self.source = {"model": name}  # see ``open_pictures``
        self.works = Works(family or self.family)  # measured seconds, compiled and not

    def called(self, args: dict[str, Any]) -> Any:
        """Run a call with the arguments ``args``, by name. Returns an :class:`ImageOutput`, or
        without ``return_dict`` a tuple of its fields.

        Calls wait for one another; networks are on the device where they run.
        """
        with turns_of(self.transformer).take(), self.in_place():
            return self._called(args)

    def _called(self, args: dict[str, Any]) -> Any:
        """The work of :meth:`called`: check, settle the method, draw batches, certify."""
        check_holds_numbers(self.transformer, self.name)
        check_multiplies(self.transformer, self.name)
        batch_size, output_type = args["batch_size"], args["output_type"]
        check_call(output_type, batch_size, args["num_images_per_prompt"], args["return_dict"])
        names = (*self.sampling_options, *self.call_options, "guidance_scale")
        typed = {name: args[name] for name in names} | args.pop("elsewhere")
        args |= dict.fromkeys(names) | self.settle_names(typed)
        inputs = args["callback_on_step_end_tensor_inputs"]
        heard = told(self, args["callback_on_step_end"], inputs)
        sampling = {name: args[name] for name in self.sampling_options}
        target = self.measured(sampling, **{name: args[name] for name in self.call_options})
        chosen: M = self.method if args["method"] is None else args["method"]
        by_hand = [args.get(name) for name in ("drafter", "tree", "rule")]
        chosen = methods.by_hand(self.registry, chosen, *by_hand)
        asked = self.asked(args, target)
        count = len(asked)
        generators = self.generators(args, chosen, count)
        recorder = Recorder(self, args)
        records: list[dict[str, Any]] = []
        rows = min(batch_size, count)
        turn = self.turn(args["compiled"], target, chosen, rows)
        decided, reason, record = self.settle(chosen, rows, target, count)
        parts: list[Drawn] = []
        pictures: list[Tensor] = []
        together = batch_size * self.turns(chosen, heard)
        self._interrupt = False  # diffusers' users set it in a callback
        with self.progress_bar(total=count) as bar:
            move = Moving(bar, count)
            for first in range(0, count, together):
                part = slice(first, first + together)
                rngs = generators[part]
                watch = Watch(self, heard, move if move.needed() else None)
                common = (batch_size, move.ended, watch, record)
                # the last pictures may be too few for the program, and another would not pay
                with turn.batch(len(rngs), count - first, len(rngs) >= rows) as on:
                    drawn = self.draw(Batch(asked[part], rngs, decided, target, on, *common))
                if output_type != "latent":
                    pictures.append(self.pixels(drawn.latents))
                drawn.latents = None  # free the memory before the next batch
                parts.append(drawn)
                claim = drawn.certificate.under(self.claimed(target))
                programs = turn.compiled[part]
                padded = self.padded(asked[part])
                new = recorder.records(part, rngs, decided, batch_size, programs, claim, padded)
                records += new if drawn.whole else [one | {"interrupted": True} for one in new]
                move.ended(first + len(rngs) - move.done)
                move()
                if not drawn.whole:
                    break
        certificate = merged_certificate([(part.certificate, part.measured) for part in parts])
        assert certificate is not None, "there is at least one picture"
        tokens = torch.cat([part.tokens for part in parts])
        output = ImageOutput(
            images=pictures_as(output_type, pictures, tokens),
            tokens=tokens,
            stats=total([part.stats for part in parts]),
            certificate=certificate.under(self.claimed(target)),
            method=self.ran_as(chosen, decided, reason),
            compiled=turn.compiled,
            records=records,
        )
        return output if args["return_dict"] else output.to_tuple()

    def settle_names(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The ``options`` of a call that are not None, with diffusers' names replaced by this
        family's.

        Raises ``ValueError`` for options without a meaning here, and ``TypeError`` for unknown
        names.
        """
        known = (*self.sampling_options, *self.call_options)
        named = dict(options)
        # where a diffusion model paints the tokens, guidance_scale is that model's
        scale = None if self.paints else named.pop("guidance_scale", None)
        if scale is not None:
            check_numbers(guidance_scale=scale)
            cfg = self.cfg_of(scale)
            named["cfg"] = either("cfg", named.get("cfg"), "guidance_scale", cfg)
        if self.steps_option is not None:
            steps = named.pop("num_inference_steps", None)
            ours = named.get(self.steps_option)
            named[self.steps_option] = either(self.steps_option, ours, "num_inference_steps", steps)
        refuse_elsewhere(self, known, {k: v for k, v in named.items() if k not in known})
        return {k: v for k, v in named.items() if k in known and v is not None}

    def cfg_of(self, guidance_scale: float) -> float:
        """The ``cfg`` that guides as much as diffusers' ``guidance_scale``, of which 1 is off."""
        return max(guidance_scale, 1.0)

    @abstractmethod
    def __call__(self, *args: Any, **options: Any) -> ImageOutput:
        """Draw pictures; each family defines its own arguments and passes them to ``called``."""

    @abstractmethod
    def target(self, *args: Any, **options: Any) -> Any:
        """The sampling target for ``options``, which may be any of ``sampling_options``."""

    @abstractmethod
    def draw(self, batch: Batch[M]) -> Drawn:
        """The tokens of a batch."""

    @abstractmethod
    def pixels(self, latents: Any, /) -> Tensor:
        """Pictures [B, R, R, 3] uint8, decoded one by one: other batch sizes round otherwise."""

    @abstractmethod
    def claimed(self, target: Any) -> Mapping[str, object]:
        """The settings of ``target`` that a certificate names."""

    @abstractmethod
    def quick(self, target: Any, method: M, batch: int) -> Any:
        """The compiled form of ``target`` for ``batch`` pictures of ``method``; calls with the same
        options share it.

        Raises ``ValueError`` if this cannot be compiled or there is no compiler.
        """

    @abstractmethod
    def moved(self) -> None:
        """Drop programs and values derived from the networks on their former device."""

    def asked(self, args: Mapping[str, Any], target: Any) -> Any:
        """The class ids [B] of a call's pictures.

        Raises ``ValueError`` for no classes and for unknown ones.
        """
        classes = either("classes", args["classes"], "class_labels", args["class_labels"])
        return labels_of(self, classes, args["num_images_per_prompt"])

    def generators(self, args: Mapping[str, Any], method: M, count: int) -> list[torch.Generator]:
        """A generator for each of ``count`` pictures."""
        return sample_generators(count, self.device, args["generator"], args["seed"])

    def turns(self, method: M, tell: Tell | None) -> int:
        """The number of batches that one loop of ``method`` draws."""
        return 1

    def ran_as(self, method: M, decided: M, reason: str) -> str:
        """The name for a run of ``method`` and, if it chose another method, the ``reason``."""
        return f"{method.name}: {reason}" if reason else method.name

    if TYPE_CHECKING:  # from the next class in the MRO: diffusers' pipeline, or ``Alone``

        def register_modules(self, **networks: Any) -> None:
            """Hold networks by name."""

        def progress_bar(self, iterable: Iterable[Any] | None = None, total: int = 0) -> Any:
            """The progress bar of a call."""

        def set_progress_bar_config(self, **options: Any) -> None:
            """Set ``options`` of tqdm for the progress bars of later calls."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move all networks to a device or dtype; programs and derived values are recreated."""
        super().to(*args, **kwargs)  # type: ignore[misc]  # of diffusers' pipeline, or ``Alone``
        self.works.clear()
        self.moved()
        return self

    def save_pretrained(
        self, folder: str | Path, dtype: torch.dtype | None = None, **diffusers: Any
    ) -> None:
        """Write everything ``from_pretrained`` reads, with the official parameter names, in
        safetensors (in ``dtype``, such as bf16, which halves it). Arguments of ``diffusers``'
        pipelines are accepted where they change nothing here: a network's weights are one file.

        Raises ``ValueError`` for arguments that would change what is written.
        """
        check_saving(diffusers)
        folder = Path(folder)
        for name in self.saved:
            if getattr(self, name) is not None:
                save_module(getattr(self, name), folder / name, dtype)
        write_settings(self.settings, folder)
        write_index(self.family, folder)

    @functools.cached_property
    def files(self) -> str:
        """A digest of the files that the pipeline was opened from, "" if there are none."""
        return digest_of_models(self.source.values())

    @property
    def device(self) -> torch.device:
        """The transformer's device."""
        device: torch.device = next(self.transformer.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the transformer computes in."""
        dtype: torch.dtype = self.transformer.dtype
        return dtype

    def enable_model_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Hold the networks on the GPU during calls only, and on the CPU in between.

        All move together, because pictures are decoded while others are drawn. Raises
        ``ValueError`` without a GPU, and if ``gpu_id`` and ``device`` are both given.
        """
        if gpu_id is not None and device is not None:
            raise ValueError(f"give gpu_id or device, not both, got {gpu_id} and {device}")
        gpu = named_device(device if gpu_id is None else f"cuda:{gpu_id}")
        if gpu.type == "cpu" and device is None:
            raise ValueError("enable_model_cpu_offload needs a GPU, there is none; leave it out")
        self.to("cpu")
        self.called_on = gpu

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context for a call, with the networks on the device where they run."""
        if self.called_on is None:
            yield
            return
        self.to(self.called_on)
        try:
            yield
        finally:
            self.to("cpu")
            if self.called_on.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def takes(self) -> Literal["classes", "prompt"]:
        """The kind of input: classes or prompts."""
        return "classes"

    @property
    def grid(self) -> int:
        """Tokens along a side of a picture that is drawn token by token, else 0."""
        return int(getattr(self.transformer.config, "grid", 0))

    def padded(self, asked: Any) -> bool:
        """Whether ``asked`` inputs are padded to the longest, which changes their rounding."""
        return False

    def length_of(self, prompt: str) -> int:
        """Tokens of a ``prompt``; 0 where the batch does not depend on it."""
        return 0

    def measured(
        self, sampling: Mapping[str, Any], prompt: str | None = None, **wanted: Any
    ) -> Any:
        """The target that plans are measured on, under the options ``sampling`` and for a
        ``prompt``.

        Raises ``ValueError`` for models that draw one size of classes.
        """
        for name in ("prompt",) if prompt else wanted:
            raise ValueError(f"{name} must be None for models that draw classes, all of one size")
        return self.target(**sampling)

    def options_of(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """All options of ``sampling_options``, the model's own where ``sampling`` has none."""
        settings = with_options(self.settings, **sampling)
        return {name: getattr(settings, name) for name in self.sampling_options}

    def turn(self, compiled: Compiled, target: Any, method: M, batch: int) -> Turn[Any]:
        """Decides whether ``batch`` pictures of ``method`` run compiled or on ``target``."""
        key = (method, *self.work(target), batch)
        make = partial(self.quick, target, method, batch)
        return self.works.begin(compiled, target, make, self.transformer, key)

    def work(self, target: Any) -> tuple[Any, ...]:
        """The properties of ``target`` on which a picture's seconds depend."""
        return (target,)

    def timed(self, method: M) -> bool:
        """Whether the tokens of ``method`` depend on seconds measured on this machine."""
        return method.timed

    def runnable(self, usual: list[M]) -> list[M]:
        """The ``usual`` methods for which this model has a drafter or a small model."""
        return list(usual)

    def settle(
        self, method: M, batch: int, sampling: Any, pictures: int = 1
    ) -> tuple[M, str, Record | None]:
        """Resolve ``method`` (auto, for example) for ``pictures``, ``batch`` at once, and give the
        reason. Measurements use ``sampling``, the result of ``target`` or ``measured``. The record,
        if there is one, takes the pictures' seconds.
        """
        return method, "", None


class Alone:
    """The parts of diffusers' pipeline class that image pipelines use, without its import."""

    bar: Mapping[str, Any] = {}

    def register_modules(self, **networks: Any) -> None:
        """Hold networks by name."""
        self.networks = networks
        vars(self).update(networks)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move all networks to a device or dtype."""
        for network in self.networks.values():
            if isinstance(network, nn.Module):
                network.to(*args, **kwargs)
        return self

    def progress_bar(self, iterable: Iterable[Any] | None = None, total: int = 0) -> Any:
        """The bar of a call."""
        return tqdm(iterable, total=total, **self.bar)

    def set_progress_bar_config(self, **options: Any) -> None:
        """``options`` of tqdm for the bar of each call."""
        self.bar = options


@functools.cache
def alone(kind: type[Any]) -> type[Any]:
    """A family's ``…Pictures`` as a pipeline without diffusers."""
    return type(kind.__name__, (kind, Alone), {"__module__": kind.__module__})


@functools.cache
def of_diffusers(kind: type[Any]) -> type[Any]:
    """The ``…Pipeline`` class for users, which adds diffusers' base to a family's ``…Pictures``."""
    from diffusers import DiffusionPipeline

    name = kind.__name__.replace("Pictures", "Pipeline")
    facts = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(name, (kind, DiffusionPipeline), facts)


def made_when_asked(kind: Any) -> Callable[[str], Any]:
    """The ``__getattr__`` of a family's module, which makes its ``…Pipeline`` on first use."""

    def attribute(name: str) -> Any:
        if name == kind.__name__.replace("Pictures", "Pipeline"):
            return of_diffusers(kind)
        raise AttributeError(f"module {kind.__module__!r} has no attribute {name!r}")

    return attribute
