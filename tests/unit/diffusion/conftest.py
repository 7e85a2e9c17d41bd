"""Tiny block drafters, and the loop with each of them.

Shape letters: B batch, T tokens, V vocabulary.
"""

import functools
import itertools

import torch
import transformers as tf

from specmm.decode import decode, decode_plain
from specmm.diffusion_drafters.block_drafters import ChainDrafter, DrawnTreeDrafter, TreeDrafter
from specmm.diffusion_drafters.cached_sources import CausalSource
from specmm.diffusion_drafters.diffusion_chains import DiffuSpecDrafter, StepsDrafter
from specmm.diffusion_drafters.models.ddit import DDiT, DDiTConfig, MaskedDDiT
from specmm.diffusion_drafters.models.deer import DEERModel
from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.diffusion_drafters.models.dflash_config import DFlashConfig, HeadSizes
from specmm.diffusion_drafters.models.diffusion_lms import FullAttention
from specmm.diffusion_drafters.sources import DFlashSource, DiffusionSource
from specmm.hf.drafting import chain_rule
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.recipes.training.ngram import fit
from specmm.tree import TreeShape
from specmm.verify import Recursive, Traversal
from tests.sampling import Stream

LENGTH, V, SMALL = 14, 30, 6
BUSH = TreeShape.from_parents([-1, 0, 0, 1, 1, 2, 3, 3, 3])
SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=128)


def shaken(model, seed, std=0.3):
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.requires_grad_(False)
        if weight.ndim > 1:
            weight.normal_(0, std, generator=generator)
    return model.eval()


def target_model(vocabulary, seed=0, room=128):
    """Three layers that say something, and a last one, which no block drafter may read, that adds
    nothing.
    """
    sizes = {**SIZES, "vocab_size": vocabulary, "max_position_embeddings": room}
    said = shaken(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)), seed).state_dict()
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
    model = shaken(tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=vocabulary + 1, **sizes)), 0)
    return FullAttention(model, vocabulary, 2, shift)


def mdlm(vocabulary):
    torch.manual_seed(3)  # of its biases
    config = DDiTConfig(vocabulary + 1, 16, 8, 2, 2, 128, block=4)
    return MaskedDDiT(shaken(DDiT(config), 3), vocabulary, 2)


def dflash(vocabulary):
    sizes = tf.Qwen3Config(vocab_size=vocabulary, head_dim=8, attn_implementation="sdpa", **SIZES)
    return shaken(DFlash(DFlashConfig(sizes, 5, vocabulary - 1, (0, 2))), 4)


def paired(vocabulary, known=None, recurrent=0):
    """A DFlash drafter with a table of pairs, and perhaps a memory, that knows all tokens or
    ``known`` of them.
    """
    sizes = tf.Qwen3Config(vocab_size=vocabulary, head_dim=8, attn_implementation="sdpa", **SIZES)
    model = DFlash(
        DFlashConfig(
            sizes, 5, vocabulary - 1, (0, 2), 0 if known is None else len(known), 3, recurrent
        )
    )
    if known is not None:
        model.set_ids(torch.tensor(known))
    shaken(model, 4, 0.3).markov.before.weight.mul_(12)  # pairs that say much
    if recurrent:
        model.recurrent.place.bias.zero_()
        model.recurrent.out.weight.mul_(4)
    return model


def bound(vocabulary, head, known=None, confidence="", anchor=True):
    """A DFlash drafter with a release's ``head``, that knows all tokens or ``known`` of them."""
    sizes = tf.Qwen3Config(vocab_size=vocabulary, head_dim=8, attn_implementation="sdpa", **SIZES)
    model = DFlash(
        DFlashConfig(
            sizes,
            4 if anchor else 5,
            vocabulary - 1,
            (0, 3),
            0 if known is None else len(known),
            anchor=anchor,
            head=head,
            confidence=confidence,
        )
    )
    if known is not None:
        model.set_ids(torch.tensor(known))
    shaken(model, 4)
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
    return DEERModel(shaken(tf.Qwen2ForCausalLM(config), 6), vocabulary, 4, end)


def proxy(vocabulary):
    return fit(
        [torch.randint(vocabulary, (60,), generator=torch.Generator().manual_seed(1)).tolist()],
        vocabulary,
    )


def searching(target, **options):
    v = target.family.vocabulary
    return DiffuSpecDrafter(DiffusionSource(dream(v), target), proxy(v), least=2, **options)


DRAFTERS = {
    "chain of dream": lambda t: ChainDrafter(DiffusionSource(dream(t.family.vocabulary), t), t, 4),
    "chain of mdlm": lambda t: ChainDrafter(DiffusionSource(mdlm(t.family.vocabulary), t), t, 4),
    "chain of dflash": lambda t: ChainDrafter(DFlashSource(dflash(t.family.vocabulary), t), t),
    "chain of pairs": lambda t: ChainDrafter(DFlashSource(paired(t.family.vocabulary), t), t),
    "chain of few tokens": lambda t: ChainDrafter(
        DFlashSource(paired(t.family.vocabulary, [4, 1, 2]), t), t
    ),
    "chain with a memory": lambda t: ChainDrafter(
        DFlashSource(paired(t.family.vocabulary, None, 6), t), t
    ),
    "recalling chain of pairs": lambda t: ChainDrafter(
        DFlashSource(paired(t.family.vocabulary), t), t, recall=1
    ),
    "chain of spark": of_release(SPARK, [4, 1, 2]),
    "chain of gated spark": of_release(GATED, anchor=False),
    "chain of recurrent spark": of_release(RNN, confidence="markov"),
    "chain of domino": of_release(DOMINO),
    "tree of recurrent spark": lambda t: TreeDrafter(
        DFlashSource(bound(t.family.vocabulary, RNN), t), t, 7
    ),
    "drawn tree of domino": lambda t: DrawnTreeDrafter(
        DFlashSource(bound(t.family.vocabulary, DOMINO), t), t, BUSH
    ),
    "tree of pairs": lambda t: TreeDrafter(
        DFlashSource(paired(t.family.vocabulary, [4, 1, 2]), t), t, 7
    ),
    "drawn tree of pairs": lambda t: DrawnTreeDrafter(
        DFlashSource(paired(t.family.vocabulary, [4, 1, 2]), t), t, BUSH
    ),
    "recalling chain with a memory": lambda t: ChainDrafter(
        DFlashSource(paired(t.family.vocabulary, None, 6), t), t, recall=1
    ),
    "drawn tree with a memory": lambda t: DrawnTreeDrafter(
        DFlashSource(paired(t.family.vocabulary, [4, 1, 2], 6), t), t, BUSH
    ),
    "tree with a memory": lambda t: TreeDrafter(
        DFlashSource(paired(t.family.vocabulary, None, 6), t), t, 7
    ),
    "drawn tree of dream": lambda t: DrawnTreeDrafter(
        DiffusionSource(dream(t.family.vocabulary), t), t, BUSH
    ),
    "recalling chain": lambda t: ChainDrafter(
        DFlashSource(dflash(t.family.vocabulary), t), t, recall=1
    ),
    "chain of deer": lambda t: ChainDrafter(CausalSource(deer(t.family.vocabulary), t), t),
    "tree of deer": lambda t: TreeDrafter(CausalSource(deer(t.family.vocabulary), t), t, 7, 3),
    "tree of dream": lambda t: TreeDrafter(DiffusionSource(dream(t.family.vocabulary), t), t, 9, 3),
    "tree of dflash": lambda t: TreeDrafter(DFlashSource(dflash(t.family.vocabulary), t), t, 7),
    "steps of dream": lambda t: StepsDrafter(DiffusionSource(dream(t.family.vocabulary), t), t, 5),
    "diffuspec": lambda t: searching(t, most=5, step=2),
}
FAST = (  # those that `make test` runs: each kind of source, chain and tree
    "chain of dream",
    "chain of mdlm",
    "chain of few tokens",
    "chain of spark",
    "chain of deer",
    "recalling chain of pairs",
    "drawn tree of pairs",
    "tree with a memory",
    "steps of dream",
    "diffuspec",
)
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
    model, probs = shared_target(SMALL), torch.ones(1, dtype=torch.float64)
    for depth in range(length):
        paths = torch.tensor(list(itertools.product(range(SMALL), repeat=depth)), dtype=torch.int64)
        ids = torch.cat(
            [torch.tensor([row]).expand(SMALL**depth, -1), paths.view(SMALL**depth, depth)], 1
        )
        logits = model(ids).logits[:, -1]
        probs = (probs[:, None] * processor(logits.double())).flatten()
    return probs


def samples(make, processor, rows):
    end = run(make, processor, Stream(rows), [[1, 3, 2]] * rows, SMALL, 3)
    return end.tokens[:, :3]
