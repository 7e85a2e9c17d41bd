"""``specmm inspect`` and ``specmm export``: what folders hold, by their headers alone, whether they
fit a target, and drafters written in other layouts.

Shape letters: K drafts, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from specmm import zoo
from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.diffusion_drafters.block_drafters import ChainDrafter
from specmm.diffusion_drafters.models.dflash import DFlash, load_dflash, save_dflash
from specmm.diffusion_drafters.models.dflash_config import DFlashConfig
from specmm.diffusion_drafters.sources import DFlashSource
from specmm.hf.drafters.drafter_formats import FORMATS, ModelFolder, recognised
from specmm.hf.drafters.drafting import method_of
from specmm.hf.drafters.inspection import inspect
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.loading.checkpoints import fingerprint
from specmm.runs.export import export
from specmm.text.pipeline import TextPipeline
from tests.commands import as_json, refused, run, succeed
from tests.tiny.parts import SIZES, shaken

PARITY = Path(__file__).parents[1] / "parity"
ZOO = Path(zoo.__file__).parent / "pocket"
KINDS = {
    "blocks/speculators-dflash-few": ("speculators DFlash drafter", ("block",)),
    "blocks/speculators-dspark-rnn": ("speculators DSpark drafter", ("block",)),
    "blocks/specforge-domino": ("DFlash drafter as of z-lab or SpecForge", ("block",)),
    "dlm/dflash": ("DFlash drafter as of z-lab or SpecForge", ("block",)),
    "dlm/dream": ("diffusion language model", ("diffuspec", "specdiff", "deer")),
    "dlm/mdlm": ("diffusion language model", ("diffuspec", "specdiff", "deer")),
    "eagle3/llama": ("speculators EAGLE-3 head", ("eagle3",)),
    "eagle3/peagle": ("speculators P-EAGLE head", ("eagle3",)),
    "eagle3/safeailab": ("EAGLE-3 head as of SafeAILab or SpecForge", ("eagle3",)),
    "eagle3/specforge_mrope": ("EAGLE-3 head as of SafeAILab or SpecForge", ("eagle3",)),
    "blocks/target": ("language model", ("text-draft",)),
}
POCKET = {
    "coder/drafters/deer": "DEER drafter",
    "llava/drafters/msd": "MSD head",
    "llamagen/drafters/block": "picture model's block drafter",
    "llamagen/drafters/eagle": "picture model's EAGLE head",
    "llava": "vision-language model",
    "smollm2": "language model in a Python package",
    "var": "picture model of this library",
}


@pytest.mark.parametrize("case", KINDS)
def test_folders_of_every_layout_are_told_apart(case):
    title, methods = KINDS[case]
    found = inspect(PARITY / case)
    assert (found.format, found.methods) == (title, methods)
    assert method_of(PARITY / case) == methods[0]


@pytest.mark.parametrize("case", POCKET)
def test_what_ships_is_told_apart(case):
    assert inspect(ZOO / case).format == POCKET[case]


def test_a_llava_as_its_authors_write_it_is_no_head(tmp_path):
    """Whose pickled weights, in parts, are not read."""
    facts = SIZES | {"model_type": "llava", "mm_vision_tower": "openai/clip", "vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    files = [f"pytorch_model-{i}-of-2.bin" for i in (1, 2)]
    for file in files:
        torch.save({}, tmp_path / file)
    index = {"weight_map": dict(zip("ab", files, strict=True))}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert inspect(tmp_path).format == "vision-language model"
    said = refused("serve", "pocket/llava", "--method", "msd", "--drafter", tmp_path)
    assert f"got a vision-language model in {tmp_path}" in said


def test_a_release_says_its_target():
    wanted = inspect(PARITY / "blocks/speculators-dspark-vanilla").wanted
    assert wanted.name == "tiny/target" and wanted.architectures == ("Qwen3ForCausalLM",)
    assert (wanted.width, wanted.vocabulary, wanted.reads) == (32, 64, (0, 2))
    assert inspect(PARITY / "eagle3/llama").wanted.reads == (1, 2, 3)
    assert inspect(PARITY / "dlm/dflash").wanted.layers == 8


def test_no_weight_is_read(tmp_path, monkeypatch):
    """A file of a header alone, whose data is a hole, is as good."""
    monkeypatch.setattr("safetensors.torch.load_file", None)
    shutil.copytree(PARITY / "blocks/speculators-dflash", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    file.write_bytes(whole[:start])
    with file.open("r+b") as opened:
        opened.truncate(len(whole))
    assert inspect(tmp_path).sizes["parameters"] == 17632


def test_a_model_and_the_drafters_beside_it():
    found = as_json("inspect", "pocket/coder", "--target", "pocket/coder")
    assert {one["format"] for one in found["drafters"]} == {
        "DFlash drafter as of z-lab or SpecForge",
        "DEER drafter",
        "diffusion language model",
        "language model",
    }
    assert found["use"].endswith("--method auto")
    assert found["sizes"]["parameters"] == sum(
        x.numel() for x in load_file(ZOO / "coder/model.safetensors").values()
    )


@pytest.mark.parametrize(
    ("drafter", "target", "why"),
    [
        ("blocks/speculators-dflash", "blocks/target", []),
        ("blocks/specforge-dspark-rnn", "blocks/target", []),
        (
            "dlm/dflash",
            "blocks/target",
            ["width 64, got 32", "vocabulary 160", "layers 8", "reads layers [1, 3, 5]"],
        ),
        ("eagle3/llama", "blocks/target", ["width 16", "vocabulary 40", r"layers [1, 2, 3]"]),
        ("dlm/dream", "blocks/target", []),  # as many tokens, but for padding
    ],
)
def test_whether_it_fits_a_target(drafter, target, why, tmp_path):
    place = shutil.copytree(PARITY / target, tmp_path / "target")
    found = as_json("inspect", PARITY / drafter, "--target", place)
    assert len(found["misfits"]) == len(why)
    assert all(part in said for part, said in zip(why, found["misfits"], strict=True))


@pytest.mark.parametrize(
    "drafter",
    [
        ZOO / "coder/drafters/block",
        ZOO / "coder/drafters/diffusion",
        ZOO / "coder/drafters/text",
        ZOO / "llamagen/drafters/block",  # of pictures
        ZOO / "llava",  # of questions
        PARITY / "dlm/mdlm",  # without the n-grams of its method
        PARITY / "dlm/dream",
    ],
    ids=lambda place: "/".join(place.parts[-3:]),
)
def test_it_fits_where_it_is_used(drafter):
    """What is said of a target is what its use says."""
    found = inspect(drafter, "pocket/coder")
    try:
        pipe = TextPipeline.from_pretrained("pocket/coder", drafter=str(drafter))
        pipe("x", max_new_tokens=2)
        used = True
    except ValueError:
        used = False
    assert used == (found.misfits == ())


def test_a_drafter_of_other_weights_of_the_same_sizes_does_not_fit(text_folder, tmp_path):
    other = shutil.copytree(text_folder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file({**weights, name: -weights[name]}, other / "model.safetensors", {"format": "pt"})
    drafter = text_folder / "drafters/block"
    assert inspect(drafter, text_folder).misfits == ()
    (why,) = inspect(drafter, other).misfits
    assert "drafter must be of this target" in why


def test_layers_for_multi_token_prediction_are_named(tmp_path):
    folder = shutil.copytree(PARITY / "blocks/target", tmp_path / "target")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"num_nextn_predict_layers": 2}))
    assert "2 MTP layers" in inspect(folder).notes[0]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (None, "got no config.json"),
        ({"model_type": "t5"}, "got a config.json of 't5'"),
        ({"speculators_model_type": "xpress"}, ""),
    ],
)
def test_folders_that_hold_nothing_known(facts, message, tmp_path):
    if facts is not None:
        (tmp_path / "config.json").write_text(json.dumps(facts))
    done = run("inspect", tmp_path)
    if message:
        assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1
    else:
        assert "nothing here uses it" in done.stdout


def test_a_damaged_file_is_named(tmp_path):
    shutil.copytree(PARITY / "blocks/speculators-dflash", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model.safetensors must be a safetensors file"):
        inspect(tmp_path)


# ---- export


def model_folder(folder: Path) -> Any:
    """The tiny target with a tokenizer that says nothing."""
    shutil.copytree(PARITY / "blocks/target", folder, dirs_exist_ok=True)
    words = {f"w{i}": i for i in range(64)}
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder)
    return tf.AutoModelForCausalLM.from_pretrained(folder).eval()


def own_drafter(folder: Path, model: Any, tokens=(), markov=0, recurrent=0, layers=(0, 1)) -> Any:
    """A drafter of ours beside the ``model``'s other files."""
    torch.manual_seed(2)
    sizes = SIZES | dict(vocab_size=64, intermediate_size=24, num_hidden_layers=1, head_dim=8)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=64)
    sizes = tf.Qwen3Config(**sizes, attn_implementation="sdpa")
    config = DFlashConfig(sizes, 5, 63, layers, len(tokens), markov, recurrent)
    made = shaken(DFlash(config), std=0.4)
    if tokens:
        made.set_ids(torch.tensor(tokens))
    embeddings = model.get_input_embeddings().weight
    save_dflash(made, folder / "drafters/block", embeddings, torch.float32)
    return folder / "drafters/block"


@torch.inference_mode()
def drafted(folder: Path, model: Any, temperature: float) -> Any:
    target = VLMTarget(model, Processor(temperature), "tiny")
    drafter = ChainDrafter(DFlashSource(load_dflash(folder), target), target)
    prompt = VLMPrompt(padded([[5, 9, 33, 2, 41]], "cpu"), 16)
    feedback = Feedback(target.prefill(prompt, drafter.max_nodes), torch.tensor([7]))
    drafter.begin(feedback, Clock())
    return drafter.propose(feedback, Uniforms.from_seeds([3]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("layout", "options", "algorithm"),
    [
        ("speculators", {}, "dflash"),
        ("speculators", {"tokens": (40, 3, 17, 22, 5, 60)}, "dflash"),
        ("speculators", {"markov": 4}, "dspark"),
        ("speculators", {"tokens": (40, 3, 17, 22, 5, 60), "markov": 4}, "dspark"),
        ("specforge", {}, None),
        ("specforge", {"layers": (0, 2)}, None),
    ],
)
def test_an_exported_drafter_drafts_the_same(layout, options, algorithm, temperature, tmp_path):
    model = model_folder(tmp_path / "model")
    place = own_drafter(tmp_path / "model", model, **options)
    made = as_json("export", place, "--format", layout, "--out", tmp_path / "out")
    assert made["layout"] == layout
    facts = json.loads((tmp_path / "out/config.json").read_text())
    assert facts.get("speculators_model_type") == algorithm
    before, after = (drafted(f, model, temperature) for f in (place, tmp_path / "out"))
    if not temperature:
        assert torch.equal(before.tokens, after.tokens)
    else:  # draws go by the order of a drafter's tokens, distributions do not
        torch.testing.assert_close(before.probs[:, 1], after.probs[:, 1], rtol=0, atol=1e-5)
    found = inspect(tmp_path / "out", tmp_path / "model")
    assert found.misfits == () and found.methods == ("block",)
    assert found.wanted.fingerprint == fingerprint(model.get_input_embeddings().weight)


def test_what_servers_read_of_a_config_is_there(tmp_path):
    """vLLM's reader of speculators' folders takes these, and counts layers from 0."""
    model = model_folder(tmp_path / "model")
    place = own_drafter(tmp_path / "model", model, markov=4)
    export(str(place), "speculators", tmp_path / "out")
    facts = json.loads((tmp_path / "out/config.json").read_text())
    own = facts["speculators_config"]
    assert own["proposal_methods"][0]["speculative_tokens"] == 4
    assert own["verifier"]["name_or_path"] == "model", "not where it lies here"
    assert [number - 1 for number in facts["aux_hidden_state_layer_ids"]] == [0, 1]
    assert facts["mask_token_id"] == 63 and facts["transformer_layer_config"]["vocab_size"] == 64
    assert facts["sample_from_anchor"] is False and facts["markov_head_type"] == "vanilla"
    names = set(load_file(tmp_path / "out/model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} <= names
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} <= names


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("speculators", {"recurrent": 4}, "no field for a memory along the block"),
        ("speculators", {"layers": (0, 2)}, "no field for the last layer's states"),
        ("specforge", {"tokens": (1, 2)}, "no field for a vocabulary of the drafter's own"),
        ("specforge", {"markov": 2}, "no field for a table of pairs"),
        ("eagle", {}, "has no form as eagle"),
        ("gguf", {}, "format must be one of checkpoint, eagle, specforge, speculators, got"),
    ],
)
def test_what_a_layout_cannot_describe(layout, options, message, tmp_path):
    model = model_folder(tmp_path / "model")
    place = own_drafter(tmp_path / "model", model, **options)
    command = ["export", str(place), "--format", layout, "--out", str(tmp_path / "out")]
    assert message in refused(*command)
    assert not (tmp_path / "out").exists()


def test_an_export_needs_its_target_and_a_new_folder(tmp_path):
    loose = shutil.copytree(PARITY / "blocks/speculators-dflash", tmp_path / "loose")
    with pytest.raises(ValueError, match="has no form as speculators"):
        export(str(loose), "speculators", tmp_path / "out")
    zlab = shutil.copytree(PARITY / "dlm/dflash", tmp_path / "zlab")
    with pytest.raises(ValueError, match="give --target MODEL"):
        export(str(zlab), "specforge", tmp_path / "out")
    with pytest.raises(ValueError, match="which is there; name another"):
        export(str(zlab), "specforge", zlab)


def test_an_export_is_of_the_targets_own_drafter(tmp_path):
    model_folder(tmp_path / "model")
    with pytest.raises(ValueError, match="it needs a target of width 16, got 32"):
        export(str(PARITY / "eagle3/llama"), "eagle", tmp_path / "out", str(tmp_path / "model"))


def test_a_head_of_eagle3_is_written_by_its_own_writer():
    kinds = [one for one in FORMATS if one.methods == ("eagle3",)]
    assert len(kinds) == 3
    assert all(set(one.exports) == {"speculators", "eagle", "specforge"} for one in kinds)
    assert recognised(ModelFolder(PARITY / "eagle3/llama")) in kinds


# ---- the method need not be named


def test_a_drafter_says_its_method(tmp_path):
    model = model_folder(tmp_path / "model")
    own_drafter(tmp_path / "model", model)
    loose = shutil.move(tmp_path / "model/drafters/block", tmp_path / "loose")
    pipe = TextPipeline.from_pretrained(
        tmp_path / "model", drafter=loose, torch_dtype=torch.float32
    )
    assert pipe.method.name == "block"
    options = {"max_new_tokens": 8, "stop": ()}
    assert pipe("w3 w9", **options).texts == pipe("w3 w9", method="ar", **options).texts
    command = ["complete", str(tmp_path / "model"), "-p", "w3 w9", "--drafter", str(loose)]
    done = succeed(*command, "--max-new-tokens", "4", "--json")
    assert json.loads(done.stdout)["method"] == "block"
    vae = shutil.copytree(ZOO / "llamagen/drafters/block", tmp_path / "vae")
    with pytest.raises(ValueError, match=r"one of the methods .* for method speculative; give"):
        TextPipeline.from_pretrained(tmp_path / "model", drafter=vae)


def test_weights_of_one_header_in_several_files(tmp_path):
    folder = shutil.copytree(PARITY / "blocks/speculators-dflash", tmp_path / "split")
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: whole[name] for name in some}, folder / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inspect(folder).sizes["parameters"] == 17632
