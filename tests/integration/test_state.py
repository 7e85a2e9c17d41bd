"""What rounds change is what target, drafter and progress declare, and they read nothing else that
an earlier one made.
"""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu.pocket import squares
from specmm import methods
from specmm.cache import TreeBias, TreeBiases
from specmm.decode import one_round
from specmm.drafter import Feedback
from specmm.graphs import _state
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.target import TargetOutput
from specmm.tree import DraftTree, TreeShape
from specmm.verify.rule import VerifyResult
from specmm.vlm.pipeline import VQAPipeline
from tests.integration.conftest import tiny_pipeline
from tests.integration.test_compiled import OPTIONS, draw

WARM = 3  # rounds, in which what lasts is made
# masks, of which what counts is written before it is read, and tables of a shape
LASTING = (TreeBias, TreeBiases, TreeShape)


def reached(*owners):
    """All tensors of our own objects, by name."""
    found, seen, left = {}, set(), [("", owner) for owner in owners]
    while left:
        name, value = left.pop()
        if isinstance(value, Tensor):
            found[name] = value
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


class Watched:
    """Plays rounds, and notes what they change that is not declared; what they made anew is spoilt
    afterwards.
    """

    def __init__(self):
        self.rounds = 0
        self.wrong = set()
        self.spoilt = set()

    def __call__(self, parts, feedback, progress, uniforms, clock):
        state = _state(parts, progress)
        before = reached(*parts)
        numbers = {name: x.clone() for name, x in before.items()}
        done = one_round(parts, feedback, progress, uniforms, clock)
        if feedback.result is None:
            self.rounds = 0
        self.rounds += 1
        if self.rounds > WARM:
            now = {slot.name: slot.tensor for slot in _state(parts, progress)}
            self.wrong |= {slot.name for slot in state if now[slot.name] is not slot.tensor}
            declared = memory(now.values()) | memory(done.tensors().values())
            after = reached(*parts)
            for name, x in after.items():
                if x.untyped_storage().data_ptr() in declared:
                    continue
                if name in before and x is before[name]:
                    if not torch.equal(x, numbers[name]):
                        self.wrong.add(name)
                elif x.untyped_storage().data_ptr() not in memory(before.values()):
                    self.spoilt.add(name)
                    x.fill_(float("nan") if x.is_floating_point() else 1)
        return done


@pytest.fixture
def watched(monkeypatch):
    found = Watched()
    for place in ("specmm.hf.running.one_round", "specmm.image_ar.tokens.running.one_round"):
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
        patch.setattr("specmm.hf.running.one_round", one_round)
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
