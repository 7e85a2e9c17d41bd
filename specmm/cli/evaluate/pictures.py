"""``specmm eval clip | reconstruction``: pictures one by one, against their texts or their
originals.
"""

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
    prompts: Annotated[
        Path, typer.Option(help="Text file: a line a picture, in the order of the pictures' names.")
    ],
) -> Any:
    """CLIPScore: how well pictures fit their prompts."""
    if reader.network != "clip" or reader.skip_bad:
        raise ValueError(
            "CLIPScore is of the network clip, and of every picture with its prompt: no other options"
        )
    lines = prompts.read_text(encoding="utf-8").splitlines()
    blank = next((i for i, text in enumerate(lines, 1) if not text.strip()), None)
    if blank is not None:
        raise ValueError(
            f"{prompts} line {blank} must hold a prompt, got an empty line; write one a picture"
        )
    from specmm.metrics.clip_score import clip_score

    model: Any = reader.extractor
    return clip_score(reader.pictures(source), lines, model, batch=reader.batch)


@measured("inception")
def reconstruction(
    source: Source,
    originals: Annotated[
        str, typer.Argument(help="The pictures that SOURCE was made from, in the same order.")
    ],
    reader: Reader,
    lpips: Annotated[str, typer.Option(help="Network of LPIPS: alex, vgg or none.")] = "alex",
    rfid: Annotated[
        bool, typer.Option("--rfid/--no-rfid", help="With the FID of SOURCE against its originals.")
    ] = True,
) -> Any:
    """PSNR, SSIM, LPIPS and rFID of pictures that went through a tokenizer."""
    if reader.skip_bad:
        raise ValueError(
            "pictures are compared in pairs, so that none may be left out: drop --skip-bad"
        )
    made, given = reader.pictures(source), reader.pictures(originals)
    from specmm.metrics.lpips import LPIPS
    from specmm.metrics.reconstruction import reconstruction as measure

    judge = None if lpips == "none" else LPIPS(lpips, device=reader.device)
    return measure(
        given, made, lpips=judge, extractor=reader.extractor if rfid else None, batch=reader.batch
    )
