"""Conversations that an instructed model makes up itself, for its drafters to learn from: no other
data is needed.

The model continues its chat template where a question would stand, then answers what it asked.
Source: Magpie (arXiv 2406.08464).

Shape letters: R rows, L tokens of a row.
"""

from __future__ import annotations

from itertools import chain, count
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from specmm.checkpoints import fingerprint
from specmm.diffusion_drafters.train.rows import save_whole
from specmm.text.pipeline import TextPipeline

AT_ONCE = 256  # conversations drawn together
QUESTION, ANSWER = 48, 192  # tokens at most
ASKING, ANSWERING = 0.7, (0.0, 0.7)  # temperatures; the answers' by turns
OPENINGS = (
    "",
    "",
    "",
    "Write a Python",
)  # of questions, by turns: left alone a model seldom asks for code
MARK = "\0"


def drawn_chats(pipe: TextPipeline, rows: int, length: int, out: Path, seed: int = 0) -> Tensor:
    """Rows [R, L] full of conversations, one after the other.

    Kept in ``out`` batch by batch, so that a killed run goes on. Raises ``ValueError`` for a model
    without a chat template, a template that begins with the question, and a model that asks
    nothing.
    """
    kept = out / f"chats-{fingerprint(pipe.model.get_input_embeddings().weight)}-{seed}"
    kept.mkdir(parents=True, exist_ok=True)
    found, wanted = torch.empty(0, dtype=torch.int32), rows * length
    with tqdm(total=wanted, desc="draw", unit="token") as bar:
        for turn in count():
            file = kept / f"{turn:04d}.pt"
            if not file.exists():
                save_whole(file, _conversations(pipe, turn, seed))
            found = torch.cat([found, torch.load(file, weights_only=True)])
            bar.update(min(len(found), wanted) - bar.n)
            if len(found) >= wanted:
                break
    return found[:wanted].view(rows, length)


def _conversations(pipe: TextPipeline, turn: int, seed: int) -> Tensor:
    """Ids of the conversations of a ``turn``, one after the other."""
    seeds = [(seed * 1_000_003 + turn) * AT_ONCE + i for i in range(AT_ONCE)]
    before, behind = pipe.templated(MARK).split(MARK)
    before = before.removeprefix(pipe.tokenizer.bos_token or "")
    if not before:
        raise ValueError(
            f"{pipe.name}'s chat template must begin with more than the question; give --text"
        )
    stop = [word for word in behind.split()[:1] if word not in pipe.tokenizer.all_special_tokens]
    openings = [OPENINGS[i % len(OPENINGS)] for i in range(AT_ONCE)]
    given = [before + opening for opening in openings]
    asked = pipe(given, max_new_tokens=QUESTION, temperature=ASKING, seed=seeds, stop=stop).texts
    said = [
        opening + text if text.strip() else ""
        for opening, text in zip(openings, asked, strict=True)
    ]
    pairs = [(text.strip(), i) for text, i in zip(said, seeds, strict=True) if text]
    if not pairs:
        raise ValueError(
            f"{pipe.name} must ask questions of its own, got none in {AT_ONCE}; give --text, not --chats"
        )
    questions, seeds = [text for text, _ in pairs], [i for _, i in pairs]
    temperature = ANSWERING[turn % len(ANSWERING)]
    answers = pipe(
        questions, chat=True, max_new_tokens=ANSWER, temperature=temperature, seed=seeds
    ).tokens
    chats = zip(pipe.encode(questions, chat=True), (ids.tolist() for ids in answers), strict=True)
    return torch.tensor(
        list(chain.from_iterable(chain(*pair) for pair in chats)), dtype=torch.int32
    )
