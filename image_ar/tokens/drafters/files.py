"""The drafters beside a model: ``drafters/<kind>/{model.safetensors, config.json}``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from specmm.checkpoints import check_fingerprint, load_strict, read_checkpoint, read_json
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.drafters.eagle_head import EagleHead, load_eagle, save_eagle
from specmm.image_ar.tokens.drafters.fingerprint import target_fingerprint
from specmm.image_ar.tokens.gpt import Transformer

Head = BlockHead | EagleHead


def load_drafters(folder: Path, target: Transformer) -> dict[str, Head]:
    """Every drafter in ``folder`` by kind, in the target's dtype; raises ``ValueError`` for another
    target's.
    """
    loaders: dict[str, Callable[[Path, Transformer], Head]] = {
        "block": load_block,
        "eagle": _load_eagle,
    }
    return {
        kind: load(folder / kind, target)
        for kind, load in loaders.items()
        if (folder / kind).is_dir()
    }


def save_drafters(
    drafters: dict[str, Head], folder: Path, target: Transformer, dtype: torch.dtype | None = None
) -> None:
    """Write every drafter with the target's fingerprint."""
    for kind, head in drafters.items():
        if isinstance(head, BlockHead):
            save_block(head, folder / kind, target, dtype)
        else:
            save_eagle(head, folder / kind, fingerprint=target_fingerprint(target), dtype=dtype)


def load_block(folder: Path, target: Transformer) -> BlockHead:
    """The block drafter in ``folder``; raises ``ValueError`` when it was trained for another
    target.
    """
    facts = read_json(folder / "config.json")
    if "taps" in facts:  # folders written before version 0.2
        facts["aux_layers"] = facts.pop("taps")
    missing = [
        key for key in ("levels", "layers", "aux_layers", "target_fingerprint") if key not in facts
    ]
    if missing:
        raise ValueError(
            f"{folder / 'config.json'} must say {', '.join(missing)}, got {sorted(facts)}"
        )
    check_fingerprint(facts["target_fingerprint"], target_fingerprint(target), folder)
    sizes = (tuple(facts["aux_layers"]), facts.get("inner", 0))
    head = BlockHead(BlockConfig(facts["levels"], facts["layers"], target.config, *sizes))
    load_strict(head, read_checkpoint(folder), source=folder)
    weight = target.output.weight
    return head.to(weight.device, weight.dtype).eval()


def save_block(
    head: BlockHead, folder: Path, target: Transformer, dtype: torch.dtype | None = None
) -> None:
    """Write the block drafter with its sizes and its target's fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in head.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    facts = {
        "model": "BlockHead",
        "levels": head.config.levels,
        "layers": head.config.layers,
        "aux_layers": list(head.config.aux_layers),
        "inner": head.config.inner,
        "target_fingerprint": target_fingerprint(target),
    }
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")


def _load_eagle(folder: Path, target: Transformer) -> EagleHead:
    weight = target.output.weight
    head = load_eagle(
        folder, target.config, fingerprint=target_fingerprint(target), dtype=weight.dtype
    )
    return head.to(device=weight.device)
