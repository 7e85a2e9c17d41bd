"""Writes the final files of a job: the index, the items set aside, archives, and a summary.

All of them are rebuilt from the journals whenever a process finishes, under a lock, so that the
last one to finish sees everything and a killed one leaves no partial file.
"""

from __future__ import annotations

import io
import json
import logging
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from specmm.image_ar.records import Record
from specmm.jobs.folder import ARCHIVES, JOURNALS, RESULTS, Spec, alone
from specmm.jobs.items import Item
from specmm.jobs.journal import Ledger
from specmm.jobs.programs import place_of_job
from specmm.jobs.results import files_of
from specmm.loading.files import files_in, json_lines, sync_folder, whole, write_whole

log = logging.getLogger(__name__)
HIDDEN = ("state", "at", "item")  # fields of a journal's record that an index does not need


def finish(
    folder: Path, spec: Spec, items: Sequence[Item], shard: int, parquet: bool = False
) -> dict[str, Any]:
    """Write index, failures, archives and summary of the job so far; returns the summary.

    Raises ``OSError`` if they cannot be written; running the job again then writes them.
    """
    with alone(folder):
        known = Ledger(folder / JOURNALS)
        if spec.layout == "tar":
            archive(folder, items, known, shard)
        totals = {"done": 0, "tokens": 0, "seconds": 0.0, "compiled_items": 0}
        claims: Counter[str] = Counter()
        failed: list[str] = []

        def rows() -> Iterator[Record]:  # one at a time: a million at once would be gigabytes
            for number, item in enumerate(items):
                if not known.is_done(item.id):
                    failed.extend([item.id] if item.id in known else [])
                    continue
                row = {k: v for k, v in known[item.id].items() if k not in HIDDEN}
                for file in files_of(row) if spec.layout == "tar" else ():
                    file["member"] = Path(file["file"]).name
                    file["file"] = f"{ARCHIVES}/{_archive_name(number, shard)}"
                totals["done"] += 1
                totals["tokens"] += row["stats"]["tokens"]
                totals["seconds"] += row["stats"]["seconds"]
                totals["compiled_items"] += row.get("compiled", False)
                claims[row["certificate"]["kind"]] += 1
                yield row

        _write_lines(folder / "index.jsonl", rows())
        _write_lines(folder / "failed.jsonl", (known[name] for name in failed))
        summary = {
            "model": spec.model,
            "method": spec.method,
            "method_options": list(spec.options),
            "seed": spec.seed,
            "items": len(items),
            "failed": len(failed),
            **totals,
            "certificates": dict(claims),
            "sampling": spec.sampling,
            "compiled": spec.compiled,
            **place_of_job(folder),
        }
        if parquet:
            _write_parquet(folder / "index.parquet", folder / "index.jsonl")
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        write_whole(folder / "run.json", text.encode(), durable=True)
        sync_folder(folder)
    return summary


def _write_lines(file: Path, rows: Iterable[Record]) -> None:
    lines = (f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in rows)
    write_whole(file, lines, durable=True)


def _write_parquet(file: Path, index: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [row for _, row in json_lines(index)]
    names = dict.fromkeys(name for row in rows for name in row)  # not those of the first row alone
    whole = [{name: row.get(name) for name in names} for row in rows]
    packed = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(whole), packed)
    write_whole(file, packed.getvalue(), durable=True)


def _archive_name(number: int, shard: int) -> str:
    return f"shard-{number // shard:05d}.tar"


def archive(folder: Path, items: Sequence[Item], known: Ledger, shard: int) -> None:
    """Move results into webdataset archives of ``shard`` items each, in the order of the job.

    An archive is written whole before the files in it are removed, so that a result is always
    somewhere. The bytes of an archive depend on its items only.
    """
    there = {file.name for file in files_in(folder / RESULTS)}
    for first in range(0, len(items), shard):
        some = [i.id for i in items[first : first + shard] if known.is_done(i.id)]
        files = [file for name in some for file in files_of(known[name])]
        by_name = {Path(file["file"]).name: folder / file["file"] for file in files}
        loose = there & by_name.keys()
        if not loose:
            continue
        target = folder / ARCHIVES / _archive_name(first, shard)
        packed = dict(members(target)) if target.exists() else {}
        missing = [name for name in by_name if name not in loose and name not in packed]
        if missing:  # lost, or being made again by another process
            text = "%s lacks %s: the shard is left open; see --verify, --repair"
            log.warning(text, target, missing[0])
            continue
        with whole(target, durable=True) as stream:
            _write_archive(stream, {n: by_name[n] if n in loose else packed[n] for n in by_name})
        sync_folder(target.parent)
        for name in loose:
            by_name[name].unlink()


def members(file: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the files in an archive, one after the other."""
    with file.open("rb") as stream, tarfile.open(fileobj=stream) as opened:
        for member in opened:
            yield member.name, opened.extractfile(member).read()  # type: ignore[union-attr]


def _write_archive(stream: IO[bytes], files: dict[str, Path | bytes]) -> None:
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as made:
        for name, file in files.items():
            data = file if isinstance(file, bytes) else file.read_bytes()
            member = tarfile.TarInfo(name)  # without time and owner
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
