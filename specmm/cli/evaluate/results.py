"""``specmm eval vqa | compare | report``: answers, the quality gate, and speed against quality."""

# typer reads the annotations of these functions when this module is imported: they are evaluated

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from specmm.cli.evaluate.measured import (
    PICTURES,
    TITLES,
    Name,
    Seed,
    interval_text,
    line,
    protocol_lines,
    reading,
    show,
)
from specmm.cli.evaluate.sources import SourceReader, generator
from specmm.cli.options import Json
from specmm.cli.output import emit, say, stdout_reserved, write_text
from specmm.extending.registry import unknown
from specmm.loading.files import writable

if TYPE_CHECKING:
    from specmm.metrics.answers import Answers, Predictions
    from specmm.metrics.compare import Comparison
    from specmm.metrics.measurement import Difference, Measurement
    from specmm.metrics.vqa import Variant

METRICS = ("vqa", "anls", "relaxed", "exact", "bleu", "cider")
FLOOR = "real against real"  # the benchmarks' name for the FID of two halves of the real pictures
First = Annotated[
    str, typer.Argument(help=f"{PICTURES}; or a result that --json printed (.json).", metavar="A")
]
Second = Annotated[str, typer.Argument(help="The other one, likewise.", metavar="B")]


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
    """Accuracy of answers: VQAv2's, ANLS, ChartQA's relaxed accuracy, exact match, BLEU, CIDEr."""
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    with stdout_reserved():
        from specmm.metrics.answers import read_answers, read_predictions

        predicted = read_predictions(predictions)
        result = _score(metric, predicted, read_answers(answers), cast("Variant", variant), seed)
    show([result], as_json, name or predictions.stem)


def _score(
    metric: str, predictions: "Predictions", answers: "Answers", variant: "Variant", seed: int
) -> "Measurement":
    """The ``metric`` of ``predictions`` against ``answers``."""
    from specmm.metrics import answers as texts
    from specmm.metrics.intervals import Bootstrap
    from specmm.metrics.vqa import vqa_accuracy

    if metric in ("bleu", "cider"):
        return (texts.bleu if metric == "bleu" else texts.cider)(predictions, answers)
    bootstrap = Bootstrap(generator(seed))
    if metric == "vqa":
        return vqa_accuracy(predictions, answers, variant, bootstrap)
    if metric == "exact":
        return texts.exact_match(predictions, answers, bootstrap)
    measure = texts.anls if metric == "anls" else texts.relaxed_accuracy
    return measure(predictions, answers, bootstrap=bootstrap)


@reading("inception")
def compare(
    first: First,
    second: Second,
    reader: SourceReader,
    reference: Annotated[
        str | None, typer.Option(help="Real pictures: how much worse A is than B.")
    ] = None,
    permutations: Annotated[int, typer.Option(min=1, help="Relabellings.")] = 999,
    alpha: Annotated[float, typer.Option(help="Accepted share of false alarms.")] = 0.05,
    paired: Annotated[
        bool, typer.Option("--paired", help="Picture i of both has one prompt and seed.")
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Whether two sets, or two results, differ by more than sampling noise (a permutation test)."""
    results = [s.endswith(".json") for s in (first, second)]
    if any(results):
        if not all(results) or reference is not None:
            raise ValueError("compare takes two results (.json), or two sets and a --reference")
        _compare_results(Path(first), Path(second), as_json)
        return
    if paired and reader.skip_bad:
        raise ValueError("--paired needs every picture: --skip-bad would shift the pairs")
    with stdout_reserved():
        from specmm.metrics.compare import compare as test

        one, two = reader.both(first, second)
        third = None if reference is None else reader.features(reference)
        result = test(
            one,
            two,
            third,
            generator=generator(seed),
            permutations=permutations,
            alpha=alpha,
            paired=paired,
        )
        result = reader.noted(result)
    if as_json:
        emit({**result.to_json(), "verdict": _sentence(result)})
        return
    typer.echo(_sentence(result))
    typer.echo(
        f"squared MMD {result.distance:.6f}, p = {result.p_value:.4f}, alpha = {result.alpha:g}"
    )
    if result.loss is not None:
        typer.echo(line(result.loss))
    typer.echo(protocol_lines([result.protocol]))


def _sentence(comparison: "Comparison") -> str:
    """A comparison's result as a sentence."""
    chance = f"p = {comparison.p_value:.3g}"
    text = f"The two sets differ by more than sampling noise ({chance})"
    if not comparison.differ:
        text = (
            f"No difference beyond sampling noise was found ({chance}), which does not prove none"
        )
    loss = comparison.loss
    if loss is None or loss.interval is None:
        return text + "."
    low = loss.interval.low
    high = loss.interval.high
    ends = f"KID differs by {loss.value:.2g}, from {low:.2g} to {high:.2g}"
    if low <= 0 <= high:
        return f"{text}; neither is clearly closer to the reference ({ends})."
    return f"{text}; {'B' if loss.value > 0 else 'A'} is closer to the reference ({ends})."


def _compare_results(first: Path, second: Path, as_json: bool) -> None:
    """Print the differences of two result files."""
    with stdout_reserved():
        from specmm.metrics.measurement import compare_results, read_measurements, unequal_counts

        one = read_measurements(first)
        two = read_measurements(second)
        if len(one) != len(two):
            got = f"{len(one)} and {len(two)}"
            raise ValueError(f"both results must hold the same metrics, got {got}")
        comparisons = [compare_results(a, b) for a, b in zip(one, two, strict=True)]
        for warning in filter(None, map(unequal_counts, one, two)):
            say(f"note: {warning}")
    if as_json:
        rows = [{**vars(d), "interval": d.interval and vars(d.interval)} for d in comparisons]
        emit({"differences": rows})
        return
    typer.echo("\n".join(_difference(d) for d in comparisons))


def _difference(gap: "Difference") -> str:
    text = f"{TITLES.get(gap.metric, gap.metric)} of A less that of B: {gap.value:.6g}"
    if gap.interval is None:
        return f"{text}; it may be noise: measure both with --interval"
    meaning = "more than" if gap.differ else "within"
    return f"{text}, {meaning} sampling noise  {interval_text(gap.interval, '.6g')}"


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="What bench and eval fid printed with --json; or .csv of rows."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.md and report.png.")] = Path(
        "out/report"
    ),
    as_json: Json = False,
) -> None:
    """Draw FID over speed-up of several methods, and write the table that belongs to it."""
    with stdout_reserved():
        from specmm.metrics.report import COLUMNS, draw_trade, joined, read_files, table

        speed, quality = read_files(results)
        rows = joined(speed, quality)
        floor = next((r["fid"] for r in quality if r["method"] == FLOOR), None)
        text = table(rows, COLUMNS)
        writable(out)
        plot = draw_trade(rows, out / "report.png", floor)
        page = f"# Speed against quality\n\n{text}\n\n![FID over speed-up](report.png)\n"
        write_text(out / "report.md", page)
    if as_json:
        emit({"rows": rows, "outputs": [str(out / "report.md"), str(plot)]})
    else:
        typer.echo(f"{text}\n\n{out / 'report.md'}\n{plot}")
