"""What a model of transformers that draws pictures cannot do is said in a sentence, in Python and
on the command line, which draws with it otherwise.
"""

import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import specmm
from specmm import methods
from tests.commands import as_json, refused, run
from tests.tiny import chameleon, glm_image, picture_kinds
from tests.tiny.picture_kinds import KINDS, STEPS, opened, saved, sized


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return saved(kind, tmp_path_factory)


@pytest.fixture(scope="module")
def pipe(folder):
    return opened(folder)


def seeded():
    return torch.Generator().manual_seed(0)


def flags(**options):
    return [str(x) for name, value in options.items() for x in (f"--{name}", value)]


def test_the_command_line_draws(kind, folder, tmp_path):
    sides = flags(**sized(kind))
    sides += flags(steps=2) if kind is KINDS["glm_image"] else []
    sides += [] if kind.tested == 1 else ["--negative-prompt", "blue"]
    words = ["generate", str(folder), "--prompt", "a red barn", "--method", "sjd", "--seed", "3"]
    told = as_json(*words, *sides, "--out", tmp_path)
    assert told["certificate"]["kind"] == "exact" and told["height"] == kind.size[0]
    assert Image.open(told["outputs"][0]).size == kind.size[::-1]


MISTAKES = [
    (dict(height=13, width=12), "height and width must be"),
    (dict(height=4096, width=96), "height and width must be|prompt and answer must fit"),
    (dict(height=12), "give both height and width"),
    (dict(prompt=" "), "prompt must say what to draw, got an empty one"),
    (dict(prompt="tree " * 600), "prompt and answer must fit the"),
    (dict(cfg=0.5), "cfg must be at least 1, got 0.5, use 1 for no guidance"),
    (dict(cfg=-1.0), "cfg must be at least 1, got -1.0"),
    (dict(cfg=float("nan")), "cfg must be at least 1, got nan"),
    (dict(negative_prompt="blue", cfg=1.0), "negative_prompt needs cfg above 1, got 1.0"),
    (dict(num_inference_steps=0), "num_inference_steps must be"),
]
OF_CALLS = [  # what the command line cannot say
    (dict(height="12", width=12), "height must be a whole number, got '12'"),
    (dict(prompt=3), "prompt must be a text or a list of texts, got 3"),
    (dict(prompt=["tree", None]), "prompt must be a text or a list of texts, got None"),
    (dict(num_inference_steps="5"), "num_inference_steps must be"),
    (dict(negative_prompt=["blue", "red"]), "must be one text or one for each of the 1 prompts"),
    (dict(negative_prompt=3), "negative_prompt must be a text or a list of texts, got 3"),
    (dict(cfg="3"), "cfg must be a number, got '3'"),
    (dict(cfg=True), "cfg must be a number, got True"),
    (dict(generator=[None]), "generator must be a torch.Generator or a list of them.*got None"),
    (dict(num_images_per_prompt=True), "num_images_per_prompt must be a whole number, got True"),
    (dict(method=methods.Draft("prompt-lookup", (2, 1))), "drafter prompt-lookup needs a chain"),
]
AS_FLAGS = {"num_inference_steps": "steps", "negative_prompt": "negative-prompt"}


def test_mistakes_are_told(kind, pipe, folder, tmp_path, monkeypatch):
    """By the pipeline and, in the same words, by the command line, which says nothing else."""
    words = ["generate", str(folder), "--prompt", "tree", "--out", str(tmp_path), *flags(cfg=-1)]
    assert run(*words).stderr.startswith("error: cfg must be at least 1")
    monkeypatch.setattr(specmm.runs.run, "open_model", lambda *_, **__: pipe)
    for wrong, said in MISTAKES:
        given = dict(prompt="tree", output_type="latent") | sized(kind) | wrong
        if wrong == dict(height=12):
            given.pop("width")
        with pytest.raises(ValueError, match=said) as told:
            pipe(**given)
        del given["output_type"]
        options = flags(**{AS_FLAGS.get(name, name): value for name, value in given.items()})
        line = refused("generate", folder, *options, "--out", tmp_path)
        assert line == f"error: {told.value}\n"
    for wrong, said in OF_CALLS:
        with pytest.raises(ValueError, match=said):
            pipe(**dict(prompt="tree", output_type="latent") | sized(kind) | wrong)


def test_what_only_some_models_have(kind, pipe):
    with pytest.raises(ValueError, match="at least one picture"):
        pipe([])
    given = dict(output_type="latent", **sized(kind))
    if pipe.facts.paints:
        with pytest.raises(ValueError, match="cfg must be at most 1"):
            pipe("tree", cfg=3, **given)
        with pytest.raises(ValueError, match="guidance_scale must be above 0, got 0"):
            pipe("tree", guidance_scale=0, **given)
    else:
        with pytest.raises(ValueError, match="whose pixels no diffusion model paints"):
            pipe("tree", **STEPS, **given)


@pytest.mark.parametrize("rule", ["lantern++-release(k=3)", "lantern(k=3, residual=lumina)"])
def test_a_rule_that_draws_excluded_tokens_draws_no_words(kind, pipe, rule):
    """It serves models whose head scores pictures alone."""
    method = methods.Draft("jacobi", None, rule)
    given = dict(method=method, output_type="latent", generator=seeded(), **sized(kind))
    if pipe.target(layout=pipe._layout(*kind.size)).undrawable is None:
        assert pipe("tree", **given).certificate.kind == "bounded"
        return
    words = "residual must be 'corrected' for .* here also words, which are not pictures"
    with pytest.raises(ValueError, match=words):
        pipe("tree", **given)
    assert pipe("tree", temperature=0, **given).certificate.kind == "bounded"


def test_pixels_that_are_no_numbers_are_not_drawn_black(kind, folder):
    """Of a model's own decoder, one beside it and a diffusion part, whatever drew the tokens."""
    pipe = opened(folder)
    decoder = pipe.decoder()
    pipe._decoder = lambda *given: decoder(*given).fill_(float("nan"))
    given = sized(kind) | (STEPS if pipe.facts.paints else {})
    with pytest.raises(ValueError, match="pixels must be finite, got NaN or infinity"):
        pipe("tree", **given)


def rewritten(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def error(folder):
    with pytest.raises(ValueError) as told:
        specmm.ImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    assert "\n" not in str(told.value)
    return str(told.value)


class Runs:
    """What a pickle can make Python do."""

    def __reduce__(self):
        return exec, ("print('a pickle ran')",)


def test_a_pickle_that_would_run_code_and_weights_that_are_not_there(tmp_path, capsys):
    KINDS["janus"].save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "must hold readable weights, got: Error no file named model.safet" in error(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"model": Runs()}, file)
    assert "tensors only, got a pickle that asks for exec, convert" in error(tmp_path)
    file.write_bytes(pickle.dumps(Runs(), protocol=4))
    assert "must hold tensors only, got a pickle of other things; fetch" in error(tmp_path)
    assert "ran" not in capsys.readouterr().out


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def lacking(file):
    """Without a weight."""
    state = load_file(file)
    del state[min(state)]
    save_file(state, file, metadata={"format": "pt"})


def misshapen(file):
    """With a weight that is a row short."""
    state = load_file(file)
    name = max(state, key=lambda name: state[name].numel())
    save_file(state | {name: state[name][1:].clone()}, file, metadata={"format": "pt"})


OWN = "diffusion_pytorch_model.safetensors"
PIXELS = [
    ("glm_image", f"transformer/{OWN}", cut, "got: Unable to load weights"),
    ("glm_image", "text_encoder/model.safetensors", lacking, "got 1 missing: "),
    ("glm_image", f"vae/{OWN}", Path.unlink, "got: Error no file"),
    ("glm_image", "scheduler/scheduler_config.json", Path.unlink, "parts that make pixels, got: "),
    ("anole", f"vq/{OWN}", lacking, "got 1 missing: "),
    ("anole", f"vq/{OWN}", misshapen, "got: Error.* size mismatch for "),
]


@pytest.mark.parametrize(("name", "file", "damage", "said"), PIXELS)
def test_what_makes_pixels_is_damaged(name, file, damage, said, tmp_path):
    """Tokens are drawn nevertheless."""
    kind = KINDS[name]
    kind.save(tmp_path)
    damage(tmp_path / file)
    pipe = opened(tmp_path)
    with pytest.raises(ValueError, match=said) as told:
        pipe("tree", **sized(kind))
    assert "\n" not in str(told.value) and str(tmp_path) in str(told.value)
    assert pipe("tree", output_type="latent", **sized(kind)).tokens.shape[0] == 1


def test_a_janus_that_only_writes(tmp_path):
    KINDS["janus"].save(tmp_path)
    rewritten(tmp_path, lambda state: {k: v for k, v in state.items() if "generation_" not in k})
    assert "must hold weights that score pictures (generation_head.…), got none" in error(tmp_path)


def test_a_chameleon_whose_pictures_are_masked(tmp_path):
    model = chameleon.model(mask_image_logits=True, z_loss_weight=0.0)
    chameleon.tokenizer().save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert "learned to draw picture tokens, but its config has mask_image_logits" in error(tmp_path)
    model = chameleon.model()
    with torch.no_grad():
        model.lm_head.weight[chameleon.PICTURE] = 0
    model.save_pretrained(tmp_path)
    assert "but its head scores all of them alike" in error(tmp_path)
    model = chameleon.model()
    model.config.vocabulary_map = chameleon.SPECIAL
    model.save_pretrained(tmp_path)
    assert "but its vocabulary has none" in error(tmp_path)


def test_tokenizers_that_do_not_name_what_pictures_need(tmp_path):
    """And a GLM-Image without its diffusion part draws tokens."""
    picture_kinds.loud(glm_image.model()).save_pretrained(tmp_path)
    words = glm_image.tokenizer()
    words.save_pretrained(tmp_path)
    bare = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    given = dict(height=96, width=64)
    assert bare("tree", output_type="latent", **given).tokens.shape == (1, 19 * 13 + 3 * 2)
    with pytest.raises(ValueError, match="has no diffusion part: give the folder of the Glm"):
        bare("tree", **given)
    picture_kinds.tokenizer().save_pretrained(tmp_path)
    wrong = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    with pytest.raises(ValueError, match="tokenizer must name the tokens around a picture's size"):
        wrong("tree", output_type="latent", **given)
