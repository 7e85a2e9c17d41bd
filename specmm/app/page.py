"""The app's page and its tabs.

One request runs the models at a time; others wait in a queue of bounded length, which shows their
places.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

import gradio as gr

from specmm.app.measuring import benchmark
from specmm.app.models import AppModels
from specmm.app.pictures import pictures
from specmm.app.words import LARGEST, completion, questions
from specmm.runs.run import Kind

WAITING = 20  # requests in the queue; more are turned away with a sentence
KEEP = (600, 3600)  # seconds: how often to look for old files, how old they get
# no fonts from the network
FONTS: dict[str, Any] = {"font": ["system-ui", "sans-serif"], "font_mono": ["monospace"]}
CSS = """
.grid img, .picture img {image-rendering: pixelated}
footer {display: none !important}
.verdict {margin: 0; font-size: 1.05em}
.answer {white-space: pre-wrap; overflow-wrap: break-word; font-family: monospace}
.answer mark {background: #bbf7d0; color: #052e16; padding: 0; text-decoration: underline}
.scrolled {overflow: auto; max-height: 420px}
.scrolled table {border-collapse: collapse; font-size: .9em}
.scrolled td, .scrolled th {padding: 2px 10px; text-align: left; white-space: nowrap}
.claim {font-weight: 600}
summary {cursor: pointer}
@media (max-width: 500px) {
  .row, .column {gap: 6px !important}
  .block.padded, .tabitem {padding: 6px !important}
  .tab-container button {padding: 0 9px}
  .answer {max-height: 26vh; overflow-y: auto}
  .intro h1 {font-size: 1.1em !important; margin: 0 !important}
  .intro p {display: none}
}
"""
# Gradio's css reaches what the page contains, not its frame
FRAME = "<style>@media (max-width: 500px) {.main.app {padding: 8px !important}}</style>"
INTRO = "# specmm\nPlain decoding and drafts that are verified, side by side, on this machine."
TABS: tuple[tuple[str, Kind, Callable[[AppModels], None]], ...] = (
    ("Pictures", "images", pictures),
    ("Questions", "questions", questions),
    ("Completion", "text", completion),
)


def build(models: AppModels, intro: str = INTRO) -> gr.Blocks:
    """The app over ``models``, under an ``intro`` in Markdown; call ``serve`` to open it."""
    with gr.Blocks(title="specmm", analytics_enabled=False, delete_cache=KEEP) as app:
        gr.Markdown(intro, elem_classes="intro")
        with gr.Tabs():
            for title, kind, fill in TABS:
                if models.names[kind]:
                    with gr.Tab(title, id=kind):
                        fill(models)
            if models.names["images"]:
                with gr.Tab("Benchmark", id="benchmark"):
                    benchmark(models)
    app.queue(max_size=WAITING, default_concurrency_limit=1, api_open=False)
    return app


def theme() -> Any:
    """A Gradio theme whose colours have a contrast of at least 4.5 to their background."""
    plain = gr.themes.Default(primary_hue="blue", secondary_hue="blue", **FONTS)
    return plain.set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        color_accent="*primary_700",
        body_text_color_subdued="*neutral_600",
    )


def serve(
    app: gr.Blocks,
    host: str | None = None,
    port: int | None = None,
    share: bool = False,
    wait: bool = True,
) -> str:
    """Open ``app`` and return its address; ``wait`` until Ctrl-C.

    ``host`` None listens on this machine only, or as a hosted space's settings say.
    """
    _, address, shared = app.launch(
        server_name=host,
        server_port=port,
        share=share,
        prevent_thread_lock=not wait,
        quiet=not wait,
        max_file_size=LARGEST,
        theme=theme(),
        css=CSS,
        head=FRAME,
        ssr_mode=False,
        footer_links=[],
        enable_monitoring=False,
    )
    return shared or address
