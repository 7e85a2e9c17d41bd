"""Method ``auto`` of real models: what is tried, on whose target, and what runs."""

import dataclasses
import json
import time

import pytest
import torch

import specmm
from specmm import methods
from specmm.choose import contest
from specmm.choose.contest import PLAIN, Candidate, Record
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.hf.answers import choosing
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.image_ar.tokens import choosing as pictures
from specmm.image_ar.tokens.assemble import PictureParts
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.programs import program_cache
from specmm.recipes.drafter import measure_acceptance
from specmm.text.pipeline import TextPipeline
from specmm.vlm.pipeline import VQAPipeline
from tests.commands import as_json, run, succeed
from tests.tiny.chats import undrafted


@pytest.fixture(scope="module")
def parts_and_target():
    torch.manual_seed(0)
    model = Transformer(GPTConfig(32, 2, 2, 24, 36, num_classes=3)).eval()
    head = BlockHead(BlockConfig(3, 2, model.config)).eval()
    return PictureParts({"block": head}), LlamaGenTarget(model, Guidance(1.5), Processor())


def test_acceptance_is_a_distribution_over_ranks(parts_and_target):
    parts, target = parts_and_target
    table = torch.tensor(
        measure_acceptance(parts.head("block"), target, Prompt(torch.tensor([0, 1, 2])), [1, 2, 3])
    )
    assert table.shape == (3, 6)
    assert bool((table >= 0).all()) and bool((table.sum(1) <= 1 + 1e-6).all())
    assert table[0].sum() > 0.3, "an untrained head and an untrained target are both nearly uniform"


def test_pictures_are_drawn_by_trees_of_known_acceptance_and_what_needs_no_drafter(
    parts_and_target,
):
    parts, target = parts_and_target
    known = dataclasses.replace(
        parts, acceptance=((0.5, 0.2),) * 3, taus={"sjd": 2.0}, records={}, made={}
    )
    *trees, jacobi = pictures.exact_candidates(target, known)
    assert [one.nodes for one in trees] == [8, 4, 8, 15], (
        "the usual one, and all that acceptance tells of"
    )
    assert all(len(one.method.tree) == one.nodes for one in trees[1:])
    assert all(one.tau > 1.5 for one in trees)
    assert jacobi == Candidate(methods.SJD(), 2.0, methods.SJD().window + 1)
    greedy = target.with_processor(Processor(0))
    assert pictures.exact_candidates(greedy, known)[-1].tau == 0, "that of drawn pictures"
    unknown = pictures.exact_candidates(target, parts)
    assert [one.method for one in unknown] == [methods.Speculative(), methods.SJD()]
    alone = pictures.exact_candidates(target, PictureParts({}))
    assert [one.method for one in alone] == [methods.SJD()]
    relaxed = dataclasses.replace(known, codebook=torch.randn(target.model.config.vocab_size, 4))
    bounded = methods.Auto("bounded")
    names = {c.method.name for c in pictures.record_of(target, relaxed, 1, bounded).candidates}
    assert names == {"speculative", "sjd", "gsd", "lantern", "lantern++"}


def clocked(monkeypatch, each):
    """Seconds a token of a method are those of ``each``, as far as trials and calls tell."""

    def gain(record, method):
        return each(PLAIN.method) / each(method)

    monkeypatch.setattr(Record, "gain", gain)


def test_of_a_given_drafter_no_acceptance_is_known(make_tiny, tmp_path):
    """What was measured of the model's own says nothing of it."""
    made = make_tiny(tokens=16)
    made.settings = dataclasses.replace(made.settings, acceptance=((0.5,), (0.5,)))
    made.save_pretrained(tmp_path)
    assert specmm.ImagePipeline.from_pretrained(tmp_path).parts.acceptance == ((0.5,), (0.5,))
    for kind, known in {"block": False, "eagle": True}.items():
        given = tmp_path / "drafters" / kind
        pipe = specmm.ImagePipeline.from_pretrained(tmp_path, drafter=given)
        assert bool(pipe.parts.acceptance) == known, kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bounded", "exact"])
def test_auto_takes_relaxed_methods_only_where_it_may(make_tiny, kind, monkeypatch):
    """Where relaxed methods are fastest, by the seconds that they are given here."""
    pipe = make_tiny(tokens=16)
    clocked(monkeypatch, lambda method: 0.1 if method.claims == "bounded" else 1.0)
    out = pipe(
        classes=[0],
        method=methods.Auto(kind),
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
    )
    assert out.method.startswith("auto: ")
    assert out.certificate.kind == kind


def test_a_smaller_last_batch_has_the_choice_of_the_others(make_tiny, monkeypatch):
    pipe = make_tiny(tokens=16)
    clocked(monkeypatch, lambda method: 1.0 if method == PLAIN.method else 0.5)
    monkeypatch.setattr(contest, "SURE", 0.0)
    for _ in range(2):
        out = pipe(classes=[0, 1, 2], method="auto", batch_size=2, output_type="latent")
        assert out.method.startswith("auto: ") and len(out.tokens) == 3
    assert [key[0] for key in pipe.parts.records] == [2]


@pytest.mark.slow
def test_trials_are_no_part_of_the_pictures_seconds(make_tiny, tmp_path, monkeypatch):
    """Those of one batch serve all of a command; here they take two seconds."""
    found = []
    whole = Record.choose

    def choose(record, begin, coming, *rest):
        found.append(coming)
        time.sleep(2)
        return whole(record, begin, coming, *rest)

    monkeypatch.setattr(Record, "choose", choose)
    make_tiny(tokens=16).save_pretrained(tmp_path / "model")
    words = ["generate", str(tmp_path / "model"), "--class", "heart", "-n", "3"]
    words += ["--method", "auto", "--batch-size", "2", "--out", str(tmp_path / "out")]
    said = as_json(*words)
    assert said["method"] == "auto" and said["reason"] and len(said["outputs"]) == 3
    assert found == [2 * 16] and said["seconds"] < 2 <= said["planning_seconds"]
    assert "s, not counted above)" in run(*words).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"certificate": "heuristic"}, "certificate must be one of exact, bounded, got"),
        ({"certificate": "bounded", "tv": 0.0}, "tv must be a total variation a token above 0"),
        ({"certificate": "bounded", "tv": 1.5}, "at most 1, got 1.5"),
        ({"tv": 0.1}, "tv needs certificate bounded"),
    ],
)
def test_wrong_options_of_auto(options, message):
    with pytest.raises(ValueError, match=message):
        methods.Auto(**options)


@pytest.mark.slow
def test_auto_without_a_drafter_decodes_plainly(text_folder, llava_pipe, tmp_path):
    bare = undrafted(text_folder, tmp_path / "bare")
    pipe = TextPipeline.from_pretrained(bare, torch_dtype=torch.float32)
    out = pipe("def add(", method="auto", max_new_tokens=6)
    assert out.method.startswith("auto: ar") and out.certificate.kind == "exact"
    assert out.texts == pipe("def add(", max_new_tokens=6).texts
    alone = VQAPipeline(llava_pipe.model, llava_pipe.processor)
    out = alone([], "What is it?", method="auto", max_new_tokens=4)
    assert out.method.startswith("auto: ar")
    assert out.answers == alone([], "What is it?", max_new_tokens=4).answers


def test_bench_and_plan_of_a_model_without_drafters(make_tiny, tmp_path):
    make_tiny(tokens=16, drafters=False).save_pretrained(tmp_path)
    done = succeed("bench", tmp_path, "-n", "1", "--json")
    assert [row["method"] for row in json.loads(done.stdout)] == ["ar", "sjd"]
    done = succeed("plan", tmp_path, "--json")
    assert json.loads(done.stdout)["choice"] in ("ar", "sjd")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_drafters_there_are_are_tried_and_the_fastest_answers(
    temperature, text_folder, monkeypatch
):
    pipe = TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    taken = methods.DEER(length=2)
    clocked(monkeypatch, lambda method: 0.5 if method == taken else 0.9)
    options = dict(max_new_tokens=12, temperature=temperature, seed=3 if temperature else None)
    run = pipe._start(pipe.options({"method": "auto", **options}), "def add(", share=100.0)
    out = run.finish()
    [record] = pipe.records.values()
    tried = {one.name for one in record.samples}
    assert tried == {"ar", "block", "deer", "suffix"}
    assert record.fastest() == taken
    wanted = pipe("def add(", method=taken, **options)
    assert out[0] == wanted.texts and len(record.samples[taken]) == contest.PASSES + 1


def test_trials_have_targets_of_their_own(text_folder):
    """What one drafter has its target read is read for no other (case 17), nor by the call's."""
    pipe = TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    target = VLMTarget(pipe.model, Processor(0.0))
    prompt = VLMPrompt(padded([pipe.tokenizer("def add(")["input_ids"]]), 6)
    begin = choosing.begin_of(pipe.drafters, target, prompt, pipe.tokenizer)
    found = [methods.Block(length=2), methods.DEER(length=2), PLAIN.method]
    runs = [[*begin(one)][-1].tokens[0, :6].tolist() for one in found * 2]
    assert all(run == runs[0] for run in runs)
    assert target.aux is None and not target.wants_context


def test_a_drafter_that_does_not_fit_is_left_out_unless_it_was_given(text_folder, monkeypatch):
    pipe = TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    target = VLMTarget(pipe.model, Processor(0.0))
    whole = choosing.assemble

    def assemble(method, *rest):
        if method.name == "deer":
            raise ValueError("drafter must fit")
        return whole(method, *rest)

    monkeypatch.setattr(choosing, "assemble", assemble)
    given = (["block", "deer"], pipe.drafters, target, pipe.tokenizer)
    assert {one.method.name for one in choosing.candidates_of(*given)} == {"block"}
    pipe.drafters.passed = frozenset({"deer"})
    with pytest.raises(ValueError, match="must fit"):
        choosing.candidates_of(*given)


def test_small_drafters_are_tried_first_and_each_before_a_second_tree(text_folder):
    pipe = TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    target = VLMTarget(pipe.model, Processor(0.0))
    given = (["deer", "block", "suffix"], pipe.drafters, target, pipe.tokenizer)
    names = [one.method.name for one in choosing.candidates_of(*given)]
    sizes = {
        name: sum(x.numel() for x in choosing.network_of(pipe.drafter(name)).parameters())
        for name in ("deer", "block")
    }
    assert names[:3] == [*sorted(sizes, key=sizes.get), "suffix"]
    assert names.count("block") > 1 and names.count("suffix") == 1


def test_what_was_read_for_another_call_does_not_contend(text_folder):
    pipe = TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    before = choosing.kinds_of(list(methods.TEXT), pipe.drafters)
    assert set(before) == {"block", "deer", "suffix"}
    pipe("def add(", method="text-draft", max_new_tokens=2)
    assert choosing.kinds_of(list(methods.TEXT), pipe.drafters) == before
    given = pipe.drafter("text-draft")
    own = TextPipeline(pipe.model, pipe.tokenizer, "text-draft", given)
    assert set(choosing.kinds_of(list(methods.TEXT), own.drafters)) == {"text-draft", "suffix"}


def test_what_a_plan_measured_is_taken_by_later_processes_in_their_first_call(
    monkeypatch, tmp_path
):
    """As far as notes make a process: no object of the first pipeline is left."""
    monkeypatch.setattr(contest, "RECENT", 60.0)
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path))
    asked, options = "def add(a, b):", dict(temperature=0, max_new_tokens=24)

    def told():
        pipe = TextPipeline.from_pretrained("pocket/coder")
        return pipe, pipe(asked, method="auto", **options)

    pipe, first = told()
    assert "first call, and a short one" in first.method
    pipe, _ = told()
    assert {*pipe.drafters.given} >= {"block", "deer"}, "only plain decoding is known as yet"
    pipe.planned(asked, **options)
    [record] = pipe.records.values()
    taken = record.fastest()
    pipe, later = told()
    assert f"auto: {methods.label(taken)} (measured beside plain decoding" in later.method
    assert {*pipe.drafters.given} <= {taken.name}, "no other was read"
    assert [row.tolist() for row in later.tokens] == [row.tolist() for row in first.tokens]
    pipe(asked, method="auto", **options)
    assert {*pipe.drafters.given} <= {taken.name}, "all others are known, too"
    for file in (tmp_path / f"{program_cache.machine()}-methods").iterdir():
        file.write_text(file.read_text().replace('"complete": true', '"complete": false'))
    pipe, later = told()  # by what the notes of these calls say
    assert all(f"auto: {name}" in later.method for name in pipe.drafters.given)
    pipe(asked, method="auto", **options)
    assert {*pipe.drafters.given} >= {"block", "deer"}, "from the second call on"
