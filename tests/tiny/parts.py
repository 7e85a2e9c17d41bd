"""What tiny random models share: their sizes, and weights that say something."""

import torch

IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
TEXT = SIZES | IDS | dict(num_key_value_heads=2, max_position_embeddings=256)
TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
PIXELS = TOWER | dict(image_size=16, patch_size=4)
CLIP = TOWER | dict(model_type="clip_vision_model", image_size=8, patch_size=4)
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
QWEN_SIZES = dict(patch_size=4, spatial_merge_size=2, temporal_patch_size=2, num_heads=2, depth=2)
QWEN_TOWER = QWEN_SIZES | dict(hidden_size=16, intermediate_size=24, out_hidden_size=32)
WINDOWED = QWEN_TOWER | dict(window_size=16, fullatt_block_indexes=[1])  # Qwen2.5-VL
DEEPSTACK = QWEN_TOWER | dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
LINEAR = dict(  # attention
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8
)
# as DeepSeek's
EXPERTS = dict(first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2)
EXPERTS |= dict(n_group=1, topk_group=1, moe_intermediate_size=16, n_shared_experts=1)


def mar_sides(dim, depth):
    """Of a MAR's encoder and decoder."""
    sizes = dict(embed_dim=dim, depth=depth, num_heads=2)
    return {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sizes.items()}


def shaken(model, seed=None, std=0.25, vectors=False):
    """``model`` with normal matrices, and with ``vectors`` norms and biases, too.

    They are drawn from a generator of ``seed``, or from torch's own.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 or vectors:
                weight.normal_(0, std, generator=generator)
    return model.eval()


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def random_weights(model, seed=0, std=0.35):
    """All weights are normal."""
    return shaken(model, seed, std, vectors=True)


def spread(model, by):
    """Larger weights, for those of a fresh model say nearly the same whatever they read."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(by)


def ending(model, at=None):
    """``model`` whose answers end with the token ``at``, by default nowhere."""
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = at, 0
    return model


def square(side):
    return {"height": side, "width": side}
