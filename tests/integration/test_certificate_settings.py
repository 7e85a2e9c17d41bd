"""In every family a certificate names the settings its claim is about, and follows them."""

import pytest
import torch
from transformers import TopPLogitsWarper

from specmm import methods
from specmm.core.processors import Processor
from specmm.image_ar.pipeline import ImagePipeline

PICTURE = dict(output_type="latent", batch_size=1)
TIES = {"top_p_ties": "kept"}


def test_image_tokens(make_tiny):
    pipe = make_tiny(tokens=16)
    out = pipe(
        "heart", temperature=0.7, top_k=5, cfg=2.0, cfg_interval=3, method="speculative", **PICTURE
    )
    named = {"temperature": 0.7, "top_k": 5, "cfg": 2.0, "cfg_interval": 3}
    assert out.certificate.settings == named and out.certificate.kind == "exact"
    found = pipe("heart", temperature=0.0, cfg=1.0, top_k=0, **PICTURE).certificate.settings
    assert found == {"temperature": 0.0, "cfg": 1.0}


def test_continuous_tokens():
    pipe = ImagePipeline.from_pretrained("pocket/mar")
    for steps in ("2", "3"):
        out = pipe(
            3, num_iter=2, head_steps=steps, method="cspd", temperature=0.9, cfg=1.0, **PICTURE
        )
        named = {"num_iter": 2, "head_steps": steps, "temperature": 0.9, "cfg": 1.0}
        assert out.certificate.settings == named
        assert "num_iter 2, head_steps " + steps in str(out.certificate)


def test_scales():
    pipe = ImagePipeline.from_pretrained("pocket/var")
    out = pipe(3, temperature=0.8, top_k=9, top_p=0.9, cfg=1.0, **PICTURE)
    named = {"temperature": 0.8, "top_k": 9, "top_p": 0.9} | TIES
    assert out.certificate.settings == named | {"cfg": 1.0}
    relaxed = pipe(
        3, method=methods.CoDe(3), top_k=0, top_p=1.0, temperature=1.0, cfg=2.0, **PICTURE
    )
    assert relaxed.certificate.kind == "heuristic"
    assert relaxed.certificate.settings == {"temperature": 1.0, "cfg": 2.0}


@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_text_and_answers(method, text_pipe, llava_pipe):
    named = {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.2}
    options = named | {"seed": 0, "max_new_tokens": 4, "method": method}
    assert text_pipe("def add(", **options).certificate.settings == named | TIES
    found = llava_pipe([], "What is it?", **options).certificate
    assert found.settings == named | TIES and "top_p 0.8, top_p_ties kept" in str(found)
    generates = text_pipe("def add(", **options, min_p=0.1).certificate.settings
    assert generates == named | {"min_p": 0.1}, "its own processors cut some"


def test_equal_logits_are_kept_together():
    """transformers cuts by order; what the certificate says of ours is so."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    theirs = TopPLogitsWarper(0.6)(None, logits).isfinite()
    ours = Processor(top_p=0.6)(logits) > 0
    assert ours.tolist() == [[True, True, True, True, False]] and int(theirs.sum()) < 4
