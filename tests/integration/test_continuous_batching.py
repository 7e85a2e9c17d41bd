"""Rows that are taken over by waiting samples: the samples are those of fresh batches, and no row
idles.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from specmm import methods
from specmm.core import randomness
from specmm.core.continuous_batching import Queue
from specmm.core.decode import decode
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.image_ar.tokens import pipeline
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.programs.batch_invariant import batch_invariant
from specmm.verify import Recursive

NAMES = ("heart", "time", "country-flag")
CONTINUOUS = (
    methods.Speculative(),
    methods.Speculative(tree=(2, 2, 1), rule="recursive", rejected_weight=0.0),
    methods.LanternPP(),
    methods.LanternPP(residual="release"),
    methods.SJD(window=5),
    methods.SJD(window=5, init="last"),
    methods.SJD(window=5, coupled=False),
    methods.GSD(window=5, coupled=True),
)


def drawn(pipe: LlamaGenPipeline, count: int, batch: int, **options: Any) -> Any:
    generators = [torch.Generator().manual_seed(50 + s) for s in range(count)]
    with batch_invariant():
        return pipe(
            [NAMES[i % 3] for i in range(count)], generator=generators, batch_size=batch, **options
        )


@pytest.mark.parametrize(("number", "cfg"), [*((i, 2.5) for i in range(len(CONTINUOUS))), (3, 1.0)])
def test_pictures_are_those_of_fresh_batches(make_tiny, number, cfg, monkeypatch):
    pipe, method = make_tiny(), CONTINUOUS[number]
    pipe.set_progress_bar_config(disable=True)
    assert method.drafts and method.can_refill
    continuous = drawn(pipe, 11, 3, method=method, cfg=cfg, output_type="latent")
    monkeypatch.setattr(pipeline, "TURNS", 1)
    apart = drawn(pipe, 11, 3, method=method, cfg=cfg, output_type="latent")
    assert torch.equal(continuous.tokens, apart.tokens)
    found = (continuous.stats.tokens, continuous.stats.rounds)
    assert found == (apart.stats.tokens, apart.stats.rounds)
    assert continuous.stats.kept == apart.stats.kept
    assert continuous.stats.batch_rounds < apart.stats.batch_rounds


def test_a_bar_of_ones_own_moves(make_tiny, monkeypatch):
    """Of ``pipe.progress_bar`` only ``update`` is needed."""
    monkeypatch.setattr("specmm.image_ar.calls.OFTEN", 0)
    pipe, moves = make_tiny(), []

    class Bar(nullcontext):
        def __enter__(self) -> "Bar":
            return self

        def update(self, more: float) -> None:
            moves.append(more)

    pipe.progress_bar = lambda total: Bar()
    drawn(pipe, 7, 2, method="speculative")
    assert sum(moves) == 7 and {*moves} > {0, 0.125} and min(moves) == 0


def test_what_cannot_flow_is_drawn_batch_by_batch(make_tiny):
    pipe = make_tiny()
    pipe.set_progress_bar_config(disable=True)
    others = (methods.AR(), methods.Eagle(), methods.Auto(), methods.Lantern())
    assert not any(method.drafts and method.can_refill for method in others)
    out = drawn(pipe, 5, 2, method="eagle")
    assert len(out.images) == 5 and len(out.tokens) == 5


def test_padded_captions():
    torch.manual_seed(0)
    config = GPTConfig(
        32, 2, 2, 24, 16, model_type="t2i", cls_token_num=3, caption_dim=4, multiple_of=8
    )
    model = Transformer(config)
    model.output.weight.data.normal_(std=0.4)
    features = torch.randn(5, 3, 4)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 1, 1], [1, 1, 1]])
    prompt = Prompt(features, mask)

    def run(first: slice, queue: Queue | None, seeds: list[int]) -> torch.Tensor:
        target = LlamaGenTarget(model, Guidance(2.0), Processor())
        drafter, uniforms = JacobiDrafter(target, 4), Uniforms.from_seeds(seeds)
        *_, end = decode(target, drafter, Recursive(), prompt[first], 16, uniforms, queue=queue)
        return torch.stack(queue.tokens) if queue else end.tokens[:, :16]

    queue = Queue(
        lambda i: prompt[i : i + 1], [torch.Generator().manual_seed(s) for s in range(5)], 2
    )
    with batch_invariant():
        assert torch.equal(run(slice(2), queue, [0, 1]), run(slice(None), None, list(range(5))))


def test_a_row_draws_from_the_generator_it_is_given(monkeypatch):
    monkeypatch.setattr(randomness, "BLOCK", 8)
    uniforms = Uniforms.from_seeds([1, 2])
    other = torch.rand(60, generator=torch.Generator().manual_seed(2))
    fresh = torch.rand(60, generator=torch.Generator().manual_seed(3))
    seen = [uniforms.draw(5)[1], uniforms.draw(2)[1]]
    first = uniforms.start_row(0, torch.Generator().manual_seed(3))
    assert torch.equal(first, fresh[:1])
    row = []
    for count in (1, 4, 20, 3):
        both = uniforms.draw(count)
        row.append(both[0])
        seen.append(both[1])
    assert torch.equal(torch.cat(row), fresh[1:29]) and torch.equal(torch.cat(seen), other[:35])
    again = torch.rand(20, generator=torch.Generator().manual_seed(4))
    # nothing is left of the sample before
    first = uniforms.start_row(0, torch.Generator().manual_seed(4))
    assert torch.equal(torch.cat([first, uniforms.draw(19)[0]]), again)
