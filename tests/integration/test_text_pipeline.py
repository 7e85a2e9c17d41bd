"""``TextPipeline`` and ``specmm complete`` on a tiny random Qwen2 with every drafter beside it."""

import copy
import io
import itertools
import json
import sys

import pytest
import torch
import transformers as tf
from tokenizers.processors import TemplateProcessing

import specmm
from specmm import methods
from specmm.cli.language import Echo, complete
from specmm.core.processors import Processor
from specmm.diffusion_drafters.models.ddit import DDiT, DDiTConfig, MaskedDDiT
from specmm.hf.drafters.suffix import EarlierAnswers
from specmm.hf.models.target import VLMTarget
from specmm.recipes.dflash import build_block
from tests.commands import run, succeed
from tests.generating import as_generate

DRAFTING = ["diffuspec", "specdiff", "deer", "block", "text-draft", "prompt-lookup"]
DRAFTING += ["suffix", "recycle"]
PROMPTS = ["def add(a, b):\n", "x", "    return a + b + a"]


@pytest.mark.parametrize("method", DRAFTING)
def test_greedy_texts_are_those_of_generate(text_pipe, method):
    out = text_pipe(PROMPTS, method=method, max_new_tokens=14)
    plain = text_pipe(PROMPTS, max_new_tokens=14)
    assert out.texts == plain.texts and out.certificate.kind == plain.certificate.kind == "exact"
    assert out.stats.tau >= 1 and len(out.stats.depths) == out.stats.batch_rounds
    assert out.method == method
    one = text_pipe.tokenizer(PROMPTS[0], return_tensors="pt")
    wanted = text_pipe.model.generate(**one, max_new_tokens=14, do_sample=False)[
        0, one["input_ids"].shape[1] :
    ]
    assert torch.equal(out.tokens[0], wanted)


@pytest.mark.parametrize("method", DRAFTING)
def test_a_row_has_its_own_uniforms_whatever_its_batch(text_pipe, method):
    options = dict(method=method, temperature=1.0, max_new_tokens=10)
    together = text_pipe(PROMPTS, seed=[5, 6, 7], **options)
    for text, prompt, seed in zip(together.texts, PROMPTS, [5, 6, 7], strict=True):
        assert text_pipe(prompt, seed=[seed], **options).texts == [text]


@pytest.mark.parametrize(
    "method",
    [
        methods.DEER(tree=9),
        methods.DEER(length=2),
        methods.Block(tree=6),
        methods.Block(recall=2),
        methods.DEER(recall=1),
        methods.DiffuSpec(least=4, most=4),
        methods.SpecDiff(length=5),
    ],
    ids=str,
)
def test_options_of_methods_keep_greedy_texts(text_pipe, method):
    found = text_pipe(PROMPTS, method=method, max_new_tokens=12).texts
    assert found == text_pipe(PROMPTS, max_new_tokens=12).texts


def test_streams_join_to_the_texts_and_stops_end_them(text_pipe):
    whole = text_pipe(PROMPTS, method="deer", max_new_tokens=16).texts
    parts = list(text_pipe.stream(PROMPTS, method="deer", max_new_tokens=16))
    assert ["".join(row) for row in zip(*parts, strict=True)] == whole
    stop = whole[0][3:6]
    cut = text_pipe(PROMPTS, method="deer", max_new_tokens=16, stop=[stop, "\0"])
    assert cut.texts == [text.split(stop)[0] for text in whole]
    held = list(text_pipe.stream(PROMPTS, method="deer", max_new_tokens=16, stop=stop))
    assert ["".join(row) for row in zip(*held, strict=True)] == cut.texts
    assert len(cut.tokens[0]) < 16


def test_generate_with_drafters_of_text(text_pipe):
    one = text_pipe.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    for method in ("deer", "block", "diffuspec", "specdiff"):
        assert as_generate(text_pipe.model, one, 10, text_pipe.drafter(method), method), method


@pytest.mark.parametrize("method", ["ar", "deer", "prompt-lookup"])
def test_texts_end_generate_as_its_stop_strings_do(text_pipe, method):
    words, model = text_pipe.tokenizer, text_pipe.model
    inputs = words(PROMPTS, return_tensors="pt", padding=True)
    options = dict(max_new_tokens=12, do_sample=False)
    whole = model.generate(**inputs, **options)
    stops = [words.decode(whole[0, -11:-9]), words.decode(whole[1, -9]).strip()]
    wanted = model.generate(**inputs, **options, stop_strings=stops, tokenizer=words)
    assert (wanted != whole).any(1).tolist() == [True, True, False]
    drafter = text_pipe.drafter(method) if method == "deer" else None
    how = specmm.custom_generate(drafter, method, words, stop=stops)
    assert torch.equal(model.generate(**inputs, **options, custom_generate=how), wanted)


def test_texts_that_cannot_end_generate(text_pipe):
    with pytest.raises(ValueError, match="stop needs the model's tokenizer, got none"):
        specmm.custom_generate(stop="a")
    with pytest.raises(ValueError, match="stop must be non-empty texts"):
        specmm.custom_generate(tokenizer=text_pipe.tokenizer, stop=["a", ""])


def test_auto_has_a_record_of_each_batch_size(text_pipe):
    text_pipe(PROMPTS, method="auto", max_new_tokens=12)
    out = text_pipe(PROMPTS, method="auto", max_new_tokens=12)
    assert out.texts == text_pipe(PROMPTS, max_new_tokens=12).texts
    assert out.method.startswith("auto: ")
    [record] = text_pipe.records.values()
    assert {"block", "deer", "suffix"} == {one.method.name for one in record.candidates}
    text_pipe(PROMPTS, method="auto", max_new_tokens=12)
    assert list(text_pipe.records.values()) == [record] and record.calls == 3
    text_pipe(PROMPTS[:1], method="auto", max_new_tokens=12)
    assert len(text_pipe.records) == 2


def test_the_controller_leaves_a_trace(text_pipe):
    out = text_pipe(PROMPTS, method=methods.DiffuSpec(least=2, most=4, step=1), max_new_tokens=12)
    assert len(out.trace) == 3
    assert all(kept <= drafted for row in out.trace for drafted, kept in row)
    assert max(out.stats.depths) <= 5 and len(out.stats.accepted_by_position) >= 4


def mdlm_of(words):
    """An MDLM of random weights that knows ``words``."""
    torch.manual_seed(4)
    network = DDiT(DDiTConfig(len(words), 16, 8, 2, 2, 160))
    for weight in network.requires_grad_(False).parameters():
        weight.normal_(0, 0.3)
    return MaskedDDiT(network, words.mask_token_id, words.eos_token_id)


@pytest.mark.parametrize(
    "kind", ["prompt-lookup", "dream", "mdlm", "diffuspec", "deer", "mdlm as deer", "block"]
)
def test_models_with_learnt_positions_stand_the_last_block(text_pipe, kind):
    """A block drafted close to the end of the target's context reaches beyond it."""
    config = tf.GPT2Config(
        vocab_size=len(text_pipe.tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=24
    )
    torch.manual_seed(2)
    model = tf.GPT2LMHeadModel(config)
    model.generation_config.eos_token_id = 0
    mask = text_pipe.tokenizer.mask_token_id
    method, drafter = {
        "prompt-lookup": ("prompt-lookup", None),
        "dream": ("specdiff", text_pipe.drafter("specdiff")),
        "mdlm": ("specdiff", mdlm_of(text_pipe.tokenizer)),
        "diffuspec": ("diffuspec", text_pipe.drafter("diffuspec")),
        "deer": ("deer", text_pipe.drafter("deer")),
        "mdlm as deer": ("deer", mdlm_of(text_pipe.tokenizer)),
        "block": ("block", build_block(VLMTarget(model, Processor()), 1, 5, mask, read=1)),
    }[kind]
    other = specmm.TextPipeline(model, text_pipe.tokenizer, method, drafter)
    length = 24 - len(other.encode(PROMPTS[0])[0])
    plain = other(PROMPTS[0], method="ar", max_new_tokens=length)
    assert torch.equal(other(PROMPTS[0], max_new_tokens=length).tokens[0], plain.tokens[0])
    with pytest.raises(ValueError, match="24 positions"):
        other(PROMPTS[0], max_new_tokens=length + 1)


def test_complete_prints_and_plots_how_drafting_went(text_folder, tmp_path):
    one = ["-p", PROMPTS[0], "--method", "diffuspec", "--json"]
    one += ["--plot", tmp_path / "a" / "course.png"]
    done = run("complete", text_folder, *one)
    assert (tmp_path / "a" / "course.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(done.stdout)
    wanted = "model method seed seconds tokens rounds tau certificate outputs accepted_by_position"
    wanted += " controller"
    wanted += " drafted_by_round draft_seconds search_seconds verify_seconds"
    assert done.exit_code == 0 and set(wanted.split()) <= set(found)
    assert found["certificate"]["kind"] == "exact"
    done = succeed(
        "complete", text_folder, "-p", "a", "-p", "b", "--method", "deer", "-o", "tree=5"
    )
    assert "accepted by position" in done.stderr and "draft " in done.stderr


@pytest.mark.parametrize("count", [1, 2])  # no round at all, and one whose controller is not told
def test_texts_of_a_token_or_two_are_drawn_too(text_folder, tmp_path, count):
    how = ["-p", PROMPTS[0], "-p", PROMPTS[1]]
    how += f"--method diffuspec --max-new-tokens {count}".split()
    succeed("complete", text_folder, *how, "--plot", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 0


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("course.jpg", r"plot must be a file that ends in \.png, \.pdf or \.svg, got course\.jpg"),
        ("folder.png", r"plot must be a file .*, got a folder"),
        ("folder.png/file/a.png", "cannot write to .* with --plot"),
    ],
)
def test_where_nothing_can_be_drawn_nothing_is_loaded(text_folder, tmp_path, place, message):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "folder.png" / "file").touch()
    with pytest.raises(ValueError, match=message):
        complete("no/such/model", ["a"], plot=tmp_path / place)


def test_a_text_is_not_lost_with_its_picture(text_folder, tmp_path, capsys):
    place = tmp_path / "course.png"
    place.with_suffix(".svg").symlink_to(tmp_path / "gone" / "a.svg")
    with pytest.raises(FileNotFoundError):
        options = dict(max_new_tokens=4, plot=place.with_suffix(".svg"), as_json=True)
        complete(str(text_folder), [PROMPTS[0]], **options)
    assert len(json.loads(capsys.readouterr().out)["outputs"]) == 1


def test_stops_are_not_shown_on_a_terminal(text_pipe, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    whole = text_pipe(PROMPTS[0], max_new_tokens=16).texts[0]
    for stop in (
        [whole[3:8]],
        [whole[-2:] + "\0"],
    ):  # one that comes, one that begins with the last letters
        monkeypatch.setattr("sys.stderr", Terminal())
        options = dict(max_new_tokens=16, stop=stop)
        echo = Echo(text_pipe.stops(text_pipe.options(options)))
        text = text_pipe(PROMPTS[0], echo, **options).texts[0]
        assert sys.stderr.getvalue() == text + "\n"


@pytest.mark.parametrize("method", ["deer", "block", "diffuspec"])
def test_runs_of_one_pipeline_may_go_on_in_turn(text_pipe, method):
    alone = [text_pipe(prompt, method=method, max_new_tokens=12).texts[0] for prompt in PROMPTS[:2]]
    streams = [text_pipe.stream(prompt, method=method, max_new_tokens=12) for prompt in PROMPTS[:2]]
    said = ["", ""]
    for parts in itertools.zip_longest(*streams, fillvalue=[""]):
        said = [text + part[0] for text, part in zip(said, parts, strict=True)]
    assert said == alone


def test_auto_plans_for_the_drafter_it_was_given(text_pipe, text_folder):
    for kind in ("deer", "block"):
        given = text_pipe.drafter(kind)
        pipe = specmm.TextPipeline(text_pipe.model, text_pipe.tokenizer, "auto", given)
        assert pipe(PROMPTS[0], max_new_tokens=24).method == (
            "auto: ar (the first call, and a short one)"
        )
        assert pipe(PROMPTS[0], max_new_tokens=24).method.startswith("auto")
        [record] = pipe.records.values()
        assert record.candidates[0].method.name == kind
        named = specmm.TextPipeline.from_pretrained(
            text_folder, "auto", text_folder / "drafters" / kind
        )
        assert type(named.drafter(kind)) is type(given)


@pytest.mark.parametrize("method", ["block", "ar", "prompt-lookup"])
def test_rounds_tell_what_was_gained_and_drafted(text_pipe, method):
    """Of a run itself: as many tokens as were asked for, and each round's drafts, to the letter."""
    options = dict(method=method, max_new_tokens=24)
    out = text_pipe("def add(", **options)
    rounds = [said for (said,) in text_pipe.rounds("def add(", **options)]
    assert sum(said.tokens for said in rounds) == len(out.tokens[0]) == 24
    assert "".join(said.text for said in rounds) == out.texts[0]
    assert "".join(text for (text,) in text_pipe.stream("def add(", **options)) == out.texts[0]
    drafted = [any(is_draft for _, is_draft in said.pieces) for said in rounds]
    assert drafted == [
        said.tokens > (2 if i == 0 else 1) and method != "ar" for i, said in enumerate(rounds)
    ]


def test_a_prompt_from_a_chat_template_begins_once(text_pipe):
    """Tokenizers such as Llama's begin every text with a mark that templates write, too."""
    words = copy.deepcopy(text_pipe.tokenizer)
    mark = words.bos_token = words.mask_token
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{mark} $A", special_tokens=[(mark, words.mask_token_id)]
    )
    words.chat_template = "{{ bos_token }}{% for turn in messages %}{{ turn.content }}{% endfor %}"
    pipe = specmm.TextPipeline(text_pipe.model, words)
    raw, said = pipe.encode(["a + b", pipe.templated("a + b")])
    assert raw == said == pipe.encode("a + b", chat=True)[0]
    assert raw[0] == words.mask_token_id and words.mask_token_id not in raw[1:]


def test_calls_draft_from_earlier_ones_if_they_are_given(text_pipe):
    kept = type(text_pipe)(text_pipe.model, text_pipe.tokenizer, "suffix", EarlierAnswers())
    plain = text_pipe("def add(", max_new_tokens=30)
    rounds = []
    for _ in range(2):
        out = kept("def add(", max_new_tokens=30)
        assert torch.equal(out.tokens[0], plain.tokens[0])
        rounds.append(out.stats.rounds)
        alone = text_pipe("def add(", method="suffix", max_new_tokens=30)
        assert alone.stats.rounds == rounds[0]
    assert rounds[1] < rounds[0] / 2
