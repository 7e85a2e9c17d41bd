"""MSD's head, trees, acceptance, training losses and whole runs against numbers that its release
produced.

``meta.json`` and ``llava576.json`` beside the tensors say which call made which.
"""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

from specmm.core.decode import decode
from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.models.target import Context, VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.recipes.msd import msd_loss, visual_share
from specmm.recipes.training.seen import Seen
from specmm.shape.eagle2 import Dynamic
from specmm.verify import GreedyMatch, PointMass
from specmm.verify.rule import VerifyResult
from specmm.vlm.msd import MSDConfig, MSDHead
from tests.tiny.recorded import facts, under

PARITY = Path(__file__).parents[1] / "parity" / "msd"
CASES = facts("msd/meta")["cases"] | facts("msd/llava576")["cases"]
VARIANTS = ("llava", "qwen")
PLACEHOLDER = 158  # a token the prompt does not hold
CLOSE = {"rtol": 0, "atol": 3e-5}  # float32 states of size 1 to 10


def tensors(name):
    return load_file(PARITY / CASES[name]["file"])


@pytest.fixture(scope="module", params=VARIANTS)
def case(request):
    return case_of(request.param)


def case_of(name):
    facts, t = CASES[name], tensors(name)
    head = MSDHead(MSDConfig.from_json(facts["config"]))
    head.load_state_dict(under(t, "weights."), strict=True)
    return SimpleNamespace(facts=facts, t=t, head=head.eval().requires_grad_(False))


def next_slots(case):
    """Embeddings and image flags of the next positions, the sampled token after the prompt last."""
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
    torch.testing.assert_close(
        states @ case.t["lm_head.weight"].T, case.t["msd.forward_logits"], **CLOSE
    )


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
        read_layers=lambda layers: None,
        offsets=torch.zeros(1, dtype=torch.int64),
        begins=torch.tensor([length]),
        prompt=SimpleNamespace(
            input_ids=torch.zeros(1, length, dtype=torch.int64),
            lengths=torch.tensor([length]),
            longest=0,
        ),
        head=lambda states: states @ weight.T,
        embed=case.head.embed_tokens,  # whose frozen copy the release has
        cache=SimpleNamespace(size=SimpleNamespace(capacity=length + 40)),
        context=Context(
            case.t["in.hidden_states"], case.t["in.inputs_embeds"], torch.tensor([length]), image
        ),
    )


class Watched(FeatureDrafter):
    """Keeps the states predicted for drafts."""

    def read(self, tokens, hidden, positions, bias, depth):
        states = super().read(tokens, hidden, positions, bias, depth)
        self.states.append(states)
        return states


def after(drafter, tree, t, prompt):
    """Feedback of a recorded round: the tokens kept and the target's states of the nodes they came
    after.
    """
    hidden, tokens = t["in_accept_hidden"], t["in_input_ids"][:, prompt:]
    kept = hidden.shape[1]
    nodes = hidden.new_zeros(1, tree.shape.size, hidden.shape[-1])
    nodes[:, :kept] = hidden
    path = torch.full((1, drafter.max_depth + 1), -1)
    path[:, :kept] = torch.arange(kept)
    padded = torch.zeros_like(path)
    padded[:, :kept] = tokens[:, -kept:]
    result = VerifyResult(path, torch.tensor([kept]), tokens[:, -1])
    return Feedback(TargetOutput(nodes, nodes), tokens[:, -1], tree, result, padded)


@pytest.mark.parametrize(
    "name", ["tree_t59_d5_k10", "tree_t20_d3_k4", "tree_t8_d2_k3", "tree_sampling_t20_d3_k4"]
)
def test_dynamic_trees(case, name):
    facts = case.facts["trees"][name]
    drafter = Watched(
        case.head, stage(case), Dynamic(facts["top_k"], facts["depth"], facts["total_token"])
    )
    prompt, tree = case.t["in.input_ids_with_sample"].shape[1], None
    feedback = Feedback(
        TargetOutput(None, case.t["in.hidden_states"]), torch.tensor([case.facts["sample_token"]])
    )
    drafter.begin(feedback, Clock())
    for step in range(1 if "sampling" in name else 3):
        t = under(case.t, f"{name}.step{step}.")
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


def test_training_losses_and_gradients():
    facts, t = CASES["train"], tensors("train")
    head = MSDHead(MSDConfig.from_json(facts["config"]))
    head.load_state_dict(under(t, "weights."), strict=True)
    image = torch.zeros(2, 25, dtype=torch.bool)
    image[0, 3:15] = True
    slots = Seen(
        t["batch.inputs_embeds"],
        t["batch.hidden_states"],
        t["batch.target"].roll(1, 1),
        t["batch.loss_mask"].bool(),
        torch.zeros(2, 25, dtype=torch.long),
        image,
    )
    losses = msd_loss(head, lambda x: x @ t["lm_head.weight"].T, slots)
    log_probs = (t["batch.target"][slots.mask] @ t["lm_head.weight"].T).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()  # cross-entropy has it, KL has not
    found = {"loss_fp32": losses["loss"] + 0.1 * entropy, "vloss_fp32": losses["smooth_l1"]}
    for theirs, ours in (found | {"ploss": losses["kl"] + entropy}).items():
        close = dict(rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.detach()[None], t[f"train.{theirs}"], **close)
    losses["loss"].backward()
    weights = dict(head.named_parameters())
    for name, gradient in under(t, "grad.").items():
        torch.testing.assert_close(weights[name].grad, gradient, rtol=1e-3, atol=1e-5)
    shares = [visual_share(100 * e + 99, 4000) for e in range(40)]
    assert shares == pytest.approx(facts["visual_ratio_by_epoch_1_to_40"])


@pytest.mark.parametrize("number", range(6))
def test_acceptance(number):
    """Walks the release's candidate rows with its uniforms through our decisions.

    Its defect is put back here: where nothing was rejected at the last node, its distribution is
    softmax of the raw logits.
    """
    facts = CASES["posterior"]["records"][number]
    t = under(tensors("posterior"), f"post{number}.")
    tree, logits = trie(t["candidates"], t["logits"])
    greedy = GreedyMatch().decisions(tree, logits)
    assert (
        walk(tree, 0, lambda child: greedy.accept[0, child] > 0.5)[1] == facts["greedy"]["accept"]
    )
    for record in facts["sampling"]:
        check_sampling(tree, logits, record, under(tensors("posterior"), record["sample_p"])[""])


def trie(candidates, logits):
    """The tree of candidate rows [P, D] with -1 after their ends, and the logits [1, N, V] of its
    nodes.
    """
    number, parents, kept = {}, [], []
    for row, tokens in enumerate(candidates.tolist()):
        for depth in range(len(tokens)):
            prefix = tuple(tokens[: depth + 1])
            if -1 in prefix or prefix in number:
                continue
            number[prefix] = len(parents)
            parents.append(number.get(prefix[:-1], -1))
            kept.append((prefix[-1], logits[row, depth]))
    tree = DraftTree(torch.tensor([[token for token, _ in kept]]), TreeShape.from_parents(parents))
    return tree, torch.stack([x for _, x in kept])[None]


def children(tree, node):
    return (tree.shape.parents[0] == node).nonzero()[:, 0].tolist()


def walk(tree, node, keep):
    """The last node of the path from ``node`` on, its length, and whether a child of the last node
    was rejected.
    """
    for rejected, child in enumerate(children(tree, node)):
        if keep(child):
            last, length, missed = walk(tree, child, keep)
            return last, length + 1, missed
        if rejected + 1 == len(children(tree, node)):
            return node, 0, True
    return node, 0, False


def check_sampling(tree, logits, record, expected):
    decisions = PointMass().decisions(tree, Processor(record["temperature"])(logits))
    draws = iter(record["uniform_draws"])
    node, length, missed = walk(
        tree, 0, lambda child: next(draws) < float(decisions.accept[0, child])
    )
    assert length == record["accept"] and next(draws, None) is None
    ours = decisions.next_probs[0, node]
    released = ours / ours.sum() if missed else logits[0, node].softmax(-1)
    torch.testing.assert_close(released, expected, rtol=1e-4, atol=1e-6)


def test_a_whole_run():
    """A real LLaVA whose language model and picture are the recorded ones, greedy: the same trees
    and tokens.
    """
    facts, t = CASES["e2e_llava"], tensors("e2e_llava")
    head = MSDHead(MSDConfig.from_json(facts["drafter_config"]))
    head.load_state_dict(under(t, "drafter."), strict=True)
    target = VLMTarget(llava_of(facts, t), Processor(0))
    drafter = FeatureDrafter(
        head, target, Dynamic(facts["top_k"], facts["depth"], facts["total_token"])
    )
    expected = t["out.msd_ids"][:, t["in.input_ids"].shape[1] :]
    trees, propose = [], drafter.propose
    drafter.propose = lambda *args: trees.append(propose(*args)) or trees[-1]
    uniforms, length = Uniforms.from_seeds([0]), expected.shape[1] + 1
    rounds = decode(target, drafter, GreedyMatch(), prompt_of(t), length, uniforms)
    counts = [int(progress.counts[0]) for progress in rounds]
    called = [tree.tokens[0].tolist() for tree in trees]
    *_, progress = decode(
        target, drafter, GreedyMatch(), prompt_of(t), expected.shape[1], Uniforms.from_seeds([0])
    )
    assert torch.equal(progress.tokens[:, : expected.shape[1]], expected)
    assert torch.equal(progress.tokens[:, :49], t["out.naive_ids"][:, 14:])
    kept = [b - a for a, b in pairwise([1, *counts])]
    assert kept[: len(facts["steps"])] == [step["accept"] + 1 for step in facts["steps"]]
    assert len(called) >= len(facts["steps"])
    assert called == facts["draft_tokens_per_call"][: len(called)]


def llava_of(facts, t):
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    vision |= dict(num_attention_heads=1, patch_size=14)
    text = LlamaConfig(
        **facts["base_config"], rope_theta=facts["rope_theta"], tie_word_embeddings=False
    )
    vision = CLIPVisionConfig(**vision, image_size=28)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=PLACEHOLDER)
    model = LlavaForConditionalGeneration(config)
    weights = under(t, "base.")
    model.lm_head.weight.data.copy_(weights.pop("lm_head.weight"))
    model.model.language_model.load_state_dict(under(weights, "model."), strict=True)
    features = BaseModelOutputWithPooling(pooler_output=list(t["in.image_features"]))
    model.model.get_image_features = lambda pixel_values=None, **kwargs: features
    return model


def prompt_of(t):
    ids = t["in.input_ids"][0].tolist()
    place = ids.index(-200)
    ids[place : place + 1] = [PLACEHOLDER] * t["in.image_features"].shape[1]
    return VLMPrompt(
        {"input_ids": torch.tensor([ids]), "pixel_values": torch.zeros(1, 3, 28, 28)}, 60
    )
