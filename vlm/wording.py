"""Writes questions in the form that a transformers processor expects, found by experiment.

Processors differ in where a picture's placeholder comes from (the chat template, the user or the
processor), in the form of a message's content in templates, and in how pictures are nested.

Shape letters: B batch, L positions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jinja2 import TemplateError
from PIL import Image

from specmm.hf.loading.pretrained import unlogged
from specmm.hf.prompts.messages import FAULTS, Chat, as_parts, as_text, fits, written
from specmm.hf.prompts.prompt import PER_TOKEN
from specmm.vlm.videos import Video

LOGGER = logging.getLogger(__name__)

NOT_ASKED = ("labels",)  # added by processors for training
ONE = {"image": 1, "video": 0}
TWO = {"image": 2, "video": 0}
PROBE = 32  # pixels a side of the picture that tells who puts placeholders

Row = tuple[str, Sequence[Image.Image], Sequence[Video]]  # a prompt and what belongs to it

# by processor: its template, and whether that takes parts
_forms: WeakKeyDictionary[Any, tuple[Any, bool]] = WeakKeyDictionary()
_rowwise: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # whether inputs are by row
_places: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # whether a processor puts them itself


def warn_of_none(processor: Any, name: str) -> None:
    """Log a warning if the model called ``name`` has no chat template: questions stay raw."""
    if template_of(processor) is None and not places_pictures(processor):
        LOGGER.warning(
            "%s has no chat template, so questions go in as they are, after their pictures; put a "
            "chat_template.jinja into its folder if it is a chat model",
            name,
        )


def prompt(processor: Any, text: str, counts: Mapping[str, int], chat: bool) -> str:
    """The text for ``processor`` of a question ``text`` about ``counts`` images and videos; without
    ``chat`` it is ``text`` itself, checked.

    Raises ``ValueError`` for misfitting placeholders and for kinds of input that the processor
    lacks.
    """
    _check_videos(processor, counts)
    tokens = {kind: placeholder(processor, kind) for kind in counts}
    template = template_of(processor)
    placed = template is None and places_pictures(processor)
    if not chat:
        _check_raw(text, counts, tokens)
        return text.removeprefix(_marked(processor, "", counts)) if placed else text
    for token in filter(None, tokens.values()):
        if token in text:
            raise ValueError(
                f"question must not hold the placeholder {token} (the chat template puts "
                f"it), got {text.count(token)}; leave it out or pass chat=False for a raw prompt"
            )
    if template is None:
        return text if placed else _marked(processor, f"\n{text}\n", counts)
    return _written(processor, Chat(_as_message(text, counts)), counts)


def conversation(processor: Any, chat: Chat) -> str:
    """The text of a ``chat`` for ``processor``, in its chat template.

    Raises ``ValueError`` if the template does not take all of the chat.
    """
    counts = {"image": len(chat.images), "video": len(chat.videos)}
    _check_videos(processor, counts)
    if template_of(processor) is None:
        raise ValueError("messages need a chat template, got a model without; ask one question")
    return _written(processor, chat, counts)


def _written(processor: Any, chat: Chat, counts: Mapping[str, int]) -> str:
    """``chat`` in the chat template, with texts as strings, or as parts if that fails."""
    forms = [
        lambda given: given if isinstance(given, str) else content(processor, given),
        lambda given: content(processor, as_parts(given)),
    ]
    return written(chat, partial(_templated, processor), forms, tokens_of(processor, counts))


def _check_videos(processor: Any, counts: Mapping[str, int]) -> None:
    if counts["video"] and getattr(processor, "video_processor", None) is None:
        raise ValueError(
            f"videos need a model that takes them, got a {type(processor).__name__}; give frames "
            "as pictures"
        )


def _check_raw(text: str, counts: Mapping[str, int], tokens: Mapping[str, str | None]) -> None:
    """Raise ``ValueError`` unless ``text`` has a placeholder for each picture and video."""
    for kind, token in tokens.items():
        if token and text.count(token) != counts[kind]:
            many = {"image": "pictures", "video": "videos"}[kind]
            raise ValueError(
                f"a raw prompt must hold one {token} for each of its {counts[kind]} {many}, got "
                f"{text.count(token)}"
            )


def read(
    processor: Any,
    prompts: Sequence[str],
    pictures: Sequence[Sequence[Image.Image]],
    videos: Sequence[Sequence[Video]],
) -> dict[str, Any]:
    """The output of ``processor`` for ``prompts`` with the pictures and videos of each.

    Some processors look for pictures only in the first row, or only up to the last row with
    pictures; they are called with an extra row with a picture before and after, which are removed
    again. Raises ``ValueError`` for inputs that a processor does not accept.
    """
    rows = list(zip(prompts, pictures, videos, strict=True))
    has_pictures = bool(pictures[0]) and bool(pictures[-1])
    try:
        inputs = _called(processor, rows)
        lengths = {len(value) for value in inputs.values()}
        if has_pictures or not any(pictures) or lengths == {len(rows)} or not _by_row(processor):
            return inputs
    except ValueError as error:
        if has_pictures:
            raise
        with suppress(ValueError):
            return _between(processor, rows)
        raise error
    return _between(processor, rows)


def _called(processor: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """The output of ``processor`` for ``rows``."""
    prompts = [text for text, _, _ in rows]
    arguments = _media(processor, [images for _, images, _ in rows], [clips for *_, clips in rows])
    bos = getattr(processor.tokenizer, "bos_token", None)
    if bos is not None and all(text.startswith(bos) for text in prompts):
        arguments["add_special_tokens"] = False
    try:
        with _quiet(processor):
            inputs = dict(processor(text=prompts, padding=True, return_tensors="pt", **arguments))
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        unset = sorted(name for name, value in vars(processor).items() if value is None)
        if isinstance(error, TypeError) and "NoneType" in reason and unset:
            reason += f"; its config has no {' and no '.join(unset)}, which the model's tells"
        raise ValueError(
            f"{type(processor).__name__} cannot read the question: {reason}"
        ) from error
    return {k: v for k, v in inputs.items() if k not in NOT_ASKED and v is not None}


def _between(processor: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """As ``_called``, with an extra picture row before and after ``rows``, removed afterwards."""
    sample = _sample(processor, ONE)
    counts = {name: len(value) for name, value in _called(processor, [sample]).items()}
    inputs = _called(processor, [sample, *rows, sample])
    inputs = {name: value[counts[name] : -counts[name]] for name, value in inputs.items()}
    used = inputs["attention_mask"].any(0)  # a row that is left out may be the longest
    shape = inputs["input_ids"].shape
    inputs = {k: v[:, used] if v.shape[:2] == shape else v for k, v in inputs.items()}
    has_pictures = any(pictures for _, pictures, _ in rows)
    return {k: v for k, v in inputs.items() if has_pictures or k in PER_TOKEN}


def _by_row(processor: Any) -> bool:
    """Whether ``processor``'s picture outputs have one entry a row instead of one a picture."""
    if processor not in _rowwise:
        inputs = _called(processor, [_sample(processor, TWO)])
        _rowwise[processor] = all(len(value) == 1 for value in inputs.values())
    return _rowwise[processor]


def _sample(processor: Any, counts: Mapping[str, int]) -> Row:
    """A row with blank pictures."""
    blank = [Image.new("RGB", (PROBE, PROBE))] * counts["image"]
    return prompt(processor, "a", counts, True), blank, []


def places_pictures(processor: Any) -> bool:
    """Whether ``processor`` puts the placeholders of pictures into texts that hold none."""
    if processor not in _places:
        picture = Image.new("RGB", (PROBE, PROBE))
        try:
            with _quiet(processor):
                processor(text=["a"], images=[[picture]])
            _places[processor] = True
        except FAULTS:
            _places[processor] = False
    return _places[processor]


def _quiet(processor: Any) -> AbstractContextManager[None]:
    """Silence the advice of a ``processor`` to insert placeholders that it inserts itself."""
    return unlogged(type(processor).__module__, "passing both `text` and `images`")


def _media(
    processor: Any, pictures: Sequence[Sequence[Image.Image]], videos: Sequence[Sequence[Video]]
) -> dict[str, Any]:
    """The processor's keyword arguments for pictures and videos."""
    arguments: dict[str, Any] = {}
    if any(pictures):
        counts = {len(shown) for shown in pictures}
        if placeholder(processor, "image") is None and counts != {1}:
            raise ValueError(
                f"{type(processor).__name__} takes one picture for each question, got "
                f"{min(counts)} to {max(counts)}; ask the questions apart"
            )
        arguments["images"] = [list(shown) for shown in pictures]
    if any(videos):
        if any(pictures) and _keys(processor.image_processor) & _keys(processor.video_processor):
            raise ValueError(
                f"{type(processor).__name__} takes pictures or videos, got both, of which it would "
                "drop the pictures; ask the questions apart, or give frames as pictures"
            )
        read = [video.frames(processor.video_processor) for video in chain.from_iterable(videos)]
        arguments["videos"] = [frames for frames, _ in read]
        arguments["video_metadata"] = [metadata for _, metadata in read]
        arguments["do_sample_frames"] = False
    return arguments


def _keys(part: Any) -> set[str]:
    """The names of the inputs that a ``part`` of a processor makes."""
    return set(getattr(part, "model_input_names", ()))


def placeholder(processor: Any, kind: str) -> str | None:
    """The placeholder in a text for an image or a video; None if there is none."""
    token = getattr(processor, f"{kind}_token", None)
    return None if token is None else str(token)


def template_of(processor: Any) -> Any:
    """The chat template, which older folders store with the tokenizer."""
    template = getattr(processor, "chat_template", None)
    return template or getattr(processor.tokenizer, "chat_template", None)


def content(processor: Any, parts: Sequence[Mapping[str, Any]]) -> Any:
    """A message's ``parts``, such as {"type": "text", "text": …}, as the template takes them."""
    if template_of(processor) is None or _takes_parts(processor):
        return [dict(part) for part in parts]
    texts = (p["text"] if p["type"] == "text" else placeholder(processor, p["type"]) for p in parts)
    return "".join(text or "" for text in texts)


def _takes_parts(processor: Any) -> bool:
    """Whether the chat template takes parts as a message's content, not plain text with
    placeholders before it; found by trying a question about one picture.
    """
    template = template_of(processor)
    cached = _forms.get(processor)
    if cached is not None and cached[0] == template:
        return cached[1]
    parts = False
    with suppress(TemplateError, *FAULTS):
        parts = fits(_templated(processor, _as_message("a", ONE)), ["a"], tokens_of(processor, ONE))
    _forms[processor] = template, parts
    return parts


def _marked(processor: Any, text: str, counts: Mapping[str, int]) -> str:
    """``text`` preceded by its placeholders."""
    return "".join((placeholder(processor, kind) or "") * n for kind, n in counts.items()) + text


def _as_message(text: str, counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """A question ``text`` about ``counts`` images and videos, as messages."""
    entries = [{"type": kind} for kind, n in counts.items() for _ in range(n)]
    return [{"role": "user", "content": [*entries, as_text(text)]}]


def _templated(processor: Any, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
    if not getattr(processor, "chat_template", None):
        more["chat_template"] = template_of(processor)
    return str(
        processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **more)
    )


def tokens_of(processor: Any, counts: Mapping[str, int]) -> dict[str, int]:
    """How often a prompt with ``counts`` images and videos has each placeholder token."""
    tokens = {kind: placeholder(processor, kind) for kind in counts}
    return {token: counts[kind] for kind, token in tokens.items() if token}
