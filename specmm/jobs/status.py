"""How far a job is, from its folder alone: any machine that sees the folder may ask."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from specmm.jobs.folder import JOURNALS, Ledger, read_spec
from specmm.jobs.programs import items_of_job

LATELY = 600.0  # seconds whose results give the rate


def status(folder: Path) -> dict[str, Any]:
    """Items, those done and set aside, results a second lately, seconds since the last result, and
    seconds left at that rate (None: nothing was made lately).

    Raises ``ValueError`` where ``folder`` has no job.
    """
    spec = read_spec(folder)
    known = Ledger(folder / JOURNALS)
    done = sum(map(known.is_done, known))
    items = max(items_of_job(folder), len(known))
    now = time.time()
    # each journal is in the order of time, and its latest lines are known
    lately = [[at for at in recent if now - at < LATELY] for recent in known.recent]
    rate = sum(len(each) / max(now - each[0], 1.0) for each in lately if each)
    last = max((recent[-1] for recent in known.recent if recent), default=None)
    return {
        "model": spec.model,
        "method": spec.method,
        "items": items,
        "done": done,
        "failed": len(known) - done,
        "left": (left := items - len(known)),
        "rate": rate,
        "workers": sum(map(bool, lately)),
        "seconds_since_last": None if last is None else now - last,
        "seconds_left": left / rate if rate else None,
    }
