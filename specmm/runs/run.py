"""One run: a model and a method, both by name, the pictures drawn, and a record of it for JSON.

A picture's uniforms depend on its own seed only, so a run calls the pipeline for each batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from specmm import methods, zoo
from specmm.choose.contest import Measured
from specmm.choose.threads import in_use, settled
from specmm.choose.when_compiled import Compiled
from specmm.core.stats import Certificate, Stats, merged_certificate, total
from specmm.core.watching import watched
from specmm.extending.registry import OPTION, Registry, unknown
from specmm.hf.pictures.picture_models import draws_pictures, processes
from specmm.image_ar.calls import PicturesSoFar
from specmm.image_ar.pipeline import TRANSFORMERS_FAMILY, family_of, open_pictures
from specmm.image_ar.records import MODELS, write_pictures
from specmm.loading.checkpoints import read_json
from specmm.loading.files import slug, write_whole
from specmm.loading.hardware import Place as Place
from specmm.loading.hardware import dtype_name
from specmm.programs.batch_invariant import batch_invariant

if TYPE_CHECKING:  # diffusers takes seconds to import
    from specmm.image_ar.shared import PicturePipeline

    Images = PicturePipeline[Any]  # a pipeline of any family

Kind = Literal["images", "questions", "text"]

# ---- models by name


HERE = Place()
# what a run's pictures have in common, in its record beside what was asked for
SAME = (*MODELS, "files", "processor", "versions", "batch_invariant")


def place_of(network: nn.Module) -> dict[str, Any]:
    """Device and dtype of ``network``, and the threads in use, for JSON."""
    weight = next(network.parameters())
    place = {"device": str(weight.device), "dtype": dtype_name(weight.dtype)}
    return place | in_use().as_dict()


def kinds_of(model: str) -> tuple[Kind, ...]:
    """The kinds of work a model is for; a published or hub model is fetched to find out.

    Raises ``ValueError`` for an unknown name, and for a folder of something else.
    """
    folder = zoo.pocket_models().get(model, Path(model))
    if not folder.exists() and not model.startswith("pocket/"):
        entry = zoo.entry_of(model)
        if entry is not None and entry.parts:
            return ("images",)
        folder = zoo.fetched(model)
    if (folder / zoo.PIPELINE).is_file():
        return ("images",)
    if (folder / zoo.PACKAGE).is_file():
        return ("text",)
    if not (folder / zoo.TRANSFORMERS).is_file():
        raise ValueError(
            f"model must be a folder or a pocket model, got {model!r}; specmm zoo lists them"
        )
    if draws_pictures(folder):
        return ("images", "questions") if processes(folder) else ("images",)
    sees = "vision_config" in read_json(folder / zoo.TRANSFORMERS)
    return ("questions",) if sees or processes(folder) else ("text",)


def draws(model: str) -> bool:
    """Whether ``model`` is an image model."""
    try:
        family_of(model)
    except ValueError:
        return False
    return True


def methods_of(kind: Kind, model: str) -> Registry:
    """The methods that ``model``, of a ``kind``, can be run by."""
    if kind == "images":
        return family_of(model).methods
    return methods.VQA if kind == "questions" else methods.TEXT


def default_method(kind: Kind, drafter: str | None) -> str:
    """The method of a ``drafter``'s folder, for questions or text; plain decoding without one."""
    if drafter is None:
        return str(methods.AR.name)
    from specmm.text.pipeline import TextPipeline
    from specmm.vlm.pipeline import VQAPipeline

    pipeline = VQAPipeline if kind == "questions" else TextPipeline
    return pipeline.default_method(drafter)


def open_model(
    kind: Kind,
    model: str,
    place: Place = HERE,
    method: Any = "ar",
    drafter: str | None = None,
    text_encoder: str | Path | None = None,
    small: str | Path | None = None,
) -> Any:
    """The pipeline of ``model``, a folder, pocket name or hub id, without a progress bar.

    ``drafter`` is a folder, ``text_encoder`` for images of LlamaGen's prompts, ``small``
    of a MAR or a VAR. Raises
    ``ValueError`` for a model that cannot be found or read, and one that takes no drafter.
    """
    family = family_of(model) if kind == "images" else None
    if family in (None, TRANSFORMERS_FAMILY):
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    if family is TRANSFORMERS_FAMILY:  # some of which paint by networks of diffusers
        from diffusers.utils import logging

        logging.disable_progress_bar()
    if family is not None:
        if drafter is not None and not family.takes_drafter:
            raise ValueError(f"{model} reads the drafters in its own folder; leave --drafter out")
        given = dict(
            device=place.device,
            dtype=place.dtype,
            drafter=drafter,
            small=small,
            text_encoder=text_encoder,
        )
        options = {name: value for name, value in given.items() if value is not None}
        pipe = open_pictures(model, method, options, "alone")
        pipe.set_progress_bar_config(disable=True)
        return pipe
    if kind == "questions":
        from specmm.vlm.pipeline import VQAPipeline

        return VQAPipeline.from_pretrained(model, method, drafter, place.dtype, place.device)
    from specmm.text.pipeline import TextPipeline

    return TextPipeline.from_pretrained(model, method, drafter, place.dtype, place.device)


def _options(method: object) -> dict[str, object]:
    """The options of a method that are not None, for JSON."""
    return {
        name: methods.plain_option(value)
        for name, value in vars(method).items()
        if value is not None
    }


# ---- answers and texts


def answered(
    kind: Kind,
    model: str,
    place: Place,
    method: Any,
    drafter: str | None,
    call: Callable[[Any], Any],
) -> tuple[Any, dict[str, Any]]:
    """The result of ``call`` with the pipeline of ``model``, and a record of it for JSON."""
    pipe = open_model(kind, model, place, method, drafter)
    with settled(pipe.model):
        place_and_threads = place_of(pipe.model)
        begin = time.perf_counter()
        out = call(pipe)
        seconds = time.perf_counter() - begin
    record = {
        "model": model,
        "method": out.method,
        "method_options": _options(method),
        **place_and_threads,
        "seconds": seconds,
        "tokens": sum(map(len, out.tokens)),
        "rounds": out.stats.rounds,
        "tau": out.stats.tau,
        "taus": out.taus,
        "prompt_tokens": out.prompt_tokens,
        "finish_reasons": out.finish_reasons,
        "certificate": out.certificate.as_dict(),
    }
    return out, record


# ---- pictures


@dataclass
class PictureRun:
    """A run of pictures: its inputs and options, and the results so far.

    ``inputs`` (one a picture) are of one ``kind``, "classes" or "prompt"; ``ran`` is the method
    with all machine-dependent options resolved, ``reason`` explains them. ``certificates`` come
    with the number of tokens each is about. ``compiled`` is the option as given; ``records`` hold,
    for each of ``outputs``, the facts to draw it again.
    """

    model: str
    method: methods.Method
    kind: str
    inputs: list[str]
    seed: int
    sampling: dict[str, Any]
    batch_size: int
    out: Path
    compiled: Compiled = False
    batch_invariant: bool = False
    wanted: dict[str, Any] = field(default_factory=dict)  # options of the pictures: height, …
    outputs: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)  # the facts to draw pictures again
    planning_seconds: float = 0.0  # the time to decide the method, before the first picture
    seconds: float = 0.0
    stats: Stats = field(default_factory=Stats)
    ran: str = ""
    reason: str = ""
    certificates: list[tuple[Certificate, int]] = field(default_factory=list)
    interrupted: bool = False
    place: dict[str, Any] = field(default_factory=dict)  # device, dtype and threads

    @property
    def rows(self) -> int:
        """Pictures of a full batch."""
        return min(self.batch_size, len(self.inputs))

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of all batches together; None before the first is done."""
        return merged_certificate(self.certificates)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        certificate = self.certificate
        first = self.records[0] if self.records else {}
        return {
            "model": self.model,
            "method": self.method.name,
            "method_options": _options(self.method),
            "ran": self.ran,
            "reason": self.reason,
            "seed": self.seed,
            **self.place,
            "planning_seconds": self.planning_seconds,
            "seconds": self.seconds,
            "pictures": len(self.outputs),
            **self.stats.as_dict(),
            "certificate": certificate.as_dict() if certificate else None,
            "sampling": self.sampling,
            "compiled": self.compiled,
            "compiled_pictures": [record["compiled"] for record in self.records],
            "seeds": [record["seed"] for record in self.records],
            **{name: first[name] for name in SAME if name in first},
            **self.wanted,
            self.kind: self.inputs,
            "outputs": self.outputs,
            "interrupted": self.interrupted,
        }

    def save(self) -> None:
        """Write ``run.json`` beside the pictures."""
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n"
        write_whole(self.out / "run.json", text.encode())


def check(pipe: Images, run: PictureRun) -> None:
    """Raise ``ValueError`` for options and classes that ``pipe`` cannot take.

    Sampling options that were not given are set to the model's.
    """
    from specmm.image_ar.calls import class_ids

    if pipe.takes == "prompt" and run.kind == "classes":
        raise ValueError(f"{run.model} draws from prompts, give --prompt in place of --class")
    if pipe.takes == "classes" and run.kind == "prompt":
        raise ValueError(f"{run.model} draws classes, give --class NAME or ID in place of --prompt")
    if run.kind == "prompt" and getattr(pipe, "text_encoder", pipe) is None:
        raise ValueError(f"{run.model} reads prompts by a T5, give --text-encoder FOLDER")
    if pipe.steps_option and "num_inference_steps" in run.wanted:
        run.sampling[pipe.steps_option] = run.wanted.pop("num_inference_steps")
    for name in run.wanted.keys() - set(pipe.call_options):
        option = {"num_inference_steps": "steps"}.get(name, name.replace("_", "-"))
        raise ValueError(f"--{option} does not serve models such as {run.model}; leave it out")
    if run.batch_invariant and not pipe.batch_invariant:
        raise ValueError(f"--batch-invariant does not hold for {run.model}; leave it out")
    exact = pipe.transformer.dtype == torch.float32 and pipe.device.type == "cpu"
    if run.batch_invariant and (run.compiled or not exact):
        raise ValueError(
            "--batch-invariant needs float32 on a CPU, uncompiled; "
            "give --dtype float32 and leave --compiled out"
        )
    check_sampling(pipe, run.model, run.sampling)
    run.sampling = pipe.options_of(run.sampling)
    if run.kind == "classes":
        class_ids(run.inputs, pipe.settings.classes, pipe.transformer.config.num_classes)


def check_sampling(pipe: Images, model: str, sampling: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for sampling options that ``pipe``, of ``model``, cannot take."""
    for name in sampling.keys() - set(pipe.sampling_options):
        raise unknown(f"option of {model}", name, pipe.sampling_options, OPTION)
    pipe.target(**sampling)


def draw(pipe: Images, run: PictureRun, tell: Callable[[str], None], callback: Any = None) -> None:
    """Draw and save all pictures of ``run``; Ctrl-C leaves what is finished.

    ``tell`` is called with notes for people. Raises ``ValueError`` when the disk is full.
    """
    run.place = place_of(pipe.transformer)
    count = len(run.inputs)
    if old := sum(1 for _ in run.out.glob("*.png")):
        tell(f"note: {run.out} already holds {old} pictures; those of other names stay there")
    if run.compiled is True:
        tell("note: rounds, or scales, are compiled first, which takes half a minute to two")
    start = time.perf_counter()
    target = pipe.measured(run.sampling, **run.wanted)
    with planning_bar():
        method, run.reason, _ = pipe.settle(run.method, run.rows, target, count)
    run.planning_seconds = time.perf_counter() - start
    run.ran = methods.label(method)
    if method.one_generator and run.rows < count:
        raise ValueError(
            f"{run.ran} draws one batch, give --batch-size {count}, got {run.batch_size}"
        )
    try:
        with tqdm(total=count, unit="picture", disable=None, leave=False) as bar:
            for first in range(0, count, run.batch_size):
                rows = range(first, min(first + run.batch_size, count))
                with moving(bar):
                    _draw_batch(pipe, run, rows, method, callback)
                bar.update(len(run.outputs) - bar.n)
    except KeyboardInterrupt:
        run.interrupted = True
    except OSError as error:
        raise ValueError(
            f"writing failed ({error.strerror or error}), make room or choose another --out; "
            f"{len(run.outputs)} of {count} pictures are in {run.out}"
        ) from error
    finally:
        if run.compiled:
            pipe.works.coming = 0  # other calls of the pipeline have none to come


@contextmanager
def planning_bar() -> Iterator[None]:
    """Show a bar of a plan's measurements during the block."""
    with tqdm(desc="planning", unit="run", disable=None, leave=False) as bar:

        def moved(event: object) -> None:
            if isinstance(event, Measured):
                bar.total = event.total
                bar.update(event.done - bar.n)  # backwards where another plan begins

        with watched(moved):
            yield


@contextmanager
def moving(bar: Any, share: float = 1.0) -> Iterator[None]:
    """Move ``bar`` during the block by the pictures of a call, each by ``share``."""
    before = bar.n

    def moved(event: object) -> None:
        if isinstance(event, PicturesSoFar):
            bar.n = round(before + share * event.pictures, 1)
            bar.refresh()

    if bar.disable:  # for nobody it would cost time
        yield
        return
    with watched(moved):
        yield
    bar.n = before


def _draw_batch(pipe: Images, run: PictureRun, rows: range, method: Any, callback: object) -> None:
    start = time.perf_counter()
    inputs = [run.inputs[i] for i in rows]
    options: dict[str, Any] = {run.kind: inputs, **run.sampling, **run.wanted}
    if run.compiled and len(rows) == run.rows:  # programs for a smaller last batch would not pay
        options["compiled"] = run.compiled
        left = len(run.inputs) - rows.stop
        pipe.works.coming = left - left % run.rows  # a smaller last batch is not compiled
    with batch_invariant() if run.batch_invariant else nullcontext():
        out = pipe(
            seed=run.seed if method.one_generator else [run.seed + i for i in rows],
            method=method,
            batch_size=len(rows),
            callback_on_step_end=callback,
            **options,
        )
    run.seconds += time.perf_counter() - start
    run.stats = total([out.stats, run.stats] if run.outputs else [out.stats])
    run.certificates.append((out.certificate, out.tokens.numel()))
    for i, text, image, record in zip(rows, inputs, out.images, out.records, strict=True):
        file = run.out / f"{i:04d}-{slug(text)}.png"
        write_pictures([image], [record], [file])
        run.outputs.append(str(file))
        run.records.append(record)
