"""On a GPU, where there is one: graphs of texts and of answers about pictures."""

import warnings

import pytest
import torch

from benchmarks.gpu.pocket import CODE, QUESTION, squares
from specmm.text.pipeline import TextPipeline
from specmm.vlm.pipeline import VQAPipeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TAKEN = [
    (TextPipeline, "pocket/coder", "ar", 0.0),
    (TextPipeline, "pocket/coder", "ar", 0.8),
    (TextPipeline, "pocket/coder", "block", 0.0),
    (TextPipeline, "pocket/coder", "block", 0.8),
    (VQAPipeline, "pocket/llava", "ar", 0.8),
    (VQAPipeline, "pocket/llava", "msd", 0.0),
    (VQAPipeline, "pocket/llava", "msd", 0.8),
]


def tokens_of(pipe, method, temperature, compiled, call):
    """Tokens of a call: of another text, or another picture, each time."""
    given = [CODE[call]] if isinstance(pipe, TextPipeline) else [[squares(call)], [QUESTION]]
    options = {"max_new_tokens": 48 + 8 * call, "seed": call}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what cannot be captured is played with a warning
        out = pipe(*given, method=method, temperature=temperature, compiled=compiled, **options)
    assert bool(out.compiled) == compiled
    return [ids.tolist() for ids in out.tokens]


@pytest.mark.parametrize(("kind", "name", "method", "temperature"), TAKEN)
def test_graphs_give_the_tokens_of_uncaptured_rounds(kind, name, method, temperature):
    """The first call records, later ones take its graph over."""
    pipe = kind.from_pretrained(name, torch_dtype=torch.float32).to("cuda")
    for call in range(3):
        plain, found = (tokens_of(pipe, method, temperature, way, call) for way in (False, True))
        assert found == plain
    recorded = pipe.kept.newest.play.recorded
    tokens_of(pipe, method, temperature, True, 3)
    assert recorded is not None and pipe.kept.newest.play.recorded is recorded
