"""``specmm demo``: the same pictures by plain decoding, exactly accelerated and relaxed, side by
side, offline.

With ``--app`` it opens the app in a browser instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specmm.cli.options import Device, Dtype, Json
from specmm.cli.output import emit, number, say, stdout_reserved, table, writable, write_text

if TYPE_CHECKING:
    from specmm.runs.models import Place

DEFAULT = "pocket/llamagen"
METHODS = ("ar", "speculative", "lantern++")
FAVOURITES = ("face-smiling", "heart", "food-fruit", "country-flag")
COLUMNS = ("method", "s/picture", "speed-up", "tau", "log-lik/token", "FID", "KID", "certificate")


def demo(
    out: Annotated[Path, typer.Option(help="Folder of what is made.")] = Path("out/demo"),
    model: Annotated[str, typer.Option(help="A folder or pocket model.")] = DEFAULT,
    n: Annotated[int, typer.Option("-n", min=1, help="Pictures of each of four classes.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same pictures.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    app: Annotated[
        bool, typer.Option("--app", help="Open the app in a browser instead of making a page.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Of the app: 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, help="Of the app; a free one if not given.")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Give the app a public address, by gradio.live.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Draw a few classes by three methods, one picture at a time, and compare them; or open the
    app.
    """
    from specmm.runs.models import Place

    if app:
        _open(model, host, port, share, Place.named(device, dtype))
        return
    folder = writable(out)
    with stdout_reserved():
        rows, paths = _make(model, folder, n, seed, Place.named(device, dtype))
    if as_json:
        emit({"model": model, "seed": seed, "methods": rows, "outputs": paths})
        return
    typer.echo(text(rows))
    typer.echo(notes(rows))
    typer.echo("\n".join(paths[:2]))


def _open(model: str, host: str, port: int | None, share: bool, place: Place) -> None:
    """Serve the app until Ctrl-C; raises ``ValueError`` without gradio and for a port that is
    taken.
    """
    from specmm.app.models import Models

    models = Models((model,) if model != DEFAULT else (), place)
    try:
        from specmm.app.page import build, serve
    except ModuleNotFoundError as error:
        raise ValueError(f"the app needs {error.name}, run: pip install 'specmm[app]'") from error
    say("loading the models and opening the app; Ctrl-C ends it")
    serve(build(models), host, port, share)


def _make(
    model: str, folder: Path, n: int, seed: int, place: Place
) -> tuple[list[dict[str, Any]], list[str]]:
    from specmm.cli.zoo import recorded
    from specmm.files import slug
    from specmm.methods import IMAGE_TOKENS
    from specmm.runs.comparison_page import page, side_by_side
    from specmm.runs.method_names import parse_method
    from specmm.runs.models import open_model
    from specmm.runs.pictures import save_picture
    from specmm.runs.race import likelihood, race, summary
    from specmm.zoo import card

    pipe, facts = open_model("images", model, place), card(model)
    names = _classes(pipe)
    rounds = [[name] for name in names for _ in range(n)]
    say(
        f"drawing {len(rounds)} pictures ({', '.join(map(str, names))}) by {len(METHODS)} methods, one at a time"
    )
    lanes = race(pipe, [parse_method(IMAGE_TOKENS, m) for m in METHODS], rounds, seed)
    rows, saved = [], []
    for lane in lanes:
        row = {
            **summary(lane, lanes[0], 1),
            "quality": {"log_likelihood": likelihood(pipe, lane, rounds)},
        }
        rows.append({**row, "recorded": recorded(facts, lane.method.name)})
        for i, (image, (name,)) in enumerate(zip(lane.images, rounds, strict=True)):
            saved.append(str(folder / f"{slug(lane.method.name)}-{i:02d}-{slug(str(name))}.png"))
            save_picture(image, Path(saved[-1]))
    sheet = side_by_side(
        [(captions(r), lane.images) for r, lane in zip(rows, lanes, strict=True)], names, n
    )
    save_picture(sheet, folder / "side_by_side.png")
    write_text(folder / "index.html", page(sheet, [COLUMNS, *map(cells, rows)], notes(rows), model))
    return rows, [str(folder / "side_by_side.png"), str(folder / "index.html"), *saved]


def _classes(pipe: Any) -> list[str | int]:
    known = pipe.settings.classes or tuple(range(pipe.transformer.config.num_classes))
    return [*(c for c in FAVOURITES if c in known), *(c for c in known if c not in FAVOURITES)][:4]


def text(rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    return table([COLUMNS, *(cells(r) for r in rows)])


def cells(row: dict[str, Any]) -> list[str]:
    """A method's row of the table."""
    certificate, measured = row["certificate"], row["recorded"]
    tv = f", tv {certificate['tv']:.4f}" if certificate["kind"] == "bounded" else ""
    return [
        row["method"],
        number(row["seconds_per_picture"]),
        f"{row['speedup']:.2f}x",
        number(row["tau"], ".2f"),
        number(row["quality"]["log_likelihood"]),
        number(measured.get("fid"), ".2f"),
        number(measured.get("kid"), ".5f"),
        certificate["kind"] + tv,
    ]


def captions(row: dict[str, Any]) -> list[str]:
    """Lines beside a method's pictures."""
    return [
        row["method"],
        f"{row['seconds_per_picture']:.2f} s a picture",
        f"{row['speedup']:.2f}x plain",
        f"tau {row['tau']:.2f}",
        row["certificate"]["kind"],
    ]


def notes(rows: list[dict[str, Any]]) -> str:
    """What the columns mean, and where FID and KID come from."""
    counts = sorted({r["recorded"]["samples"] for r in rows if "samples" in r["recorded"]})
    source = (
        f"recorded in the model card ({counts[0]:,} samples)"
        if counts
        else "not recorded for this model"
    )
    return (
        "s/picture: median wall clock at batch 1; tau: tokens a round; log-lik: the target's mean log-probability of "
        f"the tokens drawn;\nFID, KID: {source}; tv: total variation a token, measured on this run."
    )
