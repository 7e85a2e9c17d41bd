"""On a GPU, where there is one: MAR as graphs, on the shipped model."""

import pytest
import torch

from specmm import methods
from specmm.image_ar.continuous.pipeline import MARPipeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def pipe():
    made = MARPipeline.from_pretrained("pocket/mar", torch_dtype=torch.float32).to("cuda")
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("iterations", [16, 256])
def test_graphs_give_the_vectors_of_uncaptured_operators(pipe, iterations):
    """Twice: recorded, and replayed."""

    def drawn(compiled):
        seeded = [torch.Generator("cuda").manual_seed(i) for i in range(2)]
        return pipe(
            classes=["heart", "arrow"],
            method=methods.AR(),
            num_iter=iterations,
            head_steps="ddim10",
            generator=seeded,
            compiled=compiled,
            output_type="latent",
        )

    plain, first, second = drawn(False), drawn(True), drawn(True)
    assert torch.equal(first.tokens, second.tokens) and all(first.compiled)
    torch.testing.assert_close(first.tokens, plain.tokens, atol=1e-3, rtol=1e-3)
    assert first.stats.head_calls == plain.stats.head_calls
