"""Models of transformers that draw pictures, compiled: the tokens of eager steps and rounds,
whatever the prompts' lengths, and what is not served.
"""

import pytest
import torch

from specmm import methods
from specmm.core import randomness
from specmm.core.processors import Processor
from specmm.hf.models.static import StaticPictureTarget
from tests.tiny.picture_kinds import KINDS, PROMPTS, opened, saved, sized, target_of

METHODS = {"ar": methods.AR(), "sjd": methods.SJD(window=4)}
FOLDERS = {}


@pytest.fixture
def pipe_of(tmp_path_factory):
    """Kinds to pipelines without programs."""

    def found(name):
        if name not in FOLDERS:
            FOLDERS[name] = saved(KINDS[name], tmp_path_factory)
        return opened(FOLDERS[name])

    return found


def draw(pipe, kind, prompts, method, compiled, **options):
    """One batch of ``prompts``."""
    seeds = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    given = dict(method=method, compiled=compiled, generator=seeds, output_type="latent")
    given |= {"temperature": 0, "cfg": kind.scales[-1]} | sized(kind) | options
    return pipe(prompts, **given)


def same(pipe, name, method, batches, **options):
    """Of each of ``batches`` the compiled pictures, which are the eager ones; the first of them
    compiles.
    """
    kind = KINDS[name]
    for number, prompts in enumerate(batches):
        eager = draw(pipe, kind, prompts, METHODS[method], False, **options)
        with torch._dynamo.config.patch(error_on_recompile=bool(number)):
            found = draw(pipe, kind, prompts, METHODS[method], True, **options)
        assert torch.equal(found.tokens, eager.tokens)
        assert len(eager.tokens.unique()) > 2
        assert found.stats.rounds == eager.stats.rounds
        assert found.certificate.kind == eager.certificate.kind


# prompts of different lengths, the longer one first; of one length, so that nothing is padded
BATCHES = [PROMPTS, PROMPTS[::-1], [PROMPTS[1]] * 2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_greedy_tokens_are_those_of_eager_rounds(method, pipe_of, traced):
    same(pipe_of("janus"), "janus", method, BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), [("emu3", "ar"), ("glm_image", "sjd")])
def test_lines_and_grids_are_counted_as_in_eager_rounds(name, method, pipe_of, traced):
    prompts = [[PROMPTS[1]], [PROMPTS[1]]] if name == "glm_image" else BATCHES
    same(pipe_of(name), name, method, prompts)


@pytest.mark.slow
def test_a_picture_alone_has_one_program_wherever_its_uniforms_lie(pipe_of, traced, monkeypatch):
    monkeypatch.setattr(randomness, "BLOCK", 10)  # less than a round takes
    alone = [[text] for text in PROMPTS]
    same(pipe_of("janus"), "janus", "sjd", alone, temperature=1.0)


def test_a_target_has_one_view_for_each_processor(pipe_of):
    kind = KINDS["janus"]
    static = StaticPictureTarget(target_of(pipe_of("janus"), kind, kind.scales[-1]))
    warm, cold = Processor(1.0, top_k=5), Processor(0)
    for processor in (warm, cold, warm):
        assert static.with_processor(processor).processor == processor
        assert static.with_processor(processor) is static.with_processor(processor)


@pytest.mark.slow
def test_drawn_tokens_are_those_of_eager_rounds(pipe_of, traced):
    same(pipe_of("janus"), "janus", "sjd", BATCHES, temperature=1.0, top_k=5, cfg=1.5)


def test_a_model_whose_layers_attend_a_part_of_the_text_is_refused(pipe_of):
    pipe = pipe_of("janus")
    target = pipe.target(cfg=1.0)
    target.model.config.get_text_config().sliding_window = 4
    with pytest.raises(ValueError, match="needs full attention, fixed rotary positions"):
        StaticPictureTarget(target)
