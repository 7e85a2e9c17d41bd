"""Models of transformers that draw pictures by their own ``generate``: tiny Janus, Emu3 and
GLM-Image, opened from unmodified folders, against it.
"""

from dataclasses import dataclass, replace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers as tf
from scipy.stats import chisquare
from tokenizers import pre_tokenizers

import specmm
from specmm import methods
from specmm.decode import decode, decode_plain
from specmm.drafter import Feedback
from specmm.guidance import Guidance
from specmm.hf.picture_tokens import PictureTarget, picture_prompt
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.processors import Processor
from specmm.randomness import Uniforms, further, sample_generators
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape
from specmm.verify import Recursive
from tests.integration import tiny_glm_image
from tests.unit.vlm.tiny_processors import word_tokenizer

CODES = 8
VISUAL = [f"<|visual token {i:06d}|>" for i in range(CODES)]
NAMED = dict(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")
NAMED |= dict(image_wrapper_token="<wrap>", eof_token="<|extra_201|>")
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", *NAMED.values(), "<|extra_200|>", *VISUAL]
WORDS = ["a", "red", "blue", "barn", "tree", "on", "hill", *"*0123456789"]
IDS = {name: i for i, name in enumerate([*SPECIAL, *WORDS])}
TEXT = dict(
    model_type="llama",
    vocab_size=len(IDS),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VQ = dict(embed_dim=4, base_channels=32, channel_multiplier=[1, 1, 1], num_res_blocks=1)
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %} {{ c['text'] }} {% endfor %}{% endfor %}"
)
PROMPTS = ["a red barn on a hill", "blue tree"]
SCALE = 3.0


SPLITS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Digits(),
        pre_tokenizers.Split("*", "isolated"),
    ]
)


def tokenizer(template=None):
    return word_tokenizer(SPECIAL, WORDS, SPLITS, NAMED, template)


QUIET = ("vqmodel", "vision_model", "visual")


def loud(model):
    """Random weights whose next tokens depend on the text."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and not any(part in name for part in QUIET):
                parameter.normal_(0, 0.5 if "embed" in name else 0.25)
    return model.eval()


def janus():
    tower = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=12)
    tower |= dict(patch_size=4, projection_dim=32, mlp_ratio=2, depth=2, num_image_tokens=9)
    vq = VQ | dict(num_embeddings=CODES, latent_channels=4, num_hidden_layers=1)
    vq |= dict(projection_dim=32, image_token_embed_dim=32)
    config = tf.JanusConfig(
        vision_config=tower, text_config=TEXT, vq_config=vq, image_token_id=IDS["<image>"]
    )
    model = loud(tf.JanusForConditionalGeneration(config))
    more = {"boi_token_id": IDS["<boi>"]}
    model.generation_config = tf.GenerationConfig(
        bos_token_id=1, pad_token_id=0, generation_kwargs=more
    )
    return model


def emu3():
    vq = VQ | dict(
        codebook_size=CODES, attn_resolutions=[], temporal_downsample_factor=1, hidden_size=32
    )
    config = tf.Emu3Config(
        vq_config=vq,
        text_config=TEXT | dict(model_type="emu3_text_model"),
        vocabulary_map=IDS,
        image_token_id=IDS["<image>"],
    )
    return loud(tf.Emu3ForConditionalGeneration(config))


def drawn_by_janus(model, words, texts, size, cfg):
    pictures = tf.JanusImageProcessor(size=dict(height=8, width=8), min_size=4)
    processor = tf.JanusProcessor(pictures, words, chat_template=TEMPLATE, num_image_tokens=9)
    asked = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "text", "text": text}]}],
            add_generation_prompt=True,
        )
        for text in texts
    ]
    inputs = processor(text=asked, generation_mode="image", padding=True, return_tensors="pt")
    return model.generate(**inputs, generation_mode="image", do_sample=False, guidance_scale=cfg)


def drawn_by_emu3(model, words, texts, size, cfg):
    """With the constraint that the released model's users write."""
    rows, columns = (pixels // 4 for pixels in size)
    pictures = [IDS[name] for name in VISUAL]

    def allowed(_, ids):
        place = len(ids) - int((ids == IDS["<wrap>"]).nonzero()[0])
        if place % (columns + 1) == 0:
            return [IDS["<|extra_200|>"]]
        return pictures

    def asked(texts):
        full = [f"<s>{text}<boi>{rows}*{columns}<wrap>" for text in texts]
        return words(full, padding=True, return_tensors="pt")

    inputs = asked(texts)
    away = asked([""] * len(texts))
    found = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=rows * (columns + 1),
        guidance_scale=cfg,
        negative_prompt_ids=away["input_ids"],
        negative_prompt_attention_mask=away["attention_mask"],
        prefix_allowed_tokens_fn=allowed,
        eos_token_id=None,
    )
    return found[:, inputs["input_ids"].shape[1] :]


def drawn_by_glm_image(model, words, texts, size, cfg):
    """As diffusers calls it, but greedy, and without what ends pictures, which random weights draw
    anywhere.
    """
    inputs = tiny_glm_image.inputs(texts, size)
    found = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=int(inputs["image_grid_thw"][:2].prod(-1).sum()),
        suppress_tokens=[tiny_glm_image.BEGIN, tiny_glm_image.END],
        eos_token_id=None,
    )
    return found[:, inputs["input_ids"].shape[1] :]


def pixels_of_janus(pipe, out, size, seeds):
    return pipe.transformer.decode_image_tokens(out.tokens)


def pixels_of_emu3(pipe, out, size, seeds):
    closing = torch.nn.functional.pad(out.tokens, (0, 3))
    height, width = (pixels // 4 for pixels in size)
    found = pipe.transformer.decode_image_tokens(image_tokens=closing, height=height, width=width)
    return found.flatten(0, -4).permute(0, 2, 3, 1)


def pixels_of_glm_image(pipe, out, size, seeds):
    """By the whole pipeline of diffusers, from our tokens."""
    painter = diffusers.GlmImagePipeline.from_pretrained(pipe.folder)
    painter.set_progress_bar_config(disable=True)
    height, width = size
    grid = (height // 32, width // 32)
    pictures = []
    for text, row, seed in zip(PROMPTS, out.tokens, seeds, strict=True):
        fine = painter._upsample_token_ids(row[-grid[0] * grid[1] :], *grid)
        given = dict(height=height, width=width, prior_token_ids=fine, generator=seed)
        pictures.append(painter(text, output_type="np", **given, **STEPS).images)
    return 2 * torch.tensor(np.concatenate(pictures)) - 1


def save_glm_image(folder):
    tiny_glm_image.painter(loud(tiny_glm_image.model())).save_pretrained(folder)


@dataclass(frozen=True)
class Kind:
    """``drawn(model, tokenizer, texts, size, cfg)`` are the tokens of its own generate, ``pixels``
    those of the class's own decoder in [-1, 1]. ``save`` writes its folder, and ``places`` are its
    positions where they are no plain counts.
    """

    drawn: Any
    pixels: Any
    size: tuple[int, int]
    save: Any
    places: Any = None
    scales: tuple[float, ...] = (1.5, 5.0)  # of guidance

    @property
    def tested(self):
        """A guidance scale to sample by, which the class knows."""
        return SCALE if max(self.scales) > SCALE else 1.0


def saves(model, template=None):
    def save(folder):
        model().save_pretrained(folder)
        tokenizer(template).save_pretrained(folder)

    return save


STEPS = dict(num_inference_steps=2, guidance_scale=1.2)
KINDS = {
    "janus": Kind(drawn_by_janus, pixels_of_janus, (12, 12), saves(janus, TEMPLATE)),
    "emu3": Kind(drawn_by_emu3, pixels_of_emu3, (12, 16), saves(emu3)),
    "glm_image": Kind(
        drawn_by_glm_image,
        pixels_of_glm_image,
        (96, 64),
        save_glm_image,
        tiny_glm_image.places,
        (1.0,),
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    found = tmp_path_factory.mktemp("pictures")
    kind.save(found)
    return found


@pytest.fixture(scope="module")
def pipe(folder):
    found = specmm.ImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    found.set_progress_bar_config(disable=True)
    return found


def sized(kind):
    return dict(zip(("height", "width"), kind.size, strict=True))


def test_greedy_pictures_are_those_of_generate(kind, pipe):
    """Alone and in a ragged batch, by every method and with more and less guidance."""
    for cfg in kind.scales:
        wanted = kind.drawn(pipe.transformer, pipe.tokenizer, PROMPTS, kind.size, cfg)
        given = dict(temperature=0, cfg=cfg, output_type="latent", **sized(kind))
        for method in ("ar", "sjd", "prompt-lookup"):
            out = pipe(PROMPTS, method=method, **given)
            assert torch.equal(out.tokens, wanted), method
            assert out.certificate.kind == "exact"
            assert torch.equal(pipe(PROMPTS[1], method=method, **given).tokens, wanted[1:]), method
        assert len(wanted.unique()) > 2 and not torch.equal(wanted[0], wanted[1])


def test_guesses_begun_from_neighbours_change_no_greedy_token(kind, pipe):
    given = dict(temperature=0, cfg=kind.scales[0], output_type="latent", **sized(kind))
    plain = pipe(PROMPTS, method="ar", **given).tokens
    for init in ("left", "above", "random"):
        out = pipe(PROMPTS, method=methods.SJD(window=6, init=init), **given)
        assert torch.equal(out.tokens, plain), init


def test_guesses_begin_with_tokens_that_may_come_there(kind, pipe):
    """The first window of a picture: ends of rows only where rows end."""
    target = target_of(pipe, kind, kind.scales[0])
    feedback = Feedback(
        target.prefill(prompt_of(target, pipe, PROMPTS), 8), torch.tensor(pictures_of(target)[1:3])
    )
    for init in ("left", "above", "random"):
        drafter = JacobiDrafter(target, 7, init)
        drafter.begin(feedback, Clock())
        tree = drafter.propose(feedback, Uniforms.from_seeds([0, 1]))
        may = target.allowed.at(torch.arange(1, 8)).expand(2, -1, -1)
        if init == "random":
            assert torch.equal(tree.probs[:, 1:] > 0, may)
        else:  # the first row has nothing above the token that ends it
            inside = torch.arange(1, 8) % target.line < target.columns
            drawn = may.gather(2, tree.tokens[:, 1:, None])[..., 0]
            assert bool(drawn[:, inside].all())
            assert bool((tree.tokens[:, 1:] == feedback.token[:, None])[:, inside].all())


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_window_of_a_row_is_plain_decoding(kind, pipe, temperature):
    """Alone and in a ragged batch; smaller windows draw other pictures in fewer rounds."""
    given = dict(temperature=temperature, cfg=kind.scales[0], output_type="latent", **sized(kind))

    def drawn(method, some=slice(None)):
        seeds = [torch.Generator().manual_seed(i) for i in range(2)][some]
        return pipe(PROMPTS[some], method=method, generator=seeds, **given)

    if kind.drawn is drawn_by_glm_image:  # two grids
        with pytest.raises(ValueError, match="zipar"):
            drawn(methods.ZipAR(window=1))
        return
    plain = drawn("ar")
    whole = drawn(methods.ZipAR(window=5))
    assert torch.equal(whole.tokens, plain.tokens) and whole.certificate.kind == "exact"
    narrow = drawn(methods.ZipAR(window=1))
    assert narrow.certificate.kind == "heuristic" and narrow.stats.tau > 1.5
    assert not torch.equal(narrow.tokens, plain.tokens)
    for i in range(2):
        one = slice(i, i + 1)
        assert torch.equal(drawn(methods.ZipAR(window=1), one).tokens, narrow.tokens[one])
    facts = target_of(pipe, kind, kind.scales[0])
    may = facts.allowed.at(torch.arange(facts.length)).expand(2, -1, -1)
    assert bool(may.gather(2, narrow.tokens[..., None]).all())


def test_grouped_acceptance_says_what_it_costs(kind, pipe):
    given = dict(cfg=kind.scales[0], output_type="latent", **sized(kind))
    seeds = [torch.Generator().manual_seed(i) for i in range(2)]
    drawn = pipe(PROMPTS, method="gsd", generator=seeds, **given)
    assert drawn.certificate.kind == "bounded" and 0 < drawn.certificate.tv < 1
    greedy = pipe(PROMPTS, method="gsd", temperature=0, **given)
    assert greedy.certificate.kind == "exact"
    assert torch.equal(greedy.tokens, pipe(PROMPTS, method="ar", temperature=0, **given).tokens)


def target_of(pipe, kind, cfg, places=None):
    """With other ``places`` than the model's, if given."""
    layout = pipe._layout(*kind.size)
    if places is not None:
        layout = replace(layout, places=places(layout.places))
    return PictureTarget(pipe.transformer, pipe.facts, Processor(1.0), Guidance(cfg), layout=layout)


def prompt_of(target, pipe, texts):
    ids = [pipe._ids(text, target.layout) for text in texts]
    return picture_prompt(target, ids, [pipe._away(row, None, target.layout) for row in ids])


def reference(target, prompt, row, drawn, kind):
    """Probabilities [V] after ``drawn`` tokens, from forwards without any cache."""
    logits = []
    for one in (prompt, prompt.unconditional)[: target.branches]:
        ids = torch.tensor([one.rows()[row]])
        inputs = target.model.get_input_embeddings()(ids)
        if drawn:
            inputs = torch.cat([inputs, target.embed(torch.tensor([drawn]))], dim=1)
        where = None
        if kind.places is not None:
            where = kind.places(target.model, ids.shape[1], kind.size, len(drawn))
        states = target.model.get_decoder()(
            inputs_embeds=inputs, use_cache=False, position_ids=where
        )
        logits.append(target.head(states.last_hidden_state[0, -1]))
    mixed = logits[-1] + target.guidance.scale * (logits[0] - logits[-1])
    mask = target.allowed.at(torch.tensor(len(drawn)))
    return mixed.masked_fill(~mask, float("-inf")).softmax(-1)


def pictures_of(target):
    """The picture tokens that may come first."""
    return target.allowed.at(torch.tensor(0)).nonzero()[:, 0].tolist()


@torch.no_grad()
def test_scoring_a_tree_is_scoring_each_of_its_paths(pipe, kind):
    for cfg in {1.0, kind.tested}:
        target = target_of(pipe, kind, cfg)
        prompt = prompt_of(target, pipe, PROMPTS)
        first = target.prefill(prompt, 5).probs[:, 0]
        some = pictures_of(target)
        tokens = torch.tensor([some[:5], some[3:8]])
        probs = target.score(DraftTree(tokens, TreeShape.from_parents((-1, 0, 0, 1, 3)))).probs
        paths = {0: (0,), 1: (0, 1), 2: (0, 2), 3: (0, 1, 3), 4: (0, 1, 3, 4)}
        for row in range(len(PROMPTS)):
            begin = reference(target, prompt, row, [], kind)
            torch.testing.assert_close(first[row], begin)
            for node, path in paths.items():
                drawn = tokens[row][list(path)].tolist()
                wanted = reference(target, prompt, row, drawn, kind)
                torch.testing.assert_close(probs[row, node], wanted)


ROWS = 1500


def p_value(pipe, target, facts, method, kind, given=()):
    """Of two tokens of many pictures, after those ``given``, against their exact probabilities."""
    prompt = prompt_of(target, pipe, [PROMPTS[1]] * ROWS)
    uniforms = Uniforms.from_seeds(range(ROWS))
    count = 2 + len(given)
    if method == "ar":
        steps = decode_plain(target, prompt, count, uniforms)
    else:
        steps = decode(target, JacobiDrafter(target, 3), Recursive(), prompt, count, uniforms)
    *_, end = steps
    some = pictures_of(facts)
    first = reference(facts, prompt, 0, list(given), kind)[some]
    after = [reference(facts, prompt, 0, [*given, token], kind)[some] for token in some]
    begun = (end.tokens[:, : len(given)] == torch.tensor(given)).all(-1)
    drawn = end.tokens[begun][:, len(given) : count].contiguous()
    pairs = torch.searchsorted(torch.tensor(some), drawn)
    expected = (len(pairs) * first[:, None] * torch.stack(after)).flatten()
    counts = torch.bincount(pairs[:, 0] * len(some) + pairs[:, 1], minlength=len(expected))
    often = expected >= 5
    found = [*counts[often].tolist(), int(counts[~often].sum())]
    wanted = [*expected[often].tolist(), max(float(expected[~often].sum()), 1e-9)]
    return chisquare(found, [x * sum(found) / sum(wanted) for x in wanted]).pvalue


@pytest.mark.parametrize("method", ["ar", "sjd"])
@torch.no_grad()
def test_samples_follow_the_models_own_distribution(pipe, kind, method):
    """And broken twins do not: one guided otherwise, or two that take a token's row for its column
    and count on as texts do.
    """
    exact = target_of(pipe, kind, kind.tested)
    assert p_value(pipe, exact, exact, method, kind) > 1e-3
    if kind.places is None:
        assert p_value(pipe, target_of(pipe, kind, 3 * SCALE), exact, method, kind) < 1e-6
        return
    begin = reference(exact, prompt_of(exact, pipe, [PROMPTS[1]]), 0, [], kind)
    likely = [int(begin.argmax())]  # the first token stands where it would in a text
    assert p_value(pipe, exact, exact, method, kind, likely) > 1e-3
    counted = torch.arange(exact.length).expand(3, -1)
    for wrong in (lambda places: places[[0, 2, 1]], lambda places: counted):
        twin = target_of(pipe, kind, 1.0, wrong)
        assert p_value(pipe, twin, exact, method, kind, likely) < 1e-6


def test_pictures_are_those_of_the_models_own_decoder(pipe, kind):
    seed = torch.Generator().manual_seed(0)
    seeds = [further(one) for one in sample_generators(seed, 2, pipe.device)]
    given = STEPS if pipe.facts.paints else {}
    out = pipe(
        PROMPTS,
        method="sjd",
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **sized(kind),
        **given,
    )
    assert out.images.shape == (2, *kind.size, 3)
    with torch.no_grad():
        wanted = kind.pixels(pipe, out, kind.size, seeds)
    pixels = (127.5 * wanted + 128).clamp(0, 255)
    assert (torch.tensor(out.images).float() - pixels).abs().max() <= 1.01
    assert len(np.unique(out.images)) > 10


def test_seeds_prompts_and_numbers_of_pictures(pipe, kind):
    """A picture does not depend on the others of its batch."""
    seeds = [torch.Generator().manual_seed(i) for i in range(4)]
    given = dict(method="sjd", output_type="latent", num_images_per_prompt=2, **sized(kind))
    out = pipe(PROMPTS, generator=seeds, batch_size=3, **given)
    alone = pipe(PROMPTS[1], generator=[torch.Generator().manual_seed(i) for i in (2, 3)], **given)
    assert torch.equal(out.tokens[2:], alone.tokens) and len(out.tokens.unique(dim=0)) == 4


def test_mistakes_are_told(pipe, kind):
    with pytest.raises(ValueError, match="height and width"):
        pipe("tree", height=13, width=12)
    with pytest.raises(ValueError, match="give both height and width"):
        pipe("tree", height=12)
    with pytest.raises(ValueError, match="prompt and answer must fit"):
        pipe("tree " * 400, **sized(kind))
    with pytest.raises(ValueError, match="at least one picture"):
        pipe([])
