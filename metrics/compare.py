"""The quality gate: do two sets of features differ by more than sampling noise, and by how much.

*Whether*: a permutation test on the squared MMD (Gretton et al. 2012, sec. 2 and 8), with the +1 of
Phipson and Smyth (2010) that keeps the p-value exact. *How much*: the difference of both sets'
kernel distances to a reference, with a bootstrap interval.

Shapes: first [N, F], second [M, F], reference [R, F]; P relabellings, labels [P, N + M] of 0 and 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from specmm.metrics.features import Features, Protocol, comparable
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.kernel import (
    BLOCK,
    KERNEL,
    diagonal,
    exact_pair,
    kernel,
    mean_across,
    mean_within,
)
from specmm.metrics.measurement import Measurement


@dataclass(frozen=True)
class Comparison:
    """Squared MMD ``distance`` of two sets, and its ``p_value`` if both had one distribution.

    ``loss``: KID(first, reference) - KID(second, reference), positive where ``first`` is worse.
    """

    distance: float
    p_value: float
    alpha: float
    protocol: Protocol
    loss: Measurement | None = None

    @property
    def differ(self) -> bool:
        """Whether the test finds a difference; it errs with probability ``alpha`` at most."""
        return self.p_value <= self.alpha

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {**asdict(self), "differ": self.differ}


def compare(
    first: Features,
    second: Features,
    reference: Features | None = None,
    *,
    generator: torch.Generator,
    permutations: int = 999,
    alpha: float = 0.05,
    paired: bool = False,
) -> Comparison:
    """Test if features [N, F] and [M, F] differ; measure how much against ``reference`` [R, F].

    ``paired``: row i of both sets comes from the same prompt or noise, so labels are swapped and
    samples redrawn within pairs; then N must be M. The test costs (N + M)² (F + P) multiplications.
    Raises ``ValueError`` as ``exact_pair`` does, and for unequal pairs, no permutations, or an
    ``alpha`` that needs more permutations.
    """
    x, y, facts = exact_pair(first, second)
    if permutations < 1 or not 1 / (permutations + 1) <= alpha < 1:
        got = f"{alpha} of {permutations}"
        raise ValueError(f"alpha must be in [1 / (permutations + 1), 1), got {got}; permute more")
    if paired and len(x) != len(y):
        raise ValueError(f"pairs need sets of one size, got {len(x)} and {len(y)}; cut one")
    relabelled = relabellings(len(x), len(y), permutations, generator, paired)
    labels = torch.cat([_true_labels(len(x), len(y)), relabelled]).to(x)
    distances = labelled_distances(torch.cat([x, y]), labels)
    facts["kernel"] = KERNEL
    loss = None
    if reference is not None:
        _, third, _ = exact_pair(first, reference)
        comparable(second, reference)  # their protocols, too
        loss = _loss(x, y, third, Bootstrap(generator), paired, facts)
    facts = {**facts, "permutations": permutations, "paired": paired}
    rounding = 1e-12 * float(distances.abs().max())  # equal splits may differ by this
    p_value = float((distances >= distances[0] - rounding).double().mean())  # the true one counts
    return Comparison(float(distances[0]), p_value, alpha, facts, loss)


def relabellings(n: int, m: int, count: int, generator: torch.Generator, paired: bool) -> Tensor:
    """Random labels [P, n + m]: 1 for the n members of the first set."""
    if paired:
        swapped = torch.randint(2, (count, n), generator=generator)
        return torch.cat([1 - swapped, swapped], dim=1).double()
    truth = _true_labels(n, m)[0]
    return torch.stack([truth[torch.randperm(n + m, generator=generator)] for _ in range(count)])


def labelled_distances(pool: Tensor, labels: Tensor) -> Tensor:
    """Unbiased squared MMD [P] of each labelling of the pooled features, in one pass.

    With q = wᵀKw and r = wᵀK1 the other sums follow: across r - q, within the second 1ᵀK1 - 2r + q.
    """
    quadratic = labels.new_zeros(len(labels))
    linear = labels.new_zeros(len(labels))
    total = labels.new_zeros(())
    for start in range(0, len(pool), BLOCK):
        rows = slice(start, start + BLOCK)
        block = kernel(pool[rows], pool)
        quadratic += ((labels[:, rows] @ block) * labels).sum(1)
        sums = block.sum(1)
        linear += labels[:, rows] @ sums
        total += sums.sum()
    itself = diagonal(pool)
    within = labels @ itself
    n = labels.sum(1)
    m = len(pool) - n
    first = (quadratic - within) / (n * (n - 1))
    second = (total - 2 * linear + quadratic - (itself.sum() - within)) / (m * (m - 1))
    return first + second - 2 * (linear - quadratic) / (n * m)


def _true_labels(n: int, m: int) -> Tensor:
    return (torch.arange(n + m) < n).double()[None]


def _loss(
    x: Tensor, y: Tensor, reference: Tensor, bootstrap: Bootstrap, paired: bool, facts: Protocol
) -> Measurement:
    """The first set's KID minus the second set's; the reference's own term cancels."""
    wx = _itself_and_resamples(x, bootstrap)
    wr = _itself_and_resamples(reference, bootstrap)
    wy = wx if paired else _itself_and_resamples(y, bootstrap)
    of_first = mean_within(x, wx) - 2 * mean_across(x, reference, wx, wr)
    of_second = mean_within(y, wy) - 2 * mean_across(y, reference, wy, wr)
    differences = of_first - of_second
    sampled = "pairs and reference" if paired else "all three sets"
    protocol = {**facts, "reference_count": len(reference)}
    interval = bootstrap.of_replicates(differences[1:], sampled)
    return Measurement("kid_difference", float(differences[0]), protocol, interval=interval)


def _itself_and_resamples(x: Tensor, bootstrap: Bootstrap) -> Tensor:
    return torch.cat([x.new_ones(1, len(x)), bootstrap.weights(len(x)).to(x)])  # [1 + B, N]
