"""``specmm eval vqa``: predicted answers and captions against given ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.evaluate.options import Name, Seed
from specmm.cli.evaluate.show import show
from specmm.cli.evaluate.sources import generator
from specmm.cli.options import Json
from specmm.cli.output import stdout_reserved
from specmm.registry import unknown

METRICS = ("vqa", "anls", "relaxed", "exact", "bleu", "cider")


def vqa(
    predictions: Annotated[
        Path, typer.Argument(help="JSON or JSON lines: question_id and answer.")
    ],
    answers: Annotated[
        Path, typer.Option(help="The same with the right answers: VQAv2, DocVQA or JSON lines.")
    ],
    metric: Annotated[str, typer.Option(help=f"One of {', '.join(METRICS)}.")] = "vqa",
    variant: Annotated[
        str, typer.Option(help="Of vqa: protocol, or official-code (the authors' release).")
    ] = "protocol",
    seed: Seed = 0,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Accuracy of answers: VQAv2's soft accuracy, ANLS, ChartQA's relaxed accuracy, exact match,
    BLEU, CIDEr.
    """
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    with stdout_reserved():
        from specmm.metrics.answer_files import read_answers, read_predictions

        found = _score(metric, read_predictions(predictions), read_answers(answers), variant, seed)
    show(found, as_json, name or predictions.stem)


def _score(metric: str, predictions: Any, answers: Any, variant: Any, seed: int) -> Any:
    from specmm.metrics import answers as texts
    from specmm.metrics import captions
    from specmm.metrics.intervals import Bootstrap
    from specmm.metrics.vqa import vqa_accuracy

    bootstrap = Bootstrap(generator(seed))
    if metric == "vqa":
        return vqa_accuracy(predictions, answers, variant, bootstrap)
    if metric in ("bleu", "cider"):
        return getattr(captions, metric)(predictions, answers)
    measures: dict[str, Any] = {
        "anls": texts.anls,
        "relaxed": texts.relaxed_accuracy,
        "exact": texts.exact_match,
    }
    return measures[metric](predictions, answers, bootstrap=bootstrap)
