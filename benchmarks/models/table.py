"""One row of the table: a model type built, asked and compared, in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
import transformers
from transformers.models.auto import modeling_auto

from benchmarks.models import check
from benchmarks.models.check import CRASH, EQUAL, REFUSED, TIED, WRONG, Outcome
from benchmarks.models.prompts import prompts_for, text_prompts
from benchmarks.models.tiny import Gains, NotBuildable, build, tiny_config

SERVED = "served"
NOT_BUILDABLE = "not buildable here"
GAINS = tuple(
    Gains(*sizes)
    for sizes in (
        (1.5, 1.5),
        (0.3, 1.5),
        (0.05, 2.0),
        (1.0, 4.0),
        (0.1, 8.0),
        (1.0, 12.0),
        (8.0, 1.0),
    )
)
SECONDS = 120  # that a type may take
IMAGE_TEXT = "image-text-to-text"
CAUSAL = "causal"
MAPPINGS = {
    IMAGE_TEXT: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
OTHERS = (  # what a type is made for that is not only a decoder
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)
COLUMNS = ("text", "picture", "pictures", "batch")  # kinds of prompts


@dataclass
class Line:
    """A type's row. ``decoder_only`` is false of encoder-decoders, masked language models and
    decoders of them. The kinds of prompts hold what came of them; empty: the type takes none.
    """

    mapping: str
    type: str
    architecture: str
    decoder_only: bool = True
    status: str = NOT_BUILDABLE
    reason: str = ""
    text: str = ""
    picture: str = ""
    pictures: str = ""
    batch: str = ""
    equal: int = 0  # settings
    settings: int = 0
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """Mapping and type."""
        return self.mapping, self.type


def types() -> list[Line]:
    """Every type of both mappings, not asked yet."""
    return [
        Line(mapping, name, architecture, decoder_only=not any(name in other for other in OTHERS))
        for mapping, names in MAPPINGS.items()
        for name, architecture in dict(names).items()
    ]


def ask(line: Line) -> Line:
    """``line`` with what came of its type; never raises."""
    start = time.perf_counter()
    try:
        _ask(line)
    except NotBuildable as error:
        line.reason = str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        line.reason = f"{type(error).__name__}: {_first_line(error)} ({place})"
    line.seconds = round(time.perf_counter() - start, 1)
    return line


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else ""


def _ask(line: Line) -> None:
    for seed, gains in enumerate(GAINS):
        config = tiny_config(line.type)
        model = build(line.architecture, config, seed, gains)
        line.decoder_only &= not config.is_encoder_decoder
        prompts = prompts_for(model) if line.mapping == IMAGE_TEXT else text_prompts()
        try:
            found = list(check.outcomes(model, prompts))
        except check.Dull as error:
            line.reason = f"answers of a random model do not vary: {error}"
            continue
        enter(line, found)
        if line.status != TIED:
            return


def enter(line: Line, found: list[Outcome]) -> None:
    """The outcomes, the worst of which is the type's."""
    line.outcomes = found
    line.settings = len(found)
    line.equal = sum(outcome.found == EQUAL for outcome in found)
    for name in COLUMNS:
        setattr(line, name, _worst([o for o in found if o.prompt == name]))
    worst = _worst(found)
    line.status = SERVED if worst == EQUAL else worst
    told = [o for o in found if o.found == worst and o.reason]
    line.reason = f"{told[0].prompt}, {told[0].method}: {told[0].reason}" if told else ""


def _worst(found: list[Outcome]) -> str:
    words = {outcome.found for outcome in found}
    return next((word for word in (WRONG, CRASH, REFUSED, TIED, EQUAL) if word in words), "")


def ask_apart(line: Line, seconds: float = SECONDS) -> Line:
    """As :func:`ask`, in a process of its own that may take so many ``seconds``."""
    context = multiprocessing.get_context("forkserver")  # of a process that ran nothing
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(line, theirs))
    child.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            found: Line = ours.recv()
            return found
        return dataclasses.replace(line, status=CRASH, reason=f"took more than {seconds:g} s")
    except EOFError:
        return dataclasses.replace(line, status=CRASH, reason="its process ended")
    finally:
        child.kill()
        child.join()


def _child(line: Line, out: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
        found = ask(line)
    out.send(found)
