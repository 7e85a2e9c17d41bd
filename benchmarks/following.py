"""How well pocket/janus follows its prompts, by every method, and what it answers about pictures.

    specmm train janus-judge
    python -m benchmarks.following pocket/janus --methods ar,sjd

Prompts name combinations of a thing and a style that training did not see. A judge that knows
nothing of the model, trained on real pictures (``specmm train janus-judge``), says what kind of
thing each drawn picture shows, and in which style. Beside it stands how often the judge is right
about the real pictures of the same combinations, as they are and through the model's own tokenizer.

Shape letters: N pictures, R pixels a side.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from safetensors.torch import load_model
from torch import Tensor

from benchmarks.common import (
    EMOJI,
    RESULTS,
    Row,
    dtype_name,
    environment,
    generators,
    load_pipeline,
    write_results,
)
from benchmarks.vqa_accuracy import wilson
from recipes.captioned import Captioned, captioned
from recipes.janus import encoded
from recipes.training.janus_judge import WEIGHTS, Heads, all_features, right
from recipes.wording import QUESTIONS, asked_for, chat, spoken
from specmm.hf.pretrained import find
from specmm.image_ar.autoencoder import to_uint8
from specmm.vlm.pipeline import VQAPipeline

COLUMNS = 8  # of the sheet
BATCH = 16  # pictures or questions at a time


def prompts(pictures: Captioned, times: int) -> list[str]:
    """What asks for each of ``pictures``, ``times`` over."""
    asked = [asked_for(spoken(name), pictures.style(i)) for i, name in enumerate(pictures.names)]
    return asked * times


def shares(judge: Heads, images: Tensor, pictures: Captioned, times: int = 1) -> Row:
    """Shares of ``images`` [times · N, R, R, 3] uint8 that show what was asked, with 95% bounds."""
    wanted = (np.tile(rows, times) for rows in (pictures.kinds, pictures.styles))
    row: Row = {"pictures": len(images)}
    for name, found in right(judge, all_features(images), *wanted).items():
        row[name] = float(found.float().mean())
        row[f"{name}_low"], row[f"{name}_high"] = wilson(int(found.sum()), len(found))
    return row


@torch.no_grad()
def through_tokenizer(pipe: Any, images: np.ndarray) -> Tensor:
    """Real ``images`` [N, R, R, 3] uint8 as the model's tokenizer keeps them."""
    model = pipe.transformer
    codes = encoded(model.model.vqmodel, torch.from_numpy(images))
    made = [model.decode_image_tokens(row) for row in codes.split(BATCH)]
    return to_uint8(torch.cat(made).permute(0, 3, 1, 2))


def drawn(
    pipe: Any, judge: Heads, pictures: Captioned, names: list[str], times: int, options: Row
) -> Iterator[tuple[Row, Tensor]]:
    """A row of the table for every method, and the pictures [N, R, R, 3] uint8."""
    texts = prompts(pictures, times)
    for name in names:
        out = pipe(
            texts,
            method=name,
            generator=generators(range(len(texts))),
            batch_size=BATCH,
            output_type="uint8",
            **options,
        )
        images = torch.from_numpy(out.images)
        rate = out.stats.tokens / max(out.stats.rounds, 1)
        found: Row = {"what": name, **shares(judge, images, pictures, times)}
        yield found | {"tau": rate, "certificate": out.certificate.kind}, images


def answered(model: str, pictures: Captioned, seed: int = 0) -> Iterator[Row]:
    """How many questions about held-out real ``pictures`` are answered right, by what is asked."""
    pipe = VQAPipeline.from_pretrained(model, torch_dtype=torch.float32)
    random = Random(seed)
    asked = [chat(pictures, i, random) for i in range(len(pictures))]
    images = [Image.fromarray(image) for image in pictures.images]
    for about, forms in QUESTIONS.items():
        turns = [next(turn for turn in row if turn[0] in forms) for row in asked]
        said: list[str] = []
        for first in range(0, len(images), BATCH):
            part = slice(first, first + BATCH)
            questions = [question for question, _ in turns[part]]
            said += pipe(images[part], questions, max_new_tokens=12, temperature=0).answers
        count = sum(a.strip() == b for a, (_, b) in zip(said, turns, strict=True))
        low, high = wilson(count, len(said))
        yield {"what": f"answers: {about}", "pictures": len(said), "right": count / len(said)} | {
            "right_low": low,
            "right_high": high,
        }


def save_sheet(images: Tensor, file: Path) -> None:
    """Write the first 64 of ``images`` as one picture of 64 colours."""
    rows = images[: COLUMNS**2].unflatten(0, (-1, COLUMNS))
    whole = rows.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    sheet = Image.fromarray(whole.numpy()).quantize(64)
    sheet.save(file, optimize=True)


def main(
    model: Annotated[str, typer.Argument(help="A Janus: folder or pocket name.")] = "pocket/janus",
    methods: Annotated[str, typer.Option(help="To draw by, with commas between.")] = "ar,sjd",
    judge: Annotated[Path, typer.Option(help="Folder of the judge.")] = Path("runs/janus-judge"),
    times: Annotated[int, typer.Option(min=1, help="Pictures of every combination.")] = 1,
    seen: Annotated[int, typer.Option(min=0, help="Ask for so many seen combinations.")] = 0,
    cfg: Annotated[float | None, typer.Option(help="Guidance, the model's if not given.")] = None,
    temperature: Annotated[float | None, typer.Option(help="The model's if not given.")] = None,
    top_k: Annotated[int | None, typer.Option(help="The model's if not given.")] = None,
    sheet: Annotated[Path | None, typer.Option(help="Write 64 pictures here.")] = None,
    data: Annotated[Path, typer.Option(help="Folder of the emoji.")] = EMOJI,
    threads: Annotated[int, typer.Option(min=1, help="Of torch.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of the tables.")] = RESULTS,
) -> None:
    """Measure and write ``following_NAME.json`` and ``.csv``."""
    torch.set_num_threads(threads)
    pictures = captioned(data, "train" if seen else "test")
    if seen:
        pictures = pictures.some(Random(0).sample(range(len(pictures)), seen))
    judging = Heads()
    load_model(judging, str(judge / WEIGHTS))
    pipe = load_pipeline(model, torch.float32)
    options: Row = {"cfg": cfg, "temperature": temperature, "top_k": top_k}
    real = torch.from_numpy(pictures.images)
    rows = [
        {"what": "real pictures", **shares(judging, real, pictures)},
        {
            "what": "real pictures, tokenized",
            **shares(judging, through_tokenizer(pipe, pictures.images), pictures),
        },
    ]
    for row, images in drawn(pipe, judging, pictures, methods.split(","), times, options):
        rows.append(row)
        print(row, flush=True)
        if sheet is not None:
            save_sheet(images, sheet)
            sheet = None
    rows += answered(model, pictures)
    facts = environment(model=model, dtype=dtype_name(pipe), settings=pipe.settings.__dict__)
    chosen = {name: value for name, value in options.items() if value is not None}
    write_results(
        out, f"following_{find(model).name}", rows, facts | {"seen": seen, "options": chosen}
    )
    for row in rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    typer.run(main)
