"""Method ``assistant``: Gemma 4's assistants, which attend to the target's own keys and values.

A small decoder without keys of its own reads [embedding of a token, state before that token] and
drafts the next token. Its own state then takes the place of the target's. Its position stays at the
last committed token throughout. It has no cache, so siblings cost only more rows in its products,
and restarting a row takes no work.

Each layer attends to the keys of the target's last layer of the same kind that has keys, which
hold the tokens committed before the root. After a rejection transformers' own loop also shows it
the slot of the rejected draft; here rejected drafts have been removed.

Shape letters: B rows, N nodes of a level, C the target's width, D the assistant's, H heads, S
slots, V vocabulary.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specmm import methods
from specmm.core.cache import Cache, CacheSize, LayerSize
from specmm.core.drafter import DrafterVocabulary, Feedback
from specmm.core.growth import Growth
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.drafting import Assembly, drafting_probs
from specmm.hf.drafters.trees import check_unguided, trees_of
from specmm.hf.loading.pretrained import load_config, load_model
from specmm.hf.models.families import FULL, SLIDING
from specmm.hf.models.target import VLMTarget
from specmm.loading.hardware import prepack
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings

ALL = slice(None)  # all states of a level; a number would cut them
SHARED = "shared_kv_states"  # the assistant's argument for the target's keys and values


class AssistantDrafter:
    """Drafts with the assistant ``model`` of transformers for ``target``.

    ``tree``, ``sampled`` and ``siblings``: see :class:`specmm.core.growth.Growth`; greedy decoding
    never samples. Raises ``ValueError`` when the assistant does not fit the target.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: VLMTarget,
        tree: TreeShape | Dynamic,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        self.sources = _sources(model, target)
        self.model: Any = model.eval()
        self.window = int(model.config.get_text_config().sliding_window or 0)
        self.target = target
        vocabulary = DrafterVocabulary(target.family.vocabulary)
        sampled = sampled and not target.processor.greedy
        self.growth = Growth(tree, sampled, vocabulary, target.device, siblings)
        self.max_nodes = self.growth.max_nodes
        self.max_depth = self.growth.max_depth
        self.probs = drafting_probs(target, vocabulary)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Nothing is read: the assistant has no cache of its own."""
        self.clock = clock
        size = CacheSize((), len(feedback.token), 1, 0, self.growth.scratch)
        self.growth.begin(Cache(size, self.target.dtype, self.target.device))

    def start_row(self, row: int) -> None:
        """Does nothing: the drafter stores nothing for a row."""

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """A chain or tree from the target's state before the latest token."""
        hidden = feedback.output.hidden[:, -1]
        if feedback.result is not None:
            last = feedback.result.kept.clamp(min=1) - 1
            hidden = feedback.kept_hidden()[torch.arange(len(last), device=last.device), last]
        with self.clock("draft"):
            self._look_at_target()
            state = self._states(feedback.token[:, None], hidden[:, None])[:, 0]
        return self.growth.grow(self, feedback.token, state, uniforms)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """The assistant's logits [B, N, V] of its ``states`` [B, N, D]."""
        with self.clock("draft"):
            clusters = self.model.masked_embedding
            if clusters is None:
                return self.model.lm_head(states).float()
            return clustered(clusters, states, self.model.lm_head.weight)

    def read(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor, depth: int
    ) -> Tensor:
        """States [B, N, D] after drafts ``tokens`` [B, N] and their parents' ``hidden`` [B, N, D].

        All have one position and attend to the committed tokens; ``positions`` and ``bias`` are
        ignored.
        """
        with self.clock("draft"):
            return self._states(tokens, self.model.post_projection(hidden))

    def _states(self, tokens: Tensor, before: Tensor) -> Tensor:
        """States [B, N, D] after ``tokens`` [B, N] and states ``before`` [B, N, C]."""
        inputs = torch.cat([self.target.embed(tokens), before], -1)
        count = tokens.shape[1]
        states: Tensor = self.model.model(
            inputs_embeds=self.model.pre_projection(inputs),
            attention_mask={k: mask.expand(-1, -1, count, -1) for k, mask in self.masks.items()},
            position_ids=self.position.expand(-1, count),
            shared_kv_states=dict(self.shared),
            use_cache=False,
            logits_to_keep=ALL,
        ).last_hidden_state
        return states

    def _look_at_target(self) -> None:
        """Refer to the target's keys and values of this round, their mask and position."""
        cache = self.target.cache
        capacity = cache.size.capacity
        self.shared = {}
        for kind, number in self.sources.items():
            memory = cache.layers[number]
            halves = (memory.keys, memory.values)
            self.shared[kind] = tuple(x[:, :capacity].transpose(1, 2) for x in halves)
        self.position = (cache.lengths + self.target.offsets)[:, None]
        bias = cache.prefix_bias()
        slots = torch.arange(capacity, device=bias.device)
        far = slots < cache.lengths[:, None] - 1 - self.window
        near = bias.masked_fill(far, float("-inf"))
        self.masks = {FULL: bias[:, None, None], SLIDING: near[:, None, None]}


def clustered(clusters: Any, states: Tensor, weight: Tensor) -> Tensor:
    """Logits [B, N, V] of the tokens in the likeliest ``clusters`` of each of ``states``.

    All others are -inf: transformers sets them below the least logit of the whole batch, of which
    no row may depend here. ``weight`` [V, D] is the head's.
    """
    count = clusters.centroid_intermediate_top_k
    likeliest = clusters.centroids(states).topk(count).indices  # [B, N, count]
    members = clusters.token_ordering.long().view(clusters.num_centroids, -1)
    tokens = members[likeliest].flatten(2)  # [B, N, n]
    scores = (weight[tokens] @ states[..., None])[..., 0].float()
    logits = scores.new_full((*states.shape[:2], len(weight)), float("-inf"))
    return logits.scatter_(-1, tokens, scores)


def _sources(model: PreTrainedModel, target: VLMTarget) -> dict[str, int]:
    """For each kind of the assistant's layers, the layer of the target's cache it attends to.

    Raises ``ValueError`` for an assistant of another target.
    """
    forward = getattr(model, "forward", None)
    if forward is None or SHARED not in inspect.signature(forward).parameters:
        raise ValueError(
            "drafter must be an assistant that reads the target's keys and values, as Gemma 4's, "
            f"got a {type(model).__name__}; use method text-draft for a language model"
        )
    text: Any = model.config.get_text_config()
    family = target.family
    pairs = (
        ("width", model.config.backbone_hidden_size, int(family.config.hidden_size)),
        ("vocabulary", text.vocab_size, family.vocabulary),
    )
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise ValueError(
                f"drafter must be for the target's {name} {theirs}, got {ours}; use the assistant "
                "made for it"
            )
    kinds = getattr(family.config, "layer_types", None) or ()
    caching = [(kind, size) for kind, size in zip(kinds, family.layer_sizes, strict=False) if size]
    last = {kind: number for number, (kind, _) in enumerate(caching)}
    for number, kind in enumerate(text.layer_types):
        layer = text.per_layer_config[number]
        attended = LayerSize(layer.num_key_value_heads, layer.head_dim, layer.head_dim)
        if kind not in last or caching[last[kind]][1] != attended:
            size = caching[last[kind]][1] if kind in last else None
            raise ValueError(
                f"drafter must attend to the cache entries of the target's {kind} layers, of size "
                f"{size}, got an assistant for {attended}; use the target's own"
            )
    return last


def load_assistant(folder: Path, target: PreTrainedModel, method: str) -> PreTrainedModel:
    """The assistant in ``folder``, in the dtype and on the device of the ``target`` model.

    Raises ``ValueError`` if the installed transformers cannot build it, as 5.23.
    """
    text: Any = load_config(folder).get_text_config()
    try:
        getattr(text, "kv_sharing_modes", None)
    except ValueError as error:
        raise ValueError(
            f"{folder} must hold an assistant that transformers can build, got {error} from "
            f"{transformers.__version__}; install transformers 5.24 or newer"
        ) from error
    model: Any = load_model(AutoModelForCausalLM, folder, dtype=target.dtype)
    assistant: PreTrainedModel = prepack(model.to(target.device).eval())
    return assistant


def make(
    method: methods.Assistant, target: VLMTarget, drafter: PreTrainedModel, tokenizer: object
) -> Assembly:
    """The parts of method ``assistant``; it reads no prompt, so it drafts from the first round."""
    check_unguided(method, target)
    tree, drawn, rule = trees_of(method, target)
    return Assembly(AssistantDrafter(drafter, target, tree, *drawn), rule)
