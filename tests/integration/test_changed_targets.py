"""A drafter drafts by its target's weights as they are, in whatever way they changed after a call:
what is drafted is what a drafter drafts that was loaded after the change.
"""

import copy

import pytest
import torch
import transformers as tf

import specmm
from specmm.core.processors import Processor
from specmm.core.watching import watched
from specmm.diffusion_drafters.models.deer import DEERModel, save_deer, share
from specmm.diffusion_drafters.models.dflash import DFlash, DFlashConfig, save_dflash
from specmm.hf.drafters.drafting import load_drafter
from specmm.hf.drafters.eagle3_files import save_eagle3
from specmm.hf.loading.pretrained import load_model
from specmm.hf.models.target import VLMTarget
from specmm.recipes.msd import msd_config
from specmm.vlm.msd import MSDHead, drafted_embeddings, save_msd
from tests.integration.conftest import TEXT, TEXT_SIZES, build_tokenizer, qwen2, shaken
from tests.integration.test_changed_weights import WAYS, other
from tests.tiny import mtp_models, vlm_folders
from tests.unit.vlm.test_eagle3 import head_for

peft = pytest.importorskip("peft")

QUESTIONS = ["what is this", "hello"]
ASKED = ["def add(a, b):\n", "return a"]
FEW = 100  # of the target's tokens, which some heads draft


def new_embeddings(network):
    table = network.get_input_embeddings()
    replaced = copy.deepcopy(table)
    replaced.weight.data = other(table.weight)
    network.set_input_embeddings(replaced)


def new_norm(network):
    decoder = network.get_decoder()
    decoder.norm = copy.deepcopy(decoder.norm)
    decoder.norm.weight.data = other(decoder.norm.weight)


def norms(network):
    for module in network.modules():
        if "Norm" in type(module).__name__:
            module.weight.data *= other(torch.ones_like(module.weight))


def merged(network):
    """A LoRA, merged in place: PEFT wraps the layers, and adds to ``weight.data``."""
    adapter = peft.LoraConfig(
        init_lora_weights=False, target_modules=["embed_tokens", "lm_head", "q_proj"], r=4
    )
    network.specmm_tests = [peft.LoraModel(network, adapter, "default")]
    network.specmm_tests[0].merge_adapter()


def unmerged(network):
    network.specmm_tests.pop().unmerge_adapter()


EVERY = WAYS | {
    "other embeddings": new_embeddings,
    "another norm": new_norm,
    "norms": norms,
    "merged by PEFT": merged,
    "unmerged": unmerged,
}


def save_block(folder, target, **more):
    size = target.config.vocab_size
    one = TEXT_SIZES | dict(vocab_size=size, num_hidden_layers=1, head_dim=8)
    sizes = tf.Qwen3Config(attn_implementation="sdpa", **one)
    drafter = shaken(DFlash(DFlashConfig(sizes, 5, 2, (0,), **more)), 4, 0.3)
    if more:
        drafter.set_ids(torch.arange(FEW) * 2)
    save_dflash(drafter, folder, target.get_input_embeddings().weight, torch.float32)


def save_deer_of(folder, target):
    inner = qwen2(target.config.vocab_size, 5, layers=1)
    share(inner, target)
    save_deer(DEERModel(inner, 2, 5, 0, shared=True), folder, torch.float32)


def save_msd_of(folder, target):
    head = shaken(MSDHead(msd_config(VLMTarget(target, Processor()))), 3, 0.3)
    head.embed_tokens.weight.data.copy_(drafted_embeddings(target))
    save_msd(head, folder, embeddings=False)


def save_eagle3_of(folder, target, **more):
    given = dict(own_head=False, own_embeddings=False) | more
    head = head_for(VLMTarget(target, Processor()), tokens=FEW, **given)
    save_eagle3(head, folder, dtype=torch.float32)


DRAFTERS = {
    "deer": ("deer", save_deer_of),
    "block": ("block", save_block),
    "block, some tokens": ("block", lambda *a: save_block(*a, tokens=FEW, recurrent=8)),
    "msd": ("msd", save_msd_of),
    "eagle3": ("eagle3", save_eagle3_of),
    "eagle3, parallel": ("eagle3", lambda *a: save_eagle3_of(*a, mask=5, norm_output=True)),
}


@pytest.fixture
def anyones(monkeypatch):
    """Drafters are not asked whose they are: the fresh ones are of changed targets."""
    for module in ("hf.drafters.files", "vlm.msd"):
        monkeypatch.setattr(f"specmm.{module}.check_fingerprint", lambda *given: None)


def drafted(pipe, method, max_new_tokens=5, **options):
    """The drafts of each round and their distributions, and the answers."""
    rounds = []

    def see(event):
        if hasattr(event, "tree"):
            tree = event.tree
            rounds.append(tree.tokens.clone())
            if tree.probs is not None:
                rounds.append(tree.probs.clone())

    asked = (ASKED,) if isinstance(pipe, specmm.TextPipeline) else (None, QUESTIONS)
    with watched(see):
        out = pipe(*asked, max_new_tokens=max_new_tokens, method=method, **options)
    return [*rounds, *out.tokens]


def same(found, wanted):
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def check(pipe, fresh, method, ways=EVERY, **options):
    before = drafted(pipe, method, **options)
    others = 0
    for way, change in ways.items():
        change(pipe.model)
        found = drafted(pipe, method, **options)
        assert same(found, drafted(fresh(), method, **options)), way
        others += not same(found, before)
        before = found
    assert others > len(ways) / 2


def pipe_of(name, folder):
    """A pipeline with the drafter ``name``, and a function that gives a fresh one."""
    method, save = DRAFTERS[name]
    kind, reader = specmm.TextPipeline, build_tokenizer([TEXT], 280)
    model = qwen2(len(reader), 0)
    if method == "msd":
        kind, (model, reader) = specmm.VQAPipeline, vlm_folders.gemma3()
        shaken(model.eval(), 0, 0.3)
    save(folder, model)

    def opened(model):
        return kind(model, reader, method, load_drafter(method, folder, model))

    pipe = opened(model)
    return pipe, lambda: opened(copy.deepcopy(pipe.model))


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_of_the_targets_weights_as_they_are(name, tmp_path, anyones):
    pipe, fresh = pipe_of(name, tmp_path)
    check(pipe, fresh, DRAFTERS[name][0])


@pytest.mark.parametrize(
    "name", ["block", "block, some tokens", "msd", "eagle3", "eagle3, parallel"]
)
def test_drafts_of_graphs_are_of_the_targets_weights_as_they_are(
    name, tmp_path, anyones, taped, monkeypatch
):
    monkeypatch.setattr("specmm.loading.hardware._packs", lambda *given: False)  # as on a GPU
    pipe, fresh = pipe_of(name, tmp_path)
    check(pipe, fresh, DRAFTERS[name][0], compiled=True)


@pytest.mark.parametrize("name", ["ernie", "glm"])
def test_mtp_layers_draft_by_the_targets_weights_as_they_are(name, tmp_path):
    mtp_models.save(name, tmp_path, 2)
    model = load_model(tf.AutoModelForCausalLM, tmp_path, dtype=torch.float32)
    words = tf.AutoTokenizer.from_pretrained(tmp_path)
    pipe = specmm.TextPipeline(model, words, "mtp")
    fresh = lambda: specmm.TextPipeline(copy.deepcopy(pipe.model), words, "mtp")  # noqa: E731
    learns = [weight.requires_grad for weight in model.parameters()]
    drafted(pipe, "mtp")
    assert learns == [weight.requires_grad for weight in model.parameters()]
    check(pipe, fresh, "mtp", max_new_tokens=10)
