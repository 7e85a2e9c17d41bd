"""The app's page: tabs, their inputs with limits, and what happens on a click.

One request runs the models at a time; others wait in a queue of bounded length, which shows them
their place in it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specmm.app.models import AppModels, in_sentences
from specmm.app.streams import DRAFT, PictureStream, saved, text_pieces
from specmm.methods import AR
from specmm.runs.race import measure
from specmm.runs.run import Kind, methods_of, parse_methods
from specmm.vlm.pictures import open_image

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

import gradio as gr
import pandas
from PIL import Image, ImageDraw

WAITING = 20  # requests in the queue; more are turned away with a sentence
LONGEST = 500  # letters of a question or a prompt
LARGEST = "10mb"  # of an upload
KEEP = (600, 3600)  # seconds: how often to look for old files, how old they get
FAVOURITES = ("heart", "food-fruit", "country-flag", "face-smiling")
SIDE = 96  # pixels of an example picture
SHAPES: tuple[tuple[str, str, Any], ...] = (  # kind, colour and corners
    ("ellipse", "red", (24, 20, 72, 68)),
    ("rectangle", "blue", (18, 34, 78, 66)),
    ("polygon", "green", ((48, 16), (20, 72), (76, 72))),
)
MOST_RUNS = 5  # of a method in the benchmark
COLUMNS = ("method", "speedup", "seconds a picture", "tau", "certificate")  # of the benchmark
ONE: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "models"}
# no button that shares a picture, no fonts from the network
PLAIN: dict[str, Any] = {"format": "png", "buttons": ["download", "fullscreen"]}
FONTS: dict[str, Any] = {"font": ["system-ui", "sans-serif"], "font_mono": ["monospace"]}
CSS = ".grid img, .picture img {image-rendering: pixelated} footer {display: none !important}"


def build(models: AppModels) -> gr.Blocks:
    """The app over ``models``; call ``serve`` to open it."""
    with gr.Blocks(title="specmm", analytics_enabled=False, delete_cache=KEEP) as app:
        gr.Markdown(
            "# specmm\nPlain decoding and drafts that are verified, side by side, on this machine."
        )
        tabs: list[tuple[str, Kind, Callable[[AppModels], None]]] = [
            ("Pictures", "images", _pictures),
            ("Questions", "questions", _questions),
            ("Completion", "text", _completion),
            ("Benchmark", "images", _benchmark),
        ]
        for title, kind, fill in tabs:
            if models.names[kind]:
                with gr.Tab(title):
                    fill(models)
    app.queue(max_size=WAITING, default_concurrency_limit=1, api_open=False)
    return app


def serve(
    app: gr.Blocks,
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    wait: bool = True,
) -> str:
    """Open ``app`` and return its address; ``wait`` until Ctrl-C."""
    _, address, shared = app.launch(
        server_name=host,
        server_port=port,
        share=share,
        prevent_thread_lock=not wait,
        quiet=not wait,
        max_file_size=LARGEST,
        theme=gr.themes.Default(**FONTS),
        css=CSS,
        ssr_mode=False,
        footer_links=[],
        enable_monitoring=False,
    )
    return shared or address


def _model(models: AppModels, kind: Kind) -> gr.Dropdown:
    names = models.names[kind]
    return gr.Dropdown(names, value=names[0], label="Model", visible=len(names) > 1)


def _method(models: AppModels, kind: Kind, preferred: str) -> gr.Dropdown:
    known = models.methods(kind, models.names[kind][0])
    return gr.Dropdown(known, value=preferred if preferred in known else known[-1], label="Method")


def _pictures(models: AppModels) -> None:
    classes = _classes(models, models.names["images"][0])
    with gr.Row():
        model = _model(models, "images")
        name = gr.Dropdown(classes, value=classes[0], label="Class", filterable=True)
        method = _method(models, "images", "lantern++")
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**31)
    button = gr.Button("Draw", variant="primary")
    with gr.Row():
        shown = [*_picture("Plain decoding"), *_picture("Accelerated")]
    gr.Markdown(
        "Tokens: blue the model's own, green accepted drafts, grey still to come. "
        "Rejected drafts leave no trace."
    )
    gr.Examples([c for c in FAVOURITES if c in classes], name, cache_examples=False)

    @in_sentences
    def draw(model: str, name: str, method: str, seed: float) -> Iterator[list[Any]]:
        pipe = models.get("images", model)
        view: list[Any] = [None, None, "", None] * 2
        for place, each in ((0, "ar"), (4, method)):
            try:
                for frame in PictureStream(pipe, each, str(name), int(seed)).run():
                    view[place : place + 3] = frame.shown(each, pipe.grid)
                    if frame.out is not None:
                        view[place + 3] = saved(frame.out, model, str(name), int(seed))
                    yield view
            except ValueError as error:  # the other side may still work
                view[place + 2] = f"**{each}** could not draw this: {error}"
                yield view

    @in_sentences
    def renew(model: str) -> list[Any]:
        classes = _classes(models, model)
        known = models.methods("images", model)
        return [gr.Dropdown(classes, value=classes[0]), gr.Dropdown(known, value=known[-1])]

    button.click(draw, [model, name, method, seed], shown, **ONE)
    model.change(renew, model, [name, method], **ONE)


def _picture(title: str) -> list[Any]:
    """Picture, token grid, line and file of one method."""
    with gr.Column(min_width=300):
        picture = gr.Image(
            label=title, interactive=False, elem_classes="picture", height=360, **PLAIN
        )
        line = gr.Markdown("Not drawn yet.", min_height=90)
        grid = gr.Image(
            label="Tokens as they land", interactive=False, elem_classes="grid", height=260, **PLAIN
        )
        file = gr.File(label="PNG with its description", interactive=False)
    return [picture, grid, line, file]


def _classes(models: AppModels, model: str) -> list[str]:
    pipe = models.get("images", model)
    if pipe.takes != "classes":
        raise ValueError(f"{model} draws from prompts, and the app draws classes")
    return list(pipe.settings.classes or map(str, range(pipe.transformer.config.num_classes)))


def _questions(models: AppModels) -> None:
    with gr.Row():
        with gr.Column(min_width=300):
            file = gr.File(label=f"Picture (at most {LARGEST})", file_types=["image"], height=140)
            preview = gr.Image(label="What the model sees", interactive=False, height=240, **PLAIN)
        with gr.Column(min_width=300):
            model = _model(models, "questions")
            question = gr.Textbox(
                "What do you see in the picture?", label="Question", max_length=LONGEST
            )
            method = _method(models, "questions", "msd")
            length = gr.Slider(1, 128, 48, step=1, label="Most tokens of the answer")
            button = gr.Button("Ask", variant="primary")
            answer, line = _text()
    gr.Examples(_scenes(), file, cache_examples=False, label="Example pictures")

    @in_sentences
    def look(file: str | None) -> Any:
        return None if file is None else _opened(file)

    @in_sentences
    def ask(
        model: str, file: str | None, question: str, method: str, length: float
    ) -> Iterator[Any]:
        if file is None:
            raise ValueError("a question needs a picture: upload one or click an example")
        pipe = models.get("questions", model)
        yield from text_pieces(
            pipe.rounds(_opened(file), _short(question), method=method, max_new_tokens=int(length))
        )

    file.change(look, file, preview)
    inputs = [model, file, question, method, length]
    gr.on([button.click, question.submit], ask, inputs, [answer, line], **ONE)


def _opened(file: str) -> Any:
    """An uploaded picture; an error names it as the user does."""
    try:
        return open_image(file)
    except ValueError as error:
        raise ValueError(str(error).replace(file, Path(file).name)) from error


def _completion(models: AppModels) -> None:
    model = _model(models, "text")
    prompt = gr.Textbox("def add(a, b):", label="Text to continue", lines=4, max_length=LONGEST)
    with gr.Row():
        method = _method(models, "text", "deer")
        length = gr.Slider(1, 256, 96, step=1, label="Most tokens")
    button = gr.Button("Continue", variant="primary")
    answer, line = _text()

    @in_sentences
    def go(model: str, prompt: str, method: str, length: float) -> Iterator[Any]:
        pipe = models.get("text", model)
        yield from text_pieces(
            pipe.rounds(_short(prompt), method=method, max_new_tokens=int(length))
        )

    button.click(go, [model, prompt, method, length], [answer, line], **ONE)


def _text() -> tuple[gr.HighlightedText, gr.Markdown]:
    """Where an answer appears, and the line about it."""
    text = gr.HighlightedText(
        label="Answer", color_map={DRAFT: "green"}, show_legend=True, combine_adjacent=True
    )
    return text, gr.Markdown()


def _short(text: str) -> str:
    if not text.strip() or len(text) > LONGEST:
        raise ValueError(f"write 1 to {LONGEST} letters, got {len(text.strip())}")
    return text


def _benchmark(models: AppModels) -> None:
    known = [m for m in models.methods("images", models.names["images"][0]) if m != "ar"]
    with gr.Row():
        model = _model(models, "images")
        names = gr.CheckboxGroup(known, value=known[1:2], label="Methods, against plain decoding")
        runs = gr.Slider(1, MOST_RUNS, 2, step=1, label="Pictures of each method")
    button = gr.Button("Measure here", variant="primary")
    plot = gr.BarPlot(
        x="method",
        y="speedup",
        y_title="speed-up",
        y_lim=[0, None],  # or the axis begins at plain decoding's 1.00, which then has no bar
        title="Speed-up over plain decoding, medians",
        height=300,
    )
    table = gr.Dataframe(headers=list(COLUMNS), interactive=False)

    @in_sentences
    def go(model: str, names: list[str], runs: float) -> tuple[Any, Any]:
        found = _measured(models, model, names, int(runs))
        return found, found

    button.click(go, [model, names, runs], [plot, table], **ONE)


def _scenes() -> list[str]:
    """Paths of new pictures to ask about: coloured shapes, as in the data of ``pocket/llava``."""
    folder = Path(tempfile.mkdtemp(prefix="specmm-"))
    found = []
    for shape, colour, corners in SHAPES:
        image = Image.new("RGB", (SIDE, SIDE), "#e8ebf2")
        getattr(ImageDraw.Draw(image), shape)(corners, fill=colour)
        found.append(str(folder / f"{colour}-{shape}.png"))
        image.save(found[-1])
    return found


def _measured(models: AppModels, model: str, names: list[str], runs: int) -> pandas.DataFrame:
    """A row for each method, as ``specmm bench`` measures them, plain decoding first.

    Raises ``ValueError`` for no method, an unknown one, and too many runs.
    """
    if not names or not 1 <= runs <= MOST_RUNS:
        raise ValueError(
            f"choose one method at least and 1 to {MOST_RUNS} runs, got {len(names)} and {runs}"
        )
    others = [name for name in names if name != AR.name]
    contenders = parse_methods(methods_of("images", model), ",".join([AR.name, *others]))
    rows = measure(models.get("images", model), model, contenders, 1, runs, 0)
    cells = [
        (
            row["label"],
            round(row["speedup"], 3),
            round(row["seconds"], 4),
            round(row["tau"], 2),
            row["certificate"]["kind"],
        )
        for row in rows
    ]
    return pandas.DataFrame(cells, columns=list(COLUMNS))
