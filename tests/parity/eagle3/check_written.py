"""Reads heads that this library has written with the classes of speculators, EAGLE and SpecForge.

Two steps, in two environments (README.md): ``python check_written.py write OUT`` with this library,
``TORCHDYNAMO_DISABLE=1 python check_written.py read OUT EAGLE SPECFORGE`` with the others. Says how
far their states are from the recorded ones, for every head and layout.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).parent
SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=7)


def write(out: Path) -> None:
    """All recorded heads in all layouts that can hold them, and the target that they name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from specmm.hf.drafters.eagle3_files import LAYOUTS, load_eagle3, save_eagle3

    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(LlamaConfig(**SIZES, **heads)).save_pretrained(out / "target")
    target = LlamaForCausalLM.from_pretrained(out / "target")
    for file in sorted(HERE.glob("*/numbers.safetensors")):
        for layout in LAYOUTS:
            place = out / layout / file.parent.name
            try:
                head = load_eagle3(file.parent)
                save_eagle3(head, place, target, layout=layout, dtype=torch.float32)
            except ValueError as error:
                print(error)  # noqa: T201


def numbers(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """What was recorded of a head, and its first step's states [T, C]."""
    given = load_file(HERE / name / "numbers.safetensors")
    states = given.get("states", torch.zeros(0))
    return given, states[0] if states.ndim == 3 else states


@torch.no_grad()
def eagle(folder: Path, source: Path) -> Tensor:
    sys.path.insert(0, str(source / "eagle/model"))
    facts = json.loads((folder / "config.json").read_text())
    head = importlib.import_module("cnets").Model(types.SimpleNamespace(**facts, pretraining_tp=1))
    head.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    given, states = numbers(folder.name)
    if "embeddings" in given:
        head.embed_tokens.weight.copy_(given["embeddings"])
    head.reset()
    found, _ = head.eval()(given["hidden"], input_ids=given["tokens"], use_cache=True)
    return found[0] - states


@torch.no_grad()
def specforge(folder: Path, source: Path) -> Tensor:
    from transformers import LlamaConfig

    sys.path.insert(0, str(source))
    facts = json.loads((folder / "config.json").read_text())
    llama = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    kind: Any = llama.LlamaForCausalLMEagle3
    if facts["architectures"] == ["PEagleDraftModel"]:
        kind = importlib.import_module("specforge.modeling.draft.peagle").PEagleDraftModel
    head = kind(LlamaConfig(**facts)).eval()
    found = head.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert set(found.missing_keys) <= {"embed_tokens.weight"} and not found.unexpected_keys, found
    if kind is not llama.LlamaForCausalLMEagle3:
        return torch.zeros(1)  # its forward is for a GPU
    given, states = numbers(folder.name)
    if "embeddings" in given:
        head.embed_tokens.weight.copy_(given["embeddings"])
    tokens = given["tokens"]
    count = tokens.shape[1]
    hidden = head.project_hidden_states(given["hidden"])
    mask = head.prepare_decoder_attention_mask(torch.ones_like(tokens), hidden, 1, count, 0)
    places = given.get("positions", torch.arange(count)[None])
    read = head.embed_input_ids(tokens)
    return head.backbone(read, hidden, [[], []], mask, places)[0] - states


def speculators(folder: Path) -> Tensor:
    """Its configuration is validated and its weights loaded: how far they are from those written.

    Run from the folder that was written to, for the verifier's path may be relative.
    """
    from speculators import SpeculatorModel

    own = SpeculatorModel.from_pretrained(str(folder)).state_dict()
    state = load_file(folder / "model.safetensors")
    return torch.stack([(own[k].double() - v.double()).abs().max() for k, v in state.items()])


def read(out: Path, own_eagle: Path, own_specforge: Path) -> None:
    readers = {
        "speculators": speculators,
        "eagle": lambda folder: eagle(folder, own_eagle),
        "specforge": lambda folder: specforge(folder, own_specforge),
    }
    for layout, reader in readers.items():
        for folder in sorted((out / layout).iterdir()):
            apart = float(reader(folder).abs().max())
            print(f"{layout} {folder.name}: {apart:.1e}")  # noqa: T201
            assert apart < 1e-4


if __name__ == "__main__":
    places = [Path(name).resolve() for name in sys.argv[2:]]
    (write if sys.argv[1] == "write" else read)(*places)
