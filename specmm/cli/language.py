"""``specmm ask`` and ``specmm complete``: questions about pictures answered, texts continued."""

# typer reads the annotations of these functions when this module is imported: they are evaluated

import json
import secrets
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specmm.cli.options import (
    Compile,
    Compiled,
    Device,
    Drafter,
    Dtype,
    Json,
    Model,
    Options,
    Seed,
    Threads,
    compiled_as,
    with_fields,
)
from specmm.cli.output import emit, say, stdout_reserved
from specmm.cli.starting import started, starting
from specmm.loading.files import writable

if TYPE_CHECKING:
    import torch

    from specmm.hf.prompts.stop_strings import StopStrings


@dataclass
class Settings:
    """The options of both commands, and their translation to a call."""

    option: Options = ()  # type: ignore[assignment]  # a list: typer's
    drafter: Drafter = None
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0
    repetition_penalty: Annotated[
        float | None, typer.Option(help="1 is off; without it the checkpoint's own.")
    ] = None
    stop: Annotated[
        list[str],
        typer.Option(help="Text that ends it; may be repeated. Without any the checkpoint's own."),
    ] = ()  # type: ignore[assignment]
    json_schema: Annotated[
        str | None, typer.Option("--json-schema", help="Spell JSON by this schema, a file or text.")
    ] = None
    regex: Annotated[str | None, typer.Option(help="Spell what matches this as a whole.")] = None
    grammar: Annotated[
        str | None, typer.Option("--grammar", help="Spell its rule root: EBNF, a file or text.")
    ] = None
    messages: Annotated[
        Path | None,
        typer.Option(
            help="A chat in place of what is asked: a JSON file of messages as OpenAI and "
            "transformers write them, or of a list of chats."
        ),
    ] = None
    compile_all: Compile = False
    compiled: Compiled = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    seed: Seed = None
    as_json: Json = False

    def call(self, method: Any, **own: Any) -> dict[str, Any]:
        """The options of a call by ``method``, with the command's ``own``; notes idle options."""
        from specmm.hf.prompts.options import idle_options

        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        if self.repetition_penalty is not None:
            sampling["repetition_penalty"] = self.repetition_penalty
        self.sampling = sampling
        for name in idle_options(sampling | {"seed": self.seed}, method)[:1]:
            option = f"--{name.replace('_', '-')}"
            say(f"{option} changes nothing at temperature 0; give --temperature 1 to sample")
        self.drawn = secrets.randbelow(2**31) if self.seed is None else self.seed
        options = {**sampling, **own, **self._spelled()}
        options |= {"stop": list(self.stop)} if self.stop else {}
        options["seed"] = self.drawn
        if self.messages is not None:
            options["messages"] = _chats(self.messages)
        return options | {"compiled": compiled_as(self.compiled, self.compile_all)}

    def _spelled(self) -> dict[str, Any]:
        """The grammar of a call, if given; raises ``ValueError`` for two grammars."""
        spellings = {name: getattr(self, name) for name in ("json_schema", "regex", "grammar")}
        texts = {name: text for name, text in spellings.items() if text is not None}
        if len(texts) > 1:
            names = ", ".join("--" + name.replace("_", "-") for name in texts)
            raise ValueError(f"give only one of {names}: an answer follows one grammar")
        if not texts:
            return {}
        from specmm import structured

        ((name, text),) = texts.items()
        return {"grammar": getattr(structured, name)(text)}

    def run(
        self, kind: Any, model: str, chosen: Any, options: dict[str, Any], call: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The result of ``call`` with the pipeline of ``model``, and a record of it for JSON."""
        from specmm.hf.prompts.options import IdleOption
        from specmm.runs.run import Place, answered

        def timed(pipe: Any) -> Any:
            started()
            return call(pipe)

        with stdout_reserved(), warnings.catch_warnings():
            warnings.simplefilter("ignore", IdleOption)  # ``Settings.call`` has warned
            place = Place.named(self.device, self.dtype)
            out, record = answered(kind, model, place, chosen, self.drafter, timed)
        record |= {} if self.messages is None else {"messages": str(self.messages)}
        penalty = out.certificate.settings.get("repetition_penalty", 1.0)  # or the checkpoint's own
        record |= {
            "seed": self.drawn,
            "sampling": {"repetition_penalty": penalty} | self.sampling,
            "compiled": options["compiled"],
            "ran_compiled": out.compiled,
        }
        return out, record


with_settings = with_fields(Settings, "settings")


@with_settings
def ask(
    model: Model,
    question: Annotated[str | None, typer.Option("--question", "-q", help="What to ask.")] = None,
    images: Annotated[
        list[str],
        typer.Argument(
            help="Pictures, files or addresses, all shown with the question; none for a text "
            "question."
        ),
    ] = [],  # noqa: B006  typer copies it
    video: Annotated[
        list[Path],
        typer.Option(
            "--video",
            help="A film, GIF or folder of frames, shown with the question by models that take "
            "videos; may be repeated.",
        ),
    ] = [],  # noqa: B006
    method: Annotated[
        str | None,
        typer.Option(
            help="ar, text-draft, vlm-draft, msd, eagle3, block, mtp, self, suffix, recycle, "
            "prompt-lookup, verdict, draft or auto; without it ar, or the drafter's."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 64,
    draw: Annotated[
        Path | None,
        typer.Option(help="Folder for the pictures in the answer of a model that draws some."),
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Answer a question about pictures or videos; the answer is written to stderr as it comes."""
    starting()
    from specmm.methods import VQA, label
    from specmm.methods.making import parse_method
    from specmm.runs.run import default_method

    usual = default_method("questions", settings.drafter)
    chosen = parse_method(VQA, method or usual, settings.option)
    if question is None and settings.messages is None:
        raise ValueError("give --question or --messages")
    options = settings.call(chosen, max_new_tokens=max_new_tokens)
    if draw is not None:
        options["draw"] = bool(writable(draw, "--draw"))

    def call(pipe: Any) -> Any:
        single = not draw and not _several(options)
        echo = Echo(pipe.stops(_reading(pipe, options))) if single else None
        pictures = None if question is None and not images else list(images)
        return pipe(pictures, question, echo, list(video) or None, **options)

    out, record = settings.run("questions", model, chosen, options, call)
    record |= {"question": question, "images": list(images)}
    record |= {"videos": [str(file) for file in video]} if video else {}
    record["outputs"] = out.answers
    if out.ruling is not None:
        record["ruling"] = out.ruling.as_dict()
    if draw is not None:
        record["pictures"] = _save_pictures(out.pictures[0], draw, settings.drawn)
    if settings.as_json:
        return emit(record)
    _show(record, out, _method_text(out, label(chosen)))
    if out.ruling is not None:
        _show_ruling(out.ruling)


@with_settings
def complete(
    model: Model,
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", "-p", help="Text to continue; may be repeated for a batch."),
    ] = [],  # noqa: B006
    method: Annotated[
        str | None,
        typer.Option(
            help="ar, diffuspec, specdiff, deer, block, eagle3, mtp, self, text-draft, "
            "suffix, recycle, prompt-lookup, draft or auto; without it ar, or the drafter's."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a text.")] = 128,
    chat: Annotated[
        bool, typer.Option(help="Put the prompt into the model's chat template.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw acceptance, lengths and times into this .png, .pdf or .svg."),
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Continue a text; a single one is written to stderr as it comes."""
    starting()
    from specmm.methods import TEXT, label
    from specmm.methods.making import parse_method
    from specmm.runs.run import default_method

    chosen = parse_method(TEXT, method or default_method("text", settings.drafter), settings.option)
    if plot is not None:
        from specmm.runs.figures import check_plot, plot_drafting

        check_plot(plot)
    if not prompt and settings.messages is None:
        raise ValueError("give --prompt or --messages")
    options = settings.call(chosen, max_new_tokens=max_new_tokens, chat=chat)

    def call(pipe: Any) -> Any:
        single = len(prompt) < 2 and not _several(options)
        echo = Echo(pipe.stops(_reading(pipe, options))) if single else None
        return pipe(prompt or None, echo, **options)

    out, record = settings.run("text", model, chosen, options, call)
    record |= {"prompts": prompt, "outputs": out.texts, **_drafting(out)}
    if settings.as_json:
        emit(record)
    else:
        _show(record, out, _method_text(out, label(chosen)))
        _show_drafting(out)
    if plot is not None:  # last: if it fails, the text has been printed
        plot_drafting(out.stats, out.trace, plot)


def _reading(pipe: Any, options: dict[str, Any]) -> Any:
    """A call's options that affect how its ids are decoded to text."""
    names = ("stop", "chat", "messages")
    return pipe.options({name: options[name] for name in names if name in options})


def _chats(file: Path) -> Any:
    """The messages in a JSON ``file``."""
    try:
        chats = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} must hold JSON, got: {error}") from error
    return chats["messages"] if isinstance(chats, dict) and "messages" in chats else chats


def _several(options: dict[str, Any]) -> bool:
    """Whether there are several chats."""
    chats = options.get("messages") or [{}]
    return isinstance(chats[0], list) and len(chats) > 1


def _save_pictures(pictures: Sequence[Any], folder: Path, seed: int) -> list[str]:
    """Save an answer's ``pictures`` in ``folder``; returns the files in order."""
    files = [folder / f"seed-{seed}-{i + 1}.png" for i in range(len(pictures))]
    for file, picture in zip(files, pictures, strict=True):
        picture.save(file)
    return [str(file) for file in files]


def _method_text(out: Any, name: str) -> str:
    """The method that ran; for method auto also the reason for its choice."""
    return str(out.method) if str(out.method).startswith("auto:") else name


def _show(record: dict[str, Any], out: Any, method: str) -> None:
    """Print texts, paths of pictures, and the run's statistics."""
    for text in (*record["outputs"], *record.get("pictures", ())):
        typer.echo(text)
    compiled = ", compiled" if record.get("ran_compiled") else ""
    tokens = f"{record['tokens']} tokens by {method}{compiled} in {record['seconds']:.2f} s"
    say(f"{tokens}, tau {out.stats.tau:.2f}, seed {record['seed']}")
    say(f"certificate  {out.certificate}")


def _show_ruling(ruling: Any) -> None:
    """Print a line for every expert of Speculative Verdict."""
    for i, (answer, score) in enumerate(zip(ruling.answers, ruling.scores.tolist(), strict=True)):
        read = f"read as number {ruling.heard.index(i) + 1}" if i in ruling.heard else "not read"
        say(f"expert {i + 1}     {answer!r}, consensus {score:.2f} (lower is better), {read}")


def _drafting(out: Any) -> dict[str, Any]:
    """Acceptance by position, lengths by round, seconds by part."""
    stats = out.stats
    return {
        "accepted_by_position": stats.accepted_by_position,
        "drafted_by_round": stats.depths,
        "controller": out.trace,
        "draft_seconds": stats.draft_seconds,
        "search_seconds": stats.search_seconds,
        "verify_seconds": stats.verify_seconds,
    }


def _show_drafting(out: Any) -> None:
    """Print to stderr how drafts were accepted, and what drafting took."""
    stats = out.stats
    if stats.depths:
        say("accepted by position  " + " ".join(f"{s:.2f}" for s in stats.accepted_by_position))
        searched = f" ({stats.search_seconds:.2f} s of it search)" if stats.search_seconds else ""
        seconds = (
            f"draft {stats.draft_seconds:.2f} s{searched}, verify {stats.verify_seconds:.2f} s"
        )
        lengths = f"{min(stats.depths)} to {max(stats.depths)} drafts a round"
        say(f"{seconds}, {lengths}, {len(stats.depths)} rounds")
    for row, trace in enumerate(out.trace):
        say(f"drafted/accepted of text {row + 1}  " + " ".join(f"{d}/{a}" for d, a in trace))


class Echo:
    """A streamer that writes a text to stderr as it grows, up to one of the ``stops``.

    It writes to a terminal only.
    """

    def __init__(self, stops: "StopStrings") -> None:
        self.stops = stops
        self.ids: list[int] = []
        self.written = ""

    def put(self, value: "torch.Tensor") -> None:
        """Write the text that these ids add."""
        self.ids += value.flatten().tolist()
        self._write(self.stops.sure(self.ids))

    def end(self) -> None:
        """Write text held back as a possible beginning of a stop string, and end the line."""
        self._write(self.stops.cut(self.ids))
        if self.ids and sys.stderr.isatty():  # a call that was refused has no line
            say("")

    def _write(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(text[len(self.written) :])
            sys.stderr.flush()
        self.written = text
