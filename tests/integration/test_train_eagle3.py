"""An EAGLE-3 head learns what it will do when it drafts, from texts and from conversations."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from transformers import DynamicCache

from specmm import TextPipeline, VQAPipeline, zoo
from specmm.core.processors import Processor
from specmm.core.randomness import seeded
from specmm.hf.drafters.eagle3_files import load_eagle3
from specmm.hf.drafters.files import read_acceptance
from specmm.hf.models.target import VLMTarget
from specmm.recipes.features import RolledEagle3, build_eagle3, head_rate, rollout_loss, some_of
from specmm.recipes.recipe import train
from specmm.recipes.training.seen import Seen
from tests.tiny.chats import picture_chats, undrafted

LLAVA = zoo.POCKET / "llava"
CODER = zoo.POCKET / "coder"
LENGTH = 7


@pytest.fixture(scope="module")
def head():
    pipe = TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float32)
    return build_eagle3(VLMTarget(pipe.model, Processor()), inner=32, ids=torch.arange(3, 90, 3))


def seen(head, length=LENGTH):
    with seeded(1):
        width = head.config.sizes.hidden_size
        context = torch.randn(1, length, len(head.config.layers) * width)
        mask = torch.ones(1, length, dtype=torch.bool)
        hidden, tokens = torch.randn(1, length, width), torch.zeros_like(mask, dtype=torch.long)
        return Seen(torch.randn(1, length, width), context, hidden, mask, tokens, ~mask)


def rolled(head, given, steps):
    """The states [steps][1, L, C] of a rollout, as the loss computes them."""
    past, hidden, found = DynamicCache(), head.mixed(given.context), []
    for k in range(steps):
        states = RolledEagle3(head).advance(k, given.embeddings, hidden, past)
        found.append(states)
        hidden = torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
    return found


@torch.no_grad()
def test_a_rollout_is_what_drafting_computes(head):
    """For every root: the slots before it on the target's states, then drafts one by one."""
    given, steps = seen(head), 4
    found = rolled(head, given, steps)
    for root in range(LENGTH - steps):
        past, mixed = DynamicCache(), head.mixed(given.context)
        before = head.slots(given.embeddings[:, : root + 1], mixed[:, : root + 1])
        state = head(before, None, None, past)[:, -1:]
        torch.testing.assert_close(found[0][:, root], state[:, 0])
        for k in range(1, steps):
            place = root + k
            slot = head.slots(given.embeddings[:, place : place + 1], state)
            bias = torch.zeros(1, 1, 1, place + 1)
            state = head(slot, torch.tensor([[place]]), bias, past)
            torch.testing.assert_close(found[k][:, place], state[:, 0])


def test_the_loss_is_least_where_drafts_are_the_targets(head):
    """None of a head whose drafts have the target's own distribution."""
    given = seen(head)
    with torch.no_grad():
        states = rolled(head, given, 1)[0]
    # the target's state of place p + 1 is what slot p predicts: then both heads agree
    wanted = replace(given, hidden=states.roll(1, 1))
    found = rollout_loss(RolledEagle3(head), head.logits, wanted, 1)
    torch.testing.assert_close(found["loss"], torch.tensor(0.0))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert (
            rollout_loss(RolledEagle3(head), head.logits, given, 2)["loss"].dtype is torch.float32
        )
    torch.testing.assert_close(found["overlap"], torch.tensor(1.0))
    with torch.no_grad():
        worse = rollout_loss(RolledEagle3(head), lambda x: head.logits(x).flip(-1), wanted, 1)
    assert worse["loss"] > found["loss"] and worse["overlap"] < 1


def test_places_that_count_are_drawn():
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[:, 2:8] = True
    some = some_of(mask, 5, seed=0)
    assert int(some.sum()) == 5 and not bool((some & ~mask).any())
    assert not torch.equal(some, some_of(mask, 5, seed=1))
    torch.testing.assert_close(some_of(mask, 50, seed=0), mask)


@pytest.mark.slow
def test_the_recipe_of_text(tmp_path):
    model = undrafted(CODER, tmp_path / "model")
    text = tmp_path / "text.py"
    text.write_text("".join(f"def add_{i}(a, b):\n    return a + b + {i}\n\n" for i in range(300)))
    options = dict(text=text, rows=4, drawn=0.5, batch=2, rollout=2, inner=32, scenes=2)
    found = train(
        "eagle3", model=model, steps=2, vocabulary=12, slots=50, out=tmp_path / "run", **options
    )
    folder = model / "drafters" / "eagle3"
    assert found["outputs"] == [str(folder)]
    assert head_rate(load_eagle3(folder)) == 2 / 128
    assert read_acceptance(folder).keys() == {0.0, 1.0}
    assert load_eagle3(folder).config.tokens == 12
    pipe = TextPipeline.from_pretrained(model, method="eagle3", torch_dtype=torch.float32)
    drafted = pipe("def add(", max_new_tokens=12)
    assert drafted.texts == pipe("def add(", method="ar", max_new_tokens=12).texts
    with pytest.raises(ValueError, match="replace=true"):
        train("eagle3", model=model, steps=1, out=tmp_path / "again", **options)


@pytest.mark.slow
def test_the_recipe_of_conversations(tmp_path):
    lines = picture_chats(tmp_path)
    model = undrafted(LLAVA, tmp_path / "model")
    options = dict(rows=4, drawn=0.5, batch=2, rollout=2, inner=32, scenes=2)
    train("eagle3", model=model, data=lines, steps=3, out=tmp_path / "run", **options)
    answers = [json.loads(f.read_text()) for f in (tmp_path / "run" / "answers").glob("*/*.json")]
    assert answers and all(text for part in answers for [text] in part.values())  # the target's own
    pipe = VQAPipeline.from_pretrained(model, method="eagle3", torch_dtype=torch.float32)
    asked = (Image.open(tmp_path / "a.png"), "What is it?")
    drafted = pipe(*asked, max_new_tokens=8)
    assert drafted.answers == pipe(*asked, method="ar", max_new_tokens=8).answers
    assert drafted.certificate.kind == "exact"
