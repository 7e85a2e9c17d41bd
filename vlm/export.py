"""MSD heads for other engines: EAGLE-1 heads, for text prompts.

After a text prompt an MSD head is an EAGLE-1 head, under the parameter names of SafeAILab's format,
which SGLang serves as ``LlamaForCausalLMEagle``. It reads a picture's slots without ``fc``, which
no format can express: after pictures its drafts are still verified, but fewer are accepted. No
other format fits: EAGLE-3's layers norm their inputs, and speculators removed its ``eagle``. For
the MSD format see ``msd``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specmm.loading.checkpoints import fingerprint, write_checkpoint
from specmm.vlm.msd import drafted_embeddings, load_msd


def to_eagle(folder: Path, target: PreTrainedModel, out: Path) -> str:
    """Write the head in ``folder`` of the ``target`` model for text prompts; returns a note for
    users.

    Raises ``ValueError`` for heads that EAGLE-1's format cannot express.
    """
    embeddings = drafted_embeddings(target)
    head = load_msd(folder, embeddings)
    config = head.config
    if config.qwen:
        raise ValueError(
            f"EAGLE-1 heads have no norm before their first layer, got a Qwen2-VL head with one in "
            f"{folder}, which other engines do not serve; use it here"
        )
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    facts: dict[str, Any] = config.to_json() | {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "rope_parameters": rope,
        "max_position_embeddings": target.config.get_text_config().max_position_embeddings,
        "tie_word_embeddings": False,
        "target_fingerprint": fingerprint(embeddings),
    }
    write_checkpoint(head.state_dict(), facts, out, head.fc.weight.dtype)
    drops = "; vLLM leaves out the bias of fc" if config.bias else ""
    return (
        f"an EAGLE-1 head, which SGLang serves{drops}; for text prompts: the format has no field "
        "for pictures' raw slots"
    )
