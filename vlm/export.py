"""MSD heads for other engines: speculators / vLLM folders, for text prompts.

The speculators format knows drafters that read text: every slot goes through the fusion layer. An
MSD head takes a picture's slots raw, and no field says so; after text prompts it is an EAGLE-1
head, which the format does know (``eagle`` without layer norms), and on pictures it is still exact,
but fewer tokens are accepted. For the MSD format see ``msd_head``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specmm.checkpoints import write_checkpoint
from specmm.hf.drafters.eagle3_files import SPECULATORS_VERSION, speculators_facts
from specmm.vlm.msd import MSDConfig, drafted_embeddings, load_msd

ALGORITHM = "eagle"
VERSION = "0.1.0"  # of the configuration's schema
# Ours to theirs; other names are the same.
NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
OUTPUT = "lm_head.weight"


def to_speculators(folder: Path, target: PreTrainedModel, out: Path) -> str:
    """Write the head in ``folder`` of the ``target`` model for text prompts, and what to know.

    Raises ``ValueError`` for heads that the format cannot describe.
    """
    head = load_msd(folder, drafted_embeddings(target))
    _check_expressible(head.config)
    output: Any = target.get_output_embeddings().weight
    wanted = [head.config.vocab_size, head.config.hidden_size]
    if list(output.shape) != wanted:
        raise ValueError(f"output must be the target's head {wanted}, got {list(output.shape)}")
    weights = {_renamed(k): v for k, v in head.state_dict().items()} | {OUTPUT: output}
    write_checkpoint(weights, _facts(head.config, target), out, head.fc.weight.dtype)
    return (
        f"of speculators' type {ALGORITHM} (configuration {VERSION}), which speculators "
        f"{SPECULATORS_VERSION} no longer has; for text prompts: the format has no field for "
        "pictures' raw slots"
    )


def _facts(config: MSDConfig, target: PreTrainedModel) -> dict[str, Any]:
    """The ``config.json``."""
    layer = {k: v for k, v in config.to_json().items() if k not in ("bias", "architectures")}
    return {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": ALGORITHM,
        "speculators_version": VERSION,
        "speculators_config": speculators_facts(ALGORITHM, target),
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer | {"model_type": "llama"},
        "layernorms": False,
        "fusion_bias": config.bias,
    }


def _renamed(name: str) -> str:
    old = next((prefix for prefix in NAMES if name.startswith(prefix)), "")
    return NAMES[old] + name[len(old) :] if old else name


def _check_expressible(config: MSDConfig) -> None:
    if config.qwen:
        raise ValueError(
            f"{ALGORITHM!r} drafters have no first norm, got a Qwen2-VL head with one; use save_msd"
        )
    if config.num_hidden_layers != 1:
        raise ValueError(
            f"{ALGORITHM!r} drafters have 1 layer, got {config.num_hidden_layers}; use save_msd"
        )
