"""What the families of image models share: outputs, and the loop over batches.

Shape letters: B pictures, R pixels a side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from specmm import methods
from specmm.choose.when_compiled import Compiled, Turn, Works
from specmm.core.stats import Certificate, Stats, merged_certificate, total
from specmm.core.turns import turns_of
from specmm.image_ar.calls import TENSOR_INPUTS, Pictures, pictures_as
from specmm.loading.hardware import named_device

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class ImageOutput(Mapping[str, Any]):
    """``images`` (see :func:`specmm.image_ar.calls.pictures_as`), ``tokens`` [B, …], ``stats``,
    ``certificate``, ``method``; ``compiled`` [B] says which pictures programs were run for.

    As diffusers' outputs they are had by name and by number, too.
    """

    images: Pictures
    tokens: Tensor
    stats: Stats
    certificate: Certificate
    method: str
    compiled: list[bool]

    def to_tuple(self) -> tuple[Any, ...]:
        """All of them."""
        return tuple(getattr(self, name) for name in self)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return dict(zip(self, self.to_tuple(), strict=True))[key]
        return self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return iter([field.name for field in fields(self)])

    def __len__(self) -> int:
        return len(fields(self))


M = TypeVar("M", bound=methods.Declared)


class PicturePipeline(Generic[M]):
    """What an image pipeline of any family declares, so that nobody asks its type.

    Families write ``…Pictures``. Users get a ``…Pipeline`` (:func:`of_diffusers`); commands, which
    need little of diffusers, and not the seconds of its import, :func:`alone`.
    """

    transformer: Any
    settings: Any
    parts: Any  # drafters and plans, of token models
    sampling_options: ClassVar[tuple[str, ...]]  # of ``target``, and of a call
    call_options: ClassVar[tuple[str, ...]] = ()  # of a call, what pictures are like
    works: Works  # what is known of its seconds, compiled and not
    batch_invariant: ClassVar[bool] = True  # within ``specmm.batch_invariant``, in float32
    plans: ClassVar[Literal["trees", "scales"] | None] = None  # what ``specmm plan`` measures
    called_on: torch.device | None = None  # where calls run whose networks rest on the CPU
    log_likelihood: Any = None  # of tokens under the target, where they have one
    _callback_tensor_inputs: ClassVar[list[str]] = list(TENSOR_INPUTS)  # as in diffusers

    def __call__(self, *args: Any, **options: Any) -> ImageOutput:
        """Draw pictures; every family says of what and how."""
        raise NotImplementedError

    def target(self, *args: Any, **options: Any) -> Any:
        """How pictures are drawn under ``options``, which may be any ``sampling_options``."""
        raise NotImplementedError

    if TYPE_CHECKING:  # of what comes after this class: diffusers' pipeline, or ``Alone``

        def register_modules(self, **networks: Any) -> None:
            """Hold networks by name."""

        def progress_bar(self, iterable: Iterable[Any] | None = None, total: int = 0) -> Any:
            """The bar of a call."""

        def to(self, *args: Any, **kwargs: Any) -> Self:
            """Move all networks to a device or dtype."""

        def save_pretrained(self, folder: str | Path) -> None:
            """Write what ``from_pretrained`` reads."""

        def set_progress_bar_config(self, **options: Any) -> None:
            """``options`` of tqdm for the bar of each call."""

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        found: torch.device = next(self.transformer.parameters()).device
        return found

    @property
    def dtype(self) -> torch.dtype:
        """What the transformer computes in."""
        found: torch.dtype = self.transformer.dtype
        return found

    def enable_model_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """From now on the networks are on the GPU while a call draws, and on the CPU in between.

        They move as one: pictures are decoded while others are drawn. Raises ``ValueError`` where
        there is no GPU, and for one that is named twice.
        """
        if gpu_id is not None and device is not None:
            raise ValueError(f"give gpu_id or device, not both, got {gpu_id} and {device}")
        place = named_device(device if gpu_id is None else f"cuda:{gpu_id}")
        if place.type == "cpu" and device is None:
            raise ValueError("enable_model_cpu_offload needs a GPU, there is none; leave it out")
        self.to("cpu")
        self.called_on = place

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While a call draws the networks are where they run."""
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
        """What a picture is drawn from."""
        return "classes"

    @property
    def grid(self) -> int:
        """Tokens along a side of a picture that is drawn token by token, else 0."""
        return int(getattr(self.transformer.config, "grid", 0))

    def steps(self, **wanted: Any) -> int:
        """What a callback is told when a picture is whole, of tokens or scales; pictures are
        ``wanted`` so.
        """
        raise NotImplementedError

    def measured(
        self, sampling: Mapping[str, Any], prompt: str | None = None, **wanted: Any
    ) -> Any:
        """The target that plans are measured on: under options of ``sampling``, of pictures
        ``wanted`` so, and of a ``prompt``.

        Raises ``ValueError`` for models that draw one size of classes.
        """
        for name in ("prompt",) if prompt else wanted:
            raise ValueError(f"{name} must be None for models that draw classes, all of one size")
        return self.target(**sampling)

    def turn(self, compiled: Compiled, target: Any, method: M, batch: int) -> Turn[Any]:
        """The decisions whether ``batch`` pictures at a time are ``compiled``, drawn under
        ``target`` by ``method``.
        """
        raise NotImplementedError

    def timed(self, method: M) -> bool:
        """Whether what ``method`` draws depends on seconds measured on this machine."""
        return method.timed

    def runnable(self, usual: list[M]) -> list[M]:
        """Those of the ``usual`` methods that this model has a drafter or a small model for."""
        return list(usual)

    def settle(self, method: M, batch: int, sampling: Any, pictures: int = 1) -> tuple[M, str]:
        """``method`` with what it leaves open decided for ``pictures``, ``batch`` at once, and why;
        measured under ``sampling``, what ``target`` or ``measured`` gives.
        """
        return method, ""


class Alone:
    """What image pipelines take of diffusers."""

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
    """A family's ``…Pictures`` as the ``…Pipeline`` that it is for users: one of diffusers."""
    from diffusers import DiffusionPipeline

    name = kind.__name__.replace("Pictures", "Pipeline")
    facts = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(name, (kind, DiffusionPipeline), facts)


def made_when_asked(kind: Any) -> Callable[[str], Any]:
    """The ``__getattr__`` of a family's module: its ``…Pipeline``, for whoever asks for it."""

    def attribute(name: str) -> Any:
        if name == kind.__name__.replace("Pictures", "Pipeline"):
            return of_diffusers(kind)
        raise AttributeError(f"module {kind.__module__!r} has no attribute {name!r}")

    return attribute


def call_of_pipeline(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a pipeline's ``__call__``: calls wait for one another, and find the networks where
    they run.
    """

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        pipe: Any = args[0]
        with turns_of(pipe.transformer).take(), pipe.in_place():
            return call(*args, **kwargs)

    return run


@dataclass
class Drawn:
    """One batch: ``tokens`` [B, …], ``images`` [B, R, R, 3] uint8 (None for output type latent).

    ``measured`` is the number of tokens that the certificate's total variation is the mean of.
    """

    tokens: Tensor
    images: Tensor | None
    stats: Stats
    certificate: Certificate
    method: str
    measured: float = 1.0


def draw_batches(
    draw: Callable[[slice], Drawn],
    count: int,
    batch_size: int,
    output_type: str,
    bar: Any,
    settings: Mapping[str, object],
    return_dict: bool = True,
    compiled: list[bool] | None = None,
) -> Any:
    """``draw`` the rows of ``count`` pictures, ``batch_size`` at a time, under a progress ``bar``,
    which ``draw`` may move earlier. ``settings`` are those the certificate is about. ``draw`` fills
    ``compiled`` [B], whether programs are run for a picture; None: for none.

    What a call returns: an :class:`ImageOutput`, or without ``return_dict`` a tuple of its fields.
    """
    parts = []
    with bar:
        for first in range(0, count, batch_size):
            parts.append(draw(slice(first, first + batch_size)))
            bar.update(first + len(parts[-1].tokens) - bar.n)
    certificate = merged_certificate([(part.certificate, part.measured) for part in parts])
    assert certificate is not None, "there is at least one picture"
    drawn = [part.images for part in parts if part.images is not None]
    tokens = torch.cat([part.tokens for part in parts])
    output = ImageOutput(
        images=pictures_as(output_type, drawn, tokens),
        tokens=tokens,
        stats=total([part.stats for part in parts]),
        certificate=certificate.under(settings),
        method=parts[-1].method,
        compiled=[False] * count if compiled is None else compiled,
    )
    return output if return_dict else output.to_tuple()
