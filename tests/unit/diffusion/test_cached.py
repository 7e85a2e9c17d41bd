"""A DEER drafter's cache: after rounds of a ragged batch it says what one says that reads
everything anew.
"""

import torch
import transformers as tf

from specmm.core.decode import decode
from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.diffusion_drafters.block_drafters import ChainDrafter
from specmm.diffusion_drafters.cached_sources import CausalSource
from specmm.diffusion_drafters.models.deer import DEERModel
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.verify import Recursive
from tests.tiny.parts import shaken

V, K, LENGTH = 12, 3, 14
ROWS = [[3, 4, 5, 6, 7, 3, 4, 5], [9], [8, 7, 6]]


def model(vocabulary, layers, seed):
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=layers)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    torch.manual_seed(seed)
    made = tf.Qwen2ForCausalLM(tf.Qwen2Config(vocab_size=vocabulary, **sizes))
    return shaken(made, std=0.4)


class Anew:
    """Keeps each row's tokens and compares every block with that of a fresh source."""

    def __init__(self, drafter, target):
        self.source, self.target = CausalSource(drafter, target), target
        self.fresh = CausalSource(drafter, VLMTarget(target.model, Processor(0)))
        self.longest, self.end, self.next_logits = self.source.longest, None, None
        self.furthest, self.apart = 0.0, 0
        self.vocabulary = self.source.vocabulary

    def begin(self, feedback, most):
        self.texts = [[*row, int(token)] for row, token in zip(ROWS, feedback.token, strict=True)]
        self.source.begin(feedback, most)

    def logits(self, feedback, block):
        if feedback.result is not None:
            for text, new, kept in zip(
                self.texts, feedback.tokens.tolist(), feedback.result.kept, strict=True
            ):
                text += new[: int(kept)]
            self.apart += int(feedback.result.kept.unique().numel() > 1)
        found = self.source.logits(feedback, block)
        for row, text in enumerate(self.texts):
            if feedback.result is None or feedback.result.kept[row]:
                self.furthest = max(
                    self.furthest,
                    float((found[row] - self.read(text, block)).nan_to_num(0).abs().max()),
                )
        return found

    def read(self, text, block):
        target = self.fresh.target
        output = target.prefill(VLMPrompt({"input_ids": torch.tensor([text[:-1]])}, 8), 0)
        feedback = Feedback(output, torch.tensor([text[-1]]))
        self.fresh.begin(feedback, block)
        return self.fresh.logits(feedback, block)[0]


def test_reading_a_text_once_is_reading_it_anew():
    network = model(V, 2, 0)
    target, drafter = VLMTarget(network, Processor(1.0)), DEERModel(model(V + 1, 2, 1), V, K)
    source = Anew(drafter, target)
    prompt = VLMPrompt(padded(ROWS, "cpu"), LENGTH)
    uniforms = Uniforms.from_seeds([0, 1, 2])
    *_, end = decode(target, ChainDrafter(source, target), Recursive(), prompt, LENGTH, uniforms)
    assert end.stats.rounds > 6 and source.apart > 1  # rows did accept different numbers
    assert source.furthest < 1e-4
