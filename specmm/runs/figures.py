"""Pages and plots about runs: methods compared picture by picture, and how drafting went."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from specmm.extras import install
from specmm.files import slug, writable, write_whole
from specmm.methods import IMAGE_TOKENS
from specmm.runs.race import race, summaries
from specmm.runs.run import Place, open_model, parse_methods, save_picture
from specmm.stats import Stats
from specmm.zoo import card

# ---- methods compared on a few classes

METHODS = "ar,speculative,lantern++"
FAVOURITES = ("face-smiling", "heart", "food-fruit", "country-flag")
COLUMNS = ("method", "s/picture", "speed-up", "tau", "log-lik", "FID", "KID", "certificate")
BENCH = ("speed-up", "quartiles", "tau", "host", "ideal")
PICTURES = ("method", "s/picture", *BENCH, "log-lik", "certificate")
TEXTS = ("method", "ms/token", *BENCH, "certificate")
SCALE = 96  # pixels of a picture's side
GAP = 4  # pixels between pictures
LABEL = 170  # pixels of the column of labels
HEAD = 26  # pixels of the row of class names
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>specmm demo</title>
<style>
body{{font:16px system-ui,sans-serif;margin:2rem auto;max-width:{width}px;padding:0 1rem}}
table{{border-collapse:collapse}}
td,th{{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #ddd}}
img{{max-width:100%}}
p{{color:#555;white-space:pre-line}}
</style>
<h1>specmm demo: {model}</h1>
<table>{table}</table><p>{notes}</p>
<img alt="pictures by method" src="data:image/png;base64,{image}">
</html>
"""


def compare(
    model: str, place: Place, folder: Path, n: int, seed: int, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Draw ``n`` pictures of each of four classes by three methods and write the comparison.

    Returns a row for each method, and the paths of sheet, page and pictures in ``folder``.
    """
    pipe = open_model("images", model, place)
    if pipe.takes != "classes":
        raise ValueError(
            f"{model} draws from prompts and the demo draws classes; run specmm generate --prompt"
        )
    known = pipe.settings.classes or tuple(range(pipe.transformer.config.num_classes))
    names = [*(c for c in FAVOURITES if c in known), *(c for c in known if c not in FAVOURITES)][:4]
    rounds = [[name] for name in names for _ in range(n)]
    contenders = parse_methods(IMAGE_TOKENS, METHODS)
    drawn = ", ".join(map(str, names))
    tell(f"drawing {len(rounds)} pictures ({drawn}) by {len(contenders)} methods, one at a time")
    lanes = race(pipe, contenders, rounds, seed)
    measured = card(model).get("metrics", {}).get("quality", [])
    rows = [
        {**row, "recorded": _recorded(measured, row["method"])}
        for row in summaries(pipe, lanes, rounds, 1)
    ]
    saved = []
    for lane in lanes:
        for i, (image, (name,)) in enumerate(zip(lane.images, rounds, strict=True)):
            file = folder / f"{slug(lane.method.name)}-{i:02d}-{slug(str(name))}.png"
            save_picture(image, file)
            saved.append(str(file))
    captioned = [(_captions(row), lane.images) for row, lane in zip(rows, lanes, strict=True)]
    sheet = _sheet(captioned, names, n)
    save_picture(sheet, folder / "side_by_side.png")
    page = _page(sheet, rows, model)
    write_whole(folder / "index.html", page.encode())
    return rows, [str(folder / "side_by_side.png"), str(folder / "index.html"), *saved]


def _recorded(measured: Iterable[dict[str, Any]], method: str) -> dict[str, Any]:
    """What a model's card says was measured of a ``method``, or {}.

    Rows of another residual than the method's own do not count.
    """
    for row in measured:
        name, _, options = row.get("method", "").partition("(")
        if name == method and "residual=" not in options:
            return row
    return {}


def table_of(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """The ``columns`` and a row of texts for each summary of a race."""
    return [list(columns), *([_cells(row)[column] for column in columns] for row in rows)]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """The texts of a summary by column, a dash for what is not known."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    tv = row["certificate"]["tv"]
    recorded = row.get("recorded", {})
    return {
        "method": row["label"],
        "s/picture": f"{row['seconds_per_picture']:.3f}",
        "ms/token": f"{1000 * row['seconds_per_token']:.2f}",
        "speed-up": f"{row['speedup']:.2f}x",
        "quartiles": "{:.2f}-{:.2f}".format(*row["quartiles"]),
        "tau": f"{row['tau']:.2f}",
        "host": f"{row['host_overhead']:.0%}",
        "ideal": f"{row['ideal']:.2f}x",
        "log-lik": number(row["quality"]["log_likelihood"], ".3f"),
        "FID": number(recorded.get("fid"), ".2f"),
        "KID": number(recorded.get("kid"), ".5f"),
        "certificate": row["certificate"]["kind"] + (f", tv {tv:.4f}" if tv else ""),
    }


def notes(rows: Sequence[dict[str, Any]]) -> str:
    """What the columns mean, and where FID and KID come from."""
    counts = sorted({r["recorded"]["samples"] for r in rows if "samples" in r["recorded"]})
    source = "not recorded for this model"
    if counts:
        source = f"recorded in the model card ({counts[0]:,} samples)"
    return (
        "s/picture: median wall clock at batch 1; tau: tokens a round; log-lik: the target's mean "
        f"log-probability of a token drawn;\nFID, KID: {source}; tv: total variation a token, "
        "measured on this run."
    )


def _captions(row: dict[str, Any]) -> list[str]:
    """Lines beside a method's pictures."""
    return [
        row["method"],
        f"{row['seconds_per_picture']:.2f} s a picture",
        f"{row['speedup']:.2f}x plain",
        f"tau {row['tau']:.2f}",
        row["certificate"]["kind"],
    ]


def _sheet(
    rows: Sequence[tuple[Sequence[str], Sequence[Image.Image]]],
    classes: Sequence[str | int],
    repeats: int,
) -> Image.Image:
    """Rows of captions and pictures, with ``repeats`` columns for each of ``classes``."""
    step = SCALE + GAP
    width = LABEL + len(classes) * repeats * step + (len(classes) - 1) * GAP * 2
    sheet = Image.new("RGB", (width, HEAD + len(rows) * (step + GAP)), "white")
    pen = ImageDraw.Draw(sheet)
    bold = ImageFont.load_default(17)
    small = ImageFont.load_default(13)
    for i, name in enumerate(classes):
        pen.text((_left(i * repeats, repeats), 4), str(name), fill="black", font=small)
    for r, ((first, *others), pictures) in enumerate(rows):
        top = HEAD + r * (step + GAP)
        pen.text((6, top), first, fill="black", font=bold)
        for i, line in enumerate(others, 1):
            pen.text((6, top + 8 + 17 * i), line, fill="#444", font=small)
        for i, picture in enumerate(pictures):
            scaled = picture.resize((SCALE, SCALE), Image.Resampling.LANCZOS)
            sheet.paste(scaled, (_left(i, repeats), top))
    return sheet


def _left(column: int, repeats: int) -> int:
    """Left edge of a picture's column; there is more space between classes."""
    return LABEL + column * (SCALE + GAP) + column // repeats * GAP * 2


def _page(sheet: Image.Image, rows: Sequence[dict[str, Any]], model: str) -> str:
    """A self-contained page with the table, the notes and the sheet."""
    packed = io.BytesIO()
    sheet.save(packed, format="PNG")
    head, *body = table_of(rows, COLUMNS)
    table = _table_row(head, "th") + "".join(_table_row(row, "td") for row in body)
    return PAGE.format(
        width=max(sheet.width, 700),
        model=html.escape(model),
        table=table,
        notes=html.escape(notes(rows)),
        image=base64.b64encode(packed.getvalue()).decode(),
    )


def _table_row(texts: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"


# ---- how drafting went

KINDS = (".png", ".pdf", ".svg")
FEW = 4  # rows that can be told apart in one picture
APART = 0.12  # tokens by which rows are moved apart, so that none hides another
Trace = Sequence[tuple[int, int]]  # (drafted, kept) by round


def check_plot(file: Path) -> None:
    """Raise ``ValueError`` unless ``plot_drafting`` can write ``file``; its folder is made."""
    if file.suffix not in KINDS or file.is_dir():
        given = "a folder" if file.is_dir() else file.name
        raise ValueError(f"plot must be a file that ends in .png, .pdf or .svg, got {given}")
    try:
        import matplotlib.figure  # noqa: F401  only whether it is there
    except ImportError:
        raise ValueError(
            f"a picture needs the package matplotlib, got none; run: {install('bench')}"
        ) from None
    writable(file.parent, "--plot")


def plot_drafting(stats: Stats, traces: Sequence[Trace], file: Path) -> None:
    """Draw acceptance by position, lengths by round and where time went into ``file``.

    ``traces`` are DiffuSpec's by row; rows are drawn apart where they are few.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), dpi=120, layout="constrained")  # no pyplot: no global state
    FigureCanvasAgg(figure)
    positions, rounds, times = figure.subplots(1, 3, width_ratios=(3, 5, 2))
    accepted = stats.accepted_by_position
    positions.bar(range(1, len(accepted) + 1), accepted)
    labels = dict(xlabel="draft", ylabel="share of rounds", ylim=(0, 1))
    positions.set(title="accepted by position", **labels)
    _plot_rounds(rounds, stats.depths, traces if len(traces) <= FEW else [])
    parts = {
        "draft": stats.draft_seconds - stats.search_seconds,
        "search": stats.search_seconds,
        "verify": stats.verify_seconds,
        "other": stats.seconds - stats.draft_seconds - stats.verify_seconds,
    }
    times.bar_label(times.bar(list(parts), list(parts.values())), fmt="%.2f", fontsize="small")
    times.set(title="where time went", ylabel="seconds")
    times.margins(y=0.12)
    figure.savefig(file)


def _plot_rounds(axes: Any, depths: Sequence[int], traces: Sequence[Trace]) -> None:
    """Drafted lengths as steps, what was accepted as dots in the same colour."""
    if len(traces) != 1:  # a single row is drawn by its own line below
        drafted = "drafted, longest row" if traces else "drafted"
        axes.step(range(1, len(depths) + 1), depths, where="mid", color="0.6", label=drafted)
    for row, trace in enumerate(traces):
        order = range(1, len(trace) + 1)
        text = "" if len(traces) == 1 else f", text {row + 1}"
        shift = APART * (row - (len(traces) - 1) / 2)
        drafts = [shift + count for count, _ in trace]
        kept = [shift + count for _, count in trace]
        axes.step(order, drafts, where="mid", color=f"C{row}", label=f"drafted{text}")
        axes.plot(order, kept, ".", color=f"C{row}", label=f"accepted{text}")
    axes.set(title="by round", xlabel="round", ylabel="tokens", ylim=(-0.4, None))
    if depths:
        axes.legend(fontsize="small")
