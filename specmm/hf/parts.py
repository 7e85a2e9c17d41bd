"""What makers of drafters share: the parts of a loop, trees from options, two tokenizers' tokens.

Shape letters: none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from specmm import methods
from specmm.drafter import Drafter
from specmm.hf.target import VLMTarget
from specmm.hf.translation import Translation
from specmm.shape.static import named, spine
from specmm.tree import TreeShape
from specmm.verify import Rule


class Assembly(NamedTuple):
    """Drafter and rule of the loop."""

    drafter: Drafter
    rule: Rule


def static_shape(tree: methods.Tree, device: Any) -> TreeShape:
    """A named tree, parents (from -1 on), or children by level of a spine."""
    if isinstance(tree, str):
        return named(tree, device)
    wanted = tree or (1, 1, 1, 1)
    return TreeShape.from_parents(wanted, device) if wanted[0] == -1 else spine(wanted, device)


def translated(own: Any, tokenizer: Any, target: VLMTarget, vocabulary: int) -> Translation | None:
    """Between the ``tokenizer`` of the target and a drafter's ``own`` of ``vocabulary`` tokens.

    None where the drafter has none: it reads the target's tokens. Raises ``ValueError`` for a
    drafter with its own tokenizer where the target's is not given.
    """
    if own is None:
        return None
    if tokenizer is None:
        raise ValueError(
            "a drafter with a tokenizer of its own needs the target's, got none; give tokenizer=…, "
            "or the drafter without its own if it reads the target's tokens"
        )
    if own.get_vocab() == tokenizer.get_vocab():
        return Translation.same(vocabulary, target.family.vocabulary, padding=None)
    return Translation.between(tokenizer, own, target.family.vocabulary)
