"""EAGLE-3 heads (arXiv 2503.01840): the network of every released layout.

``fc`` mixes the concatenated states of three target layers. The first layer reads [embedding;
mixed state], each normed; its output stands in for the mixed state of the next token, because the
target's own is known only once that token is committed. The head drafts only v of the target's V
tokens; draft token i is the target's i + d2t[i]. EAGLE-3.1 norms each state before ``fc`` and
passes the normed output on. P-EAGLE predicts several tokens in one pass: for tokens not yet known
it reads a mask token and ``mask_hidden`` instead of the target's states. Parameter names follow
speculators.

Shape letters: B batch, T slots, C width, W the target's width, F layers of the target that are
read, H heads, D head width, V vocabulary, v the head's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specmm.extending.registry import named
from specmm.hf.drafters.features import BoundNetwork
from specmm.hf.drafters.files import Acceptance
from specmm.hf.models.families import cache_name
from specmm.hf.models.target import VLMTarget

LAYERS: Mapping[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
CACHE = cache_name(LlamaDecoderLayer)
READ = 3  # the number of target layers that a head reads by default


@dataclass(frozen=True)
class Eagle3Config:
    """``sizes`` of the head's layers, the target ``layers`` it reads, counted from 0 (none:
    EAGLE's three, of any target), and the size ``tokens`` of its vocabulary (v; V: the target's).

    ``own_embeddings`` and ``own_head``: it has its own tables (else the target's);
    ``picture_embeddings``: at a picture's positions it reads the projected picture, as the target
    does, instead of the placeholder's embedding. ``target_width``: width of a target state (0: the
    head's own). ``norm_before_residual``: the first layer adds its attention to the normed state,
    not to the state. States are normed together before ``fc`` (``norm_before_fc``) or separately
    (``fc_norm``). ``norm_output``: the next token gets the state after the norm, which the output
    layer reads. ``mask`` is P-EAGLE's mask token. ``sections``: how many pairs of a head's width
    M-RoPE turns by time, height and width, in that order or ``interleaved``. Raises ``ValueError``
    for sizes that do not fit together.
    """

    sizes: PreTrainedConfig
    layers: tuple[int, ...]
    tokens: int
    own_embeddings: bool = False
    own_head: bool = True
    picture_embeddings: bool = False
    target_width: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask: int | None = None
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def __post_init__(self) -> None:
        sizes: Any = self.sizes
        kind = sizes.model_type
        vocabulary = int(sizes.vocab_size)
        if kind not in LAYERS:
            raise ValueError(f"layers must be those of {' or '.join(LAYERS)}, got {kind!r}")
        if len(set(self.layers)) < len(self.layers) or min(self.layers, default=0) < 0:
            raise ValueError(
                "drafter must read different layers of its target, each after its first, got "
                f"{list(self.layers)} counted from 0"
            )
        if not 1 <= self.tokens <= vocabulary:
            raise ValueError(
                f"draft_vocab_size must be 1 to vocab_size {vocabulary}, got {self.tokens}"
            )
        if self.mask is not None and not 0 <= self.mask < vocabulary:
            raise ValueError(f"mask_token_id must be in [0, {vocabulary}), got {self.mask}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("give norm_before_fc or fc_norm, got both: states are normed once")
        if self.sections and (len(self.sections) != 3 or 2 * sum(self.sections) != sizes.head_dim):
            raise ValueError(
                f"mrope_section must be three numbers with the sum {sizes.head_dim // 2}, half a "
                f"head's width, got {list(self.sections)}"
            )

    @property
    def whole(self) -> bool:
        """Whether the head drafts all of the target's tokens."""
        return self.tokens == int(self.sizes.vocab_size)

    @property
    def read(self) -> int:
        """F."""
        return len(self.layers) or READ

    @property
    def state_width(self) -> int:
        """W."""
        return self.target_width or int(self.sizes.hidden_size)


class Eagle3Head(nn.Module):
    """The network, with speculators' names. It has ``d2t`` and ``t2d`` if v < V.

    ``acceptance`` by temperature was measured after training, for method ``auto``.
    """

    method: ClassVar[str] = "eagle3"
    d2t: Tensor
    t2d: Tensor
    parts: Tensor  # see ``_parts``; with M-RoPE only

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.acceptance: dict[float, Acceptance] = {}
        self.config = config
        sizes: Any = config.sizes
        width = sizes.hidden_size
        states = config.read * config.state_width
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(sizes.vocab_size, width)
        self.fc = nn.Linear(states, width, bias=False)
        self.input_norm: Any = None
        self.fc_norm: Any = None
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(states, sizes.rms_norm_eps)
        if config.fc_norm:
            widths = [config.state_width] * config.read
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(w, sizes.rms_norm_eps) for w in widths)
        if config.mask is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, states))
        kind = LAYERS[sizes.model_type]
        self.layers: Any = nn.ModuleList(kind(sizes, i) for i in range(sizes.num_hidden_layers))
        _widen(self.layers[0], sizes)
        self.norm = LlamaRMSNorm(width, sizes.rms_norm_eps)
        if config.own_head:
            self.lm_head = nn.Linear(width, config.tokens, bias=False)
        self.turns = LlamaRotaryEmbedding(sizes)  # its buffers are never saved
        if config.sections:
            self.register_buffer("parts", _parts(config), persistent=False)
        if not config.whole:
            self.register_buffer("d2t", torch.zeros(config.tokens, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(sizes.vocab_size, dtype=torch.bool))

    @property
    def ids(self) -> Tensor | None:
        """The target's ids [v] of the head's tokens; None if the head drafts all V tokens."""
        if self.config.whole:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_ids(self, ids: Tensor) -> None:
        """Let the head draft the target's tokens ``ids`` [v], in ascending order."""
        ordered = ids.sort().values
        self.d2t.copy_(ordered - torch.arange(len(ordered), device=ordered.device))
        self.t2d.fill_(False)[ordered] = True

    def bound(self, target: VLMTarget) -> BoundNetwork:
        network: BoundNetwork = named("specmm.hf.drafters.eagle3:BoundEagle3")(self, target)
        return network

    def mixed(self, hidden: Tensor) -> Tensor:
        """The target's concatenated states [..., F·W] as the first layer reads them [..., C]."""
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            chunks = hidden.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(x) for norm, x in zip(self.fc_norm, chunks, strict=True)]
            hidden = torch.cat(normed, dim=-1)
        return self.fc(hidden)

    def slots(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[B, T, 2·C] of ``embeddings`` [B, T, C] and mixed or predicted states [B, T, C]."""
        return torch.cat([embeddings, hidden], dim=-1)

    def forward(
        self,
        slots: Tensor,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
        past: Any = None,
    ) -> Tensor:
        """Predicted states [B, T, C] of ``slots`` [B, T, 2·C] at ``positions`` [1 or B, T], or
        [3, B, T] under M-RoPE.

        Without ``bias`` the attention is causal over the given slots; else it attends to the cache
        ``past`` under the additive ``bias`` [1 or B, 1, T, S].
        """
        if positions is None:
            positions = torch.arange(slots.shape[1], device=slots.device)[None]
        embeddings, hidden = slots.chunk(2, dim=-1)
        turns = self._turned(self.turns(hidden, positions))
        shared = {"attention_mask": bias, "position_embeddings": turns, CACHE: past}
        hidden = self._first(embeddings, hidden, shared)
        for layer in self.layers[1:]:
            hidden = layer(hidden, **shared)
        return self.norm(hidden) if self.config.norm_output else hidden

    def _turned(self, turns: Sequence[Tensor]) -> Sequence[Tensor]:
        """Cosines and sines [B, T, D], from those by time, height and width [3, B, T, D]."""
        if turns[0].ndim == 3:
            return turns
        return [x.gather(0, self.parts.expand(1, *x.shape[1:]))[0] for x in turns]

    def _first(self, embeddings: Tensor, hidden: Tensor, shared: dict[str, Any]) -> Tensor:
        """The first layer, which reads embedding and state side by side."""
        layer = self.layers[0]
        normed = layer.hidden_norm(hidden)
        read = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
        x = normed if self.config.norm_before_residual else hidden
        x = x + layer.self_attn(hidden_states=read, **shared)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def read_out(self, states: Tensor) -> Tensor:
        """The output layer's input from predicted ``states`` [B, T, C]."""
        return states if self.config.norm_output else self.norm(states)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [B, T, v] of predicted ``states`` [B, T, C], by its own output layer."""
        return self.lm_head(self.read_out(states))


def _widen(layer: Any, sizes: Any) -> None:
    """Let a decoder layer of ``sizes`` read two states side by side."""
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        before = getattr(attention, name)
        bias = before.bias is not None
        wide = nn.Linear(2 * sizes.hidden_size, before.out_features, bias=bias)
        setattr(attention, name, wide)
    layer.hidden_norm = LlamaRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)


def _parts(config: Eagle3Config) -> Tensor:
    """The M-RoPE part (0, 1 or 2) that turns each of the head's D numbers: [D]."""
    counts = torch.tensor(config.sections)
    half = torch.arange(3).repeat_interleave(counts)
    if config.interleaved:  # time, height, width, time, ... while the latter two last
        half = torch.zeros_like(half)
        for part in (1, 2):
            half[part : 3 * config.sections[part] : 3] = part
    return half.repeat(2)


def layers_read(count: int) -> tuple[int, ...]:
    """The layers, counted from 0, that EAGLE-3 reads of a target with ``count`` layers.

    Their outputs are the states before layers 2, ``count`` // 2 and ``count`` - 3. With fewer than
    7 layers, two of these coincide or do not exist.
    """
    return tuple(sorted({min(2, count) - 1, count // 2 - 1, max(count - 3, 1) - 1} - {-1}))
