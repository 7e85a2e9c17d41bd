"""The world of the scenes: kinds of thing, the icons that show them, and what can be said about
them in words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of thing. ``icons`` maps an icon's name to its colour, empty where styles disagree
    about it.
    """

    name: str
    plural: str
    icons: dict[str, str]
    group: str  # "a fruit"
    looks: str  # "It is long and yellow."
    use: str  # "People peel it and eat it."

    @property
    def article(self) -> str:
        """ "a panda", "an apple"."""
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


def _kind(name: str, icons: str, group: str, looks: str, use: str, plural: str = "") -> Kind:
    """``icons`` is "icon:colour icon …", the colour optional."""
    return Kind(name, plural or f"{name}s", _coloured(icons), group, looks, use)


def _coloured(icons: str) -> dict[str, str]:
    return {icon: colour for icon, _, colour in (part.partition(":") for part in icons.split())}


def relatives(kind: str) -> dict[str, str]:
    """Icons of ``kind`` that only training sees, with their colours; see ``RELATIVES``."""
    return _coloured(RELATIVES.get(kind, ""))


KINDS = (
    _kind(
        "apple",
        "red-apple:red green-apple:green",
        "a fruit",
        "It is red or green.",
        "It grows on a tree.",
    ),
    _kind(
        "bag",
        "handbag backpack",
        "a useful thing",
        "It is soft and has a strap.",
        "People carry things in it.",
    ),
    _kind(
        "ball",
        "soccer-ball",
        "a toy",
        "It is round, black and white.",
        "Children kick it over the grass.",
    ),
    _kind("banana", "banana", "a fruit", "It is long and yellow.", "Monkeys peel it and eat it."),
    _kind(
        "book",
        "closed-book:red blue-book:blue green-book:green orange-book:orange",
        "a useful thing",
        "It is flat and full of paper.",
        "People read it in the evening.",
    ),
    _kind(
        "butterfly",
        "butterfly",
        "an animal",
        "It has four wings.",
        "It flies to the flowers.",
        "butterflies",
    ),
    _kind(
        "cactus",
        "cactus",
        "a plant",
        "It is green and has spines.",
        "It grows in the hot desert.",
        "cactuses",
    ),
    _kind(
        "car",
        "automobile sport-utility-vehicle",
        "a vehicle",
        "It has four wheels.",
        "It drives on the road.",
    ),
    _kind(
        "cat",
        "cat-face grinning-cat",
        "an animal",
        "It has whiskers and soft ears.",
        "It sleeps and catches mice.",
    ),
    _kind(
        "fish",
        "fish tropical-fish",
        "an animal",
        "It has fins and a tail.",
        "It swims in the sea.",
        "fish",
    ),
    _kind(
        "flower",
        "hibiscus cherry-blossom sunflower",
        "a plant",
        "It has petals.",
        "It opens in the spring.",
    ),
    _kind(
        "frog", "frog", "an animal", "It is green and has a wide mouth.", "It jumps into the pond."
    ),
    _kind(
        "heart",
        "red-heart:red blue-heart:blue green-heart:green yellow-heart:yellow purple-heart:purple",
        "a sign",
        "It has two round halves and a point.",
        "People draw it when they are in love.",
    ),
    _kind("house", "house", "a building", "It has a door and a roof.", "People live in it."),
    _kind("key", "key", "a useful thing", "It is small and made of metal.", "It opens the door."),
    _kind(
        "moon",
        "crescent-moon",
        "a thing in the sky",
        "It is yellow and bright.",
        "It shines at night.",
    ),
    _kind(
        "mushroom",
        "mushroom",
        "a thing in the forest",
        "It has a red hat with dots.",
        "It grows after the rain.",
    ),
    _kind(
        "octopus",
        "octopus",
        "an animal",
        "It has eight arms.",
        "It hides between the rocks.",
        "octopuses",
    ),
    _kind("panda", "panda", "an animal", "It is black and white.", "It eats bamboo all day."),
    _kind(
        "pig", "pig-face", "an animal", "It is pink and has a round nose.", "It lives on a farm."
    ),
    _kind(
        "pizza",
        "pizza",
        "a meal",
        "It is flat and has cheese on top.",
        "People eat it while it is hot.",
    ),
    _kind("rocket", "rocket", "a vehicle", "It is long and has fins.", "It flies to the moon."),
    _kind(
        "star",
        "star",
        "a thing in the sky",
        "It has five points and is yellow.",
        "It shines at night.",
    ),
    _kind(
        "tree",
        "deciduous-tree evergreen-tree",
        "a plant",
        "It is tall and green.",
        "Birds build nests in it.",
    ),
    _kind(
        "umbrella",
        "umbrella",
        "a useful thing",
        "It is round and has a handle.",
        "It keeps the rain away.",
    ),
)
# icons of a kind for training only, in styles that no icon of the kind is held out in
RELATIVES = {
    "bag": "clutch-bag shopping-bags briefcase",
    "book": "notebook notebook-with-decorative-cover ledger books",
    "car": "oncoming-automobile taxi racing-car police-car",
    "cat": "cat black-cat cat-with-wry-smile weary-cat kissing-cat grinning-cat-with-smiling-eyes",
    "fish": "blowfish",
    "flower": "tulip rose blossom wilted-flower",
    "heart": "black-heart:black white-heart:white brown-heart:brown orange-heart:orange "
    "growing-heart",
    "house": "house-with-garden derelict-house",
    "key": "old-key",
    "moon": "first-quarter-moon-face last-quarter-moon-face waxing-crescent-moon",
    "mushroom": "brown-mushroom",
    "pig": "pig",
    "star": "glowing-star",
    "tree": "palm-tree christmas-tree",
    "umbrella": "umbrella-with-rain-drops closed-umbrella",
}
BY_NAME = {kind.name: kind for kind in KINDS}
COLOURS = (
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "gray",
    "white",
    "black",
    "teal",
)
SHAPES = ("circle", "rectangle", "triangle")  # what easy-VQA draws
