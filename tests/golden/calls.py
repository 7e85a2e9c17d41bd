"""The calls whose tokens are kept: every method of every family, drawn and greedy, on the pocket
models.

Double precision, so that a processor's rounding hardly ever decides a token (transformers' norms
and rotations are computed in float32 whatever is asked; the seeds are some with which AVX2 and
AVX-512 agree). Tokens are kept in tokens.json, and in reports.json what a run says of itself: its
certificate and how many tokens its rounds kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from PIL import Image, ImageDraw

from specmm.image_ar.pipeline import ImagePipeline
from specmm.methods import (
    DEER,
    GSD,
    MSD,
    SJD,
    Block,
    CoDe,
    CSpD,
    Eagle,
    Lantern,
    LanternPP,
    Speculative,
)
from specmm.text.pipeline import TextPipeline
from specmm.vlm.pipeline import VQAPipeline

CODE = ["def mean(values):\n    total = 0\n    for value in values:\n        total", "import os\n"]
QUESTION = "How many shapes are there, and which colours do they have?"


@dataclass(frozen=True)
class Found:
    """What a call gave: its tokens, or texts of a stream, and what it said of itself."""

    tokens: list[Any]
    report: dict[str, Any]

    @classmethod
    def of(cls, out: Any) -> Found:
        """What a pipeline gave."""
        said = out.certificate
        certificate = [said.kind, said.reason, said.tv]
        tokens = [row.tolist() for row in out.tokens]
        return cls(tokens, {"certificate": certificate, "kept": out.stats.kept})


Call = Callable[[], Found]


@cache
def images(name: str) -> Any:
    return ImagePipeline.from_pretrained(name, torch_dtype=torch.float64)


@cache
def answers() -> VQAPipeline:
    return VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float64)


@cache
def texts() -> TextPipeline:
    return TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float64)


@cache
def picture() -> Image.Image:
    """A square and a circle."""
    image = Image.new("RGB", (64, 64), "white")
    drawing = ImageDraw.Draw(image)
    drawing.rectangle((6, 8, 26, 28), fill="red")
    drawing.ellipse((34, 34, 58, 58), fill="blue")
    return image


def drawn(name: str, method: Any, count: int = 2, **options: Any) -> Found:
    """Pictures of the first classes."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
    return Found.of(
        images(name)(
            classes=list(range(count)),
            generator=generators,
            method=method,
            output_type="latent",
            **options,
        )
    )


def said(method: Any, temperature: float) -> Found:
    """An answer."""
    options = {"method": method, "temperature": temperature, "seed": 5, "max_new_tokens": 24}
    return Found.of(answers()(picture(), QUESTION, **options))


def written(method: Any, temperature: float) -> Found:
    """Two texts."""
    options = {"method": method, "temperature": temperature, "seed": [7, 8], "max_new_tokens": 24}
    return Found.of(texts()(CODE, **options))


SIX = "chain(6)"
IMAGES: dict[str, Any] = {
    "ar": "ar",
    "sjd": "sjd",
    "sjd, last": SJD(window=8, init="last"),
    "sjd, drawn afresh": SJD(window=8, init="last", coupled=False),
    "gsd": GSD(gap=0.3),
    "speculative": "speculative",
    "speculative, token by token": Speculative(rule="recursive", tree=(2, 2, 1)),
    "speculative, eagle": Speculative(drafter="eagle", tree=(2, 1)),
    "eagle": Eagle(total=8, depth=3, top_k=3),
    "lantern": Lantern(total=8, depth=3, top_k=3),
    "lantern, block": Lantern(drafter="block"),
    "lantern++": LanternPP(tree=SIX),
    "lantern++, usual tree": LanternPP(),
    "lantern++, release": LanternPP(tree=SIX, residual="release"),
    "lantern++, lambda 4": LanternPP(tree=SIX, lambda_=4.0),
}
SCALES = {"ar": "ar", "code": CoDe(2)}
CONTINUOUS = {"ar": "ar"} | {v: CSpD(v) for v in ("exact", "release")}
RECALLING = ("suffix", "recycle")
ANSWERS = {m: m for m in ("ar", "text-draft", "vlm-draft", "msd", "prompt-lookup", *RECALLING)} | {
    "msd, drawn": MSD(sampled=True)
}
TEXTS: dict[str, Any] = {
    **{m: m for m in ("ar", "diffuspec", "specdiff", "deer", "block", "text-draft")},
    **{m: m for m in ("prompt-lookup", *RECALLING)},
    "deer, tree": DEER(tree=6),
    "block, drawn tree": Block(tree=(2, 2, 1)),
    "block, recall": Block(recall=3),
}


def calls() -> dict[str, Call]:
    """Every call by its name."""
    found: dict[str, Call] = {}
    for label, method in IMAGES.items():
        found[f"tokens: {label}"] = partial(drawn, "pocket/llamagen", method)
    for label in ("ar", "speculative", "lantern++"):
        greedy = partial(drawn, "pocket/llamagen", IMAGES[label], temperature=0.0)
        found[f"tokens, greedy: {label}"] = greedy
    for label, method in SCALES.items():
        found[f"scales: {label}"] = partial(drawn, "pocket/var", method)
    for label, method in CONTINUOUS.items():
        found[f"continuous: {label}"] = partial(drawn, "pocket/mar", method)
    three = {"count": 3, "batch_size": 2}
    found["scales, three"] = partial(drawn, "pocket/var", SCALES["code"], **three)
    found["continuous, three"] = partial(drawn, "pocket/mar", CONTINUOUS["exact"], **three)
    for temperature in (0.0, 1.0):
        for label, method in ANSWERS.items():
            found[f"answer at {temperature}: {label}"] = partial(said, method, temperature)
        for label, method in TEXTS.items():
            found[f"text at {temperature}: {label}"] = partial(written, method, temperature)
    return found
