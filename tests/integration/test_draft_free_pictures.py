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


@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_one_after_another_are_plain_decoding(draw, temperature):
    plain = draw("ar", temperature=temperature)
    whole = draw(methods.ZipAR(window=99), temperature=temperature)
    assert torch.equal(whole.tokens, plain.tokens) and whole.certificate.kind == "exact"
    narrow = draw(methods.ZipAR(window=1), temperature=temperature)
    assert narrow.stats.tau > 1.5 and not torch.equal(narrow.tokens, plain.tokens)
    assert str(narrow.certificate).startswith("heuristic: rows begin 1 tokens after")


def test_rows_in_parallel_do_not_depend_on_the_batch(draw):
    method = methods.ZipAR(window=2)
    together = draw(method).tokens
    assert len(together.unique(dim=0)) == 3
    assert torch.equal(draw(method, batch_size=2).tokens, together)
    for i in range(3):
        one = slice(i, i + 1)
        assert torch.equal(draw(method, one).tokens, together[one])


def test_the_callback_hears_of_every_round(draw):
    counts: list[int] = []
    out = draw(
        methods.ZipAR(window=2), callback_on_step_end=lambda pipe, i, n, state: counts.append(n)
    )
    assert counts == sorted(counts) and counts[-1] == out.tokens.shape[1]


@pytest.mark.parametrize("k", [0, 10])
def test_groups_say_what_they_cost(draw, k):
    out = draw(methods.GSD(window=4, gap=0.5, k=k))
    assert out.certificate.kind == "bounded" and 0 < out.certificate.tv < 1
    greedy = draw(methods.GSD(window=4, k=k), temperature=0)
    assert greedy.certificate.kind == "exact"
    assert torch.equal(greedy.tokens, draw("ar", temperature=0).tokens)


def test_mistakes_are_told(draw):
    for method, said in (
        (methods.ZipAR(window=0), "window must be at least 1 token, got 0"),
        (methods.GSD(window=4, k=10**6), "k must be in"),
        (methods.GSD(window=4, gap=2.0), "span must be at least 0 and gap in"),
    ):
        with pytest.raises(ValueError, match=said):
            draw(method)
    with pytest.raises(ValueError, match="compiled=True needs"):
        draw(methods.ZipAR(), compiled=True)
