"""Text methods with block drafters: read a drafter from its folder, make drafter and rule, plan.

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

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specmm import methods
from specmm.autotune import AcceptanceCounter, Plan, planned
from specmm.checkpoints import read_json
from specmm.decode import decode
from specmm.diffusion_drafters.block_drafters import (
    ChainDrafter,
    DrawnTreeDrafter,
    TreeDrafter,
    block_length,
)
from specmm.diffusion_drafters.cached_sources import CausalSource
from specmm.diffusion_drafters.diffusion_chains import DiffuSpecDrafter, Search, StepsDrafter
from specmm.diffusion_drafters.lattice_search import CausalProxy
from specmm.diffusion_drafters.models.deer import DEERModel, is_deer, load_deer
from specmm.diffusion_drafters.models.dflash import DFlash, load_dflash
from specmm.diffusion_drafters.models.diffusion_lms import load_diffusion_lm
from specmm.diffusion_drafters.models.masked import DiffusionLM
from specmm.diffusion_drafters.ngram import NGram
from specmm.diffusion_drafters.sources import BlockSource, DFlashSource, DiffusionSource
from specmm.hardware import prepack
from specmm.hf.drafters.files import check_target
from specmm.hf.drafting import Assembly, Verification, chain_rule, row_uniforms, translated
from specmm.hf.pretrained import own_tokenizer
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.hf.translation import PADDING
from specmm.shape.trees import static_tree
from specmm.tree import TreeShape
from specmm.verify import Recursive

PROXY = "ngram.safetensors"
LENGTH = 12  # drafts a round of a diffusion model, which has no longest block
LENGTHS = (2, 3, 4, 6, 8, 12, 16)  # of the blocks that a plan compares
ROOM = 48  # tokens of text that measuring needs

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
    """The DEER drafter in ``folder``, or the diffusion model there, which can be one."""
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
        raise ValueError(f"tree takes no recall, got {tree} and {method.recall}")
    if isinstance(tree, int):
        target.check_tree(tree - 1)
        return Assembly(TreeDrafter(source, target, tree, length), Recursive())
    if method.length:
        raise ValueError(
            f"a tree of fixed shape has its own depth, got {tree} and length {method.length}"
        )
    verification = Verification.of(method.rule or "traversal", target)
    shape = static_tree(tree, target.device)
    target.check_tree(shape.width)
    return Assembly(DrawnTreeDrafter(source, target, shape, *verification.drawn), verification.rule)


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
    found = _diffusion(drafter)
    if found.proxy is None:
        raise ValueError(
            "method 'diffuspec' needs an n-gram proxy beside its drafter, got none; make one from "
            "text with specmm train proxy"
        )
    _check_proxy(found.proxy, target)
    made = DiffuSpecDrafter(
        _diffusion_source(found, target, tokenizer),
        found.proxy,
        Search(method.tau, method.candidates, method.weight),
        method.least if method.adaptive else method.most,
        method.most,
        method.step,
        method.rate,
    )
    return Assembly(made, Recursive())


def block_source(
    method: BlockMethod, drafter: object, target: VLMTarget, tokenizer: Tokenizer | None = None
) -> BlockSource:
    """The source of blocks for ``drafter``; raises ``ValueError`` for one that does not fit."""
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
    """Raise ``ValueError`` for n-grams of other tokens than ``target``'s, padding apart."""
    wanted = target.family.vocabulary
    if isinstance(proxy, NGram) and abs(proxy.vocabulary - wanted) > PADDING:
        raise ValueError(
            f"the n-gram proxy must be of the target's {wanted} tokens, got one of "
            f"{proxy.vocabulary}; make one with specmm train proxy"
        )


def choose_method(
    target: VLMTarget, drafter: object, prompt: VLMPrompt, plans: dict[Any, Plan], kind: BlockMethod
) -> methods.TextMethod:
    """Method ``auto``: ``kind`` with the length that should be fastest here, or plain decoding.

    Acceptance by position and seconds are measured on the first prompt of each batch size, which
    costs about what answering it once does; ``plans`` keeps the plans.
    """
    key = (kind.name, len(prompt.lengths), target.processor.greedy, torch.get_num_threads())
    if key not in plans:
        plans[key] = _plan(target, kind, drafter, prompt)
    shape = plans[key].shape
    return methods.AR() if shape is None else dataclasses.replace(kind, length=shape.depth)


def _plan(target: VLMTarget, kind: BlockMethod, drafter: object, prompt: VLMPrompt) -> Plan:
    longer = dataclasses.replace(prompt, max_new_tokens=max(prompt.max_new_tokens, ROOM))
    source = block_source(kind, drafter, target)  # a drafter that does not fit raises
    try:
        target.check(longer)
    except ValueError as error:
        return Plan(None, 1.0, 1.0, f"no room to measure ({error})")
    table = _acceptance(target, source, dataclasses.replace(prompt, max_new_tokens=ROOM))
    shapes = [TreeShape.chain(n, target.device) for n in LENGTHS if n <= len(table)]

    def make(shape: TreeShape) -> ChainDrafter:
        return ChainDrafter(block_source(kind, drafter, target), target, shape.depth)

    return planned(target, make, shapes, chain_rule(target), longer, row_uniforms(prompt), table)


def _acceptance(
    target: VLMTarget, source: BlockSource, prompt: VLMPrompt
) -> tuple[tuple[float, ...], ...]:
    """Of drafts whose predecessors were kept, the share kept, by position [D, 1]."""
    length = block_length(source, source.longest or LENGTHS[-1])
    shape = TreeShape.chain(length, target.device)
    counter = AcceptanceCounter(ChainDrafter(source, target, length), shape)
    rule = chain_rule(target)
    for _ in decode(target, counter, rule, prompt, prompt.max_new_tokens, row_uniforms(prompt)):
        pass
    return counter.table()
