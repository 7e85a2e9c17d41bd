"""The likelihood of tokens by one chain through the target equals a plain causal forward's."""

import torch

from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt, log_likelihood


def test_equals_a_causal_forward_with_guidance() -> None:
    torch.manual_seed(0)
    model = Transformer(GPTConfig(32, 2, 2, 16, 9, num_classes=3, multiple_of=16)).eval()
    model.output.weight.data.normal_()
    labels, tokens = torch.tensor([0, 2]), torch.randint(16, (2, 9))
    target = LlamaGenTarget(model, Guidance(2.0), Processor(0.7, top_k=2), "tiny")
    with torch.no_grad():
        cond, _ = model(model.embed(labels, tokens[:, :-1]))
        uncond, _ = model(model.embed(torch.full_like(labels, 3), tokens[:, :-1]))
    logits = (uncond + 2.0 * (cond - uncond)) / 0.7
    wanted = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].mean(1)
    torch.testing.assert_close(
        log_likelihood(target, Prompt(labels), tokens), wanted, rtol=1e-4, atol=1e-4
    )
