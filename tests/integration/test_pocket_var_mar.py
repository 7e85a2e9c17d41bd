"""``pocket/var`` and ``pocket/mar`` as a newcomer meets them: pictures, exact methods, seeds, the
command line.
"""

import json

import numpy as np
import pytest
import torch

from specmm import methods
from specmm.cli.generate import generate
from specmm.image_ar.pipeline import ImagePipeline
from tests.commands import refused, succeed


def opened(name):
    pipe = ImagePipeline.from_pretrained(name, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def var():
    return opened("pocket/var")


@pytest.fixture(scope="module")
def mar():
    return opened("pocket/mar")


def draw(pipe, method, classes=("heart", 3), seed=0, **options):
    return pipe(
        list(classes), generator=torch.Generator().manual_seed(seed), method=method, **options
    )


@pytest.mark.slow
def test_batch_invariant_pictures_do_not_depend_on_the_batch(tmp_path):
    """Sixteen, of which rounding would tell one or two apart."""
    words = "generate pocket/var --class heart -n 16 --seed 3 --dtype float32 --batch-invariant"
    made = []
    for batch in ("1", "5", "16"):
        succeed(words, "--batch-size", batch, "--out", tmp_path / batch)
        made.append([file.read_bytes() for file in sorted((tmp_path / batch).glob("*.png"))])
    assert len(made[0]) == 16 and made[0] == made[1] == made[2]
    line = refused(words, "--compile", "--out", tmp_path)
    assert "--batch-invariant needs float32 on a CPU, uncompiled" in line


@pytest.mark.parametrize("method", ["ar", methods.CoDe(5)], ids=str)
def test_scales(var, method):
    out = draw(var, method)
    assert [image.size for image in out.images] == [(48, 48)] * 2 and out.tokens.shape == (2, 274)
    assert out.certificate.kind == ("heuristic" if isinstance(method, methods.CoDe) else "exact")
    assert len(np.unique(np.array(out.images[0]))) > 50  # a picture, not a flat field


def test_the_large_model_knows_the_classes(var):
    """Its own pictures are likelier under their class than under another."""
    tokens = draw(var, "ar", ["heart"] * 4, output_type="latent").tokens
    right, wrong = (var.log_likelihood([name] * 4, tokens).mean() for name in ("heart", "time"))
    assert right > wrong + 0.2


def test_continuous_tokens(mar):
    plain, fast = (draw(mar, m, num_iter=6) for m in ("ar", "cspd"))
    assert fast.certificate.kind == "exact" and fast.images[0].size == (48, 48)
    assert plain.stats.head_calls_per_token == 100 and fast.stats.head_calls_per_token < 35


def test_a_number_of_head_steps_is_spaced_as_the_models_own(mar):
    """At the noisiest step of all, which "25" includes, this head draws vectors of a thousand."""
    few = draw(mar, "ar", num_iter=6, head_steps=25, output_type="latent")
    assert few.certificate.settings["head_steps"] == "ddim25"
    assert few.stats.head_calls_per_token == 25 and few.tokens.abs().max() < 20
    release = draw(mar, "ar", num_iter=6, head_steps="25", output_type="latent")
    assert release.certificate.settings["head_steps"] == "25"
    assert release.tokens.abs().max() > 100
    with pytest.raises(ValueError, match=r"strides 1000 steps evenly, got 60: take 59$"):
        draw(mar, "ar", head_steps=60)


def test_a_continuous_picture_depends_on_its_seed_only(mar):
    def images(*pictures):
        generators = [torch.Generator().manual_seed(seed) for _, seed in pictures]
        options = dict(generator=generators, method="cspd", num_iter=3, output_type="uint8")
        return mar([c for c, _ in pictures], **options).images

    both, alone = images(("heart", 7), (3, 8)), [images(one) for one in (("heart", 7), (3, 8))]
    assert np.abs(both.astype(int) - np.concatenate(alone).astype(int)).max() <= 1


@pytest.mark.parametrize("model", ["pocket/var", "pocket/mar"])
def test_the_command_line(model, tmp_path):
    generate(model, ["heart"], seed=1, out=tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["certificate"]["kind"] == "exact" and len(run["outputs"]) == 1
