"""The bars of drafters that others trained, and of those that were trained beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.bars import Bar, at_least, measured
from benchmarks.common import Row
from benchmarks.language_bars import DESCRIBE, fastest, part

FEATURES = ("msd", "eagle3")
TEXT = ("block", "eagle3", "deer", "mtp")
OVER_THEIRS = 1.15  # times as fast as transformers' own assisted generation
OVER_PLAIN = 0.97  # in batches
DRAFTS = 1.05  # tokens a round of one that drafts at all


def drafter_bars(rows: Mapping[str, Sequence[Row]]) -> list[Bar]:
    """Of the pocket models, then of each drafter beside transformers."""
    llava = rows["vlm_speed_llava"]
    smollava = part(rows["vlm_speed_smollava"], DESCRIBE, 0, 1)
    prose = part(rows["text_speed_smollm2"], "prose", 0, 1)
    code = part(rows["text_speed_coder"], "code", 1, 1)
    greedy = part(llava, DESCRIBE, 0, 1)
    sampled = part(llava, DESCRIBE, 1, 1)
    return [
        fastest(greedy, FEATURES, "pocket/llava, MSD or EAGLE-3, greedy", 2.5, equal=True),
        fastest(sampled, FEATURES, "pocket/llava, MSD or EAGLE-3 at temperature 1", 2.3),
        fastest(smollava, FEATURES, "pocket/smollava, greedy descriptions", 2.2, equal=True),
        fastest(prose, TEXT, "pocket/smollm2, greedy prose", 1.8, equal=True),
        fastest(code, TEXT, "pocket/coder at temperature 1", 2.4),
        *assisted_bars(rows["assisted"]),
    ]


def assisted_bars(rows: Sequence[Row]) -> list[Bar]:
    """Each drafter of each model against transformers' own use of it, and in batches."""
    found = []
    for drafter, model in dict.fromkeys((r["drafter"], r["model"]) for r in rows):
        own = [r for r in rows if (r["drafter"], r["model"]) == (drafter, model)]
        ours = [
            r for r in own if not r["method"].startswith("transformers") and r["method"] != "ar"
        ]
        same = [r for r in ours if r["method"] != "auto" and r["tau"] > DRAFTS]
        for temperature in (0, 1):
            alone = [r for r in same if r["batch"] == 1 and r["temperature"] == temperature]
            alone = [r for r in alone if temperature or r["token_equal"] == 1]
            what = f"{drafter} of {model}, T = {temperature}: ours over transformers'"
            found.append(_best(alone, "over_theirs", what, OVER_THEIRS))
        found.append(_batches(ours, f"{drafter} of {model}, ragged batches, ours over plain"))
    return found


def _batches(rows: Sequence[Row], what: str) -> Bar:
    """The best of each batch size, of which the worst counts, against plain decoding."""
    sizes = {r["batch"] for r in rows if r["batch"] > 1}
    best = (max(r["over_plain"] for r in rows if r["batch"] == size) for size in sizes)
    least = min(best, default=None)
    return measured(what, f"≥ {OVER_PLAIN:.2f}×", least, at_least(OVER_PLAIN))


def _best(rows: Sequence[Row], key: str, what: str, least: float) -> Bar:
    """The largest of ``key`` against ``least``."""
    best = max(rows, key=lambda r: r[key], default=None)
    form = f"{{:.2f}}× with {best and best['method']}"
    return measured(what, f"≥ {least:.2f}×", best and best[key], at_least(least), form)
