"""Registry of the drafters for transformers targets: how each is made, loaded and planned for.

Functions are named, not imported: a drafter's module is imported at its first use and does not
depend on the others. A new drafter is one entry here, and its options in
``specmm/methods/language.py``.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specmm import methods
from specmm.core.drafter import Drafter, DrafterVocabulary
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.extending.outside import OTHERS, DraftRequest, make_drafter, of_others, usual_tree
from specmm.extending.registry import named, unknown
from specmm.hf.drafters.drafter_formats import ModelFolder, recognised
from specmm.hf.drafters.translation import Translation
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings, make_tree
from specmm.verify import Block, Recursive, Rule
from specmm.verify.rule import RuleName, make_rule, rule_kind

Method: TypeAlias = methods.VQAMethod | methods.TextMethod
DRAFTERS = "drafters"  # the folder beside a model
VLM = "specmm.vlm"
BLOCKS = "specmm.diffusion_drafters"
FEATURES = "specmm.hf.drafters.features"
SMALL = "specmm.hf.drafters.small_model"


@dataclass(frozen=True)
class DrafterKind:
    """How the drafter of one method is made; functions are given as ``"module:name"``.

    ``make(method, target, drafter, tokenizer)`` returns drafter and rule, ``load(folder, target
    model, method)`` the network or other object to draft with. A model's own drafter is in its
    folder ``drafters/place``, or else in ``instead``. Method ``auto`` tries a kind if it
    ``contends``, with each of ``trees(target, drafter, method)`` if given. ``judge(experts,
    pipeline, keep)`` answers instead of drafting; ``offers(target model)`` says whether the target
    itself can draft. The layouts of folders it reads are listed in ``drafter_formats``.
    """

    make: str
    load: str = ""
    place: str = ""
    instead: str = ""
    trees: str = ""
    judge: str = ""
    offers: str = ""
    contends: bool = False


KINDS: Mapping[str, DrafterKind] = {
    "prompt-lookup": DrafterKind("specmm.hf.drafters.prompt_lookup:make"),
    "suffix": DrafterKind("specmm.hf.drafters.suffix:make", contends=True),
    "recycle": DrafterKind("specmm.hf.drafters.recycle:make"),
    "sjd": DrafterKind("specmm.hf.drafters.interleaved:make"),
    "text-draft": DrafterKind(f"{SMALL}:make_text_draft", f"{SMALL}:load_language_model", "text"),
    # a small model that answers for Speculative Verdict may draft, too
    "vlm-draft": DrafterKind(
        f"{SMALL}:make_vlm_draft", f"{VLM}.loading:load_small", "vlm", "experts/1"
    ),
    "msd": DrafterKind(
        f"{FEATURES}:make",
        f"{VLM}.msd:load_for",
        "msd",
        trees=f"{FEATURES}:candidates",
        contends=True,
    ),
    "eagle3": DrafterKind(
        f"{FEATURES}:make",
        "specmm.hf.drafters.eagle3:load_for",
        "eagle3",
        trees=f"{FEATURES}:candidates",
        contends=True,
    ),
    "mtp": DrafterKind(
        "specmm.hf.drafters.mtp:make",
        "specmm.hf.drafters.mtp_layers:load_layers",
        "mtp",
        offers="specmm.hf.drafters.mtp_layouts:has_mtp_layers",
        contends=True,
    ),
    "assistant": DrafterKind(
        "specmm.hf.drafters.assistant:make",
        "specmm.hf.drafters.assistant:load_assistant",
        "assistant",
        contends=True,
    ),
    "verdict": DrafterKind(
        "", f"{VLM}.verdict:load_experts", "experts", judge=f"{VLM}.verdict:make_judge"
    ),
    "diffuspec": DrafterKind(
        f"{BLOCKS}.assemble:make_diffuspec", f"{BLOCKS}.assemble:load_diffusion", "diffusion"
    ),
    "specdiff": DrafterKind(
        f"{BLOCKS}.assemble:make_specdiff", f"{BLOCKS}.assemble:load_diffusion", "diffusion"
    ),
    "deer": DrafterKind(
        f"{BLOCKS}.assemble:make_block",
        f"{BLOCKS}.assemble:load_deer_or_diffusion",
        "deer",
        trees=f"{BLOCKS}.assemble:candidates",
        contends=True,
    ),
    "block": DrafterKind(
        f"{BLOCKS}.assemble:make_block",
        f"{BLOCKS}.assemble:load_block",
        "block",
        trees=f"{BLOCKS}.assemble:candidates",
        contends=True,
    ),
}


class Assembly(NamedTuple):
    """Drafter and rule of the loop."""

    drafter: Drafter
    rule: Rule


class Verification(NamedTuple):
    """A ``rule``, and how its drafts are ``drawn``: whether sampled, and how siblings are drawn."""

    rule: Rule
    drawn: tuple[bool, Siblings]

    @classmethod
    def of(cls, spec: RuleName, target: VLMTarget) -> Verification:
        """Verification by ``spec``, a rule or its name; for a greedy ``target`` no draft is
        sampled.

        Raises ``ValueError`` for rules of image codes and unknown names.
        """
        kind = rule_kind(spec)
        if kind.codes:
            raise ValueError(
                f"rule {spec} compares codes of pictures, which texts do not have; use recursive "
                "or typical"
            )
        if target.processor.greedy:
            return cls(Recursive(), (False, "distinct"))
        return cls(make_rule(spec), (kind.siblings is not None, kind.siblings or "distinct"))


def chain_rule(target: VLMTarget) -> Rule:
    """Block verification for sampled chains, because it accepts more; token by token if greedy."""
    return Recursive() if target.processor.greedy else Block()


def row_uniforms(prompt: VLMPrompt) -> Uniforms:
    """Uniforms for measured runs of ``prompt``, seeded by row number."""
    device = prompt.input_ids.device
    seeds = range(len(prompt.lengths))
    return Uniforms([torch.Generator(device).manual_seed(seed) for seed in seeds])


def drafting_probs(target: VLMTarget, vocabulary: DrafterVocabulary) -> Processor:
    """The processor of drafts: the target's, which agrees best; softmax for a greedy target.

    Repetition penalties and other kinds of processors apply to the target only. The drafter may
    have fewer tokens than the target's top k.
    """
    processor = target.processor
    if not isinstance(processor, Processor) or processor.greedy:
        return Processor()
    top_k = min(processor.top_k, vocabulary.count)
    return Processor(processor.temperature, top_k, processor.top_p, processor.top_p_first)


def translated(
    small: PreTrainedTokenizerBase | None,
    tokenizer: PreTrainedTokenizerBase | None,
    target: VLMTarget,
    vocabulary: int,
) -> Translation | None:
    """Between the target's ``tokenizer`` and a drafter's ``small`` one of ``vocabulary`` tokens.

    None if the drafter reads the target's tokens. Raises ``ValueError`` if the drafter has another
    tokenizer and the target's is not given.
    """
    if small is None:
        return None
    if tokenizer is None:
        raise ValueError(
            "a drafter with a tokenizer of its own needs the target's, got none; give tokenizer=…, "
            "or the drafter without its own if it reads the target's tokens"
        )
    if small.get_vocab() == tokenizer.get_vocab():
        return Translation.same(vocabulary, target.family.vocabulary, padding=None)
    return Translation.between(tokenizer, small, target.family.vocabulary, vocabulary)


def assemble(
    method: Method,
    target: VLMTarget,
    drafter: object = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Assembly:
    """The parts of a speculative ``method``.

    ``drafter`` is the result of :func:`load_drafter`, ``tokenizer`` the target's. Raises
    ``ValueError`` for a method that drafts nothing and for a drafter that does not fit.
    """
    if isinstance(method, methods.Composed):  # of a third-party drafter: see preset_of
        return _outside(method.choice, target)
    kind = KINDS.get(method.name)
    if kind is None or not kind.make:
        raise ValueError(f"method {method.name!r} drafts nothing")
    assembly: Assembly = named(kind.make)(method, target, drafter, tokenizer)
    return assembly


def _outside(choice: methods.Choice, target: VLMTarget) -> Assembly:
    """The parts with a third-party drafter."""
    verification = Verification.of(choice.rule, target)
    shape = make_tree(choice.tree or usual_tree(choice.drafter), target.device)
    target.check_tree(shape.top_k if isinstance(shape, Dynamic) else shape.width)
    request = DraftRequest(shape, *verification.drawn)
    return Assembly(make_drafter(choice.drafter, target, request), verification.rule)


def preset_of(method: methods.Composed) -> Method:
    """The method of the drafter that ``method`` names, with the chosen tree and rule; for a
    third-party drafter ``method`` itself.

    Raises ``ValueError`` for drafters whose trees and rules belong together.
    """
    choice = method.choice
    if not isinstance(choice.drafter, str) or of_others(choice.drafter):
        preset: Any = method
        return preset

    def options(name: str) -> set[str]:
        return {f.name for f in dataclasses.fields(methods.GENERATE.get(name))}

    if choice.drafter not in methods.GENERATE.entries:
        raise unknown("drafter", choice.drafter, [*methods.GENERATE, *OTHERS])
    preset_method = methods.make(methods.GENERATE, choice.drafter)
    if "rule" not in options(preset_method.name):
        able = [name for name in methods.GENERATE if "rule" in options(name)]
        raise unknown("drafter that takes any tree and rule", choice.drafter, able)
    changes: dict[str, Any] = {"rule": choice.rule, "tree": choice.tree or preset_method.tree}
    if not changes["tree"]:
        raise ValueError(f"drafter {choice.drafter} needs a tree of fixed shape, as spine(2, 2, 1)")
    if "sampled" in options(preset_method.name):
        changes["sampled"] = True
    return dataclasses.replace(preset_method, **changes)


def load_drafter(method: str, folder: Path, target: PreTrainedModel) -> Any:
    """The drafter of ``method`` for the ``target`` model, loaded from ``folder``.

    Raises ``ValueError`` for methods that need no drafter, and for a folder without this drafter.
    """
    if method not in KINDS or not KINDS[method].load:
        raise ValueError(
            f"method {method} needs no drafter, got {folder}; leave it out, or leave the method "
            "out to use the drafter's"
        )
    try:
        return named(KINDS[method].load)(folder, target, method)
    except (ValueError, FileNotFoundError) as error:
        raise _other_kind(method, folder) or error from error


def _other_kind(method: str, folder: Path) -> ValueError | None:
    """The error for a ``folder`` whose drafter is for other methods; None if it is not."""
    try:
        kind = recognised(ModelFolder(folder))
    except ValueError:
        return None
    if method in kind.methods or not kind.methods:
        return None
    return ValueError(
        f"method {method!r} needs a drafter of its own, got a {kind.title} in {folder}, which is "
        f"for {' or '.join(kind.methods)}; give another folder, or leave the method out"
    )


def method_of(drafter: object) -> str:
    """The method of a ``drafter`` (loaded, or its folder); empty if unknown.

    Raises ``ValueError`` for a folder that holds neither a drafter nor a model.
    """
    if isinstance(drafter, Path):
        return next(iter(recognised(ModelFolder(drafter)).methods), "")
    return str(getattr(drafter, "method", ""))


def network_of(drafter: object) -> nn.Module | None:
    """The network of a loaded ``drafter``, None if it has none."""
    network = drafter if isinstance(drafter, nn.Module) else getattr(drafter, "model", None)
    return network if isinstance(network, nn.Module) else None


def _place(model: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    return model.device, model.dtype


@dataclass
class Drafters:
    """The drafters of a model by method: ``given`` ones, and others that are read at first use.

    ``folder`` is the folder of the model ``target``, ``name`` its name in messages.
    """

    folder: Path | None
    name: str
    target: PreTrainedModel
    given: dict[str, Any]

    def __post_init__(self) -> None:
        self.passed = frozenset(self.given)  # by the caller, not read here
        self.place = _place(self.target)

    def get(self, method: str) -> Any:
        """The drafter of ``method``; None if it needs none.

        Raises ``ValueError`` if it is missing.
        """
        if (here := _place(self.target)) != self.place:  # it was moved without its drafters
            self.place = here
            self.to(*here)
        subfolder = KINDS[method].place if method in KINDS else ""
        if subfolder and method not in self.given:
            folder = self._folder(method)
            if folder is None and KINDS[method].offers:
                return None  # the target drafts itself, or its own error names what is missing
            if folder is None:
                raise ValueError(
                    f"method {method!r} needs a drafter and {self.name} has none in "
                    f"drafters/{subfolder}; give one with from_pretrained(…, drafter=…) or use "
                    "prompt-lookup or ar"
                )
            self.given[method] = load_drafter(method, folder, self.target)
        return self.given.get(method)

    def to(self, *args: Any, **kwargs: Any) -> None:
        """Follow the target: the caller's drafters move, others are read again when needed."""
        for method in list(self.given):
            drafter = self.given[method]
            network = network_of(drafter)
            if method not in self.passed:
                del self.given[method]
            elif network is not None:
                network.to(*args, **kwargs)

    def save(self, folder: Path) -> None:
        """Copy the drafters beside the model into ``folder``, where the model was saved."""
        ours = None if self.folder is None else self.folder / DRAFTERS
        if ours is not None and ours.is_dir() and ours.resolve() != (folder / DRAFTERS).resolve():
            shutil.copytree(ours, folder / DRAFTERS, dirs_exist_ok=True)

    def has(self, method: str) -> bool:
        """Whether the drafter of ``method`` is available, or none is needed."""
        if method not in KINDS or not (KINDS[method].place or KINDS[method].offers):
            return True
        if method in self.given or self._folder(method) is not None:
            return True
        offers = KINDS[method].offers  # whether the target itself has what drafts
        return bool(offers) and bool(named(offers)(self.target))

    def _folder(self, method: str) -> Path | None:
        """The folder of the drafter of ``method`` beside the model, if there is one."""
        if self.folder is None:
            return None
        subfolders = (KINDS[method].place, KINDS[method].instead)
        folders = [self.folder / DRAFTERS / subfolder for subfolder in subfolders if subfolder]
        return next((folder for folder in folders if folder.is_dir()), None)
