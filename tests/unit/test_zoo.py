"""Pocket models by name: the right kind is opened, and suggested where another was asked for."""

import pytest

from specmm import zoo
from specmm.extending.registry import unknown
from specmm.hf.loading.pretrained import find, find_target

KINDS = {
    "images": {"pocket/llamagen", "pocket/mar", "pocket/var"},
    "questions": {"pocket/llava", "pocket/smollava"},
    "text": {"pocket/coder", "pocket/smollm2"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_models_of_the_right_kind_are_suggested(kind):
    index = zoo.PIPELINE if kind == "images" else zoo.TRANSFORMERS
    others = set(zoo.pocket_models()) - KINDS[kind]
    for name in (*others, "pocket/nothing"):
        with pytest.raises(ValueError, match=r"another kind|unknown pocket model") as error:
            zoo.find(name, index, kind=kind)
        listed = str(error.value).partition(name)[2]
        assert all(one in listed for one in KINDS[kind])
        assert not any(one in listed for one in others)


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_the_right_kind_are_found(kind):
    for name in KINDS[kind]:
        assert zoo.kind_of(zoo.pocket_models()[name]) == kind
    if kind == "text":
        assert find_target("pocket/smollm2", kind="text").name == "smollm2"
    if kind == "questions":
        assert find("pocket/smollava", kind=kind).name == "smollava"


def test_a_shared_folder_is_no_likeness():
    names = ["pocket/coder", "pocket/llamagen"]
    assert "choose from" in str(unknown("model", "pocket/nothing", names))
    assert "did you mean 'pocket/llamagen'" in str(unknown("model", "pocket/lamagen", names))
    assert "did you mean 'pocket/llamagen'" in str(unknown("model", "llamagen", names))
    assert "did you mean 'pocket/coder'" in str(unknown("model", "pocket/coda", [*names, "a/b"]))
