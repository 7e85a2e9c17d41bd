"""A drafter that predicts a whole block in one pass: a few layers over all levels at once, then a
table look-up and the target's head for each level.

Each committed position i gives a feature e_i = fc([emb(token_i); hidden_i]), as in EAGLE (arXiv
2401.15077), where hidden_i is the state that token i was drawn from. Level d of the block is a
query e_t + slot_d placed at the cell it predicts; queries attend to the features, and features to
earlier ones. The layers do not know the token drafted just before a level: it enters as a row of a
table added after the layers (a first-order correction, as in Hydra, arXiv 2402.05109), so children
of different nodes get their own distributions, and the recorded distributions are exact.

Shape letters: B batch, G guidance branches, R = G·B rows, M most positions committed a round, K
levels, S cache slots, C width, N tree nodes, D tree depth, P parents of a level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from specmm.core.cache import Cache, CacheSize, Memory, alike, branched
from specmm.core.drafter import Feedback
from specmm.core.randomness import UniformSource
from specmm.core.sorting import largest
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape, at_nodes
from specmm.image_ar.tokens.gpt import (
    GPTConfig,
    RMSNorm,
    RotaryTable,
    TransformerBlock,
    rotary_table,
)
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.methods import check_rejected_weight
from specmm.shape.trees import Siblings, draw_siblings


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of a block drafter for a ``target``: a pass through ``layers`` drafts K = ``levels``
    tokens.

    ``aux_layers`` are target layers whose inputs are read beside its last hidden state (as EAGLE-3,
    arXiv 2503.01840, does): the last state knows most about the token just drawn, earlier ones more
    about what follows. ``inner`` is the width of the feed-forward layers, 0 for the target's.
    """

    levels: int
    layers: int
    target: GPTConfig
    aux_layers: tuple[int, ...] = ()
    inner: int = 0

    def facts(self) -> dict[str, object]:
        """The content of a drafter's ``config.json``."""
        return {
            "model": "BlockHead",
            "levels": self.levels,
            "layers": self.layers,
            "aux_layers": self.aux_layers,
            "inner": self.inner,
        }


class BlockHead(nn.Module):
    """The network; the target's embeddings and output head are used, not copied."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        target = config.target
        self.config = config
        self.fc = nn.Linear((2 + len(config.aux_layers)) * target.dim, target.dim)
        self.slots = nn.Parameter(torch.randn(config.levels, target.dim) * 0.02)
        layers = (TransformerBlock(target, config.inner) for _ in range(config.layers))
        self.layers = nn.ModuleList(layers)
        self.previous = nn.Embedding(target.vocab_size, target.dim)
        self.norm = RMSNorm(target.dim, target.norm_eps)
        self.rotary = RotaryTable(rotary_table(target.grid, target.head_dim, 0, target.rope_base))
        nn.init.normal_(self.previous.weight, std=0.02)

    def features(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """e_i [R, M, C] of tokens' embeddings [R, M, C] and the states they were drawn from [R, M,
        C · (1 + auxiliary layers)].
        """
        return self.fc(torch.cat([embedded, hidden], dim=-1))

    def queries(self, anchor: Tensor, levels: int) -> Tensor:
        """Queries [R, A·K, C] of the first K = ``levels`` after A anchors' features [R, A, C]."""
        return (anchor[:, :, None] + self.slots[:levels]).flatten(1, 2)

    def forward(
        self,
        x: Tensor,
        cells: Tensor,
        bias: Tensor,
        memories: list[Memory] | None = None,
        queries: int = 0,
    ) -> Tensor:
        """States [R, T, C] of features and queries ``x`` [R, T, C] at raster ``cells`` [R or 1, T];
        with ``queries``, only the states of that many rows at the end.

        ``bias`` [R or 1, 1, T, S] is the additive mask over ``x`` itself, or over the slots of
        ``memories``.
        """
        factors = self.rotary.at(cells)
        layer_memories: Sequence[Memory | None] = memories or [None] * len(self.layers)
        *earlier, final = zip(self.layers, layer_memories, strict=True)
        for layer, memory in earlier:
            x = layer(x, factors, bias, memory)
        # of features the last layer only needs keys and values
        last, memory = final
        states: Tensor = last(x, factors, bias[:, :, -queries:], memory, queries)
        return states

    def read(self, states: Tensor, previous: Tensor) -> Tensor:
        """Input [..., C] of the target's head: ``states``, corrected by ``previous`` [...]."""
        return self.norm(states + self.previous(previous))


@dataclass(frozen=True)
class BlockLevel:
    """The n nodes at ``depth`` of a static tree; their P parents all get ``width`` children drawn.

    ``above`` [P] are the parents' indices among the nodes of the level above (None: all, in order);
    ``pick`` [n] are the nodes' indices among the P·width drawn children (None: all, in order).
    """

    depth: int
    above: Tensor | None
    pick: Tensor | None
    width: int

    @classmethod
    def of(cls, shape: TreeShape, depth: int) -> BlockLevel:
        """The nodes of ``shape`` at ``depth`` ≥ 1; ``ValueError`` unless numbered by level."""
        depths = shape.depths[0]
        if bool((depths.diff() < 0).any()):
            raise ValueError("a drafter's tree must number its nodes level by level")
        nodes = (depths == depth).nonzero()[:, 0]
        parents, index = shape.parents[0, nodes].unique(return_inverse=True)
        width = int(shape.ranks[0, nodes].max()) + 1
        pick = index * width + shape.ranks[0, nodes]
        everything = pick.equal(torch.arange(len(parents) * width, device=pick.device))
        first = int((depths < depth - 1).sum())
        childless = len(parents) < int((depths == depth - 1).sum())
        above = parents - first if childless else None
        return cls(depth, above, None if everything else pick, width)


class BlockDrafter:
    """Draws a tree of a fixed shape, siblings without replacement from the recorded distributions;
    or, with ``sampled=False``, takes the most likely tokens (point masses).

    ``rejected_weight`` is the weight of :class:`RejectedPositions` in the draft distributions;
    ``siblings`` chooses another way to draw siblings.
    """

    state: ClassVar[tuple[str, ...]] = ("cache", "order", "bias")

    def __init__(
        self,
        head: BlockHead,
        target: LlamaGenTarget,
        shape: TreeShape,
        sampled: bool = True,
        rejected_weight: float = 0.0,
        siblings: Siblings = "distinct",
    ) -> None:
        if shape.depth > head.config.levels:
            raise ValueError(
                f"tree depth must be at most the drafter's {head.config.levels} levels, "
                f"got {shape.depth}"
            )
        self.head = head.eval()
        self.target = target
        self.shape = shape
        self.sampled = sampled
        self.siblings: Siblings = siblings
        self.max_nodes = shape.size
        self.max_depth = shape.depth
        mixes = rejected_weight and sampled
        self.rejected = RejectedPositions(shape, rejected_weight) if mixes else None
        target.read_layers(head.config.aux_layers)
        self.plan = [BlockLevel.of(shape, d) for d in range(1, shape.depth + 1)]

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch: a cache for all tokens' features, and for a round's own slots."""
        hidden = feedback.output.hidden
        target = self.head.config.target
        if hidden.shape[-1] != target.dim * (1 + len(self.head.config.aux_layers)):
            raise ValueError(
                f"the target must give the states of layers {self.head.config.aux_layers}, "
                "build the drafter first"
            )
        most = self.max_depth + 1
        size = CacheSize(
            layers=alike(len(self.head.layers), target.n_head, target.head_dim),
            batch=len(feedback.token),
            branches=len(hidden) // len(feedback.token),
            capacity=self.target.length,
            scratch=most + self.max_depth,
        )
        self.clock = clock
        self.cache = Cache.again(vars(self).get("cache"), size, hidden.dtype, hidden.device)
        self.branches = size.branches
        self.order = torch.arange(size.scratch, device=hidden.device)
        self.bias = self._causal(most)  # the mask of a round's features and queries

    def _causal(self, most: int) -> Tensor:
        """The mask [R, 1, M + K, S] under which M = ``most`` features see those before them."""
        size = self.cache.size
        stop = size.capacity + most + self.max_depth
        shape = (size.rows, 1, most + self.max_depth, stop)
        bias = torch.full(shape, float("-inf"), dtype=self.cache.dtype, device=self.order.device)
        earlier = self.order[:most, None] >= self.order[:most]
        bias[:, :, :most, size.capacity : size.capacity + most].masked_fill_(earlier, 0)
        return bias

    def start_row(self, row: int) -> None:
        self.cache.lengths[row] = 0

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """A tree or chain, level by level, from one pass of the head for all levels."""
        with self.clock("draft"):
            states = self._levels(feedback)
        if self.rejected is not None:
            self.rejected.read(feedback)
        tokens = [feedback.token[:, None]]
        vocabulary = self.target.vocabulary
        probs = [states.new_zeros(len(tokens[0]), 1, vocabulary, dtype=torch.float32)]
        position = self.cache.lengths[:, None]  # guidance may depend on the place
        for depth, level in enumerate(self.plan):
            latest = tokens[-1]
            previous = latest if level.above is None else latest.index_select(1, level.above)
            with self.clock("draft"):
                logits = self._read(states[:, depth : depth + 1], previous)
            dist = self._dist(self.target.drawn_logits(logits, position + depth), level)
            drafts, drawn = self._draw(dist, level, uniforms)
            tokens.append(drafts)
            probs.append(drawn)
        recorded = torch.cat(probs, 1) if self.sampled else None
        return DraftTree(torch.cat(tokens, 1), self.shape, recorded)

    def _dist(self, logits: Tensor, level: BlockLevel) -> Tensor:
        """Distributions [B, P, V] of a level's children by each parent's ``logits``. If drafts are
        the likeliest tokens, the logits themselves: at temperature 0 only one token would have any
        mass.
        """
        if not self.sampled:
            return logits
        processor = self.target.processor
        if self.rejected is None:
            return processor(logits)
        return self.rejected.mix(processor.scores(logits), level.depth)

    def _draw(
        self, dist: Tensor, level: BlockLevel, uniforms: UniformSource
    ) -> tuple[Tensor, Tensor]:
        """A level's nodes [B, n], drawn from the result of :meth:`_dist` [B, P, V], and their
        distributions [B, n, V].
        """
        if not self.sampled:
            drafts = largest(dist, level.width)[1].flatten(1)
            chosen = drafts if level.pick is None else drafts.index_select(1, level.pick)
            return chosen, dist[:, :0]
        children, probs = draw_siblings(dist, level.width, uniforms, self.siblings)
        drafts = children.flatten(1)
        drawn = probs.flatten(1, 2)
        if level.pick is None:
            return drafts, drawn
        return drafts.index_select(1, level.pick), drawn.index_select(1, level.pick)

    def _levels(self, feedback: Feedback) -> Tensor:
        """Read the tokens just committed and return the level states [R, K, C]."""
        hidden, tokens, kept = self._committed(feedback)
        embedded = branched(self.target.embed(tokens), self.branches)
        features = self.head.features(embedded, hidden)  # [R, M, C]
        last = branched(kept.clamp(min=1) - 1, self.branches)[:, None, None]
        anchor = features.gather(1, last.expand(-1, 1, features.shape[-1]))
        x = torch.cat([features, self.head.queries(anchor, self.max_depth)], dim=1)
        longest = tokens.shape[1]
        order = self.order[: x.shape[1]]
        ahead = order >= longest  # the queries' cells follow the kept tokens, not all M
        cells = self.cache.lengths[:, None] + order - ahead * (longest - kept)[:, None]
        bias = self._aim(kept, longest)
        everywhere = branched(cells, self.branches)
        states = self.head(x, everywhere, bias, self.cache.layers, self.max_depth)
        self.cache.keep(order[:longest].expand(len(kept), -1), kept)
        return states

    def _committed(self, feedback: Feedback) -> tuple[Tensor, Tensor, Tensor]:
        """States [R, M, C] of committed tokens, those tokens [B, M], and each row's count [B]."""
        if feedback.result is not None and feedback.tokens is not None:
            return feedback.kept_hidden(), feedback.tokens, feedback.result.kept
        most = self.max_depth + 1
        hidden = feedback.output.hidden[:, -1:].expand(-1, most, -1)
        tokens = feedback.token[:, None].expand(-1, most)
        return hidden, tokens, torch.ones_like(feedback.token)

    def _aim(self, kept: Tensor, most: int) -> Tensor:
        """Aim the cache at M = ``most`` features and the queries, written after its capacity.
        Returns their mask [R, 1, M + K, S]: features attend to earlier features, queries to the
        ``kept`` [B].
        """
        capacity = self.cache.size.capacity
        bias = self.bias
        self.cache.aim(capacity, bias.shape[-1])
        bias[..., :capacity] = self.cache.prefix_bias()[:, None, None]
        shut = branched(self.order[:most] >= kept[:, None], self.branches)
        mask = torch.zeros_like(shut, dtype=bias.dtype).masked_fill_(shut, float("-inf"))
        bias[:, 0, most:, capacity : capacity + most] = mask[:, None]
        return bias

    def _read(self, states: Tensor, previous: Tensor) -> Tensor:
        """Raw logits [R, P, V] of a level's children of the tokens ``previous`` [B, P]."""
        read = self.head.read(states, branched(previous, self.branches))
        return self.target.head(read).float()


class RejectedPositions:
    """Mixes the target's distributions after rejected drafts into those of a drafter whose trees
    have this ``shape``.

    The last round scored its whole tree. The target's distribution after a rejected draft is
    conditioned on one wrong token only; Speculative Jacobi Decoding (arXiv 2410.01699) drafts from
    such distributions. A mixture is q^(1 - w) s^w, normalised, of the drafter's q and that older
    distribution s, with w = ``weight`` in [0, 1): it costs no forward and overlaps with the
    target's more than either. It is computed from logarithms: one softmax instead of six
    operations. Decoding stays exact, because the mixture is fixed before the draft is drawn from
    it, and the tree records it.
    """

    def __init__(self, shape: TreeShape, weight: float) -> None:
        check_rejected_weight(weight)
        self.weight = weight
        shape.once("first below", first_below)  # now, for a program cannot
        # w log s by level [B, 1, V]; None after a prefill
        self.older: tuple[Tensor, ...] | None = None

    def read(self, feedback: Feedback) -> None:
        """Keep the distributions after the drafts that ``feedback`` rejected, for the next tree."""
        if feedback.result is None:
            self.older = None
            return
        end = (feedback.result.kept - 1).clamp(min=0)[:, None]
        last = feedback.result.path.gather(1, end)  # [B, 1]
        below = feedback.drafted[0].shape.once("first below", first_below)
        source = below[last[:, 0]]  # [B, D]
        valid = feedback.continued(source >= 0)
        older = at_nodes(feedback.output.probs, source.clamp(min=0))  # [B, D, V]
        share = self.weight * valid[..., None].to(older.dtype)
        older.clamp_(min=torch.finfo(older.dtype).tiny).log_().mul_(share)
        self.older = older.split(1, dim=1)
        self.rest = (1 - share).split(1, dim=1)

    def mix(self, scores: Tensor, depth: int) -> Tensor:
        """Distributions [B, P, V] of the parents' children at ``depth`` ≥ 1: the softmax of
        ``scores``, mixed with an older distribution if there is one.
        """
        if self.older is not None and depth <= len(self.older):
            scores = torch.addcmul(self.older[depth - 1], scores, self.rest[depth - 1])
        return scores.softmax(-1)


def first_below(shape: TreeShape) -> Tensor:
    """The node d steps below each node along first children, d = 1 … D, or -1: [N, D].

    If n is the last accepted node, the nodes in row n hold the distributions for the positions of
    the next tree, because the recovered token takes the first child's position.
    """
    # the spare row at the end keeps -1 at -1
    child = torch.full((shape.size + 1,), -1, device=shape.parents.device)
    nodes = zip(shape.parents[0].tolist(), shape.ranks[0].tolist(), strict=True)
    for node, (parent, rank) in enumerate(nodes):
        if node and rank == 0:
            child[parent] = node
    steps = [child[:-1]]
    for _ in range(shape.depth - 1):
        steps.append(child[steps[-1]])
    return torch.stack(steps, dim=1)
