"""Tiny random models that mix attention with linear attention, state spaces or convolutions."""

import torch
import transformers as tf

VOCABULARY = 40
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
DELTA = dict(
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
)
SSM = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_expand=2, mamba_chunk_size=16
)
STATES_ONLY = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=3,
    state_size=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CONFIGS = {
    "qwen3_next": lambda: tf.Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**SIZES, **DELTA),
    "olmo_hybrid": lambda: tf.OlmoHybridConfig(**SIZES, **DELTA | dict(linear_num_value_heads=2)),
    "falcon_h1": lambda: tf.FalconH1Config(**SIZES, **SSM, mamba_d_ssm=64, head_dim=8),
    "bamba": lambda: tf.BambaConfig(**SIZES, **SSM, attn_layer_indices=[1, 3]),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **SIZES,
        **SSM,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **SIZES | dict(num_hidden_layers=None),
        head_dim=8,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=1,
        ssm_state_size=8,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
    "lfm2": lambda: tf.Lfm2Config(
        **SIZES, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"] * 2
    ),
    "jamba": lambda: tf.JambaConfig(
        **SIZES,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "zamba2": lambda: tf.Zamba2Config(
        **SIZES,
        mamba_d_state=8,
        mamba_headdim=8,
        n_mamba_heads=8,
        mamba_ngroups=1,
        chunk_size=16,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        num_mem_blocks=1,
        adapter_rank=4,
        use_mamba_kernels=False,
    ),
    "mamba2": lambda: tf.Mamba2Config(**STATES_ONLY, num_heads=8, head_dim=8, n_groups=1, chunk_size=16),
    "mamba": lambda: tf.MambaConfig(**STATES_ONLY),
    "falcon_mamba": lambda: tf.FalconMambaConfig(**STATES_ONLY),
}


def random_model(name, seed=0, std=0.3):
    """A model of kind ``name`` whose answers vary."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for key, weight in model.named_parameters():
        if weight.ndim > 1 and weight.is_floating_point():
            torch.nn.init.normal_(weight.data, std=std)
    model.generation_config.eos_token_id = None
    return model
