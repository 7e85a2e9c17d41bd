"""Compiled rounds and steps: the tokens of the eager ones, the same errors, and what they do not
serve.
"""

import dataclasses
import shutil

import pytest
import torch

from specmm import methods
from specmm.core.decode import decode
from specmm.core.randomness import Uniforms
from specmm.image_ar.tokens.assemble import assemble
from specmm.image_ar.tokens.target import Prompt, StaticTarget
from specmm.programs.compiled import CompiledRound
from tests.integration.conftest import tiny_pipeline

NAMES = ("heart", "time", "heart")
OPTIONS = {  # method, guidance, top k
    "ar": (methods.AR(), 1.0, 0),
    "guided tree": (methods.Speculative(tree=(2, 1, 1), rejected_weight=0.3), 1.5, 30),
    "lantern++": (methods.LanternPP(lambda_=5.0, k=10), 1.0, 0),
    "eagle": (methods.Eagle(total=6, depth=2, top_k=2), 1.5, 30),
    "lantern": (methods.Lantern(k=10, total=6, depth=2, top_k=2), 1.0, 0),
    "sjd": (methods.SJD(window=4), 1.0, 20),
}


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline(tokens=16)


def draw(pipe, method, cfg, compiled, top_k=0, **options):
    """Three pictures in two rows: rows end apart, and the third takes over one of them."""
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    given = dict(method=method, cfg=cfg, top_k=top_k, compiled=compiled, output_type="latent")
    given |= dict(temperature=0.8, batch_size=2) | options
    return pipe(NAMES, generator=generators, **given)


def same(pipe, method, cfg=1.0, top_k=0, **options):
    """What is drawn compiled, which must be what is drawn without."""
    eager, compiled = (draw(pipe, method, cfg, way, top_k, **options) for way in (False, True))
    assert torch.equal(eager.tokens, compiled.tokens)
    wanted = (compiled.stats.tokens, compiled.stats.rounds)
    assert (eager.stats.tokens, eager.stats.rounds) == wanted
    assert eager.certificate.kind == compiled.certificate.kind
    assert eager.certificate.tv == pytest.approx(compiled.certificate.tv, rel=1e-3)
    return compiled


compiles = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")


@pytest.mark.slow
@compiles
def test_tokens_of_built_programs_are_those_of_eager_rounds(pipe):
    same(pipe, *OPTIONS["guided tree"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guided tree", "lantern", "sjd"])
def test_traced_tokens_are_those_of_eager_rounds(name, traced):
    found = same(tiny_pipeline(tokens=16), *OPTIONS[name])
    assert (found.certificate.tv or 0) > 0 or not name.startswith("lantern")


@pytest.mark.slow
def test_one_pipeline_serves_several_methods_options_and_dtypes(traced):
    pipe, seen = tiny_pipeline(tokens=16), []
    same(pipe, methods.LanternPP(lambda_=5.0, k=10, tree=(2, 1)), temperature=0)
    same(pipe, methods.AR(), callback_on_step_end=lambda pipe, i, step, given: seen.append(step))
    assert seen[-1] == 16
    static = pipe.parts.made["static"]
    draw(pipe, methods.AR(), 1.0, True)
    assert pipe.parts.made["static"] is static  # its options are those of the call before
    pipe.to(torch.bfloat16)
    assert draw(pipe, methods.AR(), 1.0, True).tokens.shape == (3, 16)


@pytest.mark.slow
def test_nan_logits_stop_a_compiled_round(traced):
    pipe = tiny_pipeline(tokens=16)
    plain = pipe.target(temperature=1.0)
    target, drafter, rule = assemble(
        methods.Speculative(tree=(1,)), StaticTarget(plain), pipe.parts
    )
    prompt, uniforms = Prompt(torch.tensor([1])), Uniforms.from_seeds([0])
    rounds = decode(target, drafter, rule, prompt, 16, uniforms, play=CompiledRound())
    next(rounds), next(rounds)
    pipe.transformer.output.weight.data[3] = float("nan")
    said = "must be finite, got NaN or infinity from llamagen in round 3"
    with pytest.raises(ValueError, match=said):
        list(rounds)


@pytest.mark.parametrize("method", [methods.Draft("prompt-lookup"), methods.Auto()])
def test_methods_whose_rounds_differ_are_refused(pipe, method):
    with pytest.raises(ValueError, match="rounds have equal shapes"):
        draw(pipe, method, 1.0, True)


def test_no_compiler_is_one_line(pipe, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    # as it is read at import
    without = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with (
        without,
        pytest.raises(ValueError, match=r"need a C\+\+ compiler, no-such-compiler is none"),
    ):
        draw(pipe, methods.AR(), 1.0, True)


def test_captions_are_refused(pipe):
    plain = pipe.target()
    plain.model.config = dataclasses.replace(plain.model.config, model_type="t2i")
    try:
        with pytest.raises(ValueError, match="class-conditional models only"):
            StaticTarget(plain)
    finally:
        plain.model.config = dataclasses.replace(plain.model.config, model_type="c2i")
