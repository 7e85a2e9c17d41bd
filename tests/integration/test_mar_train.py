"""The recipes of MAR, from pictures to a pipeline with a small model beside it (two steps each)."""

import numpy as np
import pytest
import torch

from specmm import methods
from specmm.image_ar.continuous.pipeline import MARPipeline
from specmm.recipes.recipe import train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four pictures of 48 pixels in the file that the emoji are kept in."""
    folder = tmp_path_factory.mktemp("emoji")
    random = np.random.Generator(np.random.PCG64(0))
    names = np.array([f"noto/name-{i}" for i in range(6)])
    images = random.integers(0, 256, (6, 48, 48, 3), dtype=np.uint8)
    np.savez(folder / "emoji48.npz", images=images, labels=np.arange(6), names=names)
    return folder


SIZES = dict(dim=16, depth=1, heads=2, buffer=1, head_width=16, head_depth=1, batch=2)


@pytest.mark.slow
def test_from_pictures_to_a_pipeline(data, tmp_path):
    train("kl", data=data, steps=2, batch=2, channels=4, compile=False, out=tmp_path / "kl")
    given = dict(tokenizer=tmp_path / "kl", data=data, steps=2)
    train("mar", out=tmp_path / "mar", **given, **SIZES)
    model = tmp_path / "mar" / "model"
    train("mar", out=tmp_path / "small", beside=model, **given, **SIZES | dict(dim=8))
    pipe = MARPipeline.from_pretrained(model, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.transformer.config.seq_len == 36 and pipe.small.config.encoder_embed_dim == 8
    how = dict(head_steps=10, num_iter=4, cfg=2.0, generator=torch.Generator().manual_seed(0))
    for method in (methods.CSpD(), methods.CSpD(variant="release")):
        out = pipe(["heart"], method=method, **how)
        assert out.images[0].size == (48, 48)


@pytest.mark.slow
def test_a_small_model_needs_the_targets_autoencoder(data, tmp_path):
    once = dict(data=data, steps=1)
    for name, channels, seed in (("a", 4, 0), ("b", 5, 0), ("c", 4, 1)):
        sizes = dict(channels=channels, batch=1, seed=seed, compile=False)
        train("kl", out=tmp_path / name, **once, **sizes)
    train("mar", tokenizer=tmp_path / "a", out=tmp_path / "mar", **once, **SIZES)
    once["beside"] = model = tmp_path / "mar" / "model"
    for name, said in {"b": "token width must be", "c": "VAE must be"}.items():
        with pytest.raises(ValueError, match=f"drafter's {said}"):
            train("mar", tokenizer=tmp_path / name, out=tmp_path / f"by {name}", **once, **SIZES)
    assert not (model / "small").exists()


def test_halvings_that_do_not_tile_the_picture(data, tmp_path):
    with pytest.raises(ValueError, match="halvings must be from 1 to 4, got 5"):
        train("kl", data=data, halvings=5, steps=1, compile=False, out=tmp_path)
