import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from specmm.metrics.inputs import open_pictures

RED = (200, 30, 40)


def only(path: Path) -> np.ndarray:
    (found,) = open_pictures(path)
    return found


def test_sixteen_bits_keep_the_high_byte(tmp_path: Path) -> None:
    Image.fromarray(np.full((2, 3), 0x80FF, np.uint16)).save(tmp_path / "a.png")
    assert only(tmp_path / "a.png").tolist() == np.full((2, 3, 3), 0x80).tolist()


def test_floats_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((2, 3), 0.5, np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(
        ValueError, match=r"a\.tif must be a picture of 8 or 16 bits, got pixels of 32"
    ):
        only(tmp_path / "a.tif")


def test_cmyk(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=100)
    assert np.abs(only(tmp_path / "a.jpg")[8, 8].astype(int) - [255, 0, 0]).max() < 5


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    palette = Image.new("RGBA", (4, 4), (*RED, 255))
    palette.putpixel((0, 0), (0, 0, 0, 0))
    palette.save(tmp_path / "a.png")
    palette.convert("P").save(
        tmp_path / "b.png", transparency=palette.convert("P").getpixel((0, 0))
    )
    for name in ("a.png", "b.png"):
        assert only(tmp_path / name)[0, 0].tolist() == [255, 255, 255]
    assert only(tmp_path / "a.png")[1, 1].tolist() == list(RED)


def test_animations_give_their_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), c) for c in (RED, (0, 0, 255))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert only(tmp_path / "a.gif")[0, 0].tolist() == list(RED)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (8, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert only(tmp_path / "a.jpg").shape == (8, 4, 3)


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow warns above its limit, 89 million, which a telephone has, and refuses twice that."""
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    assert only(tmp_path / "a.png").shape == (20, 20, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"a\.png must have 1 to 200 pixels.*decompression bomb"):
        only(tmp_path / "a.png")


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_files_are_named_and_skipped_on_request(tmp_path: Path, workers: int) -> None:
    good = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(good).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:2000])  # truncated
    (tmp_path / "c.jpg").write_text("no picture")
    (tmp_path / "d.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"b\.png must be a whole picture, got .*trunc.*skip_bad"):
        list(open_pictures(tmp_path, workers=workers))
    source = open_pictures(tmp_path, skip_bad=True, workers=workers)
    for _ in range(2):
        assert len(list(source)) == 1
        assert [Path(name).name for name, _ in source.skipped] == ["b.png", "c.jpg", "d.png"]
    assert source.skipped[1][1] == "must be a picture, got a file of another kind or an empty one"
    (tmp_path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"one of 3 pictures must be readable, got .*b\.png: must"):
        list(open_pictures(tmp_path, skip_bad=True, workers=workers))


def test_broken_archives(tmp_path: Path) -> None:
    for name in ("a.zip", "a.tar", "a.npz", "a.npy"):
        (tmp_path / name).write_bytes(b"PK no archive at all")
        with pytest.raises(ValueError, match=f"{name} must be a .*broken"):
            open_pictures(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("x.png", b"broken")
    with pytest.raises(ValueError, match=r"b\.zip:x\.png must be a picture"):
        list(open_pictures(tmp_path / "b.zip"))


def test_nothing_to_read(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "none.zip", f"{tmp_path}/*.png"):
        with pytest.raises(ValueError, match="got none; pass a folder"):
            open_pictures(source)


@pytest.mark.parametrize(
    "bad", [np.zeros((2, 4, 4, 3)), np.zeros((2, 3, 4, 4), np.uint8), np.zeros(3, np.uint8)]
)
def test_arrays_of_something_else(tmp_path: Path, bad: np.ndarray) -> None:
    np.savez(tmp_path / "a.npz", images=bad)
    with pytest.raises(ValueError, match=r"uint8 \[N, H, W, 3\] in C order, got"):
        open_pictures(tmp_path / "a.npz")


def test_several_arrays_need_a_known_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(1), y=np.zeros(1))
    with pytest.raises(ValueError, match="must hold images or arr_0, or one array, got x, y"):
        open_pictures(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.tar.gz", "a.TGZ", "a.7z"])
def test_packed_archives_are_to_be_unpacked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"packed")
    with pytest.raises(ValueError, match=f"{name} must be unpacked, or made a .zip"):
        open_pictures(tmp_path / name)


def test_a_broken_archive_in_a_folder(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "b.tar").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"b\.tar must be a whole \.tar archive, got a broken one"):
        open_pictures(tmp_path)
    source = open_pictures(tmp_path, skip_bad=True)
    assert source.counts() == {"files": 2, "pictures": 1, "broken archive": 1}
