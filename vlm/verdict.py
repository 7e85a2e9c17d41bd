"""Speculative Verdict: small models answer, those that all models find plausible are heard, a large
one decides.

Its gain is accuracy, not speed. Every expert scores every answer in one forward; answers on which
the experts' perplexities agree with those of their own answers make the consensus
(cross-perplexity), and the best few experts are heard by the verdict model, with reasons if it
wants them. Source: Speculative Verdict (arXiv 2510.20812).

Shape letters: K experts (and answers), U different answers, L positions, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from string import Formatter
from typing import Any

import torch
from torch import Tensor

from specmm.files import write_whole
from specmm.hf.prompt import PER_TOKEN, on_device
from specmm.vlm.asking import Pictures, Questions
from specmm.vlm.pipeline import VQAPipeline

FIELDS = {
    "answer": {"question"},
    "score": {"question"},
    "reason": {"question"},
    "expert": {"number", "reasoning", "answer"},
    "verdict": {"question", "experts"},
}
OPTIONAL = {"number", "reasoning"}  # of an expert's line
PROMPTS = "prompts.json"  # beside the experts of a model that was taught other words


def fields_of(text: str) -> set[str]:
    """What ``str.format`` fills into ``text``; raises ``ValueError`` where a brace is left open."""
    return {field for _, field, _, _ in Formatter().parse(text) if field is not None}


@dataclass(frozen=True)
class Prompts:
    """What the models are asked: for an answer, for its plausibility, for reasons, and for the
    verdict, into which ``expert`` puts what each expert said; without ``{reasoning}`` in it nobody
    is asked for reasons.

    Raises ``ValueError`` when a text lacks a field it needs.
    """

    answer: str = "{question}"
    score: str = "Question: {question}\nAnswer:"
    reason: str = (
        "{question}\nThink step by step about what the picture shows, then give the answer."
    )
    expert: str = "Expert {number}\nReasoning: {reasoning}\nAnswer: {answer}\n"
    verdict: str = (
        "Several experts looked at the picture. Some of them may be wrong.\n\n{experts}\n"
        "Weigh their reasoning against the picture and answer.\nQuestion: {question}\nAnswer:"
    )

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            found, needed = fields_of(getattr(self, name)), FIELDS[name] - OPTIONAL
            if not needed <= found <= FIELDS[name]:
                may = sorted(FIELDS[name] - needed)
                wanted = f"{sorted(needed)}" + (f" and may use {may}" if may else "")
                raise ValueError(
                    f"prompt {name!r} must use {wanted}, got {sorted(found)}; add or remove"
                )

    @property
    def reasoned(self) -> bool:
        """Whether experts are asked for reasons."""
        return "reasoning" in fields_of(self.expert)

    def save(self, folder: Path) -> None:
        """Write them beside the experts in ``folder``, where :meth:`Experts.load` finds them."""
        write_whole(folder / PROMPTS, (json.dumps(asdict(self), indent=1) + "\n").encode())

    def ask(
        self, question: str, answers: Sequence[str], reasons: Sequence[str] | None = None
    ) -> str:
        """What the verdict model is asked once it knows the experts' ``answers`` and ``reasons``,
        best first.
        """
        said = zip(answers, reasons or [""] * len(answers), strict=True)
        lines = [
            self.expert.format(number=n + 1, answer=a, reasoning=r) for n, (a, r) in enumerate(said)
        ]
        return self.verdict.format(question=question, experts="\n".join(lines))


class Experts(list[VQAPipeline]):
    """The models that are heard, and in which words they and the judge are asked."""

    prompts: Prompts = Prompts()

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device | str) -> Experts:
        """The models in the folders of ``folder``, asked as its ``prompts.json`` says where there
        is one.

        Raises ``ValueError`` when that file holds something else.
        """
        folders = sorted(f.parent for f in folder.glob("*/config.json"))
        found = cls(
            VQAPipeline.from_pretrained(f, torch_dtype=dtype, device=device) for f in folders
        )
        if (file := folder / PROMPTS).is_file():
            try:
                found.prompts = Prompts(**json.loads(file.read_text()))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{file} must hold texts for {sorted(FIELDS)} as JSON ({error}); mend it"
                ) from error
        return found


def load_experts(folder: Path, target: Any, method: str) -> Experts:
    """The experts in ``folder``, in the dtype and on the device of the ``target`` model."""
    return Experts.load(folder, target.dtype, target.device)


@dataclass(frozen=True)
class Ruling:
    """``answer`` of the verdict model; ``answers`` of the K experts with their ``scores`` [K]
    (lower: more plausible to all), ``log_perplexities`` [K, K] (model by answer), and who was
    ``heard``, best first, with what ``reasons`` (none where the judge is not told any).
    """

    answer: str
    answers: list[str]
    scores: Tensor
    log_perplexities: Tensor
    heard: list[int]
    reasons: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: experts are numbered from 0."""
        table, scores = self.log_perplexities.tolist(), self.scores.tolist()
        said = {
            "answers": self.answers,
            "scores": scores,
            "heard": self.heard,
            "reasons": self.reasons,
        }
        return said | {"log_perplexities": table}


class SpeculativeVerdict:
    """``experts`` (two or more) and the model of the ``verdict``, which may be one of them;
    ``hear`` m of the experts.

    Raises ``ValueError`` for too few experts or a number to hear outside [1, K].
    """

    def __init__(
        self,
        experts: Sequence[VQAPipeline],
        verdict: VQAPipeline,
        *,
        hear: int | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        hear = min(3, len(experts)) if hear is None else hear
        if len(experts) < 2:
            raise ValueError(f"experts must be at least 2 models, got {len(experts)}")
        if not 1 <= hear <= len(experts):
            raise ValueError(f"hear must be in [1, {len(experts)}] (the experts), got {hear}")
        self.experts, self.verdict, self.hear = list(experts), verdict, hear
        self.prompts = prompts or (experts.prompts if isinstance(experts, Experts) else Prompts())

    def __call__(
        self,
        images: Pictures,
        question: str,
        *,
        max_new_tokens: int = 64,
        reason_tokens: int = 128,
        seed: int = 0,
        **options: Any,
    ) -> Ruling:
        """Answer one question about ``images``; ``seed`` breaks ties and seeds sampling,
        ``options`` are those of a pipeline's call. Raises ``ValueError`` as pipelines do.
        """
        if not isinstance(seed, int):
            raise ValueError(
                f"seed must be one whole number, got {seed!r}: every model is asked once"
            )
        asked, prompts = (
            options if "generator" in options else {"seed": seed, **options},
            self.prompts,
        )
        text = prompts.answer.format(question=question)
        answers = [
            e(images, text, max_new_tokens=max_new_tokens, **asked).answers[0] for e in self.experts
        ]
        table = self.score(images, question, answers)
        scores = consensus(table)
        heard = best(scores, self.hear, torch.Generator().manual_seed(seed))
        text, asking = prompts.reason.format(question=question), heard if prompts.reasoned else []
        reasons = [
            self.experts[i](images, text, max_new_tokens=reason_tokens, **asked).answers[0]
            for i in asking
        ]
        text = prompts.ask(question, [answers[i] for i in heard], reasons)
        final = self.verdict(images, text, max_new_tokens=max_new_tokens, **asked).answers[0]
        return Ruling(final, answers, scores, table, heard, reasons)

    def score(self, images: Pictures, question: str, answers: Sequence[str]) -> Tensor:
        """ln PPL of each answer to each expert [K, len(answers)]: one forward an expert, equal
        answers once.
        """
        different = list(dict.fromkeys(answers))
        text = self.prompts.score.format(question=question)
        table = torch.stack(
            [log_perplexities(e, images, text, different) for e in self.experts]
        )  # [K, U]
        return table[:, [different.index(answer) for answer in answers]]


def make_judge(experts: Sequence[VQAPipeline], judge: VQAPipeline, keep: int) -> SpeculativeVerdict:
    """Method ``verdict``: ``judge`` hears at most ``keep`` of the ``experts``."""
    return SpeculativeVerdict(experts, judge, hear=min(keep, len(experts)))


def consensus(log_perplexities: Tensor) -> Tensor:
    """Score(A) = Σ over B ≠ A of |ln PPL_B(answer of A) − ln PPL_B(answer of B)| [K] of a table [K,
    K], B by answer.
    """
    return (log_perplexities - log_perplexities.diagonal()[:, None]).abs().sum(0)


def best(scores: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """The ``count`` of the lowest ``scores`` [K], best first, ties in an order drawn from
    ``generator``.
    """
    order = torch.randperm(len(scores), generator=generator)
    return order[scores[order].sort(stable=True).indices][:count].tolist()


@torch.inference_mode()
def log_perplexities(
    expert: VQAPipeline, images: Pictures, prompt: str, answers: Sequence[str]
) -> Tensor:
    """ln PPL [U] of each of ``answers`` after ``prompt`` and ``images``: the mean of −ln p over the
    answer's tokens.

    One forward of U rows, padded at the right. An answer without tokens is judged as the end of the
    text.
    """
    model, tokenizer = expert.model, expert.processor.tokenizer
    inputs = on_device(
        Questions.of(images, prompt).inputs(expert.processor), model.device, model.dtype
    )
    end = tokenizer.eos_token_id
    ids = [
        tokenizer.encode(f" {a}", add_special_tokens=False) if a.strip() else [end] for a in answers
    ]
    rows, start = _append(inputs, ids), inputs["input_ids"].shape[1]
    logits = model(**rows).logits[:, start - 1 : -1].float()  # [U, most tokens, V]
    targets = rows["input_ids"][:, start:]
    losses = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    mask = rows["attention_mask"][:, start:]
    return ((losses * mask).sum(1) / mask.sum(1)).cpu()


def _append(inputs: dict[str, Any], answers: Sequence[list[int]]) -> dict[str, Any]:
    """A batch of one prompt with each of ``answers`` after it; pictures are repeated, one set a
    row.
    """
    count, most = len(answers), max(map(len, answers))
    ids = inputs["input_ids"]
    tails = torch.tensor([a + [0] * (most - len(a)) for a in answers], device=ids.device)
    masks = torch.tensor([[1] * len(a) + [0] * (most - len(a)) for a in answers], device=ids.device)
    heads = {**inputs, "attention_mask": torch.ones_like(ids)}
    rows = {}
    for name, value in heads.items():
        wide = torch.cat([value] * count)
        tail = {"input_ids": tails, "attention_mask": masks}.get(name, torch.zeros_like(tails))
        rows[name] = torch.cat([wide, tail.to(wide.dtype)], dim=1) if name in PER_TOKEN else wide
    return rows
