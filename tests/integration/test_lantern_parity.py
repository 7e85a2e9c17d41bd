"""The EAGLE head, its trees and whole runs against numbers that LANTERN's release produced.

``lantern_e2e_tiny.json`` beside the tensors says which call made which. Greedy, guided by 3, a
text-to-image target.
"""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from specmm.core.decode import decode, decode_plain
from specmm.core.drafter import Feedback
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.target import TargetOutput
from specmm.image_ar.tokens.drafters.eagle import EagleDrafter
from specmm.image_ar.tokens.gpt import Transformer
from specmm.image_ar.tokens.loading import from_lantern, infer_gpt_config, load_eagle
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.loading.checkpoints import load_strict
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import make_tree
from specmm.verify import Lantern, LanternPP, Recursive, VerifyResult
from tests.tiny.recorded import Case

CASE = Case("lantern_e2e_tiny")
T, FACTS = CASE.t, CASE.facts
LENGTH, SPARE = FACTS["max_length"], 12


@pytest.fixture(scope="module")
def model():
    weights = from_lantern(CASE.state("base_sd."))
    facts = FACTS["config"]
    sizes = infer_gpt_config(weights, n_head=facts["heads"], block_size=facts["block_size"])
    transformer = Transformer(sizes)
    load_strict(transformer, weights)
    return transformer.eval()


@pytest.fixture(scope="module")
def head(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter")
    save_file(CASE.state("drafter_sd."), folder / "model.safetensors")
    config = {"hidden_size": 32, "bias": True, "architectures": ["Llama"]}
    (folder / "config.json").write_text(json.dumps(config))
    return load_eagle(folder, model.config)


def target_of(model, temperature=0.0):
    return LlamaGenTarget(model, Guidance(FACTS["cfg_scale"]), Processor(temperature))


def prompt():
    return Prompt(T["in.t5_feats_right_padded"], T["in.t5_mask_right_padded"])


def test_the_head_predicts_the_recorded_states(model, head):
    with torch.no_grad():
        predicted = head(head.embed_tokens(T["in.drafter_input_ids"]), T["out.base_hidden"])
    torch.testing.assert_close(predicted, T["out.drafter_hidden"], atol=2e-4, rtol=0)


def drafted(model, head, tree):
    """The tree drafted after the recorded prefix (120 caption positions, 30 tokens, the root), and
    its logits.
    """
    drafter, spy = EagleDrafter(head, target_of(model), tree, sampled=False), []
    guided = drafter.target.guide
    drafter.target.guide = lambda *args: spy.append(guided(*args)) or spy[-1]
    ids, hidden = T["in.tree_input_ids"][:1], T["out.base_hidden"]
    prefix, steps = model.config.cls_token_num, drafter.max_depth + 1
    with torch.inference_mode():
        feedback = Feedback(TargetOutput(torch.empty(0), hidden[:, :prefix]), ids[:, prefix])
        drafter.begin(feedback, Clock())
        drafter.propose(feedback, Uniforms.from_seeds([0]))
        for i in range(
            prefix, hidden.shape[1]
        ):  # round by round, the root kept and the recorded token after it
            path = F.pad(torch.zeros(1, 1, dtype=torch.int64), (0, steps - 1), value=-1)
            result = VerifyResult(path, torch.ones(1, dtype=torch.int64), ids[:, i + 1])
            output = TargetOutput(torch.empty(0), hidden[:, i : i + 1])
            committed = F.pad(ids[:, i + 1 : i + 2], (0, steps - 1))
            spy.clear()
            tree = drafter.propose(
                Feedback(output, ids[:, i + 1], None, result, committed), Uniforms.from_seeds([0])
            )
    return tree, torch.cat(spy, dim=1)[0]


def test_the_dynamic_tree_is_the_recorded_one(model, head):
    tree, _ = drafted(model, head, Dynamic(10, 4, 59))
    assert torch.equal(tree.tokens, T["out.dynamic.draft_tokens"])
    assert torch.equal(tree.shape.ancestors[0], T["out.dynamic.tree_mask"].bool())
    assert torch.equal(tree.shape.depths[0], T["out.dynamic.position_ids"])


@pytest.mark.parametrize("name", ["mc_sim_7b_63", "naive_extend_57"])
def test_static_trees_are_the_recorded_ones(model, head, name):
    (tree, logits), recorded = drafted(model, head, make_tree(name)), f"out.static.{name}."
    best = logits.topk(10)
    assert torch.equal(best.indices, T[recorded + "topk_tokens"])
    torch.testing.assert_close(best.values, T[recorded + "topk_logits"], atol=2e-4, rtol=0)
    assert torch.equal(tree.tokens, T[recorded + "tree_candidates"])
    assert torch.equal(tree.shape.ancestors[0], T[recorded + "tree_attn_mask"].bool())
    assert torch.equal(tree.shape.depths[0], T[recorded + "tree_position_ids"])


@dataclass(frozen=True)
class ReleasedTies:
    """Of relaxed greedy's longest paths the release takes the one through the lowest leaf in
    dynamic trees.
    """

    rule: Lantern | LanternPP
    name: str = "lantern, ties as released"
    exact: bool = False

    def decisions(self, tree, p, *, measure=False):
        shape, nodes = tree.shape, torch.arange(tree.shape.size)
        below = shape.ancestors.mT
        leaf = below.sum(-1) == 1
        first = torch.where(below & leaf[:, None], nodes, shape.size).amin(-1)
        order = (first - shape.depths * shape.size).argsort(dim=-1, stable=True)[:, :-1]
        return replace(self.rule.decisions(tree, p, measure=measure), order=order)


def rule_of(run):
    if not run.lantern:
        return Recursive()
    kind = Lantern if run.lantern_delta <= 1 else LanternPP
    rule = kind(T["in.neighbor_table"].long(), run.lantern_k, run.lantern_delta, greedy=True)
    return rule if run.static_tree else ReleasedTies(rule)


@pytest.mark.parametrize(
    "run", [SimpleNamespace(**r) for r in FACTS["runs"][1:]], ids=lambda r: r.name
)
def test_whole_runs_are_the_recorded_ones(model, head, run):
    """Relaxed greedy needs the softened distribution (temperature 1); rule and loop still emit the
    mode, from token 0 on.
    """
    target = target_of(model, temperature=1.0 if run.lantern else 0.0)
    tree = make_tree(run.tree) if run.static_tree else Dynamic(10, 4, 59)
    drafter = EagleDrafter(head, target, tree, sampled=False)
    counts = [1]
    for progress in decode(
        target, drafter, rule_of(run), prompt(), LENGTH + SPARE, Uniforms.from_seeds([0])
    ):
        counts.append(int(progress.counts[0]))
    assert torch.equal(progress.tokens[:, :LENGTH], T[f"out.{run.name}.tokens"])
    # the release stops after the length
    rounds = next(i for i, count in enumerate(counts) if count - 1 > LENGTH)
    assert (counts[rounds] - 1) / rounds == run.mean_accept


def test_plain_decoding_is_the_recorded_one(model):
    *_, progress = decode_plain(target_of(model), prompt(), LENGTH, Uniforms.from_seeds([0]))
    assert torch.equal(progress.tokens, T["out.ar.tokens"])
    assert torch.equal(progress.tokens, T["out.strict_dynamic.tokens"])
