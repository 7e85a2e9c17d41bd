"""Reads the sources named in arguments of ``specmm eval`` as features or statistics."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from specmm.cli.options import Device
from specmm.cli.output import counted, say

if TYPE_CHECKING:
    import torch

    from specmm.metrics.compare import Comparison
    from specmm.metrics.extractors import Extractor
    from specmm.metrics.features import FeatureSet
    from specmm.metrics.frechet import Gaussian
    from specmm.metrics.inputs import PictureSource
    from specmm.metrics.measurement import Measurement

    Noted = TypeVar("Noted", Measurement, Comparison)

T = TypeVar("T")
REFERENCE_NAMES = {"mu", "sigma"}


@dataclass
class SourceReader:
    """Reads sources; the network is loaded once, and only if a source holds pictures."""

    network: Annotated[
        str,
        typer.Option(
            "--features", help="Network that sees the pictures (see: specmm eval weights)."
        ),
    ] = "inception"
    weights: Annotated[
        Path | None, typer.Option(help="Its weights, where they are not found by themselves.")
    ] = None
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out pictures that cannot be read, and list them."),
    ] = False
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read pictures (default: one a core).")
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 32
    device: Device = "auto"

    def __post_init__(self) -> None:
        self.opened: dict[str, PictureSource] = {}  # sources of pictures

    @cached_property
    def extractor(self) -> Extractor:
        """The network; ``ValueError`` for an unknown name or device, and for missing weights."""
        from specmm.loading.hardware import named_device
        from specmm.metrics import extractors

        device = named_device(self.device)
        return extractors.extractor(self.network, weights=self.weights, device=device)

    def both(self, source: str, reference: str) -> tuple[FeatureSet, FeatureSet]:
        """Features of both sources, after checking that both can be read."""
        return self._read_both(self.features, source, reference)

    def both_statistics(self, source: str, reference: str) -> tuple[Gaussian, Gaussian]:
        """As ``both``, with statistics instead of features."""
        return self._read_both(self.gaussian, source, reference)

    def _read_both(self, read: Callable[[str], T], source: str, reference: str) -> tuple[T, T]:
        of_reference = read(reference) if is_file_of_numbers(reference) else None
        for side in (source, reference):
            if not is_file_of_numbers(side):
                self.pictures(side)
        return read(source), read(reference) if of_reference is None else of_reference

    def features(self, source: str) -> FeatureSet:
        """The features stored in an .npz, or computed from pictures."""
        from specmm.metrics.extractors import joined

        stored = stored_features(source)
        return joined(self._blocks(source)) if stored is None else stored

    def gaussian(self, source: str) -> Gaussian:
        """Statistics of pictures (block by block) or of stored features, or those in a file."""
        from specmm.metrics.frechet import FeatureStatistics
        from specmm.metrics.references import read_reference

        if is_reference(source):
            return read_reference(Path(source))
        stored = stored_features(source)
        if stored is not None:
            return FeatureStatistics.of(stored)
        blocks = self._blocks(source)
        statistics = FeatureStatistics.of(next(blocks))
        for block in blocks:
            statistics.update(block)
        return statistics

    def logits(self, source: str) -> FeatureSet:
        """Class logits of pictures, or those stored in an .npz."""
        stored = stored_features(source)
        if stored is not None:
            if "features" in stored.protocol:
                got = f"features of {stored.protocol['features']}; give the pictures"
                raise ValueError(f"{source} must hold class logits, got {got}")
            return stored
        network = self.extractor
        pictures = self.pictures(source)
        logits = network.logits(pictures, batch=self.batch, progress=sys.stderr.isatty())
        self.report(pictures)
        return logits

    def pictures(self, source: str) -> PictureSource:
        """The pictures of ``source``, decoded by ``workers`` processes.

        Raises ``ValueError`` if there are none, and for a job's output with a damaged or missing
        result.
        """
        from specmm.jobs.verify import check_whole
        from specmm.metrics.inputs import open_pictures

        if source not in self.opened:
            check_whole(Path(source))
            pictures = open_pictures(source, skip_bad=self.skip_bad, workers=self.workers)
            self.opened[source] = pictures
            if pictures.left_out:
                say(f"{source}: {counted(pictures.counts())}")
        return self.opened[source]

    def noted(self, result: Noted) -> Noted:
        """The ``result`` with the numbers of files that were measured and left out."""
        counts = {name: pictures.counts() for name, pictures in self.opened.items()}
        files = {name: count for name, count in counts.items() if count}
        return replace(result, protocol={**result.protocol, "files": files}) if files else result

    def _blocks(self, source: str) -> Iterator[FeatureSet]:
        pictures = self.pictures(source)
        network = self.extractor
        title = f"{network.name} {name_of(source)}" if sys.stderr.isatty() else None
        yield from network.stream(pictures, batch=self.batch, progress=title)
        self.report(pictures)

    def report(self, pictures: PictureSource) -> None:
        """Print which of ``pictures`` were left out in the last pass, and why."""
        for name, reason in pictures.skipped:
            say(f"left out {name}: {reason}")


def stored_features(source: str) -> FeatureSet | None:
    """The features in an .npz, ours or a bare matrix [N, F]; None if it holds none."""
    import numpy as np

    from specmm.metrics.features import FeatureSet, as_features
    from specmm.metrics.inputs import whole

    if not holds_features(source):
        return None
    with whole(source, "numpy file"):
        if len(npz_names(source)) > 1:
            return FeatureSet.load(Path(source))
        with np.load(source) as data:
            return as_features(data[data.files[0]])


def holds_features(source: str) -> bool:
    """Whether ``source`` is an .npz of features; reads only headers, as pictures may be gigabytes.

    Raises ``ValueError`` for a damaged file.
    """
    from specmm.metrics.inputs import array_header, whole

    names = npz_names(source)
    if {"values", "protocol"} <= names:
        return True
    if len(names) != 1:
        return False
    with (
        whole(source, "numpy file"),
        zipfile.ZipFile(source) as archive,
        archive.open(archive.namelist()[0]) as array,
    ):
        try:
            shape, _, dtype = array_header(array)
        except ValueError:  # another reader of the file will report the error
            return False
    return len(shape) == 2 and dtype.kind == "f"


def is_file_of_numbers(source: str) -> bool:
    """Whether ``source`` is a file of statistics or features."""
    return is_reference(source) or holds_features(source)


def is_reference(source: str) -> bool:
    """Whether ``source`` is a file of reference statistics."""
    return npz_names(source) >= REFERENCE_NAMES or Path(source).suffix == ".pt"


def npz_names(source: str) -> set[str]:
    """The arrays in an .npz file, none for anything else; ``ValueError`` for a damaged one."""
    if Path(source).suffix.lower() != ".npz" or not Path(source).is_file():
        return set()
    from specmm.metrics.inputs import whole

    with whole(source, "numpy file"), zipfile.ZipFile(source) as archive:
        return {n.removesuffix(".npy") for n in archive.namelist()}


def name_of(source: str) -> str:
    """The method that ``specmm generate`` recorded in ``source``'s pictures, or its file name."""
    run = Path(source) / "run.json"
    try:
        return str(json.loads(run.read_text(encoding="utf-8"))["method"])
    except (OSError, ValueError, KeyError, TypeError):
        return Path(source).name.removesuffix(Path(source).suffix) or source


def generator(seed: int) -> torch.Generator:
    """A generator of the CPU."""
    import torch

    return torch.Generator().manual_seed(seed)
