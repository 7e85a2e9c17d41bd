"""Opens a server's models: engines for models that answer, painters for models that draw."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Queue
from random import Random
from typing import TYPE_CHECKING, Any

from specmm import methods
from specmm.core.drafter import Drafter
from specmm.core.tree import TreeShape
from specmm.extending.registry import unknown
from specmm.hf.answers.running import Pipeline
from specmm.hf.drafters.drafting import assemble, load_drafter, method_of
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.loading.adapters import base_of
from specmm.hf.loading.pretrained import find, find_target, weights_folder
from specmm.hf.models.rows import RowsTarget
from specmm.loading.checkpoints import read_json
from specmm.loading.hardware import Place
from specmm.runs.run import HERE, kinds_of, open_model
from specmm.serving.asking import Settings
from specmm.serving.drawing import Painter
from specmm.serving.engine import BatchEngine
from specmm.serving.preparation import Limits
from specmm.serving.requests import Asked, Ended, Piece
from specmm.vlm.pipeline import VQAPipeline

if TYPE_CHECKING:
    from fastapi import FastAPI

NETWORKS = ("block", "msd", "eagle3")  # drafters whose rows join and leave
DEEP = 5  # drafts of a chain of a head that drafts one after the other
ARENA_MAX = -8  # glibc's number of that setting
WARM = (32, 96, 256, 640)  # letters of texts that nobody asked for
WARM_LETTERS = "abcdefghijkl,.\n "
WARM_ANSWERS, WARM_SECONDS = 12, 2.0  # tokens, and time
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def application(
    models: Sequence[str],
    place: Place,
    method: str,
    drafter: str | None,
    limits: Limits,
    settings: Settings,
) -> FastAPI:
    """The application that serves ``models``; see :func:`specmm.serving.http.app_of`.

    Raises ``ValueError`` for models, methods and drafters that do not fit.
    """
    from specmm.serving.http import app_of  # a conversation needs no package of servers

    # glibc gives each thread memory of its own, whose gaps no other thread fills
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(ARENA_MAX, 2)
    engines, painters = opened(models, place, method, drafter, limits)
    for engine in engines:
        warm_up(engine)
    sampling = {engine.name: own_sampling(engine.name) for engine in engines}
    gc.freeze()  # or all streams wait a third of a second while it is looked at for garbage
    return app_of(engines, replace(settings, sampling=sampling), painters)


def warm_up(engine: BatchEngine) -> None:
    """Let ``engine`` answer random texts, one by one and together, for some seconds or one text, so
    that it knows the costs of rounds and prompts and has its memory and kernels. Everything else
    about these texts is forgotten.
    """
    started = time.monotonic()
    room = engine.preparation.room(1)
    random = Random(0)
    for lengths in (*((length,) for length in WARM), WARM):
        ends: Queue[Ended] = Queue()

        def tell(told: Piece | Ended, ends: Queue[Ended] = ends) -> None:
            if isinstance(told, Ended):
                ends.put(told)

        for length in lengths:
            count = min(length, room // 2)  # a letter is a token at most
            text = "".join(random.choices(WARM_LETTERS, k=count))
            options = {"max_new_tokens": min(WARM_ANSWERS, room // 4), "temperature": 0}
            engine.submit(Asked(None, text, options, goes_on=True), tell)
        for _ in lengths:
            ends.get()
        if engine.ended:  # it cannot go on; requests get the error
            return
        if time.monotonic() - started > WARM_SECONDS:
            break
    engine.forget()


def opened(
    models: Sequence[str], place: Place, method: str, drafter: str | None, limits: Limits
) -> tuple[list[BatchEngine], list[Painter]]:
    """The engines and the painters of ``models``; one that draws and answers is opened for each.

    Raises ``ValueError`` for models, methods and drafters that do not fit.
    """
    engines: list[BatchEngine] = []
    painters = []
    for model in models:
        kinds = kinds_of(model)
        if "images" in kinds:
            painters.append(Painter.open(model, place, method, drafter))
        if kinds != ("images",):
            engines.append(open_engine(model, limits, place, method, drafter))
    return engines, painters


def open_engine(
    model: str,
    limits: Limits,
    place: Place = HERE,
    method: str = "auto",
    drafter: str | None = None,
) -> BatchEngine:
    """The engine of ``model``, a folder, pocket name or hub id of a model that answers or continues
    texts, where ``place`` says. ``method``: "ar" drafts nothing, "suffix" from earlier text, "auto"
    also with the model's drafter, as does the drafter's own method.

    Raises ``ValueError`` for a model that cannot be found, read or served, and other methods.
    """
    kind = next((kind for kind in kinds_of(model) if kind != "images"), None)
    if kind is None:
        raise ValueError(f"{model} draws pictures and answers nothing")
    pipe = open_model(kind, model, place, methods.AR.name, None)
    own: str | None = None
    if drafter is not None:
        own = method if method in NETWORKS else method_of(find(drafter))
        if own not in NETWORKS:
            raise ValueError(
                f"a server's drafter must be one of method {', '.join(NETWORKS)}, got {drafter} of "
                f"{own or 'none'}; leave --drafter out"
            )
        pipe.drafters.given[own] = load_drafter(own, find(drafter), pipe.model)
    return engine_of(pipe, limits, method, own)


def engine_of(
    pipe: Pipeline, limits: Limits, method: str = "auto", own: str | None = None
) -> BatchEngine:
    """The engine of an opened ``pipe``; for ``method`` see :func:`open_engine`. ``own`` is the
    method whose drafter "auto" takes, by default the first one with a drafter.

    Raises ``ValueError`` for a model that cannot be served, and other methods.
    """
    known = ("auto", "ar", "suffix", *NETWORKS)
    if method not in known:
        raise unknown("method of a server", method, known)
    if method in NETWORKS:
        own = method
    elif method == "auto" and own is None:
        own = next((one for one in NETWORKS if pipe.drafters.has(one)), None)
    made = None if own is None or method in ("ar", "suffix") else pipe.drafter(own)

    def network(target: RowsTarget) -> tuple[str, Drafter] | None:
        if own is None or made is None:
            return None
        if own == methods.Block.name:
            return own, assemble(methods.Block(), target, made).drafter
        return own, FeatureDrafter(made, target, TreeShape.chain(DEEP, target.device), False)

    limits = replace(limits, drafts=method != "ar")
    return BatchEngine(pipe, limits, isinstance(pipe, VQAPipeline), network)


def own_sampling(model: str) -> dict[str, Any]:
    """The sampling that ``model``, which answers, was published with, if it is to be sampled."""
    file = weights_folder(find_target(base_of(model)[0])) / "generation_config.json"
    found = read_json(file) if file.is_file() else {}
    if found.get("do_sample") is not True:
        return {}
    return {name: found[name] for name in SAMPLING if found.get(name) is not None}
