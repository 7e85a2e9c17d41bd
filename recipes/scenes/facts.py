"""Questions without a picture: what a thing of the scenes' world is, looks like and is for, and
made-up scenes.
"""

from __future__ import annotations

from random import Random

from recipes.scenes.kinds import KINDS, Kind
from recipes.scenes.questions import Turn, capital, description
from recipes.scenes.scenes import BACKGROUNDS, Scene, Thing, blank, lay_out


def fact(random: Random) -> Turn:
    """A question about one kind of thing, or for a made-up description."""
    kind = random.choice(KINDS)
    return random.choice((_what, _looks, _use, _about, _made_up, _made_up))(kind, random)


def _what(kind: Kind, random: Random) -> Turn:
    asked = random.choice(("What is {}?", "What sort of thing is {}?")).format(kind.article)
    return Turn(asked, f"{capital(kind.article)} is {kind.group}.", "fact")


def _looks(kind: Kind, random: Random) -> Turn:
    asked = random.choice(("What does {} look like?", "How does {} look?")).format(kind.article)
    return Turn(asked, kind.looks, "fact")


def _use(kind: Kind, random: Random) -> Turn:
    return Turn(
        f"What do you know about {kind.plural}?",
        f"{capital(kind.article)} is {kind.group}. {kind.use}",
        "fact",
    )


def _about(kind: Kind, random: Random) -> Turn:
    told = f"{capital(kind.article)} is {kind.group}. {kind.looks} {kind.use}"
    other = random.choice([k for k in KINDS if k.group == kind.group])
    told += "" if other is kind else f" {capital(other.article)} is {kind.group} too."
    return Turn(
        random.choice(("Tell me about {}.", "Write about {}.")).format(kind.plural), told, "fact"
    )


def _made_up(kind: Kind, random: Random) -> Turn:
    kinds = [kind, random.choice(KINDS)]
    things = tuple(
        Thing(k.name, random.choice(list(k.icons.values())), size, place)
        for k, (place, size, _) in zip(kinds, sorted(lay_out(2, random)), strict=True)
    )
    scene = Scene(*blank(), random.choice(list(BACKGROUNDS)), things)
    wanted = f"Imagine a picture with {kinds[0].article} and {kinds[1].article}."
    return Turn(
        f"{wanted} {random.choice(('Describe it.', 'What is in it?'))}",
        description(scene, random).answer,
        "fact",
    )
