"""What tests of method ``mtp`` share: prompts, and a decoding whose drafts are kept."""

from specmm.core.decode import decode
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.drafters.mtp import MtpDrafter
from specmm.hf.drafters.mtp_layers import layers_of
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.verify import Recursive
from tests.integration.two_drafts import Watching

PROMPTS = [[9, 20, 31, 12, 25, 8, 17], [30], [11, 13, 22]]
LENGTH = 24


class Watched(Watching, MtpDrafter):
    """Keeps what it drafts."""


def greedy(model, drafter_class, tree, prompts, length=LENGTH):
    """The end of decoding ``prompts`` greedily with drafts of a ``tree``, and the drafter."""
    target = VLMTarget(model, Processor(0.0))
    drafter = drafter_class(layers_of(model), target, tree)
    uniforms = Uniforms.from_seeds(range(len(prompts)))
    *_, end = decode(
        target, drafter, Recursive(), VLMPrompt(padded(prompts), length), length, uniforms
    )
    return end, drafter
