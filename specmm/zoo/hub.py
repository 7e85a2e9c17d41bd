"""Downloads from a hub: only the files needed, checked, and large ones only with consent.

Files are stored in huggingface_hub's cache, which resumes broken downloads and serves files without
a network (``HF_HUB_OFFLINE``); ``HF_ENDPOINT`` names another hub.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmm.extending.registry import unknown

AGREED = "SPECMM_DOWNLOAD"  # set to 1, large downloads need no other word
LARGE = 10**9  # bytes from which a download must be agreed to
CHUNK = 2**24
SHA256 = re.compile(r"[0-9a-f]{64}")
# Files of transformers and diffusers models, preferred kinds of weights first
SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.yaml")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")
UNUSED = ("original/*", "consolidated*", "*training_args*", "optimizer*", "runs/*", "onnx/*")


@dataclass(frozen=True)
class Source:
    """How to look up a name: the ``file`` of a repository, its ``revision``, the cache's folder,
    and whether the user agreed to a large ``download``.
    """

    file: str | None = None
    revision: str | None = None
    cache_dir: str | Path | None = None
    download: bool = False

    @property
    def agreed(self) -> bool:
        """Whether the user agreed to fetch large files."""
        return self.download or os.environ.get(AGREED, "").lower() in ("1", "true", "yes")


@dataclass(frozen=True)
class Wanted:
    """``files`` of a repository, by exact names (empty: all files of its model). They have about
    ``bytes`` bytes (0: unknown, None: not looked up).
    """

    repository: str
    files: tuple[str, ...] = ()
    revision: str | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Found:
    """The result of looking for ``wanted``: ``files`` as listed by the hub or, if the hub cannot be
    reached (``reason``), the ``folder`` in the cache and the files ``absent`` there.
    """

    wanted: Wanted
    files: tuple[Any, ...] = ()
    folder: Path | None = None
    absent: tuple[str, ...] = ()
    reason: BaseException | None = None

    def lacks(self, name: str) -> str:
        """The absent files, their size, and their repository if it is not ``name``."""
        repository = self.wanted.repository
        of = "" if repository == name else f" of {repository}"
        return f"{', '.join(self.absent)}{told(self.wanted.bytes)}{of}"

    @property
    def missing(self) -> list[Any]:
        """The files that would be downloaded."""
        return [file for file in self.files if file.will_download]


def fetch(name: str, everything: Sequence[Wanted], source: Source) -> list[Path]:
    """The cache folders with ``everything`` wanted of each repository, downloaded if needed.

    Raises ``ValueError`` for a repository or file that the hub does not have, an unreachable hub,
    more than ``LARGE`` bytes without the user's consent, and files that arrived damaged.
    """
    lookups = [_look(name, wanted, source) for wanted in everything]
    _check_cached(name, lookups, source)
    _check_agreed(name, [file for lookup in lookups for file in lookup.missing], source)
    return [lookup.folder or _take(name, lookup, source) for lookup in lookups]


def _look(name: str, wanted: Wanted, source: Source) -> Found:
    """Look ``wanted`` up on the hub, or in the cache if the hub does not answer."""
    from huggingface_hub import errors

    answers = (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
    )
    files: list[Any] = []
    try:
        if wanted.files:
            files = _hub_files(wanted, wanted.files, source)
        else:
            kinds = (_hub_files(wanted, (pattern,), source) for pattern in WEIGHTS)
            files = [*_hub_files(wanted, SMALL, source), *next(filter(None, kinds), [])]
    except answers as error:
        raise _explained(name, wanted, source, error) from error
    except Exception as error:  # the network's errors differ by client and place
        return _cached(wanted, source, error.__cause__ or error)
    names = {file.filename for file in files}
    absent = [file for file in wanted.files if file not in names]
    if absent or not names:
        raise ValueError(
            f"{wanted.repository} must hold {', '.join(absent) or 'a model'}, the hub has "
            "no such file; check the name and the revision"
        )
    return Found(wanted, tuple(files))


def _hub_files(wanted: Wanted, patterns: Sequence[str], source: Source) -> list[Any]:
    """The hub's files that match ``patterns``, with their sizes; fetches nothing."""
    ignored = None if wanted.files else list(UNUSED)
    return list(_snapshot(wanted, source, patterns, ignore_patterns=ignored, dry_run=True))


def _snapshot(wanted: Wanted, source: Source, patterns: Sequence[str], **options: Any) -> Any:
    """The hub's snapshot of the files that match ``patterns``; quiet if nothing is fetched."""
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm

    class Quiet(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

    if options.get("dry_run"):
        options["tqdm_class"] = Quiet
    return snapshot_download(
        wanted.repository,
        revision=source.revision or wanted.revision,
        cache_dir=source.cache_dir,
        allow_patterns=list(patterns),
        **options,
    )


def _check_agreed(name: str, missing: Sequence[Any], source: Source) -> None:
    """Raise ``ValueError`` for large ``missing`` files without the user's consent."""
    size = sum(file.file_size or 0 for file in missing)
    if size < LARGE or source.agreed:
        return
    files = ", ".join(f"{file.filename} ({_gigabytes(file.file_size or 0)})" for file in missing)
    raise ValueError(
        f"{name} must be fetched first, {_gigabytes(size)} are missing: {files}; agree with: "
        f"specmm fetch {name}, download=True or {AGREED}=1"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _take(name: str, found: Found, source: Source) -> Path:
    """Download the missing files of ``found``, and check them."""
    names = [file.filename for file in found.files]
    missing = [file.filename for file in found.missing]
    try:
        folder = Path(_snapshot(found.wanted, source, names))
    except Exception as error:
        raise _explained(name, found.wanted, source, error) from error
    for file in missing:
        blob = (folder / file).resolve()
        if SHA256.fullmatch(blob.name):  # large files are kept under their hash
            check_sha256(blob, blob.name, f"{found.wanted.repository}/{file}")
    return folder


def check_sha256(file: Path, wanted: str, name: str) -> None:
    """Raise ``ValueError``, and remove ``file``, unless it has the hash that is ``wanted``."""
    hashed = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(CHUNK):
            hashed.update(part)
    if hashed.hexdigest() != wanted:
        file.unlink()
        raise ValueError(
            f"{name} must have the SHA-256 {wanted}, got {hashed.hexdigest()}; it was removed, "
            "fetch it again"
        )


def check_release(folder: Path, file: str, sha256: str) -> None:
    """Raise ``ValueError`` if the hub says that ``file`` does not have the hash ``sha256``."""
    blob = (folder / file).resolve().name
    if sha256 and SHA256.fullmatch(blob) and blob != sha256:
        raise ValueError(
            f"{file} must be the release's ({sha256[:12]}…), the hub has another ({blob[:12]}…); "
            "give its revision"
        )


def _cached(wanted: Wanted, source: Source, reason: BaseException) -> Found:
    """Look ``wanted`` up in the cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    needed = wanted.files or ("config.json", "model_index.json")
    try:
        folder = Path(_snapshot(wanted, source, needed, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        return Found(wanted, absent=wanted.files or ("its files",), reason=reason)
    absent = tuple(file for file in wanted.files if not (folder / file).is_file())
    return Found(wanted, folder=folder, absent=absent, reason=reason)


def _check_cached(name: str, files: Sequence[Found], source: Source) -> None:
    """Raise ``ValueError`` for files that the cache lacks while the hub cannot be reached."""
    lacking = [lookup for lookup in files if lookup.absent]
    if lacking:
        first = lacking[0]
        assert first.reason is not None
        lacks = ", ".join(lookup.lacks(name) for lookup in lacking)
        raise _explained(name, first.wanted, source, first.reason, lacks) from first.reason


def _explained(
    name: str, wanted: Wanted, source: Source, error: BaseException, lacks: str = ""
) -> ValueError:
    """``error`` of the hub as one line; ``lacks`` names the files absent from the cache."""
    from huggingface_hub import constants, errors

    repository = wanted.repository
    if isinstance(error, errors.GatedRepoError):
        return ValueError(
            f"{repository} must be asked for: accept its licence at "
            f"{constants.ENDPOINT}/{repository}, then log in with: hf auth login"
        )
    if isinstance(error, errors.HFValidationError):
        return ValueError(
            f"model {name!r} is no folder, no pocket model and no published name (specmm zoo, "
            "specmm zoo --published), and cannot be a hub's id; check the name"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return _not_found(name, repository)
    if isinstance(error, errors.RevisionNotFoundError):
        revision = source.revision or wanted.revision
        return ValueError(f"revision must be one of {repository}'s, got {revision!r}; check it")
    why = "HF_HUB_OFFLINE is set" if _offline(error) else type(error).__name__
    also = f", and the cache lacks {lacks}" if lacks else ""
    return ValueError(
        f"model {name!r} could not be fetched: the hub {constants.ENDPOINT} cannot be reached "
        f"({why}){also}; check the name or the network, or name a folder"
    )


def told(size: int | None) -> str:
    """An approximate ``size`` in bytes (0: unknown) as text to put after a name."""
    if size is None:
        return ""
    return f" (about {size / 1e9:.1f} GB)" if size else " (of unknown size)"


def _offline(error: BaseException) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled)


def _not_found(name: str, repository: str) -> ValueError:
    """The error for a ``repository`` that the hub lacks."""
    from specmm.zoo.published import published_models

    repositories = {one for model in published_models().values() for one in model.repositories}
    return unknown("model of the hub", repository, repositories | set(published_models()))
