"""What differs between the models of transformers: decoder, head, embeddings, masks, positions.

What a class does to its logits after the head is not in the config: one name divides in one class
and multiplies in the next. So it is measured on the model's own forward: known numbers are put
beside the head's output, and what becomes of them is read.

Shape letters: B batch, L prompt positions, C width, T positions, P known numbers, V vocabulary, v
some of its tokens.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from specmm.hardware import prepack
from specmm.hf.prompt import POSITIONS, VLMPrompt
from specmm.kernels.tree_attention.interface import NAME as TREES
from specmm.registry import unknown

CACHES = ("past_key_values", "cache_params")  # what decoders call their cache
GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")  # what M-RoPE counts by
LAYERS = ("layers", "h")  # what decoders call their layers
INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")  # widths of feed-forwards
SUPPORTED = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")

LARGE = 2.0**60  # where a cap of any size is reached
SMALL = 2.0**-10
KNOWN = (SMALL, LARGE, -LARGE, -300.0, -30.0, -3.0, 0.0, 0.3, 3.0, 30.0, 300.0)  # P
ROUNDINGS = 16  # of a few products and a tanh


@dataclass(frozen=True)
class AfterHead:
    """Logits times ``scale``, then held within ``cap`` of 0 by a tanh (None: they are not)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """``logits`` [...] of the head as the model's class gives them."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


_measured: WeakKeyDictionary[PreTrainedModel, AfterHead] = WeakKeyDictionary()


@dataclass(frozen=True)
class Family:
    """A model's parts by their common names.

    ``head`` turns states [..., C] into logits [..., V], ``embedding`` tokens [...] into the
    decoder's inputs [..., C]; ``image_tokens`` are the ids that stand for picture content. Where
    the head is ``foreign`` to the model's own forward, nothing happens to its logits, and
    drafted tokens are not those of the prompt unless the vocabulary is ``shared``.
    """

    model: PreTrainedModel
    body: nn.Module
    decoder: Any  # a model of transformers, or of a class beside it
    head: Any
    embedding: Callable[[Tensor], Tensor]
    config: PreTrainedConfig
    vocabulary: int
    image_tokens: tuple[int, ...] = ()
    foreign: bool = False
    shared: bool = True

    @classmethod
    def of(cls, model: PreTrainedModel) -> Family:
        """Parts of a vision-language model or a text model; raises ``ValueError`` for others."""
        config = model.config
        sees = hasattr(config, "vision_config")
        if sees and config.model_type not in SUPPORTED:
            raise unknown("vision-language model type", config.model_type, SUPPORTED)
        decoder: Any = model.get_decoder() if sees else model.base_model
        ids = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
        text = config.get_text_config()
        return cls(
            model=model,
            body=model.base_model,
            decoder=decoder,
            head=model.get_output_embeddings(),
            embedding=decoder.get_input_embeddings(),
            config=text,
            vocabulary=int(text.vocab_size),
            image_tokens=tuple(i for i in ids if i is not None),
        )

    @property
    def head_dim(self) -> int:
        """D, the width of an attention head."""
        config = self.config
        given = getattr(config, "head_dim", None)
        return int(given or config.hidden_size // config.num_attention_heads)

    @property
    def inner(self) -> int:
        """The width of a feed-forward layer."""
        widths = (getattr(self.config, name, None) for name in INNER)
        return int(next(filter(None, widths), 4 * self.config.hidden_size))

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers in order; raises ``ValueError`` where they have no known name."""
        name = next((name for name in LAYERS if hasattr(self.decoder, name)), None)
        if name is None:
            raise ValueError(
                f"target must name its decoder's layers {' or '.join(LAYERS)}, got a "
                f"{type(self.decoder).__name__}; use a method that reads none of them, such as "
                "prompt-lookup or text-draft"
            )
        return getattr(self.decoder, name)

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of attention layers: full_attention, sliding_attention, both or none."""
        if self.chains_only:
            slides = [layer.is_sliding for layer in self.cache_layers if has_keys(layer)]
            return {"sliding_attention" if sliding else "full_attention" for sliding in slides}
        window = getattr(self.config, "sliding_window", None)
        types = getattr(self.config, "layer_types", None)
        return set(types or ["sliding_attention" if window else "full_attention"])

    @cached_property
    def cache_layers(self) -> list[Any]:
        """The layers of the cache that the model's own forward would make."""
        return DynamicCache(config=self.config).layers

    @cached_property
    def chains_only(self) -> bool:
        """Whether drafts must be chains: some layers have a state, which only one path can move."""
        return any(map(has_states, self.cache_layers))

    @cached_property
    def takes(self) -> set[str]:
        """The names of the decoder's arguments."""
        return set(inspect.signature(self.decoder.forward).parameters)

    @cached_property
    def cache_name(self) -> str:
        """The decoder's argument that is a cache."""
        return next((name for name in CACHES if name in self.takes), CACHES[0])

    @cached_property
    def room(self) -> int | None:
        """Positions that a text may have; None where the model does not say."""
        if self.chains_only and not any(map(has_keys, self.cache_layers)):
            return sys.maxsize  # states alone have no positions
        found = getattr(self.config, "max_position_embeddings", None)
        return None if found is None else int(found)

    @cached_property
    def window(self) -> int:
        """Positions a sliding layer attends, itself included; 0 where no layer slides."""
        return int(self.config.sliding_window) if "sliding_attention" in self.kinds else 0

    @cached_property
    def turning_point(self) -> int | None:
        """Positions up to which "longrope" uses its short factors; None for other embeddings.

        The positions of a longer text all use the others.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            return None
        name = "original_max_position_embeddings"
        return int(rope.get(name) or getattr(self.config, name))

    @cached_property
    def mrope(self) -> bool:
        """Whether positions have three parts (M-RoPE)."""
        return hasattr(self.body, "get_rope_index")

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V] of the decoder's ``states`` [..., C]."""
        return self.after_head(self.head(states))

    def logits_of(self, ids: Tensor | None) -> Callable[[Tensor], Tensor]:
        """A head for the tokens ``ids`` [v] (None: all): states [..., C] to logits [..., v]."""
        if ids is None:
            return self.logits
        bias = self.head.bias
        few = nn.Linear(self.head.in_features, len(ids), bias=bias is not None, device="meta")
        few.weight = nn.Parameter(self.head.weight.detach()[ids], requires_grad=False)
        if bias is not None:
            few.bias = nn.Parameter(bias.detach()[ids], requires_grad=False)
        prepack(few)
        return lambda states: self.after_head(few(states))

    @cached_property
    def after_head(self) -> AfterHead:
        """What the model's class does to logits after the head, measured on its own forward."""
        return AfterHead() if self.foreign else after_head(self.model)

    @property
    def takes_trees(self) -> bool:
        """Whether attention takes a tree's mask: loaded with ``specmm_tree``, without a window."""
        return self.config._attn_implementation == TREES and not self.window

    def masks(self, full: Tensor | None, sliding: Tensor | None) -> Any:
        """The attention mask argument of the decoder: one mask, or one by kind of layer."""
        if not self.kinds:
            return None
        if self.kinds == {"full_attention"}:
            return full
        if self.kinds == {"sliding_attention"}:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    def positions(self, prompt: VLMPrompt) -> tuple[dict[str, Tensor], Tensor]:
        """What the prefill is given of positions, and what is added to those after it [B].

        M-RoPE gives a picture fewer positions than it has tokens.
        """
        none = torch.zeros_like(prompt.lengths)
        if not self.mrope:
            return {}, none
        if prompt.inputs.get(POSITIONS) is not None:
            return {POSITIONS: prompt.inputs[POSITIONS]}, prompt.next_positions() - prompt.lengths
        types = prompt.inputs.get("mm_token_type_ids")
        if types is None:  # 1 stands for a picture's token, 2 for a video's
            kinds = enumerate(self.image_tokens, start=1)
            types = sum((prompt.input_ids == token).int() * i for i, token in kinds)
        grids = {name: prompt.inputs[name] for name in GRIDS if prompt.inputs.get(name) is not None}
        if not grids:
            return {}, none
        positions, offsets = self.body.get_rope_index(  # type: ignore[operator]
            prompt.input_ids, mm_token_type_ids=types, attention_mask=prompt.mask, **grids
        )
        return {"position_ids": positions}, offsets[:, 0]

    def spread(self, positions: Tensor) -> Tensor:
        """Positions of text [B, N] in the form the decoder takes: three equal rows under M-RoPE."""
        return positions.expand(3, -1, -1) if self.mrope else positions


def has_keys(layer: Any) -> bool:
    """Whether a ``layer`` of transformers' cache keeps keys and values."""
    return isinstance(layer, CacheLayerMixin)


def has_states(layer: Any) -> bool:
    """Whether a ``layer`` of transformers' cache keeps states."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def after_head(model: PreTrainedModel) -> AfterHead:
    """What ``model`` does after its head, by one forward over one token at the first call.

    Raises ``ValueError`` when that is neither a factor nor a cap.
    """
    if model not in _measured:
        own_logits(model, plain_tokens(model.config, 1)[None])
    return _measured[model]


def own_logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The model's own logits [B, T, V] of ``input_ids`` [B, T]; ``after_head`` is measured, too.

    Raises ``ValueError`` when that is neither a factor nor a cap.
    """
    known = torch.tensor(KNOWN, dtype=torch.float64, device=model.device)
    me = threading.get_ident()
    runs = []

    def add_known(_: nn.Module, __: object, logits: Tensor) -> Tensor | None:
        if threading.get_ident() != me:  # another thread's forward of the same model
            return None
        runs.append(logits)
        ours = known[None, :, None].expand(len(logits), -1, logits.shape[-1])
        return torch.cat([logits.to(known.dtype), ours], dim=1)

    handle = model.get_output_embeddings().register_forward_hook(add_known)
    try:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    finally:
        handle.remove()
    if len(runs) != 1:
        raise ValueError(f"its head must be run once a forward, it was run {len(runs)} times")
    _measured[model] = _fitted(known, logits[0, -len(KNOWN) :])
    return logits[:, : -len(KNOWN)]


def plain_tokens(config: PreTrainedConfig, count: int) -> Tensor:
    """Ids [count] of the vocabulary that are neither special nor placeholders of pictures."""
    text = config.get_text_config()
    special = _special(config) | _special(text)
    size = int(text.vocab_size)
    order = (*range(size // 2, size), *range(size // 2))
    plain = list(islice((i for i in order if i not in special), count))
    return torch.tensor((plain * count)[:count])


def _special(config: PreTrainedConfig) -> set[int]:
    names = [n for n in vars(config) if n.endswith(("_token_id", "_token_index"))]
    values = [getattr(config, name) for name in names]
    return {i for v in values for i in (v if isinstance(v, list) else [v]) if isinstance(i, int)}


def _fitted(known: Tensor, found: Tensor) -> AfterHead:
    """The factor and the cap that make ``found`` [P, V] of ``known`` [P], all tokens alike."""
    values = found[:, 0].double()
    small = float(values[0])
    large = float(values[1])
    rounding = ROUNDINGS * torch.finfo(found.dtype).eps
    cap = large if abs(large) < abs(small) / SMALL * LARGE / 2 else None
    scale = (small if cap is None else cap * float(torch.atanh(values[0] / cap))) / SMALL
    fitted = AfterHead(1.0 if abs(scale - 1) <= rounding else scale, cap)
    wanted = fitted(known).to(found.dtype)[:, None].expand_as(found)
    if not torch.allclose(found, wanted, rtol=rounding, atol=rounding):
        raise ValueError("it does more to its logits after the head than to scale and to cap them")
    return fitted
