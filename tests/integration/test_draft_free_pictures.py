"""Methods of image tokens without a drafter, through the pipeline: what they draw and claim."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specmm import methods
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline

NAMES = ["heart", "time", "country-flag"]


@pytest.fixture
def draw(make_tiny: Callable[..., LlamaGenPipeline]) -> Callable[..., Any]:
    pipe = make_tiny()
    pipe.set_progress_bar_config(disable=True)

    def drawn(method: Any, some: slice = slice(None), **options: Any) -> Any:
        seeds = [torch.Generator().manual_seed(i) for i in range(3)][some]
        given = dict(cfg=1.5, output_type="latent") | options
        return pipe(NAMES[some], generator=seeds, method=method, **given)

    return drawn


@pytest.mark.parametrize("k", [0, 10])
def test_groups_say_what_they_cost(draw, k):
    out = draw(methods.GSD(window=4, gap=0.5, k=k))
    assert out.certificate.kind == "bounded" and 0 < out.certificate.tv < 1
    greedy = draw(methods.GSD(window=4, k=k), temperature=0)
    assert greedy.certificate.kind == "exact"
    assert torch.equal(greedy.tokens, draw("ar", temperature=0).tokens)


def test_mistakes_are_told(draw):
    for method, said in (
        (methods.GSD(window=4, k=10**6), "k must be in"),
        (methods.GSD(window=4, gap=2.0), "span must be at least 0 and gap in"),
    ):
        with pytest.raises(ValueError, match=said):
            draw(method)
