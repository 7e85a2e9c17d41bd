"""The tabs where two methods answer a question about a picture, or continue a text."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image, ImageDraw

from specmm.app.fields import (
    CLOCK,
    FREE,
    NARROW,
    ONE,
    PLAIN,
    TRACED,
    TraceView,
    method_menus,
    method_of,
    model_menu,
    parameter_boxes,
    raced,
    told,
)
from specmm.app.lanes import TextLane
from specmm.app.models import AppModels, changed, in_sentences
from specmm.app.views import line, marked, own_folder
from specmm.runs.run import Kind
from specmm.vlm.pictures import open_image

LONGEST = 500  # letters of a question or a prompt
LARGEST = "10mb"  # an upload's limit
SIDE = 96  # pixels of an example picture
SHAPES: tuple[tuple[str, str, Any], ...] = (  # kind, colour and corners
    ("ellipse", "red", (24, 20, 72, 68)),
    ("rectangle", "blue", (18, 34, 78, 66)),
    ("polygon", "green", ((48, 16), (20, 72), (76, 72))),
)
LEGEND = "Marked: accepted drafts. The rest are the model's own tokens."


def questions(models: AppModels) -> None:
    """Add the components of the tab of questions about pictures."""
    with gr.Row():
        with gr.Column(min_width=NARROW):
            picture = gr.Image(
                scenes()[0],
                label="Picture",
                alt_text="The picture that is asked about",
                interactive=False,
                type="filepath",
                height=150,
                **PLAIN,
            )
            upload = gr.UploadButton(
                f"Another picture (at most {LARGEST})", file_types=["image"], size="sm"
            )
        with gr.Column(min_width=NARROW):
            model = model_menu(models, "questions")
            question = gr.Textbox(
                "What do you see in the picture?", label="Question", max_length=LONGEST, lines=2
            )
    upload.upload(in_sentences(opened_path), upload, picture)
    _answers(models, "questions", {"model": model, "asked": question, "picture": picture}, "Ask")
    with gr.Row():
        for scene in scenes():
            example = gr.Button(f"Ask about a {_named(scene)}", size="sm", min_width=90)
            example.click(partial(str, scene), None, picture, **FREE)


def completion(models: AppModels) -> None:
    """Add the components of the tab of texts to continue."""
    model = model_menu(models, "text")
    start = models.start("text", models.names["text"][0])
    prompt = gr.Textbox(start.asked, label="Text to continue", lines=2, max_length=LONGEST)
    _answers(models, "text", {"model": model, "asked": prompt}, "Continue")


def _answers(models: AppModels, kind: Kind, asked: dict[str, Any], verb: str) -> None:
    """Add the rest of a tab: methods, both sides and the trace."""
    name = models.names[kind][0]
    with gr.Row():
        first, second = method_menus(models, kind, name)
    with gr.Row():
        length = gr.Number(
            64, label="Most tokens", precision=0, minimum=1, maximum=256, min_width=NARROW
        )
        button = gr.Button(verb, variant="primary", min_width=NARROW)
    verdict = gr.HTML("<p class='verdict'>Two methods write the same, on the same clock.</p>")
    with gr.Row():
        sides = [part for _ in range(2) for part in _side()]
    gr.Markdown(f"{LEGEND} {CLOCK}")
    with gr.Accordion("The model's parameters", open=False), gr.Row():
        seed = gr.Number(0, label="seed", precision=0, minimum=0, maximum=2**31, min_width=NARROW)
        boxes = parameter_boxes(models.parameters(kind, name))
    trace = TraceView()
    named = asked | dict(first=first, second=second, length=length, seed=seed)

    @in_sentences
    def answer(*values: Any) -> Iterator[list[Any]]:
        yield from answered(models, kind, dict(zip(named, values, strict=False)), values)

    gr.on(
        [button.click, asked["asked"].submit],
        answer,
        [*named.values(), *boxes],
        [verdict, *sides, *trace.components],
        api_name=kind,
        **ONE,
    )
    renew = in_sentences(partial(_renewed, models, kind))
    asked["model"].input(renew, asked["model"], [asked["asked"], first, second, *boxes], **ONE)


def _side() -> list[Any]:
    """Components of one method: line and answer."""
    with gr.Column(min_width=NARROW):
        return [gr.HTML("", elem_classes="line", min_height=60), gr.HTML("", min_height=60)]


def _renewed(models: AppModels, kind: Kind, name: str) -> list[Any]:
    """Updates for another model: its first question or prompt, methods and parameters."""
    text = models.start(kind, name).asked
    boxes = parameter_boxes(models.parameters(kind, name))
    return [gr.Textbox(text) if text else gr.skip(), *method_menus(models, kind, name), *boxes]


def answered(
    models: AppModels, kind: Kind, named: Mapping[str, Any], values: Sequence[Any]
) -> Iterator[list[Any]]:
    """Updates of verdict, both sides and trace while both methods write."""
    model = named["model"]
    defaults = models.parameters(kind, model)
    edited = changed(defaults, dict(zip(defaults, map(str, values[len(named) :]), strict=False)))
    pipe = models.get(kind, model)
    names = [named["first"], named["second"]]
    chosen = [method_of(models, kind, model, text) for text in names]
    text = short(named["asked"])
    fixed = {"max_new_tokens": int(named["length"]), **edited}
    fixed["seed"] = int(named["seed"]) if fixed.get("temperature") else None
    if kind == "questions" and not named["picture"]:
        raise ValueError("a question needs a picture: upload one or click an example")

    def lane(method: Any) -> TextLane:
        options = {**fixed, "method": method}
        if kind == "questions":
            picture = opened(named["picture"])
            return TextLane(pipe, method, lambda: pipe.begin(picture, text, **options))
        return TextLane(pipe, method, lambda: pipe.begin(text, **options))

    yield ["<p class='verdict'>Warming up …</p>", *[gr.skip()] * (4 + TRACED)]
    keys = [(kind, model, method) for method in chosen]
    race = raced(models, keys, [partial(lane, method) for method in chosen])

    def side(lane: TextLane, name: str) -> list[Any]:
        return [line(lane, name, fixed["max_new_tokens"]), marked(lane.pieces)]

    yield from told(names, race, side, partial(called_by, pipe.tokenizer))


def called_by(tokenizer: Any, token: int) -> str:
    """A token as readable text, with visible spaces and line ends."""
    return str(tokenizer.decode([token])).replace(" ", "␣").replace("\n", "⏎") or str(token)


def _named(scene: str) -> str:
    return Path(scene).stem.replace("-", " ")


def opened(file: str) -> Any:
    """An uploaded picture; errors give the user's name of the file."""
    try:
        return open_image(file)
    except ValueError as error:
        raise ValueError(str(error).replace(file, Path(file).name)) from error


def opened_path(file: str) -> str:
    """``file``, after checking that it can be opened as a picture."""
    opened(file)
    return file


def short(text: str) -> str:
    """``text``; raises an error if it is longer than the app allows."""
    if not text.strip() or len(text) > LONGEST:
        raise ValueError(f"write 1 to {LONGEST} letters, got {len(text.strip())}")
    return text


@functools.cache
def scenes() -> tuple[str, ...]:
    """Paths of new pictures to ask about: coloured shapes, as in the data of ``pocket/llava``."""
    folder = Path(own_folder("scenes").name)
    paths = []
    for shape, colour, corners in SHAPES:
        image = Image.new("RGB", (SIDE, SIDE), "#e8ebf2")
        getattr(ImageDraw.Draw(image), shape)(corners, fill=colour)
        paths.append(str(folder / f"{colour}-{shape}.png"))
        image.save(paths[-1])
    return tuple(paths)
