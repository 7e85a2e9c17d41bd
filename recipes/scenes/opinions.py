"""Questions with what others answered, some of them wrongly: a judge learns to weigh that against
the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from recipes.scenes.questions import Turn
from specmm.vlm.verdict import VerdictPrompts

PROMPTS = VerdictPrompts(
    score="{question}", expert="{number}. {answer}", verdict="{experts}\n {question}"
)
MOST = 3  # opinions about one question
RIGHT = (0.3, 0.95)  # shares of right opinions a judge meets
ALIKE = 0.5  # probability that those who are wrong say the same
UNWEIGHED = "describe"  # too long for three of them


def weighed(turn: Turn, answers: Mapping[str, Sequence[str]], random: Random) -> Turn:
    """``turn`` with opinions before its question; wrong ones come from ``answers`` to its kind of
    question.
    """
    wrong = [answer for answer in answers.get(turn.kind, ()) if answer != turn.answer]
    if turn.kind == UNWEIGHED or not wrong:
        return turn
    share, alike = random.uniform(*RIGHT), random.random() < ALIKE
    common = random.choice(wrong)
    said = [
        turn.answer if random.random() < share else common if alike else random.choice(wrong)
        for _ in range(random.randint(1, MOST))
    ]
    return replace(turn, question=PROMPTS.ask(turn.question, said))
