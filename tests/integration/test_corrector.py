"""Correctors of Jacobi drafts: what they correct, what they learn from and that they learn it,
their files and their recipe. That decoding stays exact is in tests/unit/verify/test_jacobi.py and
tests/unit/test_decode.py.

Shape letters: B batch, W window, N nodes, V vocabulary.
"""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import specmm
from specmm import methods
from specmm.cli import app
from specmm.decode import decode
from specmm.drafter import Feedback
from specmm.guidance import Guidance
from specmm.image_ar.tokens.assemble import assemble
from specmm.image_ar.tokens.drafters.corrector import Corrector, CorrectorConfig
from specmm.image_ar.tokens.drafters.jacobi import CORRECTED, JacobiDrafter
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.recipes.training.corrector import (
    ReplacedTokens,
    corrector_loss,
    gathered,
    replaced,
    train_corrector,
)
from specmm.stats import Clock
from specmm.target import TargetOutput
from specmm.verify import Recursive, VerifyResult
from tests.integration.conftest import random_corrector
from tests.integration.picture_kinds import KINDS

CONFIG = GPTConfig(32, 2, 2, 24, 36, num_classes=3, multiple_of=8)
WINDOW = 4


def made_target(scale=1.0, heat=1.0):
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    model.output.weight.data.normal_(std=0.5)
    for layer in model.layers:
        layer.attention.wo.weight.data.mul_(8)
    return LlamaGenTarget(model, Guidance(scale), Processor(heat))


def classes(some):
    return Prompt(torch.tensor(some) % 3)


@pytest.mark.parametrize("coupled", [False, True])
def test_the_first_place_has_the_corrected_distribution(coupled):
    """Under guidance; but where all was kept, and in a row that has just started."""
    target = made_target(2.0)
    corrector = random_corrector(CONFIG)
    drafter = JacobiDrafter(target, WINDOW, "last", coupled, corrector)
    prompt, uniforms = classes(range(3)), Uniforms.from_seeds([0, 1, 2])
    with torch.inference_mode():
        feedback = Feedback(target.prefill(prompt, WINDOW + 1), torch.tensor([3, 5, 7]))
        drafter.begin(feedback, Clock())
        tree = drafter.propose(feedback, uniforms)
        output = target.score(tree)
        kept = torch.tensor([2, 5, 2])
        path = torch.where(torch.arange(5) < kept[:, None], torch.arange(5), -1)
        result = VerifyResult(path, kept, torch.tensor([9, 2, 4]))
        tokens = torch.zeros(3, 5, dtype=torch.int64)
        fresh = torch.tensor([False, False, True])
        feedback = Feedback(output, result.next_token, tree, result, tokens, fresh)
        found = drafter.propose(feedback, uniforms).probs[:, 1]
        rows = torch.tensor([0, 3])  # of row 0: with and without its class
        new, old = (target.embed(x.expand(2, 1)) for x in (result.next_token[0], tree.tokens[0, 2]))
        states = corrector(output.hidden[rows, 2][:, None], new, old)
        first, second = target.head(states)[:, 0]
        wanted = torch.softmax(second + 2.0 * (first - second), -1)
    if coupled:
        wanted = CORRECTED * wanted + (1 - CORRECTED) * tree.probs[0, 3]
    torch.testing.assert_close(found[0], wanted)
    assert (found[0] - output.probs[0, 2]).abs().max() > 0.01
    torch.testing.assert_close(found[1], output.probs[1, -1])
    torch.testing.assert_close(found[2], output.probs[2, 2])


def test_a_corrector_begins_as_one_that_changes_nothing():
    states = torch.randn(2, 1, 32)
    made = Corrector(CorrectorConfig(CONFIG, 8))
    assert torch.equal(made(states, states * 2, states * 3), states)
    assert made.read.out_features == 8
    assert Corrector(CorrectorConfig(CONFIG)).read.out_features == CONFIG.ffn_dim


def test_rows_that_have_ended_teach_nothing():
    """What is noted of pictures together is what is noted of each, and of all but the slowest what
    their last round says, after which one that is drawn alone is not asked again.
    """
    target = made_target()
    together = replaced(target, classes, 6, 0)
    alone = gathered([noted_of(target, number) for number in range(6)])
    assert len(alone.new) < len(together.new) <= len(alone.new) + 5
    wanted, found = (places.true.float().sum(1) for places in (alone, together))
    assert float((wanted[:, None] - found).abs().min(1).values.max()) < 1e-3


def noted_of(target, number):
    """Of one of the pictures of seed 0."""
    usual = methods.SJD()
    drafter = JacobiDrafter(target, min(usual.window, 35), usual.init, usual.coupled)
    noting = ReplacedTokens(drafter, target.sizes.dim)
    uniforms = Uniforms.from_seeds([number])
    for _ in decode(target, noting, Recursive(), classes([number]), target.length, uniforms):
        pass
    return gathered(noting.noted)


def test_what_is_noted_is_what_the_target_says_before_and_after(monkeypatch):
    """Of every rejected draft: the states of plain forwards over either prefix, which differ by the
    last token alone.
    """
    target = made_target()
    rounds = []
    original = JacobiDrafter.propose

    def propose(self, feedback, uniforms):
        if feedback.result is not None:
            rounds.append(feedback)
        return original(self, feedback, uniforms)

    monkeypatch.setattr(JacobiDrafter, "propose", propose)
    noted = replaced(target, classes, 1, 0)
    drawn, found = [int(rounds[0].tree.tokens[0, 0])], []
    for feedback in rounds[:-1]:
        kept = int(feedback.result.kept)
        taken = feedback.tokens[0, :kept].tolist()
        if kept <= 15:
            old = int(feedback.tree.tokens[0, kept])
            found.append((drawn + taken[:-1], taken[-1], old))
        drawn += taken
    assert len(found) == len(noted.new) > 3
    for i, (before, new, old) in enumerate(found):
        assert (int(noted.new[i]), int(noted.old[i])) == (new, old)
        for last, states in ((new, noted.true), (old, noted.stale)):
            tokens = torch.tensor([[*before, last]])
            with torch.no_grad():
                embedded = target.model.embed(torch.tensor([0]), tokens)
                _, hidden = target.model(embedded)
            torch.testing.assert_close(states[i].float(), hidden[0, -1], rtol=0.02, atol=0.02)


def test_it_learns_what_replaced_tokens_change(tmp_path):
    """Of pictures that it has not seen; and a run that was interrupted goes on."""
    target = made_target()
    places = replaced(target, classes, 160, 0)
    others = replaced(target, classes, 32, 1)
    given = dict(inner=64, batch=8, lr=3e-3, overlap_weight=10.0, seed=0)
    untrained = corrector_loss(target, Corrector(CorrectorConfig(CONFIG)), others, 1.0)[1]
    head = train_corrector(target, places, tmp_path, steps=150, **given)
    trained = corrector_loss(target, head, others, 1.0)[1]
    assert float(trained) > float(untrained) + 0.05
    again = train_corrector(target, places, tmp_path, steps=150, **given)
    assert torch.equal(again.read.weight, head.read.weight)
    assert not any(p.requires_grad for p in target.network.parameters())


def train(*words):
    return CliRunner().invoke(app, ["train", "corrector", *map(str, words)])


QUICK = ("--set", "steps=2", "--set", "batch=2", "--set", "drawn=3", "--set", "inner=8")


def test_the_recipe_of_classes(copy, tmp_path):
    shutil.rmtree(copy / "drafters/corrector")
    made = train(copy, *QUICK, "--out", tmp_path / "run")
    assert made.exit_code == 0, made.output
    pipe = specmm.ImagePipeline.from_pretrained(copy)
    head = pipe.parts.head("corrector")
    assert head.read.out_features == 8
    assert pipe.settings.taus.keys() == {"sjd", "corrector"}
    assert pipe.parts.taus == pipe.settings.taus and min(pipe.parts.taus.values()) >= 1
    again = train(copy, *QUICK)
    assert again.exit_code == 2 and "replace=true" in again.output
    told = train(copy, *QUICK, "--set", "replace=true", "--set", "prompts=/none")
    assert told.exit_code == 2 and "prompts" in told.output


def test_the_recipe_of_prompts(tmp_path):
    KINDS["janus"].save(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a tree\nblue hill\n")
    told = train(tmp_path / "model", *QUICK)
    assert told.exit_code == 2 and "a prompt a line" in told.output
    told = train(tmp_path / "model", *QUICK, "--set", "prompts=/none")
    assert told.exit_code == 2 and "prompts must be a file with a prompt a line" in told.output
    words = ("--set", f"prompts={tmp_path / 'prompts.txt'}", "--out", tmp_path / "run")
    made = train(tmp_path / "model", *QUICK, *words)
    assert made.exit_code == 0, made.output
    pipe = specmm.ImagePipeline.from_pretrained(tmp_path / "model")
    out = pipe("a tree", method=methods.SJD(window=4, corrected=True), output_type="latent")
    assert out.certificate.kind == "exact"
    assert pipe.settings.taus.keys() == {"sjd", "corrector"}


def test_files_of_another_target_and_broken_ones_are_refused(copy, make_tiny, tmp_path):
    folder = copy / "drafters/corrector"
    other = tmp_path / "other"
    make_tiny(seed=5).save_pretrained(other)
    with pytest.raises(ValueError, match="drafter must be of this target"):
        specmm.ImagePipeline.from_pretrained(other, drafter=folder)
    opened = specmm.ImagePipeline.from_pretrained(copy, drafter=folder)
    assert opened.parts.given == "corrector"
    config = folder / "config.json"
    facts = json.loads(config.read_text())
    config.write_text(json.dumps({k: v for k, v in facts.items() if k != "inner"}))
    with pytest.raises(ValueError, match=r"config\.json must say inner, got"):
        specmm.ImagePipeline.from_pretrained(copy)
    config.write_text(json.dumps(facts | {"inner": 3}))
    with pytest.raises(ValueError, match="read"):
        specmm.ImagePipeline.from_pretrained(copy)


def test_a_model_without_one_says_so(copy):
    shutil.rmtree(copy / "drafters/corrector")
    pipe = specmm.ImagePipeline.from_pretrained(copy)
    with pytest.raises(ValueError, match="no 'corrector' drafter"):
        pipe(classes=["heart"], method=methods.SJD(corrected=True))
    assert methods.SJD(corrected=True).static_shapes and methods.SJD(corrected=True).can_refill


@pytest.mark.parametrize("drafter", ["jacobi", "corrector"])
def test_borrowed_drafts_are_bounded(make_tiny, drafter):
    pipe = make_tiny()
    given = dict(drafter=drafter, rule="lantern++(k=10, lambda_=5.0)")
    out = pipe(
        classes=["heart"], method=methods.Draft(**given), generator=torch.Generator().manual_seed(0)
    )
    assert out.certificate.kind == "bounded" and out.certificate.tv > 0
    with pytest.raises(ValueError, match=r"needs a chain, as chain\(15\)"):
        pipe(classes=["heart"], method=methods.Draft(**given, tree=(2, 1)))


def test_relaxed_rules_are_given_no_copies_of_neighbours(make_tiny):
    """They would keep too many: of LANTERN++'s pictures of pocket/llamagen with such drafts the
    Fréchet distance is 1.17 of plain decoding's, with a block drafter's 1.03.
    """
    pipe = make_tiny()
    for rule, init in (("lantern++(k=10)", "last"), ("recursive", "above")):
        method = methods.Draft(drafter="jacobi", rule=rule)
        assert assemble(method, pipe.target(), pipe.parts)[1].init == init


def test_states_of_other_layers_are_left_out():
    """A target that reads auxiliary layers for a block drafter hands on wider states."""
    target, corrector = made_target(), random_corrector(CONFIG)
    output = TargetOutput(torch.full((1, 5, 24), 1 / 24), torch.randn(1, 5, 96))
    drafter = JacobiDrafter(target, WINDOW, "last", False, corrector)
    token = torch.tensor([1])
    first = Feedback(TargetOutput(output.probs[:, :1], output.hidden[:, :1]), token)
    drafter.begin(first, Clock())
    uniforms = Uniforms.from_seeds([0])
    tree = drafter.propose(first, uniforms)
    result = VerifyResult(torch.tensor([[0, -1, -1, -1, -1]]), torch.tensor([1]), token)
    feedback = Feedback(output, token, tree, result, torch.tensor([[1, 0, 0, 0, 0]]))
    with torch.inference_mode():
        found = drafter.propose(feedback, uniforms).probs[0, 1]
        new, old = (target.embed(x)[None] for x in (token, tree.tokens[0, 1:2]))
        wanted = target.head(corrector(output.hidden[:, 1:2, :32], new, old)).softmax(-1)[0, 0]
    torch.testing.assert_close(found, wanted)
