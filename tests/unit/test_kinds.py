"""Arguments of a wrong kind, before anything runs."""

import pytest

from specmm.extending.kinds import texts_of


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({"text": "a"}, "a dict"),
        ({"a", "b"}, "a set"),
        (b"ab", "a bytes"),
        (3, "3"),
        (["a", None], "None"),
        ("a\ud800", "half a surrogate pair"),
    ],
)
def test_what_is_no_list_of_texts(given: object, got: str) -> None:
    """Keys of a dictionary are no prompts, nor are bytes."""
    with pytest.raises(ValueError, match=f"^prompt must be .*, got {got}"):
        texts_of("prompt", given)


@pytest.mark.parametrize("nested", [False, True])
def test_chats_are_told_what_to_do(nested: bool) -> None:
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="; give a chat as messages="):
        texts_of("prompt", [chat] if nested else chat)


def test_lists_of_texts() -> None:
    assert texts_of("prompt", "ab") == ["ab"]
    assert texts_of("prompt", ("a", "b")) == texts_of("prompt", iter("ab")) == ["a", "b"]
