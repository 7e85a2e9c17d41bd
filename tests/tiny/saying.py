"""A tiny Llama that says given words in turn, and its tokenizer."""

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# as LlamaTokenizer's: a blank begins each word, and a text loses its first one
LLAMA = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


def saying(order, specials=(), decoder=None, **config):
    """Model and tokenizer; each of ``order`` is followed by the next, prompts are words between
    blanks.
    """
    vocab = {m: i for i, m in enumerate(["<unk>", "<s>", "</s>", *specials])}
    for word in order:
        vocab.setdefault(word, len(vocab))
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Sequence(decoder) if decoder else decoders.ByteLevel()
    words = tf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        additional_special_tokens=list(specials),
        padding_side="left",
    )
    size, width = len(words), len(words) + len(words) % 2
    sizes = dict(vocab_size=size, hidden_size=width, intermediate_size=8, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=1, head_dim=8, max_position_embeddings=256)
    ends = dict(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes | ends | config)).eval()
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        table = torch.zeros(size, width)
        ids = [vocab[word] for word in order]
        for last, following in zip(ids, ids[1:] + ids[:1], strict=True):
            table[following, last] = 5.0
        model.lm_head.weight.copy_(table)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 2
    return model, words
