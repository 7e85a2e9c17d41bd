"""What rounds change is what those who take part declare (target, drafter and progress; of MAR the
tokens and the rows of chains, of VAR the picture so far and the caches), and they read nothing else
that an earlier one made.
"""

import dataclasses
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu.pocket import squares
from specmm import methods
from specmm.core.cache import TreeBias, TreeBiases
from specmm.core.decode import one_round
from specmm.core.drafter import Feedback
from specmm.core.state import slots_of
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.image_ar.continuous import pipeline as mar_pipeline
from specmm.image_ar.continuous.chain_speculation import ChainRun
from specmm.image_ar.continuous.masked_decode import MARProgress
from specmm.image_ar.continuous.orders import PictureStreams
from specmm.image_ar.pipeline import ImagePipeline
from specmm.image_ar.scales.next_scale import FeatureMap, Session
from specmm.image_ar.scales.var import ScaleCache
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.verify.rule import VerifyResult
from specmm.vlm.pipeline import VQAPipeline
from tests.integration.conftest import tiny_pipeline
from tests.integration.test_compiled import OPTIONS, draw

WARM = 3  # rounds, in which what lasts is made
# masks, of which what counts is written before it is read, tables of a shape, random numbers
LASTING = (TreeBias, TreeBiases, TreeShape, PictureStreams)


def reached(*owners):
    """All tensors of our own objects, by name, and numpy's arrays as such."""
    found, seen, left = {}, set(), [("", owner) for owner in owners]
    while left:
        name, value = left.pop()
        if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.base is None):
            found[name] = torch.as_tensor(value)
        elif id(value) not in seen and not isinstance(value, (type, str, *LASTING)):
            seen.add(id(value))
            if isinstance(value, (list, tuple)):
                left += [(f"{name}[{i}]", x) for i, x in enumerate(value)]
            elif isinstance(value, dict):
                left += [(f"{name}[{k}]", x) for k, x in value.items()]
            elif type(value).__module__.startswith("specmm."):
                parts = vars(nn.Module()).keys() if isinstance(value, nn.Module) else ()
                left += [(f"{name}.{k}", x) for k, x in vars(value).items() if k not in parts]
    return found


def memory(tensors):
    return {x.untyped_storage().data_ptr() for x in tensors}


Before = namedtuple("Before", ("owners", "declared", "reached", "numbers"))


def declared(owners):
    return {slot.name: slot.tensor for name, one in owners.items() for slot in slots_of(one, name)}


class Watched:
    """Plays rounds, and notes what they change that is not declared; what they made anew is spoilt
    afterwards.
    """

    def __init__(self):
        self.rounds = 0
        self.wrong = set()
        self.spoilt = set()

    def __call__(self, parts, feedback, progress, uniforms, clock):
        before = self.begun(target=parts[0], drafter=parts[1], rule=parts[2], progress=progress)
        done = one_round(parts, feedback, progress, uniforms, clock)
        if feedback.result is None:
            self.rounds = 0
        self.rounds += 1
        if self.rounds > WARM:
            self.ended(before, done.tensors().values())
        return done

    def begun(self, **owners):
        """What there is before a round of ``owners``."""
        found = reached(*owners.values())
        return Before(owners, declared(owners), found, {k: x.clone() for k, x in found.items()})

    def ended(self, before, given=()):
        """Compare with ``before``; the round has ``given`` tensors to the next one."""
        now = declared(before.owners)
        self.wrong |= {name for name, x in before.declared.items() if now[name] is not x}
        known, old = memory(now.values()) | memory(given), memory(before.reached.values())
        for name, x in reached(*before.owners.values()).items():
            if x.untyped_storage().data_ptr() in known:
                continue
            if name in before.reached and x.data_ptr() == before.reached[name].data_ptr():
                if not torch.equal(x, before.numbers[name]):
                    self.wrong.add(name)
            elif x.untyped_storage().data_ptr() not in old:
                self.spoilt.add(name)
                x.fill_(float("nan") if x.is_floating_point() else 1)


@pytest.fixture
def watched(monkeypatch):
    found = Watched()
    for place in (
        "specmm.hf.answers.running.one_round",
        "specmm.image_ar.tokens.running.one_round",
    ):
        monkeypatch.setattr(place, found)
    return found


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "ar"])
def test_rounds_of_pictures(name, watched):
    method, cfg, top_k = OPTIONS[name]
    found = draw(tiny_pipeline(tokens=36), method, cfg, False, top_k)
    assert not watched.wrong and watched.rounds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specmm.image_ar.tokens.running.one_round", one_round)
        assert torch.equal(
            draw(tiny_pipeline(tokens=36), method, cfg, False, top_k).tokens, found.tokens
        )


def answers(pipe, **options):
    if isinstance(pipe, VQAPipeline):
        given = [squares(0), squares(1)], ["Describe the picture."] * 2
    else:
        given = [["def add(a, b):\n", "class Stack:\n", "import os\n"]]
        options["batch_size"] = 2  # the third takes a row over
    out = pipe(*given, seed=3, temperature=0.8, max_new_tokens=32, **options)
    return [ids.tolist() for ids in out.tokens]


def same_as_unwatched(watched, ask):
    found = ask()
    assert not watched.wrong and watched.rounds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specmm.hf.answers.running.one_round", one_round)
        assert ask() == found


@pytest.mark.parametrize("tree", [None, (2, 1)])
def test_rounds_of_texts(tree, text_pipe, watched):
    more = {} if tree is None else {"tree": tree}
    same_as_unwatched(watched, lambda: answers(text_pipe, method="block", **more))


@pytest.mark.parametrize("sampled", [False, True])
def test_rounds_of_answers(sampled, watched):
    pipe = VQAPipeline.from_pretrained("pocket/llava")
    method = methods.MSD(sampled=sampled)
    same_as_unwatched(watched, lambda: answers(pipe, method=method))


def test_a_drafter_that_declares_nothing_is_found_out(watched, monkeypatch):
    """One that writes what the next round reads, as a Jacobi drafter its places."""
    method, cfg, top_k = OPTIONS["sjd"]
    method = dataclasses.replace(method, init="left")
    draw(tiny_pipeline(tokens=36), method, cfg, False, top_k)
    assert not watched.wrong
    monkeypatch.setattr(JacobiDrafter, "state", ())
    draw(tiny_pipeline(tokens=36), method, cfg, False, top_k)
    assert watched.wrong


def test_a_drafter_that_puts_others_in_their_place_is_found_out(watched, monkeypatch):
    read = JacobiDrafter._read

    def replacing(self, feedback):
        read(self, feedback)
        self.root = self.root.clone()

    monkeypatch.setattr(JacobiDrafter, "_read", replacing)
    method, cfg, top_k = OPTIONS["sjd"]
    draw(tiny_pipeline(tokens=36), dataclasses.replace(method, init="left"), cfg, False, top_k)
    assert "drafter.root" in watched.wrong


def latents(name, method, **options):
    pipe = ImagePipeline.from_pretrained(name, dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    given = dict(method=method, generator=generators, output_type="latent")
    return pipe(["heart", "time"], **given, **options).tokens


@pytest.fixture
def watched_chains(monkeypatch):
    """MAR's iterations, by sampler and progress, and the rounds of its chains."""
    found, decode, play = Watched(), mar_pipeline.decode_mar, ChainRun.round

    def iterations(model, labels, orders, sampler, settings, conditions=None):
        steps = decode(model, labels, orders, sampler, settings, conditions)
        progress = next(steps)
        yield progress
        while True:
            before = found.begun(progress=progress, head=sampler.head)
            if next(steps, None) is None:
                return
            found.ended(before)
            yield progress

    def rounds(self, left):
        found.rounds += 1
        assert self.bound.table is not None  # which is made when it is needed
        before = found.begun(run=self)
        play(self, left)
        found.ended(before)

    monkeypatch.setattr(mar_pipeline, "decode_mar", iterations)
    monkeypatch.setattr(ChainRun, "round", rounds)
    return found


@pytest.fixture
def watched_scales(monkeypatch):
    """VAR's scales, by session and feature map."""
    found, advance, add, begun = Watched(), Session.advance, FeatureMap.add, []

    def begin(self, feature_map, k):
        if self.caches:
            begun.append(found.begun(session=self, feature_map=feature_map))
        return advance(self, feature_map, k)

    def end(self, drawn):
        add(self, drawn)
        if begun:
            found.rounds += 1
            found.ended(begun.pop())

    monkeypatch.setattr(Session, "advance", begin)
    monkeypatch.setattr(FeatureMap, "add", end)
    return found


MAR, VAR = dict(num_iter=12, head_steps="ddim20"), dict(cfg=1.5)


def test_rounds_of_chains(watched_chains, monkeypatch):
    found = latents("pocket/mar", "cspd", **MAR)
    assert not watched_chains.wrong and watched_chains.rounds > 12
    monkeypatch.undo()
    assert torch.equal(found, latents("pocket/mar", "cspd", **MAR))


@pytest.mark.parametrize("method", ["ar", methods.CoDe(n=3)], ids=str)
def test_rounds_of_scales(method, watched_scales, monkeypatch):
    found = latents("pocket/var", method, **VAR)
    assert not watched_scales.wrong and watched_scales.rounds
    monkeypatch.undo()
    assert torch.equal(found, latents("pocket/var", method, **VAR))


@pytest.mark.parametrize("kind", [MARProgress, ChainRun])
def test_chains_that_declare_nothing_are_found_out(kind, watched_chains, monkeypatch):
    monkeypatch.setattr(kind, "state", ())
    latents("pocket/mar", "cspd", **MAR)
    assert watched_chains.wrong


@pytest.mark.parametrize("kind", [FeatureMap, ScaleCache, Session])
def test_scales_that_declare_nothing_are_found_out(kind, watched_scales, monkeypatch):
    monkeypatch.setattr(kind, "state", ())
    latents("pocket/var", "ar", **VAR)
    assert watched_scales.wrong


def test_a_picture_that_is_put_in_anothers_place_is_found_out(watched_scales, monkeypatch):
    add = FeatureMap.add

    def replacing(self, drawn):
        self.f_hat = self.f_hat.clone()
        add(self, drawn)

    monkeypatch.setattr(FeatureMap, "add", replacing)
    latents("pocket/var", "ar", **VAR)
    assert watched_scales.wrong == {"feature_map.f_hat"}


def test_a_tree_in_other_memory_has_tables_of_its_own():
    tokens, ones = torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    tree = DraftTree(tokens, TreeShape(torch.tensor([[-1, 0, 0]]), 2, 2))
    result = VerifyResult(tokens, ones, ones)
    output = TargetOutput(torch.ones(1, 3, 4), torch.ones(1, 3, 2))
    given = dict(fresh=ones > 1, accepted=ones, checks=torch.zeros(3))
    feedback = Feedback(output, ones, tree, result, tokens, **given)
    assert tree.shape.ranks.tolist() == [[0, 0, 1]]
    found = feedback.held(feedback.tensors() | {"parents": torch.tensor([[-1, 0, 1]])})
    assert found.drafted[0].shape.ranks.tolist() == [[0, 0, 0]]
    assert tree.shape.ranks.tolist() == [[0, 0, 1]]
