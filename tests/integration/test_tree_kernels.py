"""Which kernels runs of methods of each kind launch; no dense mask is made for the target's tree.

The kernels run in Triton's interpreter, which is slow: models are tiny, outputs short. The table in
kernels/README.md is compared with what the runs launch.
"""

import logging
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers as tf
from PIL import Image

import specmm
from specmm import methods
from specmm.core.cache import Cache
from specmm.core.processors import Processor
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.loading.pretrained import use_tree_attention
from specmm.hf.models.families import WAYS
from specmm.hf.models.target import VLMTarget
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.kernels.acceptance import fused_options
from specmm.kernels.tree_attention import dense, interface
from specmm.methods import MSD, Eagle3, LanternPP
from specmm.recipes.features import build_eagle3
from specmm.verify.rule import RULES, make_rule
from tests.tiny import chameleon
from tests.tiny.mtp_models import save

CODE, QUESTION = "def add(a, b):", "How many?"
KERNELS = {  # columns of the table
    "tree attention": "tree_attention",
    "KV commit": "kv_commit",
    "fused acceptance": "accept",
}
FAMILIES = {
    "image tokens": methods.IMAGE_TOKENS,
    "scales": methods.SCALES,
    "continuous tokens": methods.CONTINUOUS,
    "questions about pictures": methods.VQA,
    "text": methods.TEXT,
}
README = Path(__file__).parents[2] / "kernels" / "README.md"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for the CPU")


def table():
    """What kernels/README.md says: by family and method, whether each kernel is launched."""
    text = README.read_text().partition("## Which methods run which kernels")[2]
    header, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert header.split("|")[3:6] == [f" {name} " for name in KERNELS]
    found = {}
    for line in rows:
        if not (named := re.match(r"\| ([\w ]+) \| ((?:`[^`]+`(?:, )?)+) \|", line)):
            break  # the next table
        cells = [cell.strip() for cell in line.split("|")[3:6]]
        assert set(cells) <= {"yes", "no"}, line
        for method in re.findall("`([^`]+)`", named[2]):
            found[named[1], method] = [cell == "yes" for cell in cells]
    return found


TABLE = table()


def test_the_table_has_every_method_of_every_family():
    assert set(TABLE) == {(family, name) for family, kinds in FAMILIES.items() for name in kinds}


def test_the_table_names_the_rules_that_are_not_fused():
    tree, near = DraftTree(torch.zeros(1, 2).long(), TreeShape.chain(1)), torch.zeros(9, 9).long()
    missing = set()
    for name, kind in RULES.items():
        given = {"table": near, "k": 2, "greedy": False} if kind.relaxed else {}
        if fused_options(make_rule(name, **given), tree) is None:
            missing.add(name)
    row = next(r for r in README.read_text().splitlines() if "| `draft` | yes" in r)
    assert set(re.findall("`([^`]+)`", row.partition("rules")[2])) == missing


@pytest.fixture
def launches(monkeypatch):
    """Kernels are Triton's; what comes back counts their launches by name."""
    counts = Counter()
    monkeypatch.setenv("SPECMM_KERNELS", "triton")
    # the first target of a model scores one tree to see whether it can be one: no part of a run
    monkeypatch.setattr("specmm.hf.models.target.check_model", lambda *_: WAYS[0])
    monkeypatch.setattr("specmm.hf.models.target.way_of", lambda *_: WAYS[0])
    for folder, name in (
        ("tree_attention", "tree_attention"),
        ("kv_commit", "kv_commit"),
        ("acceptance", "accept"),
    ):
        module = import_module(f"specmm.kernels.{folder}.triton")
        monkeypatch.setattr(module, name, counted(getattr(module, name), name, counts))
    return counts


def counted(function, name, counts):
    def run(*given):
        counts[name] += 1
        return function(*given)

    return run


@pytest.fixture
def no_dense_masks(monkeypatch):
    """A dense mask for the target's tree is an error; networks that draft keep theirs."""
    bias, scoring = Cache.tree_bias, []

    def watched(score):
        def run(target, tree):
            scoring.append(target)
            try:
                return score(target, tree)
            finally:
                scoring.pop()

        return run

    for kind in (VLMTarget, LlamaGenTarget):
        monkeypatch.setattr(kind, "score", watched(kind.score))

    def guarded(cache, ancestors):
        assert not scoring, "a dense mask was made"
        return bias(cache, ancestors)

    def refused(*given):
        raise AssertionError("a dense mask was made")

    monkeypatch.setattr(Cache, "tree_bias", guarded)
    monkeypatch.setattr(dense, "dense_mask", refused)


def launched(counts):
    """Whether each kernel was, in the table's order."""
    return [counts[name] > 0 for name in KERNELS.values()]


@pytest.fixture(scope="module")
def picture_pipe(make_tiny):
    """Pictures of 9 tokens."""
    pipe = make_tiny(tokens=9)
    pipe.set_progress_bar_config(disable=True)
    return pipe


SHORT = {  # shapes that are quick in the interpreter
    "sjd": methods.SJD(3),
    "eagle": methods.Eagle(total=4, depth=2, top_k=2),
    "lantern++": LanternPP(k=10),
}


# one method of each kind of rounds: its own, a tree, Jacobi's
@pytest.mark.parametrize("name", ["ar", "eagle", "lantern++", "sjd"])
@pytest.mark.slow
def test_image_tokens(picture_pipe, launches, no_dense_masks, name):
    method, generator = SHORT.get(name, name), torch.Generator().manual_seed(0)
    out = picture_pipe(["heart"], method=method, generator=generator, output_type="latent")
    assert out.tokens.shape == (1, 9)
    assert launched(launches) == TABLE["image tokens", name]


@pytest.mark.parametrize("name", ["ar", methods.CoDe(5)], ids=str)
def test_scales(launches, name):
    pipe = specmm.ImagePipeline.from_pretrained("pocket/var", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pipe(["heart"], method=name, generator=torch.Generator().manual_seed(0), output_type="latent")
    assert launched(launches) == TABLE["scales", getattr(name, "name", name)]


@pytest.mark.parametrize("name", list(methods.CONTINUOUS))
def test_continuous_tokens(launches, name):
    pipe = specmm.ImagePipeline.from_pretrained("pocket/mar", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pipe(["heart"], method=name, generator=torch.Generator().manual_seed(0), output_type="latent")
    assert launched(launches) == TABLE["continuous tokens", name]


TEXTS = {"eagle3": Eagle3(total=4, depth=2, top_k=2)}


@pytest.mark.parametrize("name", ["ar", "block", "deer", "eagle3"])
@pytest.mark.slow
def test_texts(text_folder, launches, no_dense_masks, name):
    plain = specmm.TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    wanted = plain(CODE * 2, max_new_tokens=6).texts
    pipe = specmm.TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    assert pipe.model.config._attn_implementation == interface.NAME
    if name == "eagle3":
        pipe.drafters.given["eagle3"] = build_eagle3(VLMTarget(plain.model, Processor())).eval()
    assert pipe(CODE * 2, max_new_tokens=6, method=TEXTS.get(name, name)).texts == wanted
    assert launched(launches) == TABLE["text", name]


@pytest.fixture(scope="module")
def answer_pipe():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECMM_KERNELS", "triton")
        return specmm.VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float32)


@pytest.mark.parametrize("method", [methods.AR(), MSD(sampled=True, tree=(2, 1))])
@pytest.mark.slow
def test_answers(answer_pipe, launches, no_dense_masks, method):
    picture = Image.new("RGB", (64, 64), "red")
    config = answer_pipe.model.config
    assert config.get_text_config()._attn_implementation == interface.NAME
    assert config.vision_config._attn_implementation != interface.NAME
    wanted = answer_pipe(picture, QUESTION, max_new_tokens=4).answers
    assert answer_pipe(picture, QUESTION, max_new_tokens=4, method=method).answers == wanted
    assert launched(launches) == TABLE["questions about pictures", method.name]


def test_mtp_layers(tmp_path, launches, no_dense_masks):
    folder = save("glm", tmp_path)
    pipe = specmm.TextPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    assert pipe.model.config._attn_implementation == interface.NAME
    wanted = pipe("a b c", max_new_tokens=6).texts
    method = methods.MTP(total=4, depth=2, top_k=2)
    assert pipe("a b c", max_new_tokens=6, method=method).texts == wanted
    for family in ("text", "questions about pictures"):
        assert launched(launches) == TABLE[family, "mtp"]


def test_answers_with_pictures(tmp_path, launches, no_dense_masks):
    chameleon.save_writer(tmp_path)
    pipe = specmm.VQAPipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    assert pipe.model.config._attn_implementation == interface.NAME
    given = dict(max_new_tokens=18, draw=True)  # a picture and its ends
    wanted = pipe(None, "tree on a hill", **given)
    assert [len(shown) for shown in wanted.pictures] == [1]
    out = pipe(None, "tree on a hill", method=methods.AnswerSJD(window=3), **given)
    assert torch.equal(out.tokens[0], wanted.tokens[0])
    assert launched(launches) == TABLE["questions about pictures", "sjd"]


@pytest.mark.parametrize("place", ["Cache.tree_bias", "dense.dense_mask"])
def test_a_dense_mask_is_seen(text_folder, monkeypatch, no_dense_masks, place):
    """One for transformers' model, one in the operator."""
    if place == "Cache.tree_bias":
        monkeypatch.setenv("SPECMM_KERNELS", "torch")
        monkeypatch.setattr("specmm.hf.models.target.check_model", lambda *_: WAYS[0])
        monkeypatch.setattr("specmm.hf.models.target.way_of", lambda *_: WAYS[0])
        pipe = specmm.TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
        with pytest.raises(AssertionError, match="a dense mask was made"):
            pipe(CODE * 2, max_new_tokens=6, method="prompt-lookup")
        return
    q, words = torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="a dense mask was made"):
        specmm.kernels.tree_attention.tree_attention(q, q, q, words, words[0, 0] * 0, 0, 1.0)


@torch.inference_mode()
def test_without_triton_models_compute_as_they_did(text_folder, monkeypatch):
    monkeypatch.setenv("SPECMM_KERNELS", "torch")
    model = specmm.TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32).model
    assert model.config._attn_implementation == "specmm_tree"
    inputs = dict(input_ids=torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    inputs["attention_mask"] = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    found = model(**inputs).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(found, model(**inputs).logits)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        (dict(sliding_window=4), "layers that see a window"),
        (dict(sliding_window=None, attn_implementation="eager"), "its attention is eager"),
    ],
)
def test_attention_that_the_kernel_does_not_know_is_left(monkeypatch, caplog, sizes, why):
    monkeypatch.setenv("SPECMM_KERNELS", "triton")
    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = tf.MistralConfig(vocab_size=20, num_key_value_heads=2, head_dim=8, **small, **sizes)
    model = tf.MistralForCausalLM(config)
    before = model.config._attn_implementation
    with caplog.at_level(logging.WARNING):
        use_tree_attention(model)
    assert model.config._attn_implementation == before and why in caplog.text
