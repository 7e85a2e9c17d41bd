"""Samples on disk, made batch by batch: a killed job loses the batch at hand and nothing else.

A batch's file holds ``tokens`` [B, T], ``images`` [B, R, R, 3] uint8, ``labels`` [B],
``log_likelihood`` [B] and the run's counts. Sample i has seed i and the same class whatever the
method, so methods are compared on equal terms.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import Budget, dtype_name, generators, label
from specmm import methods, zoo
from specmm.core.stats import Certificate, Stats, total
from specmm.image_ar.shared import ImageOutput
from specmm.image_ar.tokens.assemble import DEFAULT_TREE
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt, log_likelihood


@dataclass
class Setting:
    """A line of a table: ``pipe`` called with the options ``call``, and its timed runs so far."""

    name: str
    pipe: Any
    call: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # a picture
    stats: list[Stats] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    certificates: list[Certificate] = field(default_factory=list)

    def draw(self, classes: Sequence[int], seeds: Sequence[int]) -> ImageOutput:
        """Pictures of ``classes``, all in one batch."""
        options: dict[str, Any] = dict(batch_size=len(classes), output_type="uint8")
        return self.pipe(classes=list(classes), generator=generators(seeds), **options, **self.call)

    def once(self, classes: Sequence[int], seeds: Sequence[int]) -> None:
        """Draw a batch and record its seconds."""
        start = time.perf_counter()
        out = self.draw(classes, seeds)
        self.seconds.append((time.perf_counter() - start) / len(classes))
        self.stats.append(out.stats)
        self.tokens.append(out.tokens)
        self.certificates.append(out.certificate)

    @property
    def total(self) -> Any:
        """The counts of all timed runs, of the family's own kind."""
        return total(self.stats)


SAMPLING = ("cfg", "cfg_interval", "temperature", "top_k", "top_p")


def sample_key(pipe: LlamaGenPipeline, model: str | Path, method: methods.Method) -> str:
    """Hash of all that decides a method's samples, code apart: weights, sampling, tree, dtype."""
    folder = zoo.find(model)
    parts = ["transformer", "vq"] + ([] if isinstance(method, methods.AR) else ["drafters"])
    files = [f for part in parts for f in (folder / part).rglob("*.safetensors")]
    facts: list[Any] = [dtype_name(pipe), *(getattr(pipe.settings, name) for name in SAMPLING)]
    if not isinstance(method, methods.AR):
        rule = method.choice.rule if isinstance(method, methods.Composed) else ""
        facts += [label(method), rule, pipe.parts.trees.get(method.name, DEFAULT_TREE)]
    return weights_key(files, facts)


def weights_key(files: Iterable[Path], facts: Any) -> str:
    """Hash of the contents of ``files``, in the order of their names, and of ``facts`` as JSON."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    digest.update(json.dumps(facts).encode())
    return digest.hexdigest()[:12]


@dataclass
class SampleSet:
    """The batches of one method in ``folder``."""

    folder: Path

    @classmethod
    def of(
        cls,
        cache: Path,
        pipe: LlamaGenPipeline,
        model: str | Path,
        method: methods.Method,
        batch: int,
    ) -> SampleSet:
        """That of ``method`` below ``cache``, made ``batch`` at a time."""
        name = re.sub(r"[^a-z0-9_.=+-]+", "_", label(method)).strip("_")
        return cls(cache / f"{name}-{sample_key(pipe, model, method)}-{batch}")

    def file(self, first: int) -> Path:
        """The file of the batch that begins with sample ``first``."""
        return self.folder / f"samples_{first:06d}.npz"

    def batches(self, limit: int | None = None) -> Iterator[dict[str, np.ndarray]]:
        """What there is, in order and without gaps, up to ``limit`` samples."""
        done = 0
        for file in sorted(self.folder.glob("samples_*.npz")):
            if int(file.stem.split("_")[1]) != done or (limit is not None and done >= limit):
                return
            with np.load(file) as data:
                batch = {k: data[k] for k in data.files}
            done += len(batch["labels"])
            yield batch

    def arrays(self, *names: str, limit: int | None = None) -> list[np.ndarray]:
        """The arrays ``names`` of all batches, joined; at most ``limit`` samples, at least one."""
        found = list(self.batches(limit))
        if not found:
            raise ValueError(
                f"{self.folder} must hold samples, got none; run the quality benchmark"
            )
        return [np.concatenate([b[n] for b in found])[:limit] for n in names]

    def count(self) -> int:
        """How many samples there are."""
        return sum(len(b["labels"]) for b in self.batches())

    def counts(self, limit: int | None = None) -> dict[str, Any]:
        """Sums of the runs' counts: tokens, rounds, seconds, kept, and the measured excess a token
        (or None); of the batches up to ``limit`` samples.
        """
        runs = [json.loads(str(b["run"])) for b in self.batches(limit)]
        width = max(len(r["kept"]) for r in runs)
        total: dict[str, Any] = {
            k: sum(r[k] for r in runs) for k in ("tokens", "rounds", "seconds")
        }
        total["kept"] = [
            sum(r["kept"][i] if i < len(r["kept"]) else 0 for r in runs) for i in range(width)
        ]
        known = [(r["tv"], r["tokens"]) for r in runs if r["tv"] is not None]
        total["tv"] = sum(v * n for v, n in known) / sum(n for _, n in known) if known else None
        return total | {"certificate": runs[-1]["certificate"]}

    def make(
        self, setting: Setting, labels: np.ndarray, first: int, judge: LlamaGenTarget | None = None
    ) -> bool:
        """Make the batch of ``labels`` [B], seeds from ``first`` on, unless it is there; a
        ``judge`` tells how likely its tokens are.
        """
        file = self.file(first)
        if file.exists():
            return False
        out = setting.draw([int(c) for c in labels], range(first, first + len(labels)))
        run = asdict(out.stats) | {"tv": out.certificate.tv, "certificate": out.certificate.kind}
        found = {"images": out.images, "labels": labels, "run": np.array(json.dumps(run))}
        if judge is not None:
            likely = log_likelihood(judge, Prompt(torch.from_numpy(labels)), out.tokens)
            found |= {"tokens": out.tokens.to(torch.int32).numpy()}
            found |= {"log_likelihood": likely.numpy()}
        save(file, **found)
        return True


def draw_samples(
    made: Sequence[tuple[Setting, SampleSet]],
    labels: np.ndarray,
    batch: int,
    budget: Budget,
    judge: LlamaGenTarget | None = None,
) -> None:
    """Samples of ``labels`` by every setting, batch by batch and in turn: an early stop leaves all
    with equally many.
    """
    with tqdm(total=len(made) * len(labels), desc="samples", unit="picture") as bar:
        for first in range(0, len(labels), batch):
            part = labels[first : first + batch]
            for setting, found in made:
                if budget.spent:
                    return
                bar.set_postfix_str(setting.name, refresh=False)
                found.make(setting, part, first, judge)
                bar.update(len(part))


def save(file: Path, **arrays: Any) -> None:
    """Write a .npz whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    part.replace(file)
