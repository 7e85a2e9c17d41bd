"""On a GPU, where there is one: the same promises as on the CPU, on the shipped model."""

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
