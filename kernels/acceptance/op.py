"""``torch.ops.specmm.accept``: a round's result from its distributions, its drafts and its
uniforms.

Shape letters: B batch, N nodes, V vocabulary, D deepest level, W codes, J columns of the neighbour
table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.kernels.acceptance.by_rule import accept as by_rule
from specmm.kernels.backend import backend


@torch.library.custom_op("specmm::accept", mutates_args=())
def accept(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    depth: int,
    drafts: Tensor | None = None,
    table: Tensor | None = None,
    near: int = 0,
    bound: float = 0.0,
    factor: bool = False,
    offset: int = 0,
    processing: list[float] | None = None,
    leaves_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Path [B, D + 1] padded with -1, nodes kept [B] and next token [B], as
    ``specmm.verify.rule.decide`` has them.

    ``probs`` [B, N, V] (float32 or float64) are the target's processed distributions or, with
    ``processing`` = [temperature, top_k, top_p, top_p_first (0 or 1)], its float32 logits.
    ``tokens`` [B, N] and ``parents`` [1 or B, N] are the tree's, D = ``depth`` its deepest level,
    ``drafts`` [B, N, V] the distributions the nodes were drawn from (None: point masses),
    ``uniforms`` [B, N + 1] uniforms in [0, 1): one for each node, the last for the next token.

    Siblings are tested in turn: min(1, p / q), then p <- norm((p - q)+)
    (``specmm.verify.exact.Recursive``). With a neighbour ``table`` [W, J], a token borrows from its
    ``near`` nearest codes up to ``bound`` (delta) or, with ``factor``, (``bound`` - 1) p(x):
    LANTERN and LANTERN++ with the corrected residual; ``offset`` is code 0's id. With
    ``leaves_first`` nodes are tested in post-order instead (``specmm.verify.bottom_up.Traversal``;
    on a chain that is block verification), and nothing is borrowed. Raises ``ValueError`` on sizes
    and types that do not fit together.
    """
    check(probs, tokens, parents, uniforms, drafts, table, near, processing, leaves_first)
    run = by_rule
    if backend(probs.device) == "triton":
        from specmm.kernels.acceptance.triton import accept as run
    return run(
        probs,
        tokens,
        parents,
        uniforms,
        depth,
        drafts,
        table,
        near,
        bound,
        factor,
        offset,
        processing,
        leaves_first,
    )


@accept.register_fake
def _(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    depth: int,
    *others: object,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    batch = len(tokens)
    return tokens.new_empty(batch, depth + 1), tokens.new_empty(batch), tokens.new_empty(batch)


def check(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    drafts: Tensor | None,
    table: Tensor | None,
    near: int,
    processing: list[float] | None,
    leaves_first: bool,
) -> None:
    """Raise ``ValueError`` when the arguments of ``accept`` do not fit together."""
    batch, nodes = tokens.shape
    if probs.shape[:2] != tokens.shape or parents.shape not in ((1, nodes), (batch, nodes)):
        raise ValueError(
            f"probs must be [{batch}, {nodes}, V] and parents [1 or {batch}, {nodes}] for tokens {list(tokens.shape)}, "
            f"got {list(probs.shape)} and {list(parents.shape)}"
        )
    if uniforms.shape != (batch, nodes + 1) or (drafts is not None and drafts.shape != probs.shape):
        raise ValueError(
            f"uniforms must be [{batch}, {nodes + 1}] and drafts of the distributions' shape {list(probs.shape)}, got "
            f"{list(uniforms.shape)} and {None if drafts is None else list(drafts.shape)}"
        )
    if probs.dtype not in (torch.float32, torch.float64) or (
        processing is not None and probs.dtype != torch.float32
    ):
        raise ValueError(
            f"probs must be float32 or float64, and logits float32, got {probs.dtype}; convert them"
        )
    if processing is not None and len(processing) != 4:
        raise ValueError(
            f"processing must be [temperature, top_k, top_p, top_p_first], got {processing}"
        )
    if leaves_first and table is not None:
        raise ValueError(
            "no rule that tests leaves first borrows from neighbours: leave the table out"
        )
    if near > (0 if table is None else table.shape[1]):
        raise ValueError(
            f"near must be at most the columns of the table, got {near} for {_shape(table)}"
        )


def _shape(table: Tensor | None) -> str:
    return "no table" if table is None else str(list(table.shape))
