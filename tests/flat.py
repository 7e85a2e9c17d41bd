"""Items of a job, and workers that draw flat pictures for them, quickly."""

from __future__ import annotations  # a worker travels to an actor without the names in its hints

import os
import time
from pathlib import Path
from typing import Any

from specmm.jobs.items import Item, seed_of


def some(count: int) -> list[Item]:
    return [Item(f"set/{i}", "class", "heart", seed_of(str(i), 0)) for i in range(count)]


def drawing(
    fatal: str = "", seconds: float = 0.0, until: Path | None = None, deaths: Path | None = None
) -> Any:
    """An opener of a worker that draws flat pictures in so many ``seconds`` a batch, dies at the
    item ``fatal`` (alone it notes its node in ``deaths``), and waits ``until`` a file is there,
    beside which it lays one of its own.

    It is made here, so that it travels to the actor.
    """

    def opener(*_: object) -> Any:
        from PIL import Image

        from specmm.jobs.results import Result

        class Flat:
            network = None

            def check(self, item: Item) -> None:
                pass

            def key(self, item: Item) -> int:
                return 0

            def turns(self, item: Item) -> int:
                return 1

            def run(self, items: list[Item], rows: int = 0) -> list[Result]:
                time.sleep(seconds)
                if until is not None:
                    until.with_name(f"waits-{os.getpid()}").touch()
                while until is not None and not until.exists():
                    time.sleep(0.1)
                if any(i.id == fatal for i in items):
                    if deaths is not None and len(items) == 1:
                        import ray

                        with deaths.open("a") as file:
                            file.write(f"{ray.get_runtime_context().get_node_id()}\n")
                    os._exit(1)
                stats = {"tokens": 1, "tau": 1.0, "seconds": 0.1, "batch": len(items)}
                claim = {"kind": "exact", "reason": "", "tv": 0.0}
                facts = {"method": "ar", "certificate": claim, "stats": stats}
                return [
                    Result(i, facts, image=Image.new("RGB", (4, 4), i.seed % 2**24)) for i in items
                ]

        return Flat()

    return opener
