"""Pictures drawn batch by batch and saved as soon as a batch is done.

A picture's uniforms depend on its own seed only, so the batches of a run are calls of their own.
"""

from __future__ import annotations

import inspect
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmm import methods
from specmm.files import slug, write_whole
from specmm.runs.method_names import label
from specmm.runs.models import place_of
from specmm.stats import Certificate, merged_certificate


@dataclass
class Job:
    """What is to be drawn: ``inputs`` (one a picture) of one ``kind``, "classes" or "prompt"."""

    model: str
    method: methods.Method
    kind: str
    inputs: list[str]
    seed: int
    sampling: dict[str, Any]
    batch_size: int
    out: Path
    compiled: bool = False
    batch_invariant: bool = False


@dataclass
class Report:
    """What was drawn so far."""

    job: Job
    outputs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    stats: Any = None
    ran: str = ""  # the method with what it left to this machine decided
    reason: str = ""  # why so
    certificates: list[tuple[Certificate, int]] = field(
        default_factory=list
    )  # with the tokens each is about
    interrupted: bool = False
    place: dict[str, str] = field(default_factory=dict)  # device and dtype

    def as_dict(self) -> dict[str, Any]:
        """The JSON of the run."""
        job, stats = self.job, self.stats
        found = merged_certificate(self.certificates)
        return {
            "model": job.model,
            "method": job.method.name,
            "method_options": {k: v for k, v in vars(job.method).items() if v is not None},
            "ran": self.ran,
            "reason": self.reason,
            "seed": job.seed,
            **self.place,
            "seconds": self.seconds,
            "pictures": len(self.outputs),
            **stats.as_dict(),
            "certificate": found.as_dict() if found else None,
            "sampling": job.sampling,
            job.kind: job.inputs,
            "outputs": self.outputs,
            "interrupted": self.interrupted,
        }

    def save(self) -> None:
        """Write the run's ``run.json`` beside its pictures."""
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n"
        write_whole(self.job.out / "run.json", text.encode())


def check(pipe: Any, job: Job) -> None:
    """Raise ``ValueError`` for options and classes that ``pipe`` cannot take, before anything is
    drawn.

    What was not given is noted down as the model's settings have it.
    """
    import torch

    from specmm.image_ar.settings import class_ids, with_options

    if job.compiled and "compiled" not in inspect.signature(pipe.__call__).parameters:
        raise ValueError(
            f"--compile serves pocket/llamagen, pocket/var and the like, not {job.model}; leave it out"
        )
    if job.batch_invariant and (
        job.compiled or pipe.transformer.dtype != torch.float32 or pipe.device.type != "cpu"
    ):
        raise ValueError(
            "--batch-invariant needs float32 on a CPU, uncompiled; give --dtype float32 and leave --compile out"
        )
    known = check_sampling(pipe, job.model, job.sampling)
    settings = with_options(pipe.settings, **job.sampling)
    job.sampling = {name: getattr(settings, name) for name in known}
    if job.kind == "classes":
        class_ids(job.inputs, pipe.settings.classes, pipe.transformer.config.num_classes)


def check_sampling(pipe: Any, model: str, sampling: dict[str, Any]) -> Mapping[str, Any]:
    """Raise ``ValueError`` for options that ``pipe``, of ``model``, cannot take; returns all it
    knows.
    """
    from specmm.registry import unknown

    known = inspect.signature(pipe.target).parameters
    for name in sampling.keys() - known.keys():
        raise unknown(f"option of {model}", name, known)
    pipe.target(**sampling)
    return known


def draw(pipe: Any, job: Job, tell: Callable[[str], None], callback: Any = None) -> Report:
    """Draw and save, ``tell`` what one should know; Ctrl-C leaves what is finished.

    Raises ``ValueError`` when the disk is full.
    """
    import torch
    from tqdm import tqdm

    from specmm.randomness import sample_generators
    from specmm.stats import Stats

    report = Report(job, stats=Stats(), place=place_of(pipe.transformer))
    if old := sum(1 for file in job.out.glob("*.png")):
        tell(
            f"note: {job.out} holds {old} pictures already; those of other names stay beside the new ones"
        )
    if job.compiled:
        tell("note: rounds, or scales, are compiled at first, which takes half a minute to two")
    method = _settled(pipe, job, report)
    source = torch.Generator().manual_seed(job.seed)
    one = getattr(method, "release", False)  # all pictures from one generator, in one batch
    generators = [] if one else sample_generators(source, len(job.inputs), pipe.device)
    try:
        with tqdm(total=len(job.inputs), unit="picture", disable=None, leave=False) as bar:
            for first in range(0, len(job.inputs), job.batch_size):
                rows = range(len(job.inputs))[first : first + job.batch_size]
                _batch(
                    pipe,
                    report,
                    rows,
                    method,
                    source if one else [generators[i] for i in rows],
                    callback,
                )
                bar.update(len(rows))
    except KeyboardInterrupt:
        report.interrupted = True
    except OSError as error:
        done = f"{len(report.outputs)} of {len(job.inputs)} pictures are in {job.out}"
        raise ValueError(
            f"writing failed ({error.strerror or error}), make room or choose another --out; {done}"
        ) from error
    return report


def _settled(pipe: Any, job: Job, report: Report) -> Any:
    """The job's method, decided for its full batches where it leaves something to this machine;
    noted in ``report``.
    """
    at_once, found, note = min(job.batch_size, len(job.inputs)), job.method, ""
    if hasattr(pipe, "chooser"):
        found, note = pipe.chooser.settle(job.method, at_once, pipe.target(**job.sampling))
    if getattr(found, "release", False) and at_once < len(job.inputs):
        raise ValueError(
            f"release draws one batch, give --batch-size {len(job.inputs)}, got {job.batch_size}"
        )
    report.ran, report.reason = label(found), note
    return found


def _batch(
    pipe: Any, report: Report, rows: Sequence[int], method: Any, generator: Any, callback: Any
) -> None:
    from specmm.batch_invariant import batch_invariant
    from specmm.stats import total

    job, start = report.job, time.perf_counter()
    inputs = [job.inputs[i] for i in rows]
    with batch_invariant() if job.batch_invariant else nullcontext():
        out = pipe(
            **{job.kind: inputs},
            generator=generator,
            method=method,
            batch_size=len(rows),
            callback_on_step_end=callback,
            **job.sampling,
            **(
                {"compiled": True}
                if job.compiled and len(rows) == min(job.batch_size, len(job.inputs))
                else {}
            ),
        )
    if method.name == "auto" and not report.outputs:
        report.reason = out.method.partition(": ")[2]
    report.seconds += time.perf_counter() - start
    report.stats = total([out.stats, report.stats] if report.outputs else [out.stats])
    report.certificates.append((out.certificate, out.tokens.numel()))
    for i, text, image in zip(rows, inputs, out.images, strict=True):
        file = job.out / f"{i:04d}-{slug(text)}.png"
        save_picture(image, file)
        report.outputs.append(str(file))


def save_picture(image: Any, file: Path) -> None:
    """Write a PIL picture as PNG, whole or not at all."""
    packed = io.BytesIO()
    image.save(packed, format="PNG")
    write_whole(file, packed.getvalue())
