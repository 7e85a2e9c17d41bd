"""Checks the arguments of an image pipeline's call, and defines its output, in diffusers' terms.

Shape letters: N pictures, R pixels a side.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from specmm.extending.kinds import check_flags, check_whole, shown, texts_of
from specmm.extending.registry import OPTION, unknown

Classes: TypeAlias = str | int | Sequence[str | int] | Tensor | npt.NDArray[np.integer[Any]]
Callback: TypeAlias = Callable[[Any, int, int, dict[str, Any]], dict[str, Any]]
Pictures: TypeAlias = list[Image.Image] | Any  # or an array or a tensor
Tell: TypeAlias = Callable[[int, int, dict[str, Any]], object]
"""Called with a round's number, the fewest tokens that a picture has, and all tokens by name."""

NOT_DRAWN = -1  # in a callback's tokens
OFTEN = 0.1  # seconds between two states of a bar
OUTPUT_TYPES = ("pil", "np", "pt", "uint8", "latent")
WITHOUT = {  # arguments of diffusers' pipelines, and why some models do without them
    "num_inference_steps": "which takes a step a token, or a scale, and no number of them",
    "negative_prompt": "whose guidance leads away from what it draws without a class or prompt",
    "prompt_embeds": "which reads texts or classes alone",
    "negative_prompt_embeds": "which reads texts or classes alone",
    "latents": "which starts from a seed: give seed or generator",
    "eta": "which takes no steps of a diffusion",
    "guidance_rescale": "whose guidance has a scale alone: give guidance_scale",
}
TENSOR_INPUTS = ("tokens",)  # what callbacks may ask for


def check_call(output_type: str, batch_size: int, each: int, return_dict: bool) -> None:
    """Raise ``ValueError`` for options that no pipeline supports."""
    check_flags(return_dict=return_dict)
    if not isinstance(output_type, str) or output_type not in OUTPUT_TYPES:
        raise unknown("output_type", output_type, OUTPUT_TYPES)
    check_whole(batch_size=batch_size, num_images_per_prompt=each)
    if batch_size < 1 or each < 1:
        raise ValueError(
            f"batch_size and num_images_per_prompt must be at least 1, got {batch_size} and {each}"
        )


def refuse_elsewhere(pipe: Any, known: Iterable[str], options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``options`` hold an argument of another diffusers pipeline that would
    change the pictures of ``pipe``, and ``TypeError`` for a name that neither diffusers nor
    ``known`` has.
    """
    for name, value in options.items():
        if name in ("height", "width"):
            if value is not None and not (isinstance(value, Real) and value == pipe.side):
                raise ValueError(
                    f"{name} must be {pipe.side} for {pipe.name}, which draws one size, got "
                    f"{shown(value)}"
                )
        elif name not in WITHOUT:
            raise TypeError(str(unknown("argument", name, known, OPTION)))
        elif value is not None:
            raise ValueError(f"{name} must be None for {pipe.name}, {WITHOUT[name]}")


def check_saving(options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for arguments of diffusers' ``save_pretrained`` that ask for files of
    another form than ours, and ``TypeError`` for unknown arguments.
    """
    usual = {"safe_serialization": True, "variant": None, "push_to_hub": False}
    for name, value in options.items():
        if name not in (*usual, "max_shard_size"):
            raise TypeError(str(unknown("argument", name, ("dtype", *usual), OPTION)))
        if name in usual and value != usual[name]:
            raise ValueError(
                f"{name} must be {usual[name]}, got {shown(value)}: weights are written as "
                "safetensors, under one name, in the dtype of dtype=…"
            )


def told(pipe: Any, callback: Callback | None, inputs: Sequence[str] | None) -> Tell | None:
    """A function that calls diffusers' ``callback`` after each round of ``pipe`` with the tensors
    named by ``inputs`` (None: all).

    Raises ``ValueError`` for a callback that cannot be called, and for unknown inputs.
    """
    if not (callback is None or callable(callback)):
        raise ValueError(
            "callback_on_step_end must be a function of the pipeline, a round's number, the "
            f"tokens so far and a dict, got {shown(callback)}"
        )
    chosen = getattr(callback, "tensor_inputs", TENSOR_INPUTS) if inputs is None else inputs
    chosen = texts_of("callback_on_step_end_tensor_inputs", chosen)
    for name in chosen:
        if name not in TENSOR_INPUTS:
            raise unknown("callback_on_step_end_tensor_inputs", name, TENSOR_INPUTS)
    if callback is None:
        return None

    def tell(round_: int, count: int, tensors: dict[str, Any]) -> None:
        callback(pipe, round_, count, {name: tensors[name] for name in chosen})

    return tell


class SoFar(NamedTuple):
    """A batch after a round: the ``fewest`` tokens (or scales) drawn of any picture, the tokens
    drawn in all as a number of ``pictures``, and all ``tokens`` (``NOT_DRAWN`` where none is yet).
    """

    fewest: int
    pictures: float
    tokens: Tensor


@dataclass(frozen=True)
class PicturesSoFar:
    """Event for watchers within a call: the tokens drawn so far, as a number of pictures."""

    pictures: float


@dataclass
class Watch:
    """Runs after each round of a batch of ``pipe``: calls the user's callback, moves the progress
    bar, and checks whether the user has interrupted.
    """

    pipe: Any
    tell: Tell | None
    move: Callable[[float], object] | None  # with the pictures' worth drawn of a batch
    moved: float = 0.0  # when the bar last moved, by ``perf_counter``

    def __call__(self, round_: int, so_far: Callable[..., SoFar], *of: Any) -> bool:
        """Whether the user has interrupted; ``so_far(*of)`` is called only if a callback asks."""
        due = self.move is not None and time.perf_counter() - self.moved > OFTEN
        if due or self.tell is not None:
            partial = so_far(*of)
            if self.move is not None and due:
                self.moved = time.perf_counter()
                self.move(partial.pictures)
            if self.tell is not None:
                self.tell(round_, partial.fewest, {"tokens": partial.tokens})
        return bool(self.pipe._interrupt)


def negatives_of(negative: str | Sequence[str] | None, count: int) -> list[str | None]:
    """The negative prompt of each of ``count`` prompts: ``negative`` if it is one text, else one of
    its ``count`` texts each.

    Raises ``ValueError`` for another number of texts and for values that are not texts.
    """
    if negative is None or isinstance(negative, str):
        return [negative] * count
    negatives: list[str | None] = [*texts_of("negative_prompt", negative)]
    if len(negatives) != count:
        raise ValueError(
            f"negative_prompt must be one text or one for each of the {count} prompts, got "
            f"{len(negatives)}"
        )
    return negatives


def listed(classes: Classes) -> list[Any]:
    """One class or several, of any type, as a list."""
    if isinstance(classes, Tensor | np.ndarray):
        items = classes.tolist()  # a number where there are no dimensions
        return items if isinstance(items, list) else [items]
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        return [classes]
    return list(classes)


def class_ids(wanted: Sequence[str | int], names: Sequence[str], count: int) -> list[int]:
    """Ids of class names or ids (``"3"``, too); ``ValueError`` with a suggestion for others."""
    return [_class_id(item, names, count) for item in wanted]


def _class_id(item: object, names: Sequence[str], count: int) -> int:
    """The id of a class, by its name or number; raises ``ValueError`` for an unknown one."""
    if isinstance(item, str) and not item.isdecimal():
        if item not in names:
            raise unknown("class", item, names)
        return list(names).index(item)
    try:
        number = int(item) if isinstance(item, str) else operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"classes must be names or ids of classes, got {shown(item)}") from None
    if not 0 <= number < count:
        bound = "at least 0" if number < 0 else f"below {count}"
        raise ValueError(f"class id must be {bound}, got {number}")
    return number


def labels_of(pipe: Any, wanted: Classes | None, repeats: int = 1) -> Tensor:
    """Class ids that ``pipe`` draws for ``wanted`` classes, ``repeats`` of each; raises
    ``ValueError`` for no class and as :func:`class_ids` does.
    """
    named = [] if wanted is None else listed(wanted)
    if not named:
        raise ValueError("classes must name at least one class, got none")
    ids = class_ids(named, pipe.settings.classes, pipe.transformer.config.num_classes)
    return torch.tensor(ids, device=pipe.device).repeat_interleave(repeats)


def pictures_as(output_type: str, drawn: Sequence[Tensor], tokens: Tensor) -> Pictures:
    """Pictures ``drawn`` [N, R, R, 3] uint8 (a list of batches) in the ``output_type`` of
    diffusers: "pil" as images, "np" float32 [N, R, R, 3] and "pt" float32 [N, 3, R, R] in [0, 1],
    "uint8" as arrays.

    "latent" gives the ``tokens`` instead of pixels.
    """
    if output_type == "latent":
        return tokens
    pictures = torch.cat(list(drawn))
    if output_type == "pt":
        return pictures.permute(0, 3, 1, 2).float() / 255
    array = pictures.cpu().numpy()
    if output_type == "pil":
        return [Image.fromarray(picture) for picture in array]
    return array if output_type == "uint8" else array.astype(np.float32) / 255
