"""MSD's head, trees, acceptance, training losses and whole runs against numbers that its release produced.

``meta.json`` and ``llava576.json`` beside the tensors say which call made which; tokens behind image slot ranges are
1-based in time: slot j reads position j + 1.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from specmm.drafter import Feedback
from specmm.growth import Dynamic
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.stats import Clock
from specmm.target import TargetOutput
from specmm.verify.rule import Verdict
from specmm.vlm.drafters.msd import MSDDrafter
from specmm.vlm.drafters.msd_head import MSDConfig, MSDHead
from specmm.vlm.target import Context

PARITY = Path(__file__).parents[1] / "parity" / "msd"
CASES = {
    k: v for name in ("meta", "llava576") for k, v in json.loads((PARITY / f"{name}.json").read_text())["cases"].items()
}
VARIANTS = ("llava", "qwen")
CLOSE = {"rtol": 0, "atol": 3e-5}  # float32 states of size 1 to 10


def tensors(name):
    return load_file(PARITY / CASES[name]["file"])


def part(t, prefix):
    return {k.removeprefix(prefix): v for k, v in t.items() if k.startswith(prefix)}


@pytest.fixture(scope="module", params=VARIANTS)
def case(request):
    return case_of(request.param)


def case_of(name):
    facts, t = CASES[name], tensors(name)
    head = MSDHead(MSDConfig.from_json(facts["config"]))
    head.load_state_dict(part(t, "weights."), strict=True)
    return SimpleNamespace(facts=facts, t=t, head=head.eval().requires_grad_(False))


def next_slots(case):
    """Embeddings and image flags of the next positions, the sampled token behind the prompt last."""
    sampled = case.head.embed_tokens(torch.tensor([[case.facts["sample_token"]]]))
    image = torch.zeros(1, case.facts["seq_len_expanded"], dtype=torch.bool)
    first, stop = case.facts["image_slot_range_in_drafter"]
    image[:, first:stop] = True
    return torch.cat([case.t["in.inputs_embeds"][:, 1:], sampled], 1), image


@pytest.mark.parametrize("mode", ["msd", "coupled"])
def test_the_head_reads_a_prompt_with_a_picture(case, mode):
    embeddings, image = next_slots(case)
    slots = case.head.prompt_slots(embeddings, case.t["in.hidden_states"], image & (mode == "msd"))
    torch.testing.assert_close(slots, case.t[f"{mode}.fused_input"], **CLOSE)
    torch.testing.assert_close(case.head(slots), case.t[f"{mode}.forward_hidden"], **CLOSE)


def test_the_head_reads_text(case):
    tokens = case.t["text.in.input_ids_with_sample"][:, 1:]
    slots = case.head.text_slots(case.head.embed_tokens(tokens), case.t["text.in.hidden_states"])
    torch.testing.assert_close(slots, case.t["text.fused_input"], **CLOSE)
    torch.testing.assert_close(case.head(slots), case.t["text.forward_hidden"], **CLOSE)


def test_a_picture_of_576_tokens():
    case = case_of("llava576")
    embeddings, image = next_slots(case)
    slots = case.head.prompt_slots(embeddings, case.t["in.hidden_states"], image)
    recorded = case.t["slots_recorded"]
    states = case.head(slots)[:, recorded]
    torch.testing.assert_close(slots[:, recorded], case.t["msd.fused_input"], **CLOSE)
    torch.testing.assert_close(states, case.t["msd.forward_hidden"], **CLOSE)
    torch.testing.assert_close(states @ case.t["lm_head.weight"].T, case.t["msd.forward_logits"], **CLOSE)


def stage(case, temperature=0.0):
    """What a drafter asks of its target, holding the case's prompt."""
    length, weight = case.facts["seq_len_expanded"], case.t["lm_head.weight"]
    image = torch.zeros(1, length, dtype=torch.bool)
    first, stop = case.facts["image_slot_range_in_drafter"]
    image[:, first + 1 : stop + 1] = True
    return SimpleNamespace(
        processor=Processor(temperature),
        family=SimpleNamespace(head=SimpleNamespace(weight=weight)),
        device="cpu",
        head=lambda states: states @ weight.T,
        cache=SimpleNamespace(size=SimpleNamespace(capacity=length + 40)),
        context=Context(case.t["in.hidden_states"], case.t["in.inputs_embeds"], torch.tensor([length]), image),
    )


class Watched(MSDDrafter):
    """Keeps the states predicted for drafts."""

    def read(self, tokens, hidden, positions, bias):
        states = super().read(tokens, hidden, positions, bias)
        self.states.append(states)
        return states


def after(drafter, tree, t, prompt):
    """Feedback of a recorded round: the tokens kept and the target's states of the nodes they came behind."""
    hidden, tokens = t["in_accept_hidden"], t["in_input_ids"][:, prompt:]
    kept = hidden.shape[1]
    nodes = hidden.new_zeros(1, tree.shape.size, hidden.shape[-1])
    nodes[:, :kept] = hidden
    path = torch.full((1, drafter.max_depth + 1), -1)
    path[:, :kept] = torch.arange(kept)
    padded = torch.zeros_like(path)
    padded[:, :kept] = tokens[:, -kept:]
    verdict = Verdict(path, torch.tensor([kept]), tokens[:, -1])
    return Feedback(TargetOutput(nodes, nodes), tokens[:, -1], tree, verdict, padded)


@pytest.mark.parametrize("name", ["tree_t59_d5_k10", "tree_t20_d3_k4", "tree_t8_d2_k3", "tree_sampling_t20_d3_k4"])
def test_dynamic_trees(case, name):
    facts = case.facts["trees"][name]
    drafter = Watched(case.head, stage(case), Dynamic(facts["top_k"], facts["depth"], facts["total_token"]))
    prompt, tree = case.t["in.input_ids_with_sample"].shape[1], None
    feedback = Feedback(TargetOutput(None, case.t["in.hidden_states"]), torch.tensor([case.facts["sample_token"]]))
    drafter.begin(feedback, Clock())
    for step in range(1 if "sampling" in name else 3):
        t = part(case.t, f"{name}.step{step}.")
        feedback = after(drafter, tree, t, prompt) if step else feedback
        drafter.states = []
        tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
        check_tree(tree, t)
        fed = drafter.states[1:] if step else drafter.states  # the prompt goes another way
        torch.testing.assert_close(torch.cat(fed, 1), t["expand_hidden"], **CLOSE)
        assert drafter.cache.lengths.tolist() == t["stable_kv_len"].tolist()


def check_tree(tree, t):
    shape = tree.shape
    assert torch.equal(tree.tokens, t["draft_tokens"])
    assert torch.equal(shape.parents[0], t["parents"])
    assert torch.equal(shape.depths[0], t["tree_position_ids"])
    assert torch.equal(shape.ancestors[0], t["tree_mask"][0, 0].bool())
    leaves = set(range(shape.size)) - set(shape.parents[0].tolist())
    paths = {tuple(shape.ancestors[0, leaf].nonzero()[:, 0].tolist()) for leaf in leaves}
    assert paths == {tuple(n for n in row if n >= 0) for row in t["retrieve_indices"].tolist()}
