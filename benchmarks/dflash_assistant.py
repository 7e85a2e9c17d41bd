"""A block drafter of ours in transformers' class of DFlash assistants: the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedModel
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

from specmm.diffusion_drafters.models.dflash import RENAMED, DFlash
from specmm.hf.drafters.files import QWEN_SIZES


def alone(drafter: DFlash) -> DFlash:
    """``drafter`` without its table of pairs and its memory: a DFlash as published."""
    plain = DFlash(dataclasses.replace(drafter.config, markov=0, recurrent=0))
    own = plain.state_dict()
    plain.load_state_dict({name: x for name, x in drafter.state_dict().items() if name in own})
    return plain.to(drafter.fc.weight.dtype).eval()


def as_assistant(drafter: DFlash) -> PreTrainedModel:
    """The same weights in transformers' class of DFlash assistants."""
    config = drafter.config
    sizes: Any = config.sizes
    names = (*QWEN_SIZES[1:], "head_dim", "rope_parameters")
    made = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: getattr(sizes, name) for name in names},
            layer_types=["full_attention"] * sizes.num_hidden_layers,
            block_size=config.block,
            mask_token_id=config.mask,
            target_layer_ids=list(config.layers),
        )
    )
    theirs = {ours: name for name, ours in RENAMED.items() if name.startswith("encoder.")}
    state = {}
    for name, x in drafter.state_dict().items():
        prefix = next((one for one in theirs if name.startswith(one)), "")
        state[theirs.get(prefix, "") + name.removeprefix(prefix)] = x
    made.load_state_dict(state)
    return made.to(drafter.fc.weight.dtype).eval()
