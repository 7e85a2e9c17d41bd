"""A drafter that predicts a whole block in one pass: a few layers over all levels at once, then a
step per level that costs a table look-up and the head.

Each committed position i gives a feature e_i = fc([emb(token_i); hidden_i]), as in EAGLE (arXiv
2401.15077), where hidden_i is the state that token i was drawn from. Level d of the block is a
query e_t + slot_d placed at the cell it predicts; queries attend the features, and features the
ones before them. What a level cannot know, the token drafted just before it, comes in as a row of a
table added after the layers (a first-order correction, as in Hydra, arXiv 2402.05109), so siblings
get distributions of their own and the recorded distributions are exact.

Shape letters: B batch, G guidance branches, R = G·B rows, M most positions committed a round, K
levels, S cache slots, C width, P parents of a level, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specmm.cache import Cache, CacheSize, Memory, branched
from specmm.drafter import Feedback
from specmm.image_ar.tokens.drafters.rejected_positions import RejectedPositions
from specmm.image_ar.tokens.gpt import (
    GPTConfig,
    RMSNorm,
    Rotary,
    Transformer,
    TransformerBlock,
    rotary_table,
)
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.randomness import UniformSource
from specmm.shape.trees import Siblings, draw_siblings
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of a block drafter: K = ``levels`` tokens drafted a pass through ``layers``, for such a
    ``target``.

    ``aux_layers`` are target layers whose inputs are read beside its last hidden state (as EAGLE-3,
    arXiv 2503.01840, does): the last state knows most about the token just drawn, earlier ones more
    about what follows. ``inner`` is the width of the feed-forward layers, 0 for the target's.
    """

    levels: int
    layers: int
    target: GPTConfig
    aux_layers: tuple[int, ...] = ()
    inner: int = 0


class BlockHead(nn.Module):
    """The network; the target's embeddings and output head are used, not copied."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        target = config.target
        self.config = config
        self.fc = nn.Linear((2 + len(config.aux_layers)) * target.dim, target.dim)
        self.slots = nn.Parameter(torch.randn(config.levels, target.dim) * 0.02)
        self.layers = nn.ModuleList(
            TransformerBlock(target, config.inner) for _ in range(config.layers)
        )
        self.previous = nn.Embedding(target.vocab_size, target.dim)
        self.norm = RMSNorm(target.dim, target.norm_eps)
        self.rotary = Rotary(rotary_table(target.grid, target.head_dim, 0, target.rope_base))
        nn.init.normal_(self.previous.weight, std=0.02)

    @torch.no_grad()
    def start_from(self, target: Transformer) -> None:
        """Begin training where a feature is the target's hidden state and the final norm is the
        target's.
        """
        width = self.config.target.dim
        self.fc.weight[:, width : 2 * width] = torch.eye(width)
        self.norm.weight.copy_(target.norm.weight)

    @torch.no_grad()
    def go_on_from(self, other: BlockHead) -> None:
        """Begin training as ``other``; units that its feed-forward layers do not have add nothing
        yet.

        Raises ``ValueError`` where these are wider than this drafter's, or the drafters differ in
        anything else.
        """
        wide, given = (head.config.inner or head.config.target.ffn_dim for head in (self, other))
        if given > wide or replace(other.config, inner=self.config.inner) != self.config:
            raise ValueError(
                f"drafter must go on from one of its levels, layers and auxiliary layers, at most {wide} wide, got one with "
                f"{other.config.levels} levels, {other.config.layers} layers, auxiliary layers {other.config.aux_layers}, {given} wide"
            )
        own = self.state_dict()
        for name, old in other.state_dict().items():
            if name.endswith("feed_forward.w2.weight"):
                own[name].zero_()
            own[name][tuple(slice(size) for size in old.shape)] = old

    def features(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """e_i [R, M, C] of tokens' embeddings [R, M, C] and the states [R, M, C · (1 + auxiliary
        layers)] they were drawn from.
        """
        return self.fc(torch.cat([embedded, hidden], dim=-1))

    def queries(self, anchor: Tensor, levels: int) -> Tensor:
        """Queries [R, A·K, C] of the first K = ``levels`` levels after A anchors' features [R, A,
        C].
        """
        return (anchor[:, :, None] + self.slots[:levels]).flatten(1, 2)

    def forward(
        self, x: Tensor, cells: Tensor, bias: Tensor, memories: list[Memory] | None = None
    ) -> Tensor:
        """States [R, T, C] of features and queries ``x`` [R, T, C] at raster ``cells`` [R or 1, T].

        ``bias`` [R or 1, 1, T, S] is the additive mask over ``x`` itself, or over what ``memories``
        hold.
        """
        factors = self.rotary.at(cells)
        for i, layer in enumerate(self.layers):
            x = layer(x, factors, bias, memories[i] if memories else None)
        return x

    def read(self, states: Tensor, previous: Tensor) -> Tensor:
        """What the target's head reads [..., C]: level ``states`` corrected by the ``previous``
        tokens [...].
        """
        return self.norm(states + self.previous(previous))


@dataclass(frozen=True)
class Level:
    """The n nodes at ``depth`` of a static tree; their P parents all get ``width`` children drawn.

    ``above`` [P] are the parents' places among the nodes of the level above (None: all of them, in
    order); ``pick`` [n] finds the nodes among the P·width children drawn (None: all of them, in
    order).
    """

    depth: int
    above: Tensor | None
    pick: Tensor | None
    width: int

    @classmethod
    def of(cls, shape: TreeShape, depth: int) -> Level:
        """The nodes of ``shape`` at ``depth`` ≥ 1; raises ``ValueError`` unless nodes are numbered
        level by level.
        """
        if bool((shape.depths[0].diff() < 0).any()):
            raise ValueError("a drafter's tree must number its nodes level by level")
        nodes = (shape.depths[0] == depth).nonzero()[:, 0]
        parents, index = shape.parents[0, nodes].unique(return_inverse=True)
        width = int(shape.ranks[0, nodes].max()) + 1
        first, count = (
            int((shape.depths[0] < depth - 1).sum()),
            int((shape.depths[0] == depth - 1).sum()),
        )
        pick = index * width + shape.ranks[0, nodes]
        everything = pick.equal(torch.arange(len(parents) * width, device=pick.device))
        above = None if len(parents) == count else parents - first
        return cls(depth, above, None if everything else pick, width)


class BlockDrafter:
    """Draws a tree of a fixed shape, siblings without replacement from the recorded distributions;
    or, with ``sampled=False``, takes the most likely tokens (point masses). ``rejected_weight`` is
    the weight of the target's distributions after the drafts it rejected in what is drawn from;
    ``siblings`` says how they are drawn instead.
    """

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
                f"tree depth must be at most the drafter's {head.config.levels} levels, got {shape.depth}"
            )
        self.head, self.target, self.shape, self.sampled = head.eval(), target, shape, sampled
        self.max_nodes, self.max_depth, self.siblings = shape.size, shape.depth, siblings
        self.rejected_weight = (
            RejectedPositions(shape, rejected_weight) if rejected_weight and sampled else None
        )
        target.aux_layers = head.config.aux_layers
        self.plan = [Level.of(shape, d) for d in range(1, shape.depth + 1)]

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch: a cache for every token's feature, with room for a round's features and
        queries.
        """
        hidden, target = feedback.output.hidden, self.head.config.target
        if hidden.shape[-1] != target.dim * (1 + len(self.head.config.aux_layers)):
            raise ValueError(
                f"the target must give the states of layers {self.head.config.aux_layers}, build the drafter first"
            )
        self.most = self.max_depth + 1  # M
        size = CacheSize(
            layers=len(self.head.layers),
            heads=target.n_head,
            head_dim=target.head_dim,
            batch=len(feedback.token),
            branches=len(hidden) // len(feedback.token),
            capacity=target.block_size,
            scratch=self.most + self.max_depth,
        )
        self.cache, self.clock = Cache(size, hidden.dtype, hidden.device), clock
        self.branches = size.branches
        self.order = torch.arange(size.scratch, device=hidden.device)
        self.bias = hidden.new_full((size.rows, 1, size.scratch, self.cache.slots), float("-inf"))
        earlier = self.order[: self.most, None] >= self.order[: self.most]
        self.bias[:, :, : self.most, size.capacity : size.capacity + self.most].masked_fill_(
            earlier, 0
        )

    def start_row(self, row: int) -> None:
        """See :class:`specmm.drafter.BatchingDrafter`."""
        self.cache.lengths[row] = 0

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Draft the tree after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        with self.clock("draft"):
            states = self._levels(feedback)
        tokens = [feedback.token[:, None]]
        probs = [
            states.new_zeros(
                len(tokens[0]), 1, self.head.config.target.vocab_size, dtype=torch.float32
            )
        ]
        if self.rejected_weight is not None:
            self.rejected_weight.read(feedback)
        index = self.cache.lengths[:, None]  # raster index of the first token drafted
        for depth, level in enumerate(self.plan):
            previous = (
                tokens[-1] if level.above is None else tokens[-1].index_select(1, level.above)
            )
            with self.clock("draft"):
                logits = self._read(states[:, depth : depth + 1], previous)
            guided = self.target.guide(logits, self._positions(index + depth))
            drafts, drawn = self._draw(guided, level, uniforms)
            tokens.append(drafts)
            probs.append(drawn)
        return DraftTree(
            torch.cat(tokens, 1), self.shape, torch.cat(probs, 1) if self.sampled else None
        )

    def _draw(self, logits: Tensor, level: Level, uniforms: UniformSource) -> tuple[Tensor, Tensor]:
        """A level's nodes [B, n] and the distributions [B, n, V] they were drawn from, of each
        parent's ``logits`` [B, P, V].
        """
        if (
            not self.sampled
        ):  # of the raw logits: at temperature 0 all but one token of the distribution have no mass
            drafts = logits.topk(level.width).indices.flatten(1)
            return drafts if level.pick is None else drafts.index_select(1, level.pick), logits[
                :, :0
            ]
        dist = self.target.processor(logits)
        if self.rejected_weight is not None:
            dist = self.rejected_weight.mix(dist, level.depth)
        children, probs = draw_siblings(dist, level.width, uniforms, self.siblings)
        drafts, drawn = children.flatten(1), probs.flatten(1, 2)
        if level.pick is None:
            return drafts, drawn
        return drafts.index_select(1, level.pick), drawn.index_select(1, level.pick)

    def _levels(self, feedback: Feedback) -> Tensor:
        """Take in the tokens just committed and return the level states [R, K, C]."""
        hidden, tokens, kept = self._news(feedback)
        embedded = branched(self.target.model.tok_embeddings(tokens), self.branches)
        features = self.head.features(embedded, hidden)  # [R, M, C]
        last = branched(kept.clamp(min=1) - 1, self.branches)[:, None, None]
        anchor = features.gather(1, last.expand(-1, 1, features.shape[-1]))
        x = torch.cat([features, self.head.queries(anchor, self.max_depth)], dim=1)
        ahead = self.order >= self.most  # the queries' cells follow the kept tokens, not all M
        cells = self.cache.lengths[:, None] + self.order - ahead * (self.most - kept)[:, None]
        self._aim(kept)
        states = self.head(x, branched(cells, self.branches), self.bias, self.cache.layers)
        self.cache.keep(self.order[: self.most].expand(len(kept), -1), kept)
        return states[:, self.most :]

    def _news(self, feedback: Feedback) -> tuple[Tensor, Tensor, Tensor]:
        """States [R, M, C], the tokens drawn from them [B, M] and how many of each row count [B]."""
        if feedback.result is not None and feedback.tokens is not None:
            return feedback.kept_hidden(), feedback.tokens, feedback.result.kept
        hidden = feedback.output.hidden[:, -1:].expand(-1, self.most, -1)
        return (
            hidden,
            feedback.token[:, None].expand(-1, self.most),
            torch.ones_like(feedback.token),
        )

    def _aim(self, kept: Tensor) -> None:
        """Write after the cache's capacity; features see what is before them, queries only what was
        ``kept`` [B].
        """
        capacity = self.cache.size.capacity
        self.cache.aim(capacity, self.cache.slots)
        self.bias[..., :capacity] = self.cache.prefix_bias()[:, None, None]
        shut = branched(self.order[: self.most] >= kept[:, None], self.branches)
        seen = torch.zeros_like(shut, dtype=self.bias.dtype).masked_fill_(shut, float("-inf"))
        self.bias[:, 0, self.most :, capacity : capacity + self.most] = seen[:, None]

    def _read(self, states: Tensor, previous: Tensor) -> Tensor:
        """Raw logits [R, P, V] of a level's children of the tokens ``previous`` [B, P]."""
        return self.target.model.output(
            self.head.read(states, branched(previous, self.branches))
        ).float()

    def _positions(self, index: Tensor) -> Tensor:
        """Position of the node whose logits predict raster ``index`` [B, 1] (guidance may depend on
        it).
        """
        return index + self.target.model.config.cls_token_num - 1
