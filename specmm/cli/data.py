"""What the training commands share: where their pictures come from, and what they say at the end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.output import emit, say

EMOJI = Path("~/.cache/specmm/emoji")
Data = Annotated[Path, typer.Option(help="Folder of the emoji; downloaded from npm and rasterised when empty.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps in all.")]
Batch = Annotated[int, typer.Option(min=1, help="Pictures a step.")]
Out = Annotated[Path, typer.Option(help="Folder of checkpoint, loss curve and result.")]
Seed = Annotated[int, typer.Option(min=0, help="Of initialisation and batches.")]


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Raise ``ValueError`` saying what is missing when the emoji in ``folder`` cannot be made."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"rasterising emoji needs {error.name}, run: pip install 'specmm[train]'") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"npm could not fetch the emoji ({error.stderr or error}), fill {folder} by hand") from error


def pictures(folder: Path) -> Any:
    """The training split of the emoji with their classes."""
    from specmm.zoo.emoji import load

    folder = folder.expanduser()
    with making(folder):
        return load(folder)


def world(folder: Path, split: str) -> Any:
    """Scenes and easy-VQA of a split."""
    from specmm.vlm.data.stream import load_world

    folder = folder.expanduser()
    with making(folder):
        return load_world(folder, split)


def conversations(encoder: Any, folder: Path) -> Callable[[Any, bool], Any]:
    """Draws samples of what ``specmm train llava`` trains on: about pictures, or facts without one."""
    drawn = world(folder, "train")
    return lambda random, visual: next(drawn.conversations(encoder, random, float(visual)))


def done(found: dict[str, Any], as_json: bool) -> None:
    """Say what was trained."""
    if as_json:
        emit(found)
        return
    what = " of ".join(str(found[k]) for k in ("kind", "model") if k in found)
    say(f"trained {what}, {found['steps']} steps: {', '.join(found['outputs'])}")
