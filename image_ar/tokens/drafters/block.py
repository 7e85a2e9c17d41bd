"""A drafter that predicts a whole block in one pass: one layer over all levels, then a step per level that costs a
table look-up and the head.

Each committed position i gives a feature e_i = fc([emb(token_{i+1}); hidden_i]), as in EAGLE (arXiv 2401.15077).
Level d of the block is a query e_t + slot_d placed at the cell it predicts; all queries attend the features of the
committed positions in one layer. What a level cannot know, the token drafted just before it, comes in as a row of a
table added behind the layer (a first-order correction, as in Hydra, arXiv 2402.05109), so siblings get laws of
their own and the recorded laws are exact.

Shape letters: B batch, G guidance branches, R = G·B rows, M positions committed a round, K levels, S cached
positions, C width, H heads, D head width, V vocabulary, P prefix positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.drafter import Feedback
from specmm.image_ar.tokens.gpt import FeedForward, GPTConfig, RMSNorm, rotary_table, rotate
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.randomness import Uniforms, categorical
from specmm.shape.sampled import sample_siblings
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of a block drafter: ``levels`` K tokens drafted a pass, for a target of ``target`` sizes."""

    levels: int
    target: GPTConfig


class BlockHead(nn.Module):
    """The network; the target's embeddings and output head are used, not copied."""

    rotary: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        target = config.target
        self.config, self.heads = config, target.n_head
        self.fc = nn.Linear(2 * target.dim, target.dim)
        self.slots = nn.Parameter(torch.randn(config.levels, target.dim) * 0.02)
        self.attention_norm, self.ffn_norm = (RMSNorm(target.dim, target.norm_eps) for _ in range(2))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(target.dim, target.dim, bias=False) for _ in range(4))
        self.feed_forward = FeedForward(target)
        self.previous = nn.Embedding(target.vocab_size, target.dim)
        self.norm = RMSNorm(target.dim, target.norm_eps)
        nn.init.normal_(self.previous.weight, std=0.02)
        # prefix rows must not be zero here: a prefix position is a feature like any other
        table = rotary_table(target.grid, target.head_dim, 0, target.rope_base)
        self.register_buffer("rotary", torch.view_as_complex(table), persistent=False)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        rotary = self.rotary
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.rotary = rotary.to(self.slots.device)  # moved, never cast: a real dtype would drop the sines
        return self

    def features(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """e_i [R, M, C] of the next token's embedding and the hidden state, both [R, M, C]."""
        return self.fc(torch.cat([embedded, hidden], dim=-1))

    def keys_values(self, features: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [R, M, H, D] of ``features`` [R, M, C]; ``cells`` [R or 1, M] of the tokens in them."""
        normed = self.attention_norm(features)
        k, v = (f(normed).unflatten(-1, (self.heads, -1)) for f in (self.wk, self.wv))
        return self._turn(k, cells), v

    def levels(self, anchor: Tensor, cells: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Level states [R, A·K, C] for A anchors' features [R, A, C]; ``cells`` [R or 1, A·K] are predicted.

        ``keys`` and ``values`` [R, S, H, D] are attended under the additive ``bias`` [R or 1, 1, A·K, S].
        """
        x = (anchor[:, :, None] + self.slots).flatten(1, 2)
        q = self._turn(self.wq(self.attention_norm(x)).unflatten(-1, (self.heads, -1)), cells)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=bias
        )
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.ffn_norm(x))

    def read(self, states: Tensor, previous: Tensor) -> Tensor:
        """What the target's head reads [..., C]: level ``states`` corrected by the ``previous`` tokens [...]."""
        return self.norm(states + self.previous(previous))

    def _turn(self, x: Tensor, cells: Tensor) -> Tensor:
        return rotate(x, self.rotary[cells.clamp(max=len(self.rotary) - 1)][:, :, None])


@dataclass(frozen=True)
class Level:
    """One level of a static tree: ``nodes`` [n], for each the index of its parent in ``parents`` [P] and its rank."""

    nodes: Tensor
    parents: Tensor
    parent_index: Tensor
    ranks: Tensor
    width: int

    @classmethod
    def of(cls, shape: TreeShape, depth: int) -> Level:
        """The nodes of ``shape`` at ``depth`` ≥ 1."""
        nodes = (shape.depths[0] == depth).nonzero()[:, 0]
        parents, index = shape.parents[0, nodes].unique(return_inverse=True)
        ranks = shape.ranks[0, nodes]
        return cls(nodes, parents, index, ranks, int(ranks.max()) + 1)


class BlockDrafter:
    """Draws a tree of a fixed shape, siblings without replacement from the recorded laws; or, with
    ``sampled=False``, takes the most likely tokens (point masses).
    """

    def __init__(self, head: BlockHead, target: LlamaGenTarget, shape: TreeShape, sampled: bool = True) -> None:
        if shape.depth > head.config.levels:
            raise ValueError(f"tree depth must be at most the drafter's {head.config.levels} levels, got {shape.depth}")
        self.head, self.target, self.shape, self.sampled = head.eval(), target, shape, sampled
        self.max_nodes, self.max_depth = shape.size, shape.depth
        self.plan = [Level.of(shape, d) for d in range(1, shape.depth + 1)]

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch: room for every token's key and value, and one slot for what is thrown away."""
        hidden = feedback.output.hidden
        rows, self.slots = len(hidden), self.target.length + 1
        size = (rows, self.slots, self.head.heads, hidden.shape[-1] // self.head.heads)
        self.keys, self.values = hidden.new_zeros(size), hidden.new_zeros(size)
        self.lengths = torch.zeros_like(feedback.token)
        self.columns = torch.arange(self.slots, device=hidden.device)
        self.first_slot = torch.arange(rows, device=hidden.device)[:, None] * self.slots
        self.branches, self.clock = rows // len(feedback.token), clock

    def propose(self, feedback: Feedback, uniforms: Uniforms) -> DraftTree:
        """Draft the tree behind ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        with self.clock("draft"):
            states = self._levels(feedback)
        tokens = feedback.token[:, None].repeat(1, self.shape.size)
        laws = states.new_zeros(len(tokens), self.shape.size, self.head.config.target.vocab_size, dtype=torch.float32)
        index = self.lengths[:, None]  # raster index of the first token drafted
        for depth, level in enumerate(self.plan):
            with self.clock("draft"):
                logits = self._read(states[:, depth : depth + 1], tokens[:, level.parents])
            law = self.target.processor(self.target.guide(logits, self._positions(index + depth)))
            drafts, drawn = self._draw(law, level, uniforms)
            tokens[:, level.nodes] = drafts[:, level.parent_index, level.ranks]
            if drawn is not None:
                laws[:, level.nodes] = drawn[:, level.parent_index, level.ranks]
        return DraftTree(tokens, self.shape, laws if self.sampled else None)

    def _draw(self, law: Tensor, level: Level, uniforms: Uniforms) -> tuple[Tensor, Tensor | None]:
        """Children [B, P, width] of each parent and the laws [B, P, width, V] they were drawn from."""
        if not self.sampled:
            return law.topk(level.width).indices, None
        if level.width == 1:
            return categorical(law, uniforms.draw(law.shape[1]))[..., None], law[:, :, None]
        dice = uniforms.draw(law[0].numel()).view(law.shape)
        return sample_siblings(law, level.width, dice)

    def _levels(self, feedback: Feedback) -> Tensor:
        """Store the features of the tokens just committed and return the level states [R, K, C]."""
        if feedback.verdict is None or feedback.tokens is None:
            hidden, tokens = feedback.output.hidden[:, -1:], feedback.token[:, None]
            kept = torch.ones_like(feedback.token)
        else:
            hidden, tokens, kept = feedback.kept_hidden(), feedback.tokens, feedback.verdict.kept
        embedded = self.target.model.tok_embeddings(tokens).repeat(self.branches, 1, 1)
        features = self.head.features(embedded, hidden)  # [R, M, C]
        order = self.columns[: tokens.shape[1]]
        cells = (self.lengths[:, None] + order).repeat(self.branches, 1)
        self._store(
            self.head.keys_values(features, cells),
            torch.where(order < kept.repeat(self.branches)[:, None], cells, self.slots - 1),
        )
        self.lengths = self.lengths + kept
        anchor = features.gather(
            1, (kept.clamp(min=1) - 1).repeat(self.branches)[:, None, None].expand(-1, 1, features.shape[-1])
        )
        ahead = self.lengths[:, None] + self.columns[: self.head.config.levels]
        shut = self.columns >= self.lengths[:, None]
        bias = torch.zeros_like(shut, dtype=hidden.dtype).masked_fill_(shut, float("-inf")).repeat(self.branches, 1)
        return self.head.levels(anchor, ahead.repeat(self.branches, 1), self.keys, self.values, bias[:, None, None])

    def _store(self, entries: tuple[Tensor, Tensor], slots: Tensor) -> None:
        wanted = (slots + self.first_slot).flatten()
        for memory, entry in zip((self.keys, self.values), entries, strict=True):
            memory.flatten(0, 1).index_copy_(0, wanted, entry.flatten(0, 1))

    def _read(self, states: Tensor, previous: Tensor) -> Tensor:
        """Raw logits [R, P, V] of a level's children of the tokens ``previous`` [B, P]."""
        return self.target.model.output(self.head.read(states, previous.repeat(self.branches, 1))).float()

    def _positions(self, index: Tensor) -> Tensor:
        """Position of the node whose logits predict raster ``index`` [B, 1] (guidance may depend on it)."""
        return index + self.target.model.config.cls_token_num - 1
