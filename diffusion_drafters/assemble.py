"""From a text method to the parts of the loop: drafter and rule for a target.

Shape letters: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specmm import methods
from specmm.diffusion_drafters.diffuspec.draft import Search
from specmm.diffusion_drafters.diffuspec.ngram import NGram
from specmm.diffusion_drafters.diffuspec.search import CausalProxy
from specmm.diffusion_drafters.drafters.block import ChainDrafter, TreeDrafter
from specmm.diffusion_drafters.drafters.cached import CausalSource, KeptSource
from specmm.diffusion_drafters.drafters.diffuspec import DiffuSpecDrafter
from specmm.diffusion_drafters.drafters.drawn import DrawnTreeDrafter
from specmm.diffusion_drafters.drafters.sources import BlockSource, DFlashSource, DiffusionSource
from specmm.diffusion_drafters.drafters.specdiff import StepsDrafter
from specmm.diffusion_drafters.models.bidirectional import FullAttention
from specmm.diffusion_drafters.models.causal import CausalPrefix
from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.hf.drafting import Assembly, Verification, translated
from specmm.hf.target import VLMTarget
from specmm.hf.translation import PADDING
from specmm.shape.names import static_tree
from specmm.verify import Block as BlockVerification
from specmm.verify import PointMass, Recursive, Rule

LENGTH = 12  # drafts a round of a diffusion model, which has no block of its own


@dataclass
class Diffusion:
    """A diffusion language ``model``, its own ``tokenizer`` where it is not the target's, and
    DiffuSpec's ``proxy``.
    """

    model: Any
    tokenizer: Any = None
    proxy: CausalProxy | None = None


def make_specdiff(
    method: methods.SpecDiff, target: VLMTarget, drafter: Any, tokenizer: Any
) -> Assembly:
    """The parts of method ``specdiff``."""
    source = _diffusion_source(_diffusion(drafter), target, tokenizer)
    made = StepsDrafter(source, target, method.length, method.steps)
    return Assembly(made, PointMass() if method.point else chain_rule(target))


def make_block(
    method: methods.DEER | methods.Block, target: VLMTarget, drafter: Any, tokenizer: Any
) -> Assembly:
    """The parts of methods ``deer`` and ``block``."""
    return _block(method, block_source(method, drafter, target, tokenizer), target)


def chain_rule(target: VLMTarget) -> Rule:
    """How a drawn chain is verified: as a block, which keeps more of it, and token by token where
    nothing is drawn.
    """
    return Recursive() if target.processor.greedy else BlockVerification()


def _diffusion(drafter: Any) -> Diffusion:
    if isinstance(drafter, Diffusion):
        return drafter
    if not hasattr(drafter, "mask"):
        raise ValueError(
            f"drafter must be a diffusion language model, got {type(drafter).__name__}; load one first"
        )
    return Diffusion(drafter)


def _diffusion_source(
    drafter: Diffusion, target: VLMTarget, tokenizer: Any, reuse: bool = False
) -> DiffusionSource:
    model = drafter.model
    translation = translated(drafter.tokenizer, tokenizer, target, model.vocabulary)
    if not reuse:
        return DiffusionSource(model, target, translation)
    if not isinstance(model, FullAttention):
        raise ValueError(
            f"reuse needs a Dream or LLaDA as drafter, got a {type(model).__name__}; leave it out"
        )
    return KeptSource(model, target, translation)


def make_diffuspec(
    method: methods.DiffuSpec, target: VLMTarget, drafter: Any, tokenizer: Any
) -> Assembly:
    """The parts of method ``diffuspec``."""
    found = _diffusion(drafter)
    if (method.search or method.sampled) and found.proxy is None:
        raise ValueError(
            "method 'diffuspec' needs an n-gram proxy beside its drafter, got none; make one from text with "
            "specmm train proxy, or give search=false"
        )
    _check_proxy(found.proxy, target)
    made = DiffuSpecDrafter(
        _diffusion_source(found, target, tokenizer, method.reuse),
        found.proxy if method.search or method.sampled else None,
        Search(method.tau, method.candidates, method.weight, method.beam),
        method.least if method.adaptive else method.most,
        method.most,
        method.step,
        method.rate,
        method.sampled,
    )
    return Assembly(made, chain_rule(target) if method.sampled else Recursive())


def _check_proxy(proxy: CausalProxy | None, target: VLMTarget) -> None:
    """Raise ``ValueError`` for n-grams of other tokens than ``target``'s, which may differ by
    padding.
    """
    wanted = target.family.vocabulary
    if isinstance(proxy, NGram) and abs(proxy.vocabulary - wanted) > PADDING:
        raise ValueError(
            f"the n-gram proxy must be of the target's {wanted} tokens, got one of {proxy.vocabulary}; "
            "make one with specmm train proxy"
        )


def block_source(
    method: methods.DEER | methods.Block, drafter: Any, target: VLMTarget, tokenizer: Any = None
) -> BlockSource:
    """Where a block comes from: a network on the target's states, one that reads the text, any
    diffusion model.
    """
    if isinstance(method, methods.Block):
        if not isinstance(drafter, DFlash):
            raise ValueError(
                f"method 'block' needs a DFlash drafter, got {type(drafter).__name__}; use method 'deer'"
            )
        return DFlashSource(drafter, target)
    if isinstance(drafter, CausalPrefix):
        return CausalSource(drafter, target)
    return _diffusion_source(_diffusion(drafter), target, tokenizer)


def _block(
    method: methods.DEER | methods.Block, source: BlockSource, target: VLMTarget
) -> Assembly:
    """A chain, the tree of the likeliest paths, or a fixed tree that is drawn."""
    length, tree = method.length or source.longest or LENGTH, method.tree
    if not tree:
        return Assembly(
            ChainDrafter(source, target, length, method.sure, method.recall), chain_rule(target)
        )
    if method.sure or method.recall:
        raise ValueError(
            f"tree takes neither sure nor recall, got {tree} and {method.sure or method.recall}"
        )
    if isinstance(tree, int):
        return Assembly(TreeDrafter(source, target, tree, length), Recursive())
    if method.length:
        raise ValueError(
            f"a tree of fixed shape has a depth of its own, got {tree} and length {method.length}"
        )
    verification = Verification.of(method.rule or "traversal", target)
    shape = static_tree(tree, target.device)
    return Assembly(DrawnTreeDrafter(source, target, shape, *verification.drawn), verification.rule)
