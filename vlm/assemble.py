"""From a method to the parts of the loop: drafter and rule for a target.

Shape letters: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specmm import methods
from specmm.drafter import Drafter
from specmm.verify import Recursive, Rule
from specmm.vlm.drafters.lookup import PromptLookupDrafter
from specmm.vlm.target import VLMTarget


class Assembly(NamedTuple):
    """Drafter and rule of the loop."""

    drafter: Drafter
    rule: Rule


def assemble(method: methods.VQAMethod, target: VLMTarget, drafters: Mapping[str, Any]) -> Assembly:
    """The parts of a speculative ``method``; ``drafters`` are the model's by kind.

    Raises ``ValueError`` when the model has none of the kind wanted.
    """
    match method:
        case methods.PromptLookup():
            return Assembly(PromptLookupDrafter(target, method.ngram, method.length), Recursive())
        case _:
            raise ValueError(f"method {method.name!r} drafts nothing")
