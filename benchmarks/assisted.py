"""The same drafter in this library and in transformers' own assisted generation, in one run.

    python -m benchmarks.assisted --kinds dflash,mtp

Contenders take turns on the same prompts with the same seeds. At batch 1 ours is compared with the
fastest of transformers' settings, which draft up to a fixed number of tokens or until the drafter
is unsure; transformers refuses batches, so that ragged ones of 4 and 8 are compared with plain
decoding. Greedy texts are compared with those of transformers' plain ``generate``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import MtpModel

from benchmarks.agreeing import with_assistant, with_mtp
from benchmarks.arithmetic import quartiles, speedup
from benchmarks.common import (
    RESULTS,
    Budget,
    Dtype,
    Out,
    Row,
    Threads,
    label,
    merged,
    write_results,
)
from benchmarks.dflash_assistant import alone, as_assistant
from benchmarks.language_speed import (
    Answer,
    Answered,
    Asked,
    Minutes,
    Repeats,
    Runner,
    begin,
    begun,
    held_out,
    ours,
    places,
    race,
    row,
    theirs,
)
from specmm import methods
from specmm.hf.loading.pretrained import find, load_tokenizer
from specmm.loading.hardware import named_dtype
from specmm.text.pipeline import TextPipeline

NAME = "assisted"  # of the results
KEYS = ("drafter", "model", "temperature", "batch")  # of a part of them
BATCHES = (4, 8)
ASSISTED = "transformers assisted"  # how the names of theirs begin
TOKENS = (1, 3)  # drafts of a round that transformers is tried with, beside its defaults

Ask = Callable[[int, int], Asked]
"""A batch of so many prompts by its seed."""


@dataclass(frozen=True)
class Assisted:
    """One setting of transformers' assisted generation.

    ``options`` are generate's. ``drafting`` are set in the generation config of ``assistant``
    (None: the target itself), where transformers reads how many tokens to draft.
    """

    options: Mapping[str, Any]
    drafting: Mapping[str, Any] = field(default_factory=dict)
    assistant: PreTrainedModel | None = None

    @property
    def name(self) -> str:
        """What tells it apart."""
        return (
            f"{ASSISTED} ({', '.join(f'{k}={v}' for k, v in self.drafting.items()) or 'default'})"
        )


@dataclass(frozen=True)
class Contest:
    """One drafter of one model: the methods of ours that use it, and transformers' settings.

    ``batched`` are the methods for batches; ``auto`` falls back to plain decoding by measurement.
    """

    drafter: str
    pipe: TextPipeline
    ask: Ask
    ours: Sequence[methods.TextMethod]
    theirs: Sequence[Assisted]
    batched: Sequence[methods.TextMethod] = (methods.Auto(),)


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: ``contest(model, dtype)`` for each of ``models`` by default."""

    contest: Callable[[str, torch.dtype | None], Contest]
    models: tuple[str, ...]


def counted(options: Mapping[str, Any], assistant: PreTrainedModel) -> list[Assisted]:
    """Transformers' defaults with ``options``, and each number of ``TOKENS``."""
    found = [Assisted(options, assistant=assistant)]
    for count in TOKENS:
        drafting = {
            "num_assistant_tokens": count,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        found.append(Assisted(options, drafting, assistant))
    return found


# ---- kinds of drafters: an entry each


def dflash(model: str, dtype: torch.dtype) -> Contest:
    """The block drafter beside the model, without what transformers' class of them lacks.

    Best a folder of pocket/coder with a plain one: ``specmm train dflash FOLDER``.
    """
    whole = TextPipeline.from_pretrained(model, torch_dtype=dtype, device="cpu")
    drafter = alone(whole.drafter("block"))
    pipe = TextPipeline(whole.model, whole.tokenizer, "block", drafter, name=model)
    options = {"assistant_model": as_assistant(drafter), "speculation_type": "dflash"}
    lengths = [n for n in (1, 2, 3, 4, 8) if n <= drafter.config.longest]
    return Contest(
        f"block of {drafter.config.block}",
        pipe,
        code(pipe),
        [
            *(methods.Block(length=n) for n in lengths),
            *(methods.Block(tree=n) for n in (4, 6, 12)),
            methods.Auto(),
        ],
        [Assisted(options)],
        [methods.Auto(), *(methods.Block(length=n) for n in lengths[:2])],
    )


def mtp(model: str, dtype: torch.dtype) -> Contest:
    """MTP layers of a random model that agree with it; theirs are not charged for loading them."""
    count = int(model.rpartition(" ")[2])
    target, layers = with_mtp(count, dtype)
    MtpModel.from_pretrained = classmethod(lambda *_, **__: layers.model)
    pipe = TextPipeline(target, coder_tokenizer(), methods.MTP(), layers, name=model)
    chains = [methods.MTP(tree=f"chain({n})") for n in sorted({count, 2, 4})]
    small = methods.MTP(total=6, depth=2, top_k=2)
    return Contest(
        "MTP",
        pipe,
        code(pipe),
        [*chains, methods.MTP(), small, methods.MTP(tree=(2, 2)), methods.MTP(tree=(2, 2, 1))],
        [Assisted({"use_mtp": True})],
        [methods.Auto(), *(methods.MTP(tree=f"chain({n})") for n in (1, 2, 3)), small],
    )


def assistant(model: str, dtype: torch.dtype) -> Contest:
    """An assistant of a random Gemma 4 that agrees with it."""
    target, drafter = with_assistant(dtype)
    pipe = TextPipeline(target, coder_tokenizer(), methods.Assistant(), drafter, name=model)
    chains = [methods.Assistant(tree=f"chain({count})") for count in (1, 2, 3)]
    return Contest(
        "assistant",
        pipe,
        code(pipe),
        [*chains, methods.Assistant(), methods.Assistant(tree=(2, 2, 1))],
        counted({"assistant_model": drafter}, drafter),
        [methods.Auto(), chains[1], methods.Assistant(total=6, depth=2, top_k=2)],
    )


KINDS: Mapping[str, Kind] = {
    "dflash": Kind(dflash, ("pocket/coder",)),
    "mtp": Kind(mtp, ("random layers 1", "random layers 3")),
    "assistant": Kind(assistant, ("random Gemma 4",)),  # transformers 5.24 builds it
}


# ---- models and prompts


def coder_tokenizer() -> PreTrainedTokenizerBase:
    """That of pocket/coder, which the random models share."""
    found: PreTrainedTokenizerBase = load_tokenizer(find("pocket/coder"))
    return found


def code(pipe: TextPipeline) -> Ask:
    """Beginnings of held-out code, which pocket/coder was trained on the like of."""
    texts = held_out()
    return lambda batch, seed: places(pipe, texts, batch, seed)


# ---- contenders


def assisted(pipe: TextPipeline, temperature: float, setting: Assisted) -> Answer:
    """Transformers' generate with a drafter."""
    generate = theirs(pipe, temperature, **setting.options)

    def answer(asked: Asked) -> Answered:
        with drafting(setting.assistant or pipe.model, setting.drafting):
            found: Answered = generate(asked)
            return found

    return answer


@contextmanager
def drafting(model: PreTrainedModel, settings: Mapping[str, Any]) -> Iterator[None]:
    """While ``model`` drafts with ``settings``."""
    config = model.generation_config
    assert config is not None
    before = {name: getattr(config, name) for name in settings}
    config.update(**settings)
    try:
        yield
    finally:
        config.update(**before)


def contenders(contest: Contest, temperature: float, batch: int) -> list[Runner]:
    """Plain decoding by both first, then the drafter by both; in batches by ours alone."""
    pipe = contest.pipe
    chosen = contest.ours if batch == 1 else contest.batched
    found = [
        Runner("transformers generate", theirs(pipe, temperature)),
        Runner("ar", ours(pipe, methods.AR(), temperature)),
        *(Runner(label(method), ours(pipe, method, temperature)) for method in chosen),  # type: ignore[arg-type]
    ]
    if batch == 1:
        settings = contest.theirs
        found += [Runner(one.name, assisted(pipe, temperature, one)) for one in settings]
    return found


def measure(
    contest: Contest, model: str, kind: str, temperature: float, batch: int, repeats: int
) -> list[Row]:
    """Every contender over ``repeats`` batches."""
    runners = contenders(contest, temperature, batch)
    part = (f"{kind} of {model}", temperature, batch)
    race(runners, lambda seed: contest.ask(batch, seed), repeats, part)
    facts = {"drafter": kind, "model": model, "with": contest.drafter}
    return [
        facts | row(r, runners, kind, temperature, batch) | compared(r, runners) for r in runners
    ]


def compared(runner: Runner, runners: Sequence[Runner]) -> Row:
    """How much faster than the fastest of transformers' settings, and than our plain decoding."""
    found: Row = {}
    theirs = [r for r in runners if r.name.startswith(ASSISTED)]
    if theirs:
        best = min(theirs, key=lambda r: statistics.median(r.seconds))
        low, high = quartiles(best.seconds, runner.seconds)
        ratio = speedup(best.seconds, runner.seconds)
        found |= {"over_theirs": ratio, "over_theirs_low": low, "over_theirs_high": high}
    plain = runners[1].seconds
    low, high = quartiles(plain, runner.seconds)
    ratio = speedup(plain, runner.seconds)
    return found | {"over_plain": ratio, "over_plain_low": low, "over_plain_high": high}


def main(
    kinds: Annotated[
        str, typer.Option(help="Kinds of drafters, with commas between; all by default.")
    ] = ",".join(KINDS),
    models: Annotated[
        str, typer.Option(help="Their models, with commas between; all of a kind by default.")
    ] = "",
    repeats: Repeats = 12,
    minutes: Minutes = 30.0,
    dtype: Dtype = "float32",
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Write ``assisted.json`` and ``.csv``; rows of other kinds and models stay."""
    facts = begin(threads, dtype=dtype)
    budget = Budget(minutes)
    for kind in kinds.split(","):
        for model in models.split(",") if models else KINDS[kind].models:
            contest = KINDS[kind].contest(model, named_dtype(dtype))
            parts = [(kind, 0.0, 1), (kind, 1.0, 1), *((kind, 0.0, n) for n in BATCHES)]
            for part in begun(parts, repeats, budget):
                rows = merged(out, NAME, measure(contest, model, *part), KEYS)
                write_results(out, NAME, rows, facts)


if __name__ == "__main__":
    typer.run(main)
