"""``docs/models.md``: the table of model types, from the rows of ``results/models.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.models.check import CRASH, EQUAL, REFUSED, TIED, WRONG
from benchmarks.models.table import CAUSAL, IMAGE_TEXT, NOT_BUILDABLE, SERVED

Row = dict[str, Any]
STATUSES = (SERVED, REFUSED, WRONG, CRASH, TIED, NOT_BUILDABLE)
SYMBOLS = {EQUAL: "yes", REFUSED: "refused", "": "–"}
INTRODUCTION = """# Model types of transformers

Written by `python -m benchmarks.models`, with transformers {transformers} and torch {torch}, at
`{git}`.

A tiny random model of every type in transformers' mappings for image-text-to-text and for causal
language models, made from its own config class, answers greedily in float32: through its own
`generate`, and through `custom_generate=specmm.custom_generate(method=…)` with `ar`, `prompt-
lookup` and `text-draft` (a tree of drafts, many of which are kept; a chain where layers have
states, as linear attention has). *Served* means that all answers are `generate`'s, token for
token: to text; where the type takes pictures also to one picture, to two in one prompt, and to a
ragged, left-padded batch of three in which, where the type allows it, one row has no picture.
*Refused* is one sentence (`ValueError`) before anything is answered. A type that answers
otherwise is WRONG, one that ends in another error a crash, and neither is committed;
`tests/integration/test_models_table.py` runs a type of each kind.
"""


def page(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The whole page."""
    images = [row for row in rows if row["mapping"] == IMAGE_TEXT]
    causal = [row for row in rows if row["mapping"] == CAUSAL]
    decoders = [row for row in causal if row["decoder_only"]]
    others = [row for row in causal if not row["decoder_only"]]
    parts: list[str] = [
        INTRODUCTION.format(**facts),
        counts(("image-text-to-text", images), ("causal", decoders), ("causal, other", others)),
        section("Image-text-to-text", images, ("text", "picture", "pictures", "batch")),
        section("Causal language models", decoders, ("text", "batch")),
        "*Other* causal types are encoder-decoders and their decoders, and masked language models "
        "that a config turns into decoders; they are tried all the same.\n",
        section("Causal, other", others, ("text", "batch")),
    ]
    return "\n".join(parts)


def counts(*groups: tuple[str, Sequence[Row]]) -> str:
    """How many types of each group came to what."""
    lines = [f"| types | all | {' | '.join(STATUSES)} |", "|---" * (len(STATUSES) + 2) + "|"]
    for name, rows in groups:
        found = Counter(row["status"] for row in rows)
        numbers = " | ".join(str(found[status]) for status in STATUSES)
        lines.append(f"| {name} | {len(rows)} | {numbers} |")
    return "\n".join(lines) + "\n"


def section(title: str, rows: Iterable[Row], prompts: Sequence[str]) -> str:
    """A table of types; ``prompts`` are the kinds of prompts that have a column."""
    lines: list[str] = [
        f"## {title}\n",
        f"| type | class | | {' | '.join(prompts)} | note |",
        "|---" * (len(prompts) + 4) + "|",
    ]
    for row in rows:
        cells = [str(SYMBOLS.get(row[name], row[name])) for name in prompts]
        why = row["reason"].replace("|", "\\|")
        lines.append(
            f"| `{row['type']}` | {row['architecture']} | {row['status']} | {' | '.join(cells)} "
            f"| {why} |"
        )
    return "\n".join(lines) + "\n"
