"""A small model as drafter: a language model that does not see the picture, or a vision-language
model that does.

Trees grow as for a feature head, but the model reads tokens only and predicts from its own states.

Shape letters: B batch, n nodes of a level, C the drafter's width, v its vocabulary, V the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from specmm import methods
from specmm.core.drafter import DeferredDrafter, DrafterVocabulary, Feedback
from specmm.core.growth import Growth
from specmm.core.processors import Processor
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.drafting import Assembly, translated
from specmm.hf.drafters.translation import Translation
from specmm.hf.drafters.trees import drawn_trees
from specmm.hf.loading.pretrained import load_model, own_tokenizer
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, on_device, padded
from specmm.loading.hardware import prepack
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings

Inputs = Callable[[VLMPrompt], dict[str, Any]]
ENCODED = "mm_encoder_outputs"  # pictures that generate encoded before it calls a custom_generate


@dataclass
class SmallModel:
    """A transformers ``model`` that drafts, and its ``processor`` (a text model's tokenizer)."""

    model: PreTrainedModel
    processor: Any = None

    @property
    def vocabulary(self) -> int:
        """Its tokens, padding included."""
        return int(self.model.config.get_text_config().vocab_size)

    @classmethod
    def of(cls, drafter: object) -> SmallModel:
        """``drafter`` itself, or around a bare model; ``ValueError`` for anything else."""
        if isinstance(drafter, cls):
            return drafter
        # a compiled or adapted model wraps one of transformers
        if not (isinstance(drafter, nn.Module) and hasattr(drafter, "config")):
            got = type(drafter).__name__
            raise ValueError(
                f"drafter must be a transformers model, got {got}; load one and give it"
            )
        return cls(cast(PreTrainedModel, drafter))


class ModelDrafter:
    """Drafts with the transformers ``model`` for ``target``.

    ``tree``, ``sampled`` and ``siblings``: see :class:`Growth`. ``inputs`` makes the drafter's
    prompt from the target's; ``translation`` maps the target's tokens to the drafter's (None: both
    have the same tokens). Raises ``ValueError`` when vocabularies differ and there is no
    translation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: VLMTarget,
        tree: TreeShape | Dynamic,
        inputs: Inputs,
        translation: Translation | None = None,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        self.target = target
        self.inputs = inputs
        sampled = sampled and not target.processor.greedy
        self.probs = target.processor if isinstance(target.processor, Processor) else Processor()
        self.small = VLMTarget(model, Processor(), "drafter")
        if self.small.family.chains_only:
            raise ValueError(
                "drafter must have attention layers only, because it drafts trees, got a "
                f"{model.config.model_type} model, whose layers have states; give a model such as "
                "a small Llama or Qwen 3"
            )
        vocabulary = target.family.vocabulary
        self.translation = translation or Translation.same(self.small.family.vocabulary, vocabulary)
        self.translation.ban(target.image_tokens)
        drafted = DrafterVocabulary(vocabulary)
        self.growth = Growth(tree, sampled, drafted, target.device, siblings)
        self.max_nodes = self.growth.max_nodes
        self.max_depth = self.growth.max_depth

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Run the drafter on the prompt and the first token after it."""
        self.clock = clock
        with clock("draft"):
            prompt = VLMPrompt(self.inputs(self.target.prompt), self.target.prompt.max_new_tokens)
            first = self.translation.to_drafter(feedback.token)
            output = self.small.prefill(prompt.extended(first), self.growth.scratch)
        self.state = output.hidden[:, -1]  # [B, C]
        self.growth.begin(self.small.cache)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        state = self.state
        if feedback.result is not None:
            state = self.growth.read_committed(self, feedback)
        return self.growth.grow(self, feedback.token, state, uniforms)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Logits [B, n, V] over the target's tokens of the drafter's ``states`` [B, n, C]."""
        with self.clock("draft"):
            return self.translation.from_drafter(self.small.head(states).float())

    def read(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor, depth: int
    ) -> Tensor:
        """The drafter's states [B, n, C] at ``tokens`` [B, n]; ``hidden`` is ignored."""
        with self.clock("draft"):
            return self.small.states(self.translation.to_drafter(tokens), positions, bias)


def load_language_model(folder: Path, target: PreTrainedModel, method: str) -> SmallModel:
    """The language model in ``folder``, in the dtype and on the device of the ``target`` model."""
    model = load_model(AutoModelForCausalLM, folder, dtype=target.dtype)
    return SmallModel(prepack(model.to(target.device).eval()), own_tokenizer(folder))


def make_text_draft(
    method: methods.TextDraft,
    target: VLMTarget,
    drafter: object,
    tokenizer: PreTrainedTokenizerBase,
) -> Assembly:
    """The parts of method ``text-draft``: a language model, which sees no picture.

    If its tokenizer is not the target's, it reads text, and its drafts are translated.
    """
    small = SmallModel.of(drafter)
    words = small.processor
    translation = translated(words, tokenizer, target, small.vocabulary)

    def read(prompt: VLMPrompt) -> dict[str, Any]:
        device = prompt.input_ids.device
        rows = [[t for t in row if t not in target.image_tokens] for row in prompt.rows()]
        if translation is None or not translation.foreign:
            return padded([row or [0] for row in rows], device)
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return padded([words.encode(text) or [0] for text in texts], device)

    return _assembled(method, target, small.model, read, translation)


def make_vlm_draft(
    method: methods.VLMDraft, target: VLMTarget, drafter: object, tokenizer: PreTrainedTokenizerBase
) -> Assembly:
    """The parts of method ``vlm-draft``: a small vision-language model.

    It reads pictures and question through its own processor, or the target's inputs.
    """
    small = SmallModel.of(drafter)
    proc = small.processor

    def read(prompt: VLMPrompt) -> dict[str, Any]:
        if proc is not None and prompt.source is not None:
            return on_device(prompt.source.inputs(proc), prompt.input_ids.device)
        if ENCODED in prompt.inputs:
            raise ValueError(
                "method 'vlm-draft' needs the pictures, got the target's features of them: "
                "generate encodes pictures before it calls a drafter; use VQAPipeline, or msd or "
                "text-draft here"
            )
        return prompt.inputs

    translation = translated(getattr(proc, "tokenizer", None), tokenizer, target, small.vocabulary)
    return _assembled(method, target, small.model, read, translation)


def _assembled(
    method: methods.TextDraft | methods.VLMDraft,
    target: VLMTarget,
    model: PreTrainedModel,
    inputs: Inputs,
    translation: Translation | None,
) -> Assembly:
    """The drafter reads the prompt only after the first round, as many answers are one word."""
    shape, drawn, rule = drawn_trees(method.rule, method.tree, target)
    drafter = ModelDrafter(model, target, shape, inputs, translation, *drawn)
    return Assembly(DeferredDrafter(drafter), rule)
