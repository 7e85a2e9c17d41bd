"""The shipped model: it loads, fits the limits, and keeps every promise the methods make, on real
weights.
"""

import itertools

import pytest
import torch

from specmm import methods, zoo
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline

LIMIT, ALL = 16 * 2**20, 80 * 2**20  # bytes a file and in all (DESIGN.md)


@pytest.fixture(scope="module")
def pipe():
    made = LlamaGenPipeline.from_pretrained("pocket/llamagen", torch_dtype=torch.float32)
    made.set_progress_bar_config(disable=True)
    return made


def draw(pipe, method, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    given = dict(classes=["heart", "time"], generator=generator, output_type="latent")
    return pipe(method=method, **given, **options)


FACTS = {"description", "data", "licence", "seed", "steps", "loss", "command", "metrics"}


def test_models_fit_the_limits_and_have_a_card():
    sizes = [f.stat().st_size for f in zoo.POCKET.rglob("*.safetensors")]
    assert max(sizes) <= LIMIT and sum(sizes) <= ALL
    for name in ("llamagen", "coder", "llava"):
        assert zoo.card(f"pocket/{name}").keys() >= FACTS
        assert (zoo.POCKET / name / "README.md").is_file()


def test_a_picture_has_at_least_144_tokens(pipe):
    assert pipe.transformer.config.block_size >= 144


def test_greedy_equals_plain_token_for_token(pipe):
    plain = draw(pipe, "ar", temperature=0.0)
    for method in ("sjd", "speculative", "eagle"):
        fast = draw(pipe, method, temperature=0.0)
        assert torch.equal(plain.tokens, fast.tokens)
        assert fast.certificate.kind == "exact" and fast.stats.rounds < plain.stats.rounds


@pytest.mark.parametrize(("method", "least"), [("speculative", 1.5), ("eagle", 1.0)])
def test_drafts_are_accepted_on_the_real_model(pipe, method, least):
    out = draw(pipe, method)
    assert out.stats.tau > least and out.certificate.kind == "exact"


@pytest.mark.slow
def test_a_larger_lambda_accepts_more_and_spends_more(pipe):
    # a picture's tau is noisy
    many = {"classes": list(range(12)), "batch_size": 12, "output_type": "latent"}
    rules = [methods.LanternPP(lambda_=x, k=40) for x in (1.0, 4.0, 40.0)]
    runs = [pipe(method=rule, generator=torch.Generator().manual_seed(1), **many) for rule in rules]
    assert runs[0].certificate.tv < 1e-6, "lambda 1 borrows nothing"
    for less, more in itertools.pairwise(runs):
        assert less.certificate.tv < more.certificate.tv and less.stats.tau < more.stats.tau


def test_relaxed_greedy_decodes_and_says_so(pipe):
    out = draw(pipe, "lantern++", temperature=0.0)
    assert out.certificate.kind == "bounded" and out.stats.tau > 1.5


def test_pictures_are_pictures(pipe):
    out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0), output_type="uint8")
    assert out.images.shape == (1, 48, 48, 3) and out.images.std() > 10
    assert out.images[0, 0].mean() > 200, "emoji stand on white"
