"""Thousands of pictures in one process: ``python -m benchmarks.soak.generations --model FOLDER``.

Memory and open files are recorded; after the first tenth, which warms caches, neither may grow.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import torch

ROOM = 8.0  # MB that the allocator may keep to itself


def resident() -> float:
    """Memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def handles() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def soak(model: str, count: int, methods: list[str]) -> dict[str, Any]:
    """Draw ``count`` pictures by ``methods`` in turn; raises when memory or handles grow."""
    from specmm.image_ar.pipeline import ImagePipeline

    pipe = ImagePipeline.from_pretrained(model, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    classes = pipe.transformer.config.num_classes
    marks = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        pipe(classes=[i % classes], generator=generator, method=methods[i % len(methods)])
        if (i + 1) % max(count // 20, 1) == 0:
            gc.collect()
            marks.append(
                {"generations": i + 1, "megabytes": round(resident(), 1), "handles": handles()}
            )
    settled = marks[1]
    last = marks[-1]
    grown = last["megabytes"] - settled["megabytes"], last["handles"] - settled["handles"]
    if grown[0] > ROOM or grown[1] > 0:
        raise AssertionError(f"grew by {grown[0]:.1f} MB and {grown[1]} handles: {marks}")
    return {
        "model": model,
        "methods": methods,
        "generations": count,
        "grown_megabytes": grown[0],
        "marks": marks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pocket/llamagen")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--methods", default="ar,speculative,lantern++")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    text = json.dumps(soak(given.model, given.count, given.methods.split(",")), indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
