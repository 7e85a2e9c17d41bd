"""Method ``auto``: acceptance measured on a real loop, a plan from real seconds, plain decoding
where it loses.
"""

import dataclasses
import json
import shutil
import time

import pytest
import torch

import specmm
from specmm import methods
from specmm.autotune import plan
from specmm.decode import Progress
from specmm.guidance import Guidance
from specmm.hf import choosing
from specmm.hf.drafting import assemble as assemble_parts
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.image_ar.tokens import choosing as pictures
from specmm.image_ar.tokens.assemble import PictureParts
from specmm.image_ar.tokens.choosing import method_of, planned_for
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.processors import Processor
from specmm.recipes.drafter import measure_acceptance
from specmm.shape.trees import static_tree
from specmm.text.pipeline import TextPipeline
from specmm.vlm.pipeline import VQAPipeline
from tests.commands import as_json, run, succeed


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


def test_a_plan_is_decided_on_the_seconds_it_holds(parts_and_target):
    parts, target = parts_and_target
    known = PictureParts(parts.drafters, acceptance=((0.5, 0.2), (0.5, 0.2), (0.5, 0.2)))
    made = planned_for(target, known, 2)
    costs = made.costs
    assert costs.step > 0 and costs.host > 0 and costs.round(4, 2) > 0
    again = plan(costs, known.acceptance, pictures.candidates(known))
    assert made.shape is None or (made.expected_speedup, made.reason) == (
        again.expected_speedup,
        again.reason,
    )


@pytest.mark.parametrize(("gain", "method"), [(-1.0, methods.SJD()), (10.0, methods.AR())])
def test_without_a_drafter_jacobi_rounds_are_tried(parts_and_target, gain, method, monkeypatch):
    """They are taken where they gained more than the margin, here put below and above whatever they
    gain.
    """
    _, target = parts_and_target
    monkeypatch.setattr(pictures, "MARGIN", gain)
    alone = PictureParts({})
    assert method_of(planned_for(target, alone, 2)) == method
    assert "no block drafter" in planned_for(target, alone, 2).reason
    assert "sjd" in planned_for(target, alone, 2).reason


@pytest.mark.slow
def test_hopeless_drafts_fall_back_and_certain_ones_are_taken(parts_and_target):
    parts, target = parts_and_target
    hopeless = PictureParts(parts.drafters, acceptance=((0.001,), (0.001,), (0.001,)))
    assert method_of(planned_for(target, hopeless, 1)) == methods.AR()
    slow = LlamaGenTarget(
        Transformer(GPTConfig(32, 24, 2, 24, 36, num_classes=3)).eval(), Guidance(), Processor()
    )
    head = BlockHead(BlockConfig(3, 2, slow.model.config)).eval()
    certain = PictureParts({"block": head}, acceptance=((0.99,), (0.99,), (0.99,)))
    chosen = method_of(planned_for(slow, certain, 1))
    assert isinstance(chosen, methods.Speculative), (
        "three sure tokens a round against 24 layers a token"
    )
    assert static_tree(chosen.tree).depth >= 2


def relaxed_race(parts, target, tv):
    """Those left, but for plain decoding, of relaxed methods that may be off by ``tv``."""
    codes = torch.randn(
        target.model.config.vocab_size, 4, generator=torch.Generator().manual_seed(0)
    )
    found = dataclasses.replace(parts, codebook=codes, plans={}, made={})
    others = pictures.serving(pictures.relaxed_methods(), target, found)
    assert {method.name for method in others} == {"gsd", "lantern", "lantern++"}
    race = pictures.Race(target, found, 2, tv)
    race.run(others)
    return race, {method: r for method, r in race.records.items() if method != methods.AR()}


def test_relaxed_methods_leave_a_race_above_the_total_variation_allowed(
    parts_and_target, monkeypatch
):
    monkeypatch.setattr(pictures, "BEHIND", 0.0)
    monkeypatch.setattr(pictures, "PICTURES", 2)
    _, everyone = relaxed_race(*parts_and_target, 1.0)
    measured = {method: record.tv for method, record in everyone.items()}
    assert min(measured.values()) < max(measured.values())
    limit = sorted(measured.values())[len(measured) // 2]
    race, left = relaxed_race(*parts_and_target, limit)
    assert left and left.keys() < measured.keys()
    assert all(record.tv <= limit for record in left.values())
    assert all(len(record.seconds) == pictures.PICTURES for record in left.values())
    for method, record in race.records.items():
        record.seconds = [1.0 + (method == methods.AR())] * pictures.PICTURES
    made = race.plan("as asked")
    assert made.draft_free in left and made.expected_speedup == 2
    assert f"total variation {left[made.draft_free].tv:.3f}" in made.reason


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


def test_what_is_slower_and_no_nearer_leaves_a_race(parts_and_target):
    """What is slower but nearer to the target stays: the limit may exclude the faster one yet."""
    race = pictures.Race(parts_and_target[1], parts_and_target[0], 1, 0.5)
    made = {"ar": (1.0, 0.0), "gsd": (0.9, 0.1), "lantern": (0.5, 0.3), "lantern++": (1.0, 0.4)}
    for name, (seconds, tv) in made.items():
        race.records[methods.resolve(name)] = pictures.Record([seconds], [1.0], tv * 10, 10)
    gains = race.gains()
    leaving = [method.name for method in race.records if race._leaves(method, gains)]
    assert leaving == ["lantern++"]
    race.tv = 0.2
    assert [m.name for m in race.records if race._leaves(m, gains)] == ["lantern", "lantern++"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bounded", "exact"])
def test_auto_takes_relaxed_methods_only_where_it_may(make_tiny, kind, monkeypatch):
    """Where relaxed methods are fastest, by the seconds that they are given here."""
    pipe = make_tiny(tokens=16)
    whole = pictures.Race._draw

    def drawn(race, method, record, i):
        whole(race, method, record, i)
        record.seconds[-1] = 0.1 if method.claims == "bounded" else 1.0

    monkeypatch.setattr(pictures.Race, "_draw", drawn)
    out = pipe(
        classes=[0],
        method=methods.Auto(kind),
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
    )
    assert out.method.startswith("auto: ")
    assert out.certificate.kind == kind


@pytest.fixture
def planned(monkeypatch):
    """How many pictures at a time were planned for; a plan takes two seconds."""
    found = []
    whole = pictures._exact

    def plan(target, parts, batch):
        found.append(batch)
        time.sleep(2)
        return whole(target, parts, batch)

    monkeypatch.setattr(pictures, "_exact", plan)
    return found


@pytest.mark.slow
def test_a_smaller_last_batch_has_the_plan_of_the_others(make_tiny, planned):
    pipe = make_tiny(tokens=16)
    for _ in range(2):
        out = pipe(classes=[0, 1, 2], method="auto", batch_size=2, output_type="latent")
        assert out.method.startswith("auto: ") and len(out.tokens) == 3
    assert planned == [2]


@pytest.mark.slow
def test_planning_is_no_part_of_the_pictures_seconds(make_tiny, tmp_path, planned):
    make_tiny(tokens=16).save_pretrained(tmp_path / "model")
    words = ["generate", str(tmp_path / "model"), "--class", "heart", "-n", "3"]
    words += ["--method", "auto", "--batch-size", "2", "--out", str(tmp_path / "out")]
    said = as_json(*words)
    assert said["method"] == "auto" and said["reason"] and len(said["outputs"]) == 3
    assert planned == [2] and said["seconds"] < 2 <= said["planning_seconds"]
    assert "s, not counted above)" in run(*words).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"certificate": "heuristic"}, "certificate must be exact or bounded"),
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
    bare = shutil.copytree(
        text_folder, tmp_path / "bare", ignore=shutil.ignore_patterns("drafters")
    )
    pipe = TextPipeline.from_pretrained(bare, torch_dtype=torch.float32)
    out = pipe("def add(", method="auto", max_new_tokens=6)
    assert "there is no drafter to plan for" in out.method and out.certificate.kind == "exact"
    assert out.texts == pipe("def add(", max_new_tokens=6).texts
    alone = VQAPipeline(llava_pipe.model, llava_pipe.processor)
    out = alone([], "What is it?", method="auto", max_new_tokens=4)
    assert "there is no drafter to plan for" in out.method
    assert out.answers == alone([], "What is it?", max_new_tokens=4).answers


def test_bench_and_plan_of_a_model_without_drafters(make_tiny, tmp_path):
    make_tiny(tokens=16, drafters=False).save_pretrained(tmp_path)
    done = succeed("bench", tmp_path, "-n", "1", "--json")
    assert [row["method"] for row in json.loads(done.stdout)] == ["ar", "sjd"]
    done = succeed("plan", tmp_path, "--json")
    assert json.loads(done.stdout)["choice"] in ("ar", "sjd")


def test_the_fastest_of_a_race_is_taken_if_it_gains_more_than_noise():
    gains = {methods.Block(length=2): 1.4, methods.DEER(length=3): 1.7}
    made = choosing.fastest(gains)
    assert made.draft_free == methods.DEER(length=3) and made.expected_speedup == 1.7
    assert "1.40x" in made.reason and "1.70x" in made.reason
    slow = {method: gain / 1.65 for method, gain in gains.items()}
    assert choosing.fastest(slow).draft_free is None, "3% is noise"
    assert choosing.fastest({}).draft_free is None


def contenders(pauses, turns, prompt=0.05):
    """Runs of a ``prompt`` of seconds and eight tokens in two rounds, with a pause before each;
    ``turns`` gets their names as they go.
    """

    def contender(name, pause):
        def steps():
            time.sleep(prompt)
            for count in (1, 5, 9):
                time.sleep(pause if count > 1 else 0)
                turns.append(name)
                none = torch.zeros(1)
                yield Progress(none, torch.tensor([count]), torch.tensor([9]), None, none, none)

        return steps

    return [contender(*one) for one in pauses.items()]


def test_contenders_take_turns_and_the_prompt_is_not_counted():
    """Their speed is that of tokens after the first round, the median of the passes."""
    turns = []
    one, other = choosing.raced(contenders({"one": 0.1, "other": 0.1}, turns), passes=3)
    assert turns == (["one"] * 3 + ["other"] * 3) * 3
    assert min(one, other) > 8 / (0.2 + 0.05), "the prompt would make it less"


@pytest.mark.slow
def test_a_contender_that_is_behind_stops_and_a_long_race_ends():
    """It does not even finish its pass; what lasts longer than it is worth has one pass."""
    turns = []
    pauses = {"plain": 0.1, "near": 0.1, "behind": 1.0}
    plain, near, behind = choosing.raced(contenders(pauses, turns), passes=3)
    both = ["plain"] * 3 + ["near"] * 3
    assert turns == [*both, "behind", "behind", *both, *both]
    assert plain > 3 * behind and near > 3 * behind
    turns.clear()
    choosing.raced(contenders({"plain": 0.1, "near": 0.1}, turns), passes=3, worth=8)
    assert turns == both
    turns.clear()
    choosing.raced(contenders({"plain": 0.5, "ahead": 0.1}, turns), passes=3)
    assert turns == ["plain"] * 3 + ["ahead"] * 3, "nothing is left to race with"


@pytest.mark.parametrize("first", ["block", "deer"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_drafters_there_are_contend(first, temperature, text_folder, monkeypatch):
    """Their plans are asked, then they race; what wins answers as plain decoding does."""
    pipe = TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    asked, raced = [], []

    def choose(target, drafter, prompt, plans, method):
        asked.append(method.name)
        return dataclasses.replace(method, length=2)

    def race(contenders, worth):
        assert worth == 6 * choosing.SHARE
        for contender in contenders:
            raced.append(int([*contender()][-1].counts[0]))
        order = [kind for kind in asked if kind in ("block", "deer")]
        return [1.0, *(2.0 if kind == first else 1.5 for kind in order)]

    monkeypatch.setattr(choosing, "choose", choose)
    monkeypatch.setattr(choosing, "raced", race)
    options = dict(max_new_tokens=6, temperature=temperature, seed=3)
    out = pipe("def add(", method="auto", **options)
    assert set(asked) == {"block", "deer"} and out.method.startswith(f"auto: {first_name(first)}(")
    assert raced == [choosing.FEWEST] * 3 and "2.00x" in out.method and "1.50x" in out.method
    assert pipe("def add(", method="auto", **options).texts == out.texts and len(raced) == 3
    assert pipe(
        "def add(", method=methods.make(methods.TEXT, first, length=2), **options
    ).texts == (out.texts)


def test_contenders_have_targets_of_their_own(text_folder, monkeypatch):
    """Each is assembled once, though it runs several times, and the run's own target is left."""
    pipe = TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    target = VLMTarget(pipe.model, Processor(0.0))
    prompt = VLMPrompt(padded([pipe.tokenizer("def add(")["input_ids"]]), 6)
    made, runs = [], []

    def fitting(method, drafters, own, tokenizer):
        made.append(own)
        return assemble_parts(method, own, drafters.get(method.name), tokenizer)

    def raced(contenders, worth):
        runs.extend([*one()][-1].tokens[0, :6].tolist() for one in contenders * 2)
        return [1.0, 2.0, 3.0]

    monkeypatch.setattr(choosing, "fitting", fitting)
    monkeypatch.setattr(choosing, "raced", raced)
    found = [methods.Block(length=2), methods.DEER(length=2)]
    plan = choosing.race(found, pipe.drafters, target, prompt, pipe.tokenizer)
    assert plan.draft_free == found[1] and len(made) == 2
    assert len({id(own) for own in [target, *made]}) == 3
    assert target.aux is None and not target.wants_context
    assert len(runs) == 6 and all(run == runs[0] for run in runs)


def first_name(kind):
    return type(methods.make(methods.TEXT, kind)).__name__


def test_what_was_read_for_another_call_does_not_contend(text_folder):
    pipe = TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    before = choosing.kinds_of(list(methods.TEXT), pipe.drafters)
    assert set(before) == {"block", "deer"}
    pipe("def add(", method="text-draft", max_new_tokens=2)
    assert choosing.kinds_of(list(methods.TEXT), pipe.drafters) == before
    given = pipe.drafter("text-draft")
    own = TextPipeline(pipe.model, pipe.tokenizer, "text-draft", given)
    assert choosing.kinds_of(list(methods.TEXT), own.drafters) == ["text-draft"]


@pytest.mark.slow
def test_what_jacobi_drafts_cost_here_is_compared_with_the_drafters_trees(parts_and_target):
    """By the tau that was measured, which is so high that no noise in the seconds of rounds, which
    are real, can turn the order.
    """
    parts, target = parts_and_target
    known = PictureParts(parts.drafters, acceptance=((0.5, 0.2),) * 3, taus={"sjd": 20.0})
    made = planned_for(target, known, 2)
    assert method_of(made) == methods.SJD() and made.expected_tau == 20.0
    assert made.candidates[-1].choice == methods.SJD()
    assert made.costs.rounds.keys() == {methods.SJD()}
    greedy = target.with_processor(Processor(0))
    assert planned_for(greedy, known, 1).draft_free is None
