"""The head of Multimodal Speculative Decoding (MSD): network, decoupled prompt slots, files.

After a prompt of L positions with target states h and language-model input embeddings e, slot j
carries position j + 1: a text slot reads fc([e_{j+1}; h_j]), an image slot *is* e_{j+1}, the
projector's output, without fc or state. Position 0 has no slot, be it text or image. The layers see
slots 0 … L - 1 causally and end without a norm: their output approximates h_{j+1} and goes
straight into the target's output head. Sources: MSD (arXiv 2505.14260), EAGLE (2401.15077).

On disk a head is ``config.json`` beside ``pytorch_model.bin`` (as released) or
``model.safetensors``, with the official names. The official format has a frozen copy of the
target's token embeddings, which tells whose drafter this is; ours may leave it out
(``target_embeddings`` in the config) and then records the target's fingerprint.

Shape letters: R rows, L prompt positions, T slots, H heads, K key/value heads, D head width, C
width, V vocabulary, v rows of a drafter's embeddings, S cached slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from specmm.core.cache import LayerSize, Memory, alike
from specmm.core.drafter import DrafterVocabulary
from specmm.hf.drafters.files import Acceptance, read_acceptance, write_acceptance
from specmm.hf.models.target import VLMTarget
from specmm.loading.checkpoints import (
    check_fingerprint,
    fingerprint,
    load_strict,
    read_checkpoint,
    read_json,
    weights_file,
    write_checkpoint,
)
from specmm.loading.hardware import prepack
from specmm.loading.mapped import WithoutWeights

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
PLAIN_ROPE = ("default", "mrope")  # the release turns M-RoPE models' slots one-dimensionally, too
EMBEDDINGS = "embed_tokens.weight"
ROWS = 4096  # rows of embeddings compared at a time
LEFTOVERS = ("rotary_emb",)
# Relative distance of embeddings: two roundings of the same are far below, others are at about 1.
SAME = 0.05
KINDS = {
    False: ("llava", "LlavaLlamaForCausalLM"),
    True: ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
}
Turns = tuple[Tensor, Tensor]  # cosines and sines


@dataclass(frozen=True)
class MSDConfig:
    """Sizes under their names in ``config.json``; ``qwen`` heads have a first norm and q, k, v
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
        heads = self.num_attention_heads
        groups = self.num_key_value_heads
        if self.hidden_size % (2 * heads) or heads % groups:
            raise ValueError(
                "heads must divide the width into even parts and be a multiple of the key/value "
                f"heads, got width {self.hidden_size}, {heads} heads and {groups} key/value heads"
            )

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], source: object = "config.json") -> MSDConfig:
        """Sizes from a drafter's (or a text model's) ``config.json``.

        Raises ``ValueError`` naming missing sizes, and for scaled rotary positions.
        """
        missing = [name for name in SIZES if not isinstance(facts.get(name), int)]
        if missing:
            raise ValueError(
                f"{source} must give {', '.join(SIZES)} as whole numbers, got none for {missing}"
            )
        rope = facts.get("rope_parameters") or {}  # transformers 5's place for the base
        scaling = facts.get("rope_scaling") or rope
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in PLAIN_ROPE:
            plain = " or ".join(PLAIN_ROPE)
            raise ValueError(f"{source} must have plain rotary positions ({plain}), got {kind!r}")
        names = cls.__dataclass_fields__
        values = {name: facts[name] for name in names if facts.get(name) is not None}
        values.setdefault("rope_theta", float(rope.get("rope_theta", 10000.0)))
        values.setdefault("num_key_value_heads", facts["num_attention_heads"])
        values.setdefault("qwen", str(facts.get("model_type", "")).startswith("qwen2"))
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The content of ``config.json`` that the release's loader reads."""
        facts = dataclasses.asdict(self)
        kind, architecture = KINDS[facts.pop("qwen")]
        return {"model_type": kind, "architectures": [architecture], **facts}

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden_size // self.num_attention_heads


class MSDAttention(nn.Module):
    """Grouped-query self-attention with one-dimensional rotary positions."""

    def __init__(self, config: MSDConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.hidden_size
        inner = config.num_key_value_heads * config.head_dim
        self.grouped = inner != width
        self.q_proj = nn.Linear(width, width, bias=config.qwen)
        self.k_proj, self.v_proj = (nn.Linear(width, inner, bias=config.qwen) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, turns: Turns, bias: Tensor | None, memory: Memory | None
    ) -> Tensor:
        """``x`` [R, T, C] attends to ``memory`` under ``bias``, or causally to itself."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in projections)
        q, k = apply_rotary_pos_emb(q, k, *turns, unsqueeze_dim=2)  # [R, T, H or K, D]
        if memory is not None:
            k, v = memory.write(k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=bias is None, enable_gqa=self.grouped
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MSDLayer(nn.Module):
    """A decoder layer; the first one of a LLaVA's head has no norm before its attention."""

    def __init__(self, config: MSDConfig, first: bool) -> None:
        super().__init__()
        sizes = LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            num_attention_heads=config.num_attention_heads,  # must divide the width; not read
        )
        self.self_attn = MSDAttention(config)
        self.mlp = LlamaMLP(sizes)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm: nn.Module | None = None
        if config.qwen or not first:
            self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, turns: Turns, bias: Tensor | None, memory: Memory | None
    ) -> Tensor:
        """[R, T, C] -> [R, T, C]."""
        inner = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(inner, turns, bias, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class MSDHead(nn.Module):
    """The network: ``fc`` and the layers; the output head and the token embeddings are the
    target's, though released files have a frozen copy of the embeddings.

    ``acceptance`` by temperature was measured after training, for method ``auto``.
    """

    method: ClassVar[str] = "msd"

    def __init__(self, config: MSDConfig) -> None:
        super().__init__()
        self.acceptance: dict[float, Acceptance] = {}
        self.config = config
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        layers = (MSDLayer(config, first=i == 0) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        # Not a buffer: a cast of the weights must not round it.
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.frequencies = config.rope_theta**-steps

    def bound(self, target: VLMTarget) -> BoundMSD:
        return BoundMSD(self, target)

    def prompt_slots(self, embeddings: Tensor, hidden: Tensor, image: Tensor) -> Tensor:
        """Slots [R, T, C] of the next positions' ``embeddings`` [R, T, C] and of ``hidden``.

        Where ``image`` [R, T] is true, the *next* position is a picture's, and its slot is the bare
        embedding; ``hidden`` is [R, T, C].
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

        Without ``bias`` the attention is causal over the given slots; else each layer attends to
        its ``memory`` under the additive ``bias`` [R or 1, 1, T, S].
        """
        if positions is None:
            positions = torch.arange(slots.shape[1], device=slots.device)[None]
        if self.frequencies.device != positions.device:  # once: no graph can copy from the host
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)  # [R or 1, T, D]
        turns = (angles.cos().to(slots.dtype), angles.sin().to(slots.dtype))
        for layer, room in zip(self.layers, memory or [None] * len(self.layers), strict=True):
            slots = layer(slots, turns, bias, room)
        return slots


class BoundMSD:
    """``head`` as it drafts for ``target``; see :class:`specmm.hf.drafters.features.BoundNetwork`.

    Raises ``ValueError`` unless dtype, width and vocabulary are the target's.
    """

    layers = ()
    parts = False
    mask = None

    def begin(self) -> None:
        """Does nothing: no weights of the target are copied."""

    def __init__(self, head: MSDHead, target: VLMTarget) -> None:
        _check_sizes(head, target)
        self.run = head.eval()
        self.prompt_slots = head.prompt_slots
        self.embed = target.embed
        self.logits = target.head
        config = head.config
        self.vocabulary = DrafterVocabulary(config.vocab_size)
        self.sizes: Sequence[LayerSize] = alike(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        )

    def prompt_embeddings(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        """The target's own embeddings."""
        return embeddings

    def slots(self, embeddings: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """Text slots, at every depth."""
        return self.run.text_slots(embeddings, hidden)


def _check_sizes(head: MSDHead, target: VLMTarget) -> None:
    """Raise ``ValueError`` unless dtype, width and vocabulary equal those of ``target``'s head."""
    output = target.family.head.weight
    dtype = head.embed_tokens.weight.dtype
    if dtype != output.dtype:
        raise ValueError(
            f"drafter must have the target's dtype {output.dtype}, got {dtype}; "
            f"head.to({output.dtype})"
        )
    vocabulary, width = output.shape
    for name, ours, theirs in (
        ("width", head.config.hidden_size, width),
        ("vocabulary", head.config.vocab_size, vocabulary),
    ):
        if ours != theirs:
            raise ValueError(
                f"drafter must have the target's {name} {theirs}, got {ours}; "
                "use one trained for it"
            )


def load_for(folder: Path, target: PreTrainedModel, method: str) -> MSDHead:
    """The head in ``folder`` for the ``target`` model, with prepacked weights."""
    return prepack(load_msd(folder, drafted_embeddings(target)))


@torch.no_grad()
def drafted_embeddings(target: Any) -> Tensor:
    """Input embeddings [V, C] of ``target``'s decoder for all tokens of its head.

    The embedding module computes them, because some modules scale their table, and some tables have
    more rows than the head.
    """
    rows = len(target.get_output_embeddings().weight)
    embeddings: Tensor = target.get_input_embeddings()(torch.arange(rows, device=target.device))
    return embeddings


def load_msd(
    path: str | Path, embeddings: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> MSDHead:
    """The head in the folder ``path``, in evaluation mode, in ``dtype`` (None: ``embeddings``').

    ``embeddings`` [V, C] are the target's as its decoder reads them (``drafted_embeddings``);
    drafters of other sizes or of another target's embeddings are refused. If the target's table is
    padded with further rows (as in llava-hf's conversions), so is the head's. Raises ``ValueError``
    naming missing, extra, misshapen or non-finite weights, and for a config without the sizes.
    """
    file = weights_file(path).with_name("config.json")
    facts = read_json(file)
    state = read_checkpoint(path)
    config = MSDConfig.from_json(facts, file)
    if embeddings is not None:
        _check_target(config, facts, state.get(EMBEDDINGS), embeddings, path)
        config = dataclasses.replace(config, vocab_size=len(embeddings))
        state[EMBEDDINGS] = embeddings.detach().cpu()
    elif facts.get("target_embeddings"):
        raise ValueError(f"{path} must be loaded with its target's embeddings, got none; give them")
    head_dtype = dtype or (torch.float32 if embeddings is None else embeddings.dtype)
    with WithoutWeights():
        head = MSDHead(config)
    load_strict(head, state, LEFTOVERS, path, head_dtype)
    head.acceptance = read_acceptance(file.parent)
    return head.to("cpu" if embeddings is None else embeddings.device, head_dtype).eval()


def _check_target(
    config: MSDConfig,
    facts: Mapping[str, Any],
    table: Tensor | None,
    embeddings: Tensor,
    path: str | Path,
) -> None:
    """Raise ``ValueError`` unless a drafter is for the target's ``embeddings`` [V, C]; ``table``
    [v, C] holds the drafter's.
    """
    rows, width = embeddings.shape
    if config.hidden_size != width or config.vocab_size > rows:
        sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        raise ValueError(
            f"drafter must have the target's embeddings [{rows}, {width}], got {sizes} in {path}"
        )
    if table is None:
        if not facts.get("target_embeddings"):
            raise ValueError(
                f"{path} must hold {EMBEDDINGS}, or say target_embeddings in its config.json, "
                "got neither"
            )
        check_fingerprint(facts.get("target_fingerprint"), fingerprint(embeddings), path)
    elif table.shape != (config.vocab_size, width):
        got = f"{list(table.shape)} in {path}"
        raise ValueError(f"{EMBEDDINGS} must be [{config.vocab_size}, {width}], got {got}")
    elif not _distance(table, embeddings[: len(table)]) < SAME:
        raise ValueError(
            f"drafter must be of this target, got other token embeddings in {path}, "
            "use its own drafter"
        )


def _distance(a: Tensor, b: Tensor) -> float:
    """Distance of ``a`` [v, C] from ``b`` [v, C], relative to ``b``'s norm, ROWS at a time."""
    apart = length = 0.0
    for ours, theirs in zip(a.split(ROWS), b.detach().split(ROWS), strict=True):
        original = theirs.cpu().float()
        apart += float((ours.float() - original).square().sum())
        length += float(original.square().sum())
    return float((apart / max(length, 1e-24)) ** 0.5)


def save_msd(
    head: MSDHead, folder: str | Path, *, dtype: torch.dtype | None = None, embeddings: bool = True
) -> None:
    """Write ``model.safetensors`` (official names, in ``dtype``) and ``config.json``.

    ``embeddings=False`` leaves the target's embeddings out and records their fingerprint.
    """
    state = {name: weight.to(dtype or weight.dtype) for name, weight in head.state_dict().items()}
    facts = head.config.to_json()
    if not embeddings:
        facts["target_embeddings"] = True
        facts["target_fingerprint"] = fingerprint(state.pop(EMBEDDINGS))
    write_checkpoint(state, facts, folder)
    write_acceptance(head.acceptance, Path(folder))
