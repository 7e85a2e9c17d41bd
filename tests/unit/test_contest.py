"""What is tried, when, and what is taken, by a clock that is moved by hand."""

import json

import pytest
import torch

from specmm import methods
from specmm.choose import contest
from specmm.choose.contest import (
    FEW,
    HOPELESS,
    PASSES,
    PLAIN,
    PROMPT,
    SHARE,
    START,
    Candidate,
    Record,
)
from specmm.choose.notes import Notes
from specmm.core.decode import Progress
from specmm.core.stats import Stats

AR, FAST, SLOW, LAST = (
    PLAIN.method,
    methods.Block(length=2),
    methods.DEER(length=3),
    methods.PromptLookup(),
)
EACH = {AR: 1.0, FAST: 0.5, SLOW: 2.0, LAST: 0.8}  # seconds a token


class Machine:
    """Runs of two rows and ``LENGTH`` tokens whose rounds commit four, on a clock of its own."""

    LENGTH = 33

    def __init__(self, each=EACH, prompt=3.0, tv=0.0):
        self.each, self.prompt, self.tv = each, prompt, tv
        self.time = 0.0
        self.begun = []
        self.rounds = 0

    def now(self):
        return self.time

    def begin(self, method):
        self.begun.append(method)
        gained = 1 if method == AR else 4
        none = torch.zeros(())
        excess = torch.tensor(self.tv if method == FAST else 0.0)
        limits = torch.tensor([self.LENGTH] * 2)
        self.time += self.prompt
        count = 1
        while count < self.LENGTH:
            count += gained
            self.time += gained * self.each[method]
            self.rounds += 1
            counts = torch.tensor([count] * 2)
            yield Progress(none, counts, limits, Stats(), excess, torch.ones(()))
        stats = Stats(tokens=66, rounds=64, batch_rounds=32)
        yield Progress(none, torch.tensor([self.LENGTH] * 2), limits, stats, excess, none)

    def record(self, *candidates, **options):
        return Record([Candidate(one) for one in candidates], now=self.now, **options)


def called(record, machine, method):
    """A call by ``method``."""
    for _ in record.called(method, machine.begin(method)):
        pass


def test_a_short_first_call_is_left_plain_and_trials_wait_for_what_they_may_take():
    machine = Machine()
    record = machine.record(FAST, SLOW, LAST)
    assert record.choose(machine.begin, 33) == AR and not machine.begun
    assert "too short" in record.reason()
    called(record, machine, AR)
    for calls in range(1, 80):
        taken = record.choose(machine.begin, 33)
        over = 2 * FEW  # by which a slow one exceeds what was thought
        assert taken == FAST
        assert record.spent <= SHARE * (record.lasted + 33) + START + over
        called(record, machine, taken)
        if calls == 1:
            assert record.reason().count("x") == 1 and "2.00x" in record.reason()
    assert record.lasted == pytest.approx(33 + 79 * 33 / 2), "of a call twice as fast half the time"
    assert {SLOW, LAST} <= record.samples.keys() and machine.begun.count(FAST) > 79


def test_a_trial_counts_beside_the_call_that_it_came_before():
    """Where nobody is sure of anything all are slow: that tells nothing about who is faster."""
    machine = Machine()
    record = machine.record(FAST, LAST)
    for method in (AR, FAST):
        called(record, machine, method)
    machine.each = {method: 4 * each for method, each in EACH.items()}
    for _ in record.played(LAST, machine.begin(LAST), FEW):
        pass
    assert record.gain(LAST) == pytest.approx(1 / 3.2)
    called(record, machine, FAST)
    machine.each = EACH
    [sample] = record.samples[LAST]
    assert sample.beside == (FAST, pytest.approx(0.5 / 0.8))
    assert record.gain(LAST) == pytest.approx(record.gain(FAST) * 0.5 / 0.8)


def test_a_long_call_tries_at_once_and_each_stays_until_it_is_behind():
    machine = Machine()
    record = machine.record(SLOW, FAST, LAST)
    assert record.choose(machine.begin, 10**4, share=1.0) == FAST
    tried = [machine.begun.count(method) for method in (AR, SLOW, FAST, LAST)]
    assert tried == [PASSES, 1, PASSES, 2], "0.25 of the fastest's speed, and 0.63"
    assert set(record.left) == {SLOW, LAST} and "much faster" in record.left[LAST]
    begun = len(machine.begun)
    assert record.choose(machine.begin, 10**4, share=1.0) == FAST
    assert len(machine.begun) == begun, "all that stay were tried often enough"


def test_the_prompt_and_the_first_round_are_no_part_of_the_speed():
    machine = Machine(prompt=100.0)
    record = machine.record(FAST)
    for method in (AR, FAST):
        called(record, machine, method)
    assert record.each(AR) == 1.0 and record.each(FAST) == 0.5 and record.gain(FAST) == 2.0
    assert record.tau(FAST) == 4.0 and record.samples[FAST][0].prompt == 102.0
    assert record.decoded == 2 * machine.LENGTH and record.calls == 2
    assert record.samples[AR][0].stats.tokens == 66


def test_who_is_behind_does_not_finish_its_trial():
    machine = Machine({AR: 1.0, FAST: 50.0})
    record = machine.record(FAST)
    record.choose(machine.begin, 10**4, share=1.0, passes=1)
    rounds = machine.rounds - FEW - 1
    assert rounds == 2 < FEW / 4 + 2 and record.left[FAST]
    assert record.gain(FAST) < HOPELESS


def test_what_drafts_were_accepted_before_orders_trials_and_may_be_enough():
    machine = Machine()
    sure, unsure = Candidate(FAST, 3.0, 4, 2), Candidate(SLOW, 1.2, 4, 2)
    record = Record([unsure, Candidate(LAST), sure], now=machine.now)
    assert record.order == [PLAIN, sure, Candidate(LAST), unsure]
    assert record.choose(machine.begin, 8) == FAST and not machine.begun
    assert "tau 3.00" in record.reason()
    crowd = Record([sure], 16, now=machine.now)
    assert crowd.choose(machine.begin, 8) == AR, "nodes of sixteen rows are many"
    assert Record([unsure], now=machine.now).choose(machine.begin, 8) == AR
    called(record, machine, FAST)
    assert record.choose(machine.begin, 8, share=10.0) == FAST
    assert machine.begun[1] == AR, "then it is measured beside plain decoding"


def test_a_method_that_does_not_hold_what_was_forecast_is_left():
    machine = Machine()
    record = Record([Candidate(SLOW, 3.0, 4, 2)], now=machine.now)
    assert record.fastest() == SLOW
    for method in (SLOW, AR):
        called(record, machine, method)
    assert record.fastest() == AR


def test_a_relaxed_method_must_be_near_enough_and_worth_it():
    for tv, limit, taken in ((0.3, 0.2, AR), (0.1, 0.2, FAST)):
        machine = Machine(tv=tv)
        record = machine.record(FAST, tv=limit)
        assert record.choose(machine.begin, 0, share=float("inf")) == taken
        assert record.deviation(FAST) == pytest.approx(tv)
    near = Machine({AR: 1.0, FAST: 0.92, LAST: 0.95}, tv=0.1)
    record = near.record(FAST, LAST, tv=0.2)
    assert record.choose(near.begin, 0, share=float("inf")) == LAST, "3% are not worth a deviation"
    record = near.record(FAST, tv=0.2)
    assert record.choose(near.begin, 0, share=float("inf")) == AR


def test_a_drafter_that_fails_is_left_out_and_the_call_goes_on(caplog):
    machine = Machine()
    whole = machine.begin

    def begin(method):
        if method == FAST:
            raise ValueError("logits must be finite")
        return whole(method)

    record = machine.record(FAST, LAST)
    assert record.choose(begin, 10**4, share=1.0) == LAST
    assert record.left == {FAST: "logits must be finite"} and "must be finite" in caplog.text
    assert machine.begun.count(LAST) == PASSES
    with pytest.raises(ValueError, match="finite"):
        machine.record(LAST).choose(lambda method: begin(FAST), 10**4, share=1.0)


def test_a_call_that_ends_at_once_tells_nothing_and_a_later_one_does():
    machine = Machine()
    machine.LENGTH = 2
    record = machine.record(FAST)
    assert record.choose(machine.begin, 10**4, share=1.0) == AR
    assert machine.begun == [AR] and not record.samples
    machine.LENGTH = Machine.LENGTH
    assert record.choose(machine.begin, 10**4, share=1.0) == FAST


def test_without_candidates_nothing_is_tried():
    machine = Machine()
    record = machine.record()
    assert record.choose(machine.begin, 10**6) == AR and not machine.begun
    assert "first call" in record.reason() and not record.worthwhile(64)
    called(record, machine, AR)
    assert "calls are short" in record.reason() and record.worthwhile(8)
    record.looked = True
    assert record.reason() == "there is no drafter"
    assert machine.record().worthwhile(10**4)
    assert PROMPT > 0


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """Gives a record of ``FAST`` and ``SLOW`` on a machine, as a new process begins one."""
    monkeypatch.setattr(contest, "RECENT", 60.0)

    def begun(machine, **how):
        return machine.record(FAST, SLOW).remember(Notes(tmp_path, "a"), **how)

    return begun


def test_the_next_process_runs_what_the_last_one_found_fastest_from_its_first_call(noted, tmp_path):
    machine = Machine()
    record = noted(machine)
    for _ in range(2):
        called(record, machine, record.choose(machine.begin, 33, share=0.5))
    assert record.fastest() == FAST and noted(machine).known() == methods.label(FAST)
    later, machine = Machine(), Machine()
    again = noted(later)
    assert again.choose(later.begin, 33) == FAST and not later.begun, "nothing is tried again"
    assert again.calls == 2 and again.gain(FAST) == pytest.approx(2.0)
    assert noted(machine, fresh=True).choose(machine.begin, 33) == AR, "by nothing but itself"
    for _ in range(2):
        called(again, later, FAST)
    assert noted(machine).calls == 4, "calls are noted, too"
    alone = machine.record(FAST).remember(Notes(tmp_path, "a"))
    alone.choose(machine.begin, 33)
    for _ in range(4):
        called(alone, machine, FAST)
    assert set(noted(machine).noted) == set(map(methods.label, record.samples)), "others stay"


@pytest.mark.parametrize("damage", ["{", "[]", '{"at": 1}', "old", "empty"])
def test_notes_that_are_damaged_or_old_are_as_none(noted, tmp_path, damage):
    machine = Machine()
    record = noted(machine)
    assert record.choose(machine.begin, 33, share=float("inf")) == FAST, "which is noted at once"
    [file] = tmp_path.iterdir()
    found = json.loads(file.read_text())
    found["at"] -= 61.0 if damage == "old" else 0.0
    if damage == "empty":
        found["samples"][methods.label(FAST)][0][3] = 0.0  # tokens
    file.write_text(json.dumps(found) if damage in ("old", "empty") else damage)
    assert noted(Machine()).choose(Machine().begin, 33) == AR


def test_a_trial_takes_no_more_than_half_of_a_usual_call():
    """Answers of a few tokens are left plain, and none waits for trials many times as long."""
    machine = Machine()
    machine.LENGTH = 5
    record = machine.record(FAST, LAST)
    for _ in range(12):
        assert record.choose(machine.begin, 64) == AR
        called(record, machine, AR)
    assert machine.begun == [AR] * 12 and record.spent == 0
