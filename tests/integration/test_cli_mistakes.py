"""Every mistake a user can make on the command line is one line on stderr and exit status 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.llava import _check_same, _place
from specmm.image_ar.tokens.loading import load_gpt, target_fingerprint
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from tests.commands import refused

Maker = Callable[..., LlamaGenPipeline]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--class hart", "did you mean 'heart'"),
        ("--class 5", "class id must be below 5"),
        ("--class heart --method lantern+", "did you mean 'lantern++'"),
        ("--class heart --method lantern++ -o lambd=2", "did you mean 'lambda_'"),
        ("--class heart --method lantern++ -o k=ten", "k must be a whole number"),
        ("--class heart --method lantern++ -o k=64", "k must be in [0, 62]"),
        ("--class heart --method lantern++ -o lambda=0.5", "lambda"),
        ("--class heart --method speculative -o tree=oak", "unknown tree 'oak'"),
        ("--class heart --method speculative -o tree=1,1,1,1,1", "at most the drafter's 4 levels"),
        ("--class heart --clas heart", "No such option: --clas"),
        ("--class heart --cfg=-1", "cfg must be finite and at least 0, got -1.0"),
        ("--class heart --cfg 2 --cfg-interval=-5", "cfg_interval must be at least -1"),
        ("--class heart --cfg inf", "cfg must be finite and at least 0, got inf"),
        ("--class heart --cfg 1e308", "cfg must be finite and at least 0, got 1e+308"),
        ("--class heart --cfg nan", "cfg must be finite and at least 0, got nan"),
        ("--class heart --temperature=-1", "temperature must be"),
        ("--class heart --top-k 65", "top_k must be at most the codebook size 64"),
        ("--class heart --top-k=-1", "top_k must be at least 0"),
        ("--class heart --top-p 0", "top_p must be in (0, 1]"),
        ("--class heart --dtype fp32", "did you mean 'float32'"),
        ("--class heart -n 0", "-n must be greater than or equal to 1, got 0"),
        ("--class heart --batch-size=-2", "-size must be greater than or equal to 1, got -2"),
        ("--class heart --seed many", "--seed must be a valid integer, got many"),
        ("--class heart --seed -1", "--seed must be greater than or equal to 0, got -1"),
        ("--class heart --cfg much", "--cfg must be a valid number, got much"),
        ("", "give --class or --prompt"),
        ("--class heart --prompt x", "not both"),
        ("--prompt heart", "draws classes, give --class NAME or ID in place of --prompt"),
    ],
)
def test_bad_options(tiny, tmp_path, arguments, message):
    assert message in refused("generate", tiny, *arguments.split(), "--out", tmp_path)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ask m --temprature 1", "--temprature; did you mean --temperature?"),
        ("bench m --tempereture 1", "--tempereture; did you mean --temperature?"),
        ("ask m --method- ar", "--method-; did you mean --method?"),
        ("complete m --max_new_tokens 3", "--max_new_tokens; did you mean --max-new-tokens?"),
        ("complete m --n-tokens 3", "--n-tokens"),
        ("ask m --top 3", "--top; did you mean --top-k or --top-p?"),
        ("complete m --n 3", "--n"),
        ("complete m --steps 3", "--steps, which is one of specmm generate"),
        ("ask m --prompt x", "--prompt, which is one of specmm generate, complete, plan, bench"),
        ("complete m --question x", "--question, which is one of specmm ask, plan, bench"),
        ("generate m --chat", "--chat, which is one of specmm complete"),
        ("eval kid --nearst 3", "--nearst"),
    ],
)
def test_a_hint_names_an_option_of_the_command_or_whose_it_is(words, said):
    assert refused(*words.split()).strip() == f"error: No such option: {said}"


def test_bad_models_and_commands(tmp_path):
    assert "did you mean 'generate'" in refused("generat").lower()
    words = f"--class 0 --out {tmp_path}"
    assert "unknown pocket model" in refused(f"generate pocket/lamagen {words}")
    (tmp_path / "empty").mkdir()
    assert "model_index.json" in refused(f"generate {tmp_path}/empty {words}")
    assert "generate needs a MODEL" in refused("generate")


def test_a_small_model_beside_none(tmp_path):
    train = ("train", "llava", "--out", tmp_path / "out")
    both = ("--set", f"drafts_for={tmp_path}", "--set", f"expert_of={tmp_path}")
    assert "not both" in refused(*train, *both)
    assert "must hold a model (config.json)" in refused(*train, *both[2:])
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    for role, place in (("drafts_for", "drafters/vlm"), ("expert_of", "drafters/experts/7")):
        larger = tmp_path / role
        (larger / place).mkdir(parents=True)
        (larger / "config.json").write_text("{}")
        assert str(larger / place) in str(
            _place(tmp_path, *((larger, None) if "drafts" in role else (None, larger)), 7)
        )
        (larger / place / "config.json").write_text("{}")
        assert f"{larger / place} holds a model already" in refused(
            *train, "--set", "seed=7", "--set", f"{role}={larger}"
        )


def test_a_folder_in_which_another_model_was_begun(tmp_path):
    _check_same(tmp_path, {"seed": 1, "dim": 8})
    _check_same(tmp_path, {"seed": 1, "dim": 8})
    with pytest.raises(ValueError, match=r"another model \(seed 1\), give this one its own --out"):
        _check_same(tmp_path, {"seed": 2, "dim": 8})


def test_an_unwritable_folder(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    for command in (("generate", tiny, "--class", "heart"), ("demo", "--model", tiny)):
        line = refused(*command, "--out", tmp_path / "file/out")
        assert f"cannot write to {tmp_path}/file/out" in line and "--out" in line


def drawn_by(folder, *words):
    """Words of a command that draws with the model in ``folder``."""
    return "generate", folder, "--class", "heart", "--out", folder / "out", *words


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        ({"layers.1.attention.wo.weight": None}, ["missing", "layers.1.attention.wo.weight"]),
        ({"layers.7.bias": torch.zeros(1)}, ["layers.7.bias"]),
        ({"norm.weight": torch.ones(65)}, ["shape", "norm.weight"]),
        ({"norm.weight": torch.full((64,), float("nan"))}, ["NaN", "norm.weight"]),
    ],
)
def test_damaged_checkpoints(copy, damage, names):
    file = copy / "transformer/model.safetensors"
    state = load_file(file) | damage
    save_file({name: weight for name, weight in state.items() if weight is not None}, file)
    line = refused(*drawn_by(copy))
    assert all(name in line for name in names)


def test_a_truncated_or_absent_checkpoint(copy, tmp_path):
    file = copy / "vq/model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert str(file) in refused(*drawn_by(copy))
    file.unlink()
    assert "no checkpoint at" in refused(*drawn_by(copy))


@pytest.mark.parametrize("method", ["ar", "speculative"])
def test_logits_that_are_not_finite_name_round_and_model(copy, tmp_path, method):
    file = copy / "transformer/model.safetensors"
    state = load_file(file)
    state["output.weight"].fill_(3e38)
    save_file(state, file)
    shutil.rmtree(copy / "drafters/eagle")
    facts = copy / "drafters/block/config.json"
    fingerprint = fingerprint_of(copy)
    found = json.loads(facts.read_text()) | {"target_fingerprint": fingerprint}
    facts.write_text(json.dumps(found))
    line = refused(*drawn_by(copy, "--method", method, "--dtype", "float32"))
    assert "logits must be finite" in line and str(copy) in line and "round 0" in line


def fingerprint_of(folder: Path) -> str:
    return target_fingerprint(load_gpt(folder / "transformer"))


def test_a_tokenizer_of_another_codebook(copy, make_tiny, tmp_path):
    make_tiny(vocab=32, drafters=False).save_pretrained(tmp_path / "other")
    shutil.rmtree(copy / "vq")
    shutil.copytree(tmp_path / "other/vq", copy / "vq")
    line = refused(*drawn_by(copy, "--method", "lantern++"))
    assert "must share a codebook, got 32 codes and 64 tokens" in line


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_a_drafter_of_another_target(copy, make_tiny, tmp_path, kind):
    make_tiny(seed=1).save_pretrained(tmp_path / "other")
    shutil.rmtree(copy / "drafters")
    shutil.copytree(tmp_path / "other/drafters" / kind, copy / "drafters" / kind)
    line = refused(*drawn_by(copy))
    assert "target" in line and str(copy / "drafters" / kind) in line


def test_a_model_without_drafters(copy, tmp_path):
    shutil.rmtree(copy / "drafters")
    assert "no 'block' drafter" in refused(*drawn_by(copy, "--method", "lantern++"))


def test_a_model_of_an_unknown_family(tmp_path):
    (tmp_path / "model_index.json").write_text('{"family": "lamagen"}')
    assert "did you mean 'llamagen'" in refused("generate", tmp_path, "--class", 1)
