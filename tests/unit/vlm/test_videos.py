"""Videos from every source: frames, speed, what a processor samples, what is refused."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image

from specmm.vlm import videos
from specmm.vlm.videos import is_video, open_video

COUNT = 12


@pytest.fixture
def frames():
    """Frame i is grey 20·i: every frame can be told from the others."""
    return [Image.new("RGB", (20, 12), (20 * i,) * 3) for i in range(COUNT)]


@pytest.fixture
def gif(frames, tmp_path):
    file = tmp_path / "a.gif"
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=100)
    return file


def greys(found):
    return [int(frame.mean().round()) for frame in found]


WANTED = [20 * i for i in range(COUNT)]


def test_an_animation_has_its_frames_and_its_speed(gif):
    found, metadata = open_video(gif).frames()
    assert found.shape == (COUNT, 12, 20, 3) and found.dtype == np.uint8
    assert greys(found) == pytest.approx(WANTED, abs=2)
    assert metadata.fps == pytest.approx(10) and metadata.total_num_frames == COUNT
    assert metadata.duration == pytest.approx(1.2)


def test_frames_of_a_folder_come_by_their_numbers(frames, tmp_path):
    for i, frame in enumerate(frames):
        frame.save(tmp_path / f"frame{i}.png")  # "frame10" is before "frame2" by letters
    (tmp_path / "notes.txt").write_text("no frame")
    (tmp_path / "._frame0.png").write_text("what macOS leaves on other disks")
    (tmp_path / "film.mpg").write_text("Pillow knows the name alone")
    found, _ = open_video(tmp_path).frames()
    assert greys(found) == WANTED


@pytest.mark.parametrize("kind", ["bytes", "numbers", "tensor"])
def test_pictures_and_arrays_are_shown_whole(frames, kind):
    listed, _ = open_video(frames).frames()
    array = np.stack([np.asarray(frame) for frame in frames])
    given = {"bytes": array, "numbers": array / 255.0, "tensor": torch.from_numpy(array)}[kind]
    assert np.array_equal(open_video(given).frames()[0], listed)
    assert np.array_equal(listed, array)


def sampler(**options):
    return tf.InternVLVideoProcessor(size={"height": 16, "width": 16}, **options)


def test_a_processor_samples_files_and_not_chosen_frames(gif, frames):
    wanted = sampler(num_frames=4)
    found, metadata = open_video(gif).frames(wanted)
    assert len(found) == 4 == len(metadata.frames_indices)
    assert greys(found) == pytest.approx([20 * int(i) for i in metadata.frames_indices], abs=2)
    assert len(open_video(frames).frames(wanted)[0]) == COUNT


def test_a_short_video_and_a_processor_without_numbers_give_all_frames(gif):
    assert len(open_video(gif).frames(sampler(num_frames=64))[0]) == COUNT
    assert len(open_video(gif).frames(sampler())[0]) == COUNT


def test_a_film_is_read_by_an_installed_package(tmp_path):
    cv2 = pytest.importorskip("cv2")
    file = tmp_path / "a.avi"
    film = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    for i in range(COUNT):
        film.write(np.full((48, 64, 3), 20 * i, np.uint8))
    film.release()
    found, metadata = open_video(str(file)).frames(sampler(num_frames=4))
    assert found.shape == (4, 48, 64, 3) and metadata.fps == pytest.approx(10)
    assert greys(found) == pytest.approx([20 * int(i) for i in metadata.frames_indices], abs=3)


def test_without_a_package_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(videos, "READERS", {"pyav": "no_such_package"})
    (tmp_path / "a.mp4").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=r"pip install .*or give its frames"):
        open_video(tmp_path / "a.mp4").frames()


def test_what_a_package_cannot_read_is_named(tmp_path):
    if not any(map(importlib.util.find_spec, videos.READERS.values())):
        pytest.skip("no package for videos here")
    (tmp_path / "a.mp4").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=r"a\.mp4 must be a video, got one that cannot be read"):
        open_video(tmp_path / "a.mp4").frames()


def test_a_huge_video_is_refused_before_it_is_read(gif, monkeypatch):
    monkeypatch.setattr(videos, "MOST_PIXELS", 20 * 12 * 6)
    assert len(open_video(gif).frames(sampler(num_frames=6))[0]) == 6
    with pytest.raises(ValueError, match=r"got 12 frames of 20 x 12; shorten it"):
        open_video(gif).frames()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (np.zeros((4, 3, 12, 20), np.uint8), r"frames, height, width and 3 colours, got \(4, 3,"),
        (np.zeros((0, 12, 20, 3), np.uint8), "got \\(0, 12"),
        (np.full((4, 12, 20, 3), 7.0), "numbers from 0 to 1, got float64 from 7.0"),
        (np.zeros((4, 12, 20, 3), np.int64), "an array of bytes, .*got int64"),
        ([Image.new("RGB", (4, 4)), Image.new("RGB", (8, 4))], "one size, got 4 x 4 and 8 x 4"),
    ],
)
def test_arrays_of_other_shapes_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        open_video(given)


def test_files_that_hold_no_video(tmp_path, monkeypatch):
    Image.new("RGB", (4, 4)).save(tmp_path / "still.png")
    with pytest.raises(ValueError, match="a picture that does not move; ask it as one"):
        open_video(tmp_path / "still.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    with pytest.raises(ValueError, match=r"still\.png must have 1 to 2 pixels, got more"):
        open_video(tmp_path / "still.png")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="frames of one size, got none"):
        open_video(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_video(tmp_path / "nowhere.mp4")


def test_a_list_of_pictures_is_one_video(frames):
    assert is_video(frames) and is_video("a.mp4") and is_video(np.zeros((1, 2, 2, 3)))
    assert not is_video(["a.mp4", "b.mp4"]) and not is_video([frames, frames]) and not is_video([])


def test_a_sampler_is_given_its_own_numbers():
    """As transformers itself calls it."""
    asked = {}

    def sample_frames(metadata, **options):
        asked.update(options)
        return [0]

    kind = SimpleNamespace(__annotations__={"num_frames": int, "fps": float, "max_frames": int})
    made = SimpleNamespace(valid_kwargs=kind, num_frames=3, max_frames=9)
    made.sample_frames = sample_frames
    found, _ = videos.Video("a", open_video(np.zeros((4, 2, 2, 3), np.uint8)).read).frames(made)
    assert len(found) == 1 and asked == {"num_frames": 3, "fps": None, "max_frames": 9}
