"""Recognises the content of a folder: a drafter in one of the supported layouts, or a model that
can draft or be a target.

Only ``config.json`` and the headers of safetensors files are read, never a weight. To add a layout,
add an entry to ``FORMATS``; the first entry that matches counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from specmm import zoo
from specmm.extending.registry import named
from specmm.hf.drafters.files import INDEX, Facts
from specmm.hf.loading.pretrained import MTP
from specmm.hf.pictures.picture_models import draws_pictures
from specmm.loading.checkpoints import FOLDER_NAMES, PICKLED, read_json

SPECULATORS = "speculators_model_type"
ASSISTANT = "_assistant"  # how transformers' types of them end
DIFFUSION = ("dream", "llada", "mdlm", "bd3lm")
UNSAID = {"mimo_v2_flash": r"model\.mtp\.layers\.(\d+)\."}  # MTP layers no config tells of
LLAVA = "mm_vision_tower"  # as its authors write its config
DFLASH = ("block_size", "mask_token_id", "target_layer_ids")


class Weight(NamedTuple):
    """A tensor by its header: its dtype as safetensors writes it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a ``config.json``; raises ``ValueError`` for one without."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise ValueError(f"there must be a folder at {self.path}, got none")
        files = (zoo.TRANSFORMERS, zoo.PIPELINE, zoo.PACKAGE)
        if not any((self.path / name).is_file() for name in files):
            raise ValueError(
                f"{self.path} must hold a drafter or a model, got no {zoo.TRANSFORMERS}; name the "
                "folder that has one"
            )

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of ``config.json``; {} if there is none."""
        file = self.path / zoo.TRANSFORMERS
        return read_json(file) if file.is_file() else {}

    @cached_property
    def layer(self) -> Facts:
        """The part of the config that holds a layer's sizes; layouts nest it differently."""
        for name in ("transformer_layer_config", "text_config"):
            if isinstance(self.facts.get(name), Mapping):
                return {**self.facts[name]}
        return self.facts

    @cached_property
    def files(self) -> list[Path]:
        """The files of weights, as readers look for them."""
        if (self.path / INDEX).is_file():
            names = set(read_json(self.path / INDEX).get("weight_map", {}).values())
            return [self.path / Path(name).name for name in sorted(names)]
        files = [self.path / name for name in FOLDER_NAMES if (self.path / name).is_file()]
        return files[:1]

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """The tensors by their headers; none of pickled files, which would have to be read."""
        weights: dict[str, Weight] = {}
        for file in self.files:
            if file.suffix not in PICKLED:
                weights |= _header(file)
        return weights


def _header(file: Path) -> dict[str, Weight]:
    """The tensors in a safetensors ``file``, by its header alone."""
    try:
        with safe_open(file, "pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: Weight(x.get_dtype(), tuple(x.get_shape())) for n, x in parts.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} must be a safetensors file, got one that is missing or damaged; fetch it again"
        ) from error


@dataclass(frozen=True)
class DrafterFormat:
    """A layout: its ``title``, whether a folder ``matches`` it, and the ``methods`` that use it,
    the best first.

    A drafter in an ``own`` layout belongs to one target; other layouts are of complete models. A
    layout that can also be a target has a ``command`` that runs it. ``exports`` are functions that
    write it as another layout, ``"module:name"`` by the layout's name: ``(folder, target model,
    out)``; they may return a note for the user.
    """

    title: str
    matches: Callable[[ModelFolder], bool]
    methods: tuple[str, ...] = ()
    own: bool = True
    command: str = ""
    exports: Mapping[str, str] = field(default_factory=dict)


def _named(*kinds: str) -> Callable[[ModelFolder], bool]:
    """A test whether a folder in speculators' layout names one of ``kinds``."""
    return lambda folder: folder.facts.get(SPECULATORS) in kinds


def _model(name: str) -> Callable[[ModelFolder], bool]:
    return lambda folder: folder.facts.get("model") == name


def _type(folder: ModelFolder) -> str:
    return str(folder.facts.get("model_type") or "").lower()


def _is_dflash(folder: ModelFolder) -> bool:
    values = {**folder.facts, **(folder.facts.get("dflash_config") or {})}
    return "dflash_config" in folder.facts or all(name in values for name in DFLASH)


def _is_msd(folder: ModelFolder) -> bool:
    """Whether ``folder`` holds an MSD head, ours or released."""
    nested = "text_config" in folder.facts or "vision_config" in folder.facts
    shared = bool(folder.facts.get("target_embeddings")) and not nested
    pickled = not folder.weights and bool(folder.files)
    fused = "fc.weight" in folder.weights and "layers.0.self_attn.q_proj.weight" in folder.weights
    released = _type(folder) in ("llava", "qwen2_vl") and not nested and pickled
    return not nested and (shared or fused or released)


def sees(folder: ModelFolder) -> bool:
    """Whether the folder holds a vision-language model."""
    return any(name in folder.facts for name in ("vision_config", "language_model", LLAVA))


BLOCKS = "specmm.diffusion_drafters.export"
HEADS = "specmm.hf.drafters.eagle3_files"
EAGLE3 = {layout: f"{HEADS}:to_{layout}" for layout in ("speculators", "eagle", "specforge")}
FORMATS: tuple[DrafterFormat, ...] = (
    DrafterFormat("picture model's block drafter", _model("BlockHead"), ("speculative",)),
    DrafterFormat("picture model's EAGLE head", _model("EagleHead"), ("eagle",)),
    DrafterFormat("speculators EAGLE-3 head", _named("eagle3"), ("eagle3",), exports=EAGLE3),
    DrafterFormat("speculators P-EAGLE head", _named("peagle"), ("eagle3",), exports=EAGLE3),
    DrafterFormat("speculators DFlash drafter", _named("dflash"), ("block",)),
    DrafterFormat("speculators DSpark drafter", _named("dspark"), ("block",)),
    DrafterFormat("speculators MTP layers", _named("mtp"), ("mtp",)),
    DrafterFormat("speculators EAGLE-1 head", _named("eagle")),
    DrafterFormat("another speculators drafter", lambda folder: SPECULATORS in folder.facts),
    DrafterFormat(
        "MTP layers, fine-tuned here",
        lambda folder: _type(folder) == "mtp",
        ("mtp",),
        exports={"checkpoint": "specmm.hf.drafters.mtp_export:to_checkpoint"},
    ),
    DrafterFormat("DEER drafter", lambda folder: _type(folder) == "deer", ("deer",)),
    DrafterFormat(
        "EAGLE-3 head as of SafeAILab or SpecForge",
        lambda folder: bool(named(f"{HEADS}:is_eagle3")(folder.facts)),
        ("eagle3",),
        exports=EAGLE3,
    ),
    DrafterFormat(
        "DFlash assistant of transformers",
        lambda folder: _type(folder).endswith(ASSISTANT) and _is_dflash(folder),
        ("block",),
    ),
    DrafterFormat(
        "assistant of transformers",
        lambda folder: _type(folder).endswith(ASSISTANT),
        ("assistant",),
    ),
    DrafterFormat(
        "DFlash drafter as of z-lab or SpecForge",
        _is_dflash,
        ("block",),
        exports={"speculators": f"{BLOCKS}:to_speculators", "specforge": f"{BLOCKS}:to_specforge"},
    ),
    DrafterFormat("MSD head", _is_msd, ("msd",), exports={"eagle": "specmm.vlm.export:to_eagle"}),
    DrafterFormat(
        "diffusion language model",
        lambda folder: _type(folder) in DIFFUSION or folder.facts.get("parameterization") == "subs",
        ("diffuspec", "specdiff", "deer"),
        own=False,
    ),
    DrafterFormat(
        "picture model of transformers",
        lambda folder: draws_pictures(folder.path),
        ("vlm-draft",),
        own=False,
        command="generate",
    ),
    DrafterFormat(
        "picture model of this library",
        lambda folder: (folder.path / zoo.PIPELINE).is_file(),
        own=False,
        command="generate",
    ),
    DrafterFormat(
        "language model in a Python package",
        lambda folder: (folder.path / zoo.PACKAGE).is_file(),
        own=False,
        command="complete",
    ),
    DrafterFormat("vision-language model", sees, ("vlm-draft",), own=False, command="ask"),
    DrafterFormat(
        "language model",
        lambda folder: {"vocab_size", "hidden_size"} <= set(folder.layer) and bool(folder.files),
        ("text-draft",),
        own=False,
        command="complete",
    ),
)


def recognised(folder: ModelFolder) -> DrafterFormat:
    """The layout of ``folder``; raises ``ValueError`` if it is unknown."""
    match = next((known for known in FORMATS if known.matches(folder)), None)
    if match is None:
        kind = folder.facts.get("model_type") or folder.facts.get("architectures")
        raise ValueError(
            f"{folder.path} must hold a drafter or a model of a known layout, got a config.json of "
            f"{kind!r}; specmm methods lists what drafts"
        )
    return match


def mtp_layers(folder: ModelFolder) -> int:
    """The number of layers for multi-token prediction in a target's checkpoint.

    It comes from the config, or else from the names of the weights.
    """
    count = next((int(folder.layer[name]) for name in MTP if folder.layer.get(name)), 0)
    if count or _type(folder) not in UNSAID:
        return count
    matches = map(re.compile(UNSAID[_type(folder)]).match, folder.weights)
    return len({match[1] for match in matches if match})
