"""Source code as data: the split by file, the tokens, where rows come from."""

import pytest
import torch

from recipes.training.coder import build_tokenizer
from specmm.recipes.training import texts as code
from specmm.recipes.training.texts import (
    find_files,
    given_texts,
    is_held_out,
    read_files,
    token_stream,
    windows,
)

CODE = "def add(a, b):\n    return a + b\n\n\nclass A:\n    def f(self):\n        return None\n"


def test_the_split_is_by_name_and_complete(tmp_path, monkeypatch):
    for i in range(200):
        (tmp_path / f"{i}.py").write_text(f"x = {i}\n")
    (tmp_path / "same.py").write_text("x = 0\n")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr(
        code, "find_files", lambda: {path.name: path for path in sorted(tmp_path.iterdir())}
    )
    learnt, held_out = read_files(False), read_files(True)
    assert len(learnt) + len(held_out) == 200 and 0 < len(held_out) < 20
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, learnt))


def test_what_a_user_names_is_never_held_out(tmp_path):
    names = [name for i in range(200) if is_held_out(name := f"{i}.txt")]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        text = f"\ufefftext of {folder}\n"  # a byte-order mark is no part of it
        (tmp_path / folder / names[0]).write_text(text, encoding="utf-8")
    (tmp_path / "a" / "more.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a" / ".git").mkdir()
    (tmp_path / "a" / ".git" / "config").write_text("not of the text")
    (tmp_path / "again.txt").write_text("text of b\n")
    given = [tmp_path / "a", tmp_path / "b" / names[0], tmp_path / "again.txt"]
    assert list(given_texts(given).values()) == ["text of a\n", "text of b\n"]


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe\x00"])
def test_a_place_without_text_is_refused(tmp_path, content):
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "bad.txt").write_bytes(content)
    said = r"readable as UTF-8 and not empty, got none at .*bad\.txt"
    with pytest.raises(ValueError, match=said):
        given_texts([tmp_path / "good.txt", tmp_path / "bad.txt"])


def test_files_of_the_standard_library(monkeypatch):
    monkeypatch.setattr(code, "PACKAGES", ["packaging"])
    found = find_files()
    assert "json/decoder.py" in found and "packaging/version.py" in found
    assert not any("test" in name.split("/") for name in found)
    with pytest.raises(ValueError, match="got nothing at"):
        given_texts([found["json/decoder.py"].with_name("nothing")])
    monkeypatch.setattr(code, "PACKAGES", ["nonesuch"])
    with pytest.raises(ValueError, match="'nonesuch' must be installed"):
        find_files()


def test_tokens_give_the_text_back():
    words = build_tokenizer([CODE] * 3, 400)
    assert words.decode(words(CODE)["input_ids"]) == CODE and words.mask_token_id is not None
    # a line's end with the indentation after it
    assert any(set(t) == {"\u010a", "\u0120"} for t in words.get_vocab())
    stream = token_stream([CODE, CODE], words)
    assert (stream == words.eos_token_id).sum() == 2 and stream[-1] == words.eos_token_id


def test_rows_depend_on_seed_and_step_only():
    stream = torch.arange(100)
    rows = windows(stream, 3, 4, 10, 1)
    assert rows.shape == (4, 10)
    assert torch.equal(rows.diff(dim=1), torch.ones(4, 9, dtype=torch.int64))
    assert torch.equal(rows, windows(stream, 3, 4, 10, 1))
    assert not torch.equal(rows, windows(stream, 4, 4, 10, 1))
