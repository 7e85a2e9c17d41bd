"""Small networks on a DFlash drafter's states that make a draft depend on earlier drafts of its
block.

A block's marginals do not depend on which of its tokens were drawn. Our own :class:`PairTable` and
:class:`specmm.diffusion_drafters.models.block_memory.BlockMemory` add that dependence. So do the
heads of third-party releases, under the names in their files: DSpark's :class:`MarkovHead` and
:class:`ConfidenceHead` (arXiv 2607.05147; speculators, SpecForge), Domino's :class:`DominoHead`
(SpecForge). The releases' heads read a whole block's states once (``read``) and then add to the
logits place by place.

Shape letters: C width, R rank or size of the memory, E width of a head's input from a state, V
vocabulary, v the drafter's.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Markov = Literal["vanilla", "gated", "rnn"]


class PairTable(nn.Module):
    """Low-rank addition to the next token's logits: W2 W1[x] after a token x.

    It makes a draft depend on the previous one, at the cost of one small product a draft. The last
    row of W1 serves all tokens that the drafter lacks. Source: DSpark's Markov head; names and
    sizes are our own.
    """

    def __init__(self, tokens: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Embedding(tokens + 1, rank)
        self.after = nn.Linear(rank, tokens, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        """The addition to the logits [..., v] after tokens ``previous`` [...] of the drafter."""
        logits: Tensor = self.after(self.before(previous))
        return logits


class MarkovHead(nn.Module):
    """DSpark's low-rank addition to a place's logits [..., v], by the previous token.

        vanilla: W2 e,   gated: W2 (sigmoid(G [h; e]) * e),   rnn: W2 tanh(o)

    with e = W1[token before] of ``rank`` R and the place's state h [..., C]; "rnn" has a memory
    s, and [g; c; o] = J [s; e; h], s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c). ``vocabulary`` V
    is the target's, ``tokens`` v the drafter's. Raises ``ValueError`` for another ``kind``.
    """

    def __init__(
        self, vocabulary: int, tokens: int, rank: int, width: int, kind: str = "vanilla"
    ) -> None:
        super().__init__()
        if kind not in get_args(Markov):
            raise ValueError(
                f"markov_head_type must be {', '.join(get_args(Markov))}, got {kind!r}"
            )
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, tokens, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def read(self, states: Tensor) -> Tensor:
        """Its input [..., E] from ``states`` [..., C]."""
        width = states.shape[-1]
        if self.kind == "gated":
            return F.linear(states, self.gate_proj.weight[:, :width], self.gate_proj.bias)
        if self.kind == "rnn":
            return F.linear(states, self.joint_proj.weight[:, -width:], self.joint_proj.bias)
        return states[..., :0]

    def forward(
        self, place: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The addition [..., v] after the target's tokens ``before`` [...], and the next memory
        [..., R]; ``place`` [..., E] is of :meth:`read`.
        """
        latent = self.markov_w1(before)  # [..., R]
        rank = latent.shape[-1]
        if self.kind == "gated":
            gate = place + F.linear(latent, self.gate_proj.weight[:, -rank:])
            latent = gate.sigmoid() * latent
        if self.kind == "rnn":
            weight = self.joint_proj.weight
            joint = place + F.linear(latent, weight[:, rank : 2 * rank])
            if memory is not None:
                joint = joint + F.linear(memory, weight[:, :rank])
            gate, candidate, out = joint.chunk(3, dim=-1)
            share = gate.sigmoid()
            fresh = (1 - share) * candidate.tanh()
            memory = fresh if memory is None else share * memory + fresh
            latent = out.tanh()
        return self.markov_w2(latent), memory


class DominoHead(nn.Module):
    """Domino's addition to a place's logits [..., v], by a GRU over the block's tokens so far.

        m_k = GRU(e(x_{k-1}), m_{k-1}),   addition = outer silu(inner [h_k; m_k])

    with the target's embeddings e and the block's states h. The first ``pure`` drafts get none.
    ``size`` R is the GRU's, ``inner`` the width of the layer between.
    """

    def __init__(self, tokens: int, width: int, size: int, inner: int, pure: int = 0) -> None:
        super().__init__()
        self.pure = pure
        self.prefix_gru = nn.GRU(width, size, batch_first=True, bias=False)
        self.inner = nn.Linear(width + size, inner, bias=False)
        self.outer = nn.Linear(inner, tokens, bias=False)

    def read(self, states: Tensor) -> Tensor:
        """Inputs [..., K, E] from a block's ``states`` [..., K, C]; last entry 1: the head adds."""
        inputs = F.linear(states, self.inner.weight[:, : states.shape[-1]])
        adds = torch.arange(states.shape[-2], device=states.device) >= self.pure
        return torch.cat([inputs, adds.to(inputs).expand(inputs.shape[:-1])[..., None]], dim=-1)

    def forward(
        self, place: Tensor, embeddings: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The addition [..., v] after tokens of the target's ``embeddings`` [..., C], and the next
        memory [..., R]; ``place`` [..., E] is of :meth:`read`.
        """
        gru: Any = self.prefix_gru
        size = gru.hidden_size
        reset, update, new = F.linear(embeddings, gru.weight_ih_l0).chunk(3, dim=-1)
        if memory is None:
            memory = embeddings.new_zeros(*embeddings.shape[:-1], size)
        old_reset, old_update, old_new = F.linear(memory, gru.weight_hh_l0).chunk(3, dim=-1)
        candidate = (new + (reset + old_reset).sigmoid() * old_new).tanh()
        share = (update + old_update).sigmoid()
        memory = (1 - share) * candidate + share * memory
        weight = self.inner.weight[:, -size:]
        logits: Tensor = self.outer(F.silu(place[..., :-1] + F.linear(memory, weight)))
        return logits * place[..., -1:], memory


class ConfidenceHead(nn.Module):
    """The weights of DSpark's estimate of a draft's acceptance, over a place's state [C] and, with
    a ``rank`` R above 0, W1 of the Markov head for the token before.

    They are not used, because cutting chains by such estimates was slower. They are stored so that
    a release's files can be loaded and written completely.
    """

    def __init__(self, width: int, rank: int = 0) -> None:
        super().__init__()
        self.proj = nn.Linear(width + rank, 1)
