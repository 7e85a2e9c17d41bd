"""Block drafters in the loop: token equal when greedy, the target's law when sampling, a broken twin caught.

Shape letters: B batch, T tokens, V vocabulary.
"""

import itertools

import pytest
import torch
import transformers as tf
from scipy.stats import chi2

from specmm.decode import decode, decode_plain
from specmm.diffusion_drafters.assemble import chain_rule
from specmm.diffusion_drafters.diffuspec.ngram import fit
from specmm.diffusion_drafters.drafters.block import ChainDrafter, TreeDrafter
from specmm.diffusion_drafters.drafters.cached import CausalSource
from specmm.diffusion_drafters.drafters.diffuspec import DiffuSpecDrafter
from specmm.diffusion_drafters.drafters.sources import DFlashSource, DiffusionSource
from specmm.diffusion_drafters.drafters.specdiff import StepsDrafter
from specmm.diffusion_drafters.laws import followed_marginals, with_root
from specmm.diffusion_drafters.models.bidirectional import FullAttention
from specmm.diffusion_drafters.models.causal import CausalPrefix
from specmm.diffusion_drafters.models.ddit import DDiT, DDiTConfig, MaskedDDiT
from specmm.diffusion_drafters.models.dflash import DFlash, DFlashConfig, load_dflash, save_dflash
from specmm.diffusion_drafters.models.masked import block_logits
from specmm.drafter import Feedback
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.tree import DraftTree
from specmm.verify import Recursive
from specmm.vlm.drafters.model import padded
from specmm.vlm.prompt import VLMPrompt
from specmm.vlm.target import VLMTarget
from specmm.vlm.translation import Translation

LENGTH, V, SMALL = 14, 30, 6
SURE = 0.55  # in the middle of what AdaEDL expects of the tiny drafter
SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=128)


def shaken(model, seed, std=0.3):
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.requires_grad_(False)
        if weight.ndim > 1:
            weight.normal_(0, std, generator=generator)
    return model.eval()


def target_model(vocabulary, seed=0):
    return shaken(tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=vocabulary, **SIZES)), seed)


def dream(vocabulary, room=128):
    """The target's own weights read on both sides: it often agrees. One more token than the target: the mask."""
    config = tf.LlamaConfig(vocab_size=vocabulary + 1, **(SIZES | {"max_position_embeddings": room}))
    return FullAttention(shaken(tf.LlamaForCausalLM(config), 0), vocabulary, 2, shift=1)


def mdlm(vocabulary):
    torch.manual_seed(3)  # of its biases
    config = DDiTConfig(vocabulary + 1, 16, 8, 2, 2, 128, block=4)
    return MaskedDDiT(shaken(DDiT(config), 3), vocabulary, 2)


def dflash(vocabulary):
    sizes = tf.Qwen3Config(vocab_size=vocabulary, head_dim=8, attn_implementation="sdpa", **SIZES)
    return shaken(DFlash(DFlashConfig(sizes, 5, vocabulary - 1, (0, 2))), 4)


def paired(vocabulary, known=None):
    """A DFlash drafter with a table of pairs, that knows all tokens or ``known`` of them."""
    sizes = tf.Qwen3Config(vocab_size=vocabulary, head_dim=8, attn_implementation="sdpa", **SIZES)
    model = DFlash(DFlashConfig(sizes, 5, vocabulary - 1, (0, 2), 0 if known is None else len(known), 3))
    if known is not None:
        model.know(torch.tensor(known))
    shaken(model, 4, 0.3).markov.before.weight.mul_(12)  # pairs that say much
    return model


def deer(vocabulary, end=None):
    """Two layers of its own, for blocks of four; one more token than the target: the mask."""
    config = tf.Qwen2Config(vocab_size=vocabulary + 1, **(SIZES | {"num_hidden_layers": 2}))
    return CausalPrefix(shaken(tf.Qwen2ForCausalLM(config), 6), vocabulary, 4, end)


def proxy(vocabulary):
    return fit([torch.randint(vocabulary, (60,), generator=torch.Generator().manual_seed(1)).tolist()], vocabulary)


def searching(target, **options):
    v = target.family.vocabulary
    return DiffuSpecDrafter(DiffusionSource(dream(v), target), proxy(v), least=2, **options)


DRAFTERS = {
    "chain of dream": lambda t: ChainDrafter(DiffusionSource(dream(t.family.vocabulary), t), t, 4),
    "chain of mdlm": lambda t: ChainDrafter(DiffusionSource(mdlm(t.family.vocabulary), t), t, 4),
    "chain of dflash": lambda t: ChainDrafter(DFlashSource(dflash(t.family.vocabulary), t), t),
    "chain of pairs": lambda t: ChainDrafter(DFlashSource(paired(t.family.vocabulary), t), t),
    "chain of few tokens": lambda t: ChainDrafter(DFlashSource(paired(t.family.vocabulary, [4, 1, 2]), t), t),
    "recalling chain of pairs": lambda t: ChainDrafter(DFlashSource(paired(t.family.vocabulary), t), t, recall=1),
    "sure chain of pairs": lambda t: ChainDrafter(DFlashSource(paired(t.family.vocabulary), t), t, sure=SURE),
    "tree of pairs": lambda t: TreeDrafter(DFlashSource(paired(t.family.vocabulary, [4, 1, 2]), t), t, 7),
    "recalling chain": lambda t: ChainDrafter(DFlashSource(dflash(t.family.vocabulary), t), t, recall=1),
    "chain of deer": lambda t: ChainDrafter(CausalSource(deer(t.family.vocabulary), t), t),
    "tree of deer": lambda t: TreeDrafter(CausalSource(deer(t.family.vocabulary), t), t, 7, 3),
    "sure chain": lambda t: ChainDrafter(DFlashSource(dflash(t.family.vocabulary), t), t, sure=SURE),
    "tree of dream": lambda t: TreeDrafter(DiffusionSource(dream(t.family.vocabulary), t), t, 9, 3),
    "tree of dflash": lambda t: TreeDrafter(DFlashSource(dflash(t.family.vocabulary), t), t, 7),
    "steps of dream": lambda t: StepsDrafter(DiffusionSource(dream(t.family.vocabulary), t), t, 5, 3),
    "diffuspec": lambda t: searching(t, most=5, step=2),
    "diffuspec, sampled": lambda t: searching(t, most=4, sampled=True),
    "diffuspec, likeliest tokens": lambda t: DiffuSpecDrafter(
        DiffusionSource(dream(t.family.vocabulary, room=12), t), None, least=3, most=3
    ),
}
ROWS = [[3, 4, 5, 6, 7, 3, 4, 5], [9], [8, 7, 6]]


def run(make, processor, uniforms, rows=ROWS, vocabulary=V, length=LENGTH):
    target = VLMTarget(target_model(vocabulary), processor, "tiny")
    prompt = VLMPrompt(padded(rows, "cpu"), length)
    if make is None:
        *_, end = decode_plain(target, prompt, length, uniforms)
    else:
        drafter = make(target)
        drawn = isinstance(drafter, ChainDrafter | StepsDrafter) or getattr(drafter, "sampled", False)
        rule = chain_rule(target) if drawn else Recursive()
        *_, end = decode(target, drafter, rule, prompt, length, uniforms)
    return end


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_greedy_decoding_is_plain_decoding(make):
    plain = run(None, Processor(0), Uniforms.from_seeds([0, 1, 2]))
    end = run(make, Processor(0), Uniforms.from_seeds([0, 1, 2]))
    assert torch.equal(end.tokens[:, :LENGTH], plain.tokens)


def test_some_drafts_are_kept():
    for name in ("chain of dream", "tree of dream", "diffuspec"):
        assert run(DRAFTERS[name], Processor(0), Uniforms.from_seeds([0, 1, 2])).stats.tau > 1, name


@pytest.mark.parametrize(
    "name",
    [
        "chain of mdlm",
        "chain of dflash",
        "chain of pairs",
        "chain of few tokens",
        "tree of pairs",
        "chain of deer",
        "tree of deer",
        "steps of dream",
        "diffuspec",
    ],
)
def test_a_row_does_not_depend_on_its_batch(name):
    processor, make = Processor(1.0, top_k=8), DRAFTERS[name]
    together = run(make, processor, Uniforms.from_seeds([0, 1, 2]))
    for i, row in enumerate(ROWS):
        alone = run(make, processor, Uniforms.from_seeds([i]), [row])
        assert torch.equal(alone.tokens[0, :LENGTH], together.tokens[i, :LENGTH])


class Stream(Uniforms):
    """One generator for thousands of rows."""

    def __init__(self, rows):
        self.rows, self.generator = rows, torch.Generator().manual_seed(0)

    @property
    def device(self):
        return self.generator.device

    def draw(self, count):
        return torch.rand(self.rows, count, generator=self.generator)


def law_of_sequences(processor, row, length):
    model, law = target_model(SMALL), torch.ones(1, dtype=torch.float64)
    for depth in range(length):
        paths = torch.tensor(list(itertools.product(range(SMALL), repeat=depth)), dtype=torch.int64)
        ids = torch.cat([torch.tensor([row]).expand(SMALL**depth, -1), paths.view(SMALL**depth, depth)], 1)
        logits = model(ids).logits[:, -1]
        law = (law[:, None] * processor(logits.double())).flatten()
    return law


def fits(law, tokens):
    """Whether ``tokens`` [n, T] pass a chi-square test at one in a thousand; rare cells are joined."""
    length = tokens.shape[1]
    index = sum(tokens[:, t] * SMALL ** (length - 1 - t) for t in range(length))
    seen = torch.bincount(index, minlength=len(law)).double()
    wanted, order = (law * len(tokens)).sort(descending=True)
    common = int((wanted >= 5).sum())
    cells = [torch.cat([x[:common], x[common:].sum()[None]]) for x in (wanted, seen[order])]
    keep = cells[0] > 1e-9
    statistic = ((cells[1] - cells[0]) ** 2 / cells[0])[keep].sum()
    return bool(statistic < chi2.ppf(0.999, int(keep.sum()) - 1))


def samples(make, processor, rows):
    end = run(make, processor, Stream(rows), [[1, 3, 2]] * rows, SMALL, 3)
    return end.tokens[:, :3]


@pytest.mark.parametrize("name", DRAFTERS)
def test_samples_follow_the_targets_law(name):
    processor = Processor(1.3)
    tokens = samples(DRAFTERS[name], processor, 600 if "diffuspec" in name else 3000)
    assert fits(law_of_sequences(processor, [1, 3, 2], 3), tokens)


class LikeliestWithMarginals:
    """A broken twin: the likeliest tokens, recorded as if they had been drawn."""

    def __init__(self, whole):
        self.whole, self.max_nodes, self.max_depth = whole, whole.max_nodes, whole.max_depth
        self.begin = whole.begin

    def propose(self, feedback, uniforms):
        tree = self.whole.propose(feedback, uniforms)
        return DraftTree(
            tree.laws.argmax(-1).index_copy(1, torch.tensor([0]), tree.tokens[:, :1]), tree.shape, tree.laws
        )


def test_a_chosen_path_with_marginals_is_caught():
    tokens = samples(lambda t: LikeliestWithMarginals(DRAFTERS["chain of dream"](t)), Processor(1.3), 3000)
    assert not fits(law_of_sequences(Processor(1.3), [1, 3, 2], 3), tokens)


class ForgetsPairs(LikeliestWithMarginals):
    """A broken twin: tokens drawn behind one another, recorded with what the block says of them by themselves."""

    def propose(self, feedback, uniforms):
        tree = self.whole.propose(feedback, uniforms)
        target, tokens = self.whole.target, feedback.token
        source = self.whole.source
        laws = followed_marginals(tokens, self.logits, self.whole.law, source.follow, source.known)
        assert target.processor == self.whole.law
        return DraftTree(tree.tokens, tree.shape, with_root(laws))

    def __init__(self, whole):
        super().__init__(whole)
        logits = whole.source.logits

        def kept(*given):
            self.logits = logits(*given)
            return self.logits

        whole.source.logits = kept


def test_pairs_recorded_as_marginals_are_caught():
    law, many = law_of_sequences(Processor(1.3), [1, 3, 2], 3), 20_000  # few rows keep two drafts
    assert fits(law, samples(DRAFTERS["chain of pairs"], Processor(1.3), many))
    assert not fits(law, samples(lambda t: ForgetsPairs(DRAFTERS["chain of pairs"](t)), Processor(1.3), many))


def test_a_sure_chain_is_cut_before_it_is_drawn():
    lengths = []

    class Watch(LikeliestWithMarginals):
        def propose(self, feedback, uniforms):
            tree = self.whole.propose(feedback, uniforms)
            lengths.append(tree.shape.depth)
            return tree

    def sample(seed):
        uniforms = Uniforms.from_seeds([seed])
        return run(lambda t: Watch(DRAFTERS["sure chain"](t)), Processor(1.3), uniforms, [[1, 3, 2]], SMALL, 3)

    tokens = torch.cat([sample(seed).tokens[:, :2] for seed in range(100)])
    assert min(lengths) < max(lengths) <= 4
    assert fits(law_of_sequences(Processor(1.3), [1, 3, 2], 2), tokens)


def test_what_stood_before_is_recalled():
    seen = []

    def make(target):
        drafter = DRAFTERS["recalling chain"](target)
        propose = drafter.propose
        drafter.propose = lambda *given: seen.append(propose(*given)) or seen[-1]
        return drafter

    run(make, Processor(1.0), Uniforms.from_seeds([0]), [[1, 3, 1, 3, 1, 3]], V, 6)
    for tree in seen:
        log = [1, 3, 1, 3, 1, 3]
        assert tree.laws.shape[1] == 5 and tree.laws[0, 1:].sum(-1).allclose(torch.ones(4)), log
    known = [tree for tree in seen if int(tree.tokens[0, 0]) in (1, 3)]
    assert all((tree.laws[0, 1:].max(-1).values == 1).all() for tree in known)


def test_the_controller_hears_of_every_round():
    seen = []

    def make(target):
        seen.append(DRAFTERS["diffuspec"](target))
        return seen[0]

    end = run(make, Processor(0), Uniforms.from_seeds([0]), ROWS[:1])
    trace = seen[0].rows[0].trace
    assert len(trace) == end.stats.rounds - 1  # the last round needs no further draft
    assert all(0 <= accepted <= generated <= 5 for generated, accepted in trace)
    assert 2 <= seen[0].rows[0].control.length <= 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: ChainDrafter(DFlashSource(dflash(V), t), t, 5), "drafter's 4, got 5"),
        (lambda t: ChainDrafter(DFlashSource(dflash(V), t), t, recall=-1), "recall must be at least 0 tokens, got -1"),
        (lambda t: ChainDrafter(DiffusionSource(dream(V), t), t), "got None"),
        (lambda t: ChainDrafter(DFlashSource(dflash(V), t), t, sure=2), "sure"),
        (lambda t: TreeDrafter(DFlashSource(dflash(V), t), t, 1), "at least 2 nodes"),
        (lambda t: StepsDrafter(DiffusionSource(dream(V), t), t, 3, 4), "got 4 for 3"),
        (lambda t: DiffuSpecDrafter(DiffusionSource(dream(V), t), None, least=0), "least"),
        (lambda t: DiffusionSource(dream(V + 600), t), "share the target's vocabulary"),
        (lambda t: DFlashSource(dflash(V + 9), t), "mask among its 30"),
        (lambda t: DFlashSource(paired(V - 1), t), "must be of the target's 30 tokens, got one of 29"),
        (lambda t: paired(V, [1, 1, 2]), "d2t must name 3 different tokens"),
        (lambda t: paired(V, [1, V]), r"tokens in \[0, 30\)"),
        (lambda t: DFlashConfig(dflash(V).config.sizes, 5, 1, (0,), V + 1), "draft_vocab_size must be 0 to"),
        (lambda t: DFlashConfig(dflash(V).config.sizes, 5, 1, (0,), 0, -1), "markov_rank must be at least 0"),
        (lambda t: run(DRAFTERS["chain of dream"], Processor(), None, [[1]], V, 200), "128 positions"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make(VLMTarget(target_model(V), Processor(), "tiny"))


def test_one_step_is_a_chain():
    chain = run(DRAFTERS["chain of dream"], Processor(1.0), Uniforms.from_seeds([0, 1, 2]))
    steps = run(
        lambda t: StepsDrafter(DiffusionSource(dream(V), t), t, 4, 1), Processor(1.0), Uniforms.from_seeds([0, 1, 2])
    )
    assert torch.equal(chain.tokens, steps.tokens)


def test_later_steps_read_earlier_drafts():
    target = VLMTarget(target_model(V), Processor(0), "tiny")
    source, prompt = DiffusionSource(dream(V), target), VLMPrompt(padded(ROWS, "cpu"), LENGTH)
    target.prefill(prompt, 8)
    feedback = Feedback(None, torch.tensor([1, 2, 3]))
    source.begin(feedback, 4)
    drafted = torch.tensor([[5, 6], [7, 8], [9, 4]])
    together = source.behind(drafted, 3)
    for row, tokens in enumerate(ROWS):
        whole = torch.tensor([[*tokens, row + 1, *drafted[row].tolist()]])
        torch.testing.assert_close(together[row], block_logits(source.model, whole, 3)[0, :, :V], rtol=0, atol=1e-4)


def test_a_drafter_of_other_tokens_drafts_shared_ones_only():
    model, order = dream(V), torch.randperm(V, generator=torch.Generator().manual_seed(2))
    shared = torch.arange(V) % 3 > 0
    target = VLMTarget(target_model(V), Processor(), "tiny")
    ids = order.where(shared, model.mask)  # what it does not know must not look like a mask to it either
    source = DiffusionSource(model, target, Translation(ids, shared))
    target.prefill(VLMPrompt(padded(ROWS[:1], "cpu"), LENGTH), 8)
    source.begin(feedback := Feedback(None, torch.tensor([4])), 4)
    logits, read = source.logits(feedback, 4), [int(order[t]) if t % 3 else 0 for t in [*ROWS[0], 4]]
    assert torch.equal(torch.isfinite(logits), shared.expand_as(logits))
    wanted = block_logits(model, torch.tensor([read]), 4)
    assert torch.equal(logits[..., shared], wanted[..., order[shared]])


def test_the_end_of_a_text_is_the_targets_own():
    target = VLMTarget(target_model(V), Processor(), "tiny")
    assert DiffusionSource(dream(V), target).end == 2
    shifted = Translation((torch.arange(V) + 1) % V, torch.ones(V, dtype=torch.bool))
    assert DiffusionSource(dream(V), target, shifted).end == 1
    unknown = Translation(torch.arange(V), torch.arange(V) != 2)
    assert DiffusionSource(dream(V), target, unknown).end is None


def test_a_chain_of_pairs_may_be_sure_of_nothing():
    def unsure(target):
        return ChainDrafter(DFlashSource(paired(V), target), target, sure=0.9)

    end = run(unsure, Processor(1.3), Uniforms.from_seeds([0]), [ROWS[0]])
    assert 0 in end.stats.depths and end.tokens.shape[1] >= LENGTH


@torch.inference_mode()
@pytest.mark.parametrize("known", [None, [4, V - 1, 2]])
def test_a_mask_is_never_drafted(known):
    target = VLMTarget(target_model(V), Processor(), "tiny")
    source = DFlashSource(paired(V, known), target)  # its mask is V - 1
    output = target.prefill(VLMPrompt(padded(ROWS[:1], "cpu"), 8), 5)
    feedback = Feedback(output, torch.tensor([4]))
    source.begin(feedback, 4)
    logits = source.follow(source.logits(feedback, 4), torch.tensor([[4, 2, 4, 2]]))
    mask = V - 1 if known is None else 1
    assert bool((logits[..., mask] == float("-inf")).all())
    assert int(logits.isinf().sum()) == 4


def test_hooks_go_with_their_drafter():
    target = VLMTarget(target_model(V), Processor(), "tiny")
    source = DFlashSource(dflash(V), target)
    layer = target.family.decoder.layers[0]
    assert len(layer._forward_hooks) == 2  # of its rows, and of one that begins anew
    del source
    assert not layer._forward_hooks


def test_a_drafter_of_few_tokens_is_read_back(tmp_path):
    drafter = paired(V, [7, 1, 22])
    save_dflash(drafter, tmp_path, torch.randn(V, 32), torch.float32)
    found = load_dflash(tmp_path)
    assert found.ids.tolist() == [7, 1, 22] and found.config == drafter.config
    assert torch.equal(found.t2d, drafter.t2d) and found.t2d[22] == 2 and found.t2d[0] == 3
    previous = torch.tensor([7, 0])
    assert torch.equal(found.pairs(previous), drafter.pairs(previous))
