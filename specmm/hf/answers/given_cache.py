"""A cache passed to transformers' ``generate``: its tokens are not read again, and a run's tokens
are written back, as generate does.

Shape letters: L prompt tokens, n tokens that a cache holds, T new tokens, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from specmm.core.decode import Progress
from specmm.core.processors import History
from specmm.core.target import TargetOutput
from specmm.hf.models.families import CACHES, WAYS
from specmm.hf.models.rows import Reading, RowsTarget, why_no_rows
from specmm.hf.models.target import ProbsProcessor, VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.kernels.tree_attention import MOST_NODES

KINDS = (DynamicLayer, StaticLayer)  # layers that keep all keys and values


class GivenCache:
    """The cache among a call's ``arguments``; see :func:`specmm.custom_generate`."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        cache = next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)
        new = cache is None or not getattr(cache, "_is_user_defined", False)  # generate's, empty
        self.cache: TransformersCache | None = None if new else cache
        layers: Any = getattr(self.cache, "layers", ())
        counts = [int(x.get_seq_length()) for x in layers if hasattr(x, "get_seq_length")]
        begun = any(getattr(x, "is_initialized", False) for x in layers)
        self.tokens = max(counts, default=1) if begun else 0  # n

    def target(self, model: PreTrainedModel) -> Callable[[ProbsProcessor], VLMTarget]:
        """The function that makes targets of ``model`` that begin where the cache ends."""
        if not self.tokens:
            return partial(VLMTarget, model)
        assert self.cache is not None
        layers: Any = self.cache.layers
        if odd := next((layer for layer in layers if type(layer) not in KINDS), None):
            raise ValueError(
                "a cache that holds tokens must keep all of them in each layer, as a DynamicCache "
                f"or StaticCache of full attention does, got a {type(odd).__name__}; leave it out "
                "and give the whole prompt"
            )
        pairs = [(layer.keys, layer.values) for layer in layers]
        arrays = [part[:, :, : self.tokens] for pair in pairs for part in pair]
        return partial(ResumedTarget, model, arrays)

    def keep(self, target: VLMTarget, end: Progress) -> None:
        """Append the tokens that a run of ``target`` read (all but the last one) to the cache, if
        it is one row of plain layers.
        """
        family = target.family
        plain = None not in family.layer_sizes and not family.chains_only
        if self.cache is None or len(end.counts) > 1 or not plain or target.way != WAYS[0]:
            return
        stop = target.prompt.width + int(end.counts[0]) - 1
        for number, memory in enumerate(target.cache.layers):
            keys, values = (x[:, self.tokens : stop] for x in (memory.keys, memory.values))
            self.cache.update(keys.transpose(1, 2).clone(), values.transpose(1, 2).clone(), number)


class ResumedTarget(VLMTarget):
    """A target whose prompt's first n tokens are ``known``: keys and values [1, H, n, D], layer by
    layer.

    Raises ``ValueError`` for models whose texts cannot be continued; at prefill for a prompt that
    is not longer than the cache, has several rows, padding, or pictures after the known tokens; and
    for drafters that read the states of the whole prompt.
    """

    def __init__(
        self, model: PreTrainedModel, known: list[Tensor], processor: ProbsProcessor
    ) -> None:
        super().__init__(model, processor)
        self.known = known
        states = "it has layers with states" if self.family.chains_only else ""
        if why := states or why_no_rows(self.family, self.way):
            raise ValueError(
                f"a cache for {self.name} must be empty, got one with tokens: {why}; leave it "
                "out and give the whole prompt"
            )

    @torch.inference_mode()
    def prefill(self, prompt: VLMPrompt, scratch: int) -> TargetOutput:
        """As :meth:`VLMTarget.prefill`, of the tokens after the known ones."""
        self.check(prompt, scratch)
        self._check_known(prompt)
        reading = Reading(
            RowsTarget(self.model, self.name), prompt, [self.processor], prompt.room, MOST_NODES
        )
        self.make_room(prompt, scratch)
        room = prompt.room - prompt.width
        self.history = History(prompt.input_ids, prompt.lengths, room)
        reading.resume(self._arrays(), None)
        while reading.left:
            reading.go_on(MOST_NODES)
        self.take_row(0, reading.alone)
        return reading.output_of(0)

    def _arrays(self) -> list[Tensor]:
        """The known keys and values, as the arrays [A, n, H, D] of our cache."""
        by_array: list[list[Tensor]] = [[] for _ in self.cache.arrays]
        slots = [slot for pair in self.cache.pairs for slot in pair]
        for (array, _), part in zip(slots, self.known, strict=True):
            by_array[array].append(part[0].transpose(0, 1).to(self.device, self.dtype))
        return [torch.stack(parts) for parts in by_array]

    def _check_known(self, prompt: VLMPrompt) -> None:
        """Raise ``ValueError`` for a prompt that cannot continue the cache."""
        count = self.known[0].shape[2]
        if len(prompt.lengths) > 1 or prompt.padded:
            problem = "padding" if len(prompt.lengths) == 1 else f"{len(prompt.lengths)} rows"
            raise ValueError(
                f"a cache that holds tokens must be of one prompt without padding, got {problem}; "
                "leave it out, or ask one at a time"
            )
        if count >= prompt.width:
            raise ValueError(
                f"the prompt must be longer than the {count} tokens that its cache holds, "
                f"got {prompt.width}; give the whole text, of which they are the beginning"
            )
        pictures = torch.isin(prompt.input_ids, torch.tensor(self.image_tokens, device=self.device))
        if bool(pictures[:, count:].any()):
            raise ValueError(
                f"pictures must be among the {count} tokens that the cache holds, got some after "
                "them; leave it out and give the whole prompt"
            )
        if self.family.mrope and bool(pictures.any()) and not prompt.vision:
            raise ValueError(
                "the positions of pictures that the cache holds must be known, got no pictures; "
                "give them, too"
            )
        if self.wants_context or self.aux is not None:
            raise ValueError(
                "a cache must be empty for a drafter that reads the model's states of the whole "
                f"prompt, got {count} tokens; leave it out, or use method='suffix'"
            )
