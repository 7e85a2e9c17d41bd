"""Pictures as people have them: the right colours, or a clear error."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from specmm.vlm.pictures import open_image


@pytest.fixture
def ramp():
    return np.tile(np.arange(0, 250, 10, dtype=np.uint8), (4, 1))  # [4, 25]


def test_a_truncated_picture(tmp_path):
    file = tmp_path / "cut.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(
        ValueError, match=r"cut\.png must be a whole picture, got a damaged or truncated one"
    ):
        open_image(file)


@pytest.mark.parametrize("content", [b"", b"hello, I am a text"])
def test_a_file_of_another_kind(tmp_path, content):
    file = tmp_path / "text.png"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="must be a picture"):
        open_image(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        open_image(tmp_path / "nowhere.png")


@pytest.mark.parametrize("side", [9500, 30000])
def test_a_huge_picture_is_refused_by_its_header(tmp_path, side):
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = (
        struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    )
    file = tmp_path / "huge.png"
    file.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", 0)
    )
    with pytest.raises(ValueError, match="must have 1 to 80,000,000 pixels"):
        open_image(file)


def test_an_animation_gives_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    image = open_image(tmp_path / "a.gif")
    assert image.mode == "RGB" and image.getpixel((3, 3)) == (255, 0, 0)


def test_cmyk(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg")
    red, green, blue = open_image(tmp_path / "a.jpg").getpixel((3, 3))
    assert red > 200 and green < 60 and blue < 60


def test_sixteen_bits_keep_their_greys(tmp_path, ramp):
    Image.fromarray(ramp.astype(np.uint16) * 257).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as raw:
        assert raw.mode.startswith("I")
    image = open_image(tmp_path / "a.png")
    assert image.mode == "RGB" and np.array_equal(np.asarray(image)[..., 0], ramp)


def test_transparency_is_on_white():
    assert open_image(Image.new("RGBA", (4, 4), (0, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)


def test_a_camera_held_upright():
    image = Image.new("RGB", (4, 2))
    image.getexif()[0x0112] = 6
    assert open_image(image).size == (2, 4)


def test_a_picture_without_pixels():
    with pytest.raises(ValueError, match="got 0 x 5"):
        open_image(Image.new("RGB", (0, 5)))
