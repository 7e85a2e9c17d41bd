"""From raw logits to the distribution that is sampled: guidance, penalties, temperature, filters.

A distribution has the shape of its logits, is float32 (float64 for float64 logits) and sums to 1.
Source: LlamaGen (arXiv 2406.06525), ``generate.sample``. A repetition penalty needs the
:class:`History`: to a node of a draft tree, its row's committed tokens, its ancestors and itself
count as seen.

Shape letters: B batch, N nodes, V vocabulary, S room for tokens, M most tokens appended.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.core.sorting import descending, kth_largest, likeliest
from specmm.core.state import with_one, without
from specmm.core.tree import DraftTree
from specmm.extending.kinds import check_at_least, check_numbers, check_whole


class History:
    """The first ``lengths`` [B] of each row's ``tokens`` [B, S], prompt included, are committed."""

    state: ClassVar[tuple[str, ...]] = ("tokens", "lengths", "prompts")

    def __init__(self, tokens: Tensor, lengths: Tensor, room: int) -> None:
        self.tokens = F.pad(tokens, (0, room + 1))  # the last column takes what does not count
        self.lengths = lengths.clone()
        self.prompts = lengths.clone()  # [B], tokens before the answers

    def take(self, row: int, other: History, source: int = 0) -> None:
        """Replace ``row``'s tokens by those of row ``source`` of ``other``, which must fit."""
        self.tokens[row, : other.tokens.shape[1]] = other.tokens[source]
        self.lengths[row] = other.lengths[source]
        self.prompts[row] = other.prompts[source]

    def rows(self, some: Tensor) -> History:
        """The history of only the rows ``some`` [n]."""
        history = copy.copy(self)
        for name in self.state:
            setattr(history, name, getattr(self, name)[some])
        return history

    def join(self) -> None:
        """Add an empty row at the end."""
        for name in self.state:
            setattr(self, name, with_one(getattr(self, name)))

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""
        for name in self.state:
            setattr(self, name, without(getattr(self, name), row))

    def append(self, tokens: Tensor, kept: Tensor) -> None:
        """Add the first ``kept`` [B] of ``tokens`` [B, M]."""
        order = torch.arange(tokens.shape[1], device=tokens.device)
        spare = self.tokens.shape[1] - 1
        where = torch.where(order < kept[:, None], self.lengths[:, None] + order, spare)
        self.tokens.scatter_(1, where, tokens)
        self.lengths += kept

    def seen(self, tree: DraftTree | None, vocabulary: int) -> Tensor:
        """Whether each node of ``tree`` has seen each token [B, N, V]; without tree [B, 1, V]."""
        row = self.tokens.new_zeros(len(self.tokens), vocabulary, dtype=torch.bool)
        column = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        valid = (column < self.lengths[:, None]) & (self.tokens < vocabulary)
        row.scatter_reduce_(1, self.tokens.where(valid, 0), valid, "amax")
        if tree is None:
            return row[:, None]
        node_tokens = tree.tokens[:, :, None]  # in place of nodes that are no ancestors
        path = torch.where(tree.shape.ancestors, tree.tokens[:, None], node_tokens)  # [B, N, N]
        return row[:, None].repeat(1, tree.shape.size, 1).scatter_(-1, path, True)

    def sequence(self, row: int) -> Tensor:
        """The committed tokens [S'] of a row."""
        return self.tokens[row, : int(self.lengths[row])]

    def answer(self, row: int) -> list[int]:
        """The committed tokens of a row after its prompt."""
        tokens: list[int] = self.sequence(row)[int(self.prompts[row]) :].tolist()
        return tokens


@dataclass(frozen=True)
class Processor:
    """Turns logits [..., V] into the distribution that is sampled.

    In this order: repetition penalty, temperature, top-k, top-p, softmax. ``temperature`` 0 puts
    all mass on the largest logit (on ties the first). ``top_k`` 0 is off; values equal to the k-th
    largest are all kept. ``top_p`` 1 is off; a token is kept while the mass above it is at most
    ``top_p``, together with its ties. ``top_p_first`` takes the nucleus of the whole distribution
    and then the top k, as the processors of LANTERN and transformers do. ``repetition_penalty`` r
    (CTRL, arXiv 1909.05858; 1 is off) divides positive logits of tokens already seen by r and
    multiplies negative ones. Raises ``ValueError`` on options out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_first: bool = False
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(top_p=self.top_p)
        check_numbers(repetition_penalty=self.repetition_penalty)
        check_whole(top_k=self.top_k)
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                "repetition_penalty must be finite and above 0, "
                f"got {self.repetition_penalty}, use 1 for none"
            )
        check_at_least(0, ", use 0 for greedy", temperature=self.temperature)
        if self.top_k < 0:
            raise ValueError(
                f"top_k must be at least 0, got {self.top_k}, use 0 to keep all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}, use 1 to keep all tokens")

    @property
    def settings(self) -> dict[str, float | str]:
        """The active options, for certificates. Temperature 0 takes the largest logit, which no
        filter changes. ``top_p`` keeps all ties; transformers cuts some of them.
        """
        settings: dict[str, float | str] = {"temperature": self.temperature}
        if self.top_k > 0 and not self.greedy:
            settings["top_k"] = self.top_k
        if self.top_p < 1 and not self.greedy:
            settings |= {"top_p": self.top_p, "top_p_ties": "kept"}
        if self.repetition_penalty != 1:
            settings["repetition_penalty"] = self.repetition_penalty
        return settings

    @property
    def greedy(self) -> bool:
        """Whether every distribution is a point mass by definition."""
        return self.temperature == 0

    @property
    def stateful(self) -> bool:
        """Whether distributions depend on the tokens seen."""
        return self.repetition_penalty != 1

    def check_vocabulary(self, size: int) -> None:
        """Raise ``ValueError`` when ``top_k`` exceeds the codebook ``size`` V."""
        if self.top_k > size:
            raise ValueError(
                f"top_k must be at most the codebook size {size}, got {self.top_k}, "
                "use 0 to keep all"
            )

    def __call__(
        self, logits: Tensor, seen: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Distributions [..., V] of ``logits`` [..., V]; ``seen`` [..., V] is for the penalty.

        Greedy distributions are written to ``out``, if given: allocating memory for a large
        vocabulary would take longer than all the rest.
        """
        if not self.greedy:
            return self.scores(logits, seen).softmax(-1)
        self.check_vocabulary(logits.shape[-1])
        kind = torch.promote_types(logits.dtype, torch.float32)
        if seen is not None and self.stateful:
            logits = penalise(logits.to(kind), seen, self.repetition_penalty)
        probs = torch.zeros_like(logits, dtype=kind) if out is None else out.zero_()
        return probs.scatter_(-1, likeliest(logits)[..., None], 1.0)

    def scores(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Scores [..., V] whose softmax :meth:`__call__` returns if ``temperature`` is above 0;
        -inf where a token is excluded.
        """
        self.check_vocabulary(logits.shape[-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if seen is not None and self.stateful:
            logits = penalise(logits, seen, self.repetition_penalty)
        if self.temperature != 1:
            logits = logits / max(self.temperature, 1e-5)
        if self.top_k in (0, logits.shape[-1]) and self.top_p == 1:
            return logits
        return logits.masked_fill(logits < self.threshold(logits), float("-inf"))

    def threshold(self, logits: Tensor) -> Tensor:
        """The smallest of ``logits`` [..., V] that top-k and top-p keep, [..., 1]."""
        logits = logits.detach()
        k = self.top_k or logits.shape[-1]
        if self.top_p == 1:
            return kth_largest(logits, k)
        ordered = descending(logits)
        kth = ordered[..., k - 1 : k]
        pool = ordered if self.top_p_first else ordered.masked_fill(ordered < kth, float("-inf"))
        # the mass above each token, 0 for the first
        above = F.pad(pool.softmax(-1).cumsum(-1)[..., :-1], (1, 0))
        count = (above <= self.top_p).sum(-1, keepdim=True)
        return torch.maximum(pool.gather(-1, count - 1), kth)

    def probs(
        self, logits: Tensor, history: History, tree: DraftTree | None, out: Tensor | None = None
    ) -> Tensor:
        """Distributions [B, N, V] after the nodes of ``tree``, or [B, 1, V] after ``history``."""
        return self(logits, history.seen(tree, logits.shape[-1]) if self.stateful else None, out)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of ``seen`` tokens by ``penalty`` and multiply negative ones."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def extremes(logits: Tensor) -> Tensor:
    """The least and the largest [2] of ``logits``; both are NaN if any logit is."""
    return torch.stack(logits.aminmax())


def check_finite(ends: Tensor, origin: str) -> None:
    """Raise ``ValueError`` naming ``origin`` unless :func:`extremes` ``ends`` are finite; waits."""
    if not all(map(math.isfinite, ends.tolist())):
        raise not_finite(origin)


def not_finite(origin: str) -> ValueError:
    """The error for non-finite logits of ``origin``, a model and a round."""
    return ValueError(
        f"logits must be finite, got NaN or infinity from {origin}, check its weights or run it in "
        "float32"
    )
