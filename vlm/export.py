"""MSD heads for other engines: speculators / vLLM folders, for text prompts.

The speculators format knows drafters that read text: every slot goes through the fusion layer. An
MSD head takes a picture's slots raw, and no field says so; after text prompts it is an EAGLE-1
head, which the format does know (``eagle`` without layer norms). Its ``eagle3`` drafters read
[embedding; fused states] of twice the width, which a head with ``fc`` in front of a layer of the
model's width cannot be. For the MSD format see ``msd_head``.

Shape letters: V vocabulary, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specmm.checkpoints import State
from specmm.vlm.msd import MSDConfig, MSDHead, drafted_embeddings, load_msd, write_folder

ALGORITHM = "eagle"
VERSION = "0.1.0"  # of the configuration's schema
# Ours to theirs; other names are the same.
NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class Verifier:
    """The target as the format names it: a hub id or folder, and its architectures."""

    name_or_path: str
    architectures: Sequence[str]


def speculators_config(
    config: MSDConfig, verifier: Verifier, *, tokens: int = 5, algorithm: str = ALGORITHM
) -> dict[str, Any]:
    """The ``config.json`` of a text-path drafter that proposes ``tokens`` tokens greedily.

    Raises ``ValueError`` for heads and algorithms that the format cannot describe.
    """
    _check_expressible(config, algorithm)
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    layer = {k: v for k, v in config.to_json().items() if k not in ("bias", "architectures")}
    return {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": list(verifier.architectures),
            },
        },
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer | {"model_type": "llama"},
        "layernorms": False,
        "fusion_bias": config.bias,
    }


def export_speculators(
    head: MSDHead,
    output: Tensor,
    folder: str | Path,
    verifier: Verifier,
    *,
    tokens: int = 5,
    algorithm: str = ALGORITHM,
    text_only: bool = False,
) -> None:
    """Write ``head`` with the target's ``output`` head [V, C] as a speculators folder.

    Raises ``ValueError`` when the format cannot describe the head, unless ``text_only`` accepts
    that an engine will send pictures through ``fc`` (still exact, but fewer tokens accepted).
    """
    if not text_only:
        raise ValueError(
            "speculators has no field for MSD's raw image slots, got an MSD head; export the MSD "
            "format with save_msd, or give text_only=True to use it after text prompts"
        )
    facts = speculators_config(head.config, verifier, tokens=tokens, algorithm=algorithm)
    wanted = [head.config.vocab_size, head.config.hidden_size]
    if list(output.shape) != wanted:
        raise ValueError(f"output must be the target's head {wanted}, got {list(output.shape)}")
    weights = {_renamed(k): v for k, v in head.state_dict().items()} | {OUTPUT: output}
    state: State = {k: v.detach().cpu().clone().contiguous() for k, v in weights.items()}
    write_folder(folder, state, facts)


def to_speculators(folder: Path, target: PreTrainedModel, out: Path) -> str:
    """Write the head in ``folder`` of the ``target`` model for text prompts, and what to know."""
    verifier = Verifier(str(target.config.name_or_path), [type(target).__name__])
    head = load_msd(folder, drafted_embeddings(target))
    weight: Any = target.get_output_embeddings().weight
    export_speculators(head, weight.to(head.fc.weight.dtype), out, verifier, text_only=True)
    return "for text prompts: the format has no field for pictures' raw slots"


def _renamed(name: str) -> str:
    old = next((prefix for prefix in NAMES if name.startswith(prefix)), "")
    return NAMES[old] + name[len(old) :] if old else name


def _check_expressible(config: MSDConfig, algorithm: str) -> None:
    if algorithm != ALGORITHM:
        why = "it is another network"
        if algorithm == "eagle3":
            why = "its layer is as wide as [embedding; fused states]"
        raise ValueError(
            f"an MSD head's text path can be written as {ALGORITHM!r}, got {algorithm!r} ({why})"
        )
    if config.qwen:
        raise ValueError(
            f"{ALGORITHM!r} drafters have no first norm, got a Qwen2-VL head with one; use save_msd"
        )
    if config.num_hidden_layers != 1:
        raise ValueError(
            f"{ALGORITHM!r} drafters have 1 layer, got {config.num_hidden_layers}; use save_msd"
        )
