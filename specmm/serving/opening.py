"""Opens what a server serves: engines of models that answer, painters of those that draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specmm.hf.loading.adapters import base_of
from specmm.hf.loading.pretrained import find_target, weights_folder
from specmm.loading.checkpoints import read_json
from specmm.loading.hardware import Place
from specmm.runs.run import kinds_of
from specmm.serving.drawing import Painter
from specmm.serving.engine import Limits, open_engine
from specmm.serving.requests import Engine

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def opened(
    models: Sequence[str], place: Place, method: str, drafter: str | None, limits: Limits
) -> tuple[list[Engine], list[Painter]]:
    """The engines and the painters of ``models``; one that draws and answers is opened for each.

    Raises ``ValueError`` for models, methods and drafters that do not fit.
    """
    engines: list[Engine] = []
    painters = []
    for model in models:
        kinds = kinds_of(model)
        if "images" in kinds:
            painters.append(Painter.open(model, place, method, drafter))
        if kinds != ("images",):
            engines.append(open_engine(model, limits, place, method, drafter))
    return engines, painters


def own_sampling(model: str) -> dict[str, Any]:
    """The sampling that ``model``, which answers, was published with, if it is to be sampled."""
    file = weights_folder(find_target(base_of(model)[0])) / "generation_config.json"
    found = read_json(file) if file.is_file() else {}
    if found.get("do_sample") is not True:
        return {}
    return {name: found[name] for name in SAMPLING if found.get(name) is not None}
