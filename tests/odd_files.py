"""Files as people have them, beside pictures: what lies in folders, .zip and .tar archives."""

import io
import json
import stat
import tarfile
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

SIDE = 8
ODD_TEXTS = ("a\u2028b", "c\u0085d", "e\u2029f\x0b", "g\x0ch\x1ci", "grün", "")  # no end of a line
ENDINGS = ["png", "PNG", "jpg", "jpeg", "jpe", "jfif", "avif", "webp", "bmp", "gif", "tif", "tiff"]
ENDINGS += ["ppm", "pgm", "jp2", "j2k", "tga", "qoi", "mpo"]
HIDDEN = (".ipynb_checkpoints/0-checkpoint.png", "a/._0.png", "__MACOSX/a/0.png", "a/.cache/b.jpg")
OTHERS = {"README.txt": "ending .txt", "a/b.json": "ending .json", "a/Thumbs.db": "ending .db"}
OTHERS |= {
    "a/LICENSE": "without ending",
    "a/0.heic": "ending .heic",
    "a/0.h5": "ending .h5",
    "a/0.eps": "ending .eps",
}


def picture(number: int, ending: str = "png") -> bytes:
    """A picture of ``SIDE`` pixels in the format of ``ending``; of a png with a long text."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    kind = Image.registered_extensions()[f".{ending.lower()}"]
    image = Image.fromarray(pixels)
    text = PngInfo()
    text.add_itxt("workflow", "{" + " " * 2_000_000, zip=True)  # as ComfyUI's
    file = io.BytesIO()
    image.save(file, kind, **({"pnginfo": text} if ending == "PNG" else {}))
    return file.getvalue()


def bad() -> dict[str, bytes]:
    """Pictures that cannot be read."""
    floats = io.BytesIO()
    Image.fromarray(np.ones((SIDE, SIDE), np.float32)).save(floats, "TIFF")
    whole = picture(0, "avif")
    return {
        "b/cut.avif": whole[: len(whole) - 40],
        "b/cut.png": picture(0)[:100],
        "b/empty.png": b"",
        "b/float.tif": floats.getvalue(),
        "b/text.jpg": b"no picture",
    }


def plain(with_bad: bool) -> Iterator[tuple[str, bytes]]:
    """Names and contents: ``ENDINGS`` are pictures, ``HIDDEN`` and ``OTHERS`` are left out."""
    for number, ending in enumerate(ENDINGS):
        yield f"a/{number:02d}.{ending}", picture(number, ending)
    yield from ((name, picture(0)) for name in HIDDEN)
    yield from ((name, b"no picture") for name in OTHERS)
    yield from bad().items() if with_bad else ()


def lines_of(rows: Sequence[Any]) -> bytes:
    """JSON lines as an editor of Windows keeps them: a byte-order mark, \\r\\n, a blank line."""
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    return "\r\n".join(["\ufeff" + next(lines), "", *lines, ""]).encode()


def counts(with_bad: bool, pictures: int, others: dict[str, int]) -> dict[str, int]:
    """What must be found where ``pictures`` and ``others`` are beside those of ``plain``."""
    found = {"pictures": len(ENDINGS) + pictures, "hidden": len(HIDDEN)}
    found |= dict.fromkeys(OTHERS.values(), 1) | others
    found |= {"unreadable": len(bad())} if with_bad else {}
    return {"files": sum(found.values()), **found}


def fill_folder(folder: Path, with_bad: bool = True) -> dict[str, int]:
    """Also with links to a folder and to a picture, broken ones, and an archive; what is there."""
    for name, data in plain(with_bad):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    elsewhere = folder.parent / f"{folder.name}-elsewhere"
    elsewhere.mkdir()
    for number in range(2):
        (elsewhere / f"{number}.png").write_bytes(picture(number))
    (folder / "class").symlink_to(elsewhere)
    (folder / "a/same.png").symlink_to("00.png")
    (folder / "a/gone.png").symlink_to("nowhere.png")
    (folder / "a/self.png").symlink_to("self.png")
    (folder / "a/above").symlink_to("..")
    with tarfile.open(folder / "shard.tar", "w") as tar:
        add(tar, "0.png", picture(0))
        add(tar, "0.cls", b"1")
    others = {"link to no file": 2, "link to a folder above": 1, "ending .cls": 1}
    return counts(with_bad, 4, others)


def fill_tar(file: Path, with_bad: bool = True) -> dict[str, int]:
    """Also with hard and symbolic links, and a member that replaces an earlier one."""
    with tarfile.open(file, "w") as tar:
        for name, data in plain(with_bad):
            add(tar, f"./{name}", data)
        add(tar, "blob", picture(0))
        add(tar, "twice.png", b"an earlier one")
        add(tar, "twice.png", picture(0))
        for number, target in enumerate(("blob", "./a/00.png", "hard-0.png")):
            add(tar, f"hard-{number}.png", kind=tarfile.LNKTYPE, target=target)
        add(tar, "links/soft.png", kind=tarfile.SYMTYPE, target="../hard-0.png")
        add(tar, "links/gone.png", kind=tarfile.SYMTYPE, target="nowhere.png")
        add(tar, "links", kind=tarfile.DIRTYPE)
    others = {"link to no file": 1, "replaced by a later one": 1, "without ending": 2}
    return counts(with_bad, 5, others)


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **about: Any) -> None:
    """A member of ``kind`` (a file), of a link with its ``target``."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.type = about.get("kind", tarfile.REGTYPE)
    info.linkname = about.get("target", "")
    tar.addfile(info, io.BytesIO(data))


def fill_zip(file: Path, with_bad: bool = True) -> dict[str, int]:
    """Also compressed in every way, with a folder, a link, and a member that replaces another; bad
    ones are also encrypted, or compressed by what Python does not know.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the name that comes twice
        for name, data in plain(with_bad):
            made.writestr(name, data)
        made.writestr("folder/", b"")
        for method in (zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
            made.writestr(f"by-{method}.png", picture(0), method)
        made.writestr("twice.png", b"an earlier one")
        made.writestr("twice.png", picture(0))
        link = zipfile.ZipInfo("links/soft.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        made.writestr(link, "../twice.png")
        for name in ("encrypted.png", "deflate64.png") if with_bad else ():
            made.writestr(name, picture(0))
    if with_bad:
        data = bytearray(file.read_bytes())
        patch(data, b"encrypted.png", 8, 1)  # the first of the flags
        patch(data, b"deflate64.png", 10, 9)  # the way of compression
        file.write_bytes(data)
    found = counts(with_bad, 5, {"replaced by a later one": 1})
    if with_bad:
        found["unreadable"] += 2
        found["files"] += 2
    return found


def patch(data: bytearray, name: bytes, offset: int, value: int) -> None:
    """Change the entry of the member ``name`` in a zip's directory, of 46 bytes and the name."""
    data[data.rindex(name) - 46 + offset] = value
