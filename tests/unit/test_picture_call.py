"""The one call of all picture pipelines, by a family that says no more than it must."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from specmm import methods
from specmm.core.stats import Certificate, Stats
from specmm.image_ar.calls import SoFar
from specmm.image_ar.shared import Drawn, PicturePipeline, alone


@dataclass(frozen=True)
class GreySettings:
    cfg: float = 1.0
    classes: tuple[str, ...] = ()


class GreyPictures(PicturePipeline[methods.ContinuousMethod]):
    """A picture is its class, or 100 more where it is compiled."""

    family = "grey"
    registry = methods.CONTINUOUS
    sampling_options = ("cfg",)

    def __init__(self):
        super().__init__(GreySettings(), "ar", "grey")
        network = torch.nn.Linear(1, 1)
        network.config = SimpleNamespace(num_classes=9)
        self.register_modules(transformer=network)
        self.batches = []

    def __call__(self, classes=None, num_images_per_prompt=1, generator=None, method=None, cfg=None,
                 batch_size=8, output_type="uint8", callback_on_step_end=None, compiled=False, *,
                 class_labels=None, guidance_scale=None, callback_on_step_end_tensor_inputs=None,
                 return_dict=True, seed=None, **elsewhere):  # fmt: skip
        return self.called(locals())

    def target(self, cfg=None):
        return f"cfg {cfg}"

    def quick(self, target, method, batch):
        return 100

    def claimed(self, target):
        return {"sampled": target}

    def moved(self):
        self.batches.clear()

    def pixels(self, latents):
        return latents[:, :, None, None].expand(-1, 1, 1, 3).to(torch.uint8)

    def draw(self, batch):
        self.batches.append((batch.of.tolist(), batch.on, len(batch.generators)))
        tokens = batch.of[:, None] + (batch.on if batch.on != batch.target else 0)
        ended = batch.watch(0, SoFar, 1, len(tokens) / 2, tokens)
        stats = Stats(tokens.numel(), len(tokens), 1)
        claim = Certificate("exact", "as it is", 0.0)
        return Drawn(tokens, tokens, stats, claim, whole=not ended)


@pytest.fixture
def pipe():
    made = alone(GreyPictures)()
    made.set_progress_bar_config(disable=True)
    return made


def test_batches_follow_one_another(pipe):
    seen = []
    out = pipe([1, "2"], 2, batch_size=3, guidance_scale=2.0,
               callback_on_step_end=lambda *given: seen.append(given[1:3]))  # fmt: skip
    assert pipe.batches == [([1, 1, 2], "cfg 2.0", 3), ([2], "cfg 2.0", 1)]
    assert out.images[:, 0, 0, 0].tolist() == out.tokens[:, 0].tolist() == [1, 1, 2, 2]
    assert out.stats.tokens == 4 and out.method == "ar" and seen == [(0, 1)] * 2
    assert out.certificate.settings == {"sampled": "cfg 2.0"} and out.compiled == [False] * 4


def test_a_smaller_last_batch_is_not_compiled(pipe):
    out = pipe([1, 2, 3], batch_size=2, compiled=True)
    assert out.tokens[:, 0].tolist() == [101, 102, 3] and out.compiled == [True, True, False]
    assert pipe([4], batch_size=2, compiled=True).compiled == [True], "it is all that there is"


def test_pixels_are_not_made_for_nobody(pipe, monkeypatch):
    monkeypatch.setattr(GreyPictures, "pixels", None)
    out = pipe([1], output_type="latent")
    assert out.images is out.tokens


def test_layers_that_scale_by_the_whole_forward_are_refused(pipe):
    network = torch.nn.Sequential(pipe.transformer, torch.nn.LayerNorm(1))
    network.config = pipe.transformer.config
    pipe.transformer = torch.ao.quantization.quantize_dynamic(network, {torch.nn.Linear})
    with pytest.raises(ValueError, match=r"grey must have layers whose .* a quantised Linear at 0"):
        pipe(classes=3)
