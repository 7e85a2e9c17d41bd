"""EAGLE heads for LlamaGen, including LANTERN's, and their drafter, which grows a static tree
(sampled, or of the likeliest tokens) or EAGLE-2's.

The head is one layer over features of the committed tokens, with the official names. Position i
reads fc([emb(token_{i+1}); hidden_i]), hidden_i the target's state after its final norm, and
predicts hidden_{i+1}; the target's output head, without a norm, turns that into logits. The layer
has no norm before its attention. Positions are the target's minus one: P - 1 prefix rows without
rotation, then the raster. :class:`specmm.core.growth.Growth` grows the tree. A prompt's padded
positions are read like any others, as in the release. Source: EAGLE (arXiv 2401.15077), LANTERN
(2410.03355).

Shape letters: B batch, G guidance branches, R = G·B rows, T query positions, S cached positions, n
nodes, C width, H heads, D head width, F inner width, V vocabulary, P prefix positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.core.cache import Cache, CacheSize, Memory, alike, branched
from specmm.core.drafter import DrafterVocabulary, Feedback
from specmm.core.growth import Growth
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.image_ar.tokens.gpt import GPTConfig, RMSNorm, RotaryTable, rotary_table, rotate
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings


@dataclass(frozen=True)
class EagleConfig:
    """Sizes of a head for a ``target``; F = ``ffn_dim``, by default the target's."""

    target: GPTConfig
    ffn_dim: int | None = None

    @property
    def before(self) -> int:
        """P - 1."""
        return self.target.cls_token_num - 1

    def sizes(self) -> dict[str, object]:
        """Sizes that a head and its target must share, under the names of a Llama config."""
        target = self.target
        return {
            "hidden_size": target.dim,
            "vocab_size": target.vocab_size,
            "num_attention_heads": target.n_head,
            "block_size": target.block_size,
            "cls_token_num": target.cls_token_num,
        }

    def facts(self) -> dict[str, object]:
        """The content of a head's ``config.json``."""
        return {
            "model": "EagleHead",
            **self.sizes(),
            "num_key_value_heads": self.target.n_head,
            "num_hidden_layers": 1,
            "intermediate_size": self.ffn_dim or self.target.ffn_dim,
            "rms_norm_eps": self.target.norm_eps,
            "bias": True,
        }


class EagleAttention(nn.Module):
    """Self-attention with separate projections and two-dimensional rotary factors."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(
        self, x: Tensor, factors: Tensor, bias: Tensor | None, memory: Memory | None
    ) -> Tensor:
        """Attend ``x`` [R, T, C] to itself, causally, or to ``memory`` under ``bias``."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in projections)  # [R, T, H, D]
        q = rotate(q, factors)
        k = rotate(k, factors)
        if memory is not None:
            k, v = memory.write(k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        causal = memory is None and bias is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class EagleMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, ffn_dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """Attention without a norm before it, then a normed feed-forward, each with a residual."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        target = config.target
        self.self_attn = EagleAttention(target.dim, target.n_head)
        self.mlp = EagleMLP(target.dim, config.ffn_dim or target.ffn_dim)
        self.post_attention_layernorm = RMSNorm(target.dim, target.norm_eps)

    def forward(
        self, x: Tensor, factors: Tensor, bias: Tensor | None, memory: Memory | None
    ) -> Tensor:
        """[R, T, C] -> [R, T, C]."""
        x = x + self.self_attn(x, factors, bias, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """The network, which uses the target's output head."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        target = config.target
        self.config = config
        self.embed_tokens = nn.Embedding(target.vocab_size, target.dim)
        self.fc = nn.Linear(2 * target.dim, target.dim)
        self.layers = nn.ModuleList([EagleLayer(config)])
        turned = (target.grid, target.head_dim, config.before, target.rope_base)
        self.rotary = RotaryTable(rotary_table(*turned))

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Predicted next hidden states [R, T, C] of ``hidden`` [R, T, C] and the tokens after them,
        ``embedded`` [R, T, C].

        ``positions`` [R or 1, T] (0 … T-1 by default) count from the first prefix position; without
        ``memory`` the attention is causal, else it sees what ``memory`` holds under the additive
        ``bias`` [R or 1, 1, T, S].
        """
        table = self.rotary
        factors = table.first(hidden.shape[1]) if positions is None else table.at(positions)
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        return self.layers[0](x, factors, bias, memory)


class EagleDrafter:
    """Drafts with an :class:`EagleHead`.

    ``tree``, ``sampled`` and ``siblings``: see :class:`specmm.core.growth.Growth`. Raises
    ``ValueError`` if the head is for a target of other sizes.
    """

    state: ClassVar[tuple[str, ...]] = ("cache", "growth")

    def __init__(
        self,
        head: EagleHead,
        target: LlamaGenTarget,
        tree: TreeShape | Dynamic,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        sizes = EagleConfig(target.model.config).sizes()
        if head.config.sizes() != sizes:
            raise ValueError(f"head must be made for {sizes}, got one for {head.config.sizes()}")
        self.head = head.eval()
        self.target = target
        vocabulary = DrafterVocabulary(target.vocabulary)
        self.growth = Growth(tree, sampled, vocabulary, target.device, siblings)
        self.max_nodes = self.growth.max_nodes
        self.max_depth = self.growth.max_depth

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch: a cache for the prefix and every token, and the tree's masks."""
        hidden = feedback.output.hidden
        config = self.head.config
        size = CacheSize(
            layers=alike(1, config.target.n_head, config.target.head_dim),
            batch=len(feedback.token),
            branches=len(hidden) // len(feedback.token),
            capacity=config.before + self.target.length,
            scratch=self.growth.scratch,
        )
        self.clock = clock
        self.cache = Cache.again(vars(self).get("cache"), size, hidden.dtype, hidden.device)
        self.growth.begin(self.cache)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """A tree grown from the state predicted after the committed tokens."""
        if feedback.result is None:
            state = self._read_prompt(feedback)
        else:
            state = self.growth.read_committed(self, feedback)
        return self.growth.grow(self, feedback.token, state, uniforms)

    def probs(self, logits: Tensor) -> Tensor:
        """The head's guided logits, processed as the target's are."""
        return self.target.processor(logits)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Guided logits [B, n, V] after drafts at ``depth`` with predicted ``states`` [R, n, C]."""
        with self.clock("draft"):
            logits = self.target.head(states).float()
        drawn = self.cache.lengths[:, None] - self.head.config.before + depth
        return self.target.drawn_logits(logits, drawn)

    def read(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor, depth: int = 0
    ) -> Tensor:
        """One pass of the head over ``tokens`` [B, n] and ``hidden`` [R, n, C] of both branches."""
        branches = self.cache.size.branches
        if len(positions) > 1:
            positions = branched(positions, branches)
        rows = branched(self.head.embed_tokens(tokens), branches)
        with self.clock("draft"):
            return self.head(rows, hidden, positions, bias, self.cache.layers[0])

    def _read_prompt(self, feedback: Feedback) -> Tensor:
        """Read the prefix, followed by the first token; the predicted state after it."""
        hidden = feedback.output.hidden
        cache = self.cache
        prefix = hidden.shape[1]
        # the prefix counts as tokens 0
        tokens = F.pad(feedback.token[:, None], (prefix - 1, 0))
        cache.aim(0, prefix)
        cache.lengths += prefix
        later = torch.ones(prefix, prefix, dtype=torch.bool, device=tokens.device).triu(1)
        bias = torch.zeros_like(later, dtype=hidden.dtype).masked_fill_(later, float("-inf"))
        positions = torch.arange(prefix, device=tokens.device)[None]
        return self.read(tokens, hidden, positions, bias[None, None])[:, -1]
