"""Speculative Verdict: small models (experts) answer, and a large model decides after reading the
answers that all of them find plausible.

The gain is accuracy, not speed. Every expert scores every answer in one forward. The consensus
consists of answers whose perplexity for the other experts is close to that of their own answers
(cross-perplexity). The verdict model sees the answers of the best few experts, with reasons if its
prompt asks for them. Source: Speculative Verdict (arXiv 2510.20812).

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
from transformers import PreTrainedModel

from specmm.hf.prompts.prompt import PER_TOKEN, on_device
from specmm.loading.files import write_whole
from specmm.vlm.asking import Pictures, Questions
from specmm.vlm.pipeline import VQAPipeline

FIELDS = {
    "answer": {"question"},
    "score": {"question"},
    "reason": {"question"},
    "expert": {"number", "reasoning", "answer"},
    "verdict": {"question", "experts"},
}
OPTIONAL = {"number", "reasoning"}  # fields that an expert's line may lack
PROMPTS = "prompts.json"  # beside the experts of a model that was taught other words


def _fields_of(text: str) -> set[str]:
    """The fields that ``str.format`` fills in ``text``; raises ``ValueError`` for a stray brace."""
    return {field for _, field, _, _ in Formatter().parse(text) if field is not None}


@dataclass(frozen=True)
class VerdictPrompts:
    """Prompts that ask for an answer, its plausibility, reasons, and the verdict.

    ``expert`` formats an expert's answer for the verdict model; unless it has ``{reasoning}``,
    experts give no reasons. Raises ``ValueError`` when a text lacks a field it needs.
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
            used = _fields_of(getattr(self, name))
            needed = FIELDS[name] - OPTIONAL
            if not needed <= used <= FIELDS[name]:
                may = sorted(FIELDS[name] - needed)
                expected = f"{sorted(needed)}" + (f" and may use {may}" if may else "")
                raise ValueError(
                    f"prompt {name!r} must use {expected}, got {sorted(used)}; add or remove"
                )

    @property
    def reasoned(self) -> bool:
        """Whether experts are asked for reasons."""
        return "reasoning" in _fields_of(self.expert)

    def save(self, folder: Path) -> None:
        """Write them beside the experts in ``folder``, where :func:`load_experts` finds them."""
        write_whole(folder / PROMPTS, (json.dumps(asdict(self), indent=1) + "\n").encode())

    def ask(
        self, question: str, answers: Sequence[str], reasons: Sequence[str] | None = None
    ) -> str:
        """The verdict model's question with the experts' ``answers``, ``reasons``, best first."""
        pairs = zip(answers, reasons or [""] * len(answers), strict=True)
        lines = [
            self.expert.format(number=n, answer=answer, reasoning=reason)
            for n, (answer, reason) in enumerate(pairs, start=1)
        ]
        return self.verdict.format(question=question, experts="\n".join(lines))


class Experts(list[VQAPipeline]):
    """The small models, and the prompts for them and for the judge."""

    prompts: VerdictPrompts = VerdictPrompts()

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device | str) -> Experts:
        """The models in the folders of ``folder``, with the prompts in ``prompts.json``, if any.

        Raises ``ValueError`` if that file does not hold prompts.
        """
        folders = sorted(f.parent for f in folder.glob("*/config.json"))
        experts = cls(
            VQAPipeline.from_pretrained(f, torch_dtype=dtype, device=device) for f in folders
        )
        if (file := folder / PROMPTS).is_file():
            try:
                experts.prompts = VerdictPrompts(**json.loads(file.read_text()))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{file} must hold texts for {sorted(FIELDS)} as JSON ({error}); fix the file"
                ) from error
        return experts


def load_experts(folder: Path, target: PreTrainedModel, method: str) -> Experts:
    """The experts in ``folder``, in the dtype and on the device of the ``target`` model."""
    return Experts.load(folder, target.dtype, target.device)


@dataclass(frozen=True)
class Ruling:
    """The verdict model's ``answer`` and the data behind it.

    ``answers`` of the K experts with their ``scores`` [K] (lower: more plausible to all),
    ``log_perplexities`` [K, K] (model by answer), and the experts ``heard``, best first, with their
    ``reasons`` (none if the judge's prompt has no place for them).
    """

    answer: str
    answers: list[str]
    scores: Tensor
    log_perplexities: Tensor
    heard: list[int]
    reasons: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The ruling for JSON, without ``answer``; experts are numbered from 0."""
        return {
            "answers": self.answers,
            "scores": self.scores.tolist(),
            "heard": self.heard,
            "reasons": self.reasons,
            "log_perplexities": self.log_perplexities.tolist(),
        }


class SpeculativeVerdict:
    """Two or more ``experts``, and the ``verdict`` model, which may be one of them.

    It reads the answers of the best ``hear`` experts. Raises ``ValueError`` for fewer than two
    experts or a number to hear outside [1, K].
    """

    def __init__(
        self, experts: Sequence[VQAPipeline], verdict: VQAPipeline, *, hear: int | None = None
    ) -> None:
        hear = min(3, len(experts)) if hear is None else hear
        if len(experts) < 2:
            raise ValueError(f"experts must be at least 2 models, got {len(experts)}")
        if not 1 <= hear <= len(experts):
            raise ValueError(f"hear must be in [1, {len(experts)}] (the experts), got {hear}")
        self.experts = list(experts)
        self.verdict = verdict
        self.hear = hear
        self.prompts: VerdictPrompts = getattr(experts, "prompts", VerdictPrompts())

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
        ``options`` go to the pipelines' calls. Raises ``ValueError`` as pipelines do.
        """
        if not isinstance(seed, int):
            raise ValueError(
                f"seed must be one whole number, got {seed!r}: every model is asked once"
            )
        drawn = options.get("temperature") and "generator" not in options
        seeded = {"seed": seed, **options} if drawn else options
        prompts = self.prompts

        def ask(pipe: VQAPipeline, text: str, length: int) -> str:
            return pipe(images, text, max_new_tokens=length, **seeded).answers[0]

        text = prompts.answer.format(question=question)
        answers = [ask(expert, text, max_new_tokens) for expert in self.experts]
        table = self.score(images, question, answers)
        scores = consensus(table)
        heard = best(scores, self.hear, torch.Generator().manual_seed(seed))
        text = prompts.reason.format(question=question)
        reasoning = heard if prompts.reasoned else []
        reasons = [ask(self.experts[i], text, reason_tokens) for i in reasoning]
        text = prompts.ask(question, [answers[i] for i in heard], reasons)
        final = ask(self.verdict, text, max_new_tokens)
        return Ruling(final, answers, scores, table, heard, reasons)

    def score(self, images: Pictures, question: str, answers: Sequence[str]) -> Tensor:
        """ln PPL of each answer to each expert [K, len(answers)], by one forward an expert."""
        different = list(dict.fromkeys(answers))
        text = self.prompts.score.format(question=question)
        rows = [log_perplexities(expert, images, text, different) for expert in self.experts]
        return torch.stack(rows)[:, [different.index(answer) for answer in answers]]


def make_judge(experts: Sequence[VQAPipeline], judge: VQAPipeline, keep: int) -> SpeculativeVerdict:
    """Method ``verdict``: ``judge`` reads the answers of at most ``keep`` of the ``experts``."""
    return SpeculativeVerdict(experts, judge, hear=min(keep, len(experts)))


def consensus(log_perplexities: Tensor) -> Tensor:
    """Σ over B ≠ A of |ln PPL_B(answer of A) − ln PPL_B(answer of B)| [K], given all [K, K]."""
    return (log_perplexities - log_perplexities.diagonal()[:, None]).abs().sum(0)


def best(scores: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """The ``count`` lowest of ``scores`` [K], best first, ties in random order."""
    order = torch.randperm(len(scores), generator=generator)
    return order[scores[order].sort(stable=True).indices][:count].tolist()


@torch.inference_mode()
def log_perplexities(
    expert: VQAPipeline, images: Pictures, prompt: str, answers: Sequence[str]
) -> Tensor:
    """ln PPL [U] of each of ``answers`` after ``prompt`` and ``images``: the mean of −ln p over the
    answer's tokens.

    One forward of U rows, padded at the right. An answer without tokens is scored as an end token.
    """
    model = expert.model
    tokenizer = expert.processor.tokenizer
    inputs = Questions.of(images, prompt).inputs(expert.processor)
    inputs = on_device(inputs, model.device, model.dtype)
    ids = [
        tokenizer.encode(f" {answer}", add_special_tokens=False)
        if answer.strip()
        else [tokenizer.eos_token_id]
        for answer in answers
    ]
    rows = _append(inputs, ids)
    start = inputs["input_ids"].shape[1]
    logits = model(**rows).logits[:, start - 1 : -1].float()  # [U, most tokens, V]
    targets = rows["input_ids"][:, start:]
    losses = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    mask = rows["attention_mask"][:, start:]
    return ((losses * mask).sum(1) / mask.sum(1)).cpu()


def _append(inputs: dict[str, Any], answers: Sequence[list[int]]) -> dict[str, Any]:
    """A batch of one prompt with each of ``answers`` after it, its pictures repeated by row."""
    count = len(answers)
    size = max(map(len, answers))
    ids = inputs["input_ids"]
    tails = torch.tensor([a + [0] * (size - len(a)) for a in answers], device=ids.device)
    masks = torch.tensor([[1] * len(a) + [0] * (size - len(a)) for a in answers], device=ids.device)
    rows = {}
    for name, value in {**inputs, "attention_mask": torch.ones_like(ids)}.items():
        wide = torch.cat([value] * count)
        tail = {"input_ids": tails, "attention_mask": masks}.get(name, torch.zeros_like(tails))
        rows[name] = torch.cat([wide, tail.to(wide.dtype)], dim=1) if name in PER_TOKEN else wide
    return rows
