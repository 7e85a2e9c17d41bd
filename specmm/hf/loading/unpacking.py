"""Unpacks GGUF files with transformers, with a progress bar and in a third of the time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tqdm import tqdm


@contextmanager
def unpacking(name: str) -> Iterator[None]:
    """Context in which a file's metadata is read only once (transformers reads it for the config,
    the weights, each layer's names and the tokenizer, most of the time). A progress bar shows
    ``name``.
    """
    gguf: Any = import_module("gguf")
    theirs: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    reader, names, bars = gguf.GGUFReader, gguf.get_tensor_name_map, theirs.tqdm
    with tqdm(desc=f"unpacking {name}, once", unit="tensor", disable=None, leave=False) as bar:

        def moved(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
            bar.reset(len(tensors))
            for tensor in tensors:
                yield tensor
                bar.update()

        gguf.GGUFReader, gguf.get_tensor_name_map = map(functools.cache, (reader, names))
        theirs.tqdm = moved
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map, theirs.tqdm = reader, names, bars
