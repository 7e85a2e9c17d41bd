"""Texts to learn from: Python source code, split into training and held-out files, or a user's own.

The code is the standard library and installed packages. Whether a file is held out depends only on
its name, so all commands and machines split alike. All of a user's texts are trained on.

Shape letters: T tokens of all files, B rows, L tokens of a row.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.loading.files import files_below
from specmm.recipes.loop import kept

PACKAGES = (
    "networkx",
    "jinja2",
    "fsspec",
    "huggingface_hub",
    "typer",
    "rich",
    "click",
    "packaging",
    "filelock",
)
SKIPPED = {
    "test",
    "tests",
    "testing",
    "idle_test",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "_vendor",
}
HELD_OUT = 40  # one file in this many is held out
LONGEST = 200_000  # characters; longer files are tables


def find_files() -> dict[str, Path]:
    """Python files of the standard library and PACKAGES by name ("json/decoder.py"), no tests.

    Raises ``ValueError`` for a package that is not installed.
    """
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    files = {path.relative_to(roots[0]).as_posix(): path for path in _python(roots[0])}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"package {package!r} must be installed to learn from it, got none of that name"
            )
        root = Path(spec.submodule_search_locations[0])
        files |= {f"{package}/{path.relative_to(root).as_posix()}": path for path in _python(root)}
    return files


def _python(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(set(below) - SKIPPED)
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".py"))


def is_held_out(name: str) -> bool:
    """Whether the file ``name`` is held out for measuring."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % HELD_OUT == 0


def read_files(held_out: bool) -> dict[str, str]:
    """Source code by file name, of one side of the split.

    Without duplicates and without empty, undecodable and overlong files.
    """
    names = _texts(find_files())
    chosen = {text: name for text, name in names.items() if is_held_out(name) == held_out}
    return {name: text for text, name in chosen.items() if len(text) <= LONGEST}


def given_texts(places: Sequence[Path]) -> dict[str, str]:
    """The texts of the files and folders ``places``, by path, none held out, without duplicates.

    Empty and undecodable files are left out. Raises ``ValueError`` for a place without any text.
    """
    texts: dict[str, str] = {}
    for place in places:
        below = files_below(str(place)) if place.is_dir() else [(str(place), "")]
        files = [Path(file) for file, reason in below if not reason]
        if not files or not files[0].exists():
            raise ValueError(f"text must be a file or a folder of files, got nothing at {place}")
        read = _texts({file.as_posix(): file for file in files})
        if not read:
            raise ValueError(
                f"text must be readable as UTF-8 and not empty, got none at {place}; "
                "give other text"
            )
        texts |= read
    return {name: text for text, name in texts.items()}


def _texts(files: Mapping[str, Path]) -> dict[str, str]:
    """The names of ``files`` by their text, without duplicate, empty and undecodable texts."""
    texts: dict[str, str] = {}
    for name, path in files.items():
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            texts.setdefault(text, name)
    return texts


def token_stream(texts: Iterable[str], tokenizer: Any) -> Tensor:
    """All ``texts`` as one row of ids [T], int32, an end token after each."""
    batch = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor(
        [i for ids in batch for i in (*ids, tokenizer.eos_token_id)], dtype=torch.int32
    )


def text_stream(
    tokenizer: Any, out: Path, given: Sequence[Path] = (), held_out: bool = False
) -> Tensor:
    """The tokens [T] of the ``given`` texts, or of one side of the split of source code; stored in
    ``out`` for later use.

    Raises ``ValueError`` for a given place without text.
    """
    texts = given_texts(given) if given else read_files(held_out)
    facts = repr((sorted(tokenizer.get_vocab().items()), list(texts.items())))
    key = hashlib.sha256(facts.encode()).hexdigest()
    file = out / f"{'held-out' if held_out else 'tokens'}.pt"
    return kept(file, lambda: token_stream(texts.values(), tokenizer), key)


def split(stream: Tensor, share: float, length: int, least: int) -> tuple[Tensor, Tensor]:
    """``stream`` [T] without its last ``share``, and that share, of at least ``least`` tokens.

    Raises ``ValueError`` if no row of ``length`` is left.
    """
    end = len(stream) - max(round(share * len(stream)), least)
    if end < length:
        raise ValueError(
            f"texts must hold at least {length} tokens and some to measure on, got {len(stream)}; "
            "give more text"
        )
    return stream[:end], stream[end:]


@dataclass(frozen=True)
class Rows(Sequence[Tensor]):
    """Rows of L = ``length`` tokens of ``stream`` [T] that begin at ``starts`` [R]."""

    stream: Tensor
    starts: Tensor
    length: int

    @classmethod
    def of(cls, stream: Tensor, count: int, length: int, seed: int) -> Rows:
        """``count`` rows of ``stream``: each epoch cuts it at other places, in another order."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.empty(0, dtype=torch.long)
        while len(starts) < count:
            most = min(length, len(stream) - length + 1)
            first = int(torch.randint(most, (), generator=generator))
            more = torch.arange(first, len(stream) - length + 1, length)
            starts = torch.cat([starts, more[torch.randperm(len(more), generator=generator)]])
        return cls(stream, starts[:count], length)

    def after(self, first: Tensor) -> Rows:
        """The rows ``first`` [N, L], followed by these rows without the first N."""
        stream = torch.cat([first.flatten().to(self.stream), self.stream])
        starts = torch.arange(0, first.numel(), self.length)
        rest = self.starts[len(first) :] + first.numel()
        return Rows(stream, torch.cat([starts, rest]), self.length)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        """Row ``index`` [L], or the rows of a slice [N, L]."""
        starts = self.starts[index]
        return self.stream[starts[..., None] + torch.arange(self.length)].long()

    def said(self) -> Tensor:
        """How often each token [V] occurs in the rows."""
        counts = torch.zeros(int(self.stream.max()) + 1, dtype=torch.long)
        for i in range(0, len(self), 1024):
            counts += self[i : i + 1024].flatten().bincount(minlength=len(counts))
        return counts


def windows(stream: Tensor, step: int, batch: int, length: int, seed: int) -> Tensor:
    """The rows [B, L] of ``step``, from anywhere in ``stream`` [T].

    Raises ``ValueError`` for a stream that is too short.
    """
    if len(stream) < length:
        raise ValueError(
            f"texts must hold at least {length} tokens, got {len(stream)}; give more text"
        )
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(stream) - length + 1, (batch, 1), generator=generator)
    return stream[starts + torch.arange(length)].long()
