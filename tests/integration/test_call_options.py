"""Pipelines of questions and text as transformers' users know them: options that are listed, wrong
kinds in a sentence, another device or dtype, and folders of their own.
"""

import inspect
import typing

import numpy as np
import pytest
import torch
from PIL import Image

import specmm
from specmm import zoo
from specmm.hf.loading.placing import Placing
from specmm.hf.prompts.options import OTHERS, CallOptions, Options
from specmm.loading.hardware import Place

PROMPT = "def add(a, b):\n"


def draw_square():
    picture = np.full((32, 32, 3), 255, np.uint8)
    picture[8:24, 8:24] = (200, 30, 30)
    return picture


@pytest.mark.parametrize("kind", [specmm.VQAPipeline, specmm.TextPipeline])
@pytest.mark.parametrize("name", ["__call__", "stream", "rounds"])
def test_help_lists_options(kind, name):
    listed = inspect.signature(getattr(kind, name)).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in listed.values())
    fields = Options.__dataclass_fields__
    assert {*fields, *OTHERS} - {"more"} == set(typing.get_type_hints(CallOptions)) <= set(listed)
    assert listed["temperature"].default == 0.0 and listed["max_new_tokens"].default == 64
    assert listed["chat"].default is (kind is specmm.VQAPipeline)


def test_from_pretrained_lists_its_parameters():
    for kind in (specmm.ImagePipeline, specmm.VQAPipeline, specmm.TextPipeline):
        listed = inspect.signature(kind.from_pretrained).parameters
        assert not any(p.kind is p.VAR_KEYWORD for p in listed.values())
        names = {"dtype", "torch_dtype", "device", "device_map", "quantization_config"}
        assert names | {"variant", "revision", "cache_dir", "drafter"} <= set(listed)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(generator=3), "generator must be a torch.Generator or a list of them"),
        (dict(seed="3"), "seed must be a whole number or a list of them, got '3'"),
        (dict(seed=[1.5]), "seed must be a whole number or a list of them, got 1.5"),
        (dict(method=object()), "method must be a name, such as ar, or a method"),
        (dict(temperature="hot"), "temperature must be a number, got 'hot'"),
        (dict(top_k=2.5), "top_k must be a whole number, got 2.5"),
        (dict(max_new_tokens="5"), "max_new_tokens must be a whole number, got '5'"),
        (dict(batch_size="5"), "batch_size must be a whole number, got '5'"),
        (dict(prompts=3), "prompt must be a text or a list of texts, got 3"),
        (dict(temprature=1), "unknown option 'temprature'; did you mean 'temperature'"),
        (dict(n_tokens=1), "unknown option 'n_tokens'; choose from: "),
        (dict(steps=1), "unknown option 'steps'; choose from: "),
        (dict(top=1), r"unknown option 'top'; did you mean 'top_k' or 'top_p'\?"),
        (dict(n=1), "unknown option 'n' of generate; give a list with the prompt so many times"),
    ],
)
def test_wrong_kinds_are_one_line(text_pipe, wrong, said):
    with pytest.raises(ValueError, match=said) as told:
        text_pipe(**{"prompts": PROMPT, "max_new_tokens": 2, **wrong})
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(device="gpu7"), "device must be one of this machine's"),
        (dict(device=1.5), "device must be one of this machine's"),
        (dict(dtype="float3"), "unknown dtype 'float3'; did you mean 'float32'"),
        (dict(dtype="float32", torch_dtype="float32"), "give dtype or torch_dtype"),
        (dict(method=3), "method must be a name"),
        (dict(quantization_config=8), "quantization_config must be a config of transformers"),
    ],
)
@pytest.mark.parametrize("kind", [specmm.VQAPipeline, specmm.TextPipeline])
def test_wrong_kinds_of_opening_are_one_line(kind, text_folder, wrong, said):
    name = "pocket/llava" if kind is specmm.VQAPipeline else text_folder
    with pytest.raises(ValueError, match=said) as told:
        kind.from_pretrained(name, **wrong)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("kind", [specmm.ImagePipeline, specmm.VQAPipeline, specmm.TextPipeline])
def test_a_name_that_is_none(kind):
    with pytest.raises(ValueError, match="model must be a folder, a pocket name or"):
        kind.from_pretrained(3)


@pytest.mark.parametrize("option", ["variant", "device_map", "quantization_config", "small"])
def test_what_a_family_does_not_take(tiny, option):
    with pytest.raises(ValueError, match=f"{option} does not serve models such as .*tiny"):
        specmm.ImagePipeline.from_pretrained(tiny, **{option: "x"})


def test_a_hub_id_with_a_revision(tiny, text_folder, monkeypatch, tmp_path):
    asked = []

    def fetched(name, source):
        asked.append((name, source))
        return tiny if name == "someone/tiny" else text_folder

    monkeypatch.setattr(zoo, "fetched", fetched)
    given = dict(revision="v2", cache_dir=tmp_path)
    for kind, name in ((specmm.ImagePipeline, "tiny"), (specmm.TextPipeline, "words")):
        kind.from_pretrained(f"someone/{name}", **given)
        assert asked.pop() == (f"someone/{name}", zoo.Source(**given)) and not asked


def test_a_text_pipeline_in_another_folder_and_dtype(text_folder, tmp_path):
    pipe = specmm.TextPipeline.from_pretrained(text_folder, "block", dtype="float32")
    given = dict(max_new_tokens=12)
    wanted = pipe(PROMPT, **given)
    pipe.save_pretrained(tmp_path)
    again = specmm.TextPipeline.from_pretrained(tmp_path, "block", torch_dtype=torch.float32)
    found = again(PROMPT, **given)
    assert found.texts == wanted.texts and found.stats.tau == wanted.stats.tau
    assert pipe.to(torch.float64) is pipe and pipe.dtype == torch.float64
    assert pipe.device == torch.device("cpu")
    assert pipe(PROMPT, **given).texts == wanted.texts
    assert next(pipe.drafter("block").parameters()).dtype == torch.float64


def test_a_given_drafter_moves_with_its_model(text_folder):
    place = text_folder / "drafters" / "text"
    pipe = specmm.TextPipeline.from_pretrained(text_folder, "text-draft", place, "float32")
    wanted = pipe(PROMPT, max_new_tokens=6).texts
    pipe.to("cpu", torch.float64)
    assert pipe.drafter("text-draft").model.dtype == torch.float64
    assert pipe(PROMPT, max_new_tokens=6).texts == wanted


def test_a_vqa_pipeline_in_another_folder_and_dtype(llava_pipe, tmp_path):
    """Its drafters go with it, and pictures may be arrays."""
    picture = draw_square()
    given = dict(max_new_tokens=8)
    wanted = llava_pipe(Image.fromarray(picture), "What is shown?", method="msd", **given)
    llava_pipe.save_pretrained(tmp_path)
    again = specmm.VQAPipeline.from_pretrained(tmp_path, "msd", dtype=torch.float32)
    for shown in (picture, torch.from_numpy(picture).permute(2, 0, 1) / 255):
        found = again(shown, "What is shown?", **given)
        assert found.answers == wanted.answers and found.stats.rounds == wanted.stats.rounds
    again.to(dtype=torch.float64)
    assert again.dtype == torch.float64
    assert again(picture, "What is shown?", **given).answers == wanted.answers


def test_a_map_of_one_device(text_folder):
    pytest.importorskip("accelerate")
    pipe = specmm.TextPipeline.from_pretrained(text_folder, dtype="float32", device_map="cpu")
    plain = specmm.TextPipeline.from_pretrained(text_folder, dtype="float32")
    given = dict(method="text-draft", max_new_tokens=6)
    assert pipe(PROMPT, **given).texts == plain(PROMPT, **given).texts


@pytest.mark.parametrize("kind", [specmm.VQAPipeline, specmm.TextPipeline])
def test_a_map_and_a_device_are_refused(kind, text_folder):
    with pytest.raises(ValueError, match="give device or device_map, not both, got 'cpu' and"):
        kind.from_pretrained(text_folder, device="cpu", device_map="auto")


def test_a_map_of_several_devices_is_refused(text_pipe, text_folder):
    class Spread:
        hf_device_map: typing.ClassVar = {"model.layers.0": 0, "model.layers.1": 1}

    placing = Placing.of(text_folder, Place(), device_map="auto")
    with pytest.raises(ValueError, match="must leave the whole model on one device, got 0, 1"):
        placing.put(Spread())


def test_a_quantised_target(text_folder):
    """TorchAO weights of 8 bits: texts are its own, whatever drafts; drafters stay as they are."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    pipe = specmm.TextPipeline.from_pretrained(
        text_folder, dtype="float32", quantization_config=config
    )
    layer = pipe.model.model.layers[0].mlp.up_proj
    assert type(layer.weight) is not torch.nn.Parameter, "it would not be quantised"
    wanted = pipe(PROMPT, method="ar", max_new_tokens=12)
    for method in ("text-draft", "block", "deer", "prompt-lookup"):
        assert pipe(PROMPT, method=method, max_new_tokens=12).texts == wanted.texts
    drafter = pipe.drafter("text-draft").model.model.layers[0].mlp.up_proj
    assert type(drafter.weight) is torch.nn.Parameter
    ids = pipe.tokenizer(PROMPT, return_tensors="pt")
    own = pipe.model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert pipe.text(own[0, ids["input_ids"].shape[1] :]) == wanted.texts[0]
