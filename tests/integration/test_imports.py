"""What a command imports: nothing that it does not use. Users of diffusers get its pipelines."""

import json
import subprocess
import sys

import pytest
from diffusers import DiffusionPipeline

import specmm
from specmm.image_ar import shared
from specmm.image_ar.scales import pipeline as scales
from specmm.image_ar.tokens import pipeline as tokens
from specmm.runs.run import open_model
from tests.noisy import noisy

SAY = """
import json, sys
from specmm.cli import main
try:
    main()
finally:
    print(json.dumps(list(sys.modules)), file=open("modules.json", "w"))
"""
NEVER = {"diffusers", "gradio", "matplotlib", "pandas", "specmm.metrics", "specmm.recipes"}
BY_TRANSFORMERS = {"scipy", "sympy", "torch._dynamo", "torch._inductor", "torchvision"}
PICTURES = {*NEVER, *BY_TRANSFORMERS, "accelerate", "transformers", "specmm.vlm"}
AUTO = "transformers.models.auto.processing_auto"
COMMANDS = {
    "zoo": {*PICTURES, "PIL", "numpy", "torch"},
    "generate tiny --class heart": PICTURES,
    "generate pocket/var --class heart": PICTURES,
    "complete text -p a --max-new-tokens 2": {*NEVER, AUTO, "specmm.vlm.pipeline"},
    "ask pocket/llava picture.png -q What? --max-new-tokens 2": NEVER,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_what_it_uses(command, tiny, text_folder, tmp_path):
    folders = {"tiny": tiny, "text": text_folder}
    noisy((96, 96), 1).save(tmp_path / "picture.png")
    words = [str(folders.get(word, word)) for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-c", SAY, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = set(json.loads((tmp_path / "modules.json").read_text()))
    assert "typer" in found and not COMMANDS[command] & found


@pytest.mark.parametrize("module", [tokens, scales])
def test_users_get_pipelines_of_diffusers_and_commands_the_same_without(module, tiny, tmp_path):
    name = tiny if module is tokens else "pocket/var"
    own = specmm.ImagePipeline.from_pretrained(name)
    kind = tokens.LlamaGenPipeline if module is tokens else scales.VARPipeline
    assert type(own) is kind and isinstance(own, DiffusionPipeline)
    assert set(own.components) >= {"transformer"} and callable(own.progress_bar)
    alone = open_model("images", str(name))
    assert isinstance(alone, kind.__mro__[1]) and not isinstance(alone, DiffusionPipeline)
    given = dict(classes=[3], output_type="latent")
    own.save_pretrained(tmp_path / "own")
    alone.to("cpu").save_pretrained(tmp_path / "alone")
    for file in (tmp_path / "own").rglob("*.json"):
        again = tmp_path / "alone" / file.relative_to(tmp_path / "own")
        assert again.read_text() == file.read_text()
    seeds = [shared.torch.Generator().manual_seed(1) for _ in range(2)]
    drawn = [pipe(generator=seed, **given) for pipe, seed in zip((own, alone), seeds, strict=True)]
    assert drawn[0].tokens.equal(drawn[1]["tokens"]) and list(drawn[0]) == list(drawn[1])
    assert drawn[0][1] is drawn[0].tokens and len(drawn[0].to_tuple()) == len(drawn[0]) == 7
