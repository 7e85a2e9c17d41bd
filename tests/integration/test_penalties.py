"""Presence and frequency penalties, beside a loop that counts for itself."""

from collections import Counter

import pytest
import torch

PROMPT = "def add(a, b):\n    return a + b\n\ndef"


def counted(pipe, presence, frequency):
    """Greedy tokens of 30 steps."""
    ids, said = pipe.tokenizer(PROMPT)["input_ids"], []
    for _ in range(30):
        with torch.no_grad():
            scores = pipe.model(torch.tensor([[*ids, *said]])).logits[0, -1].clone()
        for token, count in Counter(said).items():
            scores[token] -= presence + frequency * count
        said.append(int(scores.argmax()))
    return said


@pytest.mark.parametrize("method", ["ar", "suffix", "block"])
@pytest.mark.parametrize("penalties", [(1.5, 0.0), (0.0, 0.8), (-0.5, 1.0)])
def test_tokens_are_lowered_by_what_was_said(method, penalties, coder_pipe):
    presence, frequency = penalties
    given = dict(presence_penalty=presence, frequency_penalty=frequency)
    out = coder_pipe(PROMPT, method=method, max_new_tokens=30, **given)
    wanted = counted(coder_pipe, *penalties)
    assert out.tokens[0].tolist() == wanted[: len(out.tokens[0])]
    assert wanted != counted(coder_pipe, 0.0, 0.0)
    name, value = next((n, v) for n, v in given.items() if v)
    assert f"{name} {value:g}" in str(out.certificate)


def test_what_is_no_penalty(coder_pipe):
    for value in (2.5, "much", float("nan")):
        with pytest.raises(ValueError, match="frequency_penalty must be"):
            coder_pipe(PROMPT, frequency_penalty=value)
