"""Models of published sizes with random weights, made where they run and in the dtype they run in.

A module is made without weights; then each weight is made on the device and filled there, so that
a model never takes more memory than its weights. The cost of a step does not depend on them. Sizes:
the releases' configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers as tf
from torch import nn

from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.diffusion_drafters.models.dflash_config import DFlashConfig
from specmm.image_ar.continuous.mar import PUBLISHED as MARS
from specmm.image_ar.continuous.mar import MARConfig
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import PUBLISHED as GPTS
from specmm.image_ar.tokens.gpt import GPTConfig
from specmm.loading.mapped import META, WithoutWeights
from specmm.vlm.msd import MSDConfig, MSDHead

STD = 0.02
ModuleT = TypeVar("ModuleT", bound=nn.Module)

LLAVA_TEXT = dict(vocab_size=32064, rms_norm_eps=1e-5, max_position_embeddings=4096)
QWEN_VL_TEXT = dict(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
)
QWEN_VL_TOWER = dict(hidden_size=1280, intermediate_size=3420, out_hidden_size=3584)
QWEN3_8B = dict(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
DFLASH_LAYERS = 5
DFLASH = dict(block=16, mask=151669, layers=(1, 9, 17, 25, 33))
BLOCK = dict(levels=6, layers=2)  # our drafter of image tokens, as pocket/llamagen's


def unfilled(make: Callable[[], ModuleT]) -> ModuleT:
    """The module of ``make`` with weights on the meta device, and its tables as they are."""
    with WithoutWeights():
        return make().eval()


@torch.no_grad()
def filled(
    make: Callable[[], ModuleT], device: torch.device, dtype: torch.dtype, seed: int = 0
) -> ModuleT:
    """The module of ``make`` with normal weights of std 0.02 on ``device``, in ``dtype``.

    What has values already (some norms, tables) keeps them; norms are one, other vectors zero.
    """
    module = unfilled(make)
    generator = torch.Generator(device).manual_seed(seed)
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            part._parameters[name] = _weight(name, weight, device, dtype, generator)
        for name, table in list(part.named_buffers(recurse=False)):
            if table.device == META:
                part._buffers[name] = torch.zeros_like(table, device=device)
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    return module.to(device)  # the tables


def _weight(
    name: str,
    weight: nn.Parameter,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> nn.Parameter:
    if weight.device != META:
        return nn.Parameter(weight.to(device, dtype), requires_grad=False)
    values = torch.zeros(weight.shape, device=device, dtype=dtype)
    if weight.ndim > 1:
        values.normal_(0, STD, generator=generator)
    elif name == "weight":  # a norm's
        values.fill_(1)
    return nn.Parameter(values, requires_grad=False)


def llamagen(name: str, side: int) -> GPTConfig:
    """LlamaGen ``name`` ("GPT-B", …) for pictures of ``side`` pixels, 16 of them a token."""
    sizes: Any = GPTS[name]
    return GPTConfig(**sizes, block_size=(side // 16) ** 2)


def picture_drafters(target: GPTConfig) -> dict[str, Callable[[], nn.Module]]:
    """LANTERN's head and our block drafter for ``target``."""
    return {
        "eagle": lambda: EagleHead(EagleConfig(target)),
        "block": lambda: BlockHead(BlockConfig(**BLOCK, target=target)),
    }


def mar(name: str) -> MARConfig:
    """MAR ``name`` ("MAR-L", …), for 256 pixels."""
    sizes: Any = MARS[name]
    return MARConfig(**sizes)


def llava() -> tf.LlavaConfig:
    """LLaVA-1.5-7B."""
    return tf.LlavaConfig(text_config=tf.LlamaConfig(**LLAVA_TEXT))


def qwen_vl() -> tf.Qwen2_5_VLConfig:
    """Qwen2.5-VL-7B."""
    return tf.Qwen2_5_VLConfig(text_config=QWEN_VL_TEXT, vision_config=QWEN_VL_TOWER)


def qwen3() -> tf.Qwen3Config:
    """Qwen3-8B."""
    return tf.Qwen3Config(**QWEN3_8B)


def msd(text: tf.PreTrainedConfig, qwen: bool) -> Callable[[], MSDHead]:
    """MSD's head, one layer of the language model's sizes, ``text``."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes = {name: getattr(text, name) for name in (*names, "num_key_value_heads")}
    return lambda: MSDHead(MSDConfig(**sizes, qwen=qwen))


def dflash(text: tf.Qwen3Config, layers: int, facts: dict[str, Any]) -> Callable[[], DFlash]:
    """A DFlash drafter of ``layers`` of the language model's sizes, ``text``."""
    sizes = tf.Qwen3Config(**(text.to_dict() | dict(num_hidden_layers=layers, layer_types=None)))
    sizes._attn_implementation = "sdpa"
    return lambda: DFlash(DFlashConfig(sizes, **facts))
