from collections import Counter
from colorsys import rgb_to_hsv
from random import Random

import numpy as np
import pytest
from PIL import Image

from recipes.scenes.facts import fact
from recipes.scenes.kinds import BY_NAME, COLOURS, KINDS, RELATIVES, relatives
from recipes.scenes.questions import (
    NUMBERS,
    SHORT,
    counted,
    description,
    joined,
    name_of,
    short_questions,
    tellings,
)
from recipes.scenes.scenes import BACKGROUNDS, PLACES, SIZES, compose
from recipes.scenes.sprites import Sprite, Sprites, held_out, load_sprites
from recipes.scenes.variation import vary


@pytest.fixture(scope="module")
def sprites():
    square = np.full((64, 64, 4), 255, np.uint8)
    return Sprites(
        tuple(Sprite(k.name, colour, square) for k in KINDS for colour in k.icons.values())
    )


@pytest.fixture(scope="module")
def scenes(sprites):
    return [compose(sprites, Random(i)) for i in range(200)]


def test_same_seed_same_scene(sprites):
    a, b = (compose(sprites, Random(7)) for _ in range(2))
    assert a.things == b.things
    assert np.array_equal(a.image, b.image)
    assert not np.array_equal(a.image, compose(sprites, Random(8)).image)


def test_things_are_where_they_are_said_to_be(scenes):
    for scene in scenes:
        for i, thing in enumerate(scene.things):
            rows, columns = np.nonzero(scene.owner == i)
            assert abs(rows.mean() - (16, 48, 80)[thing.place // 3]) < 11
            assert abs(columns.mean() - (16, 48, 80)[thing.place % 3]) < 11
            assert (
                SIZES[thing.size] - 5 <= max(np.ptp(rows), np.ptp(columns)) + 1 <= SIZES[thing.size]
            )


def test_things_come_in_reading_order_at_places_of_their_own(scenes):
    for scene in scenes:
        places = [thing.place for thing in scene.things]
        assert places == sorted(set(places))


def test_background_fills_what_no_thing_covers(scenes):
    scene = scenes[0]
    found = scene.image[scene.owner < 0].astype(int)
    assert np.abs(found - BACKGROUNDS[scene.background]).max() <= 12


def test_every_sort_of_short_question_is_asked(scenes):
    asked = {
        turn.kind for i, scene in enumerate(scenes) for turn in short_questions(scene, Random(i))
    }
    assert asked == set(SHORT)


def test_answers_are_true(scenes):
    for i, scene in enumerate(scenes):
        counts = Counter(thing.kind for thing in scene.things)
        for turn in short_questions(scene, Random(i)):
            if turn.kind == "how many" and " things " not in turn.question:
                (kind,) = (k for k in KINDS if f"many {k.plural} " in turn.question)
                assert turn.answer == NUMBERS[counts[kind.name]]
            if turn.kind == "is there":
                shown = any(f"{BY_NAME[kind].article}" in turn.question for kind in counts)
                assert turn.answer == ("yes" if shown else "no")
            if turn.kind == "where":
                (thing,) = (t for t in scene.things if f"the {t.kind}?" in turn.question)
                assert turn.answer == PLACES[thing.place]


def test_yes_and_no_are_as_frequent(scenes):
    turns = [
        t.answer
        for i, s in enumerate(scenes)
        for t in short_questions(s, Random(i))
        if t.kind == "is there"
    ]
    assert turns.count("yes") == turns.count("no")


def test_a_description_names_everything_and_varies(scenes):
    told = set()
    for i, scene in enumerate(scenes):
        text = description(scene, Random(i)).answer
        assert scene.background in text
        for thing in scene.things:
            assert (
                f"{name_of(thing)[2:]} {PLACES[thing.place]}" in text
                or PLACES[thing.place][1:] in text
            )
        told.add(description(scenes[0], Random(i)).answer)
    assert told == tellings(scenes[0])


def test_words():
    assert joined(["a", "b", "c"]) == "a, b and c"
    assert joined(["a"]) == "a"
    assert (counted("octopus", 1), counted("octopus", 2)) == ("an octopus", "two octopuses")
    assert all(colour in ("", *COLOURS) for kind in KINDS for colour in kind.icons.values())


def test_facts_need_no_picture_and_repeat_with_their_seed():
    turns = [fact(Random(i)) for i in range(50)]
    assert turns == [fact(Random(i)) for i in range(50)]
    assert len({turn.answer for turn in turns}) > 20


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Makes sprites of such names, each of one colour, its number."""

    def build(names):
        numbers = np.arange(len(names), dtype=np.uint8)[:, None, None, None]
        images = numbers * np.ones((1, 2, 2, 4), np.uint8)
        np.savez(tmp_path / "sprites.npz", images=images, names=np.array(names))
        monkeypatch.setattr("recipes.scenes.sprites._build", lambda folder: folder / "sprites.npz")

    return build


def test_one_style_of_each_icon_is_held_out(tmp_path, built):
    styles = ["a", "b", "c"]
    icons = [icon for kind in KINDS for icon in kind.icons]
    names = [f"{style}/{icon}" for style in styles for icon in icons]
    built(names)
    numbers = {
        split: {int(s.pixels[0, 0, 0]) for s in load_sprites(tmp_path, split).all}
        for split in ("train", "test")
    }
    assert numbers["train"].isdisjoint(numbers["test"])
    assert numbers["test"] == {names.index(f"{held_out(icon, styles)}/{icon}") for icon in icons}
    assert len(numbers["train"] | numbers["test"]) == len(names)


def test_relatives_of_a_kind_are_for_training_only(tmp_path, monkeypatch, built):
    built([f"{style}/{icon}" for style in "ab" for icon in ("banana", "blowfish", "white-heart")])
    monkeypatch.setattr(
        "recipes.scenes.sprites.KINDS", [k for k in KINDS if k.name in ("banana", "fish", "heart")]
    )
    monkeypatch.setattr(
        "recipes.scenes.sprites.held_out", lambda icon, styles: styles[0] if styles else ""
    )
    train, test = (load_sprites(tmp_path, split) for split in ("train", "test"))
    assert Counter(s.kind for s in train.all) == {"banana": 1, "fish": 2, "heart": 2}
    monkeypatch.setattr("recipes.scenes.sprites.held_out", lambda icon, styles: "a")
    unseen = load_sprites(tmp_path, "train")
    assert Counter(s.kind for s in unseen.all) == {"banana": 1, "fish": 1, "heart": 1}, (
        "in no style held out for a kind"
    )
    assert {s.colour for s in train.of_kind["heart"]} == {"white"}
    assert [s.kind for s in test.all] == ["banana"]
    assert (train.varied, test.varied) == (True, False)


def test_relatives_are_of_kinds_there_are():
    assert set(RELATIVES) <= set(BY_NAME)
    icons = [icon for kind in KINDS for icon in (*kind.icons, *relatives(kind.name))]
    assert len(icons) == len(set(icons))


def test_training_draws_a_thing_a_little_otherwise_each_time():
    one = Sprite("fish", "", np.full((64, 64, 4), (200, 120, 40, 255), np.uint8))
    looks = {
        varied: {_centre(compose(Sprites((one,), varied), Random(i))) for i in range(30)}
        for varied in (True, False)
    }
    assert looks[False] == {(200, 120, 40)} and len(looks[True]) > 20


def _centre(scene):
    """The colour in the middle of the last thing, which nothing covers."""
    rows, columns = np.nonzero(scene.owner == len(scene.things) - 1)
    return tuple(scene.image[int(rows.mean()), int(columns.mean())].tolist())


@pytest.mark.parametrize("colour", [(220, 20, 30), (245, 150, 40), (250, 215, 60), (60, 170, 70)])
def test_the_colour_asked_for_stays(colour):
    plain = Image.new("RGBA", (16, 16), (*colour, 255))
    hue = rgb_to_hsv(*(c / 255 for c in colour))[0]
    moved = {True: [], False: []}
    for seed in range(50):
        for coloured in (True, False):
            found = np.asarray(vary(plain, Random(seed), coloured))
            assert found.shape == (16, 16, 4)
            assert np.array_equal(found, np.asarray(vary(plain, Random(seed), coloured)))
            away = abs(rgb_to_hsv(*(found[8, 8, :3] / 255))[0] - hue)
            moved[coloured].append(min(away, 1 - away))
    assert max(moved[True]) < 0.03 < 0.06 < max(moved[False])


def test_an_unknown_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="split must be one of train, test"):
        load_sprites(tmp_path, "valid")
