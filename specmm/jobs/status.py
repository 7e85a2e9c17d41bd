"""How far a job is, from its folder alone: any machine that sees the folder may ask."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from specmm.jobs.folder import ITEMS, JOURNALS, decided, read_spec
from specmm.jobs.journal import Ledger

LATELY = 600.0  # seconds whose results give the rate


def status(folder: Path) -> dict[str, Any]:
    """Items, those done and set aside, results a second lately, seconds since the last result, and
    seconds left at that rate (None: nothing was made lately).

    Raises ``ValueError`` where ``folder`` has no job.
    """
    spec = read_spec(folder)
    known = Ledger(folder / JOURNALS)
    done = known.count_done()
    items = max(decided(folder)[ITEMS], len(known))
    now = time.time()
    lately = known.since(now - LATELY)
    rate = sum(count / max(now - first, 1.0) for count, first, _ in lately)
    last = max((moment for _, _, moment in known.since(0)), default=None)
    return {
        "model": spec.model,
        "method": spec.method,
        "items": items,
        "done": done,
        "failed": len(known) - done,
        "left": (left := items - len(known)),
        "rate": rate,
        "workers": len(lately),
        "seconds_since_last": None if last is None else now - last,
        "seconds_left": left / rate if rate else None,
    }
