"""VAR and CoDe as one captured graph: the pipeline's tokens, and nothing on the way that a GPU
would wait for.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.graphs import PictureGraph
from specmm import methods
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.randomness import Uniforms

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


class NoWaiting(TorchDispatchMode):
    """Lets no operator through whose result the host would need before it goes on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not name.startswith(WAITS), f"{name} waits for the GPU"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def pipe(large, small, vqvae):
    made = VARPipeline(large, vqvae, small)
    made.set_progress_bar_config(disable=True)
    return made


def uniforms(count):
    return [torch.Generator().manual_seed(i) for i in range(count)]


@pytest.mark.parametrize("n", [0, 2, 5])
@pytest.mark.parametrize("options", [{}, dict(cfg=2.0, top_k=5, top_p=0.9, temperature=0.8)])
def test_a_captured_picture_is_the_pipelines(pipe, n, options, monkeypatch):
    monkeypatch.setattr(
        "specmm.image_ar.scales.next_scale.check_finite", lambda *_: None
    )  # as while capturing
    graph = PictureGraph(pipe, n, pipe.target(**options))
    labels, length = torch.tensor([1, 4, 7]), pipe.transformer.config.schedule.length
    numbers = Uniforms(uniforms(3)).draw(length)
    with NoWaiting():
        tokens, sums = graph(labels, numbers)
    method = methods.CoDe(n) if n < 5 else methods.AR()
    wanted = pipe(
        classes=labels.tolist(),
        generator=uniforms(3),
        method=method,
        output_type="uint8",
        **options,
    )
    assert torch.equal(tokens, wanted.tokens)
    assert (pipe.decode(sums).numpy() == wanted.images).all()


def test_what_waits_is_seen():
    with NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense waits"):
        torch.ones(1).item()
