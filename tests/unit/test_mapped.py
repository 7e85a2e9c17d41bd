"""Models are filled from mapped files: exactly, in the wanted dtype, within their own memory."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from specmm import mapped
from specmm.checkpoints import load_strict, read_checkpoint

MEASURED = """
import sys, torch
from specmm import mapped
from specmm.checkpoints import load_strict, read_checkpoint

def most():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

class Many(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, False) for _ in range(12))

load_strict(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).state_dict())
with mapped.WithoutWeights():
    model = Many()
before = most()
state = read_checkpoint(sys.argv[1])
load_strict(model, state, dtype=getattr(torch, sys.argv[2]))
print(most() - before)
"""


class Tied(nn.Module):
    """A head that is the embedding, and a table that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("counts", torch.zeros(3))
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.tokens.weight


def saved(state, folder, suffix):
    file = folder / f"model{suffix}"
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    return file


def written(folder, suffix=".pt"):
    torch.manual_seed(0)
    state = {k: torch.randn_like(v) for k, v in Tied().state_dict().items()}
    state["head.weight"] = state["tokens.weight"].clone()
    return saved(state, folder, suffix), state


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unfilled_model_gets_the_files_values(tmp_path, suffix, dtype):
    file, state = written(tmp_path, suffix)
    with mapped.WithoutWeights():
        model = Tied()
    assert mapped.unfilled(model) and mapped.size_of(model) == 28
    load_strict(model, read_checkpoint(file), dtype=dtype)
    assert not mapped.unfilled(model)
    assert torch.equal(model.tokens.weight, state["tokens.weight"].to(dtype))
    assert model.head.weight is model.tokens.weight
    assert torch.equal(model.counts, state["counts"]), "buffers keep their dtype"
    assert torch.equal(model.angles, torch.arange(4.0)), "tables are computed, not left out"
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_file_may_be_overwritten_once_it_is_loaded(tmp_path, suffix):
    file, state = written(tmp_path, suffix)
    with mapped.WithoutWeights():
        model = Tied()
    load_strict(model, read_checkpoint(file))
    file.write_bytes(b"something else")
    assert torch.equal(model.norm.weight, state["norm.weight"])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_what_was_changed_in_place_is_kept(tmp_path, suffix):
    wanted = {"weight": torch.ones(300, 700), "bias": torch.zeros(300)}
    state = read_checkpoint(saved(wanted, tmp_path, suffix))
    state["weight"].mul_(3)
    linear = torch.nn.Linear(700, 300)
    load_strict(linear, state)
    assert linear.weight.eq(3).all() and linear.bias.eq(0).all()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_pages_that_are_given_back_are_read_again(tmp_path, suffix):
    wanted = {"a": torch.randn(300, 700), "b": torch.randn(3)}
    state = read_checkpoint(saved(wanted, tmp_path, suffix))
    if sys.platform == "linux":
        assert all(getattr(x, mapped.MAPPED) is not None for x in state.values())
    for _ in range(2):
        for name, x in state.items():
            assert torch.equal(x, wanted[name])
            mapped.give_back(x)


def test_memory_that_is_no_files_is_never_given_back(tmp_path):
    state = {"a": torch.ones(2**20)}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    read = read_checkpoint(tmp_path / "old.pt")
    derived = torch.cat([read["a"], read["a"]])
    for x in (read["a"], derived):
        assert not hasattr(x, mapped.MAPPED)
        mapped.give_back(x)
        assert bool((x == 1).all())


@pytest.mark.parametrize(
    ("suffix", "dtype", "bytes_each"), [(".pt", "bfloat16", 2), (".safetensors", "float32", 4)]
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_the_memory_of_the_weights(tmp_path, suffix, dtype, bytes_each):
    state = {f"layers.{i}.weight": torch.randn(2048, 2048) for i in range(12)}
    file = saved(state, tmp_path, suffix)
    del state
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, str(file), dtype], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    weights = 12 * 2048**2 * bytes_each
    assert int(run.stdout) * 1024 <= 1.2 * weights
