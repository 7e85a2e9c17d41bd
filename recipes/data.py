"""Where the pocket models' data come from, and what is said when they cannot be made."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image
from torch.nn.functional import interpolate

from recipes.emoji import load
from recipes.scenes.composed import encoder
from recipes.scenes.packing import Encoder, collate, to_pixels
from recipes.scenes.questions import Turn
from recipes.scenes.stream import load_world
from specmm.chats.forms import Chat, chat_of
from specmm.chats.tokens import ChatReader
from specmm.hf.loading.pretrained import find
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.loading.extras import install
from specmm.recipes.conversations import LONGEST, Conversations, Opening
from specmm.recipes.msd import MOSTLY
from specmm.recipes.pictures import Pictures
from specmm.vlm.asking import Questions
from specmm.vlm.loading import is_composed

ROWS = 1536  # where a recipe names no number
EMOJI = Path("~/.cache/specmm/emoji")  # downloaded from npm and rasterised when it is empty


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Raise ``ValueError`` saying what is missing when the emoji in ``folder`` cannot be made."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"rasterising emoji needs {error.name}, run: {install('train')}"
        ) from error
    except subprocess.CalledProcessError as error:
        raise ValueError(
            f"npm could not fetch the emoji ({error.stderr or error}), fill {folder} by hand"
        ) from error


def emoji(folder: Path) -> Any:
    """The training split of the emoji with their classes."""
    with making(folder):
        return load(folder)


def emoji_pictures(place: str, names: Sequence[str], count: int, side: int) -> Pictures:
    """The emoji in ``place``, for a drafter of a model that was trained on them."""
    found = emoji(Path(place).expanduser())
    return Pictures(found.images, found.labels)


def world(folder: Path, split: str) -> Any:
    """Scenes and easy-VQA of a split."""
    with making(folder):
        return load_world(folder, split)


def scene_conversations(places: Sequence[str], opening: Opening) -> Conversations:
    """What ``llava`` trains on, about pictures or facts without one; descriptions of held-out
    scenes are asked for.

    A model that learnt scenes reads whole chats as then, any other one the first question of each
    through its processor.
    """
    return _scenes(places, opening, _encoder(opening.reader.reader, opening.target()))


def scene_lines(places: Sequence[str], opening: Opening) -> Conversations:
    """As :func:`scene_conversations`, but every model reads first questions by its processor, so
    that it may answer them itself.
    """
    return _scenes(places, opening, None)


def _scenes(places: Sequence[str], opening: Opening, packed: Any) -> Conversations:
    [folder] = (Path(place).expanduser() for place in places)
    drawn = world(folder, "train")

    def draw(number: int, visual: bool) -> Any:
        random = Random(f"scene {opening.seed} {number} {visual}")
        return next(drawn.conversations(packed or FirstTurn(), random, float(visual)))

    def rows(count: int | None) -> Sequence[Any]:
        random = Random(opening.seed)
        return [draw(i, random.random() < MOSTLY) for i in range(count or ROWS)]

    def prompts(count: int) -> VLMPrompt:
        asked = _described(world(folder, "test"), count)
        return VLMPrompt(asked.inputs(opening.reader.reader), LONGEST, asked)

    read = collate if packed else opening.reader.read
    return Conversations(rows, draw, prompts, opening.reader, read)


class FirstTurn:
    """Makes lines of chats, as :class:`Encoder` makes samples."""

    def chat(self, turns: Sequence[Turn], image: Any = None) -> Chat:
        """The first of ``turns`` about the picture ``image`` [R, R, 3]."""
        picture = None if image is None else Image.fromarray(image)
        row = {"question": turns[0].question, "answer": turns[0].answer, "image": picture}
        return chat_of(row, Path())


def _encoder(processor: Any, target: Any) -> Any:
    """What packs chats as the model's own training did; None where its processor reads otherwise.

    Pictures come in the size that the target sees.
    """
    config = target.model.config
    if is_composed(find(target.name)):
        return encoder(target.model, processor.tokenizer)
    sees = getattr(config.vision_config, "image_size", None)
    count = getattr(config, "image_seq_length", None)
    if not isinstance(sees, int) or count is None:
        return None

    def pixels(image: Any) -> Any:
        return interpolate(to_pixels(image)[None], (sees, sees), mode="bicubic", antialias=True)[0]

    made = Encoder(processor.tokenizer, count, pixels=pixels)
    return made if _reads_alike(made, processor) else None


def _reads_alike(packed: Any, processor: Any) -> bool:
    """Whether the ids of a chat about a picture are those that ``processor`` makes of it."""
    if packed.image is None:
        return False
    picture = np.zeros((64, 64, 3), np.uint8)
    chat = packed.chat([Turn("Is it?", "yes", "")], picture)
    line = FirstTurn().chat([Turn("Is it?", "yes", "")], picture)
    prompt, _ = ChatReader(processor, [processor.tokenizer.eos_token_id], 1024).read([line])
    return bool(prompt.rows()[0] == chat.input_ids.tolist())


def _described(held_out: Any, count: int) -> Any:
    """Questions for descriptions of ``count`` scenes."""
    random = Random(0)
    drawn = [held_out.scene(random) for _ in range(count)]
    return Questions.of(
        [Image.fromarray(scene.image) for scene, _ in drawn],
        [turns[0].question for _, turns in drawn],
    )
