"""On a GPU, where there is one: the same promises as on the CPU, on the shipped model."""

import warnings

import pytest
import torch

from specmm import methods
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def pipe():
    made = LlamaGenPipeline.from_pretrained("pocket/llamagen", torch_dtype=torch.float32).to("cuda")
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize(
    "method", [methods.SJD(), methods.Speculative(), methods.Eagle()], ids=lambda m: m.name
)
def test_greedy_equals_plain_token_for_token(pipe, method):
    options = {"classes": ["heart"], "temperature": 0.0, "output_type": "latent"}
    seeded = [torch.Generator("cuda").manual_seed(0)]
    assert torch.equal(
        pipe(method="ar", generator=seeded, **options).tokens,
        pipe(method=method, generator=seeded, **options).tokens,
    )


def test_relaxed_run_is_bounded(pipe):
    out = pipe(
        classes=["heart"], method="lantern++", generator=torch.Generator("cuda").manual_seed(0)
    )
    assert out.certificate.kind == "bounded" and out.stats.tau > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "method",
    [methods.AR(), methods.SJD(), methods.Speculative(), methods.Eagle(), methods.LanternPP()],
    ids=lambda m: m.name,
)
def test_captured_rounds_give_the_tokens_of_uncaptured_ones(pipe, method, temperature):
    """``compiled=True`` on a GPU is one graph a round: for four pictures in two rows."""

    def drawn(compiled):
        seeded = [torch.Generator("cuda").manual_seed(i) for i in range(4)]
        options = {"temperature": temperature, "batch_size": 2, "output_type": "latent"}
        given = {"method": method, "generator": seeded, "compiled": compiled}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what cannot be captured is played with a warning
            return pipe(classes=["heart", "arrow", "time", "sport"], **given, **options)

    plain, captured = drawn(False), drawn(True)
    assert torch.equal(plain.tokens, captured.tokens) and all(captured.compiled)


def test_auto_measures_and_draws(pipe):
    out = pipe(classes=["heart"], method="auto", generator=torch.Generator("cuda").manual_seed(0))
    assert out.certificate.kind == "exact"
