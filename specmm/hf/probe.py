"""Whether a model of transformers can be a target: distributions after a few tokens, ours and its
own.

Classes differ in what stands after the decoder, in how positions and masks are told and in what is
cached; a target that gets one of them wrong would answer wrongly without a word. Which
vision-language models are tried at all is said in ``families``; they are asked about text alone.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specmm.hf.families import own_logits, plain_tokens
from specmm.hf.prompt import VLMPrompt
from specmm.tree import DraftTree, TreeShape

PATHS = ((0,), (0, 1), (0, 2), (0, 1, 3))  # from the root of the tree to each of its nodes
PARENTS = (-1, 0, 0, 1)
PROMPT = 3  # tokens before the tree
ALIKE = {torch.float32: 0.01, torch.float64: 0.01}  # of the spread of log-probabilities
ROUNDED = 0.15  # the same in half precision
LEAST = -80.0  # a log-probability that float32 still tells from none
FAULTS = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

_found: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # what is wrong with a model; "" nothing


def check_model(model: Any, target: Callable[[], Any]) -> None:
    """Raise ``ValueError`` naming the model's type unless trees on it score as its own forwards do.

    ``target`` makes an unchecked target of the model that samples at temperature 1.
    Asked once a model, of text alone; one whose logits are not finite is left to those who use it.
    """
    if model not in _found:
        _found[model] = _fault(model, target)
    if _found[model]:
        instead = "use a causal language model such as Llama, Qwen, Mistral, Phi or GPT-2"
        if hasattr(model.config, "vision_config"):
            instead = "let transformers' own generate answer, or use a LLaVA, Qwen-VL or Idefics 3"
        raise ValueError(
            f"model type {model.config.model_type!r} cannot be accelerated here: {_found[model]}; {instead}"
        )


def _fault(model: Any, target: Callable[[], Any]) -> str:
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
        found = _ours(target(), tokens)
    except torch.OutOfMemoryError:  # says nothing of the model
        raise
    except FAULTS as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    wanted, found = wanted.clamp(min=LEAST), found.clamp(min=LEAST)
    spread = wanted.amax() - wanted.amin()
    off = float((found - wanted).abs().amax() / spread.clamp(min=1e-6))
    limit = ALIKE.get(next(model.parameters()).dtype, ROUNDED)
    return "" if off <= limit else f"its scores of a small tree are off by {off:.2f} of their range"


def _own(model: Any, tokens: Tensor) -> Tensor:
    """Log-probabilities [4, V] after each path by the model's own forward; no path sees the filling
    after it.
    """
    width = PROMPT + max(map(len, PATHS))
    rows = [torch.cat([tokens[:PROMPT], tokens[PROMPT:][list(path)]]) for path in PATHS]
    filled = [torch.cat([row, tokens[:1].expand(width - len(row))]) for row in rows]
    logits = own_logits(model, torch.stack(filled))
    return (
        torch.stack([logits[i, len(row) - 1] for i, row in enumerate(rows)]).float().log_softmax(-1)
    )


@torch.inference_mode()
def _ours(target: Any, tokens: Tensor) -> Tensor:
    """The same by one pass over the tree."""
    device = target.device
    target.prefill(VLMPrompt({"input_ids": tokens[None, :PROMPT].to(device)}, 1), len(PARENTS))
    shape = TreeShape.from_parents(PARENTS, device)
    return target.score(DraftTree(tokens[None, PROMPT:].to(device), shape)).probs[0].log()
