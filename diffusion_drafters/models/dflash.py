"""DFlash: a block drafter that reads the target's hidden states as keys and values of every layer.

One bidirectional pass over [anchor | masks] drafts a block. The context is the states of the
target's chosen layers at each committed token, mixed by ``fc`` and normed; its keys and values are
all that is cached, and rejected drafts leave no trace. Embeddings and head are the target's. Names
are z-lab's; transformers' are renamed. Source: DFlash (arXiv 2602.06036).

Three things may be added. ``draft_vocab_size`` v: the drafter knows only v of the target's tokens,
and draft token i is the target's i + d2t[i] (EAGLE-3's convention), which makes its head cheaper.
``markov_rank``: a token's logits depend on the token before it in the block, too
(:class:`PairTable`). ``recurrent_size``: and on all before it (:class:`BlockMemory`).

Shape letters: B batch, M new context positions, K block (anchor included), F
target layers read, C width, H heads, D head width, R size of the memory or rank of the table, V
vocabulary, v the drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from specmm.cache import Cache, CacheSize, alike
from specmm.checkpoints import fingerprint, load_strict, read_json
from specmm.hardware import state_of
from specmm.hf.cache_layers import as_transformers
from specmm.hf.drafters.files import (
    LEFTOVERS,
    QWEN_SIZES,
    Facts,
    cast,
    plain_rope,
    read_sizes,
    read_state,
    write_model,
)
from specmm.hf.families import cache_name

TRANSFORMERS_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
NORM_EPS = 1e-6  # added to an embedding's mean square
TABLE_ROWS = 8192  # embeddings normed at a time
CACHE = cache_name(Qwen3DecoderLayer)


@dataclass(frozen=True)
class DFlashConfig:
    """``sizes`` of the layers, the ``block`` K, the ``mask`` id and the target ``layers`` read,
    counted from 0.

    ``tokens`` is the size v of the drafter's own vocabulary (0: the target's), ``markov`` the rank
    of its table of pairs (0: none), ``recurrent`` the size of its memory along a block (0: none).
    Raises ``ValueError`` for a block without a mask, a mask outside the vocabulary, no or repeated
    layers and sizes that cannot be.
    """

    sizes: Qwen3Config
    block: int
    mask: int
    layers: tuple[int, ...]
    tokens: int = 0
    markov: int = 0
    recurrent: int = 0

    def __post_init__(self) -> None:
        vocabulary = self.sizes.vocab_size
        if self.block < 2:
            raise ValueError(
                f"block_size must be at least 2 (the anchor and a mask), got {self.block}"
            )
        if not 0 <= self.mask < vocabulary:
            raise ValueError(f"mask_token_id must be in [0, {vocabulary}), got {self.mask}")
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) < len(self.layers):
            raise ValueError(
                f"target_layer_ids must be different layers counted from 0, got {list(self.layers)}"
            )
        if not 0 <= self.tokens <= vocabulary:
            raise ValueError(
                f"draft_vocab_size must be 0 to vocab_size {vocabulary}, got {self.tokens}"
            )
        if min(self.markov, self.recurrent) < 0:
            raise ValueError(
                f"markov_rank and recurrent_size must be at least 0, got {self.markov} and "
                f"{self.recurrent}"
            )

    @classmethod
    def from_json(cls, facts: Facts, source: object = "config.json") -> DFlashConfig:
        """From a ``config.json``: z-lab nests in ``dflash_config`` what transformers has on top."""
        given = {**facts, **(facts.get("dflash_config") or {})}
        needed = ("block_size", "mask_token_id", "target_layer_ids")
        if missing := [name for name in needed if given.get(name) is None]:
            raise ValueError(
                f"{source} must describe a DFlash drafter, got no {', '.join(missing)}"
            )
        names = ("draft_vocab_size", "markov_rank", "recurrent_size")
        counts = {name: given.get(name) or 0 for name in ("block_size", "mask_token_id", *names)}
        strange = [f"{name} {value!r}" for name, value in counts.items() if type(value) is not int]
        if strange:
            raise ValueError(f"{source} must give whole numbers, got {', '.join(strange)}")
        width = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
        kind: Any = Qwen3Config
        sizes = kind(
            **read_sizes(facts, {name: name for name in QWEN_SIZES}, "DFlash"),
            **plain_rope(facts, 1e6),
            head_dim=width,
            attention_bias=bool(facts.get("attention_bias")),
            attn_implementation="sdpa",
        )
        layers = tuple(given["target_layer_ids"])
        extras = (counts[name] for name in names)
        return cls(sizes, counts["block_size"], counts["mask_token_id"], layers, *extras)


class PairTable(nn.Module):
    """Logits that one token adds to those of the next, of low rank: W2 W1[x] after a token x.

    A block's marginals do not depend on which tokens were drawn before; this binds them for one
    small product a draft. The last row of W1 is for all tokens that the drafter lacks. Source:
    DSpark's Markov head; names and sizes are our own.
    """

    def __init__(self, tokens: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Embedding(tokens + 1, rank)
        self.after = nn.Linear(rank, tokens, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        """The addition to the logits [..., v] after tokens ``previous`` [...] of the drafter."""
        found: Tensor = self.after(self.before(previous))
        return found


class BlockMemory(nn.Module):
    """A memory of ``size`` R along a block of states of ``width`` C, which binds each draft to
    those before it.

        h_k = silu(token e(x_{k-1}) + place s_k + memory h_{k-1}),   logits_k = head(s_k + out h_k)

    with the block's states s, the target's normed embeddings e and its head: a few small products a
    draft. The products of tokens are computed once for all of them. Source: DSpark's sequential
    head; the cell and its names are our own.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.token = nn.Linear(width, size, bias=False)
        self.place = nn.Linear(width, size)
        self.memory = nn.Linear(size, size, bias=False)
        self.out = nn.Linear(size, width, bias=False)
        self._table = torch.empty(0)
        self._table_of: tuple[object, ...] = ()

    def read(self, embeddings: Tensor) -> Tensor:
        """The part [..., R] of drafted tokens with the target's ``embeddings`` [..., C]."""
        found: Tensor = self.token(F.rms_norm(embeddings, embeddings.shape[-1:], eps=NORM_EPS))
        return found

    @torch.inference_mode(False)
    @torch.no_grad()
    def table(self, embeddings: Tensor) -> Tensor:
        """``read`` of all tokens [V, R], again where ``embeddings`` [V, C] or weights changed."""
        state = (state_of(embeddings), state_of(self.token.weight))
        if self._table_of[:2] != state:
            parts = [self.read(part) for part in embeddings.split(TABLE_ROWS)]
            self._table = torch.cat(parts)
            # The embeddings are kept alive, or their place in memory could become another's.
            self._table_of = (*state, embeddings)
        return self._table

    def places(self, states: Tensor) -> Tensor:
        """The block's ``states`` [..., C] and their part of the memory, joined [..., C + R]."""
        return torch.cat([states, self.place(states)], dim=-1)

    def forward(self, place: Tensor, token: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """A draft's state [..., C] and the memory [..., R] after it.

        ``place`` [..., C + R] is of :meth:`places`, ``token`` [..., R] of the token before by
        :meth:`read`, ``memory`` the one after that token (None: the block begins).
        """
        states, inner = place.split([self.out.out_features, self.out.in_features], dim=-1)
        inner = inner + token
        memory = F.silu(inner if memory is None else inner + self.memory(memory))
        return states + self.out(memory), memory


class DFlash(nn.Module):
    """The drafter's weights: ``begin`` a batch, ``read`` committed context, ``draft`` blocks."""

    method: ClassVar[str] = "block"
    d2t: Tensor
    t2d: Tensor

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

    @property
    def ids(self) -> Tensor | None:
        """The target's ids [v] of the drafter's tokens; None where they are all of the target's."""
        if not self.config.tokens:
            return None
        return self.d2t + torch.arange(self.config.tokens, device=self.d2t.device)

    def set_ids(self, ids: Tensor) -> None:
        """Make ``ids`` [v] of the target's the drafter's tokens.

        Raises ``ValueError`` for ids that repeat, that the target lacks or that are not as many as
        the config says.
        """
        count = self.config.tokens
        vocabulary = self.config.sizes.vocab_size
        possible = bool(((ids >= 0) & (ids < vocabulary)).all())
        if len(ids.unique()) != count or len(ids) != count or not possible:
            raise ValueError(
                f"d2t must name {count} different tokens in [0, {vocabulary}), "
                "got others or some twice"
            )
        order = torch.arange(count, device=ids.device)
        self.d2t.copy_(ids - order)
        self.t2d.fill_(count)[ids] = order

    def pairs(self, previous: Tensor) -> Tensor:
        """The addition to the logits [..., v] after the target's tokens ``previous`` [...]."""
        assert self.markov is not None
        found: Tensor = self.markov(self.t2d[previous])
        return found

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
        self.cache = Cache(size, self.fc.weight.dtype, device)
        self.past = as_transformers(self.cache.layers)
        self.everyone = torch.ones(1, block, block, dtype=torch.bool, device=device)

    def read_prompt(self, context: Tensor, lengths: Tensor) -> None:
        """Keep the ``context`` [B, M, F·C] of prompts of ``lengths`` [B]."""
        self.cache.aim(0, context.shape[1])
        self._write(context, torch.arange(context.shape[1], device=lengths.device)[None])
        self.cache.lengths += lengths

    def read(self, context: Tensor, kept: Tensor) -> None:
        """Keep the ``context`` [B, M, F·C] of the first ``kept`` [B] positions of a round."""
        cache = self.cache
        order = torch.arange(context.shape[1], device=kept.device)
        cache.aim(cache.size.capacity, cache.slots)
        self._write(context, cache.lengths[:, None] + order)
        cache.keep(order.expand(len(kept), -1), kept)

    def draft(self, embeddings: Tensor) -> Tensor:
        """States [B, K, C] of blocks whose anchors follow the context.

        ``embeddings`` [B, K, C] are the target's of [anchor, mask, mask, …]. Row i scores the token
        at its own position, so the anchor's scores nothing.
        """
        cache = self.cache
        cache.aim(cache.size.capacity, cache.slots)
        order = torch.arange(embeddings.shape[1], device=embeddings.device)
        turns = self.turns(embeddings, cache.lengths[:, None] + order)
        bias = cache.tree_bias(self.everyone)
        x = embeddings
        for layer in self.layers:
            x = layer(x, attention_mask=bias, position_embeddings=turns, **{CACHE: self.past})
        return self.norm(x)

    def _write(self, context: Tensor, positions: Tensor) -> None:
        pairs = context_keys(self, context, positions)
        for (keys, values), memory in zip(pairs, self.cache.layers, strict=True):
            memory.write(keys.transpose(1, 2), values.transpose(1, 2))


def context_keys(model: DFlash, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each layer's keys, values [B, H, M, D] of ``context`` [B, M, F·C] at [1 or B, M]."""
    mixed = model.hidden_norm(model.fc(context))  # [B, M, C]
    turns = model.turns(mixed, positions)
    found = []
    for layer in model.layers:
        attention = layer.self_attn
        split = (*mixed.shape[:2], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(mixed).view(split)).transpose(1, 2)
        _, keys = apply_rotary_pos_emb(keys, keys, *turns)
        found.append((keys, attention.v_proj(mixed).view(split).transpose(1, 2)))
    return found


def load_dflash(folder: str | Path, dtype: torch.dtype | None = None) -> DFlash:
    """The drafter in ``folder``, of z-lab's or transformers' format, in ``dtype`` or the file's.

    In evaluation mode. Raises ``ValueError`` naming sizes that are missing and missing, extra,
    misshapen or non-finite weights.
    """
    config = DFlashConfig.from_json(read_json(Path(folder) / "config.json"), folder)
    model = DFlash(config)
    state = {_zlab_name(name): tensor for name, tensor in read_state(folder).items()}
    load_strict(model, state, LEFTOVERS, folder)
    if model.ids is not None:
        model.set_ids(model.ids)
    cast(model, dtype or state["fc.weight"].dtype)
    return model.eval()


def save_dflash(
    model: DFlash, folder: str | Path, embeddings: Tensor, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write z-lab's format, with the fingerprint of the target's ``embeddings`` [V, C]."""
    config = model.config
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
    write_model(model.state_dict(), facts, folder, dtype)


def _zlab_name(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, ours in TRANSFORMERS_NAMES.items():
        name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
    return name


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise ``ValueError`` unless ``layers`` come before the last of a target's ``count``.

    For the last one releases read transformers' states, which are after the final norm, and ours
    are not.
    """
    if max(layers) >= count - 1:
        raise ValueError(
            f"drafter must read layers in front of the last of the target's {count}, got "
            f"{list(layers)} counted from 0; use its own drafter, or train one that reads others"
        )
