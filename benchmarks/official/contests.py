"""Which of their programs is measured against which of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import Row, load_pipeline
from benchmarks.official import lantern, masked, scales, tokens
from benchmarks.official.duel import Program
from specmm import methods
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import VARSettings
from specmm.image_ar.scales.var import VAR, published
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.loading.hardware import prepack

DEMO = VARSettings(cfg=4.0, temperature=1.0, top_k=900, top_p=0.95)  # of the release's notebook
SOURCES = {
    source.name: source
    for source in (
        scales.VAR_SOURCE,
        scales.CODE_SOURCE,
        tokens.SOURCE,
        masked.SOURCE,
        lantern.SOURCE,
    )
}
Folders = Mapping[str, Path]  # of clones, by the names of ``SOURCES``


class Contest(NamedTuple):
    """A comparison; ``compared`` as of a duel. Relaxed methods need not draw the same tokens.

    ``most``: pictures at once that both can draw.
    """

    release: str
    method: str
    theirs: Program
    ours: Program
    classes: int
    compared: Row | None = None
    most: int | None = None


def contests(model: str, folders: Folders, n: Sequence[int]) -> Iterator[Contest]:
    """Those of ``model`` for which there is a release in ``folders``; CoDe's by ``n``."""
    pipe = open_model(model)
    name = type(pipe).__name__
    if name == "VARPipeline":
        yield from of_scales(pipe, folders, n)
    elif name == "LlamaGenPipeline":
        if "llamagen" in folders:
            yield from of_tokens(pipe, folders["llamagen"])
        if "lantern" in folders:
            yield from of_lantern(pipe, folders["lantern"])
    elif name == "MARPipeline" and "mar" in folders:
        yield from of_masked(pipe, folders["mar"])


def open_model(model: str) -> Any:
    """A pipeline in float32: a folder or name of ours, or ``dN`` or ``dN,dM``: VARs of random
    weights.
    """
    depths = model.removeprefix("d").replace(",d", ",").split(",")
    if not all(depth.isdigit() for depth in depths):
        return load_pipeline(model, torch.float32)
    torch.manual_seed(0)
    made = [prepack(VAR(published(int(depth))).eval(), long=True) for depth in depths]
    small = made[1] if len(made) > 1 else None
    pipe = VARPipeline(made[0], VQVAE(VQVAEConfig()).eval(), small, DEMO)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def of_scales(pipe: VARPipeline, folders: Folders, n: Sequence[int]) -> Iterator[Contest]:
    """Plain VAR and CoDe, at temperature 1, since VAR's release has no other."""
    large, small, vae = pipe.transformer, pipe.small, pipe.vae
    sampling = pipe.target(temperature=1.0)
    classes = large.config.num_classes
    if "var" in folders:
        release = scales.VAR_SOURCE.load(folders["var"])
        theirs = scales.official_var(release, large, vae, sampling)
        yield Contest("VAR", "ar", theirs, scales.ours(pipe, methods.AR(), sampling), classes)
    if "code" in folders and small is not None:
        release = scales.CODE_SOURCE.load(folders["code"])
        for first in n:
            theirs = scales.official_code(release, large, small, vae, sampling, first)
            own = scales.ours(pipe, methods.CoDe(first), sampling)
            yield Contest("CoDe", f"code, N = {first}", theirs, own, classes)


def of_tokens(pipe: Any, folder: Path) -> Iterator[Contest]:
    """Plain LlamaGen, and our exact and relaxed trees over its plain decoding."""
    theirs = tokens.official(tokens.SOURCE.load(folder), pipe)
    classes = pipe.transformer.config.num_classes
    for name in ("ar", "speculative", "lantern++"):
        own = tokens.ours(pipe, methods.resolve(name))
        relaxed = Row() if name == "lantern++" else None
        yield Contest("LlamaGen", name, theirs, own, classes, relaxed)


def of_lantern(pipe: Any, folder: Path) -> Iterator[Contest]:
    """LANTERN's plain decoding and its trees, with its drafter on both sides, and the quickest of
    them beside our default.
    """
    theirs = lantern.official(lantern.SOURCE.load(folder), pipe)
    classes = pipe.transformer.config.num_classes
    for name, method in lantern.SAME.items():
        yield Contest("LANTERN", name, theirs[name], lantern.ours(pipe, method), classes, most=1)
    own = lantern.ours(pipe, methods.resolve("lantern++"))
    chain = theirs["lantern++, chain"]
    yield Contest("LANTERN", "lantern++, chain; our default", chain, own, classes, Row(), 1)


def of_masked(pipe: Any, folder: Path) -> Iterator[Contest]:
    """Plain MAR, and our exact speculation over its plain decoding."""
    model = masked.their_mar(masked.SOURCE.load(folder), pipe)
    theirs = masked.official(model, pipe)
    compared = {"network_gap": masked.network_gap(model, pipe)}
    classes = pipe.transformer.config.num_classes
    for name, method in (("ar", methods.AR()), ("exact", methods.CSpD())):
        yield Contest("MAR", name, theirs, masked.ours(pipe, method), classes, compared)
