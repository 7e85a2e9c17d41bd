"""Training for a few steps: losses fall, runs resume where they stopped, CoDe's pair learns what it
should.
"""

import shutil

import numpy as np
import pytest
import torch

from recipes import var as recipe
from recipes.emoji import EmojiSet
from recipes.training.var import (
    Examples,
    distil_from,
    token_loss,
    train_drafter,
    train_refiner,
    train_var,
)
from recipes.training.vqvae import encode_pictures, train_vqvae
from specmm.core.randomness import seeded
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import VARSettings
from specmm.image_ar.scales.var import VARConfig
from specmm.image_ar.scales.vqvae import MultiScaleQuantizer, VQVAEConfig
from specmm.recipes.recipe import train

SIDES = (1, 2, 3)
SHARED = dict(vocab_size=16, z_channels=4, num_classes=3, patch_nums=SIDES)
CONFIG = VARConfig(1, 32, 2, **SHARED)
QUICK = dict(batch=4, compiled=False)


@pytest.fixture(scope="module")
def pictures():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (3, 6, 6, 3), generator=generator, dtype=torch.uint8).repeat(
        4, 1, 1, 1
    )


@pytest.fixture(scope="module")
def examples():
    with seeded(0):
        quantizer = MultiScaleQuantizer(VQVAEConfig(16, 4, patch_nums=SIDES))
    tokens = torch.randint(16, (3, 1, 14), generator=torch.Generator().manual_seed(1)).repeat(
        4, 2, 1
    )
    return Examples(tokens, torch.arange(3).repeat(4), quantizer, 3)


def first_and_last(out):
    lines = (out / "loss.csv").read_text().splitlines()[1:]
    return float(lines[0].split(",")[1]), float(lines[-1].split(",")[1])


def test_tokenizer_learns_and_encodes(pictures, tmp_path):
    config = VQVAEConfig(16, 4, 32, (1, 2), 1, SIDES)
    model = train_vqvae(pictures, config, tmp_path, steps=21, lr=2e-3, **QUICK)
    first, last = first_and_last(tmp_path)
    assert last < first
    tokens = encode_pictures(model, pictures[:3])
    assert tokens.shape == (3, 2, 14)
    again = torch.cat(model.encode(pictures[:3].permute(0, 3, 1, 2).float() / 127.5 - 1), 1)
    assert torch.equal(tokens[:, 0], again)


def test_var_learns(examples, tmp_path):
    model = train_var(examples, CONFIG, tmp_path, steps=41, lr=5e-3, **QUICK)
    first, last = first_and_last(tmp_path)
    assert first == pytest.approx(np.log(16), abs=0.3) and last < 0.9 * first and not model.training


def test_a_resumed_run_equals_an_unbroken_one(examples, tmp_path, monkeypatch):
    whole = train_var(examples, CONFIG, tmp_path / "whole", steps=6, **QUICK)
    calls = []

    def stop(self, i, *rest, batch=Examples.batch):
        if i == 3:
            raise KeyboardInterrupt
        calls.append(i)
        return batch(self, i, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Examples, "batch", stop)
        patch.setattr("specmm.recipes.loop.time.monotonic", iter(range(0, 10**6, 1000)).__next__)
        with pytest.raises(KeyboardInterrupt):
            train_var(examples, CONFIG, tmp_path / "broken", steps=6, **QUICK)
    resumed = train_var(examples, CONFIG, tmp_path / "broken", steps=6, **QUICK)
    assert calls == [0, 1, 2]
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_losses_look_at_their_scales_only(examples, make):
    model = make.var(0, **SHARED)
    labels, tokens = examples.batch(0, 4, 0)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 16  # the last scale
    coarse = [
        token_loss(model, labels, t, examples.inputs(t, 2), range(2)) for t in (tokens, changed)
    ]
    assert torch.equal(*coarse)
    fine = [
        token_loss(model, labels, t, examples.inputs(t, 3), range(2, 3)) for t in (tokens, changed)
    ]
    assert not torch.equal(*fine)
    assert examples.inputs(tokens, 1).shape == (4, 0, 4)
    assert token_loss(model, labels, tokens, examples.inputs(tokens, 1), range(1)) > 0
    zero = distil_from(model)(model, labels, tokens, examples.inputs(tokens, 3), range(3))
    assert float(zero.detach()) == pytest.approx(0, abs=1e-5)


def test_the_pair_of_code(examples, make, tmp_path):
    large = make.var(0, **SHARED)
    small = make.var(1, **SHARED | {"depth": 1, "embed_dim": 32, "num_heads": 2})
    before = {k: v.clone() for k, v in large.state_dict().items()}
    drafter = train_drafter(large, examples, 2, tmp_path / "drafter", steps=21, lr=1e-3, **QUICK)
    refiner = train_refiner(
        small, large, examples, 2, tmp_path / "refiner", steps=41, lr=5e-3, **QUICK
    )
    assert all(torch.equal(v, large.state_dict()[k]) for k, v in before.items())
    labels, tokens = examples.batch(0, 12, 9)
    inputs = examples.inputs(tokens, 3)
    with torch.no_grad():
        coarse = [
            token_loss(m, labels, tokens, examples.inputs(tokens, 2), range(2))
            for m in (drafter, large)
        ]
        fine = [
            distil_from(large)(m, labels, tokens, inputs, range(2, 3)) for m in (refiner, small)
        ]
    assert coarse[0] < coarse[1] and fine[0] < fine[1]


def test_recipes(pictures, tmp_path, monkeypatch):
    found = EmojiSet(pictures.numpy(), np.arange(3).repeat(4), ["a/b"] * 12, ["x", "y", "z"])
    monkeypatch.setattr(recipe, "emoji", lambda folder: found)
    run = dict(steps=1, batch=2, compile=False, seed=0)
    train("vqvae", codes=16, width=4, sides="1,2,3", out=tmp_path / "vq", **run)
    run["tokenizer"] = tmp_path / "vq"
    train("var", depth=2, dim=32, heads=2, out=tmp_path / "var", **run)
    model, small = str(tmp_path / "var/model"), str(tmp_path / "pair/small")
    shutil.copytree(model, tmp_path / "pair")
    train("var", depth=1, dim=32, heads=2, beside=tmp_path / "pair", out=tmp_path / "small", **run)
    assert len(list((tmp_path / "var").glob("tokens-*.pt"))) == 1
    del run["tokenizer"]
    made = train("code", model=tmp_path / "pair", out=tmp_path / "code", **run)
    pipe = VARPipeline.from_pretrained(tmp_path / "code/model", method="code")
    assert pipe.small is not None and pipe.settings == VARSettings(classes=("x", "y", "z"), n=1)
    drawn = pipe(classes=["y"])
    assert drawn.images[0].size == (6, 6)
    assert drawn.method == "code: n 1: what the models were specialised for"
    assert made["n"] == 1
    with pytest.raises(ValueError, match="n must leave scales to both models, from 1 to 2, got 3"):
        train("code", model=model, small=small, n=3, out=tmp_path / "code", **run)
    with pytest.raises(ValueError, match="must hold a small model"):
        train("code", model=model, n=1, out=tmp_path / "code", **run)
    for sides, message in (
        ("1,x", "whole numbers"),
        ("3,2", "growing sides"),
        ("1,4", "last side must be 6 pixels"),
    ):
        with pytest.raises(ValueError, match=message):
            train("vqvae", codes=16, width=4, sides=sides, out=tmp_path / "bad", **run)
