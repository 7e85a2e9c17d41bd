"""Model types of transformers: their answers are their own generate's, or they are refused."""

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
# A type of each way in which models of transformers differ, and of each reason to refuse one; all
# others are run by `python -m benchmarks.models`.
TYPES = {
    "causal": (
        "llama",  # as most are
        "gpt2",  # positions that are learned
        "gptj",  # blocks whose parts run beside one another
        "falcon",  # one key for all heads
        "gemma3_text",  # sliding and full layers in turn
        "gpt_oss",  # sinks
        "mixtral",  # experts
        "deepseek_v3",  # latent attention
        "mamba2",  # states alone
        "jamba",  # states and attention in turn
        "qwen3_next",  # linear attention, short convolutions
        "lfm2",  # convolutions and attention
        "bert",  # refused: sees what comes
        "bloom",  # refused: places that are biases
        "marian",  # refused: the decoder of a pair
        "minimax",  # refused: a cache of its own
        "rwkv",  # refused: states that are not handed over
        "musicgen",  # cannot be built here
    ),
    IMAGE_TEXT: (
        "llava",  # as most are
        "llava_next",  # pictures in tiles
        "video_llava",  # videos, too
        "internvl",
        "gemma3",  # pictures that see themselves whole
        "gemma4",  # layers of different sizes, per-layer embeddings
        "kimi_k25",  # latent attention
        "mllama",  # cross-attention
        "qwen2_vl",  # M-RoPE
        "qwen3_5",  # the same beside linear attention
        "qwen3_vl",  # the same and deepstack
        "fuyu",  # no encoder of pictures
        "chameleon",  # pictures as tokens
        "mistral4",  # asked about texts alone
        "blip-2",  # refused: prompts that are vectors
        "florence2",  # refused: an encoder and a decoder
        "idefics",  # refused: pictures that a cache cannot hold
        "diffusion_gemma",  # cannot be built here
    ),
}
LINES = [
    pytest.param(line, id=" ".join(line.key))
    for line in types()
    if line.type in TYPES.get(line.mapping, ())
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


def test_the_types_that_are_run_are_all_there():
    assert len(LINES) == sum(map(len, TYPES.values()))


def test_rows_are_plain():
    line = dataclasses.replace(types()[0], seconds=1.0)
    assert "seconds" not in row(line)
    assert row(line)["type"] == line.type
