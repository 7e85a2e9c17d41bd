"""VAR and CoDe as one captured graph: the pipeline's tokens, and nothing on the way that a GPU
would wait for.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specmm import methods
from specmm.core.randomness import Uniforms
from specmm.image_ar.scales.collaborative import code_turns, draw_picture
from specmm.image_ar.scales.pipeline import VARPipeline

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


OPTIONS = [{}, dict(cfg=2.0, top_k=5, top_p=0.9, temperature=0.8)]


@pytest.mark.parametrize("n", [0, 2, 5])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_captured_picture_is_the_pipelines(pipe, n, options):
    turns = code_turns(pipe.transformer, pipe.small, n)
    labels, length = torch.tensor([1, 4, 7]), pipe.transformer.config.schedule.length
    numbers = Uniforms(uniforms(3)).draw(length)
    with NoWaiting():
        given = turns, pipe.vae.quantize, pipe.target(**options), labels, numbers
        tokens, f_hat, _ = draw_picture(*given)
    method = methods.CoDe(n) if n < 5 else methods.AR()
    given = dict(classes=labels.tolist(), generator=uniforms(3), method=method, output_type="uint8")
    wanted = pipe(**options, **given)
    assert torch.equal(tokens, wanted.tokens)
    assert (pipe.decode(f_hat).numpy() == wanted.images).all()


def test_what_waits_is_seen():
    with NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense waits"):
        torch.ones(1).item()


@pytest.mark.parametrize("method", [methods.AR(), methods.CoDe(2)], ids=lambda m: m.name)
@pytest.mark.parametrize("options", OPTIONS)
def test_compiled_pictures_of_a_gpu_are_replayed(pipe, method, options, taped):
    given = {"classes": [1, 4, 2, 0], "method": method, "batch_size": 2, **options}
    plain, found = (
        pipe(generator=uniforms(4), compiled=way, output_type="uint8", **given)
        for way in (False, True)
    )
    assert torch.equal(found.tokens, plain.tokens) and (found.images == plain.images).all()
    assert all(found.compiled) and (taped.records, taped.replays) == (1, 1)
    assert found.certificate == plain.certificate and found.stats.rounds == plain.stats.rounds


def test_logits_that_are_not_finite_are_noticed_after_a_replay(pipe, taped):
    given = {"classes": [1], "method": "ar", "compiled": True, "output_type": "latent"}
    pipe(**given)
    weight = next(pipe.transformer.head.parameters())
    before = weight.detach().clone()
    try:
        weight.data.fill_(float("nan"))
        with pytest.raises(ValueError, match="must be finite"):
            pipe(**given)
    finally:
        weight.data.copy_(before)
    assert taped.replays


def test_another_model_is_another_graph(pipe, small, taped):
    given = {"classes": [1, 2], "method": "ar", "output_type": "latent"}
    first = pipe(generator=uniforms(2), compiled=True, **given)
    pipe.transformer = small
    plain, found = (pipe(generator=uniforms(2), compiled=way, **given) for way in (False, True))
    assert torch.equal(plain.tokens, found.tokens)
    assert not torch.equal(first.tokens, found.tokens) and taped.records == 2
