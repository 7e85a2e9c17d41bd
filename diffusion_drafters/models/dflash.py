"""DFlash: a block drafter that reads the target's hidden states as keys and values of every layer.

One bidirectional pass over [anchor | masks] drafts a block. The context is what the target's chosen
layers said of each committed token, mixed by ``fc`` and normed; its keys and values are all that is
cached, and rejected drafts leave no trace. Embeddings and head are the target's. Names are z-lab's;
transformers' layout is renamed. Source: DFlash (arXiv 2602.06036).

Three things may be added. ``draft_vocab_size`` v: the drafter knows only v of the target's tokens,
and draft token i is the target's i + d2t[i] (EAGLE-3's convention), which makes its head cheaper.
``markov_rank``: a token's logits depend on the token before it in the block, too (see
:mod:`specmm.diffusion_drafters.models.markov`). ``recurrent_size``: and on all before it (see
:mod:`specmm.diffusion_drafters.models.recurrent`).

Shape letters: B batch, M new context positions, K block (anchor included), S slots, F target layers
read, C width, H heads, D head width, V vocabulary, v the drafter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from specmm.cache import Cache, CacheSize
from specmm.checkpoints import State, fingerprint, load_strict, read_json
from specmm.diffusion_drafters.models.bidirectional import QWEN_SIZES, plain_rope, read_sizes
from specmm.diffusion_drafters.models.files import LEFTOVERS, cast, read_state, write_model
from specmm.diffusion_drafters.models.markov import Markov
from specmm.diffusion_drafters.models.recurrent import Recurrent
from specmm.hf.target import as_transformers

TRANSFORMERS_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


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
        if self.block < 2:
            raise ValueError(
                f"block_size must be at least 2 (the anchor and a mask), got {self.block}"
            )
        if not 0 <= self.mask < self.sizes.vocab_size:
            raise ValueError(
                f"mask_token_id must be in [0, {self.sizes.vocab_size}), got {self.mask}"
            )
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) < len(self.layers):
            raise ValueError(
                f"target_layer_ids must be different layers counted from 0, got {list(self.layers)}"
            )
        if not 0 <= self.tokens <= self.sizes.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be 0 to vocab_size {self.sizes.vocab_size}, got {self.tokens}"
            )
        if min(self.markov, self.recurrent) < 0:
            raise ValueError(
                f"markov_rank and recurrent_size must be at least 0, got {self.markov} and {self.recurrent}"
            )

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], source: object = "config.json") -> DFlashConfig:
        """From a drafter's ``config.json``: z-lab nests under ``dflash_config`` what transformers
        has at the top.
        """
        given = {**facts, **(facts.get("dflash_config") or {})}
        missing = [
            n for n in ("block_size", "mask_token_id", "target_layer_ids") if given.get(n) is None
        ]
        if missing:
            raise ValueError(
                f"{source} must describe a DFlash drafter, got no {', '.join(missing)}"
            )
        names = ("block_size", "mask_token_id", "draft_vocab_size", "markov_rank", "recurrent_size")
        counts = {name: given.get(name) or 0 for name in names}
        if strange := [
            f"{name} {value!r}" for name, value in counts.items() if type(value) is not int
        ]:
            raise ValueError(f"{source} must give whole numbers, got {', '.join(strange)}")
        kind: Any = Qwen3Config
        return cls(
            kind(
                **read_sizes(facts, QWEN_SIZES, "DFlash"),
                **plain_rope(facts, 1e6),
                head_dim=facts.get("head_dim")
                or facts["hidden_size"] // facts["num_attention_heads"],
                attention_bias=bool(facts.get("attention_bias")),
                attn_implementation="sdpa",
            ),
            counts["block_size"],
            counts["mask_token_id"],
            tuple(given["target_layer_ids"]),
            counts["draft_vocab_size"],
            counts["markov_rank"],
            counts["recurrent_size"],
        )


class DFlash(nn.Module):
    """The drafter's own weights; ``begin`` a batch, ``read`` context as it is committed, ``draft``
    blocks.
    """

    method: ClassVar[str] = "block"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        sizes = config.sizes
        width: int = sizes.hidden_size
        self.config = config
        self.layers: Any = nn.ModuleList(
            Qwen3DecoderLayer(sizes, i) for i in range(sizes.num_hidden_layers)
        )
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(width, sizes.rms_norm_eps) for _ in range(2))
        self.turns = Qwen3RotaryEmbedding(sizes)  # its buffers are never saved
        if config.tokens:
            self.register_buffer("d2t", torch.zeros(config.tokens, dtype=torch.int64))
        self.known = config.tokens or sizes.vocab_size  # v
        self.register_buffer(
            "t2d", torch.arange(sizes.vocab_size), persistent=False
        )  # v: a token it does not know
        self.markov = Markov(self.known, config.markov) if config.markov else None
        self.recurrent = Recurrent(width, config.recurrent) if config.recurrent else None

    @property
    def ids(self) -> Tensor | None:
        """The target's ids [v] of the drafter's tokens; None where they are all of the target's."""
        return (
            None
            if not self.config.tokens
            else self.d2t + torch.arange(self.config.tokens, device=self.d2t.device)
        )

    def know(self, ids: Tensor) -> None:
        """Let ``ids`` [v] of the target's be the drafter's tokens.

        Raises ``ValueError`` for ids that repeat, that the target lacks or that are not as many as
        the config says.
        """
        count, vocabulary = self.config.tokens, self.config.sizes.vocab_size
        if (
            len(ids.unique()) != count
            or len(ids) != count
            or not bool(((ids >= 0) & (ids < vocabulary)).all())
        ):
            raise ValueError(
                f"d2t must name {count} different tokens in [0, {vocabulary}), got others or some twice"
            )
        order = torch.arange(count, device=ids.device)
        self.d2t.copy_(ids - order)
        self.t2d.fill_(count)[ids] = order

    def pairs(self, previous: Tensor) -> Tensor:
        """What is added to the logits [..., v] after the target's tokens ``previous`` [...]; needs
        ``markov``.
        """
        assert self.markov is not None
        found: Tensor = self.markov(self.t2d[previous])
        return found

    def begin(self, batch: int, capacity: int, commit: int) -> None:
        """Make room for ``capacity`` positions a row and for rounds that commit at most ``commit``
        tokens.
        """
        sizes: Any = self.config.sizes
        weight = self.fc.weight
        scratch = max(self.config.block, commit)
        size = CacheSize(
            len(self.layers), sizes.num_key_value_heads, sizes.head_dim, batch, 1, capacity, scratch
        )
        self.cache = Cache(size, weight.dtype, weight.device)
        self.past = as_transformers(self.cache.layers)
        self.everyone = torch.ones(
            1, self.config.block, self.config.block, dtype=torch.bool, device=weight.device
        )

    def read_prompt(self, context: Tensor, lengths: Tensor) -> None:
        """Remember what the target's layers said, ``context`` [B, M, F·C], of prompts of
        ``lengths`` [B].
        """
        self.cache.aim(0, context.shape[1])
        self._remember(context, torch.arange(context.shape[1], device=lengths.device)[None])
        self.cache.lengths += lengths

    def read(self, context: Tensor, kept: Tensor) -> None:
        """Remember the first ``kept`` [B] of the committed positions' ``context`` [B, M, F·C]."""
        cache, order = self.cache, torch.arange(context.shape[1], device=kept.device)
        cache.aim(cache.size.capacity, cache.slots)
        self._remember(context, cache.lengths[:, None] + order)
        cache.keep(order.expand(len(kept), -1), kept)

    def draft(self, embeddings: Tensor) -> Tensor:
        """States [B, K, C] of blocks whose anchors follow the context; ``embeddings`` [B, K, C] are
        the target's of [anchor, mask, mask, …]. Row i scores the token at its own position, so the
        anchor's scores nothing.
        """
        cache = self.cache
        cache.aim(cache.size.capacity, cache.slots)
        positions = cache.lengths[:, None] + torch.arange(
            embeddings.shape[1], device=embeddings.device
        )
        turns, bias = self.turns(embeddings, positions), cache.tree_bias(self.everyone)
        x = embeddings
        for layer in self.layers:
            x = layer(x, attention_mask=bias, past_key_values=self.past, position_embeddings=turns)
        return self.norm(x)

    def _remember(self, context: Tensor, positions: Tensor) -> None:
        for (keys, values), memory in zip(
            context_keys(self, context, positions), self.cache.layers, strict=True
        ):
            memory.write(keys.transpose(1, 2), values.transpose(1, 2))


def context_keys(model: DFlash, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [B, H, M, D] of each layer for ``context`` [B, M, F·C] at ``positions`` [1 or
    B, M].
    """
    mixed = model.hidden_norm(model.fc(context))  # [B, M, C]
    turns = model.turns(mixed, positions)
    return [_keys(layer.self_attn, mixed, turns) for layer in model.layers]


def _keys(attention: Any, states: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of ``states`` [B, M, C] by a layer's own projections."""
    split = (*states.shape[:2], -1, attention.head_dim)
    keys = attention.k_norm(attention.k_proj(states).view(split)).transpose(1, 2)
    _, keys = apply_rotary_pos_emb(keys, keys, *turns)
    return keys, attention.v_proj(states).view(split).transpose(1, 2)


def load_dflash(folder: str | Path, dtype: torch.dtype | None = None) -> DFlash:
    """The drafter in ``folder``, z-lab's or transformers' layout, in evaluation mode, in ``dtype``
    or the file's.

    Raises ``ValueError`` naming sizes that are missing and missing, extra, misshapen or non-finite
    weights.
    """
    config = DFlashConfig.from_json(read_json(Path(folder) / "config.json"), folder)
    state, model = zlab_names(read_state(folder)), DFlash(config)
    load_strict(model, state, LEFTOVERS, folder)
    if model.ids is not None:
        model.know(model.ids)
    cast(model, dtype or state["fc.weight"].dtype)
    return model.eval()


def save_dflash(
    model: DFlash, folder: str | Path, embeddings: Tensor, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write z-lab's layout, with the fingerprint of the target's ``embeddings`` [V, C]."""
    sizes: Any = model.config.sizes
    facts = {name: getattr(sizes, name) for name in QWEN_SIZES} | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "head_dim": sizes.head_dim,
        "attention_bias": sizes.attention_bias,
        "rope_parameters": sizes.rope_parameters,
        "block_size": model.config.block,
        "dflash_config": {
            "mask_token_id": model.config.mask,
            "target_layer_ids": list(model.config.layers),
        },
        "target_fingerprint": fingerprint(embeddings),
    }
    facts |= {"draft_vocab_size": model.config.tokens} if model.config.tokens else {}
    facts |= {"markov_rank": model.config.markov} if model.config.markov else {}
    facts |= {"recurrent_size": model.config.recurrent} if model.config.recurrent else {}
    write_model(model.state_dict(), facts, folder, dtype)


def zlab_names(state: State) -> State:
    """Tensors of either layout under z-lab's names."""
    return {_zlab_name(name): tensor for name, tensor in state.items()}


def _zlab_name(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, ours in TRANSFORMERS_NAMES.items():
        name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
    return name


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise ``ValueError`` unless a target of ``count`` layers has those that the drafter reads, in
    front of its last.

    Of the last one releases read transformers' states, which are after the final norm, and ours are
    not.
    """
    if max(layers) >= count - 1:
        raise ValueError(
            f"drafter must read layers in front of the last of the target's {count}, got {list(layers)} counted "
            "from 0; use its own drafter, or train one that reads others"
        )
