"""The head of Multimodal Speculative Decoding (MSD): decoupled prompt slots, a decoder layer, the
official names.

After a prompt of L positions with target states h and language-model input embeddings e, slot j
carries position j + 1: a text slot reads fc([e_{j+1}; h_j]), an image slot *is* e_{j+1}, the
projector's output, without fc or state. Position 0 has no slot, be it text or image. The layers see
slots 0 … L - 1 causally and end without a norm: their output stands for h_{j+1} and goes straight
into the target's output head. Sources: MSD (arXiv 2505.14260), EAGLE (2401.15077).

Shape letters: R rows, L prompt positions, T slots, H heads, K key/value heads, D head width, C
width, F inner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from specmm.cache import Memory

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
PLAIN_ROPE = ("default", "mrope")  # the release turns M-RoPE models' slots one-dimensionally, too


@dataclass(frozen=True)
class MSDConfig:
    """Sizes under their names in ``config.json``; ``qwen`` layouts have a first norm and q, k, v
    biases.

    Raises ``ValueError`` on sizes that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    hidden_act: str = "silu"
    bias: bool = True
    qwen: bool = False

    def __post_init__(self) -> None:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % (2 * heads) or heads % groups:
            raise ValueError(
                f"heads must divide the width into even parts and be a multiple of the key/value heads, "
                f"got width {self.hidden_size}, {heads} heads and {groups} key/value heads"
            )

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], source: object = "config.json") -> MSDConfig:
        """Sizes from a drafter's (or a text model's) ``config.json``; raises ``ValueError`` naming
        what is missing.
        """
        missing = [name for name in SIZES if not isinstance(facts.get(name), int)]
        if missing:
            raise ValueError(
                f"{source} must give {', '.join(SIZES)} as whole numbers, got none for {missing}"
            )
        _check_rope(facts, source)
        given = {
            name: facts[name] for name in cls.__dataclass_fields__ if facts.get(name) is not None
        }
        rope = facts.get("rope_parameters") or {}  # where transformers 5 puts the base
        given.setdefault("rope_theta", float(rope.get("rope_theta", 10000.0)))
        given.setdefault("num_key_value_heads", facts["num_attention_heads"])
        return cls(**{"qwen": str(facts.get("model_type", "")).startswith("qwen2"), **given})

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden_size // self.num_attention_heads

    @property
    def feed_forward(self) -> LlamaConfig:
        """What transformers' feed-forward reads."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            hidden_act=self.hidden_act,
            num_attention_heads=self.num_attention_heads,  # must divide the width; nothing reads it
        )


def _check_rope(facts: Mapping[str, Any], source: object) -> None:
    scaling = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in PLAIN_ROPE:
        raise ValueError(
            f"{source} must have plain rotary positions ({' or '.join(PLAIN_ROPE)}), got {kind!r}"
        )


class MSDAttention(nn.Module):
    """Grouped-query self-attention with one-dimensional rotary positions."""

    def __init__(self, config: MSDConfig) -> None:
        super().__init__()
        self.head_dim, width = config.head_dim, config.hidden_size
        inner = config.num_key_value_heads * config.head_dim
        self.grouped = inner != width
        self.q_proj = nn.Linear(width, width, bias=config.qwen)
        self.k_proj, self.v_proj = (nn.Linear(width, inner, bias=config.qwen) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, turns: tuple[Tensor, Tensor], bias: Tensor | None, memory: Memory | None
    ) -> Tensor:
        """Attend ``x`` [R, T, C] to what ``memory`` holds under the additive ``bias``, or causally
        to itself.
        """
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *turns, unsqueeze_dim=2)  # [R, T, H or K, D]
        if memory is not None:
            k, v = memory.write(k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=bias is None, enable_gqa=self.grouped
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MSDLayer(nn.Module):
    """A decoder layer; the first one of the LLaVA layout has no norm before its attention."""

    def __init__(self, config: MSDConfig, first: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = MSDAttention(config), LlamaMLP(config.feed_forward)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm: nn.Module | None = None
        if config.qwen or not first:
            self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, turns: tuple[Tensor, Tensor], bias: Tensor | None, memory: Memory | None
    ) -> Tensor:
        """[R, T, C] -> [R, T, C]."""
        inner = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(inner, turns, bias, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


Acceptance = tuple[
    tuple[float, ...], ...
]  # [levels, ranks]: the chance that this child is the one kept


class MSDHead(nn.Module):
    """The network: frozen token embeddings, ``fc``, the layers; the output head is the target's.

    ``acceptance`` by temperature is what its maker measured, for method ``auto``.
    """

    method: ClassVar[str] = "msd"

    def __init__(self, config: MSDConfig) -> None:
        super().__init__()
        self.acceptance: dict[float, Acceptance] = {}
        self.config, width = config, config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.layers = nn.ModuleList(
            [MSDLayer(config, first=i == 0) for i in range(config.num_hidden_layers)]
        )
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.frequencies = (
            config.rope_theta**-steps
        )  # no buffer: a cast of the weights must not round it

    def prompt_slots(self, embeddings: Tensor, hidden: Tensor, image: Tensor) -> Tensor:
        """Slots [R, T, C] of ``embeddings`` [R, T, C], those of the next positions, and ``hidden``
        [R, T, C].

        ``image`` [R, T] tells which of the *next* positions hold image features: these slots are
        taken as they are.
        """
        return torch.where(image[..., None], embeddings, self.text_slots(embeddings, hidden))

    def text_slots(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """fc([e; h]) [R, T, C], the embedding's half first."""
        return self.fc(torch.cat([embeddings, hidden], dim=-1))

    def forward(
        self,
        slots: Tensor,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
        memory: Sequence[Memory | None] | None = None,
    ) -> Tensor:
        """Predicted next hidden states [R, T, C] of ``slots`` [R, T, C] at ``positions`` [R or 1,
        T], 0 … T - 1.

        Without ``bias`` the attention is causal over the slots given; else it sees what each
        layer's ``memory`` holds under the additive ``bias`` [R or 1, 1, T, S].
        """
        if positions is None:
            positions = torch.arange(slots.shape[1], device=slots.device)[None]
        turns = self.turns(positions, slots.dtype)
        for layer, room in zip(self.layers, memory or [None] * len(self.layers), strict=True):
            slots = layer(slots, turns, bias, room)
        return slots

    def turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R or 1, T, D] of the rotary angles at ``positions`` [R or 1, T]."""
        angles = positions[..., None] * self.frequencies.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)
