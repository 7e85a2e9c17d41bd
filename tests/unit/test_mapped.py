"""Models are filled from mapped files: exactly, in the wanted dtype, within their own memory."""

import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from specmm.hf.loading.placing import Placing
from specmm.hf.loading.pretrained import load_model
from specmm.loading import mapped
from specmm.loading.checkpoints import load_strict, read_checkpoint, stored_dtype
from specmm.loading.hardware import Place

MEASURED = """
import sys, torch
from specmm.loading import mapped
from specmm.loading.checkpoints import load_strict, read_checkpoint

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


@pytest.mark.parametrize(("suffix", "dtype", "bytes_each"), [(".safetensors", "bfloat16", 2)])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
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


OPENED = """
import sys, torch, transformers
from pathlib import Path
from specmm.loading.hardware import Place
from specmm.hf.loading.placing import Placing
from specmm.hf.loading.pretrained import load_model

def most():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def opened(folder):
    placing = Placing.of(Path(folder), Place("cpu", getattr(torch, sys.argv[3])))
    kind = transformers.LlamaForCausalLM
    return placing.put(load_model(kind, folder, dtype=placing.dtype or "auto"))

opened(sys.argv[2])
before = most()
model = opened(sys.argv[1])
print(most() - before)
"""


def llama(folder, layers, width, dtype):
    sizes = dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers)
    config = transformers.LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="20MB")
    return model


@pytest.mark.skipif(not mapped.MAPS.is_file(), reason="counts memory as Linux tells it")
@pytest.mark.parametrize(("dtype", "bytes_each"), [("bfloat16", 2)])
@pytest.mark.slow
def test_models_of_transformers_take_the_memory_of_their_weights(tmp_path, dtype, bytes_each):
    """In float16 on the disk, several shards of 20 MB."""
    model = llama(tmp_path / "large", 4, 1024, torch.float16)
    llama(tmp_path / "small", 1, 64, torch.float16)
    folders = [str(tmp_path / name) for name in ("large", "small")]
    command = [sys.executable, "-c", OPENED, *folders, dtype]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    weights = bytes_each * sum(weight.numel() for weight in model.parameters())
    assert 0.8 * weights < 1024 * int(said.split()[-1]) < 1.2 * weights + 20e6  # and one shard


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_models_of_transformers_are_cast_once(tmp_path, stored, wanted):
    model = llama(tmp_path, 2, 64, stored)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(str(stored)[6:], "bfloat16"))  # says otherwise
    placing = Placing.of(tmp_path, Place("cpu", wanted))
    assert placing.dtype == stored == stored_dtype(sorted(tmp_path.glob("*.safetensors")))
    found = placing.put(load_model(type(model), tmp_path, dtype=placing.dtype))
    pairs = zip(model.parameters(), found.parameters(), strict=True)
    assert all(torch.equal(ours.to(wanted), theirs) for ours, theirs in pairs)
    assert not any(hasattr(weight, mapped.MAPPED) for weight in found.parameters())


def gemma3(folder, stored):
    """In ``folder``, its weights ``stored`` so; its layers turn by frequencies of two kinds."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=40, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=20)
    kind = transformers.Gemma3ForCausalLM
    kind(transformers.Gemma3TextConfig(**sizes, **heads)).to(stored).save_pretrained(folder)
    return kind


def test_what_a_model_computes_is_not_rounded_by_its_files_dtype(tmp_path):
    """Gemma 3 scales its embeddings by the root of their width, which is no parameter."""
    kind = gemma3(tmp_path, torch.bfloat16)
    placing = Placing.of(tmp_path, Place("cpu", torch.float32))
    assert placing.rounded(load_model(kind, tmp_path, dtype=placing.dtype))
    assert not placing.rounded(load_model(kind, tmp_path, dtype=torch.float32))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16])
def test_what_a_model_computes_is_as_transformers_has_it(tmp_path, stored, wanted):
    """Frequencies of rotary embeddings stay in float32, the scale of embeddings does not."""
    kind = gemma3(tmp_path, stored)
    theirs = dict(kind.from_pretrained(tmp_path, dtype=wanted).named_buffers())
    placing = Placing.of(tmp_path, Place("cpu", wanted))
    loaded = placing.loaded(lambda dtype: load_model(kind, tmp_path, dtype=dtype))
    ours = dict(placing.put(loaded).named_buffers())
    assert {buffer.dtype for buffer in theirs.values()} == {torch.float32, wanted}
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert ours[name].dtype == buffer.dtype and torch.equal(ours[name], buffer), name


def test_a_part_of_a_model_does_not_say_its_dtype(tmp_path):
    save_file({"a": torch.zeros(2).bfloat16()}, tmp_path / "projector.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert Placing.of(tmp_path, Place("cpu", torch.float16)).dtype == torch.float16


def test_files_of_several_dtypes_have_none(tmp_path):
    save_file({"a": torch.zeros(2), "b": torch.zeros(2).half()}, tmp_path / "model.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"no header")
    assert stored_dtype([tmp_path / "model.safetensors"]) is None
    assert stored_dtype([tmp_path / "damaged.safetensors"]) is None
    assert stored_dtype([]) is None
