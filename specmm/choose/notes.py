"""Measurements that later processes reuse, as JSON files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from specmm.loading.files import write_whole
from specmm.programs import program_cache

T = TypeVar("T")


class Notes:
    """The numbers stored in the folder ``place`` under ``key``, whose ``repr`` must contain
    everything they depend on; without a ``place`` nothing is stored.
    """

    def __init__(self, place: Path | None = None, key: object = "") -> None:
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        self.file = None if place is None else place / f"{name}.json"

    @classmethod
    def of_machine(cls, kind: str, key: object) -> Notes:
        """Notes of one ``kind`` about this machine, in the folder of its compiled programs."""
        try:
            folder = program_cache.root() / f"{program_cache.machine()}-{kind}"
        except RuntimeError:  # nobody has a home
            folder = None
        return cls(folder, key)

    def read(self, parse: Callable[[Any], T]) -> T | None:
        """The file's value, converted by ``parse``; None if the file is missing or damaged."""
        if self.file is None:
            return None
        try:
            return parse(json.loads(self.file.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, content: Any) -> None:
        """Write ``content``; a failure is ignored, since the numbers can be measured again."""
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps(content).encode())
        except OSError:
            self.file = None


def sizes_of(network: nn.Module) -> tuple[Any, ...]:
    """The facts about ``network`` on which its speed depends: class, size, dtype and device."""
    weight = next(network.parameters())
    count = sum(x.numel() for x in network.parameters())
    return type(network).__name__, count, weight.dtype, str(weight.device)
