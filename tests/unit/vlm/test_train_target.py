from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from recipes.scenes.easy import Example
from recipes.scenes.kinds import KINDS
from recipes.scenes.packing import Encoder, stack
from recipes.scenes.patches import HEADS, IGNORED, NAMES
from recipes.scenes.questions import Turn
from recipes.scenes.scenes import PLACES, R
from recipes.scenes.sprites import Sprite, Sprites
from recipes.scenes.stream import World, learn_tokenizer
from recipes.scenes.tokenizer import build_processor
from recipes.training.align import WORDS, in_words, train_projector, word_counts
from recipes.training.llava import (
    Sizes,
    answer_logits,
    answer_loss,
    build_model,
    save_model,
    short_accuracy,
    train_target,
    train_tower,
    whole_answers,
)
from recipes.training.words import build_text_model, train_text
from specmm.vlm.pipeline import VQAPipeline

SIZES = Sizes(dim=32, layers=2, heads=2, tower_dim=32, tower_layers=1, patch=24)


@pytest.fixture(scope="module")
def world():
    square = np.full((64, 64, 4), 255, np.uint8)
    sprites = Sprites(
        tuple(Sprite(k.name, colour, square) for k in KINDS for colour in k.icons.values())
    )
    return World(
        sprites,
        [
            Example(
                np.full((R, R, 3), 255, np.uint8),
                (Turn("what color is it?", "red", "easy colour"),),
            )
        ],
    )


@pytest.fixture(scope="module")
def encoder(world):
    return Encoder(learn_tokenizer(world), SIZES.image_tokens)


@pytest.fixture
def model(encoder):
    return build_model(SIZES, len(encoder.tokenizer), encoder, seed=0).eval()


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)


@torch.no_grad()
def test_answer_logits_are_those_of_transformers(world, encoder, model):
    image, turns = world.example(Random(0))
    batch = stack([encoder.chat(turns[:2], image)])
    theirs = model(input_ids=batch.input_ids, pixel_values=batch.pixel_values).logits
    torch.testing.assert_close(answer_logits(model, batch), theirs[:, 1 + SIZES.image_tokens :])


@torch.no_grad()
def test_answer_logits_of_text_are_those_of_transformers(world, encoder, model):
    batch = stack([world.row(encoder, Random(2), 60, visual=False)])
    own = batch.segments[0] <= 1
    alone = batch.input_ids[:, own]
    torch.testing.assert_close(
        answer_logits(model, batch)[:, own[1:]], model(input_ids=alone).logits[:, 1:]
    )


@torch.no_grad()
def test_a_question_is_answered_as_if_alone(world, encoder, model):
    image, turns = world.scene(Random(1))[0].image, world.scene(Random(1))[1][1:6]
    together = stack([encoder.side_by_side(turns, image, 128)])
    logits = answer_logits(model, together)
    start = SIZES.image_tokens + 2
    for i, turn in enumerate(turns):
        alone = answer_logits(model, stack([encoder.chat([turn], image)]))
        own = together.segments[:, start:] == i + 1
        torch.testing.assert_close(logits[:, 1:][own], alone[0, 1:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_whole_answers_are_what_greedy_decoding_says(world, encoder, model):
    model.lm_head.weight.mul_(20)
    image = world.scene(Random(1))[0].image
    turns = [Turn("Is it?", "", "what"), Turn("Is it?", "a cat", "what")]
    prompt = encoder.chat(turns[:1], image)
    said = model.generate(
        input_ids=prompt.input_ids[None, :-1],
        pixel_values=prompt.pixel_values[None],
        max_new_tokens=3,
        do_sample=False,
    )
    own = Turn("Is it?", "@", "what")
    batch = stack([encoder.side_by_side([own, turns[1]], image, 40)])
    answer = (batch.segments[0] == 1) & batch.answer_mask[0]
    batch.input_ids[0, answer] = said[0, -3:][: int(answer.sum())]
    assert whole_answers(answer_logits(model, batch), batch).tolist() == [True, False]


def test_training_learns_and_a_finished_run_is_taken_up_as_it_is(world, encoder, tmp_path):
    def run():
        model = build_model(SIZES, len(encoder.tokenizer), encoder, seed=0)
        train_target(model, encoder, world, world, tmp_path, steps=24, batch=2)
        return model

    model = run()
    rows = (tmp_path / "loss.csv").read_text().split()
    assert rows[0] == "step,loss,scenes,easy"
    assert float(rows[2].split(",")[1]) < float(rows[1].split(",")[1])
    for a, b in zip(model.parameters(), run().parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_tower_learns_in_place(world, encoder, model, tmp_path):
    before = model.model.vision_tower.state_dict()["embeddings.patch_embedding.weight"].clone()
    train_tower(model, world, world, tmp_path, steps=2, batch=2, lr=1e-3, seed=0)
    columns, first = (tmp_path / "loss.csv").read_text().splitlines()
    assert columns == "step,loss,kind,held out" and 0 <= float(first.split(",")[3]) <= 1
    assert not torch.equal(
        before, model.model.vision_tower.state_dict()["embeddings.patch_embedding.weight"]
    )


def test_accuracy_is_a_share(world, encoder, model):
    found = short_accuracy(model, encoder, world, pictures=2)
    assert set(found) == {"scenes", "easy"}
    assert all(0 <= float(v) <= 1 for v in found.values())


def test_loss_counts_answers_only(world, encoder, model):
    batch = stack([world.row(encoder, Random(0), 60)])
    logits = answer_logits(model, batch)
    loss = answer_loss(logits, batch)
    unasked = ~(batch.labels[:, -logits.shape[1] :] >= 0)
    torch.testing.assert_close(
        answer_loss(logits.masked_fill(unasked[..., None], 7.0), batch), loss
    )


def test_a_saved_model_is_transformers_own(encoder, model, tmp_path):
    save_model(model, build_processor(encoder.tokenizer, R, SIZES.patch), tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "LlavaForConditionalGeneration"
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.eos_token_id == encoder.eos


def test_heads_must_divide_the_width(encoder):
    with pytest.raises(ValueError, match="multiple of the heads, got 30 and 4"):
        build_model(Sizes(dim=30), 10, encoder, seed=0)


def test_the_projector_learns_the_words_of_each_patch(world, encoder, model, tmp_path):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    train_projector(model, encoder.tokenizer, world, tmp_path, steps=81, batch=4, lr=3e-3)
    losses = [
        float(line.split(",")[1]) for line in (tmp_path / "loss.csv").read_text().splitlines()[1:]
    ]
    assert losses[-1] < 0.8 * losses[0]
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed and all("multi_modal_projector" in k for k in changed), (
        "nothing else learns here"
    )


def test_labels_in_words(encoder):
    embeddings = torch.randn(len(encoder.tokenizer), 8, generator=torch.Generator().manual_seed(0))
    tables = [
        word_counts(WORDS[head], encoder.tokenizer, len(embeddings)) @ embeddings for head in HEADS
    ]
    kind, place = NAMES.index("heart"), PLACES.index("at the top left")
    said = in_words(torch.tensor([[[kind, IGNORED, 1, place]]]), tables)
    ids = encoder.tokenizer.encode("heart big top left", add_special_tokens=False)
    torch.testing.assert_close(said[0, 0], embeddings[ids].sum(0))


def test_a_text_drafter_learns_and_drafts(world, encoder, model, tmp_path):
    small = build_text_model(32, 1, 2, len(encoder.tokenizer), encoder, seed=0)
    train_text(small, encoder, world, tmp_path, steps=41, batch=4, lr=5e-3)
    losses = [
        float(line.split(",")[1]) for line in (tmp_path / "loss.csv").read_text().splitlines()[1:]
    ]
    assert losses[-1] < 0.8 * losses[0]
    pipe = VQAPipeline(
        model, build_processor(encoder.tokenizer, R, SIZES.patch), "text-draft", drafter=small
    )
    picture = Image.fromarray(world.scene(Random(3))[0].image)
    drafted, plain = (
        pipe(picture, "Where is it?", method=m, max_new_tokens=8) for m in ("text-draft", "ar")
    )
    assert drafted.answers == plain.answers and drafted.stats.rounds > 0


@torch.no_grad()
def test_attention_begins_by_matching_and_copying(model):
    layer, x = model.model.language_model.layers[0], torch.randn(200, SIZES.dim)
    attention = layer.self_attn
    scores = attention.q_proj(x) @ attention.k_proj(x).T
    assert scores.diag().mean() > 3 * scores.std(), "what is alike is found"
    copied = attention.o_proj(attention.v_proj(x))
    assert torch.cosine_similarity(copied, x, dim=-1).mean() > 0.6, "and said again"
