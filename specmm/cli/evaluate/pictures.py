"""``specmm eval clip | reconstruction``: pictures one by one, against their texts or their originals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.evaluate.measured import measured
from specmm.cli.evaluate.options import Source
from specmm.cli.evaluate.sources import Reader


@measured("clip")
def clip(
    source: Source,
    reader: Reader,
    prompts: Annotated[Path, typer.Option(help="Text file: a line a picture, in the order of the pictures' names.")],
) -> Any:
    """CLIPScore: how well pictures fit their prompts."""
    if reader.network != "clip" or reader.skip_bad:
        raise ValueError("CLIPScore is of the network clip, and of every picture with its prompt: no other options")
    lines = prompts.read_text(encoding="utf-8").splitlines()
    blank = next((i for i, text in enumerate(lines, 1) if not text.strip()), None)
    if blank is not None:
        raise ValueError(f"{prompts} line {blank} must hold a prompt, got an empty line; write one a picture")
    from specmm.metrics.clip_score import clip_score

    model: Any = reader.extractor
    return clip_score(reader.pictures(source), lines, model, batch=reader.batch)
