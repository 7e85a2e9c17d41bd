"""A head's rows of the tokens that may come, by an Emu3 with a large vocabulary: the tokens of all
rows, and of the class's own generate.
"""

import pytest
import torch

from specmm import methods
from specmm.hf.models import restricted_head
from specmm.hf.models.restricted_head import RestrictedHead, restricted
from tests.tiny import picture_kinds
from tests.tiny.picture_kinds import IDS, KINDS, PROMPTS, opened, sized

V = 5000
MAY_COME = [IDS[name] for name in ("<|extra_200|>", *picture_kinds.VISUAL)]
METHODS = {"ar": "ar", "sjd": methods.SJD(window=4), "compiled": "ar"}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emu3")
    torch.manual_seed(0)
    picture_kinds.emu3(vocab_size=V).save_pretrained(folder)  # with rows after those of its words
    picture_kinds.tokenizer().save_pretrained(folder)
    return opened(folder)


def drawn(pipe, name, **options):
    seeds = [torch.Generator().manual_seed(i) for i in range(len(PROMPTS))]
    given = dict(method=METHODS[name], compiled=name == "compiled", generator=seeds)
    return pipe(PROMPTS, output_type="latent", **given, **sized(KINDS["emu3"]), **options).tokens


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.slow
def test_tokens_are_those_of_all_rows(pipe, name, temperature, monkeypatch, traced):
    options = dict(temperature=temperature, cfg=1.5)
    assert pipe.target().family.head.few.out_features == len(MAY_COME)
    found = drawn(pipe, name, **options)
    monkeypatch.setattr(restricted_head, "LEAST", V)
    assert pipe.target().family.head is pipe.transformer.lm_head
    assert torch.equal(found, drawn(pipe, name, **options))
    if not temperature:
        words = pipe.tokenizer
        own = picture_kinds.drawn_by_emu3(
            pipe.transformer, words, PROMPTS, KINDS["emu3"].size, options["cfg"]
        )
        assert torch.equal(found, own)


@torch.no_grad()
def test_rows_are_those_of_the_heads_weights_as_they_are_now():
    torch.manual_seed(0)
    head = torch.nn.Linear(8, V)
    some = torch.zeros(V, dtype=torch.bool)
    some[[7, 3, 4000]] = True
    first = restricted(head, some)
    states = torch.randn(2, 8)
    for _ in range(2):
        now = restricted(head, some)
        found = now(states)
        torch.testing.assert_close(found[:, some], head(states)[:, some])
        assert float(found[:, ~some].max()) == torch.finfo(torch.float32).min
        assert restricted(head, some) is now
        head.weight[3] += 1.0
    assert restricted(head, some) is first, "programs find the rows where they were"
    torch.testing.assert_close(first(states)[:, some], head(states)[:, some])
    other = some.clone()
    other[9] = True
    assert restricted(head, other).few.out_features == 4


def test_where_little_is_saved_the_head_is_left_alone():
    head = torch.nn.Linear(8, V)
    most = torch.ones(V, dtype=torch.bool)
    most[:2000] = False
    assert restricted(head, most) is head
    scores = torch.nn.Sequential(torch.nn.Linear(8, V))
    assert restricted(scores, torch.arange(V) < 5) is scores
    assert isinstance(restricted(head, torch.arange(V) < 5), RestrictedHead)
