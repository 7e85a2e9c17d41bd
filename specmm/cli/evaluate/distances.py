"""``specmm eval fid | fd | kid | is | pr | dc | mifid``: one set of pictures against another."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from specmm.cli.evaluate.measured import measured
from specmm.cli.evaluate.options import Reference, Seed, Source, Statistics, WithInterval
from specmm.cli.evaluate.sources import Reader, generator

INCEPTIONS = ("inception", "inception-fidelity")
Neighbours = Annotated[int, typer.Option("-k", min=1, help="Neighbours that make a sample's ball.")]


@measured("inception")
def fid(
    source: Source,
    reference: Statistics,
    reader: Reader,
    interval: WithInterval = False,
    seed: Seed = 0,
) -> Any:
    """Fréchet Inception distance; compare equal counts only, small sets are biased upwards."""
    if reader.network not in INCEPTIONS:
        raise ValueError(
            f"FID is of Inception's features, got {reader.network!r}; use specmm eval fd for other networks"
        )
    found = _frechet(reader, source, reference, seed if interval else None)
    named = str(found.protocol.get("features", "inception"))
    if not named.startswith("inception"):
        raise ValueError(
            f"FID is of Inception's features, these files hold {named}; use specmm eval fd"
        )
    return found


@measured("dinov2")
def fd(
    source: Source,
    reference: Statistics,
    reader: Reader,
    interval: WithInterval = False,
    seed: Seed = 0,
) -> Any:
    """Fréchet distance with other features: dinov2 (FD-DINOv2), clip (CLIP-FD), efficientnet-lite0
    (quick).
    """
    return replace(_frechet(reader, source, reference, seed if interval else None), metric="fd")


@measured("inception")
def kid(
    source: Source,
    reference: Reference,
    reader: Reader,
    subsets: Annotated[int, typer.Option(min=1, help="Random subsets.")] = 100,
    subset_size: Annotated[int, typer.Option(min=2, help="Pictures of a subset.")] = 1000,
    interval: WithInterval = False,
    seed: Seed = 0,
) -> Any:
    """Kernel Inception distance: the steadier number below 5,000 pictures."""
    from specmm.metrics.intervals import Bootstrap
    from specmm.metrics.kernel import kernel_distance

    sizes: dict[str, Any] = {"subsets": subsets, "subset_size": subset_size, "seed": seed}
    bootstrap = Bootstrap(generator(seed)) if interval else None
    return kernel_distance(
        *reader.both(source, reference), **sizes, bootstrap=bootstrap
    ).measurement()


@measured("inception-fidelity")
def inception_score(
    source: Source,
    reader: Reader,
    splits: Annotated[int, typer.Option(min=1, help="Parts the pictures are dealt out to.")] = 10,
) -> Any:
    """Inception Score: how sure and how varied a classifier finds the pictures; needs no reference."""
    from specmm.metrics.inception_score import inception_score as score

    return score(reader.logits(source), splits=splits)


@measured("inception")
def precision_recall(
    source: Source, reference: Reference, reader: Reader, k: Neighbours = 3, seed: Seed = 0
) -> Any:
    """Precision (how many pictures look real) and recall (how much of what is real they cover)."""
    from specmm.metrics import intervals, manifold

    made, real = reader.both(source, reference)
    return manifold.precision_recall(
        real, made, k=k, bootstrap=intervals.Bootstrap(generator(seed))
    )


@measured("inception")
def density_coverage(
    source: Source, reference: Reference, reader: Reader, k: Neighbours = 5, seed: Seed = 0
) -> Any:
    """Density and coverage, the steadier successors of precision and recall."""
    from specmm.metrics import intervals, manifold

    made, real = reader.both(source, reference)
    return manifold.density_coverage(
        real, made, k=k, bootstrap=intervals.Bootstrap(generator(seed))
    )


@measured("inception")
def mifid(source: Source, reference: Reference, reader: Reader) -> Any:
    """Memorisation-informed FID: pictures close to those of the reference, the training set, make
    it larger.
    """
    from specmm.metrics.memorisation import memorisation_distance

    made, real = reader.both(source, reference)
    return memorisation_distance(real, made)


def _frechet(reader: Reader, source: str, reference: str, seed: int | None) -> Any:
    """The distance; with ``seed`` also its interval, which needs all features in memory."""
    from specmm.metrics.frechet import frechet_distance
    from specmm.metrics.intervals import frechet_interval

    if seed is None:
        return frechet_distance(*reader.both(source, reference, statistics=True))
    known = reader.gaussian(reference)
    made = reader.features(source)
    return replace(
        frechet_distance(made, known), interval=frechet_interval(made, known, generator(seed))
    )
