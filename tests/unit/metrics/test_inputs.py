import io
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from specmm.metrics.inputs import open_pictures


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
    for name in ("a.npz", "a.npy"):
        assert same(open_pictures(tmp_path / name), given)


def test_arrays_iterables_and_pipelines() -> None:
    given = pictures()
    output = SimpleNamespace(images=[Image.fromarray(p) for p in given])
    assert same(open_pictures(given), given) and same(open_pictures(list(given)), given)
    assert same(open_pictures(lambda: output), given) and same(open_pictures(output), given)
    assert same(open_pictures(SimpleNamespace(images=p[None]) for p in given), given)
