"""MSD heads on disk: ``config.json`` beside ``pytorch_model.bin`` (as released) or
``model.safetensors``.

The official layout carries a frozen copy of the target's token embeddings. It tells whose drafter
this is; ours may leave it out (``target_embeddings`` in the config) and then record the target's
fingerprint instead.

Shape letters: V vocabulary, v rows of a drafter's embeddings, C width.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specmm.checkpoints import (
    State,
    check_fingerprint,
    fingerprint,
    load_strict,
    read_checkpoint,
    read_json,
    weights_file,
)
from specmm.hardware import prepack
from specmm.vlm.drafters.msd_head import Acceptance, MSDConfig, MSDHead

EMBEDDINGS = "embed_tokens.weight"
ACCEPTANCE = "acceptance.json"  # of the head, by temperature, level and rank; ours only
LEFTOVERS = ("rotary_emb",)
# relative distance of two roundings of the same embeddings stays far below, that of others is about
# 1
SAME = 0.05
KINDS = {
    False: ("llava", "LlavaLlamaForCausalLM"),
    True: ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
}


def load_for(folder: Path, target: Any, method: str) -> MSDHead:
    """The head in ``folder`` for the ``target`` model, its weights as its products read them."""
    return prepack(load_msd(folder, target.get_input_embeddings().weight))


def load_msd(
    path: str | Path, embeddings: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> MSDHead:
    """The head in the folder ``path``, in evaluation mode, in ``dtype`` or that of the target's
    ``embeddings``.

    ``embeddings`` [V, C] are the target's; drafters of other sizes or of another target's
    embeddings are refused, and a target padded with further rows (as llava-hf's conversions are)
    lends them to the head. Raises ``ValueError`` naming missing, extra, misshapen or non-finite
    weights, and for a config that does not say the sizes.
    """
    file = weights_file(path).with_name("config.json")
    facts, state = read_json(file), read_checkpoint(path)
    config = MSDConfig.from_json(facts, file)
    if embeddings is not None:
        check_target(config, facts, state.get(EMBEDDINGS), embeddings, path)
        config = dataclasses.replace(config, vocab_size=len(embeddings))
        state[EMBEDDINGS] = embeddings.detach().cpu()
    elif facts.get("target_embeddings"):
        raise ValueError(f"{path} must be loaded with its target's embeddings, got none; give them")
    head = MSDHead(config)
    load_strict(head, state, LEFTOVERS, path)
    wanted = dtype or (torch.float32 if embeddings is None else embeddings.dtype)
    head.acceptance = read_acceptance(file.with_name(ACCEPTANCE))
    return head.to("cpu" if embeddings is None else embeddings.device, wanted).eval()


def check_target(
    config: MSDConfig,
    facts: dict[str, Any],
    own: Tensor | None,
    embeddings: Tensor,
    path: str | Path,
) -> None:
    """Raise ``ValueError`` unless a drafter of ``config`` with ``own`` embeddings [v, C] is made
    for ``embeddings``.
    """
    rows, width = embeddings.shape
    found = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    if config.hidden_size != width or config.vocab_size > rows:
        raise ValueError(
            f"drafter must have the target's embeddings [{rows}, {width}], got {found} in {path}"
        )
    if own is None:
        _check_fingerprint(facts, fingerprint(embeddings), path)
    elif own.shape != (config.vocab_size, width):
        raise ValueError(
            f"{EMBEDDINGS} must be [{config.vocab_size}, {width}], got {list(own.shape)} in {path}"
        )
    elif not _distance(own, embeddings[: len(own)]) < SAME:
        raise ValueError(
            f"drafter must be of this target, got other token embeddings in {path}, use its own drafter"
        )


def _check_fingerprint(facts: dict[str, Any], wanted: str, path: str | Path) -> None:
    if not facts.get("target_embeddings"):
        raise ValueError(
            f"{path} must hold {EMBEDDINGS}, or say target_embeddings in its config.json, got neither"
        )
    check_fingerprint(facts.get("target_fingerprint"), wanted, path)


def save_msd(
    head: MSDHead, folder: str | Path, *, dtype: torch.dtype | None = None, embeddings: bool = True
) -> None:
    """Write ``model.safetensors`` (official names; ``dtype`` such as bf16 halves it) and
    ``config.json``.

    ``embeddings=False`` leaves the target's embeddings out and records their fingerprint.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state: State = {
        k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in head.state_dict().items()
    }
    facts = config_json(head.config)
    if not embeddings:
        facts |= {
            "target_embeddings": True,
            "target_fingerprint": fingerprint(state.pop(EMBEDDINGS)),
        }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
    if head.acceptance:
        found = {str(temperature): table for temperature, table in head.acceptance.items()}
        (folder / ACCEPTANCE).write_text(json.dumps(found, indent=1) + "\n")


def read_acceptance(file: Path) -> dict[float, Acceptance]:
    """The tables by temperature in ``file``; none where the drafter was never measured."""
    found = read_json(file) if file.exists() else {}
    return {
        float(temperature): tuple(tuple(row) for row in table)
        for temperature, table in found.items()
    }


def config_json(config: MSDConfig) -> dict[str, Any]:
    """What the release's loader reads of a drafter's ``config.json``."""
    facts = dataclasses.asdict(config)
    kind, architecture = KINDS[facts.pop("qwen")]
    return {"model_type": kind, "architectures": [architecture], **facts}


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.detach().cpu().float()
    return float((a - b).norm() / b.norm().clamp(min=1e-12))
