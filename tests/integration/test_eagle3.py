"""Method ``eagle3`` where users ask for it: pipelines, ``custom_generate`` and the command line
with heads from unmodified folders of every layout; and folders that are refused in a sentence.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from specmm import methods
from specmm.core.processors import Processor
from specmm.hf.drafters.drafting import method_of
from specmm.hf.drafters.eagle3 import load_for
from specmm.hf.drafters.eagle3_files import is_eagle3, load_eagle3, save_eagle3
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.models.target import VLMTarget
from specmm.text.pipeline import TextPipeline
from specmm.vlm.pipeline import VQAPipeline
from tests.cases import some
from tests.commands import succeed
from tests.generating import as_generate
from tests.noisy import noisy
from tests.tiny import parts
from tests.tiny.processors import PROCESSORS
from tests.tiny.vlms import random_model
from tests.unit.vlm.test_eagle3 import head_for

PARITY = Path(__file__).parents[1] / "parity" / "eagle3"
PROMPTS = ["def add(a, b):\n", "x", "    return a + b + a"]
SIZES = parts.SIZES | dict(num_hidden_layers=7)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=256)

TARGETS = {
    "llama": lambda size: tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=size, **SIZES)),
    "qwen3": lambda size: tf.Qwen3ForCausalLM(tf.Qwen3Config(vocab_size=size, head_dim=8, **SIZES)),
}
LAYOUTS = ("speculators", "eagle", "specforge", "peagle", "pickled")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, text_folder):
    """A folder of a target by name, with a tokenizer, and heads for it in all layouts."""
    words = tf.AutoTokenizer.from_pretrained(text_folder)

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        model = parts.shaken(TARGETS[name](len(words)), std=0.3)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = 0, 1
        model.save_pretrained(folder / "model")
        words.save_pretrained(folder / "model")
        target = VLMTarget(tf.AutoModelForCausalLM.from_pretrained(folder / "model"), Processor(0))
        head = head_for(target, tokens=60, layers=(1, 2, 3))
        head.set_ids(torch.arange(0, 2 * 60, 2) + 40)
        for layout in ("speculators", "eagle", "specforge"):
            save_eagle3(head, folder / layout, target.model, layout=layout)
        parallel = head_for(target, tokens=60, layers=(1, 2, 3), mask=3, own_embeddings=True)
        save_eagle3(parallel, folder / "peagle", target.model, dtype=torch.float16)
        pickled = folder / "pickled"
        shutil.copytree(folder / "eagle", pickled)
        torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
        (pickled / "model.safetensors").unlink()
        return folder

    made = {}
    return lambda name: made.get(name) or made.setdefault(name, make(name))


@pytest.mark.parametrize(
    ("layout", "name"),
    some(
        [(layout, name) for layout in LAYOUTS for name in TARGETS],
        [("peagle", "qwen3"), *((layout, "llama") for layout in LAYOUTS)],
    ),
)
def test_texts_are_those_of_generate(folders, name, layout):
    """A ragged batch; float32 targets take heads that were saved in bfloat16 or float16."""
    folder = folders(name)
    pipe = TextPipeline.from_pretrained(
        folder / "model", "eagle3", folder / layout, torch_dtype=torch.float32
    )
    method = methods.Eagle3(top_k=40, total=200, depth=1)
    out = pipe(PROMPTS, method=method, max_new_tokens=14, temperature=0.0)
    assert out.certificate.kind == "exact" and out.stats.tau > 1
    for prompt, found in zip(PROMPTS, out.tokens, strict=True):
        one = pipe.tokenizer(prompt, return_tensors="pt")
        wanted = pipe.model.generate(**one, max_new_tokens=14, do_sample=False)
        assert torch.equal(found, wanted[0, one["input_ids"].shape[1] :])


def test_rows_have_their_own_uniforms_and_are_refilled(folders):
    """Named as a method, and as the drafter of ``draft``."""
    folder = folders("llama")
    drawn = {
        "specforge": methods.Eagle3(sampled=True, tree=(6, 2)),
        "peagle": methods.Draft("eagle3", (6, 2)),
    }
    for layout, method in drawn.items():
        pipe = TextPipeline.from_pretrained(
            folder / "model", "eagle3", folder / layout, torch_dtype=torch.float32
        )
        options = dict(method=method, temperature=1.0, max_new_tokens=10)
        together = pipe(PROMPTS, seed=[5, 6, 7], **options)
        refilled = pipe(PROMPTS, seed=[5, 6, 7], batch_size=2, **options)
        assert together.texts == refilled.texts
        for text, prompt, seed in zip(together.texts, PROMPTS, [5, 6, 7], strict=True):
            assert pipe(prompt, seed=[seed], **options).texts == [text]


def test_generate_reads_a_folder_for_its_model(folders):
    folder = folders("qwen3")
    model = tf.AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = torch.tensor([[1, 9, 50, 51, 52]])
    for drafter in (folder / "speculators", load_for(folder / "eagle", model, "eagle3")):
        assert as_generate(model, ids, 12, drafter, "eagle3")


def test_auto_knows_a_folder_by_its_config(folders):
    folder = folders("llama")
    for layout in ("speculators", "eagle", "specforge", "peagle"):
        assert method_of(folder / layout) == "eagle3"
    pipe = TextPipeline.from_pretrained(
        folder / "model", "auto", folder / "specforge", torch_dtype=torch.float32
    )
    for _ in range(2):
        pipe(PROMPTS[0], max_new_tokens=24)
    [record] = pipe.records.values()
    assert [one.method.name for one in record.candidates] == ["eagle3", "suffix"]


def test_the_command_line_takes_the_method(folders):
    folder = folders("llama")
    given = ["complete", str(folder / "model"), "-p", "def add(", "--method", "eagle3", "--drafter"]
    given += [str(folder / "specforge"), "-o", "depth=1", "--max-new-tokens", "6"]
    succeed(*given)


@pytest.mark.parametrize("name", ["llava-onevision", "qwen3-vl"])
@pytest.mark.parametrize("parallel", [False, True])
def test_questions_about_pictures_are_answered_as_generate_answers(name, parallel, tmp_path):
    """Two pictures, none and one; models with M-RoPE have heads with M-RoPE."""
    model = random_model(name)
    target = VLMTarget(model, Processor(0), name)
    parts = dict(sections=(1, 1, 2), interleaved=True) if name == "qwen3-vl" else {}
    parallel = dict(mask=3, deep=2) if parallel else {}
    head = head_for(target, tokens=1000, layers=(0, 1), **parts, **parallel)
    save_eagle3(head, tmp_path, model)
    assert load_eagle3(tmp_path).config.sections == parts.get("sections", ())
    pipe = VQAPipeline(model, PROCESSORS[name](), "eagle3", load_for(tmp_path, model, "eagle3"))
    pipe.model.generation_config.eos_token_id = []
    shown = [[noisy((16, 24), 60), noisy((24, 16), 61)], [], [noisy((32, 16), 62)]]
    options = dict(max_new_tokens=12, temperature=0.0)
    asked = (shown, ["what is this", "how many red dog", "where"])
    found = pipe(*asked, method=methods.Eagle3(top_k=20, total=60, depth=1), **options)
    plain = pipe(*asked, method="ar", **options)
    assert found.stats.tau > 1
    for ours, theirs in zip(found.tokens, plain.tokens, strict=True):
        assert torch.equal(ours, theirs)


def spoilt(folder, facts=(), state=None, name="llama"):
    """A copy of a recorded head in ``folder`` with other ``facts`` and weights changed."""
    own = json.loads((PARITY / name / "config.json").read_text())
    for key, value in dict(facts).items():
        nested = own["transformer_layer_config"]
        (nested if key in nested else own)[key] = value
    (folder / "config.json").write_text(json.dumps(own))
    weights = load_file(PARITY / name / "model.safetensors")
    save_file((state or (lambda x: x))(weights), folder / "model.safetensors")
    return folder


def without(*names):
    return lambda state: {k: v for k, v in state.items() if k not in names}


def other(**changes):
    return lambda state: state | {k.replace("__", "."): f(state) for k, f in changes.items()}


BAD_FOLDERS = {
    "no d2t": ({}, without("d2t"), "must hold d2t"),
    "twice": ({}, other(d2t=lambda s: s["d2t"] * 0 - torch.arange(24)), "24 different tokens"),
    "out of range": ({}, other(d2t=lambda s: s["d2t"] + 30), r"tokens in \[0, 40\)"),
    "short d2t": ({}, other(d2t=lambda s: s["d2t"][:20]), "24 different tokens"),
    "other t2d": ({}, other(t2d=lambda s: ~s["t2d"]), "t2d in .* must name the tokens of d2t"),
    "misshapen": (
        {},
        other(fc__weight=lambda s: s["fc.weight"][:, :32].clone()),
        r"fc.weight \[16, 32\]",
    ),
    "missing": ({}, without("norm.weight"), "1 missing: norm.weight"),
    "NaN": ({}, other(norm__weight=lambda s: s["norm.weight"] * torch.nan), "finite weights"),
    "extra": ({}, other(extra=lambda s: torch.ones(1)), "1 unexpected: extra"),
    "no sizes": ({"hidden_size": None}, None, "none for hidden_size"),
    "layers twice": ({"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}, None, "different layers"),
    "before the first": ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, None, "after its first"),
    "sliding": ({"layer_types": ["sliding_attention"]}, None, "have full attention"),
    "rotary": ({"rope_parameters": {"rope_type": "dynamic"}}, None, "rotary positions of type"),
    "vocabulary": ({"draft_vocab_size": 50}, None, "1 to vocab_size 40, got 50"),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, None, "normed once"),
    "another kind": ({"speculators_model_type": "dflash"}, None, "must describe an EAGLE-3 head"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders_are_refused_in_a_sentence(case, tmp_path):
    facts, state, message = BAD_FOLDERS[case]
    if case == "sliding":
        own = json.loads((PARITY / "llama" / "config.json").read_text())
        facts = {"transformer_layer_config": own["transformer_layer_config"] | facts}
    with pytest.raises(ValueError, match=message) as caught:
        load_eagle3(spoilt(tmp_path, facts, state))
    assert "\n" not in str(caught.value)


def test_a_parallel_head_needs_its_mask_token(tmp_path):
    with pytest.raises(ValueError, match="mask token of a head with mask_hidden by mask_token_id"):
        load_eagle3(spoilt(tmp_path, {"mask_token_id": None}, name="peagle"))


def test_heads_of_other_targets_are_refused(tmp_path):
    """Width, vocabulary, layers and dtype."""
    sizes = dict(SIZES, vocab_size=40, hidden_size=16)

    def drafter(name="llama", **changes):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**sizes, **changes}))
        head = load_eagle3(PARITY / name)
        return FeatureDrafter(head, VLMTarget(model, Processor(0), "target"))

    drafter()
    with pytest.raises(ValueError, match="target's width 32, got 16"):
        drafter(hidden_size=32)
    with pytest.raises(ValueError, match="target's vocabulary 50, got 40"):
        drafter(vocab_size=50)
    with pytest.raises(ValueError, match=r"must read layers 0 to 2 of target, got \[1, 2, 3\]"):
        drafter(num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"must say which layers it reads .* target of 6"):
        drafter("safeailab", num_hidden_layers=6)
    head = load_eagle3(PARITY / "llama").half()
    with pytest.raises(ValueError, match=r"dtype torch\.float32, got torch\.float16"):
        FeatureDrafter(head, drafter().target)


def renamed(state):
    """As NeMo writes it: the network under ``model``, with what never counts beside it."""
    extra = {"rotary_emb.inv_freq": torch.ones(4), "verifier_norm.weight": torch.ones(16)}
    outer = ("lm_head.weight", "d2t", "t2d")
    state = state | extra
    return {name if name in outer else f"model.{name}": value for name, value in state.items()}


def tied(state):
    return {k: v for k, v in state.items() if k not in ("lm_head.weight", "d2t", "t2d")}


@torch.inference_mode()
def test_names_and_keys_of_other_writers(tmp_path):
    """Prefixes, positions as transformers 4 wrote them, no vocabulary of its own, tied tables."""
    wanted = load_eagle3(PARITY / "llama")
    own = json.loads((PARITY / "llama" / "config.json").read_text())
    layer = own["transformer_layer_config"]
    flat = {k: v for k, v in layer.items() if k != "rope_parameters"} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": own["draft_vocab_size"],
        "rope_theta": layer["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
    }
    state = load_file(PARITY / "llama" / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(flat))
    save_file(renamed(state), tmp_path / "model.safetensors")
    found = load_eagle3(tmp_path)
    slots = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.logits(found(slots)), wanted.logits(wanted(slots)))
    flat |= {"draft_vocab_size": None, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    save_file(tied(state), tmp_path / "model.safetensors")
    found = load_eagle3(tmp_path)
    assert found.config.whole and torch.equal(found.lm_head.weight, state["embed_tokens.weight"])


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"architectures": ["Eagle3Qwen2_5vlForCausalLM"]}, True),
        ({"architectures": ["Eagle3Qwen3vlForCausalLM"]}, True),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"architectures": ["PEagleDraftModel"]}, True),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, True),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"draft_vocab_size": 32000, "dflash_config": {}}, False),
        ({"speculators_model_type": "dspark", "draft_vocab_size": 32000}, False),
    ],
)
def test_heads_are_known_by_their_config(facts, found):
    assert is_eagle3(facts) == found
