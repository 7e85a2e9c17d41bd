"""How an image model is meant to be sampled, and what the user may say instead: classes, options, seeds, dtype."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specmm.checkpoints import read_json
from specmm.registry import unknown

FILE = "settings.json"
LARGE = 50_000_000  # parameters: their float32 weights no longer stay in a processor's caches


@dataclass(frozen=True)
class Settings:
    """Recommended sampling, class names by id, recommended trees (children by level) by method, and the block
    drafter's acceptance by level and rank [D, K] (the chance that this child is the one kept).
    """

    cfg: float = 1.0
    cfg_interval: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    classes: tuple[str, ...] = ()
    trees: dict[str, tuple[int, ...]] = field(default_factory=dict)
    acceptance: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Those beside a model, or the defaults."""
        file = folder / FILE
        if not file.exists():
            return cls()
        found = read_json(file)
        for key in found.keys() - {f.name for f in dataclasses.fields(cls)}:
            raise unknown(f"setting in {file}", key, (f.name for f in dataclasses.fields(cls)))
        found["classes"] = tuple(found.get("classes", ()))
        found["trees"] = {k: tuple(v) for k, v in found.get("trees", {}).items()}
        found["acceptance"] = tuple(tuple(row) for row in found.get("acceptance", ()))
        return cls(**found)

    def write(self, folder: Path) -> None:
        """Write them beside a model."""
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def with_options(self, **options: Any) -> Settings:
        """These settings with every option that is not None in place of its own."""
        return dataclasses.replace(self, **{k: v for k, v in options.items() if v is not None})


def class_ids(wanted: Sequence[str | int], names: Sequence[str], count: int) -> list[int]:
    """Ids of class names or ids (also as text, "3"); raises ``ValueError`` with a suggestion for an unknown one."""
    ids = []
    for item in wanted:
        if str(item).isdecimal():
            if int(item) >= count:
                raise ValueError(f"class id must be below {count}, got {item}")
            ids.append(int(item))
        elif item in names:
            ids.append(list(names).index(str(item)))
        else:
            raise unknown("class", item, names)
    return ids


def sample_generators(
    given: torch.Generator | Sequence[torch.Generator] | None, count: int, device: torch.device
) -> list[torch.Generator]:
    """One generator a picture: those given, or new ones seeded from the one given (or from fresh entropy)."""
    if isinstance(given, Sequence):
        if len(given) != count:
            raise ValueError(f"generator must be one or one for each of the {count} pictures, got {len(given)}")
        return list(given)
    source = given or torch.Generator()
    if given is None:
        source.seed()
    seeds = torch.randint(2**62, (count,), generator=source, device=source.device).tolist()
    return [torch.Generator(device).manual_seed(s) for s in seeds]


def choose_dtype(parameters: int = 0) -> torch.dtype:
    """The dtype a step is fastest in here, for a model of so many ``parameters``.

    On a CPU bfloat16 pays once a step is bound by reading the weights; below that its matrix kernels cost more a call
    than float32's (pocket/llamagen on two cores with AMX: 4.9 ms a step against 2.9 ms).
    """
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    large = parameters >= LARGE and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if large else torch.float32
