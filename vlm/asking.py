"""From pictures and questions to a model's inputs: open pictures, apply the chat template, pad.

Shape letters: B batch, L positions.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Source = str | Path | Image.Image
Pictures = Source | Sequence[Source] | None  # of one question
Images = Pictures | Sequence[Pictures]
Texts = str | Sequence[str]
MOST_PIXELS = 80_000_000  # a larger picture takes more than 240 MB before it is scaled down
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")


@dataclass(frozen=True)
class Questions:
    """B questions and the pictures of each; without ``chat`` they are prompts with placeholders."""

    texts: list[str]
    pictures: list[list[Image.Image]]
    chat: bool = True

    @classmethod
    def of(cls, images: Images, questions: Texts, chat: bool = True) -> Questions:
        """Checked and opened.

        One question takes one picture, a list of them, or None; a list of questions a list of
        those, one for each. Raises ``ValueError`` for an empty question and numbers that do not
        match.
        """
        texts = [questions] if isinstance(questions, str) else list(questions)
        each = [images] if isinstance(questions, str) else _per_question(images, len(texts))
        if not texts or not all(text.strip() for text in texts):
            raise ValueError("question must not be empty")
        return cls(texts, [_opened(item) for item in each], chat)

    def rows(self, some: slice) -> Questions:
        """``some`` of them."""
        return Questions(self.texts[some], self.pictures[some], self.chat)

    def inputs(self, processor: Any) -> dict[str, Any]:
        """What ``processor`` makes of them: ``input_ids`` [B, L] and the rest, as tensors."""
        pairs = zip(self.texts, self.pictures, strict=True)
        prompts = [self._prompt(processor, text, len(pictures)) for text, pictures in pairs]
        bos = getattr(processor.tokenizer, "bos_token", None)
        templated = bos is not None and all(prompt.startswith(bos) for prompt in prompts)
        given = {"images": self.pictures} if any(self.pictures) else {}
        found = processor(
            text=prompts,
            padding=True,
            return_tensors="pt",
            add_special_tokens=not templated,
            **given,
        )
        return dict(found)

    def _prompt(self, processor: Any, text: str, count: int) -> str:
        placeholder = str(processor.image_token)
        found = text.count(placeholder)
        if not self.chat:
            if found != count:
                raise ValueError(
                    f"a raw prompt must hold one {placeholder} for each of its {count} pictures, "
                    f"got {found}"
                )
            return text
        if found:
            raise ValueError(
                f"question must not hold the placeholder {placeholder} (the chat template puts "
                f"it), got {found}; leave it out or pass chat=False for a raw prompt"
            )
        if not getattr(processor, "chat_template", None):
            return placeholder * count + "\n" + text + "\n"
        content = [{"type": "image"}] * count + [{"type": "text", "text": text}]
        message = [{"role": "user", "content": content}]
        prompt = processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return str(prompt)


def _opened(item: Any) -> list[Image.Image]:
    """The pictures of one question."""
    if item is None:
        return []
    return [open_image(source) for source in (item if isinstance(item, list | tuple) else [item])]


def _per_question(images: Any, count: int) -> list[Any]:
    """The pictures of each of ``count`` questions."""
    each = [None] * count if images is None else images
    if not isinstance(each, list | tuple) or len(each) != count:
        got = len(each) if isinstance(each, list | tuple) else "one picture"
        raise ValueError(
            f"images must be a list with an entry for each of the {count} questions, got {got}"
        )
    return list(each)


def open_image(source: Source) -> Image.Image:
    """RGB picture of a file or a PIL image, turned as its camera says, transparency on white.

    An animation gives its first frame; 16 bits are scaled to 8. Raises ``ValueError`` for what is
    no picture, is damaged, or has more than ``MOST_PIXELS`` pixels, as its header tells before
    anything is decoded.
    """
    name = "picture" if isinstance(source, Image.Image) else str(source)
    image = source if isinstance(source, Image.Image) else _read_header(name)
    width, height = image.size
    if not 0 < width * height <= MOST_PIXELS:
        image.close()
        raise ValueError(
            f"{name} must have 1 to {MOST_PIXELS:,} pixels, got {width} x {height}; "
            "scale it down before asking"
        )
    try:
        return _rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # a damaged file makes a decoder fail in any way
        raise ValueError(
            f"{name} must be a whole picture, got a damaged or truncated one ({error})"
        ) from error


def _read_header(name: str) -> Image.Image:
    """The file opened, not decoded; Pillow's own limit is higher than ours."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(name)
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"{name} must have 1 to {MOST_PIXELS:,} pixels ({error}); scale it down"
        ) from error
    except Exception as error:
        # A damaged header fails in any way; the error of a missing file is clear by itself.
        if isinstance(error, OSError) and not isinstance(error, UnidentifiedImageError):
            raise
        raise ValueError(
            f"{name} must be a picture, got a file of another kind or an empty one"
        ) from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in DEEP_MODES:
        # Pillow would clip 16 bits at 255; floats are taken to run from 0 to 1.
        values = np.asarray(image, dtype=np.float64)
        values = values * 255 if image.mode == "F" else values / 257
        return Image.fromarray(values.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
