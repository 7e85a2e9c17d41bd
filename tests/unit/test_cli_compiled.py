"""What --compile and --compiled say together."""

import pytest

from specmm.cli.options import compiled_as


@pytest.mark.parametrize(
    ("text", "always", "found"),
    [(None, False, False), (None, True, True), ("true", True, True), ("auto", False, "auto")],
)
def test_either_says_whether_programs_are_made(text, always, found):
    assert compiled_as(text, always) == found


@pytest.mark.parametrize("text", ["false", "auto"])
def test_different_answers_are_refused(text):
    with pytest.raises(ValueError, match=f"^--compile is --compiled true, got --compiled {text};"):
        compiled_as(text, True)


@pytest.mark.parametrize("always", [True, False])
def test_another_answer_is_refused(always):
    with pytest.raises(ValueError, match=r"^--compiled must be true, false or auto, got yes"):
        compiled_as("yes", always)
