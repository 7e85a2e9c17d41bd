"""The tab that measures methods as ``specmm bench`` does."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pandas

from specmm.app.fields import ONE, method_of, model_menu
from specmm.app.models import AppModels, in_sentences
from specmm.app.tables import table
from specmm.methods import AR
from specmm.runs.race import measure

MOST_RUNS = 5  # runs of each method
COLUMNS = ("method", "speedup", "seconds a picture", "tau", "certificate")


def benchmark(models: AppModels) -> None:
    """Add the tab's components and their events."""
    name = models.names["images"][0]
    with gr.Row():
        model = model_menu(models, "images")
        names = gr.Dropdown(
            _drafting(models, name),
            value=[models.start("images", name).method],
            multiselect=True,
            allow_custom_value=True,
            label="Methods, against plain decoding",
        )
        runs = gr.Slider(1, MOST_RUNS, 2, step=1, label="Pictures of each method")
    prompt = gr.Textbox("a red apple on a table", label="Prompt of models that take one")
    button = gr.Button("Measure here", variant="primary")
    plot = gr.BarPlot(
        x="method",
        y="speedup",
        y_title="speed-up",
        y_lim=[0, None],  # or the axis begins at plain decoding's 1.00, which then has no bar
        title="Speed-up over plain decoding, medians",
        height=300,
        visible=False,  # an empty one has nothing to say
    )
    cells = gr.HTML()

    @in_sentences
    def go(model: str, names: list[str], runs: float, prompt: str) -> tuple[Any, Any]:
        measurements = measured(models, model, names, int(runs), prompt)
        rows = [COLUMNS, *measurements.astype(str).itertuples(index=False)]
        return gr.BarPlot(measurements, visible=True), table(rows, "Medians of whole calls")

    @in_sentences
    def renew(name: str) -> Any:
        return gr.Dropdown(_drafting(models, name), value=[models.start("images", name).method])

    model.input(renew, model, names, **ONE)
    button.click(go, [model, names, runs, prompt], [plot, cells], **ONE)


def _drafting(models: AppModels, name: str) -> list[str]:
    return [method for method in models.methods("images", name) if method != AR.name]


def measured(
    models: AppModels, model: str, names: list[str], runs: int, prompt: str
) -> pandas.DataFrame:
    """A row for each method, plain decoding first.

    Raises ``ValueError`` for no method, an unknown one, and too many runs.
    """
    if not names or not 1 <= runs <= MOST_RUNS:
        raise ValueError(
            f"choose one method at least and 1 to {MOST_RUNS} runs, got {len(names)} and {runs}"
        )
    pipe = models.get("images", model)  # first: it refuses what is not listed
    contenders = [method_of(models, "images", model, name) for name in names]
    prompts = [prompt] if pipe.takes == "prompt" else []
    rows = measure(pipe, model, contenders, 1, runs, 0, prompts)
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
