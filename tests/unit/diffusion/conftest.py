"""Tiny block drafters, and the loop with each of them.

Shape letters: B batch, T tokens, V vocabulary.
"""

import functools

import torch
import transformers as tf

from specmm.core.decode import decode, decode_plain
from specmm.core.tree import TreeShape
from specmm.diffusion_drafters.block_drafters import ChainDrafter, DrawnTreeDrafter, TreeDrafter
from specmm.diffusion_drafters.cached_sources import CausalSource
from specmm.diffusion_drafters.diffusion_chains import DiffuSpecDrafter, StepsDrafter
from specmm.diffusion_drafters.models.ddit import DDiT, DDiTConfig, MaskedDDiT
from specmm.diffusion_drafters.models.deer import DEERModel
from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.diffusion_drafters.models.dflash_config import DFlashConfig, HeadSizes
from specmm.diffusion_drafters.models.diffusion_lms import FullAttention
from specmm.diffusion_drafters.sources import DFlashSource, DiffusionSource
from specmm.hf.drafters.drafting import chain_rule
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.recipes.diffusion import fit_proxy
from specmm.verify import Recursive, Traversal
from tests import sampling
from tests.sampling import Stream
from tests.tiny.parts import shaken

LENGTH, V, SMALL = 14, 30, 6
BUSH = TreeShape.from_parents([-1, 0, 0, 1, 1, 2, 3, 3, 3])
SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=128)


def fixed(model, seed, std=0.3):
    """Random weights that nothing trains."""
    return shaken(model.requires_grad_(False), seed, std)


def target_model(vocabulary, seed=0, room=128):
    """Three layers that say something, and a last one, which no block drafter may read, that adds
    nothing.
    """
    sizes = {**SIZES, "vocab_size": vocabulary, "max_position_embeddings": room}
    said = fixed(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)), seed).state_dict()
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**(sizes | {"num_hidden_layers": 4})))
    model.load_state_dict(said, strict=False)
    for weight in model.requires_grad_(False).model.layers[3].parameters():
        weight.zero_()
    return model.eval()


@functools.cache
def shared_target(vocabulary):
    """The same, which no test may change."""
    return target_model(vocabulary)


def dream(vocabulary, room=128, layers=3, shift=1):
    """The target's own weights read on both sides: it often agrees. One more token than the target:
    the mask.
    """
    sizes = SIZES | {"max_position_embeddings": room, "num_hidden_layers": layers}
    model = fixed(tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=vocabulary + 1, **sizes)), 0)
    return FullAttention(model, vocabulary, 2, shift)


def mdlm(vocabulary):
    torch.manual_seed(3)  # of its biases
    config = DDiTConfig(vocabulary + 1, 16, 8, 2, 2, 128, block=4)
    return MaskedDDiT(fixed(DDiT(config), 3), vocabulary, 2)


def dflash(vocabulary):
    sizes = tf.Qwen3Config(vocab_size=vocabulary, head_dim=8, attn_implementation="sdpa", **SIZES)
    return fixed(DFlash(DFlashConfig(sizes, 5, vocabulary - 1, (0, 2))), 4)


def paired(vocabulary, known=None, recurrent=0):
    """A DFlash drafter with a table of pairs, and perhaps a memory, that knows all tokens or
    ``known`` of them.
    """
    sizes = tf.Qwen3Config(vocab_size=vocabulary, head_dim=8, attn_implementation="sdpa", **SIZES)
    count = 0 if known is None else len(known)
    model = DFlash(DFlashConfig(sizes, 5, vocabulary - 1, (0, 2), count, 3, recurrent))
    if known is not None:
        model.set_ids(torch.tensor(known))
    fixed(model, 4, 0.3).markov.before.weight.mul_(12)  # pairs that say much
    if recurrent:
        model.recurrent.place.bias.zero_()
        model.recurrent.out.weight.mul_(4)
    return model


def bound(vocabulary, head, known=None, confidence="", anchor=True):
    """A DFlash drafter with a release's ``head``, that knows all tokens or ``known`` of them."""
    sizes = tf.Qwen3Config(vocab_size=vocabulary, head_dim=8, attn_implementation="sdpa", **SIZES)
    own = dict(anchor=anchor, head=head, confidence=confidence)
    count = 0 if known is None else len(known)
    block = 4 if anchor else 5
    model = DFlash(DFlashConfig(sizes, block, vocabulary - 1, (0, 3), count, **own))
    if known is not None:
        model.set_ids(torch.tensor(known))
    fixed(model, 4)
    if head.kind != "domino":  # tokens before that say much
        model.markov_head.markov_w1.weight.mul_(12)
    return model


SPARK = HeadSizes("vanilla", 3)
GATED = HeadSizes("gated", 3)
RNN = HeadSizes("rnn", 3)
DOMINO = HeadSizes("domino", 5, 6, 1)


def of_release(*given, **options):
    """A chain of :func:`bound`."""
    return lambda t: ChainDrafter(DFlashSource(bound(t.family.vocabulary, *given, **options), t), t)


def deer(vocabulary, end=None):
    """Two layers of its own, for blocks of four; one more token than the target: the mask."""
    config = tf.Qwen2Config(vocab_size=vocabulary + 1, **(SIZES | {"num_hidden_layers": 2}))
    return DEERModel(fixed(tf.Qwen2ForCausalLM(config), 6), vocabulary, 4, end)


def proxy(vocabulary):
    return fit_proxy(
        [torch.randint(vocabulary, (60,), generator=torch.Generator().manual_seed(1)).tolist()],
        vocabulary,
    )


def searching(target, **options):
    v = target.family.vocabulary
    return DiffuSpecDrafter(DiffusionSource(dream(v), target), proxy(v), least=2, **options)


def drafts(kind, source, make, *given, **options):
    """A drafter of that ``kind`` by what ``make`` makes for a vocabulary, with that ``source``."""
    return lambda t: kind(source(make(t.family.vocabulary), t), t, *given, **options)


def few(vocabulary):
    return paired(vocabulary, [4, 1, 2])


def reminded(vocabulary):
    return paired(vocabulary, None, 6)


DRAFTERS = {
    "chain of dream": drafts(ChainDrafter, DiffusionSource, dream, 4),
    "chain of mdlm": drafts(ChainDrafter, DiffusionSource, mdlm, 4),
    "chain of dflash": drafts(ChainDrafter, DFlashSource, dflash),
    "chain of pairs": drafts(ChainDrafter, DFlashSource, paired),
    "chain of few tokens": drafts(ChainDrafter, DFlashSource, few),
    "chain with a memory": drafts(ChainDrafter, DFlashSource, reminded),
    "recalling chain of pairs": drafts(ChainDrafter, DFlashSource, paired, recall=1),
    "chain of spark": of_release(SPARK, [4, 1, 2]),
    "chain of gated spark": of_release(GATED, anchor=False),
    "chain of recurrent spark": of_release(RNN, confidence="markov"),
    "chain of domino": of_release(DOMINO),
    "tree of recurrent spark": drafts(TreeDrafter, DFlashSource, lambda v: bound(v, RNN), 7),
    "drawn tree of domino": drafts(
        DrawnTreeDrafter, DFlashSource, lambda v: bound(v, DOMINO), BUSH
    ),
    "tree of pairs": drafts(TreeDrafter, DFlashSource, few, 7),
    "drawn tree of pairs": drafts(DrawnTreeDrafter, DFlashSource, few, BUSH),
    "recalling chain with a memory": drafts(ChainDrafter, DFlashSource, reminded, recall=1),
    "drawn tree with a memory": drafts(
        DrawnTreeDrafter, DFlashSource, lambda v: paired(v, [4, 1, 2], 6), BUSH
    ),
    "tree with a memory": drafts(TreeDrafter, DFlashSource, reminded, 7),
    "drawn tree of dream": drafts(DrawnTreeDrafter, DiffusionSource, dream, BUSH),
    "recalling chain": drafts(ChainDrafter, DFlashSource, dflash, recall=1),
    "chain of deer": drafts(ChainDrafter, CausalSource, deer),
    "tree of deer": drafts(TreeDrafter, CausalSource, deer, 7, 3),
    "tree of dream": drafts(TreeDrafter, DiffusionSource, dream, 9, 3),
    "tree of dflash": drafts(TreeDrafter, DFlashSource, dflash, 7),
    "steps of dream": drafts(StepsDrafter, DiffusionSource, dream, 5),
    "diffuspec": lambda t: searching(t, most=5, step=2),
}
# those that `make test` runs: each kind of source, chain and tree
FAST = [f"chain of {name}" for name in ("dream", "mdlm", "few tokens", "spark", "deer")]
FAST += ["recalling chain of pairs", "drawn tree of pairs", "tree with a memory"]
FAST += ["steps of dream", "diffuspec"]
ROWS = [[3, 4, 5, 6, 7, 3, 4, 5], [9], [8, 7, 6]]


def run(make, processor, uniforms, rows=ROWS, vocabulary=V, length=LENGTH):
    target = VLMTarget(shared_target(vocabulary), processor, "tiny")
    prompt = VLMPrompt(padded(rows, "cpu"), length)
    if make is None:
        *_, end = decode_plain(target, prompt, length, uniforms)
    else:
        drafter = make(target)
        drawn = isinstance(drafter, ChainDrafter | StepsDrafter)
        rule = chain_rule(target) if drawn else Recursive()
        if isinstance(drafter, DrawnTreeDrafter) and not processor.greedy:
            rule = Traversal()
        *_, end = decode(target, drafter, rule, prompt, length, uniforms)
    return end


def sequence_distribution(processor, row, length):
    def after(paths):
        ids = torch.cat([torch.tensor([row]).expand(len(paths), -1), paths], 1)
        return processor(shared_target(SMALL)(ids).logits[:, -1].double())

    return sampling.sequence_distribution(after, SMALL, length)


def samples(make, processor, rows):
    end = run(make, processor, Stream(rows), [[1, 3, 2]] * rows, SMALL, 3)
    return end.tokens[:, :3]
