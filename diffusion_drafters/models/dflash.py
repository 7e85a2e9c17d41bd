"""DFlash: a block drafter that reads the target's hidden states as keys and values of every layer.

One bidirectional pass over [anchor | masks] drafts a block. The context is the states of the
target's chosen layers at each committed token, mixed by ``fc`` and normed. Only its keys and values
are cached, so rejected drafts need no cleaning up. Embeddings and head are the target's, unless a
release has its own. Parameters have z-lab's names; other releases' parameters are renamed. Source:
DFlash (arXiv 2602.06036).

Three options extend it. ``draft_vocab_size`` v: the drafter knows only v of the target's tokens,
and draft token i is the target's i + d2t[i] (EAGLE-3's convention), which makes its head cheaper.
``markov_rank``: a token's logits also depend on the token before it in the block
(:class:`PairTable`). ``recurrent_size``: on all tokens before it in the block
(:class:`specmm.diffusion_drafters.models.block_memory.BlockMemory`). Third-party releases have
their own heads for that (:mod:`block_heads`).

Shape letters: B batch, M new context positions, K block (anchor included), F target layers read, C
width, H heads, D head width, R size of the memory or rank of the table, S slots, V vocabulary, v
the drafter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from specmm.core.cache import Cache, CacheSize, alike
from specmm.diffusion_drafters.models.block_heads import (
    ConfidenceHead,
    DominoHead,
    MarkovHead,
    PairTable,
)
from specmm.diffusion_drafters.models.block_memory import BlockMemory
from specmm.diffusion_drafters.models.dflash_config import DFlashConfig, Reach
from specmm.hf.drafters.files import LEFTOVERS, QWEN_SIZES, cast, check_ids, read_state, renamed
from specmm.hf.models.cache_layers import as_transformers
from specmm.hf.models.families import cache_name
from specmm.loading.checkpoints import fingerprint, load_strict, read_json, write_checkpoint
from specmm.loading.mapped import WithoutWeights

RENAMED = {
    "encoder.fc.": "fc.",  # transformers'
    "encoder.output_norm_enc.": "hidden_norm.",
    "logit_head.": "",  # early SpecForge's
    "prefix_gru.": "markov_head.prefix_gru.",
    "embed_proj.0.": "markov_head.inner.",
    "embed_proj.2.": "markov_head.outer.",
}
# Of the target, as releases write them beside the drafter's own, and its tokens the other way.
TARGETS = ("verifier_norm", "verifier_lm_head", "t2d")
OWN_HEAD = "lm_head.weight"
OWN_TOKENS = "embed_tokens.weight"
CACHE = cache_name(Qwen3DecoderLayer)


class DFlash(nn.Module):
    """The drafter's weights: ``begin`` a batch, ``read`` committed context, ``draft`` blocks."""

    method: ClassVar[str] = "block"
    d2t: Tensor
    t2d: Tensor

    state: ClassVar[tuple[str, ...]] = ("cache", "everyone")

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        sizes = config.sizes
        width: int = sizes.hidden_size
        layers = (Qwen3DecoderLayer(sizes, i) for i in range(sizes.num_hidden_layers))
        self.config = config
        self.layers: Any = nn.ModuleList(layers)
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(width, sizes.rms_norm_eps) for _ in range(2))
        self.turns = Qwen3RotaryEmbedding(sizes)  # its buffers are never saved
        count = config.tokens or sizes.vocab_size  # v
        if config.tokens:
            self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64))
        # The drafter's id of each of the target's tokens; v for those it does not know.
        self.register_buffer("t2d", torch.arange(sizes.vocab_size), persistent=False)
        self.markov = PairTable(count, config.markov) if config.markov else None
        self.recurrent = BlockMemory(width, config.recurrent) if config.recurrent else None
        self.markov_head = block_head(config, count)
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence:
            rank = config.head.size if config.head and config.confidence == "markov" else 0
            self.confidence_head = ConfidenceHead(width, rank)
        # A release's own embeddings and head, where it has them.
        self.lm_head: nn.Linear | None = None
        self.embed_tokens: nn.Embedding | None = None

    def own(self, state: Mapping[str, Tensor]) -> None:
        """Create the drafter's own head and embeddings if ``state`` has them."""
        sizes = self.config.sizes
        width: int = sizes.hidden_size
        if OWN_HEAD in state:
            count = self.config.tokens or sizes.vocab_size
            self.lm_head = nn.Linear(width, count, bias=False)
        if OWN_TOKENS in state:
            self.embed_tokens = nn.Embedding(sizes.vocab_size, width)

    @property
    def ids(self) -> Tensor | None:
        """The target's ids [v] of the drafter's tokens; None if it drafts all of them."""
        if not self.config.tokens:
            return None
        return self.d2t + torch.arange(self.config.tokens, device=self.d2t.device)

    def set_ids(self, ids: Tensor) -> None:
        """Let the drafter draft the target's tokens ``ids`` [v].

        Raises ``ValueError`` for repeated ids, ids that the target lacks, and another number than
        the config's.
        """
        count = self.config.tokens
        check_ids(ids, count, self.config.sizes.vocab_size)
        order = torch.arange(count, device=ids.device)
        self.d2t.copy_(ids - order)
        self.t2d.fill_(count)[ids] = order

    def pairs(self, previous: Tensor) -> Tensor:
        """The addition to the logits [..., v] after the target's tokens ``previous`` [...]."""
        assert self.markov is not None
        logits: Tensor = self.markov(self.t2d[previous])
        return logits

    def begin(self, batch: int, capacity: int, commit: int) -> None:
        """Make room for ``capacity`` positions a row and rounds that commit at most ``commit``."""
        sizes: Any = self.config.sizes
        block = self.config.block
        device = self.fc.weight.device
        size = CacheSize(
            layers=alike(len(self.layers), sizes.num_key_value_heads, sizes.head_dim),
            batch=batch,
            branches=1,
            capacity=capacity,
            scratch=max(block, commit),
        )
        cache = vars(self).get("cache")
        self.cache = Cache.again(cache, size, self.fc.weight.dtype, device)
        self.past = as_transformers(self.cache.layers)
        self.everyone = torch.ones(1, block, block, dtype=torch.bool, device=device)

    def read_prompt(self, context: Tensor, lengths: Tensor) -> None:
        """Cache the ``context`` [B, M, F·C] of prompts of ``lengths`` [B]."""
        self.cache.aim(0, context.shape[1])
        self._write(context, torch.arange(context.shape[1], device=lengths.device)[None])
        self.cache.lengths += lengths

    def read(self, context: Tensor, kept: Tensor) -> None:
        """Cache the ``context`` [B, M, F·C] of the first ``kept`` [B] positions of a round."""
        cache = self.cache
        order = torch.arange(context.shape[1], device=kept.device)
        cache.aim_at_tree(len(order))
        self._write(context, cache.lengths[:, None] + order)
        cache.keep(order.expand(len(kept), -1), kept)

    def draft(self, embeddings: Tensor) -> Tensor:
        """States [B, K, C] of blocks whose anchors follow the context.

        ``embeddings`` [B, K, C] are the target's of [anchor, mask, mask, …]. Row i scores the token
        at its own position, so the anchor's row scores nothing.
        """
        cache = self.cache
        cache.aim_at_tree(embeddings.shape[1])
        order = torch.arange(embeddings.shape[1], device=embeddings.device)
        turns = self.turns(embeddings, cache.lengths[:, None] + order)
        biases = self._biases(cache.tree_bias(self.everyone))
        x = embeddings
        for layer, bias in zip(self.layers, biases, strict=True):
            x = layer(x, attention_mask=bias, position_embeddings=turns, **{CACHE: self.past})
        return self.norm(x)

    def _biases(self, bias: Tensor) -> list[Tensor]:
        """Each layer's mask [B, 1, K, S]: ``bias``, under which the block's places all attend to
        one another, narrowed to the layer's reach.
        """
        reaches = self.config.reaches or (Reach(),) * len(self.layers)
        cache = self.cache
        biases = {
            reach: narrowed(bias, reach, cache.lengths, cache.front)
            for reach in dict.fromkeys(reaches)
        }
        return [biases[reach] for reach in reaches]

    def _write(self, context: Tensor, positions: Tensor) -> None:
        pairs = context_keys(self, context, positions)
        for (keys, values), memory in zip(pairs, self.cache.layers, strict=True):
            memory.write(keys, values, axis=2)


def narrowed(bias: Tensor, reach: Reach, lengths: Tensor, front: int) -> Tensor:
    """``bias`` [B, 1, K, S] with -inf beyond each place's ``reach``.

    Slot i < ``front`` is position i of the context of ``lengths`` [B]; slot ``front`` + i is place
    i of the block.
    """
    if reach == Reach():
        return bias
    query = torch.arange(bias.shape[-2], device=bias.device)
    slot = torch.arange(bias.shape[-1], device=bias.device)
    block = slot - front  # [S], negative in the context
    unseen = block.new_zeros(1, len(query), len(slot), dtype=torch.bool)
    if reach.causal:
        unseen = unseen | (block > query[:, None])
    if reach.past is not None:
        first = lengths[:, None] + (query if reach.moving else 0 * query) - reach.past  # [B, K]
        unseen = unseen | ((block < 0) & (slot < first[..., None]))
        if reach.moving:
            away = (block - query[:, None]).abs()
            unseen = unseen | ((block >= 0) & (away > reach.past))
    return bias.masked_fill(unseen[:, None], float("-inf"))


def block_head(config: DFlashConfig, tokens: int) -> MarkovHead | DominoHead | None:
    """The release's head that ``config`` describes, for v = ``tokens``; None if there is none."""
    head = config.head
    if head is None:
        return None
    width: int = config.sizes.hidden_size
    if head.kind == "domino":
        return DominoHead(tokens, width, head.size, head.inner, head.pure)
    vocabulary: int = config.sizes.vocab_size
    return MarkovHead(vocabulary, tokens, head.size, width, head.kind)


def context_keys(model: DFlash, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each layer's keys, values [B, H, M, D] of ``context`` [B, M, F·C] at [1 or B, M]."""
    mixed = model.hidden_norm(model.fc(context))  # [B, M, C]
    turns = model.turns(mixed, positions)
    pairs = []
    for layer in model.layers:
        attention = layer.self_attn
        split = (*mixed.shape[:2], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(mixed).view(split)).transpose(1, 2)
        _, keys = apply_rotary_pos_emb(keys, keys, *turns)
        pairs.append((keys, attention.v_proj(mixed).view(split).transpose(1, 2)))
    return pairs


def load_dflash(folder: str | Path, dtype: torch.dtype | None = None) -> DFlash:
    """The drafter in ``folder``, of any layout that ``dflash_config`` knows, in ``dtype`` or the
    file's.

    In evaluation mode. Raises ``ValueError`` naming missing sizes, and missing, extra, misshapen or
    non-finite weights.
    """
    config = DFlashConfig.from_json(read_json(Path(folder) / "config.json"), folder)
    return dflash_of(config, read_state(folder), folder, dtype)


def dflash_of(
    config: DFlashConfig, weights: Mapping[str, Tensor], source: object, dtype: torch.dtype | None
) -> DFlash:
    """The drafter of ``config`` with ``weights`` under any release's names; see ``load_dflash``."""
    kept_weights = {name: x for name, x in weights.items() if name.split(".")[0] not in TARGETS}
    state = renamed(kept_weights, RENAMED)
    if not config.tokens:
        state.pop("d2t", None)  # a table of all tokens changes nothing
    weights_dtype = dtype or (state["fc.weight"].dtype if "fc.weight" in state else torch.float32)
    with WithoutWeights():
        model = DFlash(config)
        model.own(state)
    load_strict(model, state, LEFTOVERS, str(source), weights_dtype)
    if model.ids is not None:
        model.set_ids(model.ids)
    cast(model, weights_dtype)
    return model.eval()


def save_dflash(
    model: DFlash, folder: str | Path, embeddings: Tensor, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write z-lab's format, with the fingerprint of the target's ``embeddings`` [V, C].

    Raises ``ValueError`` for a drafter with parts that z-lab's format lacks.
    """
    config = model.config
    if config.head or config.confidence or config.anchor or config.reaches or model.lm_head:
        raise ValueError(
            "the drafter must be one of our own to be saved, got one of another release; copy its "
            "folder"
        )
    sizes: Any = config.sizes
    facts = {name: getattr(sizes, name) for name in QWEN_SIZES} | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "head_dim": sizes.head_dim,
        "attention_bias": sizes.attention_bias,
        "rope_parameters": sizes.rope_parameters,
        "block_size": config.block,
        "dflash_config": {"mask_token_id": config.mask, "target_layer_ids": list(config.layers)},
        "target_fingerprint": fingerprint(embeddings),
    }
    extras = {
        "draft_vocab_size": config.tokens,
        "markov_rank": config.markov,
        "recurrent_size": config.recurrent,
    }
    facts |= {name: value for name, value in extras.items() if value}
    write_checkpoint(model.state_dict(), facts, folder, dtype)


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise ``ValueError`` unless a target of ``count`` layers has all of ``layers``."""
    if max(layers) >= count:
        raise ValueError(
            f"drafter must read some of the target's {count} layers, got {list(layers)} counted "
            "from 0; use its own drafter, or train one that reads others"
        )
