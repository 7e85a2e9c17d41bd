"""Whether a model of transformers can be a target: its tree scores against its own forward.

Classes differ in what follows the decoder, in how positions and masks are given and in what is
cached; a target that gets one of them wrong would give wrong answers without any error. Which
vision-language models are tried at all is in ``families``; they are checked on text alone.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.hf.families import own_logits, plain_tokens
from specmm.hf.prompt import VLMPrompt
from specmm.target import Target
from specmm.tree import DraftTree, TreeShape

PATHS = ((0,), (0, 1), (0, 2), (0, 1, 3))  # from the root of the tree to each of its nodes
PARENTS = (-1, 0, 0, 1)
PROMPT = 3  # tokens before the tree
CLOSE = {torch.float32: 0.01, torch.float64: 0.01}  # of the spread of log-probabilities
ROUNDED = 0.15  # the same in half precision
LEAST = -80.0  # a log-probability that float32 can still tell from that of 0
FAULTS = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

_found: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # faults; "" is none


def check_model(model: PreTrainedModel, target: Callable[[], Target]) -> None:
    """Raise ``ValueError`` naming the model's type unless trees on it score as its own forwards do.

    ``target`` makes an unchecked target of the model that samples at temperature 1. Each model is
    checked once, on text alone; one whose logits are not finite passes.
    """
    if model not in _found:
        _found[model] = _fault(model, target)
    if _found[model]:
        instead = "use a causal language model such as Llama, Qwen, Mistral, Phi or GPT-2"
        if hasattr(model.config, "vision_config"):
            instead = "let transformers' own generate answer, or use a LLaVA, Qwen-VL or Idefics 3"
        raise ValueError(
            f"model type {model.config.model_type!r} cannot be accelerated here: {_found[model]}; "
            f"{instead}"
        )


def _fault(model: PreTrainedModel, target: Callable[[], Target]) -> str:
    config = model.config.get_text_config()
    if getattr(config, "max_position_embeddings", None) is None:
        return "it has no max_position_embeddings"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "it counts its local window by cache slots"
    if config.max_position_embeddings < PROMPT + len(PARENTS):
        return ""
    tokens = plain_tokens(model.config, PROMPT + len(PARENTS))
    try:
        wanted = _own(model, tokens)
        if not bool(wanted.isfinite().all()):
            return ""
        found = _ours(target(), tokens.to(model.device))
    except torch.OutOfMemoryError:  # says nothing of the model
        raise
    except FAULTS as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    wanted = wanted.clamp(min=LEAST)
    spread = (wanted.amax() - wanted.amin()).clamp(min=1e-6)
    off = float((found.clamp(min=LEAST) - wanted).abs().amax() / spread)
    limit = CLOSE.get(next(model.parameters()).dtype, ROUNDED)
    return (
        ""
        if off <= limit
        else f"its scores of a small draft tree differ from its own by {off:.2f} of their range"
    )


def _own(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Log-probabilities [4, V] after each path, by the model's own forward."""
    width = PROMPT + max(map(len, PATHS))
    rows = [torch.cat([tokens[:PROMPT], tokens[PROMPT:][list(path)]]) for path in PATHS]
    filled = [torch.cat([row, tokens[:1].expand(width - len(row))]) for row in rows]
    logits = own_logits(model, torch.stack(filled))
    last = torch.stack([logits[i, len(row) - 1] for i, row in enumerate(rows)])
    return last.float().log_softmax(-1)


@torch.inference_mode()
def _ours(target: Target, tokens: Tensor) -> Tensor:
    """The same by one pass over the tree."""
    target.prefill(VLMPrompt({"input_ids": tokens[None, :PROMPT]}, 1), len(PARENTS))
    shape = TreeShape.from_parents(PARENTS, tokens.device)
    return target.score(DraftTree(tokens[None, PROMPT:], shape)).probs[0].log()
