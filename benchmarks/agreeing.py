"""Random models whose next token depends mostly on the latest one, and drafters that know it.

MTP layers and Gemma 4's assistants come with checkpoints too large for these tables. Here the
drafters see the same embedding as the target, and most of their drafts are kept, so that what is
measured is the loop around them. Sizes are those of pocket/coder.

Shape letters: C width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_layers import MtpModel

from specmm.hf.drafters.mtp_layers import MtpLayers
from specmm.loading.hardware import prepack

SIZES = dict(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=20,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    eos_token_id=None,
)
LAYERS = 0.03  # standard deviation of what layers multiply with
EMBEDDINGS = 3.0
HEAD = 0.6
NOISE = 0.02  # how much else a drafter reads than the latest token


def with_mtp(count: int, dtype: torch.dtype = torch.float32) -> tuple[Any, MtpLayers]:
    """A Qwen 2 and ``count`` MTP layers for it."""
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)).eval()
    randomise(model, 0)
    model.config.num_mtp_layers = count
    model.config.mtp_layer_types = ["full_attention"] * count
    layers: Any = MtpModel(model, count).eval()
    for layer in layers.layers:
        randomise(layer.mtp_block, 1)
        pass_on(layer.eh_proj)
    model = prepack(model.to(dtype))
    layers.tie_with_main_model(model)
    return model, MtpLayers.of(prepack(layers.to(dtype).requires_grad_(False)))


def with_assistant(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A Gemma 4 and an assistant for it; raises ``ValueError`` where transformers builds none."""
    kinds = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=128)
    heads = dict(head_dim=32, global_head_dim=32, hidden_size_per_layer_input=0)
    heads |= dict(vocab_size_per_layer_input=0)
    own = SIZES | heads | kinds | dict(layer_types=kinds["layer_types"] * 10)
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**own)).eval()
    randomise(model, 0)
    small = SIZES | heads | kinds | dict(num_hidden_layers=2, num_kv_shared_layers=2)
    small |= dict(tie_word_embeddings=True)
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**small),
        backbone_hidden_size=SIZES["hidden_size"],
    )
    assistant = transformers.Gemma4AssistantForCausalLM(config).eval()
    randomise(assistant, 1)
    pass_on(assistant.pre_projection)
    with torch.no_grad():
        assistant.lm_head.weight.copy_(model.lm_head.weight)
    return prepack(model.to(dtype)), prepack(assistant.to(dtype))


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Weights that leave most of what is embedded as it is."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        scale = EMBEDDINGS if "embed" in name else HEAD if "head" in name else LAYERS
        if weight.ndim > 1:
            weight.normal_(0, scale, generator=generator)


@torch.no_grad()
def pass_on(projection: nn.Linear) -> None:
    """Let ``projection`` of [embedding, state] give the embedding and a little of the state."""
    width = projection.out_features
    noise = torch.randn(width, width, generator=torch.Generator().manual_seed(2))
    projection.weight.copy_(torch.cat([torch.eye(width), NOISE * noise], 1))
