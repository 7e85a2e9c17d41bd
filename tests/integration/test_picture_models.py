"""Models of transformers that draw pictures: tiny Janus, Emu3 and GLM-Image, opened from unmodified
folders, against their own ``generate``, and Anole and Lumina-mGPT against their class's forward.
"""

import json
from itertools import product

import numpy as np
import pytest
import torch

from specmm import methods
from specmm.core.decode import decode, decode_plain
from specmm.core.drafter import Feedback
from specmm.core.guidance import AllowedTokens, Guidance
from specmm.core.randomness import Uniforms, further, sample_generators
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.prompt_lookup import PromptLookupDrafter
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.verify import Recursive
from tests import sampling
from tests.tiny.picture_kinds import (
    KINDS,
    PROMPTS,
    STEPS,
    opened,
    pictures_of,
    prompt_of,
    reference,
    saved,
    sized,
    target_of,
)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return saved(kind, tmp_path_factory)


@pytest.fixture(scope="module")
def pipe(folder):
    return opened(folder)


@pytest.fixture(scope="module")
def greedy(kind, pipe):
    """Options of greedy calls at the least guidance, and the tokens of its own generate."""
    given = dict(temperature=0, cfg=kind.scales[0], output_type="latent", **sized(kind))
    return given, kind.drawn(pipe.transformer, pipe.tokenizer, PROMPTS, kind.size, given["cfg"])


def test_greedy_pictures_are_those_of_generate(kind, pipe, greedy):
    """Alone and in a ragged batch, by every method, and with more guidance."""
    given, wanted = greedy
    assert len(wanted.unique()) > 2 and not torch.equal(wanted[0], wanted[1])
    guesses = [methods.SJD(window=6, init=init) for init in ("left", "above", "random")]
    for method in ("ar", "sjd", "prompt-lookup", "gsd", *guesses):
        out = pipe(PROMPTS, method=method, **given)
        assert torch.equal(out.tokens, wanted), method
        assert out.certificate.kind == "exact"
    for method in ("ar", "sjd", "prompt-lookup"):
        assert torch.equal(pipe(PROMPTS[1], method=method, **given).tokens, wanted[1:]), method
    for cfg in kind.scales[1:]:
        wanted = kind.drawn(pipe.transformer, pipe.tokenizer, PROMPTS, kind.size, cfg)
        assert torch.equal(pipe(PROMPTS, **given | dict(cfg=cfg, method="sjd")).tokens, wanted)


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


def test_grouped_acceptance_says_what_it_costs(kind, pipe):
    given = dict(cfg=kind.scales[0], output_type="latent", **sized(kind))
    seeds = [torch.Generator().manual_seed(i) for i in range(2)]
    drawn = pipe(PROMPTS, method="gsd", generator=seeds, **given)
    assert drawn.certificate.kind == "bounded" and 0 < drawn.certificate.tv < 1


@torch.no_grad()
def test_scoring_a_tree_is_scoring_each_of_its_paths(pipe, kind):
    """Also where a negative prompt is longer than the prompt."""
    longer = PROMPTS[0] + " on a hill"
    for cfg, negative in [(1.0, None), (kind.tested, None), (kind.tested, longer)]:
        target = target_of(pipe, kind, cfg)
        prompt = prompt_of(target, pipe, PROMPTS, negative)
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
DRAFTERS = {
    "ar": None,
    "sjd": lambda target: JacobiDrafter(target, 3),
    "sjd, coupled": lambda target: JacobiDrafter(target, 3, "above", coupled=True),
    "prompt-lookup": lambda target: PromptLookupDrafter(target, length=3),
}


def p_value(pipe, target, facts, method, kind, given=()):
    """Of two tokens of many pictures, after those ``given``, against their exact probabilities."""
    prompt = prompt_of(target, pipe, [PROMPTS[1]] * ROWS)
    uniforms = Uniforms.from_seeds(range(ROWS))
    count = 2 + len(given)
    if DRAFTERS[method] is None:
        steps = decode_plain(target, prompt, count, uniforms)
    else:
        steps = decode(target, DRAFTERS[method](target), Recursive(), prompt, count, uniforms)
    *_, end = steps
    one = prompt_of(facts, pipe, [PROMPTS[1]])
    some = pictures_of(facts)
    if not torch.isin(end.tokens[:, :count], torch.tensor(some)).all():
        return 0.0  # what may not be drawn
    first = reference(facts, one, 0, list(given), kind)[some]
    after = [reference(facts, one, 0, [*given, token], kind)[some] for token in some]
    begun = (end.tokens[:, : len(given)] == torch.tensor(given)).all(-1)
    drawn = end.tokens[begun][:, len(given) : count].contiguous()
    pairs = torch.searchsorted(torch.tensor(some), drawn)
    probs = (first[:, None] * torch.stack(after)).flatten()
    return sampling.p_value(probs, pairs[:, 0] * len(some) + pairs[:, 1])


class Swapped(Guidance):
    """Leads away from the prompt."""

    def mix(self, logits, positions, prompt):
        return super().mix(logits.roll(len(logits) // 2, 0), positions, prompt)


def twins(pipe, kind, exact):
    """Targets that are wrong in one thing each."""
    everything = torch.ones_like(exact.allowed.masks[0])
    found = []
    if everything.sum() > exact.allowed.masks[0].sum():
        forgotten = AllowedTokens.everywhere(everything)
        found.append(target_of(pipe, kind, kind.tested, allowed=forgotten))
    if kind.places is None:
        found += [target_of(pipe, kind, kind.tested, Swapped), target_of(pipe, kind, 1.0)]
    else:
        counted = torch.arange(exact.length).expand(3, -1)  # as those of texts
        turned = exact.layout.places[[0, 2, 1]]
        found += [target_of(pipe, kind, 1.0, places=x) for x in (turned, counted)]
    return found


DRAWN = [*product(["janus"], ["sjd", "prompt-lookup"]), ("emu3", "sjd"), ("glm_image", "sjd")]
DRAWN += product(["anole"], ["ar", "sjd, coupled"])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), DRAWN, indirect=["kind"])
@torch.no_grad()
def test_samples_follow_the_models_own_distribution(pipe, kind, method):
    """And those of broken twins do not."""
    exact = target_of(pipe, kind, kind.tested)
    assert p_value(pipe, exact, exact, method, kind) > 1e-3
    # with grids the first token drawn stands where it would in a text; the second round couples
    begin = reference(exact, prompt_of(exact, pipe, [PROMPTS[1]]), 0, [], kind)
    given = [int(begin.argmax())]
    assert p_value(pipe, exact, exact, method, kind, given) > 1e-3
    if kind.places is None:
        given = []
    for twin in twins(pipe, kind, exact):
        assert p_value(pipe, twin, exact, method, kind, given) < 1e-6


def test_pictures_are_those_of_the_models_own_decoder(pipe, kind):
    seed = torch.Generator().manual_seed(0)
    seeds = [further(one) for one in sample_generators(2, pipe.device, seed)]
    given = STEPS if pipe.facts.paints else {}
    options = dict(method="sjd", generator=torch.Generator().manual_seed(0), output_type="uint8")
    out = pipe(PROMPTS, **sized(kind), **given, **options)
    assert out.images.shape == (2, *kind.size, 3)
    with torch.no_grad():
        wanted = kind.pixels(pipe, out, kind.size, seeds)
    pixels = (127.5 * wanted + 128).clamp(0, 255)
    assert (torch.tensor(out.images).float() - pixels).abs().max() <= 1.01
    assert len(np.unique(out.images)) > 10


def test_each_prompt_is_led_away_from_its_own(pipe, kind):
    if kind.tested == 1:
        return
    given = dict(method="sjd", output_type="latent", temperature=0, cfg=kind.tested, **sized(kind))
    negatives = ["red barn hill", "tree"]
    many = pipe(PROMPTS, negative_prompt=negatives, num_images_per_prompt=2, **given).tokens
    for i, (prompt, negative) in enumerate(zip(PROMPTS, negatives, strict=True)):
        alone = pipe(prompt, negative_prompt=negative, **given).tokens[0]
        assert (many[2 * i : 2 * i + 2] == alone).all()
    assert not torch.equal(many, pipe(PROMPTS, num_images_per_prompt=2, **given).tokens)


def test_a_saved_model_draws_the_same_pixels(pipe, kind, tmp_path):
    """Also by a decoder or a diffusion part that is in files of its own."""
    given = dict(generator=torch.Generator().manual_seed(0), output_type="uint8", **sized(kind))
    given |= STEPS if pipe.facts.paints else {}
    wanted = pipe("blue tree", **given).images
    for place in ("saved", "again"):
        pipe.save_pretrained(tmp_path / place)
        pipe = opened(tmp_path / place)
        given["generator"].manual_seed(0)
        assert (pipe("blue tree", **given).images == wanted).all()
    pipe.save_pretrained(pipe.folder)  # where it is


@pytest.mark.parametrize("name", ["emu3", "janus"])
def test_the_sampling_of_a_generation_config_is_the_usual_one(name, tmp_path):
    kind = KINDS[name]
    kind.save(tmp_path)
    file = tmp_path / "generation_config.json"
    known = json.loads(file.read_text())
    given = dict(generator=torch.Generator().manual_seed(0), output_type="latent", **sized(kind))
    plain = opened(tmp_path)(PROMPTS[:1], **given)
    file.write_text(
        json.dumps(known | dict(do_sample=True, temperature=0.7, top_k=3, guidance_scale=2.0))
    )
    pipe = opened(tmp_path)
    given["generator"].manual_seed(0)
    out = pipe(PROMPTS[:1], **given)
    settings = out.certificate.settings
    assert (settings["temperature"], settings["top_k"], settings["cfg"]) == (0.7, 3, 2.0)
    given["generator"].manual_seed(0)
    said = opened(tmp_path)(PROMPTS[:1], temperature=0.7, top_k=3, cfg=2.0, **given)
    assert torch.equal(out.tokens, said.tokens) and not torch.equal(out.tokens, plain.tokens)


def test_seeds_prompts_and_numbers_of_pictures(pipe, kind):
    """A picture does not depend on the others of its batch."""
    seeds = [torch.Generator().manual_seed(i) for i in range(4)]
    given = dict(method="sjd", output_type="latent", num_images_per_prompt=2, **sized(kind))
    out = pipe(PROMPTS, generator=seeds, batch_size=3, **given)
    alone = pipe(PROMPTS[1], generator=[torch.Generator().manual_seed(i) for i in (2, 3)], **given)
    assert torch.equal(out.tokens[2:], alone.tokens) and len(out.tokens.unique(dim=0)) == 4


def test_callbacks_see_the_pictures_so_far_and_may_end_them(kind, pipe):
    """As those of other families; pixels that a diffusion paints have no preview."""
    given = dict(prompt=PROMPTS, seed=[1, 2], method="sjd", **sized(kind))
    given |= STEPS if pipe.paints else {}
    whole = pipe(**given)
    seen = []

    def look(pipe, step, fewest, state):
        tokens = state["tokens"]
        assert torch.equal(tokens[tokens >= 0], whole.tokens[tokens >= 0])
        if not pipe.paints:
            seen.append(pipe.decode_tokens(tokens).numpy())
        tokens.zero_()

    assert torch.equal(pipe(**given, callback_on_step_end=look).tokens, whole.tokens)
    for last, image in zip(seen[-1] if seen else [], whole.images, strict=not pipe.paints):
        assert (last == np.asarray(image)).all()

    def stop(pipe, step, fewest, state):
        pipe._interrupt = True

    cut = pipe(**given, callback_on_step_end=stop)
    assert len(cut.images) == 2 and all(record["interrupted"] for record in cut.records)
    assert cut.images[0].size == whole.images[0].size and (cut.tokens < 0).any()
    assert torch.equal(pipe(**given).tokens, whole.tokens)
