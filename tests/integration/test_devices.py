"""``device`` and ``dtype``: of ``from_pretrained`` for pictures, and of the commands.

The device "meta" stands for one that is not the CPU: it holds no values, but says what was put
there.
"""

import inspect
from itertools import chain
from pathlib import Path

import pytest
import torch

from specmm.image_ar.pipeline import ImagePipeline
from specmm.loading.hardware import choose_device
from specmm.runs.run import Place
from tests.commands import as_json, refused

FAMILIES = ("pocket/llamagen", "pocket/var", "pocket/mar")


def networks(pipe):
    """Everything of ``pipe`` that has weights: models, tokenizer, drafters."""
    tokenizer = pipe.vq if hasattr(pipe, "vq") else pipe.vae
    drafters = pipe.parts.drafters.values() if hasattr(pipe, "parts") else [pipe.small]
    return [pipe.transformer, tokenizer, *drafters]


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_of_a_pipeline_is_opened_on_its_device(name):
    pipe = ImagePipeline.from_pretrained(name, device="meta", torch_dtype=torch.bfloat16)
    weights = chain.from_iterable((*part.parameters(), *part.buffers()) for part in networks(pipe))
    assert {weight.device.type for weight in weights} == {"meta"}
    assert pipe.device.type == "meta" and pipe.transformer.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="must have weights on a device, got none there"):
        pipe(classes=[1], seed=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pipeline_declares_its_options(name):
    pipe = ImagePipeline.from_pretrained(name)
    assert pipe.sampling_options == tuple(inspect.signature(pipe.target).parameters)
    options = inspect.signature(pipe.__call__).parameters
    assert set(pipe.sampling_options) <= set(options)
    assert "compiled" in options
    assert (pipe.plans == "scales") == (name == "pocket/var") and pipe.takes == "classes"
    assert (pipe.log_likelihood is None) == (pipe.plans is None) == (name == "pocket/mar")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_dtype_is_chosen_for_the_device(name, monkeypatch):
    """A device that is fastest in float64, say, gets models in float64; the CPU does not."""
    family = ImagePipeline.from_pretrained(name).__class__.__module__

    def chosen(*_, device="cpu", **__):
        return torch.float64 if str(device) == "meta" else torch.float32

    monkeypatch.setattr(f"{family}.choose_dtype", chosen)
    assert ImagePipeline.from_pretrained(name, device="meta").transformer.dtype == torch.float64
    assert ImagePipeline.from_pretrained(name).transformer.dtype == torch.float32


def test_names_of_places():
    assert Place.named("cpu", "bfloat16") == Place(torch.device("cpu"), torch.bfloat16)
    assert Place.named() == Place.named("auto", "auto") == Place(torch.device("cpu"), None)
    assert Place.named("cpu", torch_dtype="float16").dtype == torch.float16
    for wrong in (torch.int8, "float3", {"transformer": torch.float16}):
        with pytest.raises(ValueError, match="unknown dtype"):
            Place.named("cpu", wrong)
    with pytest.raises(ValueError, match="give dtype or torch_dtype, which mean the same"):
        Place.named("cpu", "float16", torch.float16)


def test_a_gpu_is_chosen_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device() == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device() == torch.device("cpu")


def commands(tiny: Path, text_folder: Path, out: Path) -> dict[str, list[str]]:
    jobs = out / "jobs.jsonl"
    jobs.write_text('{"id": "a", "class": "heart"}\n')
    return {
        "generate": [str(tiny), "--class", "heart", "--out", str(out / "pictures")],
        "ask": ["pocket/llava", "--question", "Why?", "--max-new-tokens", "1"],
        "complete": [str(text_folder), "--prompt", "def", "--max-new-tokens", "2"],
        "bench": [str(tiny), "--methods", "sjd", "-n", "1"],
        "plan": [str(tiny)],
        "demo": ["--model", str(tiny), "--out", str(out / "demo"), "-n", "1"],
        "batch": [str(jobs), "--model", str(tiny), "--out", str(out / "batch")],
    }


def test_unknown_devices_and_dtypes_are_one_line(tiny, text_folder, tmp_path):
    unknown = "device must be one of this machine's"
    wrong = [("--device", "tpu9", unknown), ("--dtype", "float3", "float32")]
    wrong += [("--device", name, unknown) for name in ("meta", "meta:0", "privateuseone")]
    wrong += [] if torch.cuda.is_available() else [("--device", "cuda", unknown)]
    for command, arguments in commands(tiny, text_folder, tmp_path).items():
        for option, value, message in wrong:
            assert message in refused(command, *arguments, option, value), command


@pytest.mark.parametrize("command", ["generate", "ask", "complete", "bench", "plan"])
@pytest.mark.slow
def test_commands_say_what_they_ran_in(tiny, text_folder, tmp_path, command):
    arguments = commands(tiny, text_folder, tmp_path)[command]
    for dtype in ("bfloat16", "float32"):
        found = as_json(command, *arguments, "--device", "cpu", "--dtype", dtype)
        assert (found[0] if command == "bench" else found)["dtype"] == dtype
