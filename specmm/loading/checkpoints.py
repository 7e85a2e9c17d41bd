"""Model files: read safely, and loaded completely or not at all.

``read_checkpoint`` opens safetensors and PyTorch files (tensors only: a pickle that wants to run
code is refused). ``load_strict`` checks every name, shape and value before it copies the first one;
a module made without weights (:mod:`specmm.loading.mapped`) is filled in the wanted dtype.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specmm.loading import mapped

State = dict[str, Tensor]

NESTING = ("model", "module", "state_dict")
LEFTOVERS = ("freqs_cis", "kv_cache", "causal_mask")
FOLDER_NAMES = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
LINKED = ("model.pt", "model.pth", "model.ckpt")  # releases' files in a folder of ours
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHOWN = 3
SIGNS = 2048  # weights read of each tensor of a fingerprint


class FileError(ValueError):
    """An error about ``file``; the sentence ``said`` follows its name."""

    def __init__(self, file: str | Path, said: str) -> None:
        super().__init__(file, said)  # as given, so that it is whole in another process, too
        self.file = file
        self.said = said

    def __str__(self) -> str:
        return f"{self.file} {self.said}"


def read_checkpoint(path: str | Path, nesting: Sequence[str] = NESTING) -> State:
    """The tensors of a checkpoint by name, on the CPU, in the file's dtypes, mapped from the file.

    ``path`` is a ``.safetensors`` or PyTorch file, or a folder that holds one. A PyTorch file may
    nest its tensors under the first existing name of ``nesting``. Raises ``FileNotFoundError``, and
    ``ValueError`` for a file that is damaged, holds no tensors, or can be read only by running
    code.
    """
    file = weights_file(path)
    if file.suffix == ".safetensors":
        state = _read_safetensors(file)
    elif file.suffix in PICKLED:
        state = _unnest(_read_pickle(file), file, nesting)
    else:
        raise ValueError(
            f"checkpoint must end in .safetensors or one of {', '.join(PICKLED)}, got {file}"
        )
    mapped.mark(state.values(), file)
    return state


def weights_file(path: str | Path) -> Path:
    """``path``, or the weights inside it if it is a folder. Raises ``FileNotFoundError``."""
    path = Path(path)
    names = (*FOLDER_NAMES, *LINKED)
    candidates = [path / name for name in names] if path.is_dir() else [path]
    for file in candidates:
        if file.is_file():
            return file
    looked = f" (looked for {', '.join(FOLDER_NAMES)})" if path.is_dir() else ""
    raise FileNotFoundError(f"no checkpoint at {path}{looked}")


def stored_dtype(files: Iterable[Path]) -> torch.dtype | None:
    """The dtype of all weights in safetensors ``files``, from their headers; None if there are
    none, they differ, or a header cannot be read.
    """
    dtypes = set()
    for file in files:
        try:
            with safe_open(file, "pt") as weights:
                names = weights.keys()
                dtypes |= {weights.get_slice(name).get_dtype() for name in names}
        except (OSError, SafetensorError):  # whoever reads it says what is wrong
            return None
    return STORED.get(dtypes.pop()) if len(dtypes) == 1 else None


def _read_safetensors(file: Path) -> State:
    file.open("rb").close()  # an unreadable file raises as such
    try:
        state: State = load_file(file)
    except Exception as error:
        raise _damaged(file) from error
    return state


def _read_pickle(file: Path) -> object:
    """The content of a PyTorch ``file``, of which only tensors and options are loaded."""
    file.open("rb").close()
    try:
        # LlamaGen's training saves its options beside the tensors
        with torch.serialization.safe_globals([argparse.Namespace]):
            # files of before PyTorch 1.6 are no archives, and cannot be mapped
            archive = zipfile.is_zipfile(file)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=archive)
    except Exception as error:  # a damaged file makes the unpickler fail in any way
        raise no_tensors(file, error) or _damaged(file) from error


def no_tensors(source: str | Path, error: Exception) -> FileError | None:
    """The error for a ``source`` whose pickle asks torch to run code; None for other errors."""
    name = re.search(r"GLOBAL (\S+)", str(error))
    if name is None or not isinstance(error, pickle.UnpicklingError):
        return None
    return FileError(
        source,
        f"must hold tensors only, got a pickle that asks for {name[1]}, convert it to "
        "safetensors if you trust it",
    )


def _damaged(file: Path) -> FileError:
    size = file.stat().st_size
    return FileError(
        file,
        f"must be a whole {file.suffix} file, it is damaged or incomplete ({size} bytes), fetch it "
        "again",
    )


def _unnest(tree: object, file: Path, nesting: Sequence[str]) -> State:
    """Descend repeatedly into the first of ``nesting`` that is a dictionary."""
    while isinstance(tree, Mapping):
        inner = next((tree[name] for name in nesting if isinstance(tree.get(name), Mapping)), None)
        if inner is None:
            break
        tree = inner
    if isinstance(tree, Mapping) and tree and all(isinstance(t, Tensor) for t in tree.values()):
        return dict(tree)
    names = ", ".join(nesting)
    raise FileError(file, f"must hold tensors by name (raw or under {names}), got {_kind(tree)}")


def _kind(tree: object) -> str:
    if not isinstance(tree, Mapping):
        return f"a {type(tree).__name__}"
    others = [str(name) for name, value in tree.items() if not isinstance(value, Tensor)]
    return f"other things named {some_names(others)}" if others else "nothing"


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; raises ``ValueError`` naming the file if it holds none."""
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, got: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold an object, got a {type(content).__name__}")
    return content


def embeddings_of(model: Any) -> Tensor:
    """The input embeddings [V, C] of a ``model`` of transformers."""
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def fingerprint(*weights: Tensor) -> str:
    """Twelve hexadecimal digits that tell models apart by some of their weights.

    Hashes shapes and the signs of at most SIGNS evenly spaced entries, so that a copy in another
    dtype has the same fingerprint.
    """
    return hashlib.sha256(b"".join(_signs(w) for w in weights)).hexdigest()[:12]


def check_fingerprint(found: str | None, wanted: str, source: object) -> None:
    """Raise ``ValueError`` unless ``found``, the fingerprint in ``source``, is ``wanted``."""
    if found != wanted:
        raise ValueError(
            f"drafter must be of this target ({wanted}), got one of {found} in {source}; "
            "use its own"
        )


def _signs(weight: Tensor) -> bytes:
    flat = weight.detach().flatten()
    signs = (flat[:: -(-len(flat) // SIGNS)] < 0).cpu().numpy().tobytes()
    return f"{list(weight.shape)}".encode() + signs


def load_strict(
    module: nn.Module,
    state: Mapping[str, Tensor],
    ignore: Collection[str] = LEFTOVERS,
    source: str | Path = "checkpoint",
    dtype: torch.dtype | None = None,
) -> None:
    """Copy ``state`` into ``module``, or raise one ``ValueError`` that names all problems.

    Problems are missing, unexpected and misshapen tensors, integers instead of floating-point
    weights, and NaN or infinite weights; then nothing is copied. Names that the module lacks are
    skipped if one of their dotted components is in ``ignore``. A module made without weights gets
    its parameters in ``dtype``.
    """
    named = module.state_dict()
    state = {k: v for k, v in state.items() if k in named or not set(k.split(".")) & set(ignore)}
    shapes = [
        f"{k} {list(state[k].shape)} for {list(v.shape)}"
        for k, v in named.items()
        if k in state and state[k].shape != v.shape
    ]
    expected = [
        f"{k} {state[k].dtype}"
        for k, v in named.items()
        if k in state and v.is_floating_point() and not state[k].is_floating_point()
    ]
    problems = {
        "missing": [k for k in named if k not in state],
        "unexpected": [k for k in state if k not in named],
        "wrong-shaped": shapes,
        "of whole numbers": expected,
    }
    check_names(problems, type(module).__name__, source)
    check_weights(state, source)
    if mapped.unfilled(module):
        mapped.fill(module, state, dtype)
    else:
        module.load_state_dict(state)


def check_names(
    problems: Mapping[str, Sequence[str]],
    kind: str,
    source: str | Path,
    advice: str = "use the file of this model",
) -> None:
    """Raise one ``ValueError`` for all names in ``problems``, grouped by problem, if any."""
    if any(problems.values()):
        differences = "; ".join(
            f"{len(names)} {what}: {some_names(names)}" for what, names in problems.items() if names
        )
        raise FileError(
            source, f"must hold exactly the weights of the {kind}, got {differences}; {advice}"
        )


def check_weights(state: Mapping[str, Tensor], source: str | Path = "checkpoint") -> None:
    """Raise ``ValueError`` naming the tensors of ``state`` that hold NaN or infinity."""
    bad = [k for k, v in state.items() if v.is_floating_point() and v.numel() and not _finite(v)]
    if bad:
        raise FileError(
            source, f"must hold finite weights, got NaN or infinity in {some_names(bad)}"
        )


def _finite(x: Tensor) -> bool:
    finite = bool(torch.stack(x.aminmax()).isfinite().all())
    mapped.give_back(x)
    return finite


def some_names(names: Collection[str]) -> str:
    """The first of ``names``, and how many more there are."""
    others = len(names) - SHOWN
    return ", ".join(list(names)[:SHOWN]) + (f" and {others} more" if others > 0 else "")


def save_readable(tensors: dict[str, Tensor], file: str | Path, metadata: dict[str, str]) -> None:
    """Write a safetensors ``file`` with usual permissions, which the library would restrict."""
    file = Path(file)
    before = file.with_name(f"{file.name}.mode")
    before.touch()
    save_file(tensors, file, metadata)
    file.chmod(before.stat().st_mode)
    before.unlink()


def write_checkpoint(
    state: Mapping[str, Tensor],
    facts: Mapping[str, object],
    folder: str | Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``state`` as ``model.safetensors``, floating-point tensors in ``dtype`` if given, and
    ``facts`` as ``config.json``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in state.items():
        file_dtype = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", file_dtype).contiguous()
    save_readable(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
