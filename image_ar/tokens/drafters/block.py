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
from specmm.image_ar.tokens.gpt import FeedForward, GPTConfig, RMSNorm, Rotary, rotary_table, rotate
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
        self.rotary = Rotary(table)

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
        return rotate(x, self.rotary.at(cells))


@dataclass(frozen=True)
class Level:
    """One level of a static tree of n nodes with P parents, which all get ``width`` children drawn.

    ``parents`` [P] are node numbers and ``above`` [P] their places among the nodes of the level above (None: all of
    them, in order); ``pick`` [n] finds the nodes among the P·width children drawn (None: all of them, in order).
    """

    nodes: Tensor
    parents: Tensor
    above: Tensor | None
    pick: Tensor | None
    width: int

    @classmethod
    def of(cls, shape: TreeShape, depth: int) -> Level:
        """The nodes of ``shape`` at ``depth`` ≥ 1; raises ``ValueError`` unless nodes are numbered level by level."""
        if bool((shape.depths[0].diff() < 0).any()):
            raise ValueError("a drafter's tree must number its nodes level by level")
        nodes = (shape.depths[0] == depth).nonzero()[:, 0]
        parents, index = shape.parents[0, nodes].unique(return_inverse=True)
        width = int(shape.ranks[0, nodes].max()) + 1
        first, count = int((shape.depths[0] < depth - 1).sum()), int((shape.depths[0] == depth - 1).sum())
        pick = index * width + shape.ranks[0, nodes]
        everything = pick.equal(torch.arange(len(parents) * width, device=pick.device))
        above = None if len(parents) == count else parents - first
        return cls(nodes, parents, above, None if everything else pick, width)


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
        tokens = [feedback.token[:, None]]
        laws = [states.new_zeros(len(tokens[0]), 1, self.head.config.target.vocab_size, dtype=torch.float32)]
        index = self.lengths[:, None]  # raster index of the first token drafted
        for depth, level in enumerate(self.plan):
            previous = tokens[-1] if level.above is None else tokens[-1].index_select(1, level.above)
            with self.clock("draft"):
                logits = self._read(states[:, depth : depth + 1], previous)
            drafts, drawn = self._draw(self.target.guide(logits, self._positions(index + depth)), level, uniforms)
            tokens.append(drafts)
            laws.append(drawn)
        return DraftTree(torch.cat(tokens, 1), self.shape, torch.cat(laws, 1) if self.sampled else None)

    def _draw(self, logits: Tensor, level: Level, uniforms: Uniforms) -> tuple[Tensor, Tensor]:
        """A level's nodes [B, n] and the laws [B, n, V] they were drawn from, of each parent's ``logits`` [B, P, V]."""
        if not self.sampled:  # of the raw logits: at temperature 0 all but one token of the law have no mass
            drafts = logits.topk(level.width).indices.flatten(1)
            return drafts if level.pick is None else drafts.index_select(1, level.pick), logits[:, :0]
        law = self.target.processor(logits)
        if level.width == 1:
            drafts, drawn = categorical(law, uniforms.draw(law.shape[1])), law
        else:
            dice = uniforms.draw(law[0].numel()).view(law.shape)
            drafts, drawn = sample_siblings(law, level.width, dice)
            drawn = drawn.flatten(1, 2)
        drafts = drafts.flatten(1)
        if level.pick is None:
            return drafts, drawn
        return drafts.index_select(1, level.pick), drawn.index_select(1, level.pick)

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
