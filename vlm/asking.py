"""From pictures and questions to what a model reads: chat template, placeholders, one padded batch.

Shape letters: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from specmm.vlm.images import Source, open_image

Pictures = Source | Sequence[Source] | None


@dataclass(frozen=True)
class Questions:
    """B questions and the pictures of each; with ``chat`` off the texts are raw prompts with
    placeholders.
    """

    texts: list[str]
    pictures: list[list[Image.Image]]
    chat: bool = True

    @classmethod
    def of(
        cls,
        images: Pictures | Sequence[Pictures],
        questions: str | Sequence[str],
        chat: bool = True,
    ) -> Questions:
        """Checked and opened. One question takes one picture, a list of them, or None; a list of
        questions a list of those, one for each. Raises ``ValueError`` for an empty question and
        numbers that do not match.
        """
        texts = [questions] if isinstance(questions, str) else list(questions)
        each = [images] if isinstance(questions, str) else _per_question(images, len(texts))
        if not texts or not all(text.strip() for text in texts):
            raise ValueError(
                "question must not be empty, got nothing to ask; say what you want to know"
            )
        return cls(
            texts, [[open_image(source) for source in _as_list(item)] for item in each], chat
        )

    def rows(self, some: slice) -> Questions:
        """``some`` of them."""
        return Questions(self.texts[some], self.pictures[some], self.chat)

    def inputs(self, processor: Any) -> dict[str, Any]:
        """What ``processor`` makes of them: ``input_ids`` [B, L] and the rest, as tensors."""
        prompts = [self._prompt(processor, i) for i in range(len(self.texts))]
        bos = getattr(processor.tokenizer, "bos_token", None)
        given = {"images": self.pictures} if any(self.pictures) else {}
        templated = bos is not None and all(prompt.startswith(bos) for prompt in prompts)
        found = processor(
            text=prompts,
            padding=True,
            return_tensors="pt",
            add_special_tokens=not templated,
            **given,
        )
        return dict(found)

    def _prompt(self, processor: Any, i: int) -> str:
        text, count, placeholder = self.texts[i], len(self.pictures[i]), str(processor.image_token)
        found = text.count(placeholder)
        if not self.chat:
            if found != count:
                raise ValueError(
                    f"a raw prompt must hold one {placeholder} for each of its {count} pictures, got {found}"
                )
            return text
        if found:
            raise ValueError(
                f"question must not hold the placeholder {placeholder} (the chat template puts it), got {found}; "
                "leave it out or pass chat=False for a raw prompt"
            )
        if not getattr(processor, "chat_template", None):
            return placeholder * count + "\n" + text + "\n"
        content = [{"type": "image"}] * count + [{"type": "text", "text": text}]
        message = [{"role": "user", "content": content}]
        return str(
            processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        )


def _as_list(item: Any) -> list[Source]:
    if item is None:
        return []
    return list(item) if isinstance(item, list | tuple) else [item]


def _per_question(images: Any, count: int) -> list[Any]:
    """The pictures of each of ``count`` questions."""
    each = [None] * count if images is None else images
    if not isinstance(each, list | tuple) or len(each) != count:
        got = len(each) if isinstance(each, list | tuple) else "one picture"
        raise ValueError(
            f"images must be a list with an entry for each of the {count} questions, got {got}"
        )
    return list(each)
