"""Writes block drafters for other engines: speculators' ``dflash`` and ``dspark`` folders, which
vLLM reads, and SpecForge's.

speculators numbers states (state i is the i-th layer's output) and orders a drafter's own tokens by
the target's ids. Our table of pairs is DSpark's vanilla Markov head with a single row for all
tokens that the drafter lacks; the export repeats that row for each such token.

Shape letters: C width, R rank, V vocabulary, v the drafter's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.core.processors import Processor
from specmm.diffusion_drafters.models.dflash import OWN_HEAD, DFlash, load_dflash
from specmm.diffusion_drafters.models.dflash_config import DFlashConfig, HeadSizes
from specmm.diffusion_drafters.sources import check_dflash
from specmm.hf.drafters.eagle3_files import SPECULATORS_VERSION, speculators_facts
from specmm.hf.drafters.files import QWEN_SIZES
from specmm.hf.models.target import VLMTarget
from specmm.loading.checkpoints import State, embeddings_of, fingerprint, write_checkpoint


def to_speculators(folder: Path, target: PreTrainedModel, out: Path) -> None:
    """Write the drafter in ``folder`` of the ``target`` model as speculators' ``dflash``, or as
    ``dspark`` if a draft depends on the drafts before it.

    Raises ``ValueError`` for a drafter that those formats cannot describe or that was trained for
    another target.
    """
    model = load_dflash(folder)
    check_dflash(model, VLMTarget(target, Processor(), "target"))
    spark = _as_dspark(model.config, len(target_layers(target)))
    dtype = model.fc.weight.dtype
    write_checkpoint(_state(model, target), _facts(model, target, spark), out, dtype)


def _as_dspark(config: DFlashConfig, layers: int) -> HeadSizes | None:
    """The Markov head of ``config`` in DSpark's terms; None for a plain DFlash.

    Raises ``ValueError`` naming parts for which speculators' layout has no field.
    """
    parts = {
        "a memory along the block (recurrent_size)": bool(config.recurrent),
        "a Domino head": config.head is not None and config.head.kind == "domino",
        "windows that move along a block": bool(config.reaches),
        "the last layer's states after the final norm": config.normed
        and layers - 1 in config.layers,
        "a confidence head without a Markov head": bool(config.confidence) and not config.head,
    }
    if lacking := [name for name, present in parts.items() if present]:
        raise ValueError(
            f"speculators' dflash and dspark have no field for {', '.join(lacking)}, got a drafter "
            "with it; export one without"
        )
    return HeadSizes("vanilla", config.markov) if config.markov else config.head


def _facts(model: DFlash, target: PreTrainedModel, head: HeadSizes | None) -> dict[str, Any]:
    """The ``config.json`` of a speculators folder for ``model``."""
    config = model.config
    algorithm = "dflash" if head is None else "dspark"
    head_facts = {} if head is None else {"markov_rank": head.size, "markov_head_type": head.kind}
    if head is not None:
        head_facts["enable_confidence_head"] = bool(config.confidence)
        head_facts["confidence_head_with_markov"] = config.confidence == "markov"
    return {
        "architectures": [f"{'DFlash' if head is None else 'DSpark'}Speculator"],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": speculators_facts(algorithm, target, config.longest),
        "transformer_layer_config": _layer(config),
        "draft_vocab_size": config.tokens or config.sizes.vocab_size,
        "block_size": config.block,
        "mask_token_id": config.mask,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "sample_from_anchor": config.anchor,
        "target_hidden_size": None,
        "target_fingerprint": fingerprint(embeddings_of(target)),
        **head_facts,
    }


def _layer(config: DFlashConfig) -> dict[str, Any]:
    sizes: Any = config.sizes
    names = (*QWEN_SIZES, "head_dim", "hidden_act", "attention_bias", "rope_parameters")
    return {"model_type": "qwen3", **{name: getattr(sizes, name) for name in names}}


def _state(model: DFlash, target: PreTrainedModel) -> State:
    """The weights by speculators' names, the drafter's tokens in the order of the target's ids."""
    weights = model.state_dict()
    state = {name: x for name, x in weights.items() if not name.startswith(("markov.", "d2t"))}
    ids = model.ids
    order = torch.arange(model.config.sizes.vocab_size) if ids is None else ids.argsort()
    if ids is not None:
        state |= _tables(ids[order], model.config.sizes.vocab_size)
        head: Any = target.get_output_embeddings()
        head_weight = head.weight[ids] if model.lm_head is None else model.lm_head.weight
        state[OWN_HEAD] = head_weight[order].detach()
    if model.markov is not None:
        state["markov_head.markov_w1.weight"] = model.markov.before.weight[model.t2d]
        state["markov_head.markov_w2.weight"] = model.markov.after.weight[order]
    elif "markov_head.markov_w2.weight" in state:
        state["markov_head.markov_w2.weight"] = state["markov_head.markov_w2.weight"][order]
    return state


def _tables(ids: Tensor, vocabulary: int) -> State:
    """``d2t`` [v] and ``t2d`` [V] of ascending ``ids`` [v]."""
    drafted = torch.zeros(vocabulary, dtype=torch.bool)
    drafted[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


def to_specforge(folder: Path, target: PreTrainedModel, out: Path) -> None:
    """Write the drafter in ``folder`` of the ``target`` model as SpecForge's DFlash.

    Raises ``ValueError`` for a drafter that the format cannot describe or that was trained for
    another target.
    """
    model = load_dflash(folder)
    config = model.config
    check_dflash(model, VLMTarget(target, Processor(), "target"))
    lacks = {
        "a vocabulary of the drafter's own": bool(config.tokens),
        "a table of pairs": bool(config.markov),
        "a memory along the block": bool(config.recurrent),
        "heads and windows, which it has already": bool(config.head or config.reaches),
        "a confidence head": bool(config.confidence),
        "drafts at the anchor": config.anchor,
    }
    if lacking := [name for name, without in lacks.items() if without]:
        raise ValueError(
            f"SpecForge's DFlash has no field for {', '.join(lacking)}, got a drafter with it; "
            "export speculators, or one without"
        )
    layers = len(target_layers(target))
    facts = {
        **_layer(config),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block,
        "num_target_layers": layers,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.sizes.num_hidden_layers,
        "dflash_config": {"mask_token_id": config.mask, "target_layer_ids": list(config.layers)},
        "target_fingerprint": fingerprint(embeddings_of(target)),
    }
    write_checkpoint(model.state_dict(), facts, out, model.fc.weight.dtype)


def target_layers(target: PreTrainedModel) -> range:
    """The indices of all layers of ``target``."""
    return range(int(target.config.get_text_config(decoder=True).num_hidden_layers))
