"""Hides the differences between transformers models: decoder, head, embeddings, masks, positions,
and the cache entries of each layer.

The config does not say how a class changes its logits after the head: the same name is a divisor in
one class and a factor in the next. So it is measured on the model's own forward: the head returns
known numbers, and the resulting logits are read. The size of each layer's cache entries is read
from the cache of the same forward.

Shape letters: B batch, L prompt positions, C width, T positions, P known numbers, V vocabulary, v
some of its tokens.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from specmm.core.cache import LayerSize
from specmm.core.derived import Derived, fact, facts
from specmm.hf.prompts.prompt import POSITIONS, VLMPrompt
from specmm.kernels.tree_attention.interface import NAME as TREES
from specmm.loading.hardware import prepack

GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")  # for M-RoPE positions
CACHES = ("cache", "past_key_values", "cache_params")  # the argument's names in old and new models
DROPPED = {"logits_to_keep", *CACHES, "use_cache", "return_dict", "labels"}  # set by us
LAYERS = ("layers", "h")  # decoders' names for their layers
INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")  # widths of feed-forwards
PER_LAYER = "per_layer_inputs"  # embeddings of the tokens that layers read directly
PLACEHOLDERS = ("image", "video", "audio")  # kinds in the names of configs' token ids
SCALED = ("linear", "dynamic", "yarn", "llama3")  # kinds of rotary embeddings with a factor
FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"

LARGE = 2.0**60  # beyond a cap of any size
SMALL = 2.0**-10
KNOWN = (SMALL, LARGE, -LARGE, -300.0, -30.0, -3.0, 0.0, 0.3, 3.0, 30.0, 300.0)  # P
ROUNDINGS = 16  # rounding errors of a few products and a tanh
Rows = TypeVar("Rows", bound="FewRows")


@dataclass(frozen=True)
class AfterHead:
    """Logits times ``scale``, then limited to ±``cap`` by a tanh (None: no limit).

    Logits of the tokens ``hidden`` become the dtype's lowest number.
    """

    scale: float = 1.0
    cap: float | None = None
    hidden: tuple[int, ...] = ()

    def __call__(self, logits: Tensor) -> Tensor:
        """The class's logits [...] from the head's ``logits``; hidden tokens are not yet masked."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


# names of facts (specmm.core.derived)
AFTER_HEAD, LAYER_SIZES, CACHE_KINDS = "after head", "layer sizes", "cache kinds"


@dataclass(frozen=True)
class Way:
    """How a model is run.

    With ``left`` a prompt is padded at the left and prepared by the model itself, as its generate
    does. With ``whole``, trees and steps pass as tokens through the whole model below its head;
    otherwise they pass as embeddings through its decoder.
    """

    left: bool = False
    whole: bool = False


WAYS = tuple(Way(left, whole) for left in (False, True) for whole in (False, True))  # tried in turn


@dataclass(frozen=True)
class Family:
    """A model's parts by their common names.

    ``head`` turns states [..., C] into logits [..., V], ``embedding`` tokens [...] into the
    decoder's inputs [..., C]; ``image_tokens`` are the ids that stand for picture content. If the
    head is ``foreign`` to the model's own forward, its logits are used unchanged. Unless the
    vocabulary is ``shared``, ids of drawn tokens stand for other tokens than in the prompt.
    """

    model: PreTrainedModel
    body: nn.Module  # the model without its head
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
        """Parts of a vision-language model or a text model.

        Raises ``ValueError`` for encoder-decoders.
        """
        config = model.config
        if config.is_encoder_decoder:
            raise ValueError(
                f"model type {config.model_type!r} cannot be accelerated here: it is an "
                "encoder-decoder; let transformers' own generate answer"
            )
        text = config.get_text_config(decoder=True)
        body: Any = model.base_model
        decoder: Any = body if text is config else model.get_decoder()
        if decoder.get_output_embeddings() is not None:
            parts = (x for x in decoder.children() if isinstance(x, PreTrainedModel))
            decoder = next(parts, decoder)  # of a language model with its head
        if text is config:
            body = decoder
        return cls(
            model=model,
            body=body,
            decoder=decoder,
            head=head_of(model),
            embedding=model.get_input_embeddings(),
            config=text,
            vocabulary=int(text.vocab_size),
            image_tokens=_placeholders(config),
        )

    @property
    def head_dim(self) -> int:
        """D, the width of an attention head."""
        config = self.config
        width = getattr(config, "head_dim", None)
        return int(width or config.hidden_size // config.num_attention_heads)

    @property
    def inner(self) -> int:
        """The width of a feed-forward layer."""
        widths = (getattr(self.config, name, None) for name in INNER)
        width = next(filter(None, widths), 4 * self.config.hidden_size)
        return max(width) if isinstance(width, list) else int(width)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers in order; raises ``ValueError`` if they have no known name."""
        name = next((name for name in LAYERS if hasattr(self.decoder, name)), None)
        if name is None:
            raise ValueError(
                f"target must be of a type that calls its layers {' or '.join(LAYERS)}, got one "
                f"of {type(self.decoder).__name__}; use a method that reads none of them, such as "
                "prompt-lookup or text-draft"
            )
        return getattr(self.decoder, name)

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of attention layers: full, sliding (a window) or chunked, or several."""
        if self.chains_only:
            return set(filter(None, self._attention_of.values()))
        window = getattr(self.config, "sliding_window", None)
        types = getattr(self.config, "layer_types", None)
        return set(types or [SLIDING if window else FULL])

    @cached_property
    def _attention_of(self) -> dict[str, str]:
        """For models with states: the kind of attention of each kind of layer, "" for none."""
        types = getattr(self.config, "layer_types", None) or [FULL] * len(self.cache_kinds)
        kinds = zip(types, self.cache_kinds, self.layer_sizes, strict=True)
        return {
            name: (SLIDING if kind.is_sliding else FULL) if size else ""
            for name, kind, size in kinds
        }

    @cached_property
    def window(self) -> int:
        """Positions that a sliding layer attends to, its own included; 0 without sliding layers."""
        return int(self.config.sliding_window or 0) if SLIDING in self.kinds else 0

    @cached_property
    def chunk(self) -> int:
        """Positions of a chunk, within which a chunked layer attends; 0 without such layers."""
        return int(self.config.attention_chunk_size) if CHUNKED in self.kinds else 0

    @property
    def partial(self) -> bool:
        """Whether some layers attend to only a part of the earlier positions."""
        return bool(self.window or self.chunk)

    @cached_property
    def layer_sizes(self) -> tuple[LayerSize | None, ...]:
        """Size of each layer's cache entry for a token; None for layers without keys and values."""
        return fact(self.model, LAYER_SIZES, self._stored_sizes)  # or its own forward was asked

    def _stored_sizes(self) -> tuple[LayerSize | None, ...]:
        cache = empty_cache(self.model)
        ids = plain_tokens(self.model.config, 1)[None].to(self.model.device)
        with torch.inference_mode():
            self.body(input_ids=ids, use_cache=True, **{self.cache_name: cache})
        return stored_sizes(cache)

    @cached_property
    def cache_kinds(self) -> list[Any]:
        """The layers of the cache that the model's own forward would make."""
        # making a cache takes milliseconds
        return fact(self.model, CACHE_KINDS, lambda: list(empty_cache(self.model).layers))

    @cached_property
    def chains_only(self) -> bool:
        """Whether drafts must be chains: some layers' states can follow only one path."""
        return any(map(has_states, self.cache_kinds))

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """The possible ways to run this model, in the order in which they are tried."""
        # padding at the right would move states; some decoders take more of a token than a state
        return tuple(
            way
            for way in WAYS
            if (way.left or not self.chains_only) and (way.whole or PER_LAYER not in self.takes)
        )

    @cached_property
    def reads_pictures_apart(self) -> bool:
        """Whether some layers attend to pictures alone, not to the text before."""
        kinds = zip(self.layer_sizes, self.cache_kinds, strict=False)
        return any(
            size is None and isinstance(kind, CacheLayerMixin) and not has_states(kind)
            for size, kind in kinds
        )

    @cached_property
    def takes(self) -> set[str]:
        """The names of the decoder's arguments."""
        return set(inspect.signature(_compiled_from(self.decoder).forward).parameters)

    @cached_property
    def cache_name(self) -> str:
        """The decoder's argument that is a cache."""
        return cache_name(self.decoder)

    @property
    def room(self) -> int:
        """See ``room_of``."""
        return room_of(self.config)

    @cached_property
    def _scaled(self) -> list[dict[str, Any]]:
        return _scaled(self.config)

    @property
    def stretched_after(self) -> int | None:
        """Positions after which "dynamic" rotary embeddings depend on the longest text of a
        forward, so that a draft's would differ from a single token's; None for other embeddings.
        """
        length = int(getattr(self.config, "max_position_embeddings", None) or 0)
        each = [_original(rope, length) for rope in self._scaled if rope["rope_type"] == "dynamic"]
        return min(each, default=None)

    @property
    def rows(self) -> int:
        """The number of tokens with an embedding; 0 if it cannot be determined."""
        table = self.embedding
        return table.num_embeddings if isinstance(table, nn.Embedding) else 0

    @cached_property
    def turning_point(self) -> int | None:
        """Positions up to which "longrope" uses its short factors; None for other embeddings.

        In a longer text all positions use the long factors.
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

    def plain_embedding(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., C] of ``tokens`` [...] as block drafters and MTP layers read them:
        without a norm that some models apply afterwards, and without gradients.
        """
        if not hasattr(self.embedding, "embed_norm"):
            return self.embedding(tokens).detach()
        weight: Any = self.model.get_input_embeddings().weight
        return nn.functional.embedding(tokens, weight.detach())

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V] of the decoder's ``states`` [..., C]."""
        return _without(self.all_logits(states), self._hidden)

    def all_logits(self, states: Tensor) -> Tensor:
        """Logits [..., V] of the decoder's ``states`` [..., C], hidden tokens included."""
        weight = getattr(self.head, "weight", None)
        if isinstance(weight, Tensor):  # PyTorch's quantised layers have a function of this name
            states = states.to(weight.dtype)
        return self.after_head(self.head(states))

    def logits_of(self, ids: Tensor | None) -> Callable[[Tensor], Tensor]:
        """A head for the tokens ``ids`` [v] (None: all): states [..., C] to logits [..., v].

        It uses the current weights; call this again for each run.
        """
        if ids is None:
            return self.logits
        few = few_rows(FewRows, self.head, ids)
        hidden = None if self._hidden is None else self._hidden[ids]

        def logits(states: Tensor) -> Tensor:
            return _without(self.after_head(few.scored(states)), hidden)

        return logits

    @cached_property
    def after_head(self) -> AfterHead:
        """How the model's class changes logits after the head, measured on its own forward."""
        return AfterHead() if self.foreign else after_head(self.model)

    @cached_property
    def _hidden(self) -> Tensor | None:
        """The tokens [V] bool that the model's class hides; None where it hides none."""
        if not self.after_head.hidden:
            return None
        hidden = torch.zeros(self.vocabulary, dtype=torch.bool)
        hidden[list(self.after_head.hidden)] = True
        return hidden.to(self.model.device)

    @property
    def takes_trees(self) -> bool:
        """Whether attention takes a tree's mask: it is set to ``specmm_tree`` and has no window."""
        return self.config._attn_implementation == TREES and not self.partial

    def masks(self, bias: Tensor | None, queries: Tensor, keys: Tensor) -> Any:
        """The attention mask argument of the decoder: one mask, or one by kind of layer.

        ``bias`` [B, 1, N, S] is the mask of full attention; ``queries`` [1 or B, N] and ``keys``
        [B, S] are the indices of nodes and slots in their texts.
        """
        if not any(self.layer_sizes):  # states alone
            return None
        if bias is None or not self.partial:
            return bias
        queries = queries[:, None, :, None]
        keys = keys[:, None, None]
        masks = {FULL: bias}
        if self.window:
            far = queries - keys >= self.window
            masks[SLIDING] = bias.masked_fill(far, float("-inf"))
        if self.chunk:
            far = queries // self.chunk != keys // self.chunk
            masks[CHUNKED] = bias.masked_fill(far, float("-inf"))
        if self.chains_only:
            none = dict.fromkeys(("linear_attention", "conv"))  # as decoders name what states take
            return none | masks | {name: masks.get(k) for name, k in self._attention_of.items()}
        return masks[next(iter(self.kinds))] if len(self.kinds) == 1 else masks

    def positions(self, prompt: VLMPrompt) -> tuple[dict[str, Tensor], Tensor]:
        """The prefill's position arguments, and the offsets [B] of later tokens' positions.

        M-RoPE gives a picture fewer positions than it has tokens.
        """
        none = torch.zeros_like(prompt.lengths)
        if not self.mrope:
            return {}, none
        if prompt.inputs.get(POSITIONS) is not None:
            stated = prompt.inputs[POSITIONS]
            return {POSITIONS: stated}, _after(stated, prompt.lengths) - prompt.lengths
        types = prompt.inputs.get("mm_token_type_ids")
        if types is None:  # 1 stands for a picture's token, 2 for a video's
            kinds = enumerate(self.image_tokens, start=1)
            types = sum((prompt.input_ids == token).int() * i for i, token in kinds)
        grids = {name: prompt.inputs[name] for name in GRIDS if prompt.inputs.get(name) is not None}
        if not grids:
            return {}, none
        positions, _ = self.body.get_rope_index(  # type: ignore[operator]
            prompt.input_ids, mm_token_type_ids=types, attention_mask=prompt.mask, **grids
        )
        return {POSITIONS: positions}, _after(positions, prompt.lengths) - prompt.lengths

    def own_inputs(
        self, inputs: dict[str, Any], past: TransformersCache
    ) -> tuple[dict[str, Any], Tensor]:
        """The arguments that the model's generate would pass to its forward for ``inputs``, and the
        position of the token after each row [B] or, if positions have several parts, [parts, B].
        """
        model: Any = self.model
        ids = inputs["input_ids"]
        others = {name: value for name, value in inputs.items() if name != "input_ids"}
        takes = POSITIONS in inspect.signature(model.forward).parameters
        if takes and others.get(POSITIONS) is None:
            others[POSITIONS] = model._prepare_position_ids_for_generation(ids, dict(others))
        prepared = model.prepare_inputs_for_generation(
            ids, is_first_iteration=True, use_cache=True, **{self.cache_name: past}, **others
        )
        prepared = {name: value for name, value in prepared.items() if name not in DROPPED}
        if prepared.get(POSITIONS) is None:
            return prepared, torch.full_like(ids[:, 0], ids.shape[1])
        following = prepared[POSITIONS][..., -1] + 1
        return prepared, following.expand(*following.shape[:-1], len(ids))

    def run(self, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The decoder's last states [R, L, C] in a forward of the body, and the body's output."""
        if self.body is not self.model:
            output = self.body(use_cache=True, **inputs)
            return output.last_hidden_state, output
        states = []  # the model names no body: its head is run, too

        def see(_: nn.Module, __: object, output: Any) -> None:
            states.append(output.last_hidden_state)

        handle = self.decoder.register_forward_hook(see)
        try:
            output = self.body(use_cache=True, logits_to_keep=1, **inputs)
        finally:
            handle.remove()
        return states[-1], output

    def each_token(self, inputs: dict[str, Any], output: Any) -> dict[str, Any]:
        """The arguments [B, 1, ...], mask and position aside, that the model's generate would pass
        to its forward for the first token after ``inputs``, whose prefill returned ``output``.
        """
        model: Any = self.model
        others = {name: value for name, value in inputs.items() if name != "input_ids"}
        ids = torch.cat([inputs["input_ids"], inputs["input_ids"][:, -1:]], dim=1)
        others = model._update_model_kwargs_for_generation(output, others, is_encoder_decoder=False)
        following = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1, use_cache=True, **others
        )
        left_out = {*DROPPED, "input_ids", "attention_mask", POSITIONS}
        return {k: v for k, v in following.items() if k not in left_out and isinstance(v, Tensor)}

    def spread(self, positions: Tensor) -> Tensor:
        """Positions [B, N] or [parts, B, N] as the decoder takes them: under M-RoPE in parts, which
        are three equal ones for text.
        """
        return positions.expand(3, -1, -1) if self.mrope and positions.ndim == 2 else positions


def _after(positions: Tensor, lengths: Tensor) -> Tensor:
    """The next position [parts, B] of generate after ``positions`` [parts, B, L]: the last + 1."""
    last = (lengths - 1).expand(len(positions), -1)[..., None]
    return positions.gather(2, last)[..., 0] + 1


def head_of(model: PreTrainedModel) -> Any:
    """The module that turns states into logits: the ``model``'s, or its language model's, head."""
    head = model.get_output_embeddings()
    decoder: Any = model.get_decoder()
    return decoder.get_output_embeddings() if head is None and decoder is not model else head


def cache_name(module: nn.Module | type[nn.Module]) -> str:
    """The argument of ``module`` that is a cache."""
    takes = inspect.signature(_compiled_from(module).forward).parameters
    return next((name for name in CACHES if name in takes), CACHES[1])


def _compiled_from(module: Any) -> Any:
    """The module inside torch.compile's wrapper, or ``module`` itself."""
    return getattr(module, "_orig_mod", module)


def has_states(layer: Any) -> bool:
    """Whether a ``layer`` of transformers' cache holds states."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def after_head(model: PreTrainedModel) -> AfterHead:
    """How ``model`` changes its head's logits, measured by one forward of a token and cached.

    Raises ``ValueError`` for other changes than a factor, a cap and hidden tokens.
    """

    def find() -> AfterHead:
        own_logits(model, plain_tokens(model.config, 1)[None])
        answer: AfterHead = facts(model)[AFTER_HEAD]
        return answer

    return fact(model, AFTER_HEAD, find)


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty transformers cache with the kind of entry that each layer of ``model`` needs."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def own_logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The model's own logits [B, T, V] of ``input_ids`` [B, T].

    ``after_head`` and ``layer_sizes`` are read from the same forward. Raises ``ValueError`` if the
    model changes logits otherwise than by a factor, a cap and hidden tokens.
    """
    cache = empty_cache(model)
    known = torch.tensor(KNOWN, dtype=torch.float64, device=model.device)
    me = threading.get_ident()
    runs = []

    def add_known(_: nn.Module, __: object, logits: Tensor) -> Tensor | None:
        if threading.get_ident() != me:  # another thread's forward of the same model
            return None
        runs.append(logits)
        ours = known[None, :, None].expand(len(logits), -1, logits.shape[-1])
        return torch.cat([logits.to(known.dtype), ours], dim=1)

    handle = head_of(model).register_forward_hook(add_known)
    try:
        with torch.inference_mode():
            inputs = {"input_ids": input_ids.to(model.device), cache_name(model): cache}
            logits: Tensor = model(**inputs, use_cache=True).logits
    finally:
        handle.remove()
    if len(runs) != 1:
        raise ValueError(f"its head must run once a forward, got {len(runs)} runs")
    model_facts = facts(model)
    model_facts[AFTER_HEAD] = _fitted(known, logits[0, -len(KNOWN) :])
    model_facts[LAYER_SIZES] = stored_sizes(cache)
    return logits[:, : -len(KNOWN)]


def stored_sizes(cache: DynamicCache) -> tuple[LayerSize | None, ...]:
    """Size of each layer's entries in the ``cache``; None for layers without keys."""

    def size(layer: Any) -> LayerSize | None:
        keys = getattr(layer, "keys", None)
        if keys is None or not keys.numel():
            return None
        return LayerSize(keys.shape[1], keys.shape[-1], layer.values.shape[-1])

    return tuple(size(layer) for layer in cache.layers)


def room_of(config: Any) -> int:
    """Most positions of a text, including those that scaled rotary embeddings add."""
    length = int(getattr(config, "max_position_embeddings", None) or 0)
    longest = (int(_original(rope, length) * rope["factor"]) for rope in _scaled(config))
    return max(length, *longest, 0) or sys.maxsize


def _scaled(config: Any) -> list[dict[str, Any]]:
    """Parameters of rotary embeddings that have a factor; they may differ by kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = (rope, *(kind for kind in rope.values() if isinstance(kind, dict)))
    return [kind for kind in ropes if kind.get("factor") and kind.get("rope_type") in SCALED]


def _original(rope: dict[str, Any], length: int) -> int:
    """Positions that rotary embeddings ``rope`` had before they were scaled."""
    return int(rope.get("original_max_position_embeddings") or length)


def plain_tokens(config: PreTrainedConfig, count: int) -> Tensor:
    """``count`` ids of the vocabulary that are neither special nor placeholders of pictures."""
    text = config.get_text_config()
    special = _special(config) | _special(text)
    size = int(text.vocab_size)
    order = (*range(size // 2, size), *range(size // 2))
    plain = list(islice((i for i in order if i not in special), count))
    return torch.tensor((plain * count)[:count])


class FewRows(nn.Module):
    """A copy of the rows of ``head`` for the tokens ``ids`` [v]."""

    @torch.inference_mode(False)
    def __init__(self, head: nn.Linear, ids: Tensor) -> None:
        super().__init__()
        bias = head.bias is not None
        few = nn.Linear(head.in_features, len(ids), bias, device="meta", dtype=head.weight.dtype)
        self.few = prepack(few.to_empty(device=head.weight.device).requires_grad_(False))
        self.ids = ids
        self._read: Derived[None] = Derived()

    def read(self, head: nn.Linear) -> None:
        """Copy the rows again, in place, if the weights of ``head`` have changed."""
        self._read.of(list(head.parameters()), partial(self._copy, head))

    @torch.no_grad()
    def _copy(self, head: nn.Linear) -> None:
        self.few.weight.copy_(head.weight[self.ids])
        if head.bias is not None:
            self.few.bias.copy_(head.bias[self.ids])

    def scored(self, states: Tensor) -> Tensor:
        """Logits [..., v] of ``states`` [..., C]."""
        logits: Tensor = self.few(states.to(self.few.weight.dtype))
        return logits


def few_rows(kind: type[Rows], head: nn.Linear, ids: Tensor) -> Rows:
    """Shared, up-to-date rows of ``head`` for the tokens ``ids`` [v], of class ``kind``."""
    rows = fact(head, (kind, tuple(ids.tolist())), partial(kind, head, ids))
    rows.read(head)
    return rows


def _without(logits: Tensor, hidden: Tensor | None) -> Tensor:
    """``logits`` [..., V] with the dtype's lowest number for the tokens ``hidden`` [V]."""
    return logits if hidden is None else logits.masked_fill(hidden, torch.finfo(logits.dtype).min)


def _placeholders(config: PreTrainedConfig) -> tuple[int, ...]:
    """The tokens that stand for the content of pictures, videos and sounds, in that order."""
    names = [f"{kind}_token_{end}" for kind in PLACEHOLDERS for end in ("id", "index")]
    ids = (getattr(config, name, None) for name in names)
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _special(config: PreTrainedConfig) -> set[int]:
    names = [n for n in vars(config) if n.endswith(("_token_id", "_token_index"))]
    values = [getattr(config, name) for name in names]
    return {i for v in values for i in (v if isinstance(v, list) else [v]) if isinstance(i, int)}


def _fitted(known: Tensor, computed: Tensor) -> AfterHead:
    """How the model's class changes logits: scale, cap and hidden tokens. A head that returned the
    numbers ``known`` [P] (``KNOWN``) led to the logits ``computed`` [P, V].

    Raises ``ValueError`` if these three do not explain ``computed``.
    """
    shut = (computed == torch.finfo(computed.dtype).min).all(0)
    open_ones = computed[:, ~shut]
    hidden = tuple(shut.nonzero()[:, 0].tolist()) if open_ones.numel() else ()
    computed = open_ones if hidden else computed
    values = computed[:, 0].double()
    small = float(values[0])
    large = float(values[1])
    rounding = ROUNDINGS * torch.finfo(computed.dtype).eps
    # a logit of LARGE grows in proportion to one of SMALL unless a tanh caps it
    cap = large if abs(large) < abs(small) / SMALL * LARGE / 2 else None
    scale = (small if cap is None else cap * float(torch.atanh(values[0] / cap))) / SMALL
    fitted = AfterHead(1.0 if abs(scale - 1) <= rounding else scale, cap, hidden)
    expected = fitted(known).to(computed.dtype)[:, None].expand_as(computed)
    if not torch.allclose(computed, expected, rtol=rounding, atol=rounding):
        raise ValueError(
            "its logits change after the head in other ways than by a factor, a cap and hidden "
            "tokens"
        )
    return fitted
