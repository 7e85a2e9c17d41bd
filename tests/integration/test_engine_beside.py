"""What is read in the forward of a round, where that fails."""

from specmm.hf.models.rows import Reading
from specmm.serving.costs import Pieces
from specmm.serving.engine import BatchEngine
from specmm.serving.preparation import Limits
from tests.engines import Answers


def test_a_round_that_fails_ends_what_was_read_beside_it(coder_pipe, monkeypatch):
    monkeypatch.setattr(Pieces, "ride", lambda *_: True)
    engine = BatchEngine(coder_pipe, Limits(rows=3))
    real, left = Reading.take, [1]

    def take(self, *given):
        real(self, *given)
        if left and left.pop():
            raise RuntimeError("after the last piece")

    monkeypatch.setattr(Reading, "take", take)
    said = Answers(engine)
    said.ask(prompt="class Stack:", options=dict(max_new_tokens=200))
    while not said.told[0]:
        pass
    said.ask(prompt="def add(a, b):", options=dict(max_new_tokens=9))
    said.wait()
    assert [said.end(i).error for i in range(2)] == ["RuntimeError: after the last piece"] * 2
    said.ask(prompt="def is_even(n):", options=dict(max_new_tokens=9))
    said.wait()
    assert said.text(2) == coder_pipe("def is_even(n):", method="ar", max_new_tokens=9).texts[0]
    engine.close()
