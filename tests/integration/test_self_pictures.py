"""Method ``self`` for pictures: LlamaGen drafts without some of its layers, both branches together.

Shape letters: B batch, T tokens, V vocabulary.
"""

import pytest
import torch
from scipy.stats import chi2

from specmm import methods
from specmm.decode import decode, decode_plain
from specmm.guidance import Guidance
from specmm.image_ar.tokens.assemble import PictureParts, assemble
from specmm.image_ar.tokens.choosing import UNPLANNED, method_of, planned_for
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.processors import Processor
from specmm.randomness import Uniforms
from tests.sampling import Stream, WholeModelsProbs

CONFIG = GPTConfig(
    dim=32, n_layer=4, n_head=2, vocab_size=24, block_size=36, num_classes=3, multiple_of=8
)
SELF = {
    "exit": methods.SelfDraft(exit=2, length=3),
    "without the first": methods.SelfDraft(skip=(0, 2), length=3),
    "half": methods.SelfDraft(length=3),
}
GUIDED = Guidance(2.0)


def model(config=CONFIG, weak=0.5):
    torch.manual_seed(4)
    found = Transformer(config).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
        for layer in found.layers[1:]:
            layer.attention.wo.weight.mul_(weak)
            layer.feed_forward.w2.weight.mul_(weak)
    return found


def drawn(made, method, processor, rows=2, seeds=None, guidance=GUIDED, break_it=None, length=36):
    target = LlamaGenTarget(made, guidance, processor)
    prompt = Prompt(torch.arange(rows) % made.config.num_classes)
    uniforms = seeds if isinstance(seeds, Uniforms) else Uniforms.from_seeds(seeds or range(rows))
    if method is None:
        *_, end = decode_plain(target, prompt, length, uniforms)
    else:
        own, drafter, rule = assemble(method, target, PictureParts())
        drafter = drafter if break_it is None else break_it(drafter)
        *_, end = decode(own, drafter, rule, prompt, length, uniforms)
    return end


@pytest.mark.parametrize("guidance", [Guidance(), GUIDED, Guidance(2.0, 10)], ids=str)
@pytest.mark.parametrize("method", SELF.values(), ids=SELF)
def test_greedy_pictures_are_plain_decodings(method, guidance):
    made = model()
    plain = drawn(made, None, Processor(0), guidance=guidance)
    end = drawn(made, method, Processor(0), guidance=guidance)
    assert torch.equal(end.tokens[:, :36], plain.tokens)
    assert end.stats.tau > 1 or not method.exit


def test_captions_of_several_lengths():
    config = GPTConfig(
        dim=32, n_layer=3, n_head=2, vocab_size=24, block_size=16, model_type="t2i",
        cls_token_num=4, caption_dim=8, multiple_of=8,
    )  # fmt: skip
    made = model(config)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    prompt = Prompt(torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)), mask)
    found = []
    for method in (None, methods.SelfDraft(exit=1, length=3), methods.SelfDraft(length=3)):
        target = LlamaGenTarget(made, GUIDED, Processor(0))
        if method is None:
            steps = decode_plain(target, prompt, 16, Uniforms.from_seeds([0, 1]))
        else:
            own, drafter, rule = assemble(method, target, PictureParts())
            steps = decode(own, drafter, rule, prompt, 16, Uniforms.from_seeds([0, 1]))
        found.append([*steps][-1].tokens[:, :16])
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@pytest.mark.parametrize("method", [SELF["exit"], SELF["without the first"]], ids=["exit", "skip"])
def test_a_picture_does_not_depend_on_its_batch(method):
    made = model()
    together = drawn(made, method, Processor(1.0, top_k=8), 3)
    target = LlamaGenTarget(made, GUIDED, Processor(1.0, top_k=8))
    for i in range(3):
        own, drafter, rule = assemble(method, target, PictureParts())
        prompt = Prompt(torch.tensor([i]))
        *_, alone = decode(own, drafter, rule, prompt, 36, Uniforms.from_seeds([i]))
        assert torch.equal(alone.tokens[0, :36], together.tokens[i, :36])


FEW = GPTConfig(
    dim=16, n_layer=3, n_head=2, vocab_size=4, block_size=9, num_classes=1, multiple_of=8
)
MANY = 8000


def fits(made, method, break_it=None):
    """A chi-square test at one in a thousand of the first three tokens, beside as many that plain
    decoding drew.
    """
    counts = []
    for seed, who in ((1, None), (2, method)):
        twin = break_it if who else None
        end = drawn(made, who, Processor(1.3), MANY, Stream(MANY, seed), break_it=twin, length=3)
        ids = end.tokens[:, :3] @ torch.tensor([16, 4, 1])
        counts.append(torch.bincount(ids, minlength=64).double())
    whole = counts[0] + counts[1]
    kept = whole >= 10
    statistic = ((counts[0] - counts[1]) ** 2 / whole.clamp(min=1))[kept].sum()
    return bool(statistic < chi2.ppf(0.999, int(kept.sum()) - 1))


@pytest.mark.slow
@pytest.mark.parametrize("skip", [(1, 2), (1,), (0,)], ids=str)
def test_samples_are_distributed_as_plain_decodings(skip):
    assert fits(model(FEW, 1.0), methods.SelfDraft(skip=skip, length=2))


def test_the_whole_models_distributions_in_place_of_the_exits_are_caught():
    method = methods.SelfDraft(exit=1, length=2)
    assert not fits(model(FEW, 1.0), method, WholeModelsProbs)


def test_states_of_another_picture_are_caught():
    """A broken twin: verification goes on from the states of the other row's drafts."""

    def twin(drafter):
        resume = drafter.target.resume
        drafter.target.resume = lambda first, states: resume(first, states.roll(1, 0))
        return drafter

    made = model()
    plain = drawn(made, None, Processor(0))
    broken = drawn(made, SELF["exit"], Processor(0), break_it=twin)
    assert not torch.equal(broken.tokens[:, :36], plain.tokens)


def test_auto_measures_the_target_by_itself(monkeypatch):
    """A model without a drafter: each of the methods that need none is tried."""
    target = LlamaGenTarget(model(), GUIDED, Processor())
    parts = PictureParts()
    found = method_of(planned_for(target, parts, 1))
    [plan] = parts.plans.values()
    assert found in (methods.AR(), *UNPLANNED)
    assert found.name in plan.reason or "plain decoding" in plan.reason
    if found == methods.AR():
        assert "sjd" in plan.reason


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (methods.SelfDraft(exit=4), r"exit must be in \[1, 3\], for the model has 4 layers"),
        (methods.SelfDraft(skip=(0, 1, 2, 3)), "must leave at least one of the 4 layers"),
        (methods.Draft("self", (2, 1)), "drafter self needs a chain"),
    ],
    ids=["exit", "skip", "tree"],
)
def test_mistakes_get_a_sentence(method, message):
    with pytest.raises(ValueError, match=message):
        assemble(method, LlamaGenTarget(model(), GUIDED, Processor()), PictureParts())
