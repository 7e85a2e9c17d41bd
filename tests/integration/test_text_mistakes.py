"""What a text drafter cannot be or do is refused in a sentence; what merely goes badly changes no
token.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import specmm
from recipes.training.coder import build_tokenizer
from specmm import methods
from specmm.core.decode import decode, decode_plain
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.diffusion_drafters.assemble import Diffusion
from specmm.diffusion_drafters.diffusion_chains import DiffuSpecDrafter
from specmm.diffusion_drafters.models.diffusion_lms import FullAttention
from specmm.hf.drafters.drafting import load_drafter
from specmm.hf.drafters.small_model import SmallModel
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.recipes.diffusion import fit_proxy
from specmm.verify import Recursive
from tests.generating import as_generate

GREEK = "αβγδεζηθικλμνξοπρστυφχψω" * 4
TEXT = "def bdd(b, b):\n    return b + b\n" * 9
PROMPTS = ["def add(a, b):\n", "x", "    return a + b + a"]


def changed(text_folder, place, into, **facts):
    """A copy of a drafter with other facts in its config."""
    shutil.copytree(text_folder / "drafters" / place, into)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(
        json.dumps({k: v for k, v in (config | facts).items() if v is not ...})
    )
    return into


class Ends:
    """A streamer that counts how often it hears of the end."""

    def __init__(self):
        self.ends = 0

    def put(self, value):
        pass

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("prompts", ["x", "", ["x", "y"]])
def test_a_streamer_hears_of_one_end_whatever_happens(text_pipe, prompts):
    streamer = Ends()
    if prompts == "x":
        text_pipe(prompts, streamer, max_new_tokens=4)
    else:
        with pytest.raises(ValueError, match=r"must not be empty|takes one answer at a time"):
            text_pipe(prompts, streamer, max_new_tokens=4)
    assert streamer.ends == 1


@pytest.mark.parametrize(
    ("place", "facts", "message"),
    [
        ("deer", {"mask_token_id": ...}, r"got \['mask_token_id'\]"),
        ("deer", {"mask_token_id": 9999}, "mask token must be one of"),
        ("deer", {"block_size": 0}, "block_size must be at least 1, got 0"),
        ("deer", {"target_fingerprint": "0" * 12}, "must be of this target"),
        ("block", {"target_fingerprint": "0" * 12}, "must be of this target"),
        ("block", {"dflash_config": {"target_layer_ids": [0, 1]}}, "got no mask_token_id"),
        ("diffusion", {"mask_token_id": ...}, "mask token must be one of"),
        (
            "diffusion",
            {"model_type": "bert"},
            "got a language model in .*, which is for text-draft",
        ),
    ],
)
def test_drafters_that_cannot_be(text_folder, text_pipe, tmp_path, place, facts, message):
    kind = {"diffusion": "diffuspec"}.get(place, place)
    with pytest.raises(ValueError, match=message):
        load_drafter(kind, changed(text_folder, place, tmp_path / place, **facts), text_pipe.model)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt must not be empty"),
        ([], {}, "prompt must not be empty"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ("a", {"max_new_tokens": 500}, "160 positions"),
        ("a", {"max_new_tokens": 155, "method": "deer"}, "fit the drafter's 160 positions"),
        (["a", "b"], {"seed": [1]}, "each of the 2 samples, got 1"),
        ("a", {"stop": [""]}, "stop must be non-empty texts"),
        ("a", {"chat": True}, "chat template"),
        ("a", {"method": "deeer"}, "did you mean 'deer'"),
        ("a", {"temprature": 1}, "did you mean 'temperature'"),
        ("a", {"do_sample": True}, "unknown option 'do_sample' of generate; give temperature"),
        ("a", {"max_time": 1}, "of generate; give stopping_criteria=\\[transformers.MaxTime"),
        ("a", {"generator": []}, "one for each of the 1 samples, got 0"),
        ("a", {"method": 3}, r"such as specmm.methods.AR\(\), got 3"),
        ("a", {"streamer": 64}, "streamer must have put and end, .* got 64; give options by name"),
        ("a" * 200, {}, r"max_new_tokens 64; shorten one of them$"),
        ("a", {"method": methods.SpecDiff(length=0)}, "length must be at least 1"),
        ("a", {"method": methods.SpecDiff(length=1)}, "at least 2, a draft of each forward"),
        ("a", {"method": methods.DiffuSpec(least=0)}, "least"),
        ("a", {"method": methods.DiffuSpec(most=0)}, "least <= most"),
        ("a", {"method": methods.DEER(length=9)}, "at most the drafter's 5"),
        ("a", {"method": methods.DEER(length=-1)}, "at least 1"),
        ("a", {"method": methods.Block(tree=1)}, "at least 2 nodes"),
        (
            "a",
            {"method": methods.Block(tree=4, recall=2)},
            "recall must be 0 with a tree, got tree 4 and recall 2",
        ),
    ],
)
def test_calls_that_cannot_be(text_pipe, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        text_pipe(prompt, **options)


def test_a_model_without_drafters(text_folder, tmp_path):
    for file in text_folder.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    bare = specmm.TextPipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    with pytest.raises(ValueError, match="has none in drafters/deer"):
        bare("a", method="deer")
    given = specmm.TextPipeline.from_pretrained(
        tmp_path, "deer", text_folder / "drafters" / "deer", torch.float32
    )
    assert given("a", max_new_tokens=4).texts == bare("a", max_new_tokens=4).texts
    with pytest.raises(ValueError, match="needs a DFlash drafter"):
        specmm.TextPipeline(bare.model, bare.tokenizer, "block", given.drafter("deer"))("a")
    with pytest.raises(ValueError, match="must hold a causal language model"):
        specmm.TextPipeline.from_pretrained(text_folder / "drafters" / "deer")


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer", None])
def test_a_model_without_a_vocabulary(text_folder, tmp_path, kind):
    """transformers makes an empty tokenizer of some, to which every text is the same."""
    shutil.copytree(text_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    file = tmp_path / "tokenizer_config.json"
    if kind is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": kind}))
    with pytest.raises(ValueError, match=r"a tokenizer with its vocabulary, got no tokenizer.json"):
        specmm.TextPipeline.from_pretrained(tmp_path)


def test_a_model_of_one_layer_answers(text_pipe, make_qwen2):
    words = text_pipe.tokenizer
    pipe = specmm.TextPipeline(make_qwen2(len(words), 3, layers=1), words)
    plain = pipe(PROMPTS, max_new_tokens=40)
    assert pipe(PROMPTS, max_new_tokens=40, method="auto").texts == plain.texts


def test_the_method_of_custom_generate_is_that_of_its_drafter(text_pipe, make_qwen2):
    one = text_pipe.tokenizer(PROMPTS[0], return_tensors="pt")
    options = dict(max_new_tokens=12, do_sample=False)
    wanted = text_pipe.model.generate(**one, **options)
    drafter = text_pipe.drafter("block")
    drafted = []
    hooks = [m.register_forward_hook(lambda *call: drafted.append(1)) for m in drafter.modules()]
    fn = specmm.custom_generate(drafter)
    found = text_pipe.model.generate(**one, **options, custom_generate=fn)
    for hook in hooks:
        hook.remove()
    assert torch.equal(found, wanted) and drafted
    for untold in (3, make_qwen2(len(text_pipe.tokenizer), 3)):
        with pytest.raises(ValueError, match=r"method for drafter .* is unknown; give it, too"):
            specmm.custom_generate(untold)


def test_other_tokenizers_draft_what_both_know_or_are_refused(text_pipe, make_qwen2):
    own = build_tokenizer([TEXT], 275)
    lm = FullAttention(make_qwen2(len(own), 3), own.mask_token_id, own.eos_token_id, shift=1)
    some = specmm.TextPipeline(text_pipe.model, text_pipe.tokenizer, "specdiff", Diffusion(lm, own))
    assert some(PROMPTS, max_new_tokens=10).texts == text_pipe(PROMPTS, max_new_tokens=10).texts
    alike = some(PROMPTS, max_new_tokens=6, temperature=1.0, seed=1)
    assert alike.certificate.kind == "exact"
    foreign = specmm.TextPipeline(
        text_pipe.model, text_pipe.tokenizer, "specdiff", Diffusion(lm, _Words(GREEK))
    )
    with pytest.raises(ValueError, match="share at least 5%"):
        foreign(PROMPTS, max_new_tokens=4)
    no_proxy = specmm.TextPipeline(text_pipe.model, text_pipe.tokenizer, "diffuspec", lm)
    with pytest.raises(ValueError, match="specmm train proxy"):
        no_proxy(PROMPTS[0])


def test_a_drafter_with_a_tokenizer_asks_for_the_targets(text_pipe, make_qwen2):
    own = build_tokenizer([TEXT], 275)  # sizes that differ like padded ones, yet other tokens
    lm = FullAttention(make_qwen2(len(own), 3), own.mask_token_id, own.eos_token_id, shift=1)
    small = SmallModel(make_qwen2(len(own), 3), own)
    one = text_pipe.tokenizer(PROMPTS[0], return_tensors="pt")
    for drafter, method in ((Diffusion(lm, own), "specdiff"), (small, "text-draft")):
        with pytest.raises(ValueError, match="needs the target's, got none; give tokenizer="):
            as_generate(text_pipe.model, one, 6, drafter, method)
        assert as_generate(text_pipe.model, one, 6, drafter, method, text_pipe.tokenizer)


def test_one_tokenizer_serves_models_of_other_padding(text_pipe, make_qwen2):
    words = text_pipe.tokenizer
    wide = make_qwen2(len(words) + 900, 3)
    for drafter, method in (
        (Diffusion(FullAttention(wide, words.mask_token_id, 0, shift=1), words), "specdiff"),
        (SmallModel(wide, words), "text-draft"),
    ):
        pipe = specmm.TextPipeline(text_pipe.model, words, method, drafter)
        assert pipe(PROMPTS, max_new_tokens=8).texts == text_pipe(PROMPTS, max_new_tokens=8).texts


def test_a_proxy_of_other_tokens_is_refused(text_pipe):
    model, words = text_pipe.drafter("diffuspec").model, text_pipe.tokenizer
    padded_one = Diffusion(model, proxy=fit_proxy([[1, 2, 3]], len(words) + 9))
    pipe = specmm.TextPipeline(text_pipe.model, words, "diffuspec", padded_one)
    assert pipe(PROMPTS, max_new_tokens=6).texts == text_pipe(PROMPTS, max_new_tokens=6).texts
    pipe = specmm.TextPipeline(
        text_pipe.model, words, "diffuspec", Diffusion(model, proxy=fit_proxy([[1, 2, 3]], 1000))
    )
    said = r"of the target's \d+ tokens, got one of 1000; make one with"
    with pytest.raises(ValueError, match=said):
        pipe(PROMPTS)


class _Words:
    """A tokenizer that knows other letters only."""

    def __init__(self, letters):
        self.letters = dict.fromkeys(letters)

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(self.letters)}

    def encode(self, text, **_):
        return []


class _Says:
    """A source whose every position says the same ``row`` of logits [V]."""

    longest, follow = None, None

    def __init__(self, target, row, end):
        self.target, self.row, self.end = target, row, end

    def begin(self, feedback, most):
        pass

    def logits(self, feedback, block):
        return self.row.expand(len(feedback.token), block, -1)

    def latest(self, row, count):
        return []


@pytest.mark.parametrize("says", ["nothing but the end", "nothing at all"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_blocks_without_a_word(text_pipe, says, temperature):
    """All-end blocks draft the end alone, an empty lattice drafts nothing; no token changes."""
    size, end = len(text_pipe.tokenizer), text_pipe.tokenizer.eos_token_id
    row = torch.full((size,), float("-inf"))
    if says == "nothing but the end":
        row[end] = 0.0
    prompt = VLMPrompt(padded(text_pipe.encode(PROMPTS), "cpu"), 8)
    target = VLMTarget(text_pipe.model, Processor(temperature))
    drafter = DiffuSpecDrafter(
        _Says(target, row, end), fit_proxy([[1, 2, 3]], size), least=2, most=4
    )
    *_, got = decode(target, drafter, Recursive(), prompt, 8, Uniforms.from_seeds([1, 2, 3]))
    assert all(drafted == 0 for r in drafter.rows for drafted, _ in r.trace)
    if temperature == 0:
        *_, plain = decode_plain(target, prompt, 8, Uniforms.from_seeds([1, 2, 3]))
        assert torch.equal(got.tokens[:, :8], plain.tokens[:, :8])
        wanted = {"nothing but the end": 1, "nothing at all": 0}[says]
        assert set(got.stats.depths) == {wanted}


def test_weights_that_are_missing_or_broken(text_folder, text_pipe, tmp_path):
    place = changed(text_folder, "deer", tmp_path / "deer")
    state = load_file(place / "model.safetensors")
    lost = {k: v for k, v in state.items() if k != "model.norm.weight"}
    save_file(lost, place / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_drafter("deer", place, text_pipe.model)
    state["model.norm.weight"][0] = float("nan")
    save_file(state, place / "model.safetensors")
    with pytest.raises(ValueError, match=r"NaN|infinite|finite"):
        load_drafter("deer", place, text_pipe.model)
