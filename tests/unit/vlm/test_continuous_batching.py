"""Rows of answers that take up the next question: every class of model, its positions and drafters'
memories.
"""

from itertools import product

import pytest
import torch

from specmm.core.continuous_batching import Queue
from specmm.core.decode import EndTokens, decode, decode_plain
from specmm.core.drafter import NoDrafts
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.answers.run import PromptBatch
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.drafters.prompt_lookup import PromptLookupDrafter
from specmm.hf.drafters.recycle import RecycleDrafter
from specmm.hf.drafters.suffix import SuffixDrafter
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.programs.batch_invariant import batch_invariant
from specmm.recipes.msd import build_msd
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import branching
from specmm.verify import Recursive
from tests.tiny.families import MODELS

LENGTH = 12
STOP = EndTokens([3, 8, 13, 21, 30])
ASKED = [
    [1, 5, "1", 6],
    [1, 9, 10, 11, 9, 10],
    [7],
    ["3", 12, 13, 14, "2", 4],
    [1, "4"],
    [5, 6, "2", 7, 8, 9, 5, 6],
]
SEEDS = list(range(20, 26))


def msd(target, tree):
    return FeatureDrafter(build_msd(target, seed=1), target, tree)


DRAFTERS = {
    "plain": lambda target: NoDrafts(),
    "lookup": lambda target: PromptLookupDrafter(target, length=3),
    "suffix": lambda target: SuffixDrafter(target, length=3),
    "recycle": lambda target: RecycleDrafter(target, branching([2, 2])),
    "msd": lambda target: msd(target, branching([2, 2, 1])),
    "msd dynamic": lambda target: msd(target, Dynamic(top_k=3, depth=2, total=8)),
}


def answered(target, drafter, prompts, seeds, rows, length=LENGTH):
    """The tokens of each prompt, ``rows`` answered at a time, and the rounds of the batch."""
    asked = PromptBatch(lambda some: prompts(some), len(seeds), rows)
    first = asked.first(target)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    queue, uniforms = asked.queue(target, generators), Uniforms(generators[: len(first.lengths)])
    with batch_invariant():
        *_, end = decode(
            target, drafter, Recursive(), first, length, uniforms, stop=STOP, queue=queue
        )
    return queue.tokens, end.stats.batch_rounds


def prompts_of(zoo, family, questions):
    return lambda some: VLMPrompt(zoo.batch(family, questions[some]), LENGTH)


def check_refilled(zoo, family, target, drafter):
    """Answers, two at a time, are those of each question by itself, in fewer rounds."""
    continuous, rounds = answered(target, drafter, prompts_of(zoo, family, ASKED), SEEDS, 2)
    alone = [
        answered(target, drafter, prompts_of(zoo, family, [q]), [s], 1)
        for q, s in zip(ASKED, SEEDS, strict=True)
    ]
    for tokens, ([wanted], _) in zip(continuous, alone, strict=True):
        assert torch.equal(tokens, wanted)
    assert rounds < sum(count for _, count in alone)
    return continuous


CASES = [*product(["llava"], DRAFTERS), ("qwen2-vl", "plain")]
CASES += product([name for name in MODELS if name != "llava"], ["msd dynamic"])


@pytest.mark.parametrize(("family", "drafting"), CASES)
def test_answers_do_not_depend_on_what_their_row_held(zoo, family, drafting):
    target = VLMTarget(zoo.model(family), Processor(1.0, repetition_penalty=1.2))
    drafter = DRAFTERS[drafting](target)
    continuous = check_refilled(zoo, family, target, drafter)
    assert len({len(tokens) for tokens in continuous}) > 1


def test_plain_rows_draw_what_the_plain_loop_draws(zoo, family):
    target = VLMTarget(zoo.model(family), Processor(1.0))
    prompts = prompts_of(zoo, family, ASKED)
    continuous, _ = answered(target, NoDrafts(), prompts, SEEDS, 2)
    with batch_invariant():
        *_, end = decode_plain(
            target, prompts(slice(None)), LENGTH, Uniforms.from_seeds(SEEDS), stop=STOP
        )
    for tokens, row, count in zip(continuous, end.tokens, end.counts.tolist(), strict=True):
        assert torch.equal(tokens, row[:count])


def test_a_first_token_may_end_its_sample(zoo):
    target = VLMTarget(zoo.model("llava"), Processor(1.0))
    prompts = prompts_of(zoo, "llava", ASKED * 4)
    found, _ = answered(target, NoDrafts(), prompts, list(range(24)), 2)
    assert min(map(len, found)) == 1 and all(len(tokens) for tokens in found)


@pytest.mark.parametrize("drafting", DRAFTERS)
def test_none_is_lost_when_all_rows_end_at_once(zoo, drafting):
    target, prompts = VLMTarget(zoo.model("llava"), Processor(1.0)), prompts_of(zoo, "llava", ASKED)
    found, _ = answered(target, DRAFTERS[drafting](target), prompts, SEEDS, 2, length=1)
    whole, _ = answered(target, NoDrafts(), prompts, SEEDS, 6)
    assert [int(tokens) for tokens in found] == [int(tokens[0]) for tokens in whole]


def test_rows_that_are_done_leave_nothing_after(zoo):
    target = VLMTarget(zoo.model("llava"), Processor(1.0))
    answered(target, NoDrafts(), prompts_of(zoo, "llava", ASKED), SEEDS, 2)
    assert not hasattr(target.started, "started")


def test_what_does_not_fit_a_row_is_refused(zoo):
    target = VLMTarget(zoo.model("llava"), Processor(0))
    target.prefill(VLMPrompt(zoo.batch("llava", [[1, 2]]), 2), 1)
    with pytest.raises(ValueError, match="a sample must fit the 4 slots of its row, got 8"):
        target.start_row(0, VLMPrompt(zoo.batch("llava", [[1, 2, 3, 4, 5, 6]]), 2))
    long = [[1, 2], [1] * 250]
    with pytest.raises(ValueError, match="must fit the 256 positions"):
        PromptBatch(prompts_of(zoo, "llava", long), 2, 1).first(target)


def test_numbers_follow_the_sample():
    generators = [torch.Generator().manual_seed(s) for s in range(3)]
    queue = Queue(lambda i: None, generators, 2)
    assert (queue.left, queue.holds) == (1, [0, 1])
