"""A target of one's own, in the loop as it is: a Markov chain whose next token depends on the last.

    python -m demos.own.target

The loop needs four things of a target: ``prefill`` reads the prompts, ``score`` gives the
distribution after every node of a draft tree, ``commit`` keeps the accepted path, and ``step`` is
plain decoding. A network also keeps its cache here; whoever scores a tree must give each node what
its own path would give it, which is the first thing to test.

Shape letters: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

import torch
import typer
from torch import Tensor

from specmm.core.decode import decode, decode_plain
from specmm.core.randomness import Uniforms
from specmm.core.stats import Stats
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree
from specmm.extending.outside import DraftRequest
from specmm.shape.trees import branching
from specmm.verify import Recursive
from specmm.verify.rule import VerifyResult


class Markov:
    """Tokens of ``table`` [V, V]: row i is the distribution after token i."""

    name = "markov"

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def prefill(self, prompt: Tensor, scratch: int) -> TargetOutput:
        """After the last token of each ``prompt`` [B, L]."""
        return self._after(prompt[:, -1:])

    def score(self, tree: DraftTree) -> TargetOutput:
        """After every node: a node's path matters by its last token only."""
        return self._after(tree.tokens)

    def commit(self, result: VerifyResult) -> None:
        """Nothing is kept: a network's cache would keep ``result.path`` here."""

    def step(self, tokens: Tensor) -> TargetOutput:
        """After one token a row [B]."""
        return self._after(tokens[:, None])

    def _after(self, tokens: Tensor) -> TargetOutput:
        return TargetOutput(self.table[tokens], tokens[..., None].float())


def table(size: int, seed: int = 0) -> Tensor:
    """Distributions [V, V] of ``size`` tokens that are alike from row to row."""
    weights = torch.rand(size, size, generator=torch.Generator().manual_seed(seed))
    return 0.7 * weights.mean(0).softmax(-1) + 0.3 * weights.softmax(-1)


def drawn(size: int = 12, length: int = 400) -> tuple[Stats, Stats]:
    """Plain decoding and drafts by ``echo`` on a tree, by the exact recursive rule."""
    from demos.own.drafter import Echo

    target = Markov(table(size))
    request = DraftRequest(branching([2, 1]), sampled=True, siblings="distinct")
    prompt = torch.zeros(2, 1, dtype=torch.int64)
    *_, plain = decode_plain(target, prompt, length, Uniforms.from_seeds([0, 1]))
    drafter = Echo(target, request)
    steps = decode(target, drafter, Recursive(), prompt, length, Uniforms.from_seeds([0, 1]))
    *_, end = steps
    return plain.stats, end.stats


if __name__ == "__main__":
    plain, drafted = drawn()
    typer.echo(f"plain: {plain.rounds} rounds for {plain.tokens} tokens")
    typer.echo(f"echo:  {drafted.rounds} rounds for {drafted.tokens} tokens")
