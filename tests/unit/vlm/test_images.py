"""Pictures as people have them: the right colours, or a clear error."""

import base64
import contextlib
import functools
import struct
import threading
import zlib
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from specmm.vlm.asking import Questions
from specmm.vlm.pictures import open_image


@pytest.fixture
def ramp():
    return np.tile(np.arange(0, 250, 10, dtype=np.uint8), (4, 1))  # [4, 25]


def test_a_truncated_picture(tmp_path):
    file = tmp_path / "cut.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    file.write_bytes(file.read_bytes()[:2000])
    said = r"cut\.png must be a whole picture, got a damaged or truncated one"
    with pytest.raises(ValueError, match=said):
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


@pytest.mark.parametrize(
    ("length", "said"),
    [(2_000_000, ""), (70_000_000, r"long\.png must be a picture that can be read, got: .*larg")],
)
def test_texts_within_a_picture(tmp_path, length, said):
    """ComfyUI writes the workflow into it: megabytes are no reason to call it no picture."""
    text = PngInfo()
    text.add_itxt("workflow", " " * length, zip=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "long.png", pnginfo=text)
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        assert open_image(tmp_path / "long.png").size == (4, 4)


@pytest.mark.parametrize("kind", ["avif", "webp", "jp2", "png", "gif", "tif", "bmp"])
def test_damage_of_every_kind_is_a_sentence(tmp_path, kind):
    """Decoders fail by errors of any kind."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / f"whole.{kind}")
    data = (tmp_path / f"whole.{kind}").read_bytes()
    for end in range(0, len(data) * 3 // 4, len(data) // 40):
        with pytest.raises(ValueError, match="picture must be a") as told:
            open_image(data[:end])
        assert "\n" not in str(told.value)


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


@pytest.fixture(scope="module")
def pixels():
    """Three colours that differ, [H, W, 3]."""
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def layouts(pixels):
    floats = pixels / 255.0
    tensor = torch.from_numpy(pixels)
    return {
        "bytes": pixels,
        "floats": floats,
        "float32": floats.astype(np.float32),
        "channels first": pixels.transpose(2, 0, 1),
        "int64": pixels.astype(np.int64),
        "tensor": tensor.permute(2, 0, 1),
        "float tensor": tensor.permute(2, 0, 1) / 255,
        "tensor, channels last": tensor,
    }


@pytest.mark.parametrize("layout", layouts(np.zeros((5, 7, 3), np.uint8)))
def test_arrays_and_tensors(pixels, layout):
    assert np.array_equal(np.asarray(open_image(layouts(pixels)[layout])), pixels)


def test_grey_arrays_and_transparent_ones(pixels):
    grey = pixels[:, :, 0]
    for given in (grey, grey[:, :, None], torch.from_numpy(grey)[None]):
        assert np.array_equal(np.asarray(open_image(given)), np.repeat(grey[:, :, None], 3, 2))
    clear = np.concatenate([pixels, np.zeros_like(pixels[:, :, :1])], axis=2)
    assert (np.asarray(open_image(clear)) == 255).all()


def test_a_square_of_three_is_read_by_its_kind(pixels):
    """Channels last for arrays, first for tensors."""
    square = pixels[:3, :3]
    assert np.array_equal(np.asarray(open_image(square)), square)
    first = torch.from_numpy(square.transpose(2, 0, 1).copy())
    assert np.array_equal(np.asarray(open_image(first)), square)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (np.zeros((5, 5, 2)), r"must have the shape .*, got \[5, 5, 2\]"),
        (np.zeros(4), r"must have the shape .*, got \[4\]"),
        (np.full((4, 4, 3), 7.0), "must hold floats from 0 to 1, got 7 to 7"),
        (np.full((4, 4, 3), np.nan), "must hold floats from 0 to 1, got nan to nan"),
        (torch.full((3, 4, 4), -1), "must hold integers from 0 to 255, got -1 to -1"),
        (np.zeros((0, 5, 3), np.uint8), "must have 1 to"),
        (3, "must be a file, its bytes, an address, a PIL image, an array or a tensor, got 3"),
        ("http://127.0.0.1:9/a.png", "picture http://127.0.0.1:9/a.png must be readable from here"),
        ("data:image/png;base64,iVBORw0KGgo=", "data:image/png.* must be a picture"),
    ],
)
def test_what_is_no_picture(wrong, said):
    with pytest.raises(ValueError, match=said) as told:
        open_image(wrong)
    assert "\n" not in str(told.value)


def test_addresses(tmp_path, pixels):
    """Of a server of this machine, and within the address itself."""
    Image.fromarray(pixels).save(tmp_path / "a.png")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert np.array_equal(np.asarray(open_image(f"{address}/a.png")), pixels)
        with pytest.raises(ValueError, match="must be readable from here, got HTTP Error 404"):
            open_image(f"{address}/b.png")
        server.shutdown()
    packed = base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    assert np.array_equal(np.asarray(open_image(f"data:image/png;base64,{packed}")), pixels)


def test_pictures_of_one_array_are_told_apart(pixels):
    two = np.stack([pixels, 255 - pixels])
    single = Questions.of(two, "Which is darker?").pictures
    assert [len(shown) for shown in single] == [2]
    each = Questions.of(torch.from_numpy(two).permute(0, 3, 1, 2), ["What?", "And this?"]).pictures
    assert [np.asarray(shown[0]).tolist() for shown in each] == two.tolist()
