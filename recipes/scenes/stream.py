"""The mixture a small LLaVA is trained on, drawn from a seed: easy-VQA, scenes, and facts without a
picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerFast

from recipes.scenes.easy import Example, load_easy
from recipes.scenes.facts import fact
from recipes.scenes.opinions import weighed
from recipes.scenes.packing import Encoder, Sample
from recipes.scenes.questions import Turn, description, short_questions
from recipes.scenes.scenes import Scene, compose
from recipes.scenes.sprites import Array, Sprites, load_sprites
from recipes.scenes.tokenizer import build_tokenizer

EASY = 0.3  # share of easy-VQA among pictures
CHATS = 0.2  # share of rows whose turns follow each other, as in a conversation
OPINIONS = 0.15  # share of pictures whose questions come with what others answered
CORPUS = 1000  # scenes, facts and easy-VQA pictures the tokenizer learns from


@dataclass(frozen=True)
class World:
    """Everything one split is drawn from."""

    sprites: Sprites
    easy: Sequence[Example]

    @cached_property
    def answers(self) -> dict[str, list[str]]:
        """Answers that occur, by kind of question."""
        random = Random(0)
        found = dict[str, set[str]]()
        for turn in (turn for _ in range(CORPUS) for turn in self.example(random)[1]):
            found.setdefault(turn.kind, set()).add(turn.answer)
        return {kind: sorted(answers) for kind, answers in found.items()}

    def scene(self, random: Random) -> tuple[Scene, list[Turn]]:
        """A new scene and its questions, the description first."""
        scene = compose(self.sprites, random)
        return scene, [description(scene, random), *short_questions(scene, random)]

    def example(self, random: Random) -> tuple[Array, list[Turn]]:
        """A picture, composed or of easy-VQA, and questions about it in random order."""
        if self.easy and random.random() < EASY:
            example = random.choice(self.easy)
            return example.image, random.sample(example.turns, len(example.turns))
        scene, turns = self.scene(random)
        return scene.image, turns

    def row(self, encoder: Encoder, random: Random, length: int, visual: bool = True) -> Sample:
        """A training row of ``length`` tokens: questions about one picture, or about none."""
        image, turns = (
            self.example(random) if visual else (None, [fact(random) for _ in range(length // 12)])
        )
        if visual and random.random() < OPINIONS:
            turns = [weighed(turn, self.answers, random) for turn in turns]
        if random.random() < CHATS:
            random.shuffle(turns)
            return encoder.chat(turns, image, length)
        return encoder.side_by_side(turns, image, length)

    def conversations(
        self, encoder: Encoder, random: Random, visual: float = 1.0
    ) -> Iterator[Sample]:
        """Endless chats of one or two turns, a share ``visual`` of them about a picture; for
        drafters to learn from.

        Nothing is padded: rows are as long as their conversation.
        """
        while True:
            image, turns = (
                self.example(random)
                if random.random() < visual
                else (None, [fact(random), fact(random)])
            )
            first = turns[0] if random.random() < 0.7 else random.choice(turns)
            yield encoder.chat([first, random.choice(turns)][: random.randint(1, 2)], image)


def load_world(folder: Path, split: str = "train") -> World:
    """The data of ``split``; emoji are fetched into ``folder``, easy-VQA comes from its package.

    Raises ``ValueError`` when a package is missing.
    """
    return World(load_sprites(folder, split), load_easy(split))


def learn_tokenizer(world: World, seed: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer of the words of ``world``."""
    return build_tokenizer(_texts(world, Random(seed)))


def _texts(world: World, random: Random) -> Iterator[str]:
    for _ in range(CORPUS):
        for turn in [*world.scene(random)[1], *world.example(random)[1], fact(random)]:
            yield turn.question
            yield turn.answer
