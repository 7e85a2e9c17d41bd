"""Models of transformers that draw pictures, by methods that draft: tiny Janus and Emu3 by
what ``auto`` takes, against plain decoding, and by relaxed methods.
"""

import itertools

import pytest
import torch

from specmm import methods
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.hf.pictures.glm_image import GLM_IMAGE
from specmm.hf.pictures.picture_tokens import PictureTarget
from specmm.image_ar.tokens.assemble import assemble
from tests.cases import some
from tests.tiny import glm_image
from tests.tiny.picture_kinds import (
    KINDS,
    PROMPTS,
    SCALE,
    opened,
    pictures_of,
    saved,
    sized,
    target_of,
)


@pytest.fixture(scope="module", params=["janus", "emu3"])
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return saved(kind, tmp_path_factory)


@pytest.fixture(scope="module")
def pipe(folder):
    return opened(folder)


@pytest.mark.parametrize(
    ("kind", "cfg"),
    some(itertools.product(["janus", "emu3"], [1.0, 5.0]), [("janus", 1.0), ("emu3", 5.0)]),
    indirect=["kind"],
)
def test_greedy_pictures_are_plain_decodings(kind, pipe, cfg):
    """Of prompts of different lengths, alone and in a batch."""
    given = dict(temperature=0, cfg=cfg, output_type="latent", **sized(kind))
    wanted = pipe(PROMPTS, method="ar", **given).tokens
    assert len(wanted.unique()) > 2 and not torch.equal(wanted[0], wanted[1])
    out = pipe(PROMPTS, method="auto", **given)
    assert torch.equal(out.tokens, wanted)
    assert out.certificate.kind == "exact"
    assert torch.equal(pipe(PROMPTS[1], method="auto", **given).tokens, wanted[1:])


@pytest.mark.parametrize("size", [(96, 64), (1024, 1024)])
def test_rows_after_a_preview_are_the_pictures_own(size):
    """Of a square one, too, whose preview has as many tokens for each of its rows."""
    model = glm_image.model()
    layout = GLM_IMAGE.layout(model, size)
    target = PictureTarget(model, GLM_IMAGE, Processor(), Guidance(), layout=layout)
    assert target.line == target.columns == size[1] // 32


RELAXED = {
    rule: methods.Draft("jacobi", "chain(3)", f"{rule}(k=3)") for rule in ("lantern", "lantern++")
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", RELAXED)
def test_relaxed_methods_say_what_they_cost(kind, pipe, method, temperature):
    given = dict(temperature=temperature, output_type="latent", **sized(kind))
    out = pipe(PROMPTS, method=RELAXED[method], generator=seeds(2), **given)
    assert out.certificate.kind == "bounded" and 0 <= out.certificate.tv <= 1
    places = pipe._layout(*kind.size).allowed
    for place in range(out.tokens.shape[1]):
        assert bool(places.at(torch.tensor(place))[out.tokens[:, place]].all())


def seeds(count):
    return [torch.Generator().manual_seed(i) for i in range(count)]


def test_neighbours_are_those_of_the_codebook(kind, pipe):
    """By the ids of the codes; a token that is none has no mass to borrow."""
    vq = pipe.transformer.model.vqmodel.quantize.embedding.weight.detach()
    if kind is KINDS["janus"]:
        vq = vq / vq.norm(dim=-1, keepdim=True)
    target = target_of(pipe, kind, SCALE)
    _, _, rule = assemble(RELAXED["lantern++"], target, pipe.parts)
    ids = torch.tensor(pictures_of(target))
    near, is_code = rule.neighbourhood.near(ids, 3)
    order = torch.cdist(vq, vq).fill_diagonal_(torch.inf).argsort(1)[:, :3]
    assert torch.equal(near, ids[order]) and bool(is_code.all())
    others = torch.tensor([i for i in range(-2, target.vocabulary + 2) if i not in ids.tolist()])
    assert not bool(rule.neighbourhood.near(others, 3)[1].any())


def test_a_trained_drafter_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"drafter must be your own object for .*, got .*LlamaGen"):
        opened(folder, drafter=tmp_path)


def test_auto_measures_what_serves(kind, folder):
    pipe = opened(folder)
    out = pipe("tree", method="auto", output_type="latent", **sized(kind))
    [record] = pipe.parts.records.values()
    assert out.method.startswith("auto: ") and out.certificate.kind == "exact"
    assert {"sjd", "prompt-lookup"} <= {one.method.name for one in record.candidates}
