"""Every model type of transformers: its answers are its own generate's, or it is refused."""

import csv
import dataclasses
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
import transformers

from benchmarks.common import read_results
from benchmarks.models.__main__ import row
from benchmarks.models.page import page
from benchmarks.models.table import CRASH, IMAGE_TEXT, WRONG, ask_apart, types

RESULTS = Path("benchmarks/results")
FAST = {
    ("causal", "gemma3_text"),  # sliding and full layers in turn
    ("causal", "gpt2"),
    ("causal", "llama"),
    ("causal", "mamba2"),
    ("causal", "mixtral"),
    ("causal", "qwen3_next"),
    (IMAGE_TEXT, "gemma4"),  # layers of different sizes, per-layer embeddings
    (IMAGE_TEXT, "internvl"),
    (IMAGE_TEXT, "kimi_k25"),  # latent attention
    (IMAGE_TEXT, "mllama"),  # cross-attention
    (IMAGE_TEXT, "qwen3_5"),
    (IMAGE_TEXT, "qwen3_vl"),  # M-RoPE, deepstack
}
LINES = [
    pytest.param(line, id=" ".join(line.key), marks=() if line.key in FAST else pytest.mark.slow)
    for line in types()
]


@lru_cache
def committed():
    """What is committed, by mapping and type; nothing where it is another transformers'."""
    found = read_results(RESULTS, "models")
    if found["environment"]["transformers"] != transformers.__version__:
        return {}
    return {(row["mapping"], row["type"]): row for row in found["rows"]}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.slow
def test_a_type_answers_as_generate_or_is_refused(line):
    found = ask_apart(line)
    assert found.status not in (WRONG, CRASH), found.reason
    known = committed().get(line.key)
    if known is not None:  # the table says what is so
        assert (found.status, found.equal) == (known["status"], known["equal"]), found.reason


def test_the_committed_page_and_table_are_of_the_same_run():
    found = read_results(RESULTS, "models")
    assert Path("docs/models.md").read_text() == page(found["rows"], found["environment"])
    lines = (RESULTS / "models.csv").read_text().splitlines()
    table = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    assert Counter(row["status"] for row in table) == Counter(r["status"] for r in found["rows"])
    assert len(table) == len(found["rows"])


def test_nothing_committed_is_wrong():
    statuses = {row["status"] for row in read_results(RESULTS, "models")["rows"]}
    assert not statuses & {WRONG, CRASH}


@pytest.mark.slow
def test_a_type_that_hangs_or_dies_does_not_stop_the_table():
    line = types()[0]
    found = ask_apart(line, seconds=0.0)
    assert found.status == CRASH
    assert "more than 0 s" in found.reason


def test_rows_are_plain():
    line = dataclasses.replace(types()[0], seconds=1.0)
    assert "seconds" not in row(line)
    assert row(line)["type"] == line.type
