"""MSD training on a tiny LLaVA: the loss falls, a killed run goes on bit by bit, the share of
pictures rises.
"""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch

from recipes.scenes.packing import Sample, collate
from specmm.core.processors import Processor
from specmm.hf.models.target import VLMTarget
from specmm.recipes.loop import Run
from specmm.recipes.msd import (
    build_msd,
    msd_config,
    msd_loss,
    read_slots,
    shaking,
    train_msd,
    visual_share,
)
from tests.tiny.families import llava, random_model


@pytest.fixture(scope="module")
def target(zoo):
    return VLMTarget(zoo.model("llava"), Processor(1.0))


def source(number, visual):
    """A picture or none, then counting: learnable."""
    random = Random(f"{number} {visual}")
    first = random.randrange(3, 20)
    text = [first + i for i in range(random.randint(6, 10))]
    ids = [1, *([36] * 4 if visual else []), *text]
    answers = [i >= len(ids) - 5 for i in range(len(ids))]
    pixels = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(first))
    return chat(ids, answers, pixels if visual else None)


def chat(ids, answers, pixels=None):
    places = torch.arange(len(ids))
    return Sample(torch.tensor(ids), pixels, torch.tensor(answers), 0 * places, places)


def trained(target, source, out, steps, lr=5e-5, config=None, **options):
    head = build_msd(target, config)
    train_msd(target, head, source, Run(out, steps, lr), read=collate, **options)
    return head


@pytest.mark.slow
def test_the_loss_falls_and_a_killed_run_goes_on(target, tmp_path):
    options = dict(batch=4, lr=3e-3, autocast=False)
    whole = trained(target, source, tmp_path / "whole", steps=61, **options)
    curve = [line.split(",") for line in (tmp_path / "whole" / "loss.csv").read_text().splitlines()]
    assert curve[0] == ["step", "loss", "smooth_l1", "kl", "overlap", "overlap_last"]
    assert float(curve[-1][1]) < 0.8 * float(curve[1][1])
    killed = 0

    def dying(number, visual):
        nonlocal killed
        killed += 1
        if killed > 4 * 30:
            raise KeyboardInterrupt
        return source(number, visual)

    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setitem(train_msd.__globals__, "fit", saving_often(train_msd.__globals__["fit"]))
        trained(target, dying, tmp_path / "killed", steps=61, **options)
    again = trained(target, source, tmp_path / "killed", steps=61, **options)
    for (name, weight), other in zip(
        whole.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(weight, other), name


def saving_often(fit):
    return lambda model, step, run, **options: fit(
        model, step, replace(run, save_every=0), **options
    )


def test_only_the_head_learns_and_embeddings_stay(target, tmp_path):
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    head = trained(
        target, source, tmp_path, steps=3, batch=2, config=msd_config(target, num_hidden_layers=2)
    )
    assert all(torch.equal(v, before[k]) for k, v in target.model.state_dict().items())
    assert torch.equal(head.embed_tokens.weight, target.embed(torch.arange(40)))
    assert len(head.layers) == 2


def test_slots_are_those_of_each_row_alone(target):
    target.wants_context = True
    examples = [source(i, visual) for i, visual in enumerate((True, False, True))]
    slots = read_slots(target, examples, collate)
    for row, example in enumerate(examples):
        alone, length = read_slots(target, [example], collate), len(example.input_ids)
        for name in ("embeddings", "context", "hidden", "image", "mask"):
            ours = getattr(slots, name)[row, : length - 1]
            torch.testing.assert_close(
                ours, getattr(alone, name)[0, : length - 1], rtol=1e-4, atol=1e-5
            )
        assert slots.mask[row].sum() == example.answer_mask.sum()
        assert slots.image[row].sum() == (example.input_ids == 36).sum()


def test_noise_is_seeded_uniform_and_shrinks_with_the_row():
    hidden, lengths = torch.zeros(2, 50, 64), torch.tensor([50, 25])
    shaken = shaking(0.2, 3)(hidden, lengths)
    assert torch.equal(shaken, shaking(0.2, 3)(hidden, lengths))
    for row, length in enumerate((50, 25)):
        most = 0.1 * 512 / length
        assert 0.99 * most < float(shaken[row].abs().max()) <= most


def test_schedule_and_mistakes(target):
    assert [visual_share(i, 40) for i in (0, 19, 20, 39)] == [0, 0, 0.05, 1]
    assert visual_share(0, 1) == 0
    silent = chat([1, 3, 4], [True, False, False])
    target.wants_context = True
    with pytest.raises(ValueError, match="must hold answers"):
        read_slots(target, [silent], collate)


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        (dict(hidden_size=36, num_attention_heads=8, num_key_value_heads=4, head_dim=8), (6, 3)),
        (dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=32), (2, 1)),
        (dict(hidden_size=14, num_attention_heads=6, num_key_value_heads=6, head_dim=6), (1, 1)),
    ],
)
def test_heads_divide_widths_that_the_targets_do_not(sizes, heads, tmp_path):
    """A target's attention may be of another width than its states; the head's is not."""
    odd = VLMTarget(random_model("odd", make=lambda: llava("qwen3", **sizes)), Processor(1.0))
    config = msd_config(odd)
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    assert (config.hidden_size, config.vocab_size) == (sizes["hidden_size"], 40)
    trained(odd, source, tmp_path, steps=1, batch=2)


@pytest.mark.parametrize(
    ("rope", "base"),
    [
        ({}, 10000.0),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, 500.0),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, 1e6),
    ],
)
def test_a_head_turns_by_the_targets_largest_base(target, rope, base, monkeypatch):
    monkeypatch.setattr(target.family.config, "rope_parameters", rope)
    assert msd_config(target).rope_theta == base


def test_a_ramp_brings_the_pictures_early(target, tmp_path):
    shown = []

    def watched(number, visual):
        shown.append(visual)
        return source(number, visual)

    trained(target, watched, tmp_path, steps=8, batch=16, ramp=4, autocast=False)
    shares = [sum(shown[16 * i : 16 * i + 16]) / 16 for i in range(8)]
    assert shares[0] == 0 and 0 < shares[2] < 0.8 and 0.6 < sum(shares[4:]) / 4 < 1


def test_the_command_adds_the_drafter_to_the_model(zoo, tmp_path, monkeypatch):
    """The recipe ``msd``, with other data: the file leaves the target's embeddings out and loads
    for it.
    """
    from specmm.recipes import conversations, recipe
    from specmm.recipes.settings import Begun
    from specmm.recipes.source import Data
    from specmm.vlm.msd import load_msd

    model = zoo.model("llava")
    model.save_pretrained(tmp_path / "model")
    reader = SimpleNamespace(stops=[2], said=len)
    monkeypatch.setattr(Data, "reader", lambda self, folder: reader)

    def rows(count):
        return [source(i, True) for i in range(4)]

    opened = conversations.Conversations(rows, source, lambda count: None, reader, collate)
    monkeypatch.setattr(conversations, "conversations", lambda *_: opened)
    monkeypatch.setattr("specmm.vlm.pipeline.load_processor", lambda folder: None)
    monkeypatch.setattr(Begun, "tau", lambda *_: None)
    monkeypatch.setattr("specmm.recipes.settings.acceptance_of", lambda *_: {0.0: ((0.9, 0.05),)})
    options = dict(
        model=tmp_path / "model", steps=2, batch=2, width=40, out=tmp_path / "run", data=tmp_path
    )
    options |= dict(lr=1e-3, noise=0.2, probs_weight=0.1, passes=2, layers=1, seed=0, ramp=None)
    assert recipe.train("msd", **options)["kind"] == "msd"
    head = load_msd(tmp_path / "model" / "drafters" / "msd", model.get_input_embeddings().weight)
    assert head.config.intermediate_size == 40 and head.acceptance == {0.0: ((0.9, 0.05),)}
    with pytest.raises(ValueError, match="exists already; give --set replace=true"):
        recipe.train("msd", **options)


def test_later_passes_read_the_head_s_own_states_on_answers(target):
    slots = read_slots(target, [source(0, True), source(1, False)], collate)
    wanted, read = slots.hidden.roll(-1, 1), []

    class Oracle:
        def prompt_slots(self, embeddings, hidden, image):
            read.append(hidden)
            return hidden

        def __call__(self, x):
            return wanted if len(read) == 1 else wanted + 1.0

    losses = msd_loss(Oracle(), target.head, slots, passes=3)
    assert losses["overlap"] == pytest.approx(1.0, abs=1e-5)
    assert losses["overlap_last"] < losses["overlap"]
    torch.testing.assert_close(read[1], slots.context)  # what is predicted rightly changes nothing
    changed = (read[2] != slots.context).any(-1)
    assert torch.equal(changed, torch.nn.functional.pad(slots.mask[:, :-1], (1, 0))), (
        "only after an answer's slot"
    )
