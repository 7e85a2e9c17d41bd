import io
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from specmm.metrics.inputs import open_pictures
from tests import odd_files


def pictures(count: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 6, 5, 3), dtype=np.uint8)


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def fill(folder: Path, given: np.ndarray) -> Path:
    for i, picture in enumerate(given):
        (folder / f"{i % 2}").mkdir(parents=True, exist_ok=True)
        (folder / f"{i % 2}/{i}.png").write_bytes(png(picture))
    (folder / "README.txt").write_text("no picture")
    return folder


IN_ORDER = [0, 2, 1, 3]  # by folder, then by name


def same(found: object, expected: np.ndarray) -> bool:
    return np.array_equal(np.stack(list(found)), expected)  # type: ignore[call-overload]


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_and_glob(tmp_path: Path, workers: int) -> None:
    given = pictures()
    fill(tmp_path, given)
    source = open_pictures(tmp_path, workers=workers)
    # twice: it can be read again
    assert same(source, given[IN_ORDER]) and same(source, given[IN_ORDER])
    assert source.__length_hint__() == 4 and "transparency on white" in source.protocol["decoding"]
    assert same(open_pictures(str(tmp_path / "1/*.png")), given[[1, 3]])
    assert same(open_pictures(str(tmp_path / "**/*.png"), workers=workers), given[IN_ORDER])
    assert same(open_pictures(tmp_path / "0/2.png"), given[[2]])


@pytest.mark.parametrize("workers", [0, 1])
def test_archives(tmp_path: Path, workers: int) -> None:
    given = pictures()
    with (
        zipfile.ZipFile(tmp_path / "a.zip", "w") as archive,
        tarfile.open(tmp_path / "a.tar", "w") as tar,
    ):
        for i in (2, 0, 3, 1):
            data = png(given[i])
            archive.writestr(f"x/{i}.png", data)
            info = tarfile.TarInfo(f"{i}.png")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            archive.writestr(f"x/{i}.cls", "1")
    for name in ("a.zip", "a.tar"):
        assert same(open_pictures(tmp_path / name, workers=workers), given)


@pytest.mark.parametrize("names", [("arr_0", "arr_1"), ("images", "labels"), ("x",)])
def test_numpy_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    given = pictures()
    np.savez_compressed(tmp_path / "a.npz", **dict(zip(names, (given, np.arange(4)), strict=False)))
    np.save(tmp_path / "a.npy", given)
    (tmp_path / "B.NPY").write_bytes((tmp_path / "a.npy").read_bytes())
    for name in ("a.npz", "a.npy", "B.NPY"):
        assert same(open_pictures(tmp_path / name), given)
    damaged = bytearray((tmp_path / "a.npz").read_bytes())
    damaged[400:410] = bytes(10)  # within the pictures
    (tmp_path / "a.npz").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"a\.npz must be a whole numpy file, got a broken one"):
        list(open_pictures(tmp_path / "a.npz"))


def test_arrays_iterables_and_pipelines() -> None:
    given = pictures()
    output = SimpleNamespace(images=[Image.fromarray(p) for p in given])
    assert same(open_pictures(given), given) and same(open_pictures(list(given)), given)
    assert same(open_pictures(lambda: output), given) and same(open_pictures(output), given)
    assert same(open_pictures(SimpleNamespace(images=p[None]) for p in given), given)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_every_file_is_counted_or_named(tmp_path: Path, kind: str, workers: int) -> None:
    """Some forty files of all kinds that people have, of which each is one or the other."""
    place = tmp_path / f"odd.{kind}"
    expected = getattr(odd_files, f"fill_{kind}")(place)
    source = open_pictures(place, skip_bad=True, workers=workers)
    found = list(source)
    counts = source.counts()
    assert counts == expected and counts["files"] > 35
    assert counts["pictures"] == len(found) and counts["unreadable"] == len(source.skipped)
    reasons = [counts[reason] for reason in counts if reason != "files"]
    assert sum(reasons) == counts["files"]
    assert all(picture.shape == (odd_files.SIDE, odd_files.SIDE, 3) for picture in found)
    said = dict(source.skipped)
    if kind == "zip":
        assert "must not be encrypted" in said[f"{place}:encrypted.png"]
        assert "got method 9 (deflate64)" in said[f"{place}:deflate64.png"]
    with pytest.raises(ValueError, match=r"cut\.avif must be a whole picture, got a damaged"):
        list(open_pictures(place, workers=workers))


def test_links_of_archives_are_what_they_lead_to(tmp_path: Path) -> None:
    odd_files.fill_tar(tmp_path / "a.tar", with_bad=False)
    odd_files.fill_zip(tmp_path / "a.zip", with_bad=False)
    wanted = next(iter(open_pictures(given_png(tmp_path))))
    for name, members in {
        "a.tar": ("hard-0.png", "hard-1.png", "hard-2.png", "links/soft.png", "twice.png"),
        "a.zip": ("links/soft.png", "twice.png", "by-0.png", "by-12.png", "by-14.png"),
    }.items():
        source = open_pictures(tmp_path / name)
        found = dict(zip((file.member for file in source.files), source, strict=True))
        assert all(np.array_equal(found[member], wanted) for member in members)


def given_png(folder: Path) -> Path:
    (folder / "given.png").write_bytes(odd_files.picture(0))
    return folder / "given.png"


def test_the_order_is_that_of_paths(tmp_path: Path) -> None:
    """Folder by folder: FID does not mind, but prompts go with pictures line by line."""
    names = ["a/1.png", "a.png", "a-b/1.png", "b/c/1.png", "b/c.png", "B.png", "b/10.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    found = [file.path for file in open_pictures(tmp_path).files]
    assert found == sorted(tmp_path / name for name in names)


def test_an_archive_is_opened_once_not_for_each_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is as long as it has members: 50,000 pictures took 0.56 s each."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i, picture in enumerate(pictures()):
            archive.writestr(f"{i}.png", png(picture))
    source = open_pictures(tmp_path / "a.zip")
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert same(source, pictures())


def test_globs_of_archives(tmp_path: Path) -> None:
    given = pictures()
    for shard in range(2):
        with tarfile.open(tmp_path / f"shard-{shard}.tar", "w") as tar:
            for i in (0, 1):
                odd_files.add(tar, f"{i}.png", png(given[2 * shard + i]))
    assert same(open_pictures(f"{tmp_path}/shard-*.tar"), given)
