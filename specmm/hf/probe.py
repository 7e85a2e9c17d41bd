"""Whether a model of transformers can be a target: its tree scores against its own forward.

Classes differ in what follows the decoder, in how positions and masks are given and in what is
cached; a target that gets one of them wrong would give wrong answers without any error. Which
vision-language models are tried at all is in ``families``; they are checked on text alone.

Decoders that take chains only (layers with states) are probed by three chains, of which a part is
kept each time: a state that does not go back to the last token kept shows in the next chain.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.hf.families import Family, own_logits, plain_tokens
from specmm.hf.prompt import VLMPrompt
from specmm.target import Target
from specmm.tree import DraftTree, TreeShape
from specmm.verify.rule import VerifyResult

PATHS = ((0,), (0, 1), (0, 2), (0, 1, 3))  # from the root of the tree to each of its nodes
PARENTS = (-1, 0, 0, 1)
CHAINS = (4, 2, 3)  # tokens of the chains, one after the other
KEPT = (2, 1)  # of the first two
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
    family = Family.of(model)
    config = family.config
    if family.room is None:
        return "it has no max_position_embeddings"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "it counts its local window by cache slots"
    paths = chain_paths() if family.chains_only else PATHS
    count = PROMPT + max(map(max, paths)) + 1
    if family.room < count:
        return ""
    tokens = plain_tokens(model.config, count)
    ours = _by_chains if family.chains_only else _ours
    try:
        wanted = _own(model, tokens, paths)
        if not bool(wanted.isfinite().all()):
            return ""
        found = ours(target(), tokens.to(model.device))
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


def chain_paths() -> tuple[tuple[int, ...], ...]:
    """As ``PATHS`` to each token of the chains: after those kept before, whose numbers go on."""
    paths: list[tuple[int, ...]] = []
    before: tuple[int, ...] = ()
    first = 0
    for size, kept in zip(CHAINS, (*KEPT, 0), strict=True):
        chain = tuple(range(first, first + size))
        paths += [before + chain[: n + 1] for n in range(size)]
        before += chain[:kept]
        first += size
    return tuple(paths)


def _own(model: PreTrainedModel, tokens: Tensor, paths: Sequence[tuple[int, ...]]) -> Tensor:
    """Log-probabilities [N, V] after each of ``paths``, by the model's own forward."""
    width = PROMPT + max(map(len, paths))
    rows = [torch.cat([tokens[:PROMPT], tokens[PROMPT:][list(path)]]) for path in paths]
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


@torch.inference_mode()
def _by_chains(target: Target, tokens: Tensor) -> Tensor:
    """The same by one pass over each chain."""
    target.prefill(VLMPrompt({"input_ids": tokens[None, :PROMPT]}, sum(KEPT) + 1), max(CHAINS))
    found = []
    first = PROMPT
    for size, kept in zip(CHAINS, (*KEPT, 0), strict=True):
        chain = tokens[None, first : first + size]
        shape = TreeShape.chain(size - 1, tokens.device)
        found.append(target.score(DraftTree(chain, shape)).probs[0])
        path = torch.arange(size, device=tokens.device)[None]
        target.commit(VerifyResult(path, tokens.new_tensor([kept]), chain[:, -1]))
        first += size
    return torch.cat(found).log()
