"""Whether a causal language model of transformers can be a target at all: a few tokens, ours against the model's own.

Classes differ in what stands behind the decoder, in how positions and masks are told and in what is cached; a target
that gets one of them wrong would answer wrongly without a word. Vision-language models are named in ``families``.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

PATHS = ((0,), (0, 1), (0, 2), (0, 1, 3))  # from the root of the tree to each of its nodes
PARENTS = (-1, 0, 0, 1)
PROMPT = 3  # tokens before the tree
ALIKE = {torch.float32: 0.01, torch.float64: 0.01}  # of the spread of log-probabilities
ROUNDED = 0.15  # the same in half precision

_found: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # what is wrong with a model; "" nothing


def check_model(model: Any) -> None:
    """Raise ``ValueError`` naming the model's type unless trees on it score as its own forwards do.

    Asked once a model; a model whose logits are not finite is left to those who use it.
    """
    if model not in _found:
        _found[model] = ""  # the target that is made to find out asks, too
        _found[model] = _fault(model)
    if _found[model]:
        raise ValueError(
            f"model type {model.config.model_type!r} cannot be accelerated here: {_found[model]}; "
            "use a causal language model such as Llama, Qwen, Mistral, Phi or GPT-2"
        )


def _fault(model: Any) -> str:
    config = model.config
    if getattr(config, "max_position_embeddings", None) is None:
        return "it has no max_position_embeddings"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "it counts its local window by cache slots"
    if config.max_position_embeddings < PROMPT + len(PARENTS):
        return ""
    tokens = _tokens(config)
    try:
        wanted = _own(model, tokens)
        if not bool(wanted.isfinite().all()):
            return ""
        found = _ours(model, tokens)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    spread = wanted.amax() - wanted.amin()
    off = float((found - wanted).abs().amax() / spread.clamp(min=1e-6))
    limit = ALIKE.get(next(model.parameters()).dtype, ROUNDED)
    return "" if off <= limit else f"its scores of a small tree are off by {off:.2f} of their range"


def _tokens(config: Any) -> Tensor:
    """Ids [7] of a prompt and of a tree's nodes, none of them special."""
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    size = int(config.vocab_size)
    plain = [i for i in range(size // 2, size) if i not in special] + [i for i in range(size // 2) if i not in special]
    count = PROMPT + len(PARENTS)
    return torch.tensor((plain * count)[:count])


@torch.inference_mode()
def _own(model: Any, tokens: Tensor) -> Tensor:
    """Log-probabilities [4, V] behind each path by the model's own forward."""
    rows = [torch.cat([tokens[:PROMPT], tokens[PROMPT:][list(path)]])[None].to(model.device) for path in PATHS]
    return torch.stack([model(input_ids=row, use_cache=False).logits[0, -1].float() for row in rows]).log_softmax(-1)


@torch.inference_mode()
def _ours(model: Any, tokens: Tensor) -> Tensor:
    """The same by one pass over the tree."""
    from specmm.processors import Processor
    from specmm.tree import DraftTree, TreeShape
    from specmm.vlm.prompt import VLMPrompt
    from specmm.vlm.target import VLMTarget

    target = VLMTarget(model, Processor(1.0), "probe")
    target.prefill(VLMPrompt({"input_ids": tokens[None, :PROMPT].to(model.device)}, 1), len(PARENTS))
    shape = TreeShape.from_parents(PARENTS, target.device)
    return target.score(DraftTree(tokens[None, PROMPT:].to(model.device), shape)).laws[0].log()
