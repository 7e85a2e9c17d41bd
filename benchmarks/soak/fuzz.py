"""Broken inputs by the thousand: ``python -m benchmarks.soak.fuzz --inputs 120000``.

Pictures, job files and checkpoints are damaged at random (bits, cuts, copies, numbers) and read as
users' files are. Each must give a result or a named error (``ValueError``, ``OSError``), and no
pickle may ever run. ``--out`` writes what was found.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import random
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from PIL import Image
from safetensors.torch import save

from benchmarks.common import File, show
from specmm.jobs.items import read_items
from specmm.loading.checkpoints import read_checkpoint
from specmm.vlm.pictures import open_image

CANARY = "specmm-canary"


class Bomb:
    """A pickle that would make a folder if it ever ran."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.place),)


@dataclass
class Kind:
    """A kind of file: whole examples by suffix, and how it is read."""

    name: str
    seeds: list[tuple[str, bytes]]
    read: Callable[[Path], Any]


def kinds(folder: Path) -> list[Kind]:
    return [
        Kind("pictures", pictures(), open_image),
        Kind("job files", job_files(), read_items),
        Kind("checkpoints", checkpoints(folder / CANARY), read_checkpoint),
    ]


def pictures() -> list[tuple[str, bytes]]:
    found = []
    for mode, form in (
        ("RGB", "PNG"),
        ("P", "GIF"),
        ("RGB", "JPEG"),
        ("RGBA", "WEBP"),
        ("L", "TIFF"),
        ("RGB", "BMP"),
    ):
        packed = io.BytesIO()
        Image.effect_noise((9, 7), 60).convert(mode).save(packed, form)
        found.append((f".{form.lower()}", packed.getvalue()))
    deep = io.BytesIO()
    Image.effect_noise((9, 7), 60).convert("I").convert("I;16").save(deep, "PNG")
    return [*found, (".png", deep.getvalue())]


def job_files() -> list[tuple[str, bytes]]:
    rows = [
        {"id": "a/1", "class": "heart", "seed": 3},
        {"id": "b", "prompt": "a small häuschen", "method": "ar"},
        {"id": "c", "image": ["x.png", "y.png"], "question": "How many?"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = io.StringIO()
    writer = csv.DictWriter(table, ["id", "class", "seed"])
    writer.writeheader()
    writer.writerows({"id": i, "class": "time", "seed": i} for i in range(3))
    found = [(".jsonl", lines), (".csv", table.getvalue().encode()), (".txt", b"heart\ntime\n3\n")]
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        return found
    packed = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": ["a", "b"], "class": ["heart", "time"]}), packed)
    return [*found, (".parquet", packed.getvalue())]


def checkpoints(canary: Path) -> list[tuple[str, bytes]]:
    state = {"a.weight": torch.ones(2, 3), "b": torch.arange(4)}
    packed = io.BytesIO()
    nested = io.BytesIO()
    torch.save(state, packed)
    torch.save({"model": state, "bomb": Bomb(canary)}, nested)
    return [
        (".safetensors", save(state)),
        (".pt", packed.getvalue()),
        (".pt", nested.getvalue()),
        (".bin", pickle.dumps(Bomb(canary), 2)),
        (".pth", pickle.dumps({"model": Bomb(canary)}, 0)),
    ]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """``data`` with one to four random faults."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        size = rng.randint(1, 16)
        match rng.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 1:
                del found[at:]
            case 2:
                del found[at : at + size]
            case 3:
                found[at:at] = found[at : at + size]
            case 4:
                found[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2**16, 2**31, 2**32 - 1)))
            case _:
                found[at:at] = rng.choice(
                    (b"\0", b'"', b"{", b"}", b"\n", b",", b"NaN", b"1e999", b"\xff\xfe", b"[" * 40)
                )
    return bytes(found)


def fuzz(inputs: int, seed: int = 0) -> dict[str, Any]:
    """Read ``inputs`` damaged files; returns the outcomes; raises for an error without a name."""
    rng = random.Random(seed)
    outcomes = Counter[str]()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        every = kinds(folder)
        for number in range(inputs):
            kind = every[number % len(every)]
            suffix, data = rng.choice(kind.seeds)
            outcome = attempt(kind, folder / f"file{suffix}", damaged(data, rng), number)
            outcomes[f"{kind.name}: {outcome}"] += 1
            if (folder / CANARY).exists():
                raise AssertionError(f"input {number}: a pickle ran")
    return {
        "inputs": inputs,
        "seed": seed,
        "outcomes": dict(sorted(outcomes.items())),
        "seconds": time.perf_counter() - begin,
    }


def attempt(kind: Kind, file: Path, data: bytes, number: int) -> str:
    file.write_bytes(data)
    try:
        kind.read(file)
    except (ValueError, OSError) as error:
        return type(error).__name__
    except BaseException as error:
        raise AssertionError(
            f"input {number} of {kind.name} ({file.suffix}): {type(error).__name__}: {error}"
        ) from error
    return "read"


def main(inputs: int = 120_000, seed: int = 0, out: File = None) -> None:
    """Damage so many files at random; the first that fails otherwise than named ends it."""
    show(fuzz(inputs, seed), out)


if __name__ == "__main__":
    typer.run(main)
