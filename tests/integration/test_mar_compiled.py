"""Compiled heads of MAR by the pipeline and the command line: the vectors of single operators, what
is told as compiled, and what is refused.
"""

import json

import pytest
import torch

from specmm import methods
from specmm.choose import when_compiled
from specmm.cli.generate import generate
from specmm.image_ar.pipeline import ImagePipeline
from tests.integration.test_mar_pipeline import pipeline, seeds

ONE_EACH = 36  # iterations of one token


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe():
    return quiet(pipeline())


@pytest.fixture(scope="module")
def trained():
    """What is not trained draws ever larger vectors, and rounding with them."""
    return quiet(ImagePipeline.from_pretrained("pocket/mar", dtype="float32"))


def draw(pipe, method, compiled, count=1, **options):
    given = dict(num_iter=ONE_EACH, head_steps=20, temperature=0.9, output_type="latent")
    given |= dict(method=method, compiled=compiled, generator=seeds(*range(count)))
    return pipe([1] * count, **given | options)


WAYS = {
    "exact, two, guided": (methods.CSpD(window=6), 2, dict(cfg=2.0)),
    "ar, several at a time": (methods.AR(), 1, dict(num_iter=9)),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.slow
def test_vectors_are_those_of_single_operators(trained, name, traced):
    method, count, options = WAYS[name]
    options = dict(head_steps="ddim10") | options
    plain, quick = (draw(trained, method, way, count, **options) for way in (False, True))
    assert (plain.compiled, quick.compiled) == ([False] * count, [True] * count)
    torch.testing.assert_close(quick.tokens, plain.tokens, atol=1e-3, rtol=1e-3)
    assert quick.stats.head_calls == plain.stats.head_calls
    assert quick.certificate == plain.certificate and quick.method == plain.method


@pytest.mark.slow
def test_auto_compiles_once_it_pays(pipe, traced, tmp_path, monkeypatch):
    """Of five in batches of two: not the first batch, which is timed, nor the smaller last one."""
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path))
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    out = draw(pipe, methods.AR(), "auto", 5, batch_size=2, head_steps=5)
    assert out.compiled == [False, False, True, True, False]
    assert draw(pipe, methods.CSpD("release"), "auto", 2, num_iter=6).compiled == [False] * 2


@pytest.mark.slow
def test_the_command_line_compiles(pipe, traced, tmp_path):
    folder = tmp_path / "mar"
    folder.mkdir()
    pipe.save_pretrained(folder)
    given = dict(seed=1, out=tmp_path / "out", dtype="float32")  # six iterations, of few tokens
    generate(str(folder), ["heart"], method="ar", compile_all=True, **given)
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["compiled"] is True and run["compiled_pictures"] == [True]


@pytest.mark.slow
def test_half_precision_is_told(traced):
    half = quiet(pipeline().to(torch.bfloat16))
    out = draw(half, methods.AR(), True, head_steps=5)
    assert out.compiled == [True] and out.tokens.dtype == torch.float32
    assert out.certificate.kind == "exact" and out.certificate.settings["dtype"] == "bfloat16"


@pytest.mark.slow
def test_a_head_that_is_not_finite_stops_its_program(traced):
    broken = pipeline()
    broken.transformer.head.final_layer.linear.bias.data[:] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        draw(broken, methods.CSpD(), True, head_steps=5)


@pytest.mark.slow
def test_moved_networks_get_programs_of_their_own(pipe, traced):
    made = pipeline()
    draw(made, methods.AR(), True, head_steps=5)
    before = made.programs
    made.to(torch.float32)
    assert made.programs is not before


REFUSED = [
    (methods.CSpD("release"), {}, "an exact cspd, got cpu"),
    (methods.AR(), dict(solver="ddim"), "got cpu, 'ddim'"),
    (methods.CSpD(), dict(num_iter=6), r"\(with cspd 1 a picture\), got up to 9 in each of 1 pic"),
    (methods.CSpD(), dict(num_iter=9), "got up to 6 in each of 1 pictures: give a larger num_iter"),
    (methods.AR(), dict(count=9), "at most 8 tokens a batch"),
]


@pytest.mark.parametrize(("method", "options", "message"), REFUSED)
def test_what_has_no_programs(pipe, method, options, message):
    with pytest.raises(ValueError, match=message):
        draw(pipe, method, True, **options | dict(batch_size=9))


def test_tables_that_are_too_large_have_no_programs(pipe, monkeypatch):
    monkeypatch.setattr("specmm.image_ar.continuous.diffusion_head.TABLE_LIMIT", 100)
    with pytest.raises(ValueError, match="give a larger num_iter or a smaller batch_size"):
        draw(pipe, methods.AR(), True)
