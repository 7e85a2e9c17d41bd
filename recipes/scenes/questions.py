"""What a person would ask about a scene, and the answers: from one word to sixty tokens.

A short question has one right answer, a word or a few; a description says the same in words that
vary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from recipes.scenes.kinds import BY_NAME, KINDS
from recipes.scenes.scenes import PLACES, Scene, Thing

NUMBERS = ("zero", "one", "two", "three", "four")
SHORT = ("what", "where", "how many", "colour", "size", "is there", "list")


@dataclass(frozen=True)
class Turn:
    """A question, its answer and the kind of question."""

    question: str
    answer: str
    kind: str


def short_questions(scene: Scene, random: Random) -> list[Turn]:
    """Every short question of the scene, one of each sort for each thing, in random order."""
    kinds = Counter(thing.kind for thing in scene.things)
    alone = [thing for thing in scene.things if kinds[thing.kind] == 1]
    turns = [
        _background(scene, random),
        _listing(scene, random),
        _total(scene, random),
        _any_one(scene, random),
    ]
    turns += [_at_place(thing, random) for thing in scene.things]
    for thing in alone:
        turns += [_where(thing, random), _size(thing, random)]
        if thing.colour:
            turns.append(_colour(thing, random))
    turns += [_count(kind, kinds[kind], random) for kind in kinds]
    turns += [_present(kind, random) for kind in kinds]
    absent = random.sample([kind.name for kind in KINDS if kind.name not in kinds], len(kinds))
    turns += [_present(kind, random, there=False) for kind in absent]
    turns.append(_count(random.choice(absent), 0, random))
    random.shuffle(turns)
    return turns


def description(scene: Scene, random: Random) -> Turn:
    """A question for the whole picture with an answer of twenty to sixty tokens."""
    questions, tell = random.choice(_TELLERS)
    return Turn(random.choice(questions), random.choice(tell(scene)), "describe")


def tellings(scene: Scene) -> set[str]:
    """Every true description of the scene in the words of ``description``."""
    return {text for _, tell in _TELLERS for text in tell(scene)}


def name_of(thing: Thing) -> str:
    """A thing as a description names it: "a small red heart"."""
    return " ".join(["a", thing.size, thing.colour, thing.kind]).replace("  ", " ")


def joined(parts: list[str]) -> str:
    """Parts as one enumeration: "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def counted(kind: str, count: int) -> str:
    """ "a cat", "two cats"."""
    return BY_NAME[kind].article if count == 1 else f"{NUMBERS[count]} {BY_NAME[kind].plural}"


def capital(text: str) -> str:
    """``text`` with its first letter in upper case."""
    return text[0].upper() + text[1:]


def _background(scene: Scene, random: Random) -> Turn:
    asked = (
        "What colour is the background?",
        "What color is the background?",
        "Which colour is the background?",
    )
    return Turn(random.choice(asked), scene.background, "colour")


def _listing(scene: Scene, random: Random) -> Turn:
    parts = [
        counted(kind, count)
        for kind, count in Counter(thing.kind for thing in scene.things).items()
    ]
    return Turn(
        random.choice(("What can you see?", "What is in the picture?")), joined(parts), "list"
    )


def _total(scene: Scene, random: Random) -> Turn:
    asked = (
        "How many things are there?",
        "How many things do you see?",
        "How many things are in the picture?",
    )
    return Turn(random.choice(asked), NUMBERS[len(scene.things)], "how many")


def _any_one(scene: Scene, random: Random) -> Turn:
    if len(scene.things) == 1:
        return Turn(
            random.choice(("What is it?", "What is this?")),
            BY_NAME[scene.things[0].kind].article,
            "what",
        )
    return _at_place(random.choice(scene.things), random)


def _at_place(thing: Thing, random: Random) -> Turn:
    asked = ("What is {}?", "What do you see {}?")
    return Turn(
        random.choice(asked).format(PLACES[thing.place]), BY_NAME[thing.kind].article, "what"
    )


def _where(thing: Thing, random: Random) -> Turn:
    asked = ("Where is the {}?", "Where do you see the {}?")
    return Turn(random.choice(asked).format(thing.kind), PLACES[thing.place], "where")


def _size(thing: Thing, random: Random) -> Turn:
    asked = ("Is the {} big or small?", "How big is the {}?")
    return Turn(random.choice(asked).format(thing.kind), thing.size, "size")


def _colour(thing: Thing, random: Random) -> Turn:
    asked = ("What colour is the {}?", "What color is the {}?", "Which colour is the {}?")
    return Turn(random.choice(asked).format(thing.kind), thing.colour, "colour")


def _count(kind: str, count: int, random: Random) -> Turn:
    asked = ("How many {} are there?", "How many {} do you see?", "How many {} are in the picture?")
    return Turn(random.choice(asked).format(BY_NAME[kind].plural), NUMBERS[count], "how many")


def _present(kind: str, random: Random, there: bool = True) -> Turn:
    asked = ("Is there {}?", "Is there {} in the picture?", "Do you see {}?")
    return Turn(
        random.choice(asked).format(BY_NAME[kind].article), "yes" if there else "no", "is there"
    )


def _total_words(scene: Scene) -> str:
    count = len(scene.things)
    return f"{NUMBERS[count]} thing{'s' if count > 1 else ''}"


def _in_one_sentence(scene: Scene) -> list[str]:
    where = joined([f"{name_of(thing)} {PLACES[thing.place]}" for thing in scene.things])
    verb = "is" if len(scene.things) == 1 else "are"
    openings = ("The background is {}. There {} {}: {}.", "On a {} background there {} {}: {}.")
    return [
        opening.format(scene.background, verb, _total_words(scene), where) for opening in openings
    ]


def _place_by_place(scene: Scene) -> list[str]:
    openings = ("I see {} on a {} background.", "There is a picture of {} on a {} background.")
    there = " ".join(
        f"{capital(PLACES[thing.place])} there is {name_of(thing)}." for thing in scene.things
    )
    return [
        f"{opening.format(_total_words(scene), scene.background)} {there}" for opening in openings
    ]


def _thing_by_thing(scene: Scene) -> list[str]:
    openings = (
        "This picture shows {} in front of a {} background.",
        "Here we have {} on a {} ground.",
    )
    parts = joined(
        [
            counted(kind, count)
            for kind, count in Counter(thing.kind for thing in scene.things).items()
        ]
    )
    there = " ".join(
        f"{capital(name_of(thing))} is {PLACES[thing.place]}." for thing in scene.things
    )
    return [f"{opening.format(parts, scene.background)} {there}" for opening in openings]


_TELLERS: tuple[tuple[tuple[str, ...], Callable[[Scene], list[str]]], ...] = (
    (("Describe the picture.", "Describe this picture."), _in_one_sentence),
    (("What do you see in the picture?", "Tell me what you see."), _place_by_place),
    (("Describe the picture in detail.", "Where is everything?"), _thing_by_thing),
)
