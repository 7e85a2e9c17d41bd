"""How likely the target finds pictures it did or did not draw: what a relaxed rule costs, in nats a
token.

Shape letters: B batch, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.processors import Processor
from specmm.tree import DraftTree, TreeShape


@torch.inference_mode()
def log_likelihood(target: LlamaGenTarget, prompt: Prompt, tokens: Tensor) -> Tensor:
    """Mean log-probability a token [B] of ``tokens`` [B, T] under ``target``, by teacher forcing.

    Guidance and temperature are the target's (1 where it is greedy); top-k and top-p are not
    applied, since a relaxed rule may keep a token that they would exclude. The picture is scored as
    one chain in one forward.
    """
    processor = Processor(target.processor.temperature or 1.0)
    judge = LlamaGenTarget(target.model, target.guidance, processor, target.name)
    first = judge.prefill(prompt, tokens.shape[1]).probs[:, -1:]  # [B, 1, V]
    chain = TreeShape.chain(tokens.shape[1] - 1, tokens.device)
    rest = judge.score(DraftTree(tokens, chain)).probs[
        :, :-1
    ]  # the distribution after token i is that of token i + 1
    chosen = torch.cat([first, rest], dim=1).gather(-1, tokens[..., None]).squeeze(-1)
    return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log().mean(1)
