"""``ImagePipeline``: opens an image model as the pipeline of its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specmm import methods, zoo
from specmm.extending.registry import Registry, unknown
from specmm.hf.pictures.picture_models import picture_type as picture_type
from specmm.loading.checkpoints import read_json

if TYPE_CHECKING:
    import torch

    from specmm.image_ar.shared import PicturePipeline


@dataclass(frozen=True)
class ImageFamily:
    """A family's ``…Pictures`` class and its module, its methods by name, and the methods that
    ``specmm bench`` compares by default.
    """

    module: str
    pictures: str
    methods: Registry
    compared: str
    takes_drafter: bool = False  # in a folder of its own


FAMILIES = {  # by the "family" in model_index.json
    "llamagen": ImageFamily(
        "specmm.image_ar.tokens.pipeline",
        "LlamaGenPictures",
        methods.IMAGE_TOKENS,
        "speculative,lantern++",
        takes_drafter=True,
    ),
    "mar": ImageFamily(
        "specmm.image_ar.continuous.pipeline", "MARPictures", methods.CONTINUOUS, "cspd"
    ),
    "var": ImageFamily("specmm.image_ar.scales.pipeline", "VARPictures", methods.SCALES, "code"),
}


TRANSFORMERS_FAMILY = ImageFamily(
    "specmm.image_ar.transformers_pipeline",
    "TransformersImagePictures",
    methods.TRANSFORMERS_IMAGES,
    "sjd,prompt-lookup",
    takes_drafter=True,
)


# for diffusers: DiffusionPipeline.from_pretrained(folder, custom_pipeline=custom_pipeline)
custom_pipeline = str(Path(__file__).with_name("diffusers_pipeline.py"))


class ImagePipeline:
    """Pictures from an autoregressive image model, by any of its methods, with a certificate.

    >>> pipe = ImagePipeline.from_pretrained("pocket/llamagen", method="lantern++")
    >>> out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0))
    """

    @staticmethod
    def from_pretrained(
        name: str | Path,
        method: Any = "ar",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        drafter: Any = None,
        small: str | Path | None = None,
        text_encoder: str | Path | None = None,
        device_map: str | dict[str, Any] | None = None,
        quantization_config: Any = None,
        variant: str | None = None,
        file: str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        download: bool = False,
    ) -> PicturePipeline[Any]:
        """The pipeline of a folder, a pocket name, a published name (``specmm zoo --published``) or
        a hub id, by its family's ``from_pretrained``.

        It runs on this machine's best device, in the fastest dtype there, unless ``device`` and
        ``dtype`` (or ``torch_dtype``) say otherwise. ``drafter`` is a drafter for a token model if
        its folder has none, ``small`` the small model for a MAR or a VAR, ``text_encoder`` a
        LlamaGen's encoder of prompts. Models of transformers take ``device_map``,
        ``quantization_config`` and ``variant``. ``revision`` and ``cache_dir`` are a hub id's,
        ``file`` chooses one of a repository's models, ``download`` agrees to fetch more than a
        gigabyte. Raises ``ValueError`` for a model that cannot be found, fetched or read, and for
        options that its family does not take.
        """
        arguments = dict(
            device=device,
            dtype=dtype,
            torch_dtype=torch_dtype,
            drafter=drafter,
            small=small,
            text_encoder=text_encoder,
            device_map=device_map,
            quantization_config=quantization_config,
            variant=variant,
        )
        options = {option: value for option, value in arguments.items() if value is not None}
        source = zoo.Source(file, revision, cache_dir, download)
        here = Path(str(name)).exists() or str(name) in zoo.pocket_models()
        if here and (file or revision):
            raise ValueError(
                f"file and revision are for hub ids, got the local model {name}; leave them out"
            )
        if source != zoo.USUAL and not here:
            name = zoo.fetched(str(name), source)
        return open_pictures(name, method, options, "of_diffusers")


def open_pictures(
    name: str | Path,
    method: Any,
    options: Mapping[str, Any],
    kind: Literal["of_diffusers", "alone"],
) -> PicturePipeline[Any]:
    """The pipeline of a model by its family's ``from_pretrained``, of a ``kind`` of
    :mod:`specmm.image_ar.shared`.

    Raises ``ValueError`` for ``options`` that the family does not take.
    """
    from specmm.image_ar import shared
    from specmm.image_ar.records import MODELS

    family = family_of(name)
    pictures = getattr(import_module(family.module), family.pictures)
    for option in options.keys() - set(signature(pictures.from_pretrained).parameters):
        raise ValueError(f"{option} does not serve models such as {name}; leave it out")
    pipeline = getattr(shared, kind)(pictures)
    opened: PicturePipeline[Any] = pipeline.from_pretrained(name, method, **options)
    named = {"model": name, **{option: options.get(option) for option in MODELS[1:]}}
    opened.source = {k: str(v) for k, v in named.items() if isinstance(v, str | Path)}
    return opened


def family_of(name: str | Path) -> ImageFamily:
    """The family of a model; ``ValueError`` if the model is not found or its family unknown.

    Nothing is fetched for a model of several published files.
    """
    entry = None if Path(str(name)).exists() else zoo.entry_of(str(name))
    if entry is not None and entry.parts:
        return FAMILIES[entry.family]
    if picture_type(zoo.pocket_models().get(str(name), Path(str(name)))) is not None:
        return TRANSFORMERS_FAMILY
    folder = zoo.find(name)
    if picture_type(folder) is not None:  # fetched from the hub
        return TRANSFORMERS_FAMILY
    file = folder / zoo.PIPELINE
    if not file.is_file():
        raise ValueError(f"{name} draws no pictures; run: specmm complete, or specmm ask")
    family = read_json(file).get("family", "llamagen")
    if family not in FAMILIES:
        raise unknown(f"family in {file}", family, FAMILIES)
    return FAMILIES[family]
