"""Describes a drafter from its folder alone: its kind, its target, and how to use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from specmm import methods, zoo
from specmm.extending.registry import named
from specmm.hf.drafters.drafter_formats import DrafterFormat, ModelFolder, mtp_layers, recognised
from specmm.hf.drafters.drafting import assemble, load_drafter
from specmm.hf.drafters.files import layers_named
from specmm.hf.drafters.translation import PADDING
from specmm.hf.loading.pretrained import TOKENIZER, find_target, load_config, weights_folder
from specmm.hf.pictures.picture_models import picture_type, processes

SIZES = {  # the sizes shown of a layer, and their names in configs
    "layers": ("num_hidden_layers", "n_layers"),
    "width": ("hidden_size", "d_model"),
    "vocabulary": ("vocab_size", "embedding_size"),
}
PIPELINES = {  # by what a target does: its pipeline, and a call that it answers
    "answers": ("specmm.vlm.pipeline:VQAPipeline", (None, "a")),
    "continues": ("specmm.text.pipeline:TextPipeline", ("a",)),
}
OTHERS = (
    "projector_type",
    "draft_vocab_size",
    "block_size",
    "markov_rank",
    "recurrent_size",
    "levels",
)


@dataclass(frozen=True)
class Wanted:
    """The target that a drafter belongs to, as its folder says; fields are None if it does not say.

    Its ``name`` and ``architectures``, ``width``, ``vocabulary``, number of ``layers``, the
    ``fingerprint`` of its embeddings, and which layers the drafter ``reads``, counted from 0.
    """

    name: str | None = None
    architectures: tuple[str, ...] = ()
    width: int | None = None
    vocabulary: int | None = None
    layers: int | None = None
    reads: tuple[int, ...] = ()
    fingerprint: str | None = None

    def misfits(self, config: PreTrainedConfig) -> list[str]:
        """Why a drafter for this target cannot draft for a model of ``config``; empty if it can."""
        text: Any = config.get_text_config(decoder=True)
        misfits = {
            "width": (self.width, text.hidden_size),
            "vocabulary": (self.vocabulary, text.vocab_size),
            "number of layers": (self.layers, text.num_hidden_layers),
        }
        why = [
            f"it needs a target of {name} {needs}, got {has}"
            for name, (needs, has) in misfits.items()
            if needs is not None and needs != has
        ]
        if self.reads and max(self.reads) >= text.num_hidden_layers:
            why.append(
                f"it reads layers {list(self.reads)} counted from 0, got a target of "
                f"{text.num_hidden_layers}"
            )
        return why


@dataclass(frozen=True)
class Inspection:
    """The content of ``folder``: its ``format``, the ``methods`` that use it, the target
    ``wanted``, ``sizes``, a call to ``use`` it, ``notes``, and for a model the ``drafters`` beside
    it and the methods it ``takes``, by its kind of output: "draws", "answers", "continues".

    ``misfits`` says why it cannot draft for the target asked about (empty: it can; None: no target
    was asked about).
    """

    folder: str
    format: str
    methods: tuple[str, ...]
    wanted: Wanted
    sizes: Mapping[str, int | str]
    use: str
    notes: tuple[str, ...] = ()
    drafters: tuple[Inspection, ...] = ()
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    misfits: tuple[str, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields for JSON."""
        return dataclasses.asdict(self)


@dataclass
class _Reader:
    """Fills an :class:`Inspection` of ``folder``."""

    folder: ModelFolder
    notes: list[str] = field(default_factory=list)

    def inspection(self) -> Inspection:
        """The description of the folder; see :class:`Inspection`."""
        kind = recognised(self.folder)
        every = {*methods.GENERATE, *methods.TEXT, *methods.VQA, *methods.IMAGE_TOKENS}
        known = tuple(name for name in kind.methods if name in every)
        beside = self.folder.path / "drafters"
        files = sorted(beside.rglob(zoo.TRANSFORMERS)) if kind.command else []
        drafters = tuple(read_folder(ModelFolder(file.parent)) for file in files)
        takes = self._takes(kind.command)
        silent = kind.command == "generate" and [*takes] == ["answers"]  # it never draws
        command = "ask" if silent else kind.command
        layers = mtp_layers(self.folder) if kind.command else 0
        if layers:
            self.notes.append(f"its checkpoint has {layers} MTP layers, for method mtp")
        if kind.methods and not known:
            self.notes.append(f"method {kind.methods[0]} is not in this version")
        if self.folder.files and not self.folder.weights:
            self.notes.append("its weights are pickled, and were not looked at")
        return Inspection(
            folder=str(self.folder.path),
            format=kind.title,
            methods=known,
            wanted=self._config_target() if kind.own else self._own_target(),
            sizes=self._sizes(),
            use=self._use(kind, known, command, bool(drafters)),
            notes=tuple(self.notes),
            drafters=drafters,
            takes=takes,
        )

    def _takes(self, command: str) -> dict[str, tuple[str, ...]]:
        """Methods by a model's kind of output; the weights say whether a picture model can draw."""
        picture = picture_type(self.folder.path)
        if picture is None:
            does = {"ask": "answers", "complete": "continues"}.get(command)
            registry = methods.VQA if does == "answers" else methods.TEXT
            return {does: tuple(registry)} if does else {}
        uses = {}
        names = self.folder.weights
        if not names or any(picture.scores in name for name in names):
            uses["draws"] = tuple(methods.TRANSFORMERS_IMAGES)
        else:
            self.notes.append(f"it does not draw: none of its weights is named {picture.scores}…")
        if processes(self.folder.path):
            uses["answers"] = tuple(methods.VQA)
        return uses

    def _config_target(self) -> Wanted:
        """The target that the drafter's config names."""
        facts = self.folder.facts
        verifier = (facts.get("speculators_config") or {}).get("verifier") or {}
        return Wanted(
            name=verifier.get("name_or_path") or None,
            architectures=tuple(verifier.get("architectures") or ()),
            width=facts.get("target_hidden_size") or self._size("width"),
            vocabulary=self._size("vocabulary"),
            layers=facts.get("num_target_layers"),
            reads=layers_named(facts),
            fingerprint=facts.get("target_fingerprint"),
        )

    @property
    def composed(self) -> bool:
        """Whether the folder names models in installed packages."""
        return "language_model" in self.folder.facts

    @property
    def speaks(self) -> bool:
        """Whether the folder has a tokenizer, without which a model cannot be a target."""
        path = self.folder.path
        return any((path / name).is_file() for name in (TOKENIZER, zoo.PIPELINE, zoo.PACKAGE))

    def _own_target(self) -> Wanted:
        """A complete model's target: any, if the model has a tokenizer, else its vocabulary."""
        return Wanted() if self.speaks else Wanted(vocabulary=self._size("vocabulary"))

    def _use(
        self, kind: DrafterFormat, known: tuple[str, ...], command: str, drafters: bool
    ) -> str:
        """The command that uses the drafter or model."""
        path = self.folder.path
        if command and (self.speaks or self.composed):
            return f"specmm {command} {path}" + (" --method auto" if drafters else "")
        if not known:
            return "nothing here uses it"
        if known[0] in methods.IMAGE_TOKENS:
            name = path.name if path.parent.name == "drafters" else known[0]
            return f"specmm generate MODEL --method {known[0]}, from the model's drafters/{name}"
        run = "complete" if known[0] in methods.TEXT else "ask"
        return f"specmm {run} MODEL --method {known[0]} --drafter {path}"

    def _size(self, what: str) -> int | None:
        values = (self.folder.layer.get(name) for name in SIZES[what])
        return next((int(value) for value in values if isinstance(value, int)), None)

    def _sizes(self) -> dict[str, int | str]:
        """Sizes by name from the config, and parameters, dtype and bytes of the weights."""
        facts = self.folder.facts
        weights = self.folder.weights
        sizes: dict[str, int | str] = {}
        for what in SIZES:
            if (value := self._size(what)) is not None:
                sizes[what] = value
        for name in OTHERS:
            value = {**facts, **(facts.get("dflash_config") or {})}.get(name)
            if isinstance(value, int | str) and value:
                sizes[name] = value
        if weights:
            sizes["parameters"] = sum(prod(weight.shape) for weight in weights.values())
            sizes["dtype"] = ", ".join(sorted({weight.dtype for weight in weights.values()}))
        if self.folder.files:
            sizes["bytes"] = sum(file.stat().st_size for file in self.folder.files)
        return sizes


def find_folder(name: str | Path) -> Path:
    """The folder called ``name``: a local folder, a pocket model or a folder inside it, or a hub
    id.

    Raises ``ValueError`` if there is none.
    """
    path = Path(name)
    if path.is_dir():
        return path
    for model, folder in zoo.pocket_models().items():
        inner = folder / str(name).removeprefix(model).lstrip("/")
        if str(name).startswith(model) and inner.is_dir():
            return inner
    if path.is_file():
        raise ValueError(f"there must be a folder at {path}, got a file; name the folder it is in")
    return zoo.find(name, zoo.TRANSFORMERS)


def read_folder(folder: ModelFolder) -> Inspection:
    """The content of ``folder``; see :func:`inspect`."""
    return _Reader(folder).inspection()


def inspect(name: str | Path, target: str | Path | None = None) -> Inspection:
    """The content of the folder, pocket model or hub id ``name``, and whether it fits the
    ``target`` model.

    Sizes are compared first; if they fit, both are loaded and assembled as in use. A target without
    weights or tokenizer is not loaded, and ``notes`` say so. Raises ``ValueError`` for anything
    that is neither a drafter nor a model.
    """
    inspection = read_folder(ModelFolder(find_folder(name)))
    if target is None:
        return inspection
    folder = find_target(target)
    if not _Reader(ModelFolder(folder)).composed:
        misfits = _misfits(inspection, load_config(weights_folder(folder)))
        if misfits:
            return dataclasses.replace(inspection, misfits=tuple(misfits))
    return _tried(inspection, folder, str(target))


def _tried(report: Inspection, folder: Path, name: str) -> Inspection:
    """``report``, completed by loading the drafter with the target in ``folder``."""
    reader = _Reader(ModelFolder(folder))
    opens = [PIPELINES[does] for does in reader.inspection().takes if does in PIPELINES]
    if not opens or not (reader.speaks or reader.composed):
        note = f"{name} has no tokenizer or says nothing: sizes alone were compared"
        return dataclasses.replace(report, notes=(*report.notes, note), misfits=())
    kind, asked = opens[0]
    pipe = named(kind).from_pretrained(name)
    if misfits := _misfits(report, pipe.model.config):
        return dataclasses.replace(report, misfits=tuple(misfits))
    target, _ = pipe.prepared(*asked)
    refused: dict[str, str] = {}
    for method in report.methods:
        try:
            chosen = methods.make(pipe.registry, method)
            drafter = load_drafter(method, Path(report.folder), pipe.model)
            assemble(chosen, target, drafter, pipe.tokenizer)
        except ValueError as error:
            refused[method] = str(error)
    usable = tuple(method for method in report.methods if method not in refused)
    if not usable:
        return dataclasses.replace(report, misfits=(next(iter(refused.values())),))
    notes = (*report.notes, *(f"not by {method} here: {why}" for method, why in refused.items()))
    use = report.use.replace(f"--method {report.methods[0]} ", f"--method {usable[0]} ")
    return dataclasses.replace(report, notes=notes, use=use, misfits=())


def _misfits(inspection: Inspection, config: PreTrainedConfig) -> list[str]:
    """Why the drafter cannot draft for a target of ``config``; empty if it can."""
    if not inspection.methods:
        return [f"no method here drafts with a {inspection.format}"]
    wanted = inspection.wanted
    if wanted.vocabulary is not None and wanted.width is None:  # a model that shares tokens
        size = int(config.get_text_config(decoder=True).vocab_size)
        if abs(wanted.vocabulary - size) <= PADDING:
            wanted = Wanted()
    return wanted.misfits(config)
