"""Whether a model's answers through specmm are those of its own ``generate``.

Shape letters: B batch, L prompt positions, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import specmm
from specmm import methods

NEW = 12  # tokens of an answer
TIE = 1e-4  # of the range of the logits: what rounding may decide
SEEN = 0.01  # of the range of the logits: what another picture must move them by
PIXELS = (
    "pixel_values",
    "flattened_patches",
    "high_res_pixel_values",
    "pixel_values_local",
    "protein_input_ids",
)
MASKED = -1e30  # logits below are of tokens that may not come
VARIED = 4  # different tokens that answers must hold
EQUAL = "equal"
REFUSED = "refused"
WRONG = "WRONG"
CRASH = "crash"
TIED = "tied"  # not told apart at rounding level: another seed is to be tried
METHODS = (methods.AR(), methods.PromptLookup(), methods.TextDraft(tree=(2, 2, 1)))
CHAIN = methods.TextDraft(tree=(1, 1, 1))  # where trees are refused: layers with states

Inputs = dict[str, Any]
OPTIONS: Inputs = {"max_new_tokens": NEW, "do_sample": False}


class Outcome(NamedTuple):
    """What came of one method with one kind of prompt; ``found`` is one of the words above."""

    prompt: str
    method: str
    found: str
    reason: str = ""


class Dull(Exception):
    """The model's own answers hardly vary."""


@dataclass
class Answer:
    """The model's own: ``tokens`` [B, T], the length of what was returned, with the prompt where it
    is, and for each token how far the second best logit was, in parts of the range of its step's
    logits [B, T].
    """

    tokens: Tensor
    length: int
    margins: Tensor


def outcomes(model: PreTrainedModel, prompts: dict[str, Inputs]) -> Iterator[Outcome]:
    """Every method with each of ``prompts``, by name. Raises :class:`Dull` where answers that
    hardly vary are equal; a refusal says the same of any weights.
    """
    for name, inputs in prompts.items():
        own = own_answer(model, inputs)
        drafter = bigrams(model, inputs.get("input_ids", own.tokens), own.tokens)
        found = [_outcome(model, name, inputs, own, method, drafter) for method in METHODS]
        if any(outcome.found == EQUAL for outcome in found):
            check_varied(name, own.tokens)
            if name == "picture":
                check_pictures(model, inputs)
        yield from found


def _outcome(
    model: PreTrainedModel,
    name: str,
    inputs: Inputs,
    own: Answer,
    method: methods.TextMethod,
    drafter: LlamaForCausalLM,
) -> Outcome:
    """What came of ``method``; a chain is tried where a tree is refused."""
    found, reason = compare(model, inputs, own, method, drafter)
    if found == REFUSED and "must be chains" in reason:
        chained, why = compare(model, inputs, own, CHAIN, drafter)
        return Outcome(name, "text-draft of chains", chained, why or reason)
    return Outcome(name, method.name, found, reason)


def check_varied(name: str, tokens: Tensor) -> None:
    """Raise :class:`Dull` unless the answers ``tokens`` [B, T] are of several tokens."""
    if len(tokens.unique()) < VARIED or any(len(row.unique()) == 1 for row in tokens):
        raise Dull(f"{name}: {tokens.tolist()}")


def check_pictures(model: PreTrainedModel, inputs: Inputs) -> None:
    """Raise :class:`Dull` unless other pixels give other logits."""
    first: Inputs = {**inputs, "max_new_tokens": 1}
    other = {k: _another(v) if k in PIXELS else v for k, v in first.items()}
    found = [_with_logits(model, given).logits[0].float() for given in (first, other)]  # [B, V]
    moved = (found[0] - found[1]).abs().amax(-1) / _spread(found[0])
    if float(moved.amin()) < SEEN:
        raise Dull(f"the picture moves logits by {float(moved.amin()):.1e} of their range")


def _another(pixels: Tensor) -> Tensor:
    """Other ``pixels``: the places among them, whole numbers, are kept; ids are turned around."""
    if not pixels.is_floating_point():
        return pixels.flip(-1)
    return torch.where(pixels == pixels.round(), pixels, -pixels)


def _spread(logits: Tensor) -> Tensor:
    """The range [...] of ``logits`` [..., V] that are not masked."""
    masked = logits < MASKED
    return (logits.amax(-1) - logits.masked_fill(masked, float("inf")).amin(-1)).clamp(min=1e-30)


@torch.no_grad()
def own_answer(model: PreTrainedModel, inputs: Inputs) -> Answer:
    """What ``generate`` itself answers."""
    found = _with_logits(model, inputs)
    logits = torch.stack(found.logits, dim=1).float()  # [B, T, V]
    best = logits.topk(2).values
    margins = (best[..., 0] - best[..., 1]) / _spread(logits)
    sequences = found.sequences
    return Answer(sequences[:, -len(found.logits) :], sequences.shape[1], margins)


def _with_logits(model: PreTrainedModel, inputs: Inputs) -> Any:
    options = OPTIONS | {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**(options | fresh(inputs)))  # type: ignore[operator]


def fresh(inputs: Inputs) -> Inputs:
    """A copy, since some classes write to what they are given."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def compare(
    model: PreTrainedModel, inputs: Inputs, own: Answer, method: Any, drafter: PreTrainedModel
) -> tuple[str, str]:
    """What came of ``method``, and the sentence that goes with it."""
    ours = specmm.custom_generate(
        drafter if method.name == methods.TextDraft.name else None, method=method
    )
    try:
        found: Any = model.generate(**fresh(inputs), **OPTIONS, custom_generate=ours)  # type: ignore[operator]
    except ValueError as error:
        sentence = str(error)
        return (CRASH, f"ValueError: {sentence}") if "\n" in sentence else (REFUSED, sentence)
    except Exception as error:
        return CRASH, f"{type(error).__name__}: {error}".splitlines()[0]
    if found.shape[1] != own.length:
        return WRONG, f"{found.shape[1]} tokens with the prompt's for {own.length}"
    answer = found[:, -own.tokens.shape[1] :]
    if torch.equal(answer, own.tokens):
        return EQUAL, ""
    return _difference(answer, own)


def _difference(answer: Tensor, own: Answer) -> tuple[str, str]:
    differs = answer != own.tokens
    row = int(differs.any(1).nonzero()[0])
    place = int(differs[row].nonzero()[0])
    margin = float(own.margins[row, place])
    sentence = f"token {place} of row {row} differs, decided by {margin:.1e} of the logits' range"
    return (TIED if margin < TIE else WRONG), sentence


def bigrams(model: PreTrainedModel, prompts: Tensor, answers: Tensor) -> LlamaForCausalLM:
    """A language model of the same vocabulary that knows which token followed which here.

    A random one would be accepted once in V tokens. This one's second choice is right about half of
    the time, so that trees keep, reject and branch.
    """
    size = int(model.config.get_text_config().vocab_size)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        pad_token_id=0,
    )
    drafter: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(size, size, generator=generator)  # [next, last]
    for row in torch.cat([prompts, answers], dim=1).tolist():
        for last, following in pairwise(row):
            table[following, last] = 0.5 + torch.rand((), generator=generator)
    with torch.no_grad():
        for parameter in drafter.model.layers.parameters():
            parameter.zero_()  # what remains is the last token
        drafter.model.embed_tokens.weight.copy_(torch.eye(size))
        drafter.lm_head.weight.copy_(table * 10 / size**0.5)
    return drafter
