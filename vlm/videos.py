"""Opens videos: files, animations, folders and lists of frames, arrays.

A file is read when the processor is called, because the processor knows which frames its model
samples. A list of frames counts as already sampled, so all are used.

Shape letters: F frames, H height, W width.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from transformers.video_utils import VideoMetadata, load_video

from specmm.extending.kinds import check_numbers
from specmm.loading.extras import install
from specmm.loading.pictures import endings, header, rgb
from specmm.vlm.pictures import Source, open_image

VideoSource = str | Path | np.ndarray | Tensor | Sequence[Image.Image]
Choice = Callable[[VideoMetadata], Sequence[int]]  # chooses frames by number
Frames = tuple[np.ndarray, VideoMetadata]  # [F, H, W, 3] of bytes, and the video's metadata
MOST_PIXELS = 500_000_000  # all shown frames: more take over 1.5 GB before they are scaled down
SAMPLING = ("num_frames", "fps", "do_sample_frames")  # options of processors that sample frames
FPS = 24.0  # transformers' assumption for frames of unknown rate
READERS = {  # packages that read files, by the names that transformers gives them
    "torchcodec": "torchcodec",
    "pyav": "av",
    "decord": "decord",
    "opencv": "cv2",
}


class TooLarge(ValueError):
    """A video whose frames would not fit into memory."""


@dataclass(frozen=True)
class Video:
    """A video by its ``name``; ``read`` returns the frames that a function chooses.

    Frames that were ``given`` as a list are not sampled again.
    """

    name: str
    read: Callable[[Choice], Frames]
    given: bool = False

    def frames(self, sampler: Any = None) -> Frames:
        """The frames that ``sampler``, a video processor of transformers, chooses (None: all).

        Raises ``ValueError`` for a file that cannot be read and for too many pixels.
        """
        choose = _all if self.given or sampler is None else partial(_sampled, sampler)

        def chosen(metadata: VideoMetadata, **_: Any) -> Sequence[int]:
            frames = choose(metadata)
            pixels = len(frames) * (metadata.height or 0) * (metadata.width or 0)
            if pixels > MOST_PIXELS:
                raise TooLarge(
                    f"{self.name} must have at most {MOST_PIXELS:,} pixels in the frames that are "
                    f"shown, got {len(frames)} frames of {metadata.width} x {metadata.height}; "
                    "shorten it or scale it down"
                )
            return frames

        return self.read(chosen)


def open_video(source: VideoSource, fps: float | None = None) -> Video:
    """A video of a file, an animation, a folder of frames, a list of pictures or an array.

    Arrays are [F, H, W, 3], of bytes or of numbers from 0 to 1. ``fps`` is their rate. Raises
    ``ValueError`` for anything else, for files that hold no video, and for ``fps`` with a file,
    which states its own rate.
    """
    if fps is not None:
        check_numbers(fps=fps)
        if not 0 < fps < float("inf"):
            raise ValueError(f"fps must be finite and above 0, got {fps}")
    if isinstance(source, np.ndarray | Tensor):
        return _of_frames("video", _bytes(source), fps)
    if not isinstance(source, str | Path):
        return _of_pictures("video", source, fps)
    path = Path(source)
    if path.is_dir():
        return _of_pictures(str(path), _frame_files(path), fps)
    if fps is not None:
        raise ValueError(f"fps is for videos given as frames, got the file {path}; leave it out")
    try:
        with header(str(path)) as image:
            count = int(getattr(image, "n_frames", 1))
    except ValueError as error:  # a missing file is another error, clear by itself
        if not isinstance(error.__cause__, UnidentifiedImageError):
            raise ValueError(f"{path} {error}") from error
        return Video(str(path), partial(_read_file, path))
    if count == 1:
        raise ValueError(f"{path} must be a video, got a picture that does not move; ask it as one")
    return Video(str(path), partial(_read_animation, path))


def is_video(value: object) -> bool:
    """Whether ``value`` is one video, not a list of videos."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, Image.Image) for item in value)
    return isinstance(value, str | Path | np.ndarray | Tensor)


def _all(metadata: VideoMetadata) -> Sequence[int]:
    return range(metadata.total_num_frames)


def _sampled(sampler: Any, metadata: VideoMetadata) -> Sequence[int]:
    """The frames that a processor takes from a video: all, if it has no sampling options or the
    video is too short for them.
    """
    options = {name: getattr(sampler, name, None) for name in sampler.valid_kwargs.__annotations__}
    if not any(options.get(name) for name in SAMPLING):
        return _all(metadata)
    try:
        indices = sampler.sample_frames(metadata=metadata, **options)
    except ValueError:
        return _all(metadata)
    return [int(index) for index in indices] or _all(metadata)


def _of_frames(name: str, frames: np.ndarray, fps: float | None) -> Video:
    """A video of the ``frames`` [F, H, W, 3]."""
    count, height, width, _ = frames.shape
    rate = FPS if fps is None else fps
    metadata = VideoMetadata(count, rate, width, height, count / rate)

    def read(choose: Choice) -> Frames:
        return _picked(frames, metadata, list(choose(metadata)))

    return Video(name, read, given=True)


def _picked(frames: np.ndarray, metadata: VideoMetadata, indices: list[int]) -> Frames:
    picked = VideoMetadata(**{**vars(metadata), "frames_indices": indices})
    return frames[indices], picked


def _of_pictures(name: str, pictures: Sequence[Source], fps: float | None) -> Video:
    """A video of single ``pictures``; raises ``ValueError`` unless they have one size."""
    frames = [open_image(picture) for picture in pictures]
    sizes = {frame.size for frame in frames}
    if len(sizes) != 1:
        got = "none" if not sizes else " and ".join(f"{w} x {h}" for w, h in sorted(sizes)[:2])
        raise ValueError(f"{name} must hold frames of one size, got {got}")
    return _of_frames(name, np.stack([np.asarray(frame) for frame in frames]), fps)


def _frame_files(folder: Path) -> list[Path]:
    """The pictures in ``folder``, frame 2 before frame 10."""
    suffixes = endings()
    visible = (file for file in folder.iterdir() if not file.name.startswith("."))
    files = [file for file in visible if file.suffix.lower() in suffixes]
    return sorted(files, key=lambda file: [_number(part) for part in re.split(r"(\d+)", file.stem)])


def _number(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def _bytes(array: np.ndarray | Tensor) -> np.ndarray:
    """``array`` [F, H, W, 3] as bytes."""
    frames = array.cpu().numpy() if isinstance(array, Tensor) else array
    if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(
            f"video must be an array of frames, height, width and 3 colours, got {frames.shape}"
        )
    if frames.dtype == np.uint8:
        return frames
    if not np.issubdtype(frames.dtype, np.floating) or not 0 <= frames.min() <= frames.max() <= 1:
        raise ValueError(
            "video must be an array of bytes, or of numbers from 0 to 1, got "
            f"{frames.dtype} from {frames.min()} to {frames.max()}"
        )
    return (frames * 255).round().astype(np.uint8)


def _read_animation(path: Path, choose: Choice) -> Frames:
    """Frames of a GIF, WebP or APNG; its rate is one over the frames' mean duration."""
    try:
        return _frames_of(path, choose)
    except (OSError, EOFError, SyntaxError) as error:
        raise ValueError(
            f"{path} must be a whole video, got a damaged or truncated one ({error})"
        ) from error


def _frames_of(path: Path, choose: Choice) -> Frames:
    """The frames of an animation that ``choose`` picks by its metadata."""
    with Image.open(path) as image:
        count = int(getattr(image, "n_frames", 1))
        width, height = image.size
        seconds = 0.0
        for index in range(count):
            image.seek(index)
            seconds += image.info.get("duration", 0) / 1000
        fps = count / seconds if seconds else None
        metadata = VideoMetadata(count, fps, width, height, seconds or None, "pillow")
        indices = [int(index) for index in choose(metadata)]
        frames = []
        for index in indices:
            image.seek(index)
            frames.append(np.asarray(rgb(image.copy())))
    metadata.frames_indices = indices
    return np.stack(frames), metadata


def _read_file(path: Path, choose: Choice) -> Frames:
    """Frames of a video file, by the first installed package that can read it."""
    readers = [name for name, package in READERS.items() if importlib.util.find_spec(package)]
    if not readers:
        raise ValueError(
            f"reading {path} needs a package for videos, run: {install('video')} (or "
            "torchcodec); or give its frames, as a GIF, a folder or a list of pictures"
        )
    reasons = []
    for name in readers:
        try:
            film: Any = str(path)
            frames, metadata = load_video(film, backend=name, sample_indices_fn=choose)
            if not len(frames) or len(frames) != len(metadata.frames_indices):
                raise ValueError(f"only {len(frames)} of the chosen frames can be read")
            return np.asarray(frames), metadata
        except (torch.OutOfMemoryError, TooLarge):
            raise
        except Exception as error:  # each package fails in its own way
            reasons.append(f"{name}: {' '.join(str(error).split())}")
    raise ValueError(f"{path} must be a video, got one that cannot be read ({'; '.join(reasons)})")
