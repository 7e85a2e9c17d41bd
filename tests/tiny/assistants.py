"""Tiny random Gemma 4 targets and assistants for them, of whose drafts some are kept."""

import torch
import transformers as tf

from tests.tiny.parts import TEXT, ending, spread

SHARING = dict(  # as Gemma 4 E2B
    num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=37
)
ALONE = dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
KINDS = ["sliding_attention", "full_attention"]
SIZES = TEXT | dict(vocab_size=37, num_hidden_layers=4, layer_types=KINDS * 2)
SIZES |= dict(head_dim=8, global_head_dim=16, sliding_window=6)


def buildable():
    """Whether this transformers can build an assistant, all of whose layers share keys."""
    config = tf.Gemma4TextConfig(num_hidden_layers=2, num_kv_shared_layers=2, layer_types=KINDS)
    try:
        return len(config.kv_sharing_modes) == 2
    except ValueError:  # 5.23
        return False


def target(seed=0, **changes):
    """A language model; by default no layers share keys and values with others."""
    torch.manual_seed(seed)
    text = SIZES | ALONE | dict(num_kv_shared_layers=0, tie_word_embeddings=False) | changes
    model = tf.Gemma4ForCausalLM(tf.Gemma4TextConfig(**text)).eval()
    spread(model, 3.0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(15)
    return ending(model)


def assistant_of(model, seed=1, sizes=SIZES, **changes):
    """An assistant that passes on the embedding of the latest token, as its target mostly does."""
    torch.manual_seed(seed)
    given = sizes | ALONE | dict(num_kv_shared_layers=2, num_hidden_layers=2, layer_types=KINDS)
    width = model.config.get_text_config().hidden_size
    options = dict(backbone_hidden_size=width) | changes
    config = tf.Gemma4AssistantConfig(text_config=tf.Gemma4TextConfig(**given), **options)
    made = tf.Gemma4AssistantForCausalLM(config).eval()
    spread(made, 3.0)
    with torch.no_grad():
        if options["backbone_hidden_size"] == width:
            passing = torch.cat([torch.eye(width), 0.1 * torch.randn(width, width)], 1)
            made.pre_projection.weight.copy_(passing)
            made.post_projection.weight.copy_(torch.eye(width))
        head = model.get_output_embeddings().weight
        made.lm_head.weight[: len(head)] = head[: made.vocab_size]
        if made.masked_embedding is not None:
            order = torch.randperm(made.vocab_size)
            made.masked_embedding.token_ordering.copy_(order)
            members = made.lm_head.weight[order].unflatten(0, (made.config.num_centroids, -1))
            made.masked_embedding.centroids.weight.copy_(members.mean(1))
    return made
