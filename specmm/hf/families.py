"""What differs between the transformers families: where the decoder is, its masks, its positions.

Shape letters: B batch, L prompt positions, C width, V vocabulary, v some of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from specmm.hardware import prepack
from specmm.hf.after_head import AfterHead, after_head
from specmm.hf.prompt import POSITIONS, VLMPrompt
from specmm.kernels.tree_attention.interface import NAME as TREES
from specmm.registry import unknown

GRIDS = (
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
)  # what M-RoPE counts pictures and videos by
LAYERS = ("layers", "h")  # what decoders call their layers
INNER = (
    "intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "n_inner",
)  # what configs call a feed-forward layer's width
SUPPORTED = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")


@dataclass(frozen=True)
class Family:
    """A model's parts by their common names; ``image_tokens`` are the ids that stand for picture
    content.
    """

    body: Any
    decoder: Any
    head: Any
    config: Any
    image_tokens: tuple[int, ...]
    model: Any

    @classmethod
    def of(cls, model: Any) -> Family:
        """Parts of a vision-language model or a text model of transformers; raises ``ValueError``
        for others.
        """
        body, head, config = model.base_model, model.get_output_embeddings(), model.config
        sees = hasattr(config, "vision_config")
        if sees and config.model_type not in SUPPORTED:
            raise unknown("vision-language model type", config.model_type, SUPPORTED)
        decoder = model.get_decoder() if sees else body
        ids = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
        return cls(
            body,
            decoder,
            head,
            config.get_text_config(),
            tuple(i for i in ids if i is not None),
            model,
        )

    @property
    def vocabulary(self) -> int:
        """V, the width of the logits."""
        return int(self.config.vocab_size)

    @property
    def head_dim(self) -> int:
        """D, the width of an attention head."""
        return int(
            getattr(self.config, "head_dim", None)
            or self.config.hidden_size // self.config.num_attention_heads
        )

    @property
    def inner(self) -> int:
        """The width of a feed-forward layer."""
        return int(
            next(
                filter(None, (getattr(self.config, n, None) for n in INNER)),
                4 * self.config.hidden_size,
            )
        )

    @property
    def layers(self) -> Any:
        """The decoder's layers in order; raises ``ValueError`` where they go by no known name."""
        found = next(
            (getattr(self.decoder, name) for name in LAYERS if hasattr(self.decoder, name)), None
        )
        if found is None:
            raise ValueError(
                f"target must name its decoder's layers {' or '.join(LAYERS)}, got a {type(self.decoder).__name__}; "
                "use a method that reads none of them, such as prompt-lookup or text-draft"
            )
        return found

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of attention layers: full_attention, sliding_attention or both."""
        window = getattr(self.config, "sliding_window", None)
        types = getattr(self.config, "layer_types", None)
        return set(types or ["sliding_attention" if window else "full_attention"])

    @cached_property
    def window(self) -> int:
        """Positions a sliding layer attends, itself included; 0 where no layer slides."""
        return int(self.config.sliding_window) if "sliding_attention" in self.kinds else 0

    @cached_property
    def turning_point(self) -> int | None:
        """Positions up to which "longrope" turns by its short factors; a longer text turns all of
        them by others.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            return None
        found = (
            rope.get("original_max_position_embeddings")
            or self.config.original_max_position_embeddings
        )
        return int(found)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V] of the decoder's ``states`` [..., C]: the head, and what some classes do
        after it.
        """
        return self.after_head(self.head(states))

    def logits_of(self, ids: Tensor | None) -> Callable[[Tensor], Tensor]:
        """A head for the tokens ``ids`` [v] alone (None: all), from states [..., C] to logits [...,
        v].
        """
        if ids is None:
            return self.logits
        few = nn.Linear(
            self.head.in_features, len(ids), bias=self.head.bias is not None, device="meta"
        )
        few.weight = nn.Parameter(self.head.weight.detach()[ids], requires_grad=False)
        if self.head.bias is not None:
            few.bias = nn.Parameter(self.head.bias.detach()[ids], requires_grad=False)
        prepack(few)
        return lambda states: self.after_head(few(states))

    @cached_property
    def after_head(self) -> AfterHead:
        """What the model's class does to logits after the head, measured on its own forward."""
        return after_head(self.model)

    @property
    def takes_trees(self) -> bool:
        """Whether attention layers take a tree's mask: loaded with ``specmm_tree``, and none of
        them slides.
        """
        return self.config._attn_implementation == TREES and not self.window

    def masks(self, full: Tensor | None, sliding: Tensor | None) -> Any:
        """The attention mask argument of the decoder: one mask, or one by kind of layer."""
        if self.kinds == {"full_attention"}:
            return full
        if self.kinds == {"sliding_attention"}:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    def positions(self, prompt: VLMPrompt) -> tuple[dict[str, Tensor], Tensor]:
        """What the prefill must be told of positions, and each row's offset [B] of positions after
        its prompt.

        M-RoPE gives a picture fewer positions than it has tokens, so positions lag after lengths.
        """
        none = torch.zeros_like(prompt.lengths)
        if not hasattr(self.body, "get_rope_index"):
            return {}, none
        if prompt.inputs.get(POSITIONS) is not None:
            return {POSITIONS: prompt.inputs[POSITIONS]}, prompt.next_positions() - prompt.lengths
        types = prompt.inputs.get("mm_token_type_ids")
        if types is None:  # 1 stands for a picture's token, 2 for a video's
            types = sum(
                (prompt.input_ids == token).int() * (i + 1)
                for i, token in enumerate(self.image_tokens)
            )
        grids = {name: prompt.inputs[name] for name in GRIDS if prompt.inputs.get(name) is not None}
        if not grids:
            return {}, none
        positions, offsets = self.body.get_rope_index(
            prompt.input_ids, mm_token_type_ids=types, attention_mask=prompt.mask, **grids
        )
        return {"position_ids": positions}, offsets[:, 0]

    def spread(self, positions: Tensor) -> Tensor:
        """Positions of text [B, N] in the form the decoder takes: three equal rows under M-RoPE."""
        return positions.expand(3, -1, -1) if hasattr(self.body, "get_rope_index") else positions
