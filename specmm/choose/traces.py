"""Traces: how a target accepts a drafter's drafts, as a file from which trees, batches and machines
are planned without running either model.

A trace holds, after every token of some answers by the target, the probability that the draft of
each rank at each depth is accepted, given that the drafts above it are the answer's own tokens; and
the lengths of the answers and of the texts before them. Given an answer, a round depends on earlier
rounds only through the place where it begins, so :meth:`Trace.tau` computes the tokens a round of
any tree of fixed shape exactly; a table by depth gives them only roughly.

Shape letters: R roots, D levels, K ranks, B answers, N nodes, L roots of the longest answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specmm.choose.costs import Costs, Plan, plan
from specmm.core.tree import TreeShape
from specmm.loading.checkpoints import save_readable
from specmm.shape.sequoia import best_tree

FORMAT = "specmm trace"
VERSION = 1
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # nodes of the trees that are compared, with the root
ROUNDED = 1e-2  # the most by which probabilities in half precision exceed 1


@dataclass(frozen=True)
class Trace:
    """Acceptance probabilities ``kept`` [R, D, K], each answer's number of ``roots`` [B], and the
    tokens before it, ``contexts`` [B]. ``facts`` describe the drafter and how it drafted.
    """

    kept: Tensor
    roots: Tensor
    contexts: Tensor
    facts: Mapping[str, Any]

    def tau(self, shape: TreeShape) -> float:
        """Tokens a round of trees of ``shape``, one answer at a time.

        Raises ``ValueError`` for trees that are deeper or wider than the trace.
        """
        _, depth, width = self.kept.shape
        if shape.depth > depth or shape.width > width:
            raise ValueError(
                f"tree must have at most {depth} levels and {width} children a node, as traced, "
                f"got {shape.depth} and {shape.width}"
            )
        reached = [torch.ones(len(self.kept))]  # a probability for each node, by root
        columns = (of[0, 1:].tolist() for of in (shape.parents, shape.depths, shape.ranks))
        for parent, level, rank in zip(*columns, strict=True):
            reached.append(reached[parent] * self.kept[:, level - 1, rank].float())
        at_least = torch.zeros(len(self.kept), shape.depth + 1)
        at_least.index_add_(1, shape.depths[0].cpu(), torch.stack(reached, 1))
        ends = at_least - F.pad(at_least[:, 1:], (0, 1))
        return int(self.roots.sum()) / self._expected_rounds(ends)

    def _expected_rounds(self, ends: Tensor) -> float:
        """The expected number of rounds in all answers, if a round from each root keeps d drafts
        with probability ``ends`` [R, D + 1].
        """
        by_answer = ends.split(self.roots.tolist())
        longest = int(self.roots.max())
        moves = torch.stack([F.pad(one, (0, 0, 0, longest - len(one))) for one in by_answer])
        begun = torch.zeros(len(by_answer), longest + ends.shape[1] + 1)  # [B, …] by root
        begun[:, 0] = 1
        for root in range(longest):
            after = slice(root + 1, root + 1 + ends.shape[1])
            begun[:, after] += begun[:, root, None] * moves[:, root]
        inside = torch.arange(begun.shape[1]) < self.roots[:, None]
        return float(begun[inside].sum())

    def table(self) -> list[list[float]]:
        """Acceptance [D, K] of the draft of each rank, given that the drafts above are accepted."""
        matched = self.kept.float()
        reached = F.pad(matched.sum(-1).cumprod(1)[:, :-1], (1, 0), value=1.0)  # [R, D]
        shares = (reached[..., None] * matched).sum(0) / reached.sum(0).clamp(min=1e-9)[:, None]
        table: list[list[float]] = (shares / shares.sum(-1, keepdim=True).clamp(min=1)).tolist()
        return table

    def by_context(self) -> dict[int, float]:
        """The share of likeliest first drafts that are accepted, by the length of the text before
        the answer (keys are upper bounds in tokens).
        """
        by_answer = self.kept[:, 0, 0].float().split(self.roots.tolist())
        bounds = self.contexts.float().quantile(torch.tensor([1 / 3, 2 / 3, 1.0])).ceil().int()
        shares, least = {}, -1
        for most in dict.fromkeys(bounds.tolist()):
            pairs = zip(by_answer, self.contexts.tolist(), strict=True)
            if group := [one for one, context in pairs if least < context <= most]:
                shares[most] = float(torch.cat(group).mean())
            least = most
        return shares

    def plan(self, costs: Costs, margin: float = 0.05) -> Plan:
        """The tree expected to be fastest if rounds take ``costs``, or plain decoding."""
        table = self.table()
        shapes = [best_tree(table, nodes, len(table))[0] for nodes in SIZES]
        return plan(costs, self.tau, list({one.size: one for one in shapes}.values()), margin)

    def save(self, file: Path) -> None:
        """Write it as safetensors."""
        tensors = {"kept": self.kept.half().cpu().contiguous()}
        tensors |= {"roots": self.roots.int().cpu(), "contexts": self.contexts.int().cpu()}
        head = {"format": FORMAT, "version": str(VERSION), "facts": json.dumps(dict(self.facts))}
        save_readable(tensors, file, head)

    @classmethod
    def load(cls, file: Path) -> Trace:
        """The trace in ``file``.

        Raises ``FileNotFoundError``, and ``ValueError`` for other files and other versions.
        """
        if not file.is_file():
            raise FileNotFoundError(f"there must be a trace at {file}, got no file")
        try:
            with safe_open(file, "pt") as opened:
                head = opened.metadata() or {}
                names = list(opened.keys())
                tensors = {name: opened.get_tensor(name) for name in names}
            if head.get("format") != FORMAT:
                raise ValueError("other tensors")
            if head.get("version") != str(VERSION):
                raise ValueError(f"one of version {head.get('version')}")
            trace = cls(**tensors, facts=json.loads(head["facts"]))
            trace._check()
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file} must be a trace of version {VERSION}, as specmm doctor --trace writes it, "
                f"got {_reason(error)}"
            ) from error
        return trace

    def _check(self) -> None:
        """Raise ``ValueError`` for impossible probabilities and counts."""
        kept, roots = self.kept, self.roots
        of_answers = roots.ndim == 1 and roots.shape == self.contexts.shape
        if kept.ndim != 3 or 0 in kept.shape or not of_answers:
            raise ValueError(f"tensors of shapes {[list(kept.shape), list(roots.shape)]}")
        if int(roots.min()) < 0 or int(roots.sum()) != len(kept):
            raise ValueError(f"{len(kept)} roots, where its answers have {int(roots.sum())}")
        chances = kept.float()
        if not bool((chances >= 0).all() & (chances.sum(-1) <= 1 + ROUNDED).all()):
            raise ValueError("chances that are not probabilities")


def _reason(error: Exception) -> str:
    if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
        return str(error)
    return "a file that is damaged" if isinstance(error, SafetensorError) else "one that is damaged"


def costs_of(file: Path) -> dict[int, Costs]:
    """Seconds of rounds by batch size, from the JSON that ``specmm plan --json`` prints on the
    machine in question, or from stated numbers: one or a list of ``{"batch": 1, "step": …, "host":
    …, "draft": {levels: …}, "verify": {nodes: …}}``.

    Raises ``FileNotFoundError``, and ``ValueError`` for anything else.
    """
    if not file.is_file():
        raise FileNotFoundError(f"there must be costs at {file}, got no file")
    costs: dict[int, Costs] = {}
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        for record in read if isinstance(read, list) else [read]:
            numbers = record.get("costs") or record  # as of a plan, or as stated
            if "step" in numbers:
                draft, verify = (
                    {int(k): float(v) for k, v in numbers[n].items()} for n in ("draft", "verify")
                )
                new = Costs(draft, verify, float(numbers["step"]), float(numbers.get("host", 0.0)))
                costs[int(record.get("batch", 1))] = new
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} must hold seconds of draft, verify and step as specmm plan --json prints "
            f"them, got {error}"
        ) from error
    if not costs:
        raise ValueError(f"{file} must hold the costs of a plan, got none")
    return costs
