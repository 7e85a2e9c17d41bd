"""Our transformer and tokenizer against numbers that the official LlamaGen and LANTERN releases
produced.

The ``.json`` beside each file in tests/parity says which call made which tensor. Decoding is
teacher-forced here: the recorded tokens go in at once, and the logits of every step must come out.
"""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F

from specmm.core.decode import decode_plain
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.image_ar.autoencoder import VQConfig, VQModel
from specmm.image_ar.tokens.captions import left_pad
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer, rotary_table
from specmm.image_ar.tokens.loading import from_lantern, infer_gpt_config, to_lantern
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.loading.checkpoints import load_strict
from tests.tiny.recorded import Case


def loaded(module, state, ignore=()):
    load_strict(module, state, ignore)
    return module.eval()


def gpt_config(facts):
    names = ("class_dropout_prob", "all_dropouts", "uncond_token_num")
    return GPTConfig(**{k: v for k, v in facts["config"].items() if k not in names})


@pytest.fixture(scope="module")
def c2i():
    return Case("llamagen_c2i_tiny")


@pytest.fixture(scope="module")
def t2i():
    return Case("llamagen_t2i_tiny")


@pytest.fixture(scope="module")
def vq():
    return Case("llamagen_vq_tiny")


@pytest.fixture(scope="module")
def lantern():
    return Case("lantern_e2e_tiny")


@pytest.fixture(scope="module")
def c2i_model(c2i):
    return loaded(Transformer(gpt_config(c2i.facts)), c2i.state("sd."))


@pytest.fixture(scope="module")
def t2i_model(t2i):
    return loaded(Transformer(gpt_config(t2i.facts)), t2i.state("sd."))


@pytest.fixture(scope="module")
def vq_model(vq):
    names = {field.name for field in fields(VQConfig)} & vq.facts["config"].keys()
    sizes = {name: vq.facts["config"][name] for name in names}
    sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()}
    return loaded(VQModel(VQConfig(**sizes)), vq.state("sd."), ("codebook_used",))


def close(got, wanted):
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


# --- class-conditional ---


def test_rotary_table(c2i):
    torch.testing.assert_close(rotary_table(4, 16, 1), c2i.t["out.freqs_cis"], atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_c2i_train_logits_and_loss(c2i, c2i_model):
    t = c2i.t
    logits, _ = c2i_model(c2i_model.embed(t["in.class_ids"], t["in.idx"][:, :-1]))
    close(logits, t["out.train_logits"])
    close(F.cross_entropy(logits.flatten(0, 1), t["in.idx"].flatten())[None], t["out.train_loss"])


@torch.no_grad()
def test_c2i_eval_logits_and_hidden(c2i, c2i_model):
    t, before = c2i.t, []
    hook = c2i_model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    logits, hidden = c2i_model(c2i_model.embed(t["in.class_ids"], t["in.idx"]))
    hook.remove()
    close(logits, t["out.eval_full_logits"])
    close(before[0], t["out.eval_hidden_prenorm"])
    close(hidden, t["out.eval_hidden_postnorm"])


@torch.no_grad()
def forced_c2i(case, model, tokens):
    """Logits [block, rows, V] of each decode step for conditional rows followed by unconditional
    ones.
    """
    classes = case.t["in.gen_class_ids"]
    both = torch.cat([classes, torch.full_like(classes, model.config.num_classes)])
    logits, _ = model(model.embed(both, tokens[:, :-1].repeat(2, 1)))
    return logits.transpose(0, 1)


def greedy(logits):
    return logits.argmax(-1).T  # [rows, block]


def test_c2i_plain_decoding(c2i, c2i_model):
    cond = forced_c2i(c2i, c2i_model, c2i.t["out.gen_cfg1.tokens"]).chunk(2, dim=1)[0]
    close(cond, c2i.t["out.gen_cfg1.logits"])
    assert torch.equal(greedy(cond), c2i.t["out.gen_cfg1.tokens"])


@pytest.mark.parametrize("rows", [1, 2], ids=["shared positions", "positions by row"])
def test_c2i_guidance_interval(c2i, c2i_model, rows):
    """The prefill and decode steps 0 … interval are guided, the others are not."""
    t, first = c2i.t, c2i_model.config.cls_token_num
    wanted, tokens = (t[f"out.gen_cfg3.5_interval4.{name}"] for name in ("logits", "tokens"))
    raw = forced_c2i(c2i, c2i_model, tokens).transpose(0, 1)  # [R, block, V]
    positions = torch.arange(raw.shape[1])[None] + first - 1  # of what predicts each token
    target = LlamaGenTarget(c2i_model, Guidance(3.5, interval=4), Processor())
    guided = target.guide(raw, positions if rows == 1 else positions.repeat(len(raw), 1)).transpose(
        0, 1
    )
    close(guided, wanted)
    assert torch.equal(greedy(guided), tokens)


def decoded(model, guidance, prompt):
    """The tokens of greedy decoding, step by step."""
    target = LlamaGenTarget(model, guidance, Processor(0))
    uniforms = Uniforms.from_seeds(range(len(prompt.condition)))
    *_, end = decode_plain(target, prompt, target.length, uniforms)
    return end.tokens


def test_c2i_guidance_interval_step_by_step(c2i, c2i_model):
    found = decoded(c2i_model, Guidance(3.5, interval=4), Prompt(c2i.t["in.gen_class_ids"]))
    assert torch.equal(found, c2i.t["out.gen_cfg3.5_interval4.tokens"])


@pytest.mark.parametrize("combo", range(5))
def test_filters(c2i, combo):
    probs = Processor(**c2i.facts["filter_combos"][combo])(c2i.t["in.filter_logits"])
    wanted = c2i.t["out.filter_probs"][combo]
    assert torch.equal(probs > 0, wanted > 0)
    torch.testing.assert_close(probs, wanted, atol=1e-6, rtol=1e-5)


# --- text-conditional ---


def prefix_mask(mask, length, first=0):
    """What positions ``first`` … ``length`` - 1 attend to, [R, T, S] bool with S = ``length``.

    Earlier positions and themselves, of the prefix only where ``mask`` [R, P] is true; a masked
    position still attends to itself. Under guidance both halves take the caption's mask.
    """
    rows, prefix = mask.shape
    places = torch.arange(length)
    own = places[first:, None] == places  # [T, S]
    shown = torch.ones(rows, length, dtype=torch.bool)
    shown[:, :prefix] = mask[:, :length].bool()
    return own | (shown[:, None] & (places[first:, None] > places))


def additive(allowed):
    """Attention bias [R, 1, T, S] of ``allowed`` [R, T, S]: 0 where true, -inf where not."""
    return torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))[:, None]


def test_left_padding(t2i):
    t = t2i.t
    features, mask = left_pad(t["in.t5_feats_right_padded"], t["in.t5_mask_right_padded"])
    assert torch.equal(features, t["in.cond_left_padded"])
    assert torch.equal(mask, t["in.mask_left_padded"].bool())


def test_masks(t2i):
    t, mask = t2i.t, t2i.t["in.mask_left_padded"]
    assert torch.equal(prefix_mask(mask, 21)[:, None], t["in.train_mask"].bool())
    both = torch.cat([mask, mask])  # the unconditional half is masked as the conditional one
    wanted = t["out.gen_cfg2.causal_mask_prefix"].bool()
    assert torch.equal(prefix_mask(both, 7), wanted)
    assert torch.equal(prefix_mask(both, 7, first=4), wanted[:, 4:])
    assert torch.equal(additive(prefix_mask(both, 7)) == 0, wanted[:, None])


@torch.no_grad()
def test_prefix_embeddings(t2i, t2i_model):
    embed = t2i_model.cls_embedding
    close(embed(t2i.t["in.cond_left_padded"]), t2i.t["out.cond_prefix_embed"])
    close(embed(embed.uncond_embedding[None]), t2i.t["out.uncond_prefix_embed"])


@torch.no_grad()
def test_t2i_train_logits_and_loss(t2i, t2i_model):
    t, prefix = t2i.t, 6
    bias = additive(t["in.train_mask"][:, 0].bool())
    logits, _ = t2i_model(t2i_model.embed(t["in.cond_left_padded"], t["in.idx"][:, :-1]), bias=bias)
    close(logits[:, prefix - 1 :], t["out.train_logits"])
    loss = F.cross_entropy(logits[:, prefix - 1 :].flatten(0, 1), t["in.idx"].flatten())
    close(loss[None], t["out.train_loss"])


@torch.no_grad()
def forced_t2i(case, model, tokens):
    """Logits [block, rows, V] of each decode step, conditional rows first."""
    cond = case.t["in.cond_left_padded"]
    both = torch.cat([cond, model.cls_embedding.uncond_embedding.expand_as(cond)])
    x = model.embed(both, tokens[:, :-1].repeat(2, 1))
    mask = case.t["in.mask_left_padded"].repeat(2, 1)
    logits, _ = model(x, bias=additive(prefix_mask(mask, x.shape[1])))
    return logits[:, cond.shape[1] - 1 :].transpose(0, 1)


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
def test_guided_decoding(kind, request):
    case, model = (request.getfixturevalue(name) for name in (kind, f"{kind}_model"))
    t, forced = case.t, {"c2i": forced_c2i, "t2i": forced_t2i}[kind]
    raw = forced(case, model, t["out.gen_cfg2.tokens"])
    close(raw, t["out.gen_cfg2.raw_logits"])
    anywhere = torch.zeros(1, 1, dtype=torch.int64)
    guided = Guidance(2.0).mix(raw.transpose(0, 1), anywhere, 0).transpose(0, 1)
    close(guided, t["out.gen_cfg2.cfg_logits"])
    assert torch.equal(greedy(guided), t["out.gen_cfg2.tokens"])


@pytest.mark.parametrize("name", ["gen_cfg2", "gen_cfg1", "gen_cfg2_nomask"])
def test_t2i_step_by_step(t2i, t2i_model, name):
    mask = None if "nomask" in name else t2i.t["in.mask_left_padded"]
    prompt = Prompt(t2i.t["in.cond_left_padded"], mask)
    found = decoded(t2i_model, Guidance(2.0 if "cfg2" in name else 1.0), prompt)
    assert torch.equal(found, t2i.t[f"out.{name}.tokens"])


# --- tokenizer ---


@torch.no_grad()
def test_vq_encode(vq, vq_model):
    t = vq.t
    close(vq_model.quant_conv(vq_model.encoder(t["in.image"])), t["out.quant_conv"])
    quantized = vq_model.encode(t["in.image"])
    assert torch.equal(quantized.indices, t["out.indices"])
    close(quantized.codes, t["out.quant"])


@torch.no_grad()
def test_vq_decode(vq, vq_model):
    t = vq.t
    torch.testing.assert_close(vq_model.decode(t["out.quant"]), t["out.recon"], atol=2e-4, rtol=0)
    grid = t["in.code"].view(2, 16, 16)
    close(vq_model.quantize.codebook()[grid].permute(0, 3, 1, 2), t["out.code_entry"])
    torch.testing.assert_close(vq_model.decode_code(grid), t["out.decode_code"], atol=2e-4, rtol=0)


def test_vq_losses(vq, vq_model):
    quantized = vq_model.train().encode(vq.t["in.image"])
    close(quantized.codebook_loss.detach()[None], vq.t["out.train_vq_loss"])
    close(quantized.commit_loss.detach()[None], vq.t["out.train_commit_loss"])
    # the release's ratio is 0; we have no such loss
    assert float(vq.t["out.train_entropy_loss"]) == 0
    vq_model.eval()


# --- LANTERN's names ---


def test_lantern_names_round_trip(lantern, c2i):
    state = lantern.state("base_sd.")
    back = to_lantern(from_lantern(state))
    assert set(back) == set(state) and all(torch.equal(back[k], state[k]) for k in state)
    state = c2i.state("sd.")
    back = from_lantern(to_lantern(state))
    assert set(back) == set(state) and all(torch.equal(back[k], state[k]) for k in state)


@torch.no_grad()
def test_lantern_base(lantern):
    t, state = lantern.t, from_lantern(lantern.state("base_sd."))
    model = loaded(Transformer(infer_gpt_config(state, n_head=2, block_size=256)), state)
    features, mask = left_pad(t["in.t5_feats_right_padded"], t["in.t5_mask_right_padded"])
    both = torch.cat([features, model.cls_embedding.uncond_embedding[None]])
    x = model.embed(both, t["in.base_ids"].repeat(2, 1))
    logits, hidden = model(x, bias=additive(prefix_mask(mask.repeat(2, 1), x.shape[1])))
    close(logits[:, 119:], t["out.base_logits_from_last_prefix"])
    close(hidden, t["out.base_hidden"])


@pytest.mark.parametrize(
    ("key", "message"), [("model.extra.weight", "got model.extra.weight"), (None, "q_proj")]
)
def test_lantern_names_that_do_not_fit(lantern, key, message):
    state = lantern.state("base_sd.")
    if key is None:
        del state["model.layers.1.self_attn.q_proj.weight"]
    else:
        state[key] = torch.zeros(1)
    with pytest.raises(ValueError, match=message):
        from_lantern(state)
