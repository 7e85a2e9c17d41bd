"""EAGLE-3 heads (arXiv 2503.01840): network and files.

The states of three of the target's layers, side by side, are mixed by ``fc``; the first layer reads
[embedding; mixed state], each normed, and its output stands for the mixed state of the next token:
the target's own is known only once that token is committed. The head may draft v of the target's V
tokens only; draft token i is the target's i + d2t[i]. On disk a head is a folder of speculators'
format. Its layer ids count states, of which number i comes before layer i; ours count layers.

Shape letters: B batch, L prompt positions, T slots, C width, F layers of the target that are read,
H heads, D head width, V vocabulary, v the head's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specmm.cache import LayerSize, Memory, alike
from specmm.checkpoints import (
    check_fingerprint,
    embeddings_of,
    fingerprint,
    load_strict,
    read_checkpoint,
    read_json,
    weights_file,
)
from specmm.drafter import DrafterVocabulary
from specmm.hardware import prepack
from specmm.hf.cache_layers import as_transformers
from specmm.hf.drafters.files import Acceptance, read_acceptance, write_acceptance, write_model
from specmm.hf.families import cache_name
from specmm.hf.target import VLMTarget

EMBEDDINGS = "embed_tokens.weight"
SPECULATORS = "0.9.0"  # the version whose configuration is written
LAYERS: Mapping[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}


@dataclass(frozen=True)
class Eagle3Config:
    """``sizes`` of the head's layers, the target ``layers`` it reads, counted from 0, and the size
    ``tokens`` of its vocabulary (v; V: the target's).

    ``own_embeddings``: it has a table of its own (others read the target's).
    ``norm_before_residual``: the first layer adds its attention to the normed state, not to the
    state. ``norm_output``: the state that goes on is the one that the head's vocabulary reads.
    Raises ``ValueError`` for sizes that do not fit together.
    """

    sizes: PreTrainedConfig
    layers: tuple[int, ...]
    tokens: int
    own_embeddings: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        kind = self.sizes.model_type
        vocabulary = int(self.sizes.vocab_size)
        if kind not in LAYERS:
            raise ValueError(f"layers must be those of {' or '.join(LAYERS)}, got {kind!r}")
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers must be different ones of the target, got {self.layers}")
        if not 1 <= self.tokens <= vocabulary:
            raise ValueError(
                f"draft_vocab_size must be 1 to vocab_size {vocabulary}, got {self.tokens}"
            )


class Eagle3Head(nn.Module):
    """The network, with speculators' names. ``d2t`` and ``t2d`` are there where v < V.

    ``acceptance`` by temperature was measured after training, for method ``auto``.
    """

    method: ClassVar[str] = "eagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.acceptance: dict[float, Acceptance] = {}
        self.config = config
        sizes: Any = config.sizes
        width = sizes.hidden_size
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(sizes.vocab_size, width)
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        kind = LAYERS[sizes.model_type]
        layers = [kind(sizes, i) for i in range(sizes.num_hidden_layers)]
        self.layers: Any = nn.ModuleList(layers)
        _widen(layers[0], sizes)
        self.norm = LlamaRMSNorm(width, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.tokens, bias=False)
        self.turns = LlamaRotaryEmbedding(sizes)  # its buffers are never saved
        if config.tokens < sizes.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.tokens, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(sizes.vocab_size, dtype=torch.bool))

    @property
    def ids(self) -> Tensor | None:
        """The target's ids [v] of the head's tokens; None where they are all of the target's."""
        if self.config.tokens == self.config.sizes.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_ids(self, ids: Tensor) -> None:
        """Make ``ids`` [v] of the target's the head's tokens, in ascending order."""
        ordered = ids.sort().values
        self.d2t.copy_(ordered - torch.arange(len(ordered), device=ordered.device))
        self.t2d.fill_(False)[ordered] = True

    def bound(self, target: VLMTarget) -> BoundEagle3:
        """See :class:`specmm.hf.drafters.features.FeatureNetwork`."""
        return BoundEagle3(self, target)

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
        """Predicted states [B, T, C] of ``slots`` [B, T, 2·C] at ``positions`` [1 or B, T].

        Without ``bias`` the attention is causal over the slots given; else it sees what the cache
        ``past`` holds under the additive ``bias`` [1 or B, 1, T, S].
        """
        if positions is None:
            positions = torch.arange(slots.shape[1], device=slots.device)[None]
        embeddings, hidden = slots.chunk(2, dim=-1)
        turns = self.turns(hidden, positions)
        shared = {"attention_mask": bias, "position_embeddings": turns, CACHE: past}
        hidden = self._first(embeddings, hidden, shared)
        for layer in self.layers[1:]:
            hidden = layer(hidden, **shared)
        return self.norm(hidden) if self.config.norm_output else hidden

    def _first(self, embeddings: Tensor, hidden: Tensor, shared: dict[str, Any]) -> Tensor:
        layer = self.layers[0]
        normed = layer.hidden_norm(hidden)
        read = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
        x = normed if self.config.norm_before_residual else hidden
        x = x + layer.self_attn(hidden_states=read, **shared)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, states: Tensor) -> Tensor:
        """Logits [B, T, v] of predicted ``states`` [B, T, C]."""
        return self.lm_head(states if self.config.norm_output else self.norm(states))


CACHE = cache_name(LlamaDecoderLayer)


def _widen(layer: Any, sizes: Any) -> None:
    """Let a decoder layer of ``sizes`` read two states side by side."""
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        before = getattr(attention, name)
        bias = before.bias is not None
        wide = nn.Linear(2 * sizes.hidden_size, before.out_features, bias=bias)
        setattr(attention, name, wide)
    layer.hidden_norm = LlamaRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)


class BoundEagle3:
    """``head`` as it drafts for ``target``; see :class:`specmm.hf.drafters.features.BoundNetwork`.

    Raises ``ValueError`` when the head's width or vocabulary is not the target's.
    """

    def __init__(self, head: Eagle3Head, target: VLMTarget) -> None:
        check_target(head, target)
        self.head = head.eval()
        sizes: Any = head.config.sizes
        self.layers = head.config.layers
        self.embed = head.embed_tokens if head.config.own_embeddings else target.embed
        self.logits = head.logits
        self.vocabulary = DrafterVocabulary(sizes.vocab_size, head.ids)
        self.sizes: Sequence[LayerSize] = alike(
            sizes.num_hidden_layers, sizes.num_key_value_heads, sizes.head_dim
        )
        self._memory: Sequence[Memory | None] | None = None
        self._past: Any = None

    def prompt_slots(self, embeddings: Tensor, hidden: Tensor, image: Tensor) -> Tensor:
        """Slots of text and of pictures alike."""
        return self.slots(embeddings, hidden, 0)

    def slots(self, embeddings: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """The target's own states are mixed first, predicted ones are taken as they are."""
        return self.head.slots(embeddings, hidden if depth else self.head.fc(hidden))

    def run(
        self,
        slots: Tensor,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
        memory: Sequence[Memory | None] | None = None,
    ) -> Tensor:
        """See :class:`specmm.hf.drafters.features.BoundNetwork`."""
        if memory is not self._memory:
            self._memory = memory
            self._past = None if memory is None else as_transformers([m for m in memory if m])
        found: Tensor = self.head(slots, positions, bias, self._past)
        return found


def load_for(folder: Path, target: PreTrainedModel, method: str) -> Eagle3Head:
    """The head in ``folder`` for the ``target`` model, with prepacked weights."""
    facts = read_json(folder / "config.json")
    recorded = facts.get("target_fingerprint")
    if recorded is not None:
        check_fingerprint(recorded, fingerprint(embeddings_of(target)), folder)
    return prepack(load_eagle3(folder).to(target.device, target.dtype))


def load_eagle3(folder: str | Path) -> Eagle3Head:
    """The head in ``folder``, in evaluation mode.

    Raises ``ValueError`` naming missing, extra, misshapen or non-finite weights, and for a config
    without the sizes.
    """
    file = weights_file(folder).with_name("config.json")
    state = read_checkpoint(folder)
    head = Eagle3Head(_config(read_json(file), file, EMBEDDINGS in state))
    load_strict(head, state, ("rotary_emb",), folder)
    head.acceptance = read_acceptance(file.parent)
    return head.to(state["fc.weight"].dtype).eval()


def _config(facts: Mapping[str, Any], file: Path, own_embeddings: bool) -> Eagle3Config:
    layer = facts.get("transformer_layer_config")
    if facts.get("speculators_model_type") != "eagle3" or not isinstance(layer, Mapping):
        raise ValueError(
            f"{file} must describe an EAGLE-3 head, got speculators_model_type "
            f"{facts.get('speculators_model_type')!r}"
        )
    states = facts["eagle_aux_hidden_state_layer_ids"]
    return Eagle3Config(
        AutoConfig.for_model(**layer, attn_implementation="sdpa"),
        tuple(number - 1 for number in states),
        int(facts["draft_vocab_size"]),
        own_embeddings,
        bool(facts.get("norm_before_residual")),
        bool(facts.get("norm_output")),
    )


def save_eagle3(
    head: Eagle3Head,
    folder: str | Path,
    target: PreTrainedModel,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write speculators' format, with the fingerprint of the ``target``'s embeddings."""
    config = head.config
    facts = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "draft_vocab_size": config.tokens,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "transformer_layer_config": config.sizes.to_diff_dict(),
        "speculators_config": speculators_facts("eagle3", target),
        "target_fingerprint": fingerprint(embeddings_of(target)),
    }
    write_model(head.state_dict(), facts, folder, dtype)
    write_acceptance(head.acceptance, Path(folder))


def speculators_facts(algorithm: str, target: PreTrainedModel, tokens: int = 5) -> dict[str, Any]:
    """The ``speculators_config`` of a drafter that proposes chains of ``tokens``."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    verifier = {
        "name_or_path": target.config.name_or_path or None,
        "architectures": [type(target).__name__],
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }


def check_target(head: Eagle3Head, target: VLMTarget) -> None:
    """Raise ``ValueError`` unless width, vocabulary and layers are those of ``target``."""
    output = target.family.head.weight
    vocabulary, width = output.shape
    sizes: Any = head.config.sizes
    wanted = {"width": width, "vocabulary": vocabulary}
    found = {"width": sizes.hidden_size, "vocabulary": sizes.vocab_size}
    for what, value in found.items():
        if value != wanted[what]:
            raise ValueError(
                f"drafter must have the target's {what} {wanted[what]}, got {value}; "
                "use one trained for it"
            )
    count = len(target.family.layers)
    if max(head.config.layers) >= count:
        raise ValueError(
            f"drafter must read layers of the target's {count}, got {list(head.config.layers)} "
            "counted from 0; use one trained for it"
        )
