"""DEER drafters, which read a text once: causally, followed by a block of masks.

The network is a Qwen2. Masks do not change the text's keys and values, which are therefore cached
for all later rounds. A row scores the token after it (as in Dream), so the last token and K - 1
masks predict a block of K. Embedding and head may be the target's, frozen; then the drafter has
only its own layers. Source: DEER (arXiv 2512.15176); reading the text causally is our addition,
which the cache needs.

Shape letters: K block, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM

from specmm.diffusion_drafters.models.masked import check_mask
from specmm.hf.drafters.files import (
    HEAD,
    LEFTOVERS,
    QWEN_SIZES,
    TOKENS,
    check_target,
    qwen_config,
    read_state,
)
from specmm.loading.checkpoints import fingerprint, load_strict, read_json, write_checkpoint

KIND = "deer"
SHARED = (TOKENS, HEAD)


class DEERModel:
    """A Qwen2 ``model``, its ``mask`` token, the longest ``block`` and the ``end`` token, if any.

    ``shared``: embedding and head are a target's, and logits are scaled or capped as the target's
    are. Raises ``ValueError`` for a mask that is not a token of the model and for a block without a
    draft.
    """

    method: ClassVar[str] = "deer"

    def __init__(
        self, model: Any, mask: int, block: int, end: int | None = None, shared: bool = False
    ) -> None:
        self.model = model.eval()
        self.block = block
        self.end = end
        self.shared = shared
        self.vocabulary = int(model.config.vocab_size)
        self.room = int(model.config.max_position_embeddings)
        self.mask = check_mask(mask, self.vocabulary, None)
        if block < 1:
            raise ValueError(f"block_size must be at least 1, got {block}")


def share(model: Any, target: PreTrainedModel) -> None:
    """Give ``model`` the embedding and the head of the ``target`` model, the same tensors."""
    model.model.embed_tokens.weight = target.get_input_embeddings().weight
    model.lm_head.weight = target.get_output_embeddings().weight


def is_deer(folder: Path) -> bool:
    """Whether ``folder`` holds a DEER drafter."""
    return read_json(folder / "config.json").get("model_type") == KIND


def load_deer(
    folder: str | Path, target: PreTrainedModel, dtype: torch.dtype | None = None
) -> DEERModel:
    """The drafter in ``folder`` for the ``target`` model, in ``dtype`` or the target's.

    Raises ``ValueError`` for another kind of drafter, for a drafter of another target, and naming
    missing, extra, misshapen or non-finite weights.
    """
    facts = read_json(Path(folder) / "config.json")
    state = read_state(folder)
    missing = [n for n in ("block_size", "mask_token_id") if not isinstance(facts.get(n), int)]
    if facts.get("model_type") != KIND or missing:
        raise ValueError(
            f"{folder} must describe a DEER drafter with a block_size and a mask_token_id, "
            f"got {missing}"
        )
    model: Any = Qwen2ForCausalLM(qwen_config(facts, "DEER"))
    shared = bool(facts.get("target_embeddings"))
    if shared:
        check_target(facts, target, folder)
        untrained = model.state_dict()
        state |= {name: untrained[name] for name in SHARED}
    load_strict(model, state, LEFTOVERS, folder)
    if shared:  # tensors that may be quantised
        share(model, target)
    for name, weight in model.named_parameters():
        if not (shared and name in SHARED):
            weight.data = weight.data.to(target.device, dtype or target.dtype)
    model.model.rotary_emb.to(target.device)
    end = facts.get("eos_token_id")
    return DEERModel(model, facts["mask_token_id"], facts["block_size"], end, shared)


def save_deer(drafter: DEERModel, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors``; of shared weights only the fingerprint."""
    state = drafter.model.state_dict()
    config = drafter.model.config
    facts = {name: getattr(config, name) for name in QWEN_SIZES} | {
        "model_type": KIND,
        "rope_parameters": config.rope_parameters,
        "block_size": drafter.block,
        "mask_token_id": drafter.mask,
        "eos_token_id": drafter.end,
        "target_embeddings": drafter.shared,
    }
    if drafter.shared:
        facts["target_fingerprint"] = fingerprint(drafter.model.model.embed_tokens.weight)
        state = {name: tensor for name, tensor in state.items() if name not in SHARED}
    write_checkpoint(state, facts, folder, dtype)
