"""A model of transformers that draws pictures: a tiny Chameleon, opened from its folder."""

import dataclasses

import pytest
import torch
from diffusers import VQModel
from scipy.stats import chisquare
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, PreTrainedTokenizerFast
from typer.testing import CliRunner

import specmm
from specmm import methods
from specmm.cache import Cache
from specmm.cli import app
from specmm.decode import decode, decode_plain
from specmm.guidance import AllowedTokens, Guidance
from specmm.hf.chameleon import BEGIN, CHAMELEON
from specmm.hf.drafters.prompt_lookup import PromptLookupDrafter
from specmm.hf.picture_tokens import Layout, PictureTarget, picture_prompt
from specmm.image_ar.tokens.assemble import assemble
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.runs.run import kinds_of, methods_of
from specmm.tree import DraftTree, TreeShape
from specmm.verify import GreedyMatch, Recursive

CODES, SIDE, FIRST = 8, 4, 20
PICTURE = [FIRST + 2 * i for i in range(CODES)]  # their ids, not those of words
WORDS = {
    word: 6 + i for i, word in enumerate(["a", "red", "blue", "barn", "tree", "on", "the", "hill"])
}
SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": 3, BEGIN: 4, "<unk>": 5}
PROMPTS = ["a red barn on the hill", "tree"]
VQ = dict(embed_dim=8, num_embeddings=CODES, latent_channels=8, num_res_blocks=1)
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64)


def image_name(code):
    """Digits are letters in Chameleon's vocabulary."""
    return f"IMGIMG{chr(ord('A') + code)}Z"


def made():
    names = {image_name(code): id_ for code, id_ in enumerate(PICTURE)}
    vq = VQ | dict(resolution=4 * SIDE, base_channels=32, channel_multiplier=[1, 1, 1])
    config = ChameleonConfig(
        vocab_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocabulary_map=SPECIAL | names,
        vq_config=vq,
        **SIZES,
    )
    torch.manual_seed(0)
    model = ChameleonForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
        model.lm_head.weight.normal_(0, 0.25)
        model.model.embed_tokens.weight.normal_(0, 0.5)
    return model


def tokenizer():
    words = Tokenizer(models.WordLevel(SPECIAL | WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    start = ("<s>", SPECIAL["<s>"])
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As ``save_pretrained`` writes it, with a decoder for pixels."""
    found = tmp_path_factory.mktemp("chameleon")
    made().save_pretrained(found)
    tokenizer().save_pretrained(found)
    torch.manual_seed(1)
    VQModel(
        block_out_channels=(32, 32, 32),
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        latent_channels=8,
        num_vq_embeddings=CODES,
        vq_embed_dim=8,
    ).save_pretrained(found / "vq")
    return found


@pytest.fixture(scope="module")
def pipe(folder):
    found = specmm.ImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    found.set_progress_bar_config(disable=True)
    return found


def prompt_of(target, pipe, texts=PROMPTS, negative=""):
    away = [pipe._ids(negative, target.layout)] * len(texts)
    return picture_prompt(target, [pipe._ids(text, target.layout) for text in texts], away)


def reference(pipe, text, drawn, scale):
    """Probabilities [V] after ``drawn`` picture tokens, from forwards without any cache."""
    model, logits = pipe.transformer, []
    for words in (text, ""):
        ids = torch.tensor([pipe._ids(words, None) + list(drawn)])
        logits.append(model.lm_head(model.model(ids, use_cache=False).last_hidden_state)[0, -1])
    mixed = logits[1] + scale * (logits[0] - logits[1]) if scale > 1 else logits[0]
    allowed = torch.zeros(len(mixed), dtype=torch.bool)
    allowed[PICTURE] = True
    return mixed.masked_fill(~allowed, float("-inf")).softmax(-1)


DRAFTERS = {
    "prompt-lookup": lambda target: PromptLookupDrafter(target, length=3),
    "sjd": lambda target: JacobiDrafter(target, 3),
}


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("method", DRAFTERS)
def test_greedy_drafts_draw_what_plain_decoding_draws(pipe, method, cfg):
    """By the pipeline, of two prompts of different lengths."""
    given = dict(temperature=0, cfg=cfg, output_type="latent")
    plain = pipe(PROMPTS, method="ar", **given)
    drafted = pipe(PROMPTS, method=method, **given)
    assert torch.equal(drafted.tokens, plain.tokens)
    assert plain.tokens.shape == (2, SIDE**2) and set(plain.tokens.unique().tolist()) <= set(
        PICTURE
    )
    assert len(plain.tokens.unique()) > 1 and drafted.stats.tau > 1
    assert drafted.certificate.kind == "exact"
    alone = [pipe(text, method="ar", **given).tokens[0] for text in PROMPTS]
    assert torch.equal(torch.stack(alone), plain.tokens)
    for row, text in zip(plain.tokens.tolist(), PROMPTS, strict=True):
        wanted = [int(reference(pipe, text, row[:n], cfg).argmax()) for n in range(len(row))]
        assert row == wanted


def test_guidance_changes_pictures_and_so_does_what_it_leads_away_from(pipe):
    given = dict(temperature=0, output_type="latent")
    found = [
        pipe(PROMPTS, cfg=1, **given).tokens,
        pipe(PROMPTS, cfg=3, **given).tokens,
        pipe(PROMPTS, cfg=3, negative_prompt="a blue tree on the hill on the hill", **given).tokens,
    ]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("negative", ["", "a blue tree on the hill on the hill"])
@torch.no_grad()
def test_scoring_a_tree_is_scoring_each_of_its_paths(pipe, cfg, negative, monkeypatch):
    """A negative prompt may be longer than the prompt."""
    target = PictureTarget(pipe.transformer, CHAMELEON, Processor(1.0), Guidance(cfg))
    first = target.prefill(prompt_of(target, pipe, negative=negative), 5).probs[:, 0]
    shape = TreeShape.from_parents((-1, 0, 0, 1, 3))
    tokens = torch.tensor([PICTURE[:5], PICTURE[3:8]])
    probs = target.score(DraftTree(tokens, shape)).probs
    paths = {0: (0,), 1: (0, 1), 2: (0, 2), 3: (0, 1, 3), 4: (0, 1, 3, 4)}
    whole = pipe._ids
    monkeypatch.setattr(pipe, "_ids", lambda text, _: whole(text or negative, _))
    for row, text in enumerate(PROMPTS):
        torch.testing.assert_close(first[row], reference(pipe, text, (), cfg))
        for node, path in paths.items():
            drawn = tokens[row][list(path)].tolist()
            torch.testing.assert_close(probs[row, node], reference(pipe, text, drawn, cfg))


ROWS = 4000


def p_value(pipe, target, method):
    """Of the first two tokens of many pictures, against their exact probabilities."""
    prompt = prompt_of(target, pipe, [PROMPTS[0]] * ROWS)
    uniforms = Uniforms.from_seeds(range(ROWS))
    if method == "ar":
        steps = decode_plain(target, prompt, 2, uniforms)
    else:
        steps = decode(target, DRAFTERS[method](target), Recursive(), prompt, 2, uniforms)
    *_, end = steps
    codes = {token: i for i, token in enumerate(PICTURE)}
    counts = torch.zeros(CODES, CODES)
    for first, second in end.tokens[:, :2].tolist():
        if first not in codes or second not in codes:
            return 0.0
        counts[codes[first], codes[second]] += 1
    scale = 3.0
    begin = reference(pipe, PROMPTS[0], (), scale)[PICTURE]
    after = [reference(pipe, PROMPTS[0], [token], scale)[PICTURE] for token in PICTURE]
    expected = ROWS * begin[:, None] * torch.stack(after)
    rare = expected < 5
    found = [*counts[~rare].tolist(), float(counts[rare].sum())]
    wanted = [*expected[~rare].tolist(), max(float(expected[rare].sum()), 1e-9)]
    total = sum(found) / sum(wanted)
    return chisquare(found, [w * total for w in wanted]).pvalue


@pytest.mark.parametrize("method", ["ar", *DRAFTERS])
@torch.no_grad()
def test_samples_follow_the_models_own_distribution(pipe, method):
    target = PictureTarget(pipe.transformer, CHAMELEON, Processor(1.0), Guidance(3.0))
    assert p_value(pipe, target, method) > 1e-3


class Swapped(Guidance):
    """Leads away from the prompt."""

    def mix(self, logits, positions, prompt):
        return super().mix(logits.roll(len(logits) // 2, 0), positions, prompt)


def layout_of(mask):
    return Layout(SIDE, SIDE, SIDE**2, AllowedTokens.everywhere(mask))


FORGOTTEN = dataclasses.replace(
    CHAMELEON, layout=lambda *_: layout_of(torch.ones(40, dtype=torch.bool))
)
TWINS = {
    "mask forgotten": (FORGOTTEN, Guidance(3.0)),
    "branches swapped": (CHAMELEON, Swapped(3.0)),
    "not guided": (CHAMELEON, Guidance(1.0)),
}


@pytest.mark.parametrize("method", ["ar", *DRAFTERS])
@pytest.mark.parametrize("twin", TWINS)
@torch.no_grad()
def test_broken_twins_are_noticed(pipe, twin, method):
    facts, guidance = TWINS[twin]
    target = PictureTarget(pipe.transformer, facts, Processor(1.0), guidance)
    assert p_value(pipe, target, method) < 1e-6


def test_pictures_are_those_of_the_decoder(pipe, folder):
    out = pipe(PROMPTS, method="sjd", generator=torch.Generator().manual_seed(0), output_type="np")
    assert out.images.shape == (2, 4 * SIDE, 4 * SIDE, 3) and out.certificate.kind == "exact"
    vq = VQModel.from_pretrained(folder / "vq").eval()
    codes = torch.tensor([[PICTURE.index(t) for t in row] for row in out.tokens.tolist()])
    latents = vq.quantize.get_codebook_entry(codes.flatten(), (2, SIDE, SIDE, 8))
    with torch.no_grad():
        wanted = vq.decode(latents, force_not_quantize=True).sample
    pixels = (127.5 * wanted + 128).clamp(0, 255).permute(0, 2, 3, 1)
    assert (torch.tensor(out.images).float() - pixels).abs().max() <= 1.01


def test_neighbours_are_those_of_the_codes(pipe):
    """Ids of picture tokens lie apart; those between have no mass to borrow."""
    method = methods.Draft("jacobi", "chain(3)", "lantern++(k=3, lambda_=2.0)")
    _, _, rule = assemble(method, pipe.target(), pipe.parts)
    codes = pipe.transformer.model.vqmodel.quantize.embedding.weight
    order = torch.cdist(codes, codes).fill_diagonal_(torch.inf).argsort(1)[:, :3]
    ids = torch.tensor(PICTURE)
    assert torch.equal(rule.neighbourhood.near(ids, 3)[0], ids[order])
    between, _ = rule.neighbourhood.near(ids[:-1] + 1, 3)
    assert not bool(pipe.target().allowed.masks[0, between].any())
    given = dict(method=method, output_type="latent", generator=torch.Generator().manual_seed(0))
    out = pipe(PROMPTS, **given)
    assert out.certificate.kind == "bounded" and set(out.tokens.unique().tolist()) <= set(PICTURE)


def test_what_is_missing_is_said(pipe, folder, tmp_path):
    assert kinds_of(str(folder)) == ("images",)
    assert {"ar", "sjd", "speculative", "prompt-lookup"} < set(methods_of("images", str(folder)))
    pipe.save_pretrained(tmp_path)
    bare = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    with pytest.raises(ValueError, match="has no decoder for pictures"):
        bare("tree")
    assert bare("tree", output_type="latent", temperature=0).tokens.shape == (1, SIDE**2)
    with pytest.raises(ValueError, match="needs an unconditional prompt"):
        target = PictureTarget(pipe.transformer, CHAMELEON, Processor(0), Guidance(3.0))
        prompt = prompt_of(target, pipe)
        target.prefill(dataclasses.replace(prompt, unconditional=None), 2)


def test_rows_may_end_at_different_rounds(pipe):
    target = PictureTarget(pipe.transformer, CHAMELEON, Processor(0), Guidance(3.0))
    uniforms = Uniforms.from_seeds([0, 1])
    *_, end = decode(
        target, JacobiDrafter(target, 5), GreedyMatch(), prompt_of(target, pipe), 12, uniforms
    )
    *_, plain = decode_plain(target, prompt_of(target, pipe), 12, Uniforms.from_seeds([0, 1]))
    assert torch.equal(end.tokens[:, :12], plain.tokens[:, :12])


ODD = torch.zeros(2, 40, dtype=torch.bool)
ODD[0, PICTURE[:4]] = True
ODD[1, PICTURE[4:]] = True
TURNS = AllowedTokens(ODD, torch.tensor([0, 1] * (SIDE**2 // 2)))


@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_tokens_may_be_allowed_elsewhere(pipe, method, temperature):
    """Those of even places are of the first half of the codes, the others of the second."""
    facts = dataclasses.replace(CHAMELEON, layout=lambda *_: Layout(SIDE, SIDE, SIDE**2, TURNS))
    target = PictureTarget(pipe.transformer, facts, Processor(temperature), Guidance(3.0))
    rule = Recursive() if temperature else GreedyMatch()
    drawn = []
    for drafter in (None, DRAFTERS[method](target)):
        prompt, uniforms = prompt_of(target, pipe), Uniforms.from_seeds([0, 1])
        if drafter is None:
            *_, end = decode_plain(target, prompt, SIDE**2, uniforms)
        else:
            *_, end = decode(target, drafter, rule, prompt, SIDE**2, uniforms)
        drawn.append(end.tokens[:, : SIDE**2])
        assert set(drawn[-1][:, ::2].unique().tolist()) <= set(PICTURE[:4])
        assert set(drawn[-1][:, 1::2].unique().tolist()) <= set(PICTURE[4:])
    assert temperature or torch.equal(*drawn)


@pytest.mark.parametrize("method", DRAFTERS)
@torch.no_grad()
def test_any_head_scores_and_any_module_embeds(pipe, method):
    """As in models whose picture tokens are a vocabulary apart from the words'."""
    torch.manual_seed(2)
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, CODES))
    embed = torch.nn.Sequential(torch.nn.Embedding(CODES, 16), torch.nn.Linear(16, 32))
    facts = dataclasses.replace(
        CHAMELEON,
        head=lambda model: head,
        embed=lambda model: embed,
        layout=lambda *_: layout_of(torch.ones(CODES, dtype=torch.bool)),
        shared=False,
    )
    target = PictureTarget(pipe.transformer, facts, Processor(0), Guidance(3.0))
    uniforms = Uniforms.from_seeds([0, 1])
    drafter = DRAFTERS[method](target)
    *_, end = decode(target, drafter, GreedyMatch(), prompt_of(target, pipe), 9, uniforms)
    model = pipe.transformer.model
    for row, text in zip(end.tokens[:, :9], PROMPTS, strict=True):
        logits = []
        for words in (text, ""):
            prompt = model.embed_tokens(torch.tensor([pipe._ids(words, None)]))
            inputs = torch.cat([prompt, embed(row[None, :-1])], dim=1)
            states = model(inputs_embeds=inputs, use_cache=False).last_hidden_state
            logits.append(head(states[0, -9:]))
        assert torch.equal((logits[1] + 3 * (logits[0] - logits[1])).argmax(-1), row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for the CPU")
def test_trees_are_scored_by_the_kernel_where_triton_runs(pipe, folder, monkeypatch):
    """Both branches, and without a dense mask."""
    given = dict(temperature=0, cfg=3.0, output_type="latent")
    wanted = pipe(PROMPTS, **given).tokens
    monkeypatch.setenv("SPECMM_KERNELS", "triton")
    monkeypatch.delattr(Cache, "tree_bias")
    fast = specmm.ImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    target = fast.target(temperature=0, cfg=3.0)
    drafter, uniforms = JacobiDrafter(target, 3), Uniforms.from_seeds([0, 1])
    *_, end = decode(target, drafter, GreedyMatch(), prompt_of(target, pipe), 4, uniforms)
    assert torch.equal(end.tokens[:, :4], wanted[:, :4])


def test_what_needs_classes_is_refused_in_a_sentence(folder):
    calls = [["demo", "--model", str(folder)], ["bench", str(folder)]]
    calls.append(["generate", str(folder), "--prompt", "tree", "--batch-invariant"])
    for words, said in zip(calls, ["draws classes", "give --prompt", "does not hold"], strict=True):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr
