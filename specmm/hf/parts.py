"""What makers of drafters share: the parts of a loop, trees from options, two tokenizers' tokens.

Shape letters: none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from specmm.drafter import Drafter
from specmm.hf.target import VLMTarget
from specmm.hf.translation import Translation
from specmm.shape.trees import Siblings
from specmm.verify import Recursive, Rule
from specmm.verify.rule import make_rule, rule_kind


class Assembly(NamedTuple):
    """Drafter and rule of the loop."""

    drafter: Drafter
    rule: Rule


class Verification(NamedTuple):
    """A ``rule``, and how drafts are ``drawn`` for it: sampled or the likeliest, and siblings how."""

    rule: Rule
    drawn: tuple[bool, Siblings]

    @classmethod
    def of(cls, spec: str, target: VLMTarget) -> Verification:
        """By the rule that ``spec`` names; where the ``target`` is greedy nothing is drawn.

        Raises ``ValueError`` for rules of image codes, and names that are not known.
        """
        kind = rule_kind(spec)
        if kind.relaxed:
            raise ValueError(
                f"rule {spec} is about the codes of pictures; use recursive or typical"
            )
        if target.processor.greedy:
            return cls(Recursive(), (False, "distinct"))
        return cls(make_rule(spec), (kind.siblings is not None, kind.siblings or "distinct"))


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
