"""The shipped coder: transformers loads it, every method says what it says, its drafters draft."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specmm import TextPipeline, methods, zoo
from tests.commands import as_json

POCKET = zoo.POCKET / "coder"
PROMPT = (
    'def mean(values):\n    """The arithmetic mean of values."""\n'
    "    if not values:\n        raise ValueError("
)
DRAFTED = ("deer", "block", "diffuspec", "specdiff", "text-draft")


@pytest.fixture(scope="module")
def pipe():
    return TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float32)


@pytest.mark.slow
@torch.no_grad()
def test_every_method_says_what_transformers_says(pipe):
    tokenizer = AutoTokenizer.from_pretrained(POCKET)
    model = AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    [said] = model.generate(**inputs, do_sample=False, max_new_tokens=48)
    said = said[inputs.input_ids.shape[1] :]
    for method in ("ar", *DRAFTED, "prompt-lookup", "suffix", "recycle", methods.Block(tree=8)):
        out = pipe(PROMPT, method=method, max_new_tokens=48)
        assert out.tokens[0].tolist() == said.tolist(), method
        assert out.certificate.kind == "exact"


@pytest.mark.parametrize("method", ["deer", "block"])
def test_the_drafters_draft(pipe, method):
    assert pipe(PROMPT, method=method, max_new_tokens=64).stats.tau > 1.8
    assert pipe(PROMPT, method=method, max_new_tokens=64, temperature=1.0, seed=0).stats.tau > 1.3


def test_the_command_line():
    words = "complete pocket/coder --method block --max-new-tokens 24"
    found = as_json(words, "-p", PROMPT)
    assert found["outputs"][0] and found["drafted_by_round"]
    assert found["certificate"]["kind"] == "exact"
