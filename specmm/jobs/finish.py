"""Writes the final files of a job: the index, the items set aside, archives, and a summary.

All of them are rebuilt from the journals whenever a process finishes, under a lock, so that the
last one to finish sees everything and a killed one leaves no partial file.
"""

from __future__ import annotations

import io
import json
import logging
import os
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specmm.image_ar.records import Record
from specmm.jobs.folder import ARCHIVES, JOURNALS, MAKER, Spec, alone, ledger
from specmm.jobs.items import Item
from specmm.jobs.programs import place_of_job
from specmm.jobs.results import files_of
from specmm.loading.files import sync_folder, write_whole

log = logging.getLogger(__name__)
HIDDEN = ("state", "at", "item", "bytes", MAKER)  # of a journal's record, not needed in an index


def finish(
    folder: Path, spec: Spec, items: Sequence[Item], shard: int, parquet: bool = False
) -> dict[str, Any]:
    """Write index, failures, archives and summary of the job so far; returns the summary.

    Raises ``OSError`` if they cannot be written; running the job again then writes them.
    """
    with alone(folder):
        known = ledger(folder / JOURNALS)
        rows = {n: known[i.id] for n, i in enumerate(items) if i.id in known}  # by place in the job
        done = {n: row for n, row in rows.items() if row["state"] == "done"}
        failed = [row for row in rows.values() if row["state"] == "failed"]
        if spec.layout == "tar":
            archive(folder, items, known, shard)
        index = partial(_index, done, known.makers, spec, shard)
        _write_lines(folder / "index.jsonl", index())
        _write_lines(folder / "failed.jsonl", failed)
        if parquet:
            _write_parquet(folder / "index.parquet", list(index()))
        summary = {
            "model": spec.model,
            "method": spec.method,
            "method_options": list(spec.options),
            "seed": spec.seed,
            "items": len(items),
            "done": len(done),
            "failed": len(failed),
            "tokens": sum(row["stats"]["tokens"] for row in done.values()),
            "seconds": sum(row["stats"]["seconds"] for row in done.values()),
            "certificates": dict(Counter(row["certificate"]["kind"] for row in done.values())),
            "sampling": spec.sampling,
            "compiled": spec.compiled,
            "compiled_items": sum(row.get("compiled", False) for row in done.values()),
            **place_of_job(folder),
        }
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        write_whole(folder / "run.json", text.encode(), durable=True)
        sync_folder(folder)
    return summary


def _index(
    done: Mapping[int, Record], makers: Mapping[str, Record], spec: Spec, shard: int
) -> Iterator[Record]:
    """The index's rows of items ``done``, one at a time: a million at once would be gigabytes."""
    for number, record in done.items():
        maker = makers.get(record.get(MAKER, ""), {})
        yield {**_indexed(spec, record, number, shard), **maker}


def _indexed(spec: Spec, record: Record, number: int, shard: int) -> Record:
    row = _shown(record)
    if "pictures" in row:
        row["pictures"] = [_shown(picture) for picture in row["pictures"]]
    if spec.layout == "tar":
        for file in files_of(row):
            file["member"] = Path(file["file"]).name
            file["file"] = f"{ARCHIVES}/{_archive_name(number, shard)}"
    return row


def _shown(record: Record) -> Record:
    return {k: v for k, v in record.items() if k not in HIDDEN}


def _write_lines(file: Path, rows: Iterable[Record]) -> None:
    lines = (f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in rows)
    write_whole(file, lines, durable=True)


def _write_parquet(file: Path, rows: list[Record]) -> None:
    import pyarrow
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)  # not those of the first row alone
    whole = [{name: row.get(name) for name in names} for row in rows]
    packed = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(whole), packed)
    write_whole(file, packed.getvalue(), durable=True)


def _archive_name(number: int, shard: int) -> str:
    return f"shard-{number // shard:05d}.tar"


def archive(folder: Path, items: Sequence[Item], known: dict[str, Record], shard: int) -> None:
    """Move results into webdataset archives of ``shard`` items each, in the order of the job.

    An archive is written whole before the files in it are removed, so that a result is always
    somewhere. The bytes of an archive depend on its items only.
    """
    for first in range(0, len(items), shard):
        records = [known[i.id] for i in items[first : first + shard] if i.id in known]
        files = [file for r in records if r["state"] == "done" for file in files_of(r)]
        wanted = {Path(file["file"]).name: folder / file["file"] for file in files}
        loose = {name for name, file in wanted.items() if file.exists()}
        if not loose:
            continue
        target = folder / ARCHIVES / _archive_name(first, shard)
        packed = dict(members(target)) if target.exists() else {}
        missing = [name for name in wanted if name not in loose and name not in packed]
        if missing:  # lost, or being made again by another process
            text = "%s lacks %s: the shard is left open; see --verify, --repair"
            log.warning(text, target, missing[0])
            continue
        _write_archive(target, wanted, packed)
        for name in loose:
            os.unlink(wanted[name])


def members(file: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the files in an archive, one after the other."""
    with tarfile.open(file) as opened:
        for member in opened:
            yield member.name, opened.extractfile(member).read()  # type: ignore[union-attr]


def _write_archive(target: Path, wanted: dict[str, Path], packed: dict[str, bytes]) -> None:
    part = target.with_name(target.name + ".part")
    with part.open("wb") as stream:
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as made:
            for name, file in wanted.items():
                data = file.read_bytes() if file.exists() else packed[name]
                member = tarfile.TarInfo(name)  # without time and owner
                member.size = len(data)
                made.addfile(member, io.BytesIO(data))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, target)
    sync_folder(target.parent)
