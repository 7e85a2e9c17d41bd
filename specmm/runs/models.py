"""Models by name, whatever their family: what they are for, their methods, their pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specmm import methods, zoo
from specmm.registry import Registry

if TYPE_CHECKING:
    import torch

Kind = Literal["images", "questions", "text"]


@dataclass(frozen=True)
class Place:
    """Where a model runs and in which dtype; None is the fastest there."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None

    @staticmethod
    def named(device: str = "cpu", dtype: str = "auto") -> Place:
        """The place of these names.

        Raises ``ValueError`` for a device that is not here and for an unknown dtype.
        """
        from specmm.hardware import named_device, named_dtype

        return Place(named_device(device), named_dtype(dtype))


HERE = Place()


def place_of(network: Any) -> dict[str, str]:
    """Where ``network`` runs, for JSON."""
    weight = next(network.parameters())
    return {"device": str(weight.device), "dtype": str(weight.dtype).removeprefix("torch.")}


def kind_of(model: str) -> Kind:
    """What a model is for; raises ``ValueError`` when it is neither a folder nor a pocket model."""
    from specmm.checkpoints import read_json

    folder = zoo.pocket_models().get(model, Path(model))
    if (folder / zoo.PIPELINE).is_file():
        return "images"
    if (folder / zoo.PACKAGE).is_file():
        return "text"
    if not (folder / zoo.TRANSFORMERS).is_file():
        raise ValueError(
            f"model must be a folder or a pocket model, got {model!r}; specmm zoo lists those that are here"
        )
    sees = "vision_config" in read_json(folder / zoo.TRANSFORMERS)
    return "questions" if sees or (folder / "preprocessor_config.json").is_file() else "text"


def draws(model: str) -> bool:
    """Whether ``model`` is an image model."""
    try:
        zoo.find(model)
    except ValueError:
        return False
    return True


def methods_of(kind: Kind, model: str) -> Registry:
    """The methods that ``model``, of a ``kind``, may be run by."""
    from specmm.image_ar.pipeline import family_of

    if kind == "images":
        return family_of(model).methods
    return methods.VQA if kind == "questions" else methods.TEXT


def open_model(
    kind: Kind,
    model: str,
    place: Place = HERE,
    method: Any = "ar",
    drafter: str | None = None,
    text_encoder: str | Path | None = None,
) -> Any:
    """The pipeline of ``model``, a folder, pocket name or hub id, without progress bars of its own.

    ``drafter`` is for questions and text, ``text_encoder`` for images of prompts. Raises
    ``ValueError`` for a model that cannot be found or read.
    """
    if kind == "images":
        from specmm.image_ar.pipeline import ImagePipeline

        given = dict(torch_dtype=place.dtype, device=place.device, text_encoder=text_encoder)
        pipe = ImagePipeline.from_pretrained(model, method=method, **given)
        pipe.set_progress_bar_config(disable=True)
        return pipe
    from transformers.utils.logging import disable_progress_bar

    from specmm.text.pipeline import TextPipeline
    from specmm.vlm.pipeline import VQAPipeline

    disable_progress_bar()
    family: Any = VQAPipeline if kind == "questions" else TextPipeline
    return family.from_pretrained(model, method, drafter, place.dtype, place.device)
