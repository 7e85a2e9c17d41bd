"""Logits processors and stopping criteria that keep something from call to call hear what generate
would tell them, whatever is drafted; what cannot be copied is refused.
"""

import threading
from functools import partial

import pytest
import torch
import transformers as tf

import specmm
from specmm.hf.prompts.path_processors import PathProcessor
from tests.tiny.saying import saying

LETTERS = "abcdefghij"
ROWS = [
    "a c e g i b d f h j a d g",
    "h e b i f c j g d a h c f",
]  # after which the model says otherwise
LENGTH = 24


@pytest.fixture(scope="module")
def made():
    return saying(LETTERS)


def answers(made, method, rows=ROWS, **options):
    model, words = made
    inputs = words(rows, return_tensors="pt")
    given = dict(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    if method is not None:
        options["custom_generate"] = specmm.custom_generate(method=method)
    return model.generate(**given, max_new_tokens=LENGTH, do_sample=False, **options)


class Budget(tf.LogitsProcessor):
    """The token ``end`` after so many tokens, counted by calls."""

    def __init__(self, budget=9, end=5):
        self.budget, self.end, self.made = budget, end, 0

    def __call__(self, ids, scores):
        self.made += 1
        if self.made == self.budget:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, self.end] = 0
        return scores


class Heard(tf.LogitsProcessor):
    """Forbids the letter that it has heard most, by row; it looks at the last one only."""

    def __init__(self):
        self.counts = torch.zeros(2, 16)

    def __call__(self, ids, scores):
        for row, last in enumerate(ids[:, -1].tolist()):
            self.counts[row, last] += 1
        scores[torch.arange(len(ids)), self.counts[: len(ids)].argmax(-1)] = -torch.inf
        return scores


class Shy(tf.StoppingCriteria):
    """Ends a row when it has been asked so often."""

    def __init__(self):
        self.asked = 0

    def __call__(self, ids, scores, **kwargs):
        self.asked += 1
        return torch.full((len(ids),), self.asked == 17)


class Allowed:
    """The next letters, of which every fifth call leaves one alone."""

    def __init__(self):
        self.calls = 0

    def __call__(self, row, ids):
        self.calls += 1
        return after(self.calls)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "two"])
@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
@pytest.mark.parametrize(
    "options",
    [
        lambda: dict(logits_processor=[Budget()]),
        lambda: dict(logits_processor=[Heard(), Budget()], repetition_penalty=1.1),
        lambda: dict(stopping_criteria=[Shy()]),
    ],
    ids=["a budget", "two of them", "criteria"],
)
def test_tokens_are_those_of_generate(made, rows, method, options):
    wanted = answers(made, None, rows, **options())
    assert torch.equal(answers(made, method, rows, **options()), wanted)
    assert not torch.equal(wanted, answers(made, None, rows))


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "two"])
def test_what_is_sampled_is_counted_as_it_is_kept(made, rows):
    """Many drafts of a warm model are rejected, and none of these counts."""
    model, words = made
    inputs = words(rows, return_tensors="pt")["input_ids"]
    fn = specmm.custom_generate(generator=torch.Generator().manual_seed(0))
    for _ in range(12):
        given = dict(max_new_tokens=LENGTH, min_new_tokens=9, do_sample=True, temperature=4.0)
        out = model.generate(inputs, logits_processor=[Budget()], custom_generate=fn, **given)
        assert out[:, inputs.shape[1] + 8].eq(5).all()
    assert fn.last.stats.tau > 1.1


def after(calls):
    """The next letters, of which every fifth call leaves one alone."""
    return [4] if calls % 5 == 0 else list(range(3, 13))


def in_a_list():
    calls = []
    return lambda row, ids: calls.append(row) or after(len(calls))


def in_a_variable():
    calls = 0

    def allowed(row, ids):
        nonlocal calls
        calls += 1
        return after(calls)

    return allowed


def in_a_default():
    return lambda row, ids, calls=[]: calls.append(row) or after(len(calls))


def in_another():
    count = in_a_list()
    return lambda row, ids: count(row, ids)


def nowhere():
    letters = list(range(3, 9))
    return lambda row, ids: letters


FUNCTIONS = [Allowed, in_a_list, in_a_variable, in_a_default, in_another, nowhere]


@pytest.mark.parametrize("allowed", FUNCTIONS)
def test_a_function_that_says_what_may_come_may_remember(made, allowed):
    wanted = answers(made, None, ROWS[:1], prefix_allowed_tokens_fn=allowed())
    found = answers(made, "prompt-lookup", ROWS[:1], prefix_allowed_tokens_fn=allowed())
    assert torch.equal(found, wanted)
    assert not torch.equal(wanted, answers(made, None, ROWS[:1]))


COUNTS = {"calls": 0}


class Counter:
    def __init__(self):
        self.calls = 0

    def count(self):
        self.calls += 1
        return self.calls

    def allowed(self, row, ids):
        return after(self.count())


COUNTER = Counter()


def counted():
    """A helper, whose own globals remember."""
    COUNTS["calls"] += 1
    return COUNTS["calls"]


def in_a_closure_of_a_class():
    calls = []

    class Closed(tf.LogitsProcessor):
        def __call__(self, ids, scores):
            calls.append(len(ids))
            return left(scores, len(calls))

    return [Closed()]


def in_a_helpers_globals():
    class Helped(tf.LogitsProcessor):
        def __call__(self, ids, scores):
            return left(scores, counted())

    COUNTS["calls"] = 0
    return [Helped()]


def in_a_global_object():
    class Global(tf.LogitsProcessor):
        def __call__(self, ids, scores):
            return left(scores, COUNTER.count())

    COUNTER.calls = 0
    return [Global()]


def in_a_method_of_its_class():
    class Classed(tf.LogitsProcessor):
        counter = Counter()

        def __call__(self, ids, scores):
            return left(scores, self.counter.count())

    return [Classed()]


def in_a_partial():
    return partial(lambda calls, row, ids: calls.append(row) or after(len(calls)), [])


def in_a_partials_closure():
    return partial(in_a_list())


def in_a_bound_method():
    return Counter().allowed


def in_two_functions():
    """Of one variable, which one counts and the other reads."""
    calls = 0

    def count():
        nonlocal calls
        calls += 1

    def allowed(row, ids):
        count()
        return after(calls)

    return allowed


def left(scores, calls):
    """The ``scores`` of the letters that are left after so many calls."""
    kept = torch.full_like(scores, -torch.inf)
    kept[:, after(calls)] = scores[:, after(calls)]
    return kept


COPIED = [in_a_partial, in_a_partials_closure, in_a_bound_method, in_two_functions]
ELSEWHERE = [
    in_a_closure_of_a_class,
    in_a_helpers_globals,
    in_a_global_object,
    in_a_method_of_its_class,
]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "two"])
@pytest.mark.parametrize("allowed", COPIED)
def test_what_is_held_by_functions_is_copied(made, rows, allowed):
    wanted = answers(made, None, rows, prefix_allowed_tokens_fn=allowed())
    found = answers(made, "prompt-lookup", rows, prefix_allowed_tokens_fn=allowed())
    assert torch.equal(found, wanted)
    assert not torch.equal(wanted, answers(made, None, rows))
    model, words = made
    ids = words(rows[:1], return_tensors="pt")["input_ids"]
    fn = specmm.custom_generate(generator=torch.Generator().manual_seed(0))
    given = dict(max_new_tokens=LENGTH, do_sample=True, temperature=4.0, custom_generate=fn)
    out = model.generate(ids, prefix_allowed_tokens_fn=allowed(), **given)[0, ids.shape[1] :]
    assert out[4::5].eq(4).all(), "drafts that were rejected count nothing"


@pytest.mark.parametrize("processors", ELSEWHERE)
def test_what_is_kept_elsewhere_is_told_what_generate_tells_or_refused(made, processors):
    """A greedy row is asked about what is kept alone; others would hear more."""
    wanted = answers(made, None, ROWS[:1], logits_processor=processors())
    found = answers(made, "prompt-lookup", ROWS[:1], logits_processor=processors())
    assert torch.equal(found, wanted)
    assert not torch.equal(wanted, answers(made, None, ROWS[:1]))
    with pytest.raises(ValueError, match=r"in their attributes, .* got it elsewhere in"):
        answers(made, "prompt-lookup", logits_processor=processors())
    fn = specmm.custom_generate(method="prompt-lookup")
    ids = made[1](ROWS[:1], return_tensors="pt")["input_ids"]
    with pytest.raises(ValueError, match=r"in their attributes, .* got it elsewhere in"):
        made[0].generate(
            ids, do_sample=True, logits_processor=processors(), custom_generate=fn, max_new_tokens=9
        )


def shy(count):
    class Closed(tf.StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return torch.full((len(ids),), count() == 17)

    return [Closed()]


def test_criteria_that_count_elsewhere_end_one_row_as_generate_does(made):
    wanted = answers(made, None, ROWS[:1], stopping_criteria=shy(Counter().count))
    found = answers(made, "prompt-lookup", ROWS[:1], stopping_criteria=shy(Counter().count))
    assert torch.equal(found, wanted) and wanted.shape[1] < LENGTH + 13
    with pytest.raises(ValueError, match="criteria must keep what they remember in their attrib"):
        answers(made, "prompt-lookup", stopping_criteria=shy(Counter().count))


def test_the_callers_processor_has_heard_no_draft(made):
    """It is copied, also by plain decoding's rounds: a second call is as the first."""
    budget = Budget()
    first = answers(made, "prompt-lookup", logits_processor=[budget])
    assert budget.made == 0
    assert torch.equal(answers(made, "prompt-lookup", logits_processor=[budget]), first)


def test_nothing_is_asked_below_a_token_that_may_not_come(made):
    asked = []

    class Asked(tf.LogitsProcessor):
        def __call__(self, ids, scores):
            asked.append(tuple(ids[0].tolist()))
            return scores

    out = answers(made, "prompt-lookup", ROWS[:1], logits_processor=[Asked()])[0].tolist()
    within = [list(ids) for ids in asked if len(ids) <= len(out)]
    odd = [ids for ids in within if ids != out[: len(ids)]]
    assert len(asked) > LENGTH and not odd


SEEN = []


class InGlobals(Budget):
    def __call__(self, ids, scores):
        SEEN.append(len(ids))
        return scores


class InItsClass(Budget):
    calls = 0

    def __call__(self, ids, scores):
        InItsClass.calls += 1
        return scores


class Itself(Budget):
    def __deepcopy__(self, memo):
        return self


class Locked(tf.LogitsProcessor):
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, ids, scores):
        return scores


class Moody(tf.LogitsProcessor):
    def __call__(self, ids, scores):
        return scores + torch.randn_like(scores)


@pytest.mark.parametrize(
    "processor, sentence",
    [
        (InGlobals, "in their attributes, .* got it elsewhere in InGlobals"),
        (InItsClass, "in their attributes, .* got it elsewhere in InItsClass"),
        (Itself, "in their attributes, .* got it elsewhere in Itself"),
        (Locked, "Locked cannot be copied .*method='ar'"),
        (Moody, "must give one answer to a sequence, got two from Moody"),
    ],
)
def test_what_cannot_be_copied_is_refused(made, processor, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        answers(made, "prompt-lookup", logits_processor=[processor()])
    assert "\n" not in str(caught.value)
    assert answers(made, "ar", logits_processor=[processor()]).shape[1] > LENGTH


def test_a_model_in_a_processor_is_not_copied(made, monkeypatch):
    class Judge(Budget):
        def __init__(self):
            super().__init__()
            self.model = made[0]

    seen = []
    probs = PathProcessor.probs
    monkeypatch.setattr(
        PathProcessor, "probs", lambda own, *rest: seen.append(own) or probs(own, *rest)
    )
    answers(made, "prompt-lookup", logits_processor=[Judge()])
    heard = [own for row in seen[-1].heard for own in row.values()]
    assert heard and all(own[-1].model is made[0] for own in heard)
