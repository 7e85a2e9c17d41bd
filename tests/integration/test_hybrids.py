"""Models with states (linear attention, state spaces, convolutions): greedy decoding equals
generate, states after a round are those of a plain run, samples have the model's distribution, and
what breaks any of that is noticed.

Shape letters: B batch, T tokens, V vocabulary.
"""

import functools

import pytest
import torch
import transformers as tf

from specmm import methods
from specmm.core.continuous_batching import Queue
from specmm.core.decode import EndTokens, decode, decode_plain
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.drafting import assemble
from specmm.hf.drafters.prompt_lookup import PromptLookupDrafter
from specmm.hf.drafters.small_model import SmallModel
from specmm.hf.models import states
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.recipes.dflash import build_block
from specmm.recipes.msd import build_msd
from specmm.verify import Recursive
from specmm.verify.rule import VerifyResult
from tests.cases import some
from tests.generating import as_generate
from tests.sampling import fits, last, sequence_distribution
from tests.tiny import parts

VOCABULARY = 40
SIZES = parts.TEXT | dict(vocab_size=VOCABULARY, num_hidden_layers=4, tie_word_embeddings=False)
DELTA = parts.LINEAR | dict(
    head_dim=8,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
EXPERTS |= dict(shared_expert_intermediate_size=16)
SSM = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
SSM |= dict(mamba_expand=2, mamba_chunk_size=64)
GRANITE = dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=16)
GRANITE |= dict(layer_types=["linear_attention", "full_attention"] * 2)
NEMOTRON = dict(num_hidden_layers=None, head_dim=8, mamba_num_heads=8, mamba_head_dim=8)
NEMOTRON |= dict(n_groups=1, ssm_state_size=8, chunk_size=64, n_routed_experts=4, n_group=1)
NEMOTRON |= dict(num_experts_per_tok=2, moe_intermediate_size=16, topk_group=1)
NEMOTRON |= dict(moe_shared_expert_intermediate_size=16)
JAMBA = dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8)
JAMBA |= dict(mamba_dt_rank=4, use_mamba_kernels=False)
ZAMBA = dict(mamba_d_state=8, mamba_headdim=8, n_mamba_heads=8, mamba_ngroups=1, chunk_size=64)
ZAMBA |= dict(layers_block_type=["linear_attention", "hybrid"] * 2, num_mem_blocks=1)
ZAMBA |= dict(adapter_rank=4, use_mamba_kernels=False)
STATES_ONLY = parts.IDS | dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, state_size=8
)
CONFIGS = {
    "qwen3_next": lambda: tf.Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**SIZES, **DELTA),
    "olmo_hybrid": lambda: tf.OlmoHybridConfig(**SIZES, **DELTA | dict(linear_num_value_heads=2)),
    "falcon_h1": lambda: tf.FalconH1Config(
        **SIZES, **SSM, mamba_d_ssm=64, head_dim=8, embedding_multiplier=2.5
    ),
    "bamba": lambda: tf.BambaConfig(**SIZES, **SSM, attn_layer_indices=[1, 3]),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(**SIZES, **SSM, **GRANITE),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **SIZES | NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    ),
    "lfm2": lambda: tf.Lfm2Config(
        **SIZES, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"] * 2
    ),
    "jamba": lambda: tf.JambaConfig(**SIZES, **JAMBA),
    "zamba2": lambda: tf.Zamba2Config(**SIZES, **ZAMBA),
    "mamba2": lambda: tf.Mamba2Config(
        **STATES_ONLY, num_heads=8, head_dim=8, n_groups=1, chunk_size=64
    ),
    "mamba": lambda: tf.MambaConfig(**STATES_ONLY),
    "falcon_mamba": lambda: tf.FalconMambaConfig(**STATES_ONLY),
}


def random_model(name, seed=0, std=0.3):
    """A model of kind ``name`` whose answers vary."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name]())
    return parts.ending(parts.shaken(model, std=std))


LENGTH = 24
STEPS = ("jamba", "mamba", "falcon_mamba", "zamba2", "nemotron_h")
WAYS = {"lfm2": "window"} | dict.fromkeys(STEPS, "steps")  # all others: chunk
RAGGED = [[5, 6, 7, 8, 5, 6, 7], [9, 3, 9, 3], [20, 31, 12, 5, 6, 20, 31, 4, 20, 31]]
ROWS = torch.tensor([[5, 6, 7, 8, 5, 6, 7], [9, 3, 9, 3, 9, 3, 9], [20, 31, 12, 5, 6, 20, 31]])
EACH = ("qwen3_5", "lfm2", "jamba")  # way of running a mixer
ALL = pytest.mark.parametrize("name", CONFIGS)
ONE_OF_EACH = pytest.mark.parametrize("name", EACH)


@functools.cache
def made(name):
    return random_model(name)


@pytest.fixture
def model(name):
    return made(name)


def generated(model, ids, length=LENGTH):
    found = model.generate(input_ids=ids, max_new_tokens=length, do_sample=False)
    return found[:, ids.shape[1] :]


@functools.cache
def alone(name):
    """What generate answers to each row of ``RAGGED`` by itself [B, T]."""
    return torch.cat([generated(made(name), torch.tensor([row])) for row in RAGGED])


class Knowing:
    """Drafts ``answers`` [B, T] that it was told, with a wrong token here and there."""

    def __init__(self, answers, length=5, seed=0):
        self.answers = answers
        self.max_depth = length
        self.max_nodes = length + 1
        self.random = torch.Generator().manual_seed(seed)

    def begin(self, feedback, clock):
        self.counts = torch.ones(len(self.answers), dtype=torch.int64)

    def propose(self, feedback, uniforms):
        if feedback.result is not None:
            self.counts += feedback.result.kept
        length = int(torch.randint(0, self.max_depth + 1, (), generator=self.random))
        where = self.counts[:, None] + torch.arange(length)
        drafts = self.answers.gather(1, where.clamp(max=self.answers.shape[1] - 1))
        wrong = torch.rand(drafts.shape, generator=self.random) < 0.25
        drafts = torch.where(wrong, (drafts + 1) % VOCABULARY, drafts)
        tokens = torch.cat([feedback.token[:, None], drafts], dim=1)
        return DraftTree(tokens, TreeShape.chain(length))


def knowing(target, ids, answers, length=LENGTH, seed=0):
    drafter = Knowing(answers, seed=seed)
    uniforms = Uniforms.from_seeds(range(len(ids)))
    prompt = VLMPrompt({"input_ids": ids}, length)
    return last(decode(target, drafter, Recursive(), prompt, length, uniforms))


@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, 3) for name in EACH] + [(name, 1) for name in ("lfm2", "mamba", "qwen3_5", "zamba2")],
)
def test_greedy_chains_equal_generate(model, name, rows):
    """Rows keep different numbers of drafts, over more tokens than a mixer is given at once."""
    length = 90
    ids = ROWS[:rows]
    wanted = generated(model, ids, length)
    target = VLMTarget(model, Processor(0))
    end = knowing(target, ids, wanted, length)
    assert torch.equal(end.tokens[:, :length], wanted)
    assert sum(end.stats.kept[2:]) > 5, "few rounds kept several tokens: the test says little"
    assert {mixer.way for mixer in target.recurrent.mixers} == {WAYS.get(name, "chunk")}


def text_model():
    torch.manual_seed(5)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval()


def drafted(target, parts, inputs, length=LENGTH):
    uniforms = Uniforms.from_seeds(range(len(inputs["input_ids"])))
    prompt = VLMPrompt(inputs, length)
    if parts is None:
        return last(decode_plain(target, prompt, length, uniforms)).tokens[:, :length]
    return last(decode(target, *parts, prompt, length, uniforms)).tokens[:, :length]


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "text-draft") for name in EACH), ("qwen3_5", "ar"), ("qwen3_5", "prompt-lookup")],
)
def test_methods_equal_generate_in_ragged_batches(model, name, method):
    """Padding is at the left, as generate's: each row's answer is that of the row alone."""
    target = VLMTarget(model, Processor(0))
    wanted = alone(name)
    assert len(wanted.unique()) > 8
    parts = None
    if method != "ar":
        drafter = SmallModel(text_model()) if method == "text-draft" else None
        parts = assemble(methods.make(methods.GENERATE, method), target, drafter)
    assert torch.equal(drafted(target, parts, padded(RAGGED)), wanted)


@pytest.mark.parametrize("name", some(CONFIGS, (*EACH, "mamba", "zamba2")))
def test_greedy_chains_equal_generate_in_ragged_batches(model, name):
    wanted = alone(name)
    target = VLMTarget(model, Processor(0))
    parts = (Knowing(wanted), Recursive())
    assert torch.equal(drafted(target, parts, padded(RAGGED)), wanted)


HEADS = {
    "msd": lambda target: build_msd(target, seed=1),
    "block": lambda target: build_block(target, 1, 5, VOCABULARY - 1, 2).float(),
}


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1", "nemotron_h"])
@pytest.mark.parametrize("method", HEADS)
def test_heads_that_read_hidden_states(model, name, method):
    """MSD's dynamic tree becomes a chain by itself."""
    target = VLMTarget(model, Processor(0))
    parts = assemble(methods.make(methods.GENERATE, method), target, HEADS[method](target))
    wanted = alone(name)
    assert torch.equal(drafted(target, parts, padded(RAGGED)), wanted)


@pytest.mark.parametrize(
    ("method", "drafter"),
    [
        (methods.MSD(total=9), HEADS["msd"]),
        (methods.MSD(sampled=True, tree=(2, 1)), HEADS["msd"]),
        (methods.TextDraft(tree=(2, 1, 1)), lambda _: SmallModel(text_model())),
        (methods.Block(tree=8), HEADS["block"]),
        (methods.Block(tree=(2, 1)), HEADS["block"]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_trees_are_refused(method, drafter):
    target = VLMTarget(made("qwen3_5"), Processor(1.0))
    with pytest.raises(ValueError, match=r"drafts for vlm must be chains, got a tree with up to"):
        assemble(method, target, drafter(target))


def test_drawn_trees_are_chains_where_none_was_given():
    target = VLMTarget(made("qwen3_5"), Processor(1.0))
    drafter, _ = assemble(methods.MSD(sampled=True), target, build_msd(target, seed=1))
    assert drafter.inner.growth.tree.width == 1


def test_a_tree_is_never_scored():
    target = VLMTarget(made("qwen3_5"), Processor(0))
    target.prefill(VLMPrompt({"input_ids": ROWS}, 4), 3)
    shape = TreeShape.from_parents([-1, 0, 0])
    with pytest.raises(ValueError, match="its layers have states"):
        target.score(DraftTree(torch.ones(3, 3, dtype=torch.int64), shape))


def test_a_drafter_with_states_is_refused():
    target = VLMTarget(made("qwen3_5"), Processor(0))
    with pytest.raises(ValueError, match="got a mamba2 model, whose layers have states"):
        assemble(methods.TextDraft(), target, SmallModel(made("mamba2")))


def test_guidance_is_refused():
    with pytest.raises(ValueError, match="cfg must be at most 1 for vlm: it has"):
        VLMTarget(made("qwen3_5"), Processor(0), guidance=Guidance(2.0))


@ONE_OF_EACH
def test_custom_generate(model, name):
    assert as_generate(model, ROWS, LENGTH)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "jamba", "falcon_h1"])
def test_rows_begin_anew(model, name):
    """Three prompts in two rows: the third takes over the row that ends first."""
    target = VLMTarget(model, Processor(0))
    rows = [torch.tensor([row]) for row in RAGGED]
    wanted = torch.cat([generated(model, row) for row in rows])
    ends = EndTokens([int(wanted[0, 7])])
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    queue = Queue(lambda i: VLMPrompt({"input_ids": rows[i]}, LENGTH), generators, 2)
    prompt = VLMPrompt(padded(RAGGED[:2]), LENGTH, longest=10)
    drafter = PromptLookupDrafter(target, 2, 4)
    uniforms = Uniforms(generators[:2])
    steps = decode(target, drafter, Recursive(), prompt, LENGTH, uniforms, stop=ends, queue=queue)
    last(steps)
    for found, row in zip(queue.tokens, wanted.tolist(), strict=True):
        end = int(wanted[0, 7])
        assert found.tolist() == row[: row.index(end) + 1 if end in row else LENGTH]


@ONE_OF_EACH
@torch.inference_mode()
def test_another_s_forward_is_left_alone(model, name):
    """Of the same model, while a chain of ours is scored."""
    target = VLMTarget(model, Processor(0))
    target.prefill(VLMPrompt({"input_ids": ROWS[:1]}, 40), 5)
    wanted = model(ROWS[1:2], use_cache=True)
    chain = DraftTree(ROWS[:1, :4], TreeShape.chain(3))
    target.score(chain)
    target.commit(VerifyResult(torch.arange(4)[None], torch.tensor([2]), ROWS[0, :1]))
    with target.recurrent.chain(4, target.past):
        found = model(ROWS[1:2], use_cache=True)
    assert torch.equal(found.logits, wanted.logits)


def held(target):
    """All states of a target, once what is put off is done."""
    target.recurrent.settle()
    slots = [slot for mixer in target.recurrent.mixers for slot in mixer.slots]
    return [target.recurrent.layers[slot.layer].state(slot) for slot in slots]


@ALL
@torch.inference_mode()
def test_states_after_a_round_are_those_of_a_plain_run(model, name):
    """Two rounds of which rows keep 2 and 4, then 1 and 3, of five tokens."""
    tokens = torch.arange(3, 3 + 20).view(2, 10)
    target = VLMTarget(model, Processor(0))
    target.prefill(VLMPrompt({"input_ids": ROWS[:2]}, 40), 5)
    counts = [0, 0]
    for kept in ([2, 4], [1, 3]):
        chain = torch.stack([tokens[row, n : n + 5] for row, n in enumerate(counts)])
        target.score(DraftTree(chain, TreeShape.chain(4)))
        target.commit(VerifyResult(torch.arange(5).repeat(2, 1), torch.tensor(kept), chain[:, 0]))
        counts = [a + b for a, b in zip(counts, kept, strict=True)]
    found = held(target)
    for row, count in enumerate(counts):
        plain = VLMTarget(model, Processor(0))
        plain.prefill(VLMPrompt({"input_ids": ROWS[row : row + 1]}, 40), 0)
        for token in tokens[row, :count]:
            plain.step(token[None])
        for state, wanted in zip(found, held(plain), strict=True):
            scale = float(wanted.abs().max())
            torch.testing.assert_close(state[row], wanted[0], atol=1e-4 * scale, rtol=1e-3)


def forgets_the_rest(monkeypatch):
    """What was kept is not given to the mixers again."""
    monkeypatch.setattr(states.States, "_joined", lambda self, mixer, call: call)
    monkeypatch.setattr(states.States, "_new_only", lambda self, mixer, output: None)
    monkeypatch.setattr(states.States, "settle", lambda self: None)


def keeps_one_too_many(monkeypatch):
    commit = states.States.commit
    monkeypatch.setattr(
        states.States,
        "commit",
        lambda self, kept: commit(self, (kept + 1).clamp(max=max(self.nodes, 1))),
    )


@ONE_OF_EACH
def test_states_of_a_token_too_many_are_noticed(model, name, monkeypatch):
    wanted = generated(model, ROWS[:1], 60)
    target = VLMTarget(model, Processor(0))  # passes its probe
    keeps_one_too_many(monkeypatch)
    end = knowing(target, ROWS[:1], wanted, 60)
    assert not torch.equal(end.tokens[:, :60], wanted)
    with pytest.raises(ValueError, match=r"differ from its own by"):
        VLMTarget(random_model(name), Processor(0))


def test_states_that_stay_behind_are_noticed(monkeypatch):
    model = random_model("qwen3_5")
    wanted = generated(model, ROWS[:1], 60)
    target = VLMTarget(model, Processor(0))
    forgets_the_rest(monkeypatch)
    assert not torch.equal(knowing(target, ROWS[:1], wanted, 60).tokens[:, :60], wanted)


T, RUNS = 3, 1000


def own_distribution(model, ids):
    """Of T tokens after ``ids``, by the model's own uncached forward."""

    def after(paths):
        rows = torch.cat([ids.expand(len(paths), -1), paths], dim=1)
        logits = torch.cat([model(part).logits[:, -1] for part in rows.split(400)])
        return logits.double().softmax(-1)

    return sequence_distribution(after, VOCABULARY, T)


def samples(model, ids, method):
    target = VLMTarget(model, Processor(1.0))
    drafter = SmallModel(text_model()) if method.name == "text-draft" else None
    drafter, rule = assemble(method, target, drafter)
    drafter = getattr(drafter, "inner", drafter)  # not deferred: drafts from the first round on
    prompt = VLMPrompt({"input_ids": ids.expand(RUNS, -1)}, T)
    end = last(decode(target, drafter, rule, prompt, T, Uniforms.from_seeds(range(RUNS))))
    return end.tokens[:, :T]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bamba", "lfm2", "jamba"])
def test_samples_follow_the_models_distribution(model, name, monkeypatch):
    """Of which drafts of a small model and repeated tokens are kept; broken states show."""
    probs = own_distribution(model, ROWS[:1])
    assert fits(probs, samples(model, ROWS[:1], methods.TextDraft((1, 1))))
    assert fits(probs, samples(model, ROWS[:1], methods.PromptLookup(2, 2)))
    keeps_one_too_many(monkeypatch)
    assert not fits(probs, samples(model, ROWS[:1], methods.TextDraft((1, 1))))
