"""Compiled rounds and steps: the tokens of the eager ones, the same errors, and what they do not serve."""

import dataclasses
import shutil

import pytest
import torch

from specmm import methods
from specmm.compiled import CompiledRound
from specmm.decode import decode
from specmm.image_ar.tokens.assemble import assemble
from specmm.image_ar.tokens.static import StaticTarget
from specmm.image_ar.tokens.target import Prompt
from specmm.randomness import Uniforms
from tests.integration.conftest import tiny_pipeline

NAMES = ("heart", "time", "heart")
OPTIONS = {
    "ar": (methods.AR(), 1.0),
    "guided tree": (methods.Speculative(tree=(2, 1, 1), hindsight=0.3), 1.5),
    "lantern++": (methods.LanternPP(lambda_=5.0, k=10), 1.0),
    "sjd": (methods.SJD(window=4), 1.0),
}


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline(tokens=16)


def draw(pipe, method, cfg, compiled, batch_size=2, count=3):
    generators = [torch.Generator().manual_seed(i) for i in range(count)]
    return pipe(
        NAMES[:count], generator=generators, method=method, cfg=cfg, batch_size=batch_size, compiled=compiled,
        output_type="latent", temperature=0.8,
    )  # fmt: skip


compiles = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler here")


@compiles
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_eager_rounds(pipe, name):
    """Three pictures in two rows: rows end apart, and the third takes over one of them."""
    method, cfg = OPTIONS[name]
    eager, compiled = draw(pipe, method, cfg, False), draw(pipe, method, cfg, True)
    assert torch.equal(eager.tokens, compiled.tokens)
    assert (eager.stats.tokens, eager.stats.rounds) == (compiled.stats.tokens, compiled.stats.rounds)
    assert eager.certificate.kind == compiled.certificate.kind
    assert (compiled.certificate.tv or 0) > 0 or name != "lantern++"


@compiles
def test_greedy_tokens_are_those_of_plain_decoding(pipe):
    plain = pipe(["heart"], method="ar", temperature=0, output_type="latent")
    fast = pipe(["heart"], method="speculative", temperature=0, output_type="latent", compiled=True)
    assert torch.equal(plain.tokens, fast.tokens)


@compiles
def test_nan_logits_stop_a_compiled_round():
    pipe = tiny_pipeline(tokens=16)
    target, drafter, rule = assemble(methods.Speculative(tree=(1,)), StaticTarget(pipe.target()), pipe.parts)
    rounds = decode(
        target, drafter, rule, Prompt(torch.tensor([1])), 16, Uniforms.from_seeds([0]), play=CompiledRound()
    )
    next(rounds)
    pipe.transformer.output.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="must be finite, got NaN"):
        list(rounds)


@pytest.mark.parametrize("method", [methods.Eagle(), methods.Auto()])
def test_methods_whose_rounds_differ_are_refused(pipe, method):
    with pytest.raises(ValueError, match="rounds all alike"):
        draw(pipe, method, 1.0, True)


def test_no_compiler_is_one_line(pipe, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"need a C\+\+ compiler \(no-such-compiler\)"):
        draw(pipe, methods.AR(), 1.0, True)


def test_captions_are_refused(pipe):
    plain = pipe.target()
    plain.model.config = dataclasses.replace(plain.model.config, model_type="t2i")
    try:
        with pytest.raises(ValueError, match="class-conditional models only"):
            StaticTarget(plain)
    finally:
        plain.model.config = dataclasses.replace(plain.model.config, model_type="c2i")
