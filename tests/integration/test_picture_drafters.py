"""Models of transformers that draw pictures, by methods that draft: tiny Janus and Emu3 with an
untrained block drafter and EAGLE head against plain decoding; what is wrong with a folder's.
"""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch

from specmm import methods
from specmm.decode import decode
from specmm.drafter import Feedback
from specmm.guidance import Guidance
from specmm.hf.glm_image import GLM_IMAGE
from specmm.hf.picture_tokens import PictureTarget
from specmm.image_ar.tokens.assemble import assemble
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockDrafter, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleDrafter, EagleHead
from specmm.image_ar.tokens.loading import save_drafter, save_drafters_of
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.shape.trees import branching
from specmm.stats import Clock
from tests import sampling
from tests.cases import some
from tests.integration import two_drafts
from tests.sampling import Stream
from tests.tiny import glm_image
from tests.tiny.picture_kinds import (
    KINDS,
    PROMPTS,
    SCALE,
    opened,
    pictures_of,
    prompt_of,
    reference,
    sized,
    target_of,
)


def save(kind, place):
    """Write the model of ``kind`` with an untrained EAGLE head and an untrained block drafter that
    reads two of its layers.
    """
    kind.save(place)
    owner = opened(place).owner
    torch.manual_seed(3)
    head = BlockHead(BlockConfig(3, 1, owner.sizes, (1,)))
    width = owner.sizes.dim
    with torch.no_grad():
        head.fc.weight[:, width : 2 * width] = torch.eye(width)
    drafters = {"block": head, "eagle": eagle_head(owner.sizes)}
    save_drafters_of(owner.fingerprint, drafters, place / "drafters")
    return place


def eagle_head(sizes):
    """An untrained head that is not sure of what it predicts, nor alike after all tokens."""
    head = EagleHead(EagleConfig(sizes))
    width = sizes.dim
    with torch.no_grad():
        head.fc.weight[:, :width] *= 3
        head.fc.weight[:, width:] = torch.eye(width) / 4
    return head


@pytest.fixture(scope="module", params=["janus", "emu3"])
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return save(kind, tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def pipe(folder):
    return opened(folder)


EXACT = {
    "speculative": "speculative",
    "a tree": methods.Speculative(tree=(2, 2, 1)),
    "token by token": methods.Speculative(tree=(2, 1), rule="recursive"),
    "chosen": methods.Draft(drafter="block", tree=(2, 1), rule="point-mass"),
    "eagle": methods.Eagle(top_k=4),
    "eagle's tree": methods.Speculative(drafter="eagle", tree=(2, 2, 1)),
    "exit": methods.SelfDraft(exit=1),
    "self": "self",
    "auto": "auto",
}


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
    for name, method in EXACT.items():
        out = pipe(PROMPTS, method=method, **given)
        assert torch.equal(out.tokens, wanted), name
        assert out.certificate.kind == "exact"
        assert torch.equal(pipe(PROMPTS[1], method=method, **given).tokens, wanted[1:]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm_image", "anole", "lumina"])
def test_pictures_of_other_kinds_are_plain_decodings(name, tmp_path):
    """GLM-Image counts positions by its two grids; Chameleon's are guided."""
    kind = KINDS[name]
    pipe = opened(save(kind, tmp_path))
    given = dict(temperature=0, cfg=kind.tested, output_type="latent", **sized(kind))
    wanted = pipe(PROMPTS[1], method="ar", **given).tokens
    for method in ("speculative", "a tree", "eagle", "eagle's tree", "exit"):
        out = pipe(PROMPTS[1], method=EXACT[method], **given)
        assert torch.equal(out.tokens, wanted), method


@pytest.mark.parametrize("size", [(96, 64), (1024, 1024)])
def test_rows_after_a_preview_are_the_pictures_own(size):
    """Of a square one, too, whose preview has as many tokens for each of its rows."""
    model = glm_image.model()
    layout = GLM_IMAGE.layout(model, size)
    target = PictureTarget(model, GLM_IMAGE, WARM, Guidance(), layout=layout)
    assert target.line == target.columns == target.sizes.columns == size[1] // 32
    assert target.sizes.rows * target.line >= target.length


ROWS = 3000
WARM = Processor(4.0)  # guided random weights are sure of all they say
V = 8  # of codes, which alone may begin a picture
# a size, and how many tokens are looked at: the first after a line's end, where lines have one
SMALL = {"janus": ((12, 12), 3), "emu3": ((8, 8), 4)}


def small(pipe, rows):
    """A guided target of a small picture, and a prompt ``rows`` times."""
    size, _ = SMALL[pipe.transformer.config.model_type]
    target = PictureTarget(
        pipe.transformer, pipe.facts, WARM, Guidance(SCALE), layout=pipe._layout(*size)
    )
    return target, prompt_of(target, pipe, [PROMPTS[1]] * rows)


def may_come(target, place):
    return target.allowed.at(torch.tensor(place)).nonzero()[:, 0].tolist()


@torch.no_grad()
def table(target, prompt, before, kind):
    """Probabilities of the tokens that may come after every one of the paths ``before``, without
    any cache.
    """
    some = may_come(target, len(before[0]))
    found = [reference(target, prompt, 0, list(path), kind)[some] for path in before]
    return WARM(torch.stack(found).log())


def paths_of(target, length):
    return list(itertools.product(*[may_come(target, place) for place in range(length)]))


@torch.no_grad()
def recorded_tables(pipe, name):
    """What a drafter records after a picture's first token [1, V], and after each first draft
    [V, V].
    """
    target, prompt = small(pipe, 1)
    drafter = TRAINED[name](pipe.parts.head(name), target, branching([V, 1]))
    root = torch.tensor(pictures_of(target)[:1])
    feedback = Feedback(target.prefill(prompt, drafter.max_nodes), root)
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
    some = pictures_of(target)
    assert float(tree.probs[0, 1:, some].sum(-1).min()) > 1 - 1e-6
    firsts = (tree.shape.depths[0] == 1).nonzero()[:, 0]
    second = torch.empty(V, V)
    for node in firsts.tolist():
        below = int((tree.shape.parents[0] == node).nonzero()[0])
        second[some.index(int(tree.tokens[0, node]))] = tree.probs[0, below, some]
    return tree.probs[0, firsts[0], some][None], second


TRAINED = {"block": BlockDrafter, "eagle": EagleDrafter}


@pytest.mark.parametrize(
    ("shape", "name"), [((2, 1), "block"), ((2, 1), "eagle"), ((2, 2), "block")]
)
@pytest.mark.slow
def test_every_draw_together_is_the_targets_distribution(kind, shape, name, pipe):
    """Enumerated; a twin that records the first draft's distribution for the second's is not."""
    if kind is KINDS["emu3"]:
        pytest.skip("its lines end within the drafts: see the next test")
    q = [x.double() / x.double().sum(-1, keepdim=True) for x in recorded_tables(pipe, name)]
    assert not torch.allclose(q[1], q[0].expand(V, -1), atol=1e-3)
    target, prompt = small(pipe, 1)
    root = pictures_of(target)[0]
    p = []
    for depth in range(3):
        before = [(root, *path) for path in itertools.product(range(V), repeat=depth)]
        found = table(target, prompt, before, kind).double()
        p.append(found / found.sum(-1, keepdim=True))
    two_drafts.check_draws(q, p, shape)


@pytest.mark.parametrize("name", TRAINED)
@torch.no_grad()
def test_drafts_are_what_may_come_where_they_are(name, pipe):
    """A line's end is sure, and comes nowhere else."""
    if pipe.transformer.config.model_type == "janus":
        pytest.skip("its lines have no end")
    target, prompt = small(pipe, 1)
    drafter = TRAINED[name](pipe.parts.head(name), target, branching([2, 1, 1]))
    root = torch.tensor(pictures_of(target)[:1])
    feedback = Feedback(target.prefill(prompt, drafter.max_nodes), root)
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
    for node in range(1, tree.shape.size):
        some = may_come(target, int(tree.shape.depths[0, node]))
        assert float(tree.probs[0, node, some].sum()) == pytest.approx(1)
        assert int(tree.tokens[0, node]) in some


class Colder:
    """A broken twin: drafts come from a colder distribution than the one recorded."""

    def __init__(self, inner):
        self.inner = inner
        self.max_nodes = inner.max_nodes
        self.max_depth = inner.max_depth
        self.begin = inner.begin
        draw = inner._draw

        def colder(dist, level, uniforms):
            cold = dist.pow(3) / dist.pow(3).sum(-1, keepdim=True)
            return draw(cold, level, uniforms)[0], draw(dist, level, uniforms)[1]

        inner._draw = colder
        self.propose = inner.propose


class ColderHead(EagleDrafter):
    """A broken twin: an EAGLE head's drafts are drawn from colder distributions than recorded."""

    def __init__(self, inner):
        self.__dict__.update(inner.__dict__)
        draw = self.growth._draw

        def colder(head, logits, width, uniforms):
            return draw(head, logits * 3, width, uniforms)[0], draw(head, logits, width, uniforms)[
                1
            ]

        self.growth._draw = colder


METHODS = {
    "a tree": methods.Speculative(tree=(2, 2)),
    "eagle's tree": methods.Speculative(drafter="eagle", tree=(2, 2)),
    "exit": methods.SelfDraft(exit=1, length=2),
}


def p_value(kind, pipe, method, twin=None):
    """Of the first tokens of many pictures, against their exact probabilities."""
    target, prompt = small(pipe, ROWS)
    _, length = SMALL[pipe.transformer.config.model_type]
    paths = paths_of(target, length)
    probs = torch.ones(1)
    for place in range(length):
        after = table(target, prompt, paths_of(target, place), kind)
        probs = (probs[:, None] * after).flatten()
    own, drafter, rule = assemble(method, target, pipe.parts)
    drafter = drafter if twin is None else twin(drafter)
    *_, end = decode(own, drafter, rule, prompt, length, Stream(ROWS, 1))
    numbers = {path: i for i, path in enumerate(paths)}
    drawn = torch.tensor([numbers[tuple(row)] for row in end.tokens[:, :length].tolist()])
    return sampling.p_value(probs, drawn)


DRAWN = [*itertools.product(["janus"], ("a tree", "eagle's tree", "exit")), ("emu3", "a tree")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), DRAWN, indirect=["kind"])
def test_samples_follow_the_models_own_distribution(kind, pipe, method):
    """With a line's end among them, where the model has such."""
    assert p_value(kind, pipe, METHODS[method]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "twin"),
    [("janus", "a tree", Colder), ("janus", "eagle's tree", ColderHead)],
    indirect=["kind"],
)
def test_samples_of_a_broken_drafter_do_not(kind, pipe, method, twin):
    assert p_value(kind, pipe, METHODS[method], twin) < 1e-6


RELAXED = {"lantern": methods.Lantern(k=3, drafter="block"), "lantern++": methods.LanternPP(k=3)}


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


def test_a_picture_does_not_depend_on_its_batch(kind, pipe):
    given = dict(method="speculative", output_type="latent", **sized(kind))
    out = pipe(PROMPTS, num_images_per_prompt=2, generator=seeds(4), batch_size=3, **given)
    alone = pipe(PROMPTS[1], num_images_per_prompt=2, generator=seeds(4)[2:], **given)
    assert torch.equal(out.tokens[2:], alone.tokens) and len(out.tokens.unique(dim=0)) == 4


def test_drafters_are_saved_and_given(kind, pipe, folder, tmp_path):
    pipe.save_pretrained(tmp_path / "copy")
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("drafters"))
    for name in TRAINED:
        method = methods.Speculative(drafter=name)
        given = dict(method=method, output_type="latent", **sized(kind))
        wanted = pipe("tree", generator=seeds(1), **given)
        for again in (opened(tmp_path / "copy"), opened(bare, drafter=folder / "drafters" / name)):
            out = again("tree", generator=seeds(1), **given)
            assert torch.equal(out.tokens, wanted.tokens) and out.stats.tau == wanted.stats.tau


def test_a_given_drafter_takes_the_place_of_the_models(kind, folder, tmp_path):
    """Also of one that no longer fits, which is not read; and it is what "any" stands for."""
    copied = shutil.copytree(folder, tmp_path / "model")
    block = copied / "drafters/block/config.json"
    facts = json.loads(block.read_text()) | {"target_fingerprint": "0" * 12}
    block.write_text(json.dumps(facts))
    drafted = {}
    for name, (model, drafter) in {
        "block": (copied, folder / "drafters/block"),
        "eagle": (folder, folder / "drafters/eagle"),
        "none": (folder, None),
    }.items():
        pipe = opened(model, drafter=drafter)
        assert sorted(pipe.parts.drafters) == ["block", "eagle"]
        target = target_of(pipe, kind, SCALE)
        drafted[name] = type(assemble(methods.Lantern(k=3), target, pipe.parts)[1])
    assert drafted == {"block": BlockDrafter, "eagle": EagleDrafter, "none": EagleDrafter}


def test_mistakes_with_drafters_are_told(kind, folder, tmp_path):
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("drafters"))
    with pytest.raises(ValueError, match="has no 'block' drafter"):
        opened(bare)("tree", method="speculative", output_type="latent", **sized(kind))
    with pytest.raises(ValueError, match="has no 'eagle' drafter"):
        opened(bare)("tree", method="eagle", output_type="latent", **sized(kind))
    with pytest.raises(ValueError, match="a block drafter or an EAGLE head, got"):
        opened(bare, drafter=bare)
    sizes = opened(bare).owner.sizes
    wide = replace(sizes, dim=2 * sizes.dim)
    save_drafter(EagleHead(EagleConfig(wide)), tmp_path / "wide")
    with pytest.raises(ValueError, match=rf"\(hidden_size {sizes.dim}\), got {wide.dim} in"):
        opened(bare, drafter=tmp_path / "wide")
    other = shutil.copytree(folder, tmp_path / "other")
    facts = json.loads((other / "drafters/block/config.json").read_text())
    facts["target_fingerprint"] = "0" * 12
    (other / "drafters/block/config.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="drafter must be of this target"):
        opened(other)


def test_auto_measures_what_serves(kind, folder, tmp_path):
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("drafters"))
    pipe = opened(bare)
    out = pipe("tree", method="auto", output_type="latent", **sized(kind))
    [plan] = pipe.parts.plans.values()
    assert out.method.startswith("auto: ") and out.certificate.kind == "exact"
    assert plan.draft_free is not None or ("sjd" in plan.reason and "prompt-lookup" in plan.reason)
