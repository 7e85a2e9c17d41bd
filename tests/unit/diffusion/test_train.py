"""Training of block drafters: what is trained is what drafts, on tiny random models."""

import pytest
import torch
import transformers as tf

from specmm.core.decode import decode_plain
from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.diffusion_drafters.cached_sources import CausalSource
from specmm.diffusion_drafters.models.block_memory import BlockMemory
from specmm.diffusion_drafters.models.diffusion_lms import FullAttention
from specmm.diffusion_drafters.sources import DFlashSource
from specmm.hf.models.aux_states import AuxStates
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.recipes import deer, dflash
from specmm.recipes.diffusion import denoising_loss, hide, train_diffusion
from specmm.recipes.loop import Run
from specmm.recipes.source import Lessons, read_rows
from specmm.recipes.training.blocks import Anchors, fading, probs_loss
from specmm.recipes.training.drawn_rows import drawn_rows
from specmm.recipes.training.seen import SeenRows, learn
from specmm.recipes.training.texts import windows
from tests.tiny.parts import shaken

V, MASK, L, K = 23, 22, 20, 4


def model(layers=3, seed=0):
    config = tf.Qwen2Config(**GATED | dict(num_hidden_layers=layers))
    return shaken(tf.Qwen2ForCausalLM(config), seed, 0.3)


SIZES = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2)
SIZES |= dict(vocab_size=V, max_position_embeddings=64)
GATED = SIZES | dict(intermediate_size=24, num_key_value_heads=1)


def other(name, **config):
    """A target of another class than Qwen2."""
    torch.manual_seed(0)
    made = getattr(tf, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(
        getattr(tf, f"{name}Config")(**config, pad_token_id=0)
    )
    for weight in made.parameters():
        weight.detach().normal_(float(weight.ndim == 1), 0.3)
    return VLMTarget(made, Processor(), "tiny")


@pytest.fixture
def target():
    return VLMTarget(model(), Processor(), "tiny")


@pytest.fixture
def tokens():
    return torch.randint(0, V - 1, (2, L), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def first_round(target, source, tokens, place):
    """Logits of a source after the tokens up to ``place``, the last of them the root."""
    output = target.prefill(VLMPrompt({"input_ids": tokens[:, :place]}, 8), 8)
    feedback = Feedback(output, tokens[:, place])
    source.begin(feedback, K)
    return source.logits(feedback, K)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Granite", dict(logits_scaling=8.0)),
        ("Gemma2", dict(final_logit_softcapping=2.0, head_dim=8)),
    ],
)
def test_deer_drafts_what_it_is_trained_on_after_scaled_logits(name, config, tokens):
    test_deer_drafts_what_it_is_trained_on(other(name, **GATED, **config), tokens, 7)


@torch.no_grad()
@pytest.mark.parametrize("place", [1, 7, 13])
def test_deer_drafts_what_it_is_trained_on(target, tokens, place):
    drafter = deer.build_deer(target, 2, K, MASK, None)
    drafted = first_round(target, CausalSource(drafter, target), tokens, place)
    anchors = Anchors(torch.tensor([[3, place], [place, 5]]), K - 1)
    ids = torch.full((2, 2, K - 1), MASK)
    states = deer._forward(drafter, tokens, ids, anchors, torch.ones(2, 2, K - 1, dtype=torch.bool))
    chosen = states[:, L:].unflatten(1, (2, K - 1))[[0, 1], [1, 0]]
    trained = target.head(torch.cat([states[:, place : place + 1], chosen], dim=1))
    torch.testing.assert_close(drafted[..., :MASK], trained[..., :MASK], rtol=0, atol=1e-4)
    assert drafted[..., MASK].max() == float("-inf")


@pytest.mark.parametrize(
    ("name", "config", "what"),
    [
        ("Phi", GATED, "'phi' with no rms_norm_eps"),
        ("Cohere", GATED, "'cohere' with no rms_norm_eps"),
        ("Olmo3", GATED, "'olmo3' with no rope_theta"),
        ("GPT2", SIZES, "'gpt2' with no intermediate_size"),
    ],
)
def test_deer_refuses_targets_of_other_layers(name, config, what):
    with pytest.raises(ValueError, match=f"a Qwen2's or Llama's layers, got {what} for all"):
        deer.build_deer(other(name, **config), 1, K, MASK, None)


@pytest.mark.parametrize(
    ("name", "config"), [("GPT2", SIZES), ("Falcon", SIZES), ("Granite", GATED)]
)
def test_block_drafters_of_targets_that_name_their_parts_otherwise(name, config, tokens):
    target = other(name, **config)
    assert len(target.family.layers) == 3
    assert target.family.inner == config.get("intermediate_size", 64)
    test_a_block_drafter_drafts_what_it_is_trained_on(target, tokens, 7)


def test_layers_of_no_known_name_are_refused():
    opt = other("OPT", **SIZES, word_embed_proj_dim=16, ffn_dim=24)
    with pytest.raises(ValueError, match="calls its layers layers or h, got one of OPTModel"):
        dflash.build_block(opt, 1, K, MASK)


@torch.no_grad()
@pytest.mark.parametrize("place", [1, 7, 13])
def test_a_block_drafter_drafts_what_it_is_trained_on(target, tokens, place):
    drafter = dflash.build_block(target, 2, K + 1, MASK, read=2)
    aux = AuxStates([target.family.layers[i] for i in drafter.config.layers])
    drafted = first_round(target, DFlashSource(drafter, target), tokens, place)
    target.family.decoder(input_ids=tokens, use_cache=False)
    context = aux.context()
    anchors = Anchors(torch.tensor([[3, place], [place, 5]]), K + 1)
    ids = torch.full((2, 2, K + 1), MASK)
    ids[..., 0] = tokens.gather(1, anchors.places)
    states = dflash.blocks_after(drafter, context, target.embed(ids.flatten(1)), anchors)[
        [0, 1], [1, 0], 1:
    ]
    torch.testing.assert_close(
        drafted[..., :MASK], target.head(states)[..., :MASK], rtol=0, atol=1e-4
    )


@torch.no_grad()
@pytest.mark.parametrize("recurrent", [0, 5])
def test_pairs_memory_and_few_tokens_draft_what_they_are_trained_on(target, tokens, recurrent):
    place, known = 7, torch.bincount(tokens.flatten()).topk(6).indices
    drafter = dflash.build_block(
        target, 1, K + 1, MASK, read=2, markov=3, recurrent=recurrent, ids=known
    )
    for weight in (
        drafter.markov.after.weight,
        *([drafter.recurrent.out.weight] if recurrent else []),
    ):
        weight.normal_(generator=torch.Generator().manual_seed(2))
    assert torch.equal(drafter.ids, known.sort().values)
    source = DFlashSource(drafter, target)
    assert torch.equal(source.vocabulary.ids, drafter.ids)
    drafted = first_round(target, source, tokens, place)
    aux = AuxStates([target.family.layers[i] for i in drafter.config.layers])
    target.family.decoder(input_ids=tokens, use_cache=False)
    context = aux.context()
    anchors = Anchors(torch.full((2, 1), place), K + 1)
    ids = torch.full((2, 1, K + 1), MASK)
    ids[..., 0] = tokens.gather(1, anchors.places)
    states = dflash.blocks_after(drafter, context, target.embed(ids.flatten(1)), anchors)[:, :, 1:]
    if recurrent:
        states = dflash.along(
            drafter.recurrent, states, target.embed(tokens[:, None, place : place + K])
        )
    memory = None
    for depth in range(K):
        before = tokens[:, place + depth]
        wanted = target.family.logits_of(drafter.ids)(states[:, 0, depth]) + drafter.pairs(before)
        found, memory = source.next_logits(drafted[:, depth], before, memory)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_the_most_frequent_tokens_are_known():
    seen = torch.bincount(torch.tensor([3, 3, 1, 5, 5, 5]))
    lessons = Lessons([], "", read_rows, lambda: seen, None, ())
    assert lessons.vocabulary(2).tolist() == [5, 3] and len(lessons.vocabulary(4)) == 3


def test_absent_positions_change_nothing(target, tokens):
    drafter = deer.build_deer(target, 2, K, MASK, None)
    anchors, ids = Anchors(torch.tensor([[4], [9]]), K - 1), torch.full((2, 1, K - 1), MASK)
    present = torch.tensor([[[True, True, False]]] * 2)
    with torch.no_grad():
        some = deer._forward(drafter, tokens, ids, anchors, present)[:, L : L + 2]
        ids[..., 2] = 3
        torch.testing.assert_close(
            some, deer._forward(drafter, tokens, ids, anchors, present)[:, L : L + 2]
        )


def test_stages_hide_and_weigh():
    uniforms = torch.Generator().manual_seed(0)
    hidden, weights = deer._hide(3, 5, 6, uniforms, False, 1.5)
    assert bool(hidden.all())
    for row in weights.flatten(0, 1):
        reach = int((row > 0).sum())
        assert reach >= 1
        assert row[:reach].tolist() == pytest.approx([1.5 ** (reach - 1 - i) for i in range(reach)])
    hidden, weights = deer._hide(3, 5, 6, uniforms, True, 1.5)
    assert torch.equal(weights[..., :-1] > 0, hidden[..., 1:])
    assert bool((weights[..., -1] > 0).all())


def test_the_distribution_itself_is_the_least_loss():
    states = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    head = torch.nn.Linear(8, V)
    best = probs_loss(states, states, fading(4, 2.0), head, torch.zeros(V))
    worse = probs_loss(states, states, fading(4, 2.0), head, torch.arange(V) / V)
    assert best["loss"] < worse["loss"]
    wanted = probs_loss(states + 0.5 * states.sign(), states, fading(4, 2.0), head)["loss"]
    assert best["loss"] < wanted
    assert float(best["first"]) == pytest.approx(1) == float(best["last"])


@pytest.mark.parametrize("kind", ["deer", "block"])
def test_training_learns_and_resumes(target, kind, tmp_path):
    tokens = (torch.arange(L) % 5 + torch.arange(8)[:, None] % 3).repeat(2, 1)

    def train(steps, out):
        def draw(layers):
            return SeenRows(target, tokens, read_rows, layers, 4, 0, out, 1.0).batch

        run = Run(out, steps, 1e-2)
        if kind == "deer":
            made = deer.build_deer(target, 1, K, MASK, None)

            def loss(seen, i):
                return deer.deer_loss(made, target, seen, 3, i < 10, 1.02, i)

            learn(deer.Own(made.model), loss, draw(()), run)
            return made.model.model.norm.weight
        made = dflash.build_block(target, 1, K + 1, MASK, read=2)

        def block_loss(seen, i):
            return dflash.block_loss(made, target, target.head, seen, 3, 4.0, i)

        learn(made, block_loss, draw(made.config.layers), run)
        return made.norm.weight

    before = [p.clone() for p in target.model.parameters()]
    once = train(41, tmp_path / "a")
    train(20, tmp_path / "b")
    losses = [
        float(line.split(",")[1])
        for line in (tmp_path / "a" / "loss.csv").read_text().splitlines()[1:]
    ]
    assert losses[-1] < losses[0]
    assert torch.isfinite(train(41, tmp_path / "b")).all() and once.shape == (16,)
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))


def test_rows_drawn_by_the_target(target, tmp_path, tokens):
    prompts = tokens[:, :4]
    rows = drawn_rows(target, prompts, 10, (0.0,), tmp_path)
    prompt = VLMPrompt({"input_ids": prompts}, 6)
    greedy = VLMTarget(target.model, Processor(0))
    *_, end = decode_plain(greedy, prompt, 6, Uniforms.from_seeds([0, 1]))
    assert torch.equal(rows.long(), torch.cat([prompts, end.tokens[:, :6]], dim=1))
    assert torch.equal(rows, drawn_rows(target, prompts, 10, (0.0,), tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_hidden_from_a_diffusion_model():
    hidden, weights = hide(64, 32, 0)
    assert not bool(hidden[:, 0].any()) and torch.equal(weights > 0, hidden)
    ends = hidden[::2]
    assert bool((ends.long().diff(dim=1) >= 0).all()) and int(ends.sum(1).max()) <= 16
    assert int(ends.sum(1).min()) >= 1


def test_a_diffusion_model_learns(tmp_path):
    stream = (torch.arange(400) % 7).int()
    lm = FullAttention(model(1), MASK, None, shift=1)
    rows = windows(stream, 0, 8, 40, 0)
    before = denoising_loss(lm, rows, 0)
    with torch.compiler.set_stance("force_eager"):
        train_diffusion(lm, stream, Run(tmp_path, 12, 1e-2), batch=4)
    assert denoising_loss(lm, rows, 0) < before


def test_windows_and_rows_too_short():
    with pytest.raises(ValueError, match="at least 9 tokens, got 4"):
        windows(torch.arange(4), 0, 2, 9, 0)
    with pytest.raises(ValueError, match="longer than a block of 8, got 8"):
        Anchors.draw(torch.ones(2, 8, dtype=torch.bool), 3, 8, 8, 0)


def test_a_memorys_table_follows_its_weights():
    memory, embeddings = BlockMemory(6, 4), torch.randn(9, 6)
    kept = memory.table(embeddings)
    torch.testing.assert_close(kept, memory.read(embeddings))
    assert memory.table(embeddings) is kept
    with torch.no_grad():
        for weight in (embeddings, memory.token.weight):
            weight.mul_(torch.linspace(1, 2, weight.shape[1]))
            torch.testing.assert_close(memory.table(embeddings), memory.read(embeddings))
