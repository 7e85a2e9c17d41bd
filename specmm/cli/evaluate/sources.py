"""What the arguments of ``specmm eval`` name, as features or statistics."""

from __future__ import annotations

import json
import operator
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specmm.cli.output import say

REFERENCE_NAMES = {"mu", "sigma"}


@dataclass
class Reader:
    """Reads sources; the network is loaded once, and only if one of them holds pictures."""

    network: str = "inception"
    weights: Path | None = None
    skip_bad: bool = False
    workers: int | None = None
    batch: int = 32
    device: str = "cpu"
    skipped: list[tuple[str, str]] = field(
        default_factory=list
    )  # (name, reason) of pictures left out
    checked: set[str] = field(
        default_factory=set
    )  # sources that were compared with their job's journal

    @cached_property
    def extractor(self) -> Any:
        """The network; raises ``ValueError`` for an unknown name or device, and for missing
        weights.
        """
        from specmm.hardware import named_device
        from specmm.metrics.extractors import extractor

        return extractor(self.network, weights=self.weights, device=named_device(self.device))

    def both(self, source: str, reference: str, statistics: bool = False) -> tuple[Any, Any]:
        """Features, or ``statistics``, of both, once it is known that there is something to read in
        both.
        """
        read = self.gaussian if statistics else self.features
        known = read(reference) if is_file_of_numbers(reference) else None
        for each in (source, reference):
            if not is_file_of_numbers(each):
                self.pictures(each)
        return read(source), read(reference) if known is None else known

    def features(self, source: str) -> Any:
        """The features in an .npz, or those of pictures, as a ``FeatureSet``."""
        import torch

        from specmm.metrics.features import FeatureSet

        stored = stored_features(source)
        if stored is not None:
            return stored
        blocks = list(self._blocks(source))
        return FeatureSet(torch.cat([b.values for b in blocks]), blocks[0].protocol)

    def gaussian(self, source: str) -> Any:
        """Statistics of pictures, block by block, of stored features, or those in a file of
        reference statistics.
        """
        from specmm.metrics.frechet import FeatureStatistics

        if is_reference(source):
            from specmm.metrics.references import read_reference

            return read_reference(Path(source))
        stored = stored_features(source)
        if stored is not None:
            return FeatureStatistics.of(stored)
        found: Any = None
        for block in self._blocks(source):
            found = FeatureStatistics.empty(block.values.shape[1]) if found is None else found
            found.update(block)
        return found

    def logits(self, source: str) -> Any:
        """Class logits of pictures as a ``FeatureSet``, or those stored in an .npz."""
        stored = stored_features(source)
        if stored is not None:
            if "features" in stored.protocol:
                raise ValueError(
                    f"{source} must hold class logits, got features of {stored.protocol['features']}; give the pictures"
                )
            return stored
        network, pictures = self.extractor, self.pictures(source)
        found = network.logits(pictures, batch=self.batch, progress=sys.stderr.isatty())
        self._report(pictures)
        return found

    def pictures(self, source: str) -> Any:
        """The pictures of ``source``, decoded by ``workers`` processes.

        Raises ``ValueError`` where there are none, and for a job's output with a damaged or missing
        result.
        """
        from specmm.jobs.verify import check_whole
        from specmm.metrics.inputs import open_pictures

        if source not in self.checked:
            check_whole(Path(source))
            self.checked.add(source)
        return open_pictures(source, skip_bad=self.skip_bad, workers=self.workers)

    def noted(self, found: Any) -> Any:
        """The measurement ``found`` with a note about pictures that were left out."""
        if not self.skipped:
            return found
        notes = [found.protocol["note"]] if "note" in found.protocol else []
        notes.append(f"{len(self.skipped)} pictures could not be read and were left out")
        return replace(found, protocol={**found.protocol, "note": "; ".join(notes)})

    def _blocks(self, source: str) -> Iterator[Any]:
        from tqdm import tqdm

        pictures, network = self.pictures(source), self.extractor
        total = operator.length_hint(pictures) or None
        with tqdm(
            total=total, desc=f"{network.name} {name_of(source)}", unit="picture", disable=None
        ) as bar:
            for block in network.stream(pictures, batch=self.batch):
                bar.update(len(block))
                yield block
        self._report(pictures)

    def _report(self, pictures: Any) -> None:
        for name, reason in pictures.skipped:
            say(f"left out {name}: {reason}")
        self.skipped += pictures.skipped


def stored_features(source: str) -> Any:
    """The ``FeatureSet`` in an .npz of features, ours or a bare matrix [N, F]; None where it holds
    something else.
    """
    import numpy as np

    from specmm.metrics.features import FeatureSet, as_features

    names = npz_names(source)
    if {"values", "protocol"} <= names:
        return FeatureSet.load(Path(source))
    if len(names) != 1:
        return None
    with np.load(source) as data:
        only = data[next(iter(names))]
    return as_features(only) if only.ndim == 2 and only.dtype.kind == "f" else None


def is_file_of_numbers(source: str) -> bool:
    """Whether ``source`` is a file of statistics or features, which is read at once."""
    return is_reference(source) or stored_features(source) is not None


def is_reference(source: str) -> bool:
    """Whether ``source`` is a file of reference statistics."""
    return npz_names(source) >= REFERENCE_NAMES or Path(source).suffix == ".pt"


def npz_names(source: str) -> set[str]:
    """The arrays in an .npz file; none for anything else. Raises ``ValueError`` for a damaged one."""
    if Path(source).suffix != ".npz" or not Path(source).is_file():
        return set()
    try:
        with zipfile.ZipFile(source) as found:
            return {n.removesuffix(".npy") for n in found.namelist()}
    except (zipfile.BadZipFile, OSError):
        raise ValueError(
            f"{source} must be an .npz file, got a damaged one; write it again"
        ) from None


def name_of(source: str) -> str:
    """The method that made the pictures of ``source`` if ``specmm generate`` wrote it down there,
    else its name.
    """
    run = Path(source) / "run.json"
    try:
        return str(json.loads(run.read_text(encoding="utf-8"))["method"])
    except (OSError, ValueError, KeyError, TypeError):
        return Path(source).name.removesuffix(Path(source).suffix) or source


def generator(seed: int) -> Any:
    """A generator of the CPU."""
    import torch

    return torch.Generator().manual_seed(seed)
