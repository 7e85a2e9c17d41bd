"""``specmm eval`` of pictures: distances and scores, and the files that they start from."""

# typer reads the annotations of these functions when this module is imported: they are evaluated

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from specmm.cli.evaluate.measured import (
    Reference,
    Seed,
    Source,
    Statistics,
    WithInterval,
    measured,
    reading,
)
from specmm.cli.evaluate.prompts import of_readable, read_prompts
from specmm.cli.evaluate.sources import SourceReader, generator, is_reference
from specmm.cli.options import Json
from specmm.cli.output import emit, say, stdout_reserved, table
from specmm.extending.registry import unknown
from specmm.loading.files import writable

if TYPE_CHECKING:
    from specmm.metrics.features import Protocol
    from specmm.metrics.measurement import Measurement
    from specmm.metrics.networks import CLIP
    from specmm.metrics.references import Layout

INCEPTIONS = ("inception", "inception-fidelity")
FORMATS: "dict[str, Layout]" = {
    "ours": "specmm",
    "adm": "adm",
    "clean-fid": "clean-fid",
    "torch-fidelity": "torch-fidelity",
}
Out = Annotated[Path, typer.Option(help="The file to write.")]
Neighbours = Annotated[int, typer.Option("-k", min=1, help="k of the k-nearest-neighbour radius.")]


@measured("inception")
def fid(
    source: Source,
    reference: Statistics,
    reader: SourceReader,
    interval: WithInterval = False,
    seed: Seed = 0,
) -> "Measurement":
    """Fréchet Inception distance; compare equal counts only, small sets are biased upwards."""
    hint = "use specmm eval fd for other networks"
    if reader.network not in INCEPTIONS:
        raise ValueError(f"FID needs Inception's features, got {reader.network!r}; {hint}")
    measurement = _frechet(reader, source, reference, seed if interval else None)
    named = str(measurement.protocol.get("features", "inception"))
    if not named.startswith("inception"):
        raise ValueError(f"FID needs Inception's features, got files of {named}; {hint}")
    return measurement


@measured("dinov2")
def fd(
    source: Source,
    reference: Statistics,
    reader: SourceReader,
    interval: WithInterval = False,
    seed: Seed = 0,
) -> "Measurement":
    """Fréchet distance of other features: dinov2 (FD-DINOv2), clip, efficientnet-lite0 (quick)."""
    return replace(_frechet(reader, source, reference, seed if interval else None), metric="fd")


@measured("inception")
def kid(
    source: Source,
    reference: Reference,
    reader: SourceReader,
    subsets: Annotated[int, typer.Option(min=1, help="Random subsets.")] = 100,
    subset_size: Annotated[int, typer.Option(min=2, help="Pictures of a subset.")] = 1000,
    subsets_only: Annotated[
        bool, typer.Option("--subsets-only", help="Their mean, not that of whole sets: quicker.")
    ] = False,
    interval: WithInterval = False,
    seed: Seed = 0,
) -> "Measurement":
    """Kernel Inception distance: the steadier number below 5,000 pictures."""
    from specmm.metrics.intervals import Bootstrap
    from specmm.metrics.kernel import kernel_distance

    if interval and subsets_only:
        raise ValueError(
            "--interval needs the whole-set estimate, which --subsets-only skips; leave one out"
        )
    distance = kernel_distance(
        *reader.both(source, reference),
        subsets=subsets,
        subset_size=subset_size,
        seed=seed,
        full=not subsets_only,
        bootstrap=Bootstrap(generator(seed)) if interval else None,
    )
    return distance.measurement()


@measured("inception-fidelity")
def inception_score(
    source: Source,
    reader: SourceReader,
    splits: Annotated[int, typer.Option(min=1, help="Number of splits.")] = 10,
) -> "Measurement":
    """Inception Score: how sure and how varied a classifier finds the pictures; no reference."""
    from specmm.metrics.inception_score import inception_score as score

    return score(reader.logits(source), splits=splits)


@measured("inception")
def precision_recall(
    source: Source, reference: Reference, reader: SourceReader, k: Neighbours = 3, seed: Seed = 0
) -> "tuple[Measurement, Measurement]":
    """Precision (how many pictures look real) and recall (how much of what is real they cover)."""
    from specmm.metrics import intervals, neighbours

    generated, real = reader.both(source, reference)
    bootstrap = intervals.Bootstrap(generator(seed))
    return neighbours.precision_recall(real, generated, k=k, bootstrap=bootstrap)


@measured("clip")
def clip(
    source: Source,
    reader: SourceReader,
    prompts: Annotated[
        Path,
        typer.Option(
            help="Text file: a line a picture, in the order of the pictures' names as text. Or "
            ".jsonl of file and prompt, such as a job's index."
        ),
    ],
) -> "Measurement":
    """CLIPScore: how well pictures fit their prompts."""
    from specmm.metrics.paired import clip_score

    if reader.network != "clip":
        raise ValueError(f"CLIPScore needs CLIP's features, got --features {reader.network}")
    pictures = reader.pictures(source)
    texts, note = read_prompts(prompts, pictures.files)
    model = cast("CLIP", reader.extractor)
    score = clip_score(pictures, of_readable(texts, pictures), model, batch=reader.batch)
    reader.report(pictures)
    return replace(score, protocol={**score.protocol, "note": note}) if note else score


@measured("inception")
def reconstruction(
    source: Source,
    originals: Annotated[
        str, typer.Argument(help="The pictures that SOURCE was made from, in the same order.")
    ],
    reader: SourceReader,
    rfid: Annotated[
        bool, typer.Option("--rfid/--no-rfid", help="With the FID of SOURCE against its originals.")
    ] = True,
) -> "list[Measurement]":
    """PSNR, SSIM and rFID of pictures that a tokenizer has encoded and decoded."""
    if reader.skip_bad:
        raise ValueError(
            "--skip-bad must be off, because pictures are compared in pairs; leave it out"
        )
    reconstructed = reader.pictures(source)
    original = reader.pictures(originals)
    from specmm.metrics.paired import reconstruction as measure

    network = reader.extractor if rfid else None
    return measure(original, reconstructed, extractor=network, batch=reader.batch)


def _frechet(reader: SourceReader, source: str, reference: str, seed: int | None) -> "Measurement":
    """The distance; with ``seed`` also its interval, which needs all features in memory."""
    from specmm.metrics.frechet import frechet_distance
    from specmm.metrics.intervals import frechet_interval

    if seed is None:
        return frechet_distance(*reader.both_statistics(source, reference))
    reference_moments = reader.gaussian(reference)
    generated = reader.features(source)
    interval = frechet_interval(generated, reference_moments, generator(seed))
    return replace(frechet_distance(generated, reference_moments), interval=interval)


@reading("inception")
def features(source: Source, out: Out, reader: SourceReader, as_json: Json = False) -> None:
    """Write the features of pictures to an .npz, from which distances need no network."""
    if out.suffix != ".npz":
        raise ValueError(f"features are written to .npz, got {out.name}; rename it")
    writable(out.parent)
    with stdout_reserved():
        rows = reader.features(source)
        rows.save(out)
    _written(out, len(rows), rows.values.shape[1], rows.protocol, as_json)


@reading("inception")
def stats(
    source: Source,
    out: Out,
    reader: SourceReader,
    layout: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "ours",
    as_json: Json = False,
) -> None:
    """Write reference statistics of pictures, of features, or of a file in another format."""
    if layout not in FORMATS:
        raise unknown("format", layout, FORMATS)
    from specmm.metrics.references import read_reference, write_reference

    if layout == "adm" and not is_reference(source):
        raise ValueError("adm needs spatial features, which no network here gives; --format ours")
    writable(out.parent)
    with stdout_reserved():
        gaussian = reader.gaussian(source)
        spatial = read_reference(Path(source), spatial=True) if layout == "adm" else None
        write_reference(gaussian, out, FORMATS[layout], spatial=spatial)
    _written(out, gaussian.count, len(gaussian.moments()[0]), gaussian.protocol, as_json)


def weights(as_json: Json = False) -> None:
    """Where every network's weights are looked for, if they are there, and how to get them."""
    with stdout_reserved():
        from specmm.metrics.weights import weights_folder, weights_table

        rows = weights_table()
        folder = weights_folder()
    if as_json:
        emit({"folder": str(folder), "weights": rows})
        return
    lines = [("name", "here", "what", "licence")]
    places = []
    for r in rows:
        missing = r["found"] == "no"
        lines.append((r["name"], "no" if missing else "yes", r["what"], r["licence"]))
        places.append(f"{r['name']}: {r['get'] if missing else r['found']}")
    typer.echo(table(lines) + "\n\n" + "\n".join(places) + "\n")
    typer.echo(
        f"looked for in {folder} ($SPECMM_WEIGHTS), installed packages, torch hub's cache and the "
        "HF cache; without a network, copy the file there from another machine, or name it with "
        "--weights"
    )


def _written(out: Path, count: int | None, width: int, protocol: "Protocol", as_json: bool) -> None:
    if as_json:
        emit({"out": str(out), "count": count, "width": width, "protocol": protocol})
    else:
        say(f"{'unknown' if count is None else count} samples of {width} features are in {out}")
