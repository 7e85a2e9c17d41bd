"""Speculative Verdict on tiny random VLMs: its scores against one forward an answer, ties, prompts,
who is heard.
"""

import warnings

import pytest
import torch
import transformers as tf

from recipes.scenes.tokenizer import build_processor, build_tokenizer
from specmm.hf.drafters.drafting import load_drafter
from specmm.vlm import verdict
from specmm.vlm.pipeline import VQAPipeline
from specmm.vlm.verdict import SpeculativeVerdict, VerdictPrompts, best, consensus, log_perplexities
from tests.noisy import noisy
from tests.tiny.parts import CLIP, SIZES, shaken

WORDS = (
    "question : answer what is it a red green dog cat house expert reasoning think step by the "
    "picture shows then"
)
QUESTION = "what is it"


@pytest.fixture(scope="module")
def processor():
    return build_processor(build_tokenizer([WORDS] * 3, 120), 8, 4)


@pytest.fixture(scope="module")
def experts(processor):
    return [expert(processor, seed) for seed in range(4)]


def expert(processor, seed):
    vocabulary = len(processor.tokenizer)
    config = tf.LlavaConfig(
        vision_config=CLIP | SIZES,
        text_config=SIZES
        | dict(model_type="llama", vocab_size=vocabulary, max_position_embeddings=512),
        image_token_index=processor.tokenizer.convert_tokens_to_ids(processor.image_token),
        image_seq_length=4,
    )
    torch.manual_seed(seed)
    model = shaken(tf.LlavaForConditionalGeneration(config), std=0.2)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    return VQAPipeline(model, processor)


@pytest.fixture
def picture():
    return noisy((8, 8), 90).convert("RGB")


def naive(expert, picture, prompt, answer):
    """Mean −ln p of the answer's tokens, token by token, one forward each."""
    from specmm.vlm.asking import Questions

    inputs = Questions.of(picture, prompt).inputs(expert.processor)
    ids = (
        expert.processor.tokenizer.encode(f" {answer}", add_special_tokens=False) if answer else []
    )
    total, seen = 0.0, inputs["input_ids"]
    for token in ids or [expert.processor.tokenizer.eos_token_id]:
        with torch.no_grad():
            logits = expert.model(input_ids=seen, pixel_values=inputs["pixel_values"]).logits[0, -1]
        total -= float(logits.double().log_softmax(-1)[token])
        seen = torch.cat([seen, torch.tensor([[token]])], 1)
    return total / max(len(ids), 1)


def test_the_score_matrix_is_the_naive_one(experts, picture):
    answers = ["a red dog", "cat", "", "a red dog", "the green house then"]
    verdict = SpeculativeVerdict(experts, experts[0])
    table = verdict.score(picture, QUESTION, answers)
    prompt = verdict.prompts.score.format(question=QUESTION)
    expected = torch.tensor([[naive(e, picture, prompt, a) for a in answers] for e in experts])
    torch.testing.assert_close(table, expected, rtol=1e-4, atol=1e-4)


def test_consensus_is_the_paper_s_sum():
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for a in range(4):
        expected = sum(abs(float(table[b, a] - table[b, b])) for b in range(4) if b != a)
        assert float(consensus(table)[a]) == pytest.approx(expected, rel=1e-5)


def test_ties_are_broken_by_the_seed_alone():
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0])
    drawn = {tuple(best(scores, 2, torch.Generator().manual_seed(seed))) for seed in range(50)}
    assert drawn == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b}
    assert best(scores, 4, torch.Generator().manual_seed(1))[-1] == 0
    assert best(scores, 2, torch.Generator().manual_seed(7)) == best(
        scores, 2, torch.Generator().manual_seed(7)
    )


def test_the_verdict_model_is_told_what_the_best_said(experts, picture):
    told = []

    class Judge(VQAPipeline):
        def __call__(self, images, questions, **options):
            told.append(questions)
            return super().__call__(images, questions, **options)

    judge = Judge(experts[0].model, experts[0].processor)
    rule = SpeculativeVerdict(experts, judge, hear=2)
    ruling = rule(picture, QUESTION, max_new_tokens=5, reason_tokens=6, seed=3)
    assert len(ruling.answers) == 4 and len(ruling.heard) == len(ruling.reasons) == 2
    chosen = ruling.scores[ruling.heard]
    assert float(chosen.max()) <= min(
        float(s) for i, s in enumerate(ruling.scores) if i not in ruling.heard
    )
    torch.testing.assert_close(ruling.scores, consensus(ruling.log_perplexities))
    assert all(ruling.answers[i] in told[0] for i in ruling.heard)
    assert all(r in told[0] for r in ruling.reasons)
    again = rule(picture, QUESTION, max_new_tokens=5, reason_tokens=6, seed=3)
    wanted = (ruling.answer, ruling.heard, ruling.answers)
    assert (again.answer, again.heard, again.answers) == wanted


def test_equal_answers_are_scored_once(experts, picture, monkeypatch):
    counts = []
    monkeypatch.setattr(
        verdict,
        "log_perplexities",
        lambda e, i, p, a: counts.append(len(a)) or log_perplexities(e, i, p, a),
    )
    table = SpeculativeVerdict(experts, experts[0]).score(
        picture, QUESTION, ["cat"] * 3 + ["a dog"]
    )
    assert counts == [2] * 4 and torch.equal(table[:, 0], table[:, 2])


def test_experts_of_a_folder_are_asked_in_their_own_words(experts, picture, tmp_path):
    for i, one in enumerate(experts[:2]):
        one.model.save_pretrained(tmp_path / str(i))
        one.processor.save_pretrained(tmp_path / str(i))
    load = lambda: load_drafter("verdict", tmp_path, experts[0].model)  # noqa: E731
    assert load().prompts == VerdictPrompts()
    words = {
        "score": "{question}",
        "expert": "{number}. {answer}",
        "verdict": "{experts} {question}",
    }
    VerdictPrompts(**words).save(tmp_path)
    found = SpeculativeVerdict(load(), experts[0])
    assert found.prompts == VerdictPrompts(**words) and not found.prompts.reasoned
    assert VerdictPrompts(expert="{answer} {reasoning!s}").reasoned
    assert not VerdictPrompts(expert="{{reasoning}} {answer}").reasoned
    ruling = found(picture, QUESTION, max_new_tokens=3)
    assert ruling.reasons == [] and len(ruling.heard) == 2, (
        "nobody is asked for reasons that are not passed on"
    )
    for wrong in ('{"score": 1', '{"scores": "{question}"}', '{"score": "what?"}', "[]"):
        (tmp_path / "prompts.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"prompts\.json must hold texts"):
            load()


def test_mistakes_are_named(experts):
    with pytest.raises(ValueError, match="at least 2 models, got 1"):
        SpeculativeVerdict(experts[:1], experts[0])
    with pytest.raises(ValueError, match=r"hear must be in \[1, 4\] \(the experts\), got 5"):
        SpeculativeVerdict(experts, experts[0], hear=5)
    said = r"prompt 'verdict' must use \['experts', 'question'\], got \['question'\]"
    with pytest.raises(ValueError, match=said):
        VerdictPrompts(verdict="{question}")


def test_a_seed_breaks_ties_without_a_temperature(experts, picture, monkeypatch):
    """So it changes something there, and no model of several says that it does not."""
    seen = []
    monkeypatch.setattr(verdict, "best", lambda s, n, g: seen.append(g.initial_seed()) or [0, 1])
    given = verdict.Experts(experts[:2])
    given.prompts = VerdictPrompts("{question}", expert="{answer}", verdict="{experts} {question}")
    pipe = VQAPipeline(experts[0].model, experts[0].processor, "verdict", given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(picture, QUESTION, seed=5, max_new_tokens=3)
        assert seen == [5]
        with pytest.raises(UserWarning, match="top_p changes nothing at temperature 0"):
            pipe(picture, QUESTION, top_p=0.5, max_new_tokens=3)
