"""The EAGLE head and its drafter: files, cached states and recorded distributions against a naive
reading, training.

Shape letters: B batch, T tokens, C width, V vocabulary.
"""

import json
from dataclasses import replace

import pytest
import torch

from specmm.core.decode import decode
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.tree import TreeShape
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleDrafter, EagleHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.loading import load_eagle, save_drafter, target_fingerprint
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.recipes.drafter import eagle_loss, seen_by, train_eagle
from specmm.recipes.loop import Run
from specmm.shape.eagle2 import Dynamic
from specmm.verify import PointMass, Recursive
from tests.tiny.parts import random_weights

CONFIG = GPTConfig(
    dim=32, n_layer=2, n_head=2, vocab_size=20, block_size=16, num_classes=4, multiple_of=8
)
TREE = TreeShape.from_parents([-1, 0, 0, 1, 0, 1, 3, 2])


@pytest.fixture
def model():
    return random_weights(Transformer(CONFIG), 0)


@pytest.fixture
def head():
    return random_weights(EagleHead(EagleConfig(CONFIG, 24)), 1)


class Recorder:
    """A drafter that remembers what it was told and what it proposed."""

    def __init__(self, drafter):
        self.drafter, self.begin, self.seen = drafter, drafter.begin, []
        self.max_nodes, self.max_depth = drafter.max_nodes, drafter.max_depth

    def propose(self, feedback, uniforms):
        tree = self.drafter.propose(feedback, uniforms)
        self.seen.append((feedback, tree))
        return tree


def guided_probs(target, logits):
    cond, uncond = logits.chunk(2)
    return target.processor(uncond + target.guidance.scale * (cond - uncond))


def naive_probs(target, head, classes, committed, path):
    """Draft distribution [V] for one row after its ``committed`` tokens and the drafts of ``path``,
    without any cache.
    """
    model = target.model
    tokens = torch.tensor([committed + path]).expand(2, -1)
    classes = torch.tensor([classes, CONFIG.num_classes])
    # position i precedes token i
    hidden = model(model.embed(classes, tokens[:, : len(committed) - 1]))[1]
    for depth in range(len(path) + 1):
        embedded = head.embed_tokens(tokens[:, : len(committed) + depth])
        predicted = head(embedded, hidden)
        hidden = torch.cat([hidden, predicted[:, -1:]], dim=1)
    return guided_probs(target, model.output(predicted[:, -1:]))[0, 0]


@torch.inference_mode()
def test_every_distribution_of_a_ragged_run_is_the_naive_one(model, head):
    target = LlamaGenTarget(model, Guidance(1.7), Processor(1.0, top_k=9))
    recorder, classes = Recorder(EagleDrafter(head, target, TREE)), [1, 3, 0]
    prompt, uniforms = Prompt(torch.tensor(classes)), Uniforms.from_seeds([1, 2, 3])
    runs = list(decode(target, recorder, Recursive(), prompt, 16, uniforms))
    committed = [[int(recorder.seen[0][0].token[b])] for b in range(3)]
    lengths = []
    for feedback, tree in recorder.seen:
        for b, row in enumerate(committed):
            if feedback.result is not None:
                row += feedback.tokens[b, : feedback.result.kept[b]].tolist()
            if len(row) + TREE.depth > 16:
                continue
            for first_child in (1, 3, 6, 7):  # the eldest of each family has the whole distribution
                path, node = [], int(TREE.parents[0, first_child])
                while node > 0:
                    path, node = [int(tree.tokens[b, node]), *path], int(TREE.parents[0, node])
                expected = naive_probs(target, head, classes[b], row, path)
                torch.testing.assert_close(tree.probs[b, first_child], expected, atol=2e-5, rtol=0)
        lengths.append([len(row) for row in committed])
    assert any(len(set(row)) == 3 for row in lengths)  # the rows did get out of step
    assert runs[-1].stats.draft_seconds > 0


@torch.inference_mode()
def test_siblings_are_drawn_without_replacement_from_recorded_distributions(model, head):
    target = LlamaGenTarget(model, Guidance(1.7), Processor(1.0, top_k=9))
    recorder = Recorder(EagleDrafter(head, target, TREE))
    prompt, uniforms = Prompt(torch.tensor([1])), Uniforms.from_seeds([1])
    list(decode(target, recorder, Recursive(), prompt, 16, uniforms))
    for _, tree in recorder.seen:
        for earlier, younger in ((1, 2), (2, 4), (3, 5)):
            token = int(tree.tokens[0, earlier])
            rest = tree.probs[0, earlier].clone()
            rest[token] = 0
            torch.testing.assert_close(tree.probs[0, younger], rest / rest.sum())
        assert len(set(tree.tokens[0, [1, 2, 4]].tolist())) == 3


@torch.inference_mode()
def test_chosen_siblings_are_the_most_likely(model, head):
    target = LlamaGenTarget(model, Guidance(1.7), Processor(0))
    prompt, seeds = Prompt(torch.tensor([1])), Uniforms.from_seeds([1])
    recorder = Recorder(EagleDrafter(head, target, TREE, sampled=False))
    list(decode(target, recorder, PointMass(), prompt, 16, seeds))
    feedback, tree = recorder.seen[0]
    soft = LlamaGenTarget(model, target.guidance, Processor())
    probs = naive_probs(soft, head, 1, [int(feedback.token)], [])
    assert tree.probs is None
    assert tree.tokens[0, [1, 2, 4]].tolist() == probs.topk(3).indices.tolist()


def test_files_round_trip(model, head, tmp_path):
    fingerprint = target_fingerprint(model)
    save_drafter(head, tmp_path, fingerprint=fingerprint)
    again = load_eagle(tmp_path, CONFIG, fingerprint=fingerprint)
    assert not again.training and again.config == head.config
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state_dict().values(), head.state_dict().values(), strict=True)
    )
    facts = json.loads((tmp_path / "config.json").read_text())
    assert facts["hidden_size"] == 32 and facts["intermediate_size"] == 24
    assert facts["num_hidden_layers"] == 1
    save_drafter(head, tmp_path, dtype=torch.bfloat16)
    assert (
        load_eagle(tmp_path, CONFIG, fingerprint="of another", dtype=torch.bfloat16).fc.weight.dtype
        == torch.bfloat16
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 64}, r"\(hidden_size 64\), got 32;"),
        ({"vocab_size": 24}, r"\(vocab_size 24\), got 20;"),
        ({"block_size": 25}, r"\(block_size 25\), got 16;"),
        ({"n_head": 4}, r"\(num_attention_heads 4\), got 2;"),
    ],
)
def test_a_drafter_of_another_target_is_refused(change, message, head, tmp_path):
    save_drafter(head, tmp_path)
    with pytest.raises(ValueError, match=message):
        load_eagle(tmp_path, replace(CONFIG, **change))
    with pytest.raises(ValueError, match="head must be made for"):
        other = LlamaGenTarget(Transformer(replace(CONFIG, **change)), Guidance(), Processor())
        EagleDrafter(head, other, TREE)


def test_a_drafter_of_other_weights_is_refused(model, head, tmp_path):
    save_drafter(head, tmp_path, fingerprint=target_fingerprint(model))
    other = target_fingerprint(random_weights(Transformer(CONFIG), 5))
    said = rf"target_fingerprint {other}\), got {target_fingerprint(model)};"
    with pytest.raises(ValueError, match=said):
        load_eagle(tmp_path, CONFIG, fingerprint=other)


def test_fingerprints_survive_a_cast(model):
    fingerprint = target_fingerprint(model)
    assert len(fingerprint) == 12 and int(fingerprint, 16) >= 0
    assert target_fingerprint(model.to(torch.bfloat16)) == fingerprint
    assert target_fingerprint(random_weights(Transformer(CONFIG), 7)) != fingerprint


def test_damaged_files_are_named(head, tmp_path):
    save_drafter(head, tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json must be JSON"):
        load_eagle(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold an object, got a list"):
        load_eagle(tmp_path, CONFIG)


@pytest.mark.parametrize("sizes", [(2, 1, 8), (0, 1, 2), (2, -1, 2), (2, 1, 1)])
def test_trees_out_of_range_are_named(sizes):
    with pytest.raises(ValueError, match=r"total must be in \[2, "):
        Dynamic(*sizes)


def data():
    tokens = torch.randint(
        CONFIG.vocab_size, (12, 2, 16), generator=torch.Generator().manual_seed(4)
    )
    return tokens, torch.arange(12) % CONFIG.num_classes


def loss_of(model, head):
    tokens, labels = data()
    with torch.no_grad():
        seen = seen_by(model, labels, tokens[:, 0], ())
        return eagle_loss(head, seen, model.output, torch.zeros(12, 15, CONFIG.dim))


def test_training_lowers_the_loss_and_resumes(model, tmp_path):
    tokens, labels = data()
    options = dict(batch=8, ffn_dim=24)

    def trained(name, steps):
        with torch.compiler.set_stance("force_eager"):
            return train_eagle(model, tokens, labels, Run(tmp_path / name, steps, 6e-3), **options)

    untrained, straight = trained("none", 0), trained("straight", 80)
    trained("run", 30)
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 30
    head = trained("run", 80)
    assert all(
        torch.equal(a, b) for a, b in zip(head.parameters(), straight.parameters(), strict=True)
    )
    first, end = loss_of(model, untrained), loss_of(model, head)
    assert float(end["loss"]) < 0.8 * float(first["loss"]) and end["overlap"] > first["overlap"]
    assert torch.equal(head.embed_tokens.weight, model.tok_embeddings.weight)


def test_training_wants_classes():
    captioned = Transformer(replace(CONFIG, model_type="t2i", cls_token_num=3, caption_dim=4))
    with pytest.raises(ValueError, match="target must be class-conditional"):
        train_eagle(captioned, *data(), None)
