"""Text methods with block drafters: loads a drafter, makes drafter and rule, plans for ``auto``.

``drafters/diffusion`` of a model holds a diffusion language model (with ``ngram.safetensors``,
DiffuSpec's proxy, and a tokenizer where it has its own), ``drafters/deer`` a DEER drafter,
``drafters/block`` a DFlash one.

Shape letters: D levels.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specmm import methods
from specmm.choose.contest import Candidate
from specmm.diffusion_drafters.block_drafters import ChainDrafter, DrawnTreeDrafter, TreeDrafter
from specmm.diffusion_drafters.cached_sources import CausalSource
from specmm.diffusion_drafters.diffusion_chains import DiffuSpecDrafter, Search, StepsDrafter
from specmm.diffusion_drafters.lattice_search import CausalProxy
from specmm.diffusion_drafters.models.deer import DEERModel, is_deer, load_deer
from specmm.diffusion_drafters.models.dflash import DFlash, load_dflash
from specmm.diffusion_drafters.models.diffusion_lms import load_diffusion_lm
from specmm.diffusion_drafters.models.masked import DiffusionLM
from specmm.diffusion_drafters.ngram import NGram
from specmm.diffusion_drafters.sources import BlockSource, DFlashSource, DiffusionSource
from specmm.hf.drafters.drafting import Assembly, chain_rule, translated
from specmm.hf.drafters.files import check_target
from specmm.hf.drafters.translation import PADDING
from specmm.hf.drafters.trees import drawn_trees
from specmm.hf.loading.pretrained import own_tokenizer
from specmm.hf.models.target import VLMTarget
from specmm.loading.checkpoints import read_json
from specmm.loading.hardware import prepack
from specmm.verify import Recursive

PROXY = "ngram.safetensors"
LENGTH = 12  # drafts a round of a diffusion model, which has no longest block
PARTS = (1, 2, 4)  # block lengths that method auto tries in turn

BlockMethod = methods.DEER | methods.Block
Tokenizer = PreTrainedTokenizerBase


@dataclass
class Diffusion:
    """A diffusion ``model``, its ``tokenizer`` if not the target's, and DiffuSpec's ``proxy``."""

    model: DiffusionLM
    tokenizer: Tokenizer | None = None
    proxy: CausalProxy | None = None


def load_block(folder: Path, target: PreTrainedModel, method: str) -> DFlash:
    """The DFlash drafter in ``folder`` for the ``target`` model."""
    check_target(read_json(folder / "config.json"), target, folder)
    return prepack(load_dflash(folder, target.dtype).to(target.device))


def load_deer_or_diffusion(
    folder: Path, target: PreTrainedModel, method: str
) -> DEERModel | Diffusion:
    """The DEER drafter in ``folder``, or the diffusion model there, which also drafts blocks."""
    return load_deer(folder, target) if is_deer(folder) else load_diffusion(folder, target, method)


def load_diffusion(folder: Path, target: PreTrainedModel, method: str) -> Diffusion:
    """The diffusion language model in ``folder``, its tokenizer and its n-gram proxy, if any."""
    proxy = NGram.load(folder / PROXY) if (folder / PROXY).is_file() else None
    model = load_diffusion_lm(folder, target.dtype).to(target.device)
    return Diffusion(model, own_tokenizer(folder), proxy)


def make_block(
    method: BlockMethod, target: VLMTarget, drafter: object, tokenizer: Tokenizer | None
) -> Assembly:
    """The parts of methods ``deer`` and ``block``: a chain, the likeliest tree, or a drawn tree."""
    source = block_source(method, drafter, target, tokenizer)
    length = method.length or source.longest or LENGTH
    tree = method.tree
    if not tree:
        chain = ChainDrafter(source, target, length, method.recall)
        return Assembly(chain, chain_rule(target))
    if method.recall:
        raise ValueError(
            f"recall must be 0 with a tree, got tree {tree} and recall {method.recall}; leave one "
            "out"
        )
    if isinstance(tree, int):
        target.check_tree(tree - 1)
        return Assembly(TreeDrafter(source, target, tree, length), Recursive())
    if method.length:
        raise ValueError(
            "length must be left out with a tree of fixed shape, which has its own depth, got "
            f"{tree} and {method.length}"
        )
    shape, drawn, rule = drawn_trees(method.rule or "traversal", tree, target)
    return Assembly(DrawnTreeDrafter(source, target, shape, *drawn), rule)


def make_specdiff(
    method: methods.SpecDiff, target: VLMTarget, drafter: object, tokenizer: Tokenizer | None
) -> Assembly:
    """The parts of method ``specdiff``."""
    source = _diffusion_source(_diffusion(drafter), target, tokenizer)
    return Assembly(StepsDrafter(source, target, method.length), chain_rule(target))


def make_diffuspec(
    method: methods.DiffuSpec, target: VLMTarget, drafter: object, tokenizer: Tokenizer | None
) -> Assembly:
    """The parts of method ``diffuspec``."""
    diffusion_model = _diffusion(drafter)
    if diffusion_model.proxy is None:
        raise ValueError(
            "method 'diffuspec' needs an n-gram proxy beside its drafter, got none; make one from "
            "text with specmm train proxy"
        )
    _check_proxy(diffusion_model.proxy, target)
    drafts = DiffuSpecDrafter(
        _diffusion_source(diffusion_model, target, tokenizer),
        diffusion_model.proxy,
        Search(method.tau, method.candidates, method.weight),
        method.least,
        method.most,
        method.step,
        method.rate,
    )
    return Assembly(drafts, Recursive())


def block_source(
    method: BlockMethod, drafter: object, target: VLMTarget, tokenizer: Tokenizer | None = None
) -> BlockSource:
    """The source of blocks for ``drafter``; raises ``ValueError`` if it does not fit the target."""
    if method.name == "block":
        if not isinstance(drafter, DFlash):
            raise ValueError(
                f"method 'block' needs a DFlash drafter, got {type(drafter).__name__}; "
                "use method 'deer'"
            )
        return DFlashSource(drafter, target)
    if isinstance(drafter, DEERModel):
        return CausalSource(drafter, target)
    return _diffusion_source(_diffusion(drafter), target, tokenizer)


def _diffusion(drafter: Any) -> Diffusion:
    """``drafter``, or a bare diffusion model as one; raises ``ValueError`` for others."""
    if isinstance(drafter, Diffusion):
        return drafter
    if not hasattr(drafter, "mask"):
        raise ValueError(
            f"drafter must be a diffusion language model, got {type(drafter).__name__}; "
            "load one first"
        )
    return Diffusion(drafter)


def _diffusion_source(
    drafter: Diffusion, target: VLMTarget, tokenizer: Tokenizer | None
) -> DiffusionSource:
    model = drafter.model
    translation = translated(drafter.tokenizer, tokenizer, target, model.vocabulary)
    return DiffusionSource(model, target, translation)


def _check_proxy(proxy: CausalProxy, target: VLMTarget) -> None:
    """Raise ``ValueError`` for n-grams of other tokens than ``target``'s, except for padding."""
    vocabulary = target.family.vocabulary
    if isinstance(proxy, NGram) and abs(proxy.vocabulary - vocabulary) > PADDING:
        raise ValueError(
            f"the n-gram proxy must be of the target's {vocabulary} tokens, got one of "
            f"{proxy.vocabulary}; make one with specmm train proxy"
        )


def candidates(target: VLMTarget, drafter: object, kind: BlockMethod) -> list[Candidate]:
    """Candidates of ``kind`` for method ``auto``: the drafter's blocks in full and shorter.

    Raises ``ValueError`` for a drafter that does not fit.
    """
    longest = block_source(kind, drafter, target).longest or LENGTH
    lengths = [longest // divisor for divisor in PARTS if longest // divisor > 1] or [longest]
    return [Candidate(dataclasses.replace(kind, length=n), nodes=n + 1, levels=1) for n in lengths]
