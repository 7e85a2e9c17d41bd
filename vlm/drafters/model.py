"""A whole small model as drafter: a language model that does not see the picture, or a vision-language model that does.

Its trees are grown like those of a feature head; it reads tokens only, and what it predicts from is its own states.

Shape letters: B batch, n nodes of a level, L prompt positions, C the drafter's width, v its vocabulary, V the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specmm.drafter import Feedback
from specmm.growth import Dynamic, Growth
from specmm.processors import Processor
from specmm.randomness import Dice
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape
from specmm.vlm.prompt import VLMPrompt
from specmm.vlm.target import VLMTarget
from specmm.vlm.translation import Translation

Inputs = Callable[[VLMPrompt], dict[str, Any]]


class ModelDrafter:
    """Drafts with the transformers ``model`` for ``target``; ``tree`` and ``sampled`` as in :class:`Growth`.

    ``inputs`` says what the drafter is shown of a prompt; ``translation`` maps the target's tokens to the drafter's
    (None: the same ones). Raises ``ValueError`` when vocabularies differ and there is no translation.
    """

    def __init__(
        self,
        model: Any,
        target: VLMTarget,
        tree: TreeShape | Dynamic,
        inputs: Inputs,
        translation: Translation | None = None,
        sampled: bool = True,
    ) -> None:
        self.target, self.inputs = target, inputs
        sampled = sampled and not target.processor.greedy
        self.law = target.processor if isinstance(target.processor, Processor) else Processor()
        self.small = VLMTarget(model, Processor(), "drafter")
        vocabulary = target.family.vocabulary
        self.translation = translation or Translation.same(self.small.family.vocabulary, vocabulary)
        self.translation.ban(target.image_tokens)
        self.growth = Growth(tree, sampled, vocabulary, target.device)
        self.max_nodes, self.max_depth = self.growth.max_nodes, self.growth.max_depth

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Show the drafter the prompt with the first token behind it."""
        self.clock = clock
        with clock("draft"):
            prompt = VLMPrompt(self.inputs(self.target.prompt), self.target.prompt.max_new_tokens)
            first = self.translation.to_drafter(feedback.token)
            output = self.small.prefill(prompt.extended(first), self.growth.scratch)
        self.state = output.hidden[:, -1]  # [B, C]
        self.growth.begin(self.small.cache)

    def propose(self, feedback: Feedback, uniforms: Dice) -> DraftTree:
        """The tree behind ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        state = self.state if feedback.verdict is None else self.growth.read_committed(self, feedback)
        return self.growth.grow(self, feedback.token, state, uniforms)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Logits [B, n, V] over the target's tokens of the drafter's ``states`` [B, n, C]."""
        with self.clock("draft"):
            return self.translation.from_drafter(self.small.head(states).float())

    def read(self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """The drafter's states [B, n, C] at ``tokens`` [B, n]; the target's ``hidden`` states say nothing to it."""
        with self.clock("draft"):
            return self.small.states(self.translation.to_drafter(tokens), positions, bias)


def text_only(prompt: VLMPrompt, image_tokens: tuple[int, ...]) -> dict[str, Any]:
    """The tokens of ``prompt`` without those of pictures, for a drafter that knows the same tokens."""
    rows = [[t for t in row if t not in image_tokens] for row in prompt.rows()]
    return padded([row or [0] for row in rows], prompt.input_ids.device)


def padded(rows: list[list[int]], device: torch.device) -> dict[str, Any]:
    """``rows`` of ids as one batch, padded at the right."""
    width = max(map(len, rows))
    ids = [row + [0] * (width - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
