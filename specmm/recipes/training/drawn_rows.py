"""Rows of text drawn by the target itself: continuations of texts, or whole conversations that an
instructed model makes up by continuing its own chat template, first a question, then its answer
(Magpie, arXiv 2406.08464).

Shape letters: R rows, L tokens of a row, P of a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from specmm import __version__
from specmm.core.decode import decode_plain
from specmm.core.derived import digest
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.recipes.loop import kept
from specmm.text.pipeline import TextPipeline

ROWS_AT_ONCE = 32  # rows the target continues together
CHATS_AT_ONCE = 256  # conversations drawn together
QUESTION = 48  # tokens of a question at most
ANSWER = 192  # tokens of an answer at most
QUESTION_TEMPERATURE = 0.7
ANSWER_TEMPERATURES = (0.0, 0.7)  # in turn
# Beginnings of questions, in turn: without one a model seldom asks for code.
OPENINGS = ("", "", "", "Write a Python")
MARK = "\0"


def made_by(model: nn.Module, *facts: Any) -> str:
    """Sixteen hexadecimal digits of everything on which texts by ``model`` depend."""
    facts_text = repr((__version__, digest(model), *facts))
    return hashlib.sha256(facts_text.encode()).hexdigest()[:16]


def drawn_rows(
    target: VLMTarget,
    prompts: Tensor,
    length: int,
    temperatures: Sequence[float],
    out: Path,
    seed: int = 0,
) -> Tensor:
    """``prompts`` [R, P] continued by the target to rows [R, L], at ``temperatures`` in turn.

    Stored in ``out`` batch by batch, so that an interrupted run continues.
    """
    prompts_digest = hashlib.sha256(prompts.long().numpy().tobytes()).hexdigest()
    cache = out / f"drawn-{made_by(target.model, prompts_digest, length, list(temperatures), seed)}"

    def drawn(i: int, part: Tensor) -> Tensor:
        processor = Processor(temperatures[i % len(temperatures)])
        sampler = VLMTarget(target.model, processor, target.name)
        first = seed * 1_000_003 + ROWS_AT_ONCE * i
        uniforms = Uniforms.from_seeds(range(first, first + len(part)), sampler.device)
        missing = length - part.shape[1]
        prompt = VLMPrompt({"input_ids": part.to(sampler.device)}, missing)
        *_, end = decode_plain(sampler, prompt, missing, uniforms)
        return torch.cat([part, end.tokens[:, :missing].cpu()], dim=1).int()

    parts = enumerate(tqdm(prompts.split(ROWS_AT_ONCE), desc="draw"))
    return torch.cat([kept(cache / f"{i:04d}.pt", partial(drawn, i, part)) for i, part in parts])


def drawn_chats(pipe: TextPipeline, rows: int, length: int, out: Path, seed: int = 0) -> Tensor:
    """Rows [R, L] full of conversations, one after the other.

    Stored in ``out`` batch by batch, so that an interrupted run continues. Raises ``ValueError``
    for a model without a chat template, a template that begins with the question, and a model that
    makes up no questions.
    """
    words = (pipe.tokenizer.chat_template, pipe.tokenizer.get_vocab())
    cache = out / f"chats-{made_by(pipe.model, words, QUESTION, ANSWER, seed)}"
    tokens = torch.empty(0, dtype=torch.int32)
    total = rows * length
    with tqdm(total=total, desc="draw", unit="token") as bar:
        for turn in count():
            new = kept(cache / f"{turn:04d}.pt", partial(_conversations, pipe, turn, seed))
            tokens = torch.cat([tokens, new])
            bar.update(min(len(tokens), total) - bar.n)
            if len(tokens) >= total:
                break
    return tokens[:total].view(rows, length)


def _conversations(pipe: TextPipeline, turn: int, seed: int) -> Tensor:
    """Ids of the conversations of a ``turn``, one after the other."""
    first = (seed * 1_000_003 + turn) * CHATS_AT_ONCE
    questions, seeds = _questions(pipe, list(range(first, first + CHATS_AT_ONCE)))
    temperature = ANSWER_TEMPERATURES[turn % len(ANSWER_TEMPERATURES)]
    answers = pipe(
        questions,
        chat=True,
        max_new_tokens=ANSWER,
        temperature=temperature,
        seed=seeds if temperature else None,
    ).tokens
    prompts = pipe.encode(questions, chat=True)
    chats = [[*ids, *answer.tolist()] for ids, answer in zip(prompts, answers, strict=True)]
    return torch.tensor(list(chain.from_iterable(chats)), dtype=torch.int32)


def _questions(pipe: TextPipeline, seeds: list[int]) -> tuple[list[str], list[int]]:
    """Questions that the model makes up, one for each of ``seeds``, without empty questions."""
    before, after = pipe.templated(MARK).split(MARK)
    before = before.removeprefix(pipe.tokenizer.bos_token or "")
    if not before:
        raise ValueError(
            f"{pipe.name}'s chat template must begin with more than the question; set text=FOLDER"
        )
    stop = [word for word in after.split()[:1] if word not in pipe.tokenizer.all_special_tokens]
    openings = [OPENINGS[i % len(OPENINGS)] for i in range(len(seeds))]
    texts = pipe(
        [before + opening for opening in openings],
        max_new_tokens=QUESTION,
        temperature=QUESTION_TEMPERATURE,
        seed=seeds,
        stop=stop,
    ).texts
    questions = zip(openings, texts, seeds, strict=True)
    pairs = [((opening + text).strip(), i) for opening, text, i in questions if text.strip()]
    if not pairs:
        raise ValueError(
            f"{pipe.name} must ask questions of its own, got none in {len(seeds)}; "
            "set text=FOLDER, not chats=true"
        )
    return [text for text, _ in pairs], [i for _, i in pairs]
