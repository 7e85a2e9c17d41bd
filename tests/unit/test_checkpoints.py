"""Every way a checkpoint can be wrong names what is wrong, and leaves the module as it was."""

import argparse
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from specmm.loading.checkpoints import FileError, load_strict, read_checkpoint, write_checkpoint
from tests.tiny.parts import same_weights

SUFFIXES = [".safetensors", ".pt", ".pth", ".bin"]


def module(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))


def write(path, state):
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip(tmp_path, suffix):
    source, target = module(0), module(1)
    load_strict(target, read_checkpoint(write(tmp_path / f"m{suffix}", source.state_dict())))
    assert same_weights(source, target)


@pytest.mark.parametrize("nesting", ["model", "module", "state_dict", "state_dict model"])
def test_nested_files(tmp_path, nesting):
    source, target = module(0), module(1)
    tree = source.state_dict()
    for name in nesting.split():
        others = {"steps": 7, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=1e-4)}
        tree = {name: tree, **others}
    torch.save(tree, tmp_path / "m.pt")
    load_strict(target, read_checkpoint(tmp_path / "m.pt"))
    assert same_weights(source, target)


def test_folder(tmp_path):
    save_file(module().state_dict(), tmp_path / "model.safetensors")
    assert set(read_checkpoint(tmp_path)) == set(module().state_dict())


def test_absent_and_unknown_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"looked for model\.safetensors"):
        read_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nothing.pt"):
        read_checkpoint(tmp_path / "nothing.pt")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"checkpoint must end in \.safetensors or one of \.pt"):
        read_checkpoint(tmp_path / "m.gguf")


class Trap:
    """Unpickling this by the ordinary loader would run a command."""

    def __reduce__(self):
        return os.system, ("touch sprung",)


def test_pickle_with_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": module().state_dict(), "extra": Trap()}, tmp_path / "m.pt")
    said = r"must hold tensors only, got a pickle that asks for posix\.system"
    with pytest.raises(ValueError, match=said):
        read_checkpoint(tmp_path / "m.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 0.98])
def test_truncated_file(tmp_path, suffix, part):
    path = write(tmp_path / f"m{suffix}", {"w": torch.randn(300, 30)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ValueError, match=rf"must be a whole {suffix} file"):
        read_checkpoint(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\n", b"<html>", b"\x80\x02}q\x00."]
)
def test_other_content(tmp_path, suffix, content):
    (tmp_path / f"m{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"m{suffix} must"):
        read_checkpoint(tmp_path / f"m{suffix}")


def test_every_truncation_of_an_old_pickle(tmp_path):
    path = tmp_path / "m.pt"
    torch.save(module().state_dict(), path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    assert set(read_checkpoint(path)) == set(module().state_dict())
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"m\.pt must"):
            read_checkpoint(path)


@pytest.mark.parametrize(
    "tree", [[1, 2], {}, {"model": {"steps": 3}}, {"a": torch.zeros(1), "b": "text"}]
)
def test_no_tensors(tmp_path, tree):
    torch.save(tree, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="must hold tensors by name"):
        read_checkpoint(tmp_path / "m.pt")


def test_leftovers_are_ignored_by_name():
    source, target = module(0), module(1)
    more = ("freqs_cis", "layers.0.attention.kv_cache.k_cache")
    load_strict(target, source.state_dict() | {name: torch.zeros(3) for name in more})
    assert same_weights(source, target)
    with pytest.raises(ValueError, match="1 unexpected: freqs_cis_old"):
        load_strict(target, source.state_dict() | {"freqs_cis_old": torch.zeros(3)})


STATE = module(0).state_dict()
MATRIX = torch.full((2, 4), float("nan"))
WRONG = [
    ({k: v for k, v in STATE.items() if k != "0.bias"}, "1 missing: 0.bias"),
    (STATE | {"2.weight": torch.zeros(1)}, "1 unexpected: 2.weight"),
    (STATE | {"0.weight": torch.zeros(4, 4)}, r"1 wrong-shaped: 0.weight \[4, 4\] for \[4, 3\]"),
    (STATE | {"0.bias": STATE["0.bias"].int()}, "1 of whole numbers: 0.bias torch.int32"),
    ({f"x.{k}": v for k, v in STATE.items()}, "3 missing: .*; 3 unexpected: x.0.weight, x.0.bias"),
    (STATE | {f"x.{i}": torch.zeros(1) for i in range(5)}, "unexpected: x.0, x.1, x.2 and 2 more"),
    (STATE | {"1.weight": MATRIX}, "finite weights, got NaN or infinity in 1.weight"),
    (STATE | {"1.weight": torch.full((2, 4), torch.inf).half()}, "NaN or infinity in 1.weight"),
]


@pytest.mark.parametrize(("state", "message"), WRONG)
def test_wrong_state_is_named_and_nothing_is_loaded(state, message):
    target = module(1)
    with pytest.raises(ValueError, match=message) as caught:
        load_strict(target, state, source="some/file.pt")
    assert str(caught.value).startswith("some/file.pt must hold") and "\n" not in str(caught.value)
    assert same_weights(target, module(1))


def test_an_error_about_a_file_is_whole_in_another_process():
    error = FileError("model.pt", "is damaged")
    passed = pickle.loads(pickle.dumps(error))
    assert (passed.file, passed.said, str(passed)) == ("model.pt", "is damaged", str(error))


def test_others_may_read_weights_as_they_may_the_config(tmp_path):
    write_checkpoint({"a": torch.ones(2)}, {}, tmp_path)
    modes = {file.name: file.stat().st_mode for file in tmp_path.iterdir()}
    assert modes.keys() == {"config.json", "model.safetensors"} and len(set(modes.values())) == 1
