"""What a server knows before its first request, and what it does not keep of finding out."""

import pytest

from specmm.serving.opening import open_engine, warm_up
from specmm.serving.preparation import Limits
from tests.engines import Answers

PROMPT = "def add(a, b):\n"


@pytest.mark.parametrize("limits", [Limits(rows=3), Limits(rows=2, tokens=24)], ids=["own", "24"])
def test_costs_are_known_and_nothing_else(limits, coder_pipe):
    engine = open_engine("pocket/coder", limits, method="block")
    before = engine.counts()
    assert not engine.pieces.usual
    warm_up(engine)
    known = engine.counts()
    assert known.pop("piece_tokens") >= 32
    assert known == {name: before[name] for name in known}
    assert engine.pieces.usual and engine.costs.of(1)
    assert not engine.prefixes.pages and not engine.drafts.earlier.tokens
    said = Answers(engine)
    said.ask(prompt=PROMPT, options=dict(max_new_tokens=9))
    said.wait()
    assert said.text(0) == coder_pipe(PROMPT, method="ar", max_new_tokens=9).texts[0]
    engine.close()
