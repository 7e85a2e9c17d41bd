"""Published repositories of transformers' and drafters' layouts by name, from a hub on this
machine: models and drafters of every kind open, and answer what the same folders answer.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import specmm
from specmm import zoo
from specmm.diffusion_drafters.models.diffusion_lms import load_diffusion_lm
from specmm.hf.drafters.eagle3_files import load_eagle3
from specmm.image_ar.pipeline import family_of
from specmm.zoo import POCKET
from specmm.zoo.published import published_models
from tests.hub_server import Hub, attached
from tests.tiny.picture_kinds import KINDS

PARITY = Path(__file__).parents[1] / "parity"
DIFFUSION = {"dream-7b": "dream", "llada-8b": "llada", "mdlm-owt": "mdlm", "bd3lm-owt": "bd3lm"}
PICTURES = {"janus-pro-1b": "janus", "emu3-gen": "emu3", "anole-7b": "anole"}
PICTURES["glm-image"] = "glm_image"
LLAVA = POCKET / "llava"


def msd_as_released(folder):
    """The shipped head with the embeddings inside and pickled, as MSD's are."""
    source = LLAVA / "drafters" / "msd"
    facts = json.loads((source / "config.json").read_text())
    del facts["target_embeddings"], facts["target_fingerprint"]
    name = "language_model.model.embed_tokens.weight"
    state = load_file(source / "model.safetensors")
    state["embed_tokens.weight"] = load_file(LLAVA / "model.safetensors")[name]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts))
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def without(folder, out, *names):
    return Path(shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*names)))


@pytest.fixture(scope="module")
def repositories(tmp_path_factory, text_folder):
    root = tmp_path_factory.mktemp("hub")
    found = {name: PARITY / "dlm" / kind for name, kind in DIFFUSION.items()}
    found["eagle3-llama-3.1-8b"] = PARITY / "eagle3" / "llama"
    found["llava-1.5-7b"] = without(LLAVA, root / "llava", "drafters")
    found["msd-llava-1.5-7b"] = msd_as_released(root / "msd")
    found["qwen3-8b"] = without(text_folder, root / "text", "drafters")
    found["dflash-qwen3-8b"] = text_folder / "drafters" / "block"
    for name, kind in PICTURES.items():
        found[name] = root / kind
        found[name].mkdir()
        KINDS[kind].save(found[name])
    return {published_models()[name].repository: folder for name, folder in found.items()}


@pytest.fixture
def server(repositories, tmp_path, monkeypatch):
    with attached(Hub(repositories), tmp_path, monkeypatch) as hub:
        yield hub


@pytest.mark.parametrize(("name", "kind"), DIFFUSION.items())
def test_diffusion_language_models(name, kind, server):
    ours = load_diffusion_lm(zoo.find(name, zoo.TRANSFORMERS))
    own = load_diffusion_lm(PARITY / "dlm" / kind)
    tokens = torch.arange(1, 9)[None]
    assert torch.equal(ours.states(tokens), own.states(tokens))


def test_an_eagle3_head(server):
    ours = load_eagle3(zoo.find("eagle3-llama-3.1-8b", zoo.TRANSFORMERS)).state_dict()
    own = load_eagle3(PARITY / "eagle3" / "llama").state_dict()
    assert ours.keys() == own.keys()
    assert all(torch.equal(ours[name], own[name]) for name in own)


def test_a_language_model_and_its_dflash_drafter(server, text_folder):
    given = {"torch_dtype": torch.float32}
    pipe = specmm.TextPipeline.from_pretrained("qwen3-8b", "block", "dflash-qwen3-8b", **given)
    drafter = text_folder / "drafters" / "block"
    own = specmm.TextPipeline.from_pretrained(text_folder, "block", drafter, **given)
    call = {"max_new_tokens": 12, "temperature": 0.0}
    assert pipe("def add(", **call).texts == own("def add(", **call).texts


def test_a_vision_language_model_and_its_msd_head(server):
    given = {"torch_dtype": torch.float32}
    pipe = specmm.VQAPipeline.from_pretrained("llava-1.5-7b", "msd", "msd-llava-1.5-7b", **given)
    own = specmm.VQAPipeline.from_pretrained("pocket/llava", "msd", **given)
    picture = torch.zeros(48, 48, 3, dtype=torch.uint8).numpy()
    call = {"max_new_tokens": 8, "temperature": 0.0}
    ours, theirs = (p(picture_of(picture), "What is it?", **call) for p in (pipe, own))
    assert ours.answers == theirs.answers
    assert ours.stats.rounds == theirs.stats.rounds, "it drafts as the same head does"


def picture_of(array):
    from PIL import Image

    return Image.fromarray(array)


@pytest.mark.parametrize(("name", "kind"), PICTURES.items())
def test_picture_models_of_transformers(name, kind, server, repositories):
    family = family_of(name)
    assert family.pictures == "TransformersImagePictures"
    pipe = specmm.ImagePipeline.from_pretrained(name, torch_dtype=torch.float32)
    folder = repositories[published_models()[name].repository]
    own = specmm.ImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    theirs = own.transformer.state_dict()
    for key, value in pipe.transformer.state_dict().items():
        assert torch.equal(value, theirs[key]), key


def test_weights_are_fetched_in_one_format(server, tmp_path):
    state = load_file(PARITY / "eagle3" / "llama" / "model.safetensors")
    folder = tmp_path / "both"
    (folder / "original").mkdir(parents=True)
    shutil.copy(PARITY / "eagle3" / "llama" / "config.json", folder)
    save_file(state, folder / "model.safetensors")
    for name in ("pytorch_model.bin", "original/consolidated.00.pth", "training_args.bin"):
        torch.save(state, folder / name)
    (folder / "model.py").write_text("raise SystemExit")
    server.repositories["some/head"] = folder
    zoo.find("some/head", zoo.TRANSFORMERS)
    assert sorted(server.fetched) == ["some/head/config.json", "some/head/model.safetensors"]
