"""A tiny Chameleon that draws pictures, opened from its folder, beside what all such models share
(``test_picture_models.py``).
"""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import specmm
from specmm import methods
from specmm.core.cache import Cache
from specmm.core.decode import decode, decode_plain
from specmm.core.guidance import AllowedTokens, Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.drafters.prompt_lookup import PromptLookupDrafter
from specmm.hf.pictures.chameleon import CHAMELEON
from specmm.hf.pictures.picture_tokens import Layout, PictureTarget, picture_prompt
from specmm.image_ar.tokens.assemble import assemble
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.runs.run import kinds_of, methods_of
from specmm.verify import GreedyMatch, Recursive
from tests.commands import run
from tests.tiny import chameleon
from tests.tiny.chameleon import CODES, PICTURE, SIDE
from tests.tiny.picture_kinds import opened

PROMPTS = ["a red barn on a hill", "tree"]
NEGATIVE = "a blue tree on a hill on a hill"
SIZE = chameleon.TEXT["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("chameleon")
    chameleon.save(found)
    return found


@pytest.fixture(scope="module")
def pipe(folder):
    return opened(folder)


def prompt_of(target, pipe, texts=PROMPTS):
    ids = [pipe._ids(text, target.layout) for text in texts]
    return picture_prompt(target, ids, [pipe._away(row, None, target.layout) for row in ids])


DRAFTERS = {
    "prompt-lookup": lambda target: PromptLookupDrafter(target, length=3),
    "sjd": lambda target: JacobiDrafter(target, 3),
}


def test_guidance_changes_pictures_and_so_does_what_it_leads_away_from(pipe):
    given = dict(temperature=0, output_type="latent")
    found = [
        pipe(PROMPTS, cfg=1, **given).tokens,
        pipe(PROMPTS, cfg=3, **given).tokens,
        pipe(PROMPTS, cfg=3, negative_prompt=NEGATIVE, **given).tokens,
    ]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def layout_of(mask):
    return Layout(SIDE, SIDE, SIDE**2, AllowedTokens.everywhere(mask))


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


def test_a_lookup_is_as_long_as_its_chain(pipe):
    method = methods.Draft("prompt-lookup", "chain(2)")
    assert assemble(method, pipe.target(), pipe.parts)[1].max_depth == 2
    assert assemble(methods.PromptLookup(length=5), pipe.target(), pipe.parts)[1].max_depth == 5


def test_what_is_missing_is_said(pipe, folder, tmp_path):
    assert kinds_of(str(folder)) == ("images",)
    assert {"ar", "sjd", "gsd", "prompt-lookup"} < set(methods_of("images", str(folder)))
    pipe.save_pretrained(tmp_path)
    shutil.rmtree(tmp_path / "vq")
    bare = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    with pytest.raises(ValueError, match="has no decoder for pictures"):
        bare("tree")
    assert bare("tree", output_type="latent", temperature=0).tokens.shape == (1, SIDE**2)
    with pytest.raises(ValueError, match="needs an unconditional prompt"):
        target = PictureTarget(pipe.transformer, CHAMELEON, Processor(0), Guidance(3.0))
        prompt = prompt_of(target, pipe)
        target.prefill(dataclasses.replace(prompt, unconditional=None), 2)


def test_a_tokenizer_that_is_nowhere_is_not_made_up(tmp_path):
    """Tokens are drawn without it; what needs its codebook is refused."""
    chameleon.save_lumina(tmp_path)
    (tmp_path / "tokenizer" / "vqgan.ckpt").unlink()
    bare = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    given = dict(height=8, width=8, output_type="latent", temperature=1.0)
    assert bare("tree", method=methods.GSD(window=2), **given).tokens.shape == (1, 6)
    with pytest.raises(ValueError, match=f"codebook of {len(PICTURE)} codes, got none"):
        bare("tree", method=methods.GSD(window=2, k=2), **given)
    bare.save_pretrained(tmp_path / "again")
    again = specmm.ImagePipeline.from_pretrained(tmp_path / "again", torch_dtype=torch.float32)
    assert again.parts.codebook is None


def test_a_decoder_among_the_models_own_weights_serves(pipe, tmp_path):
    """As conversions of Anole have it."""
    chameleon.save_lumina(tmp_path)
    own = chameleon.published(chameleon.vq())
    (tmp_path / "tokenizer" / "vqgan.ckpt").unlink()
    file = tmp_path / "model.safetensors"
    state = load_file(file) | {f"model.vqmodel.{k}": v.contiguous() for k, v in own.items()}
    save_file(state, file, metadata={"format": "pt"})
    found = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    grid = torch.tensor([[*PICTURE[:6], 0]] * 4).flatten()[None]
    layout = found._layout(16, 24)
    with torch.no_grad():
        pixels = found.decoder()(grid, layout, None)
        codes = torch.arange(6).expand(4, -1).flatten()
        latents = chameleon.vq().quantize.get_codebook_entry(codes, (1, 4, 6, 8))
        wanted = chameleon.vq().decode(latents, force_not_quantize=True).sample
    torch.testing.assert_close(pixels, wanted)
    found.save_pretrained(tmp_path / "saved")
    again = specmm.ImagePipeline.from_pretrained(tmp_path / "saved", torch_dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again.decoder()(grid, layout, None), pixels)


def test_a_tokenizer_that_a_checkpoint_lacks_is_the_published_one(tmp_path):
    chameleon.save_lumina(tmp_path)
    found = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    vq = chameleon.vq()
    pixels = torch.rand(1, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        tokens = found.transformer.model.get_image_tokens(pixels)[0]
        features = vq.encode(pixels).latents.permute(0, 2, 3, 1).flatten(0, 2)
    codes = torch.cdist(features, vq.quantize.embedding.weight).argmin(1)
    assert torch.equal(tokens, torch.tensor(PICTURE)[codes]) and len(codes.unique()) > 1


def test_rows_may_end_at_different_rounds(pipe):
    target = PictureTarget(pipe.transformer, CHAMELEON, Processor(0), Guidance(3.0))
    uniforms = Uniforms.from_seeds([0, 1])
    *_, end = decode(
        target, JacobiDrafter(target, 5), GreedyMatch(), prompt_of(target, pipe), 12, uniforms
    )
    *_, plain = decode_plain(target, prompt_of(target, pipe), 12, Uniforms.from_seeds([0, 1]))
    assert torch.equal(end.tokens[:, :12], plain.tokens[:, :12])


ODD = torch.zeros(2, SIZE, dtype=torch.bool)
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
        asked = pipe._ids(text, None)
        for ids in (asked, pipe._away(asked, None, None)):
            prompt = model.embed_tokens(torch.tensor([ids]))
            inputs = torch.cat([prompt, embed(row[None, :-1])], dim=1)
            states = model(inputs_embeds=inputs, use_cache=False).last_hidden_state
            logits.append(head(states[0, -9:]))
        assert torch.equal((logits[1] + 3 * (logits[0] - logits[1])).argmax(-1), row)


@pytest.mark.slow
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
        done = run(*words)
        assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr
