"""The tab where two methods draw the same class or prompt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import gradio as gr

from specmm.app.fields import (
    CLOCK,
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
from specmm.app.lanes import PictureLane, generator
from specmm.app.models import AppModels, changed, in_sentences
from specmm.app.views import blank, line, preview, saved, tokens_of

LEGEND = (
    "Who made what: blue the model itself, green accepted drafts or the small model, grey is still "
    "to come. For VAR a square is a scale; for MAR green is the share of a token's diffusion steps "
    "that did not wait for a call of the head of their own. Rejected drafts leave no trace."
)
LONGEST = 500  # letters of a prompt


def pictures(models: AppModels) -> None:
    """Add the tab's components and their events."""
    name = models.names["images"][0]
    with gr.Row():
        model = model_menu(models, "images")
        choice = _class_menu(models, name)
        prompt = gr.Textbox(
            "a red apple on a table",
            label="Prompt",
            max_length=LONGEST,
            visible=not classes_of(models, name),
            min_width=NARROW,
        )
        first, second = method_menus(models, "images", name)
    with gr.Row():
        seed = gr.Number(
            models.start("images", name).seed,
            label="Seed",
            precision=0,
            minimum=0,
            maximum=2**31,
            min_width=NARROW,
        )
        button = gr.Button("Race", variant="primary", min_width=NARROW)
    verdict = gr.HTML("<p class='verdict'>Two methods draw the same, on the same clock.</p>")
    with gr.Row():
        left, right = (_side(label) for label in ("First picture", "Second picture"))
    gr.Markdown(f"{LEGEND}\n\n{CLOCK}")
    with gr.Accordion("The model's parameters", open=False), gr.Row():
        boxes = parameter_boxes(models.parameters("images", name))
    trace = TraceView()
    settings = [choice, prompt, first, second, seed, *boxes]
    outputs = [verdict, *left, *right, *trace.components]

    @in_sentences
    def draw(*values: Any) -> Iterator[list[Any]]:
        yield from drawn(models, *values)

    button.click(draw, [model, *settings], outputs, api_name="pictures", **ONE)
    model.input(in_sentences(partial(renewed, models)), model, settings, **ONE)


def _class_menu(models: AppModels, name: str) -> gr.Dropdown:
    classes = classes_of(models, name)
    subject = models.start("images", name).asked
    value = subject if subject in classes else next(iter(classes), None)
    return gr.Dropdown(classes, value=value, label="Class", visible=bool(classes), min_width=NARROW)


def renewed(models: AppModels, name: str) -> list[Any]:
    """Updates of the settings for another model."""
    return [
        _class_menu(models, name),
        gr.Textbox(visible=not classes_of(models, name)),
        *method_menus(models, "images", name),
        gr.Number(models.start("images", name).seed),
        *parameter_boxes(models.parameters("images", name)),
    ]


def classes_of(models: AppModels, name: str) -> list[str]:
    """Names of the classes that a model draws; empty if it draws from prompts."""
    pipe = models.get("images", name)
    if pipe.takes != "classes":
        return []
    return list(pipe.settings.classes or map(str, range(pipe.transformer.config.num_classes)))


def _side(label: str) -> list[Any]:
    """Components of one method: picture, line, tokens and file."""
    common: dict[str, Any] = {"interactive": False, **PLAIN}
    with gr.Column(min_width=NARROW):
        picture = gr.Image(
            blank(),
            label=label,
            show_label=False,
            alt_text=label,
            elem_classes="picture",
            height="min(320px, 42vw)",
            **common,
        )
        about = gr.HTML("", elem_classes="line", min_height=60)
        grid = gr.Image(
            blank(),
            label="Who made what",
            alt_text="Its tokens by who made them",
            elem_classes="grid",
            height="min(220px, 34vw)",
            **common,
        )
        file = gr.DownloadButton("PNG with its record", size="sm", interactive=False)
    return [picture, about, grid, file]


def drawn(
    models: AppModels,
    model: str,
    name: str | None,
    prompt: str,
    first: str,
    second: str,
    seed: float,
    *texts: str,
) -> Iterator[list[Any]]:
    """Updates of verdict, both sides and trace while both methods draw."""
    defaults = models.parameters("images", model)
    options = changed(defaults, dict(zip(defaults, texts, strict=False)))
    pipes = (models.get("images", model), models.twin(model))
    subject = str(name) if pipes[0].takes == "classes" else prompt
    chosen = [method_of(models, "images", model, text) for text in (first, second)]
    names = [first, second]

    def lane(i: int) -> PictureLane:
        call = {pipes[i].takes: [subject], "generator": generator(pipes[i], int(seed)), **options}
        return PictureLane(pipes[i], chosen[i], call)

    waiting = [gr.skip(), gr.skip(), gr.skip(), gr.DownloadButton(interactive=False)] * 2
    yield ["<p class='verdict'>Warming up …</p>", *waiting, *[gr.skip()] * TRACED]
    keys = [("images", model, i, method) for i, method in enumerate(chosen)]
    race = raced(models, keys, [partial(lane, 0), partial(lane, 1)])
    side = partial(_seen, model=model, subject=subject, seed=int(seed))
    yield from told(names, race, side, str)


def _seen(lane: PictureLane, name: str, model: str, subject: str, seed: int) -> list[Any]:
    """A lane's values of the components of :func:`_side`."""
    total = lane.pipe.grid**2 or "?"
    if lane.pipe.plans == "scales":
        total = len(lane.pipe.transformer.config.patch_nums)
    file = gr.skip()
    if lane.out is not None:
        file = gr.DownloadButton(value=saved(lane.out, subject, seed), interactive=True)
    return [preview(lane), line(lane, name, total), tokens_of(lane), file]
