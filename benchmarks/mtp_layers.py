"""A checkpoint of pocket/coder with MTP layers, trained for a minute: there is none to download.

Shape letters: B rows, L tokens of a row, C width, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_layers import MtpModel

from specmm.hf.pretrained import find
from specmm.recipes.training.texts import read_files
from specmm.text.pipeline import TextPipeline

MODEL = "pocket/coder"
LENGTH = 128  # tokens of a row
ROWS = 4
STEPS = 200
RATE = 2e-3
DEPTH = 2  # drafts of each place that are trained: deeper ones by the last layer again
BESIDE = {"post_norm": "shared_head.norm"}  # as DeepSeek-V3's checkpoints name it


def write_checkpoint(folder: Path, count: int, steps: int = STEPS) -> None:
    """The model with ``count`` MTP layers, trained on Python files, in ``folder``."""
    source = find(MODEL)
    pipe = TextPipeline.from_pretrained(source, torch_dtype=torch.float32)
    for file in source.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    told = dict(num_mtp_layers=count, mtp_layer_types=["full_attention"] * count)
    pipe.model.config.update(told)
    layers = trained(pipe, count, steps)
    first = pipe.model.config.num_hidden_layers
    state = load_file(folder / "model.safetensors")
    for name, weight in layers.state_dict().items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            rest = rest.removeprefix("mtp_block.").replace("post_norm", BESIDE["post_norm"])
            state[f"model.layers.{first + int(number)}.{rest}"] = weight.contiguous()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | told))


def trained(pipe: TextPipeline, count: int, steps: int) -> Any:
    """``count`` layers that draft for ``pipe``, from the weights of its last layer."""
    torch.manual_seed(0)
    layers: Any = MtpModel(pipe.model, count).float().requires_grad_(False)
    last = pipe.model.get_decoder().layers[-1].state_dict()
    width = pipe.model.config.hidden_size
    for layer in layers.layers:
        layer.requires_grad_(True)
        layer.mtp_block.load_state_dict(last)
        layer.eh_proj.weight.data.copy_(torch.cat([0.1 * torch.eye(width), torch.eye(width)], 1))
        layer.post_norm.load_state_dict(pipe.model.get_decoder().norm.state_dict())
    weights = list(layers.layers.parameters())
    optimizer = torch.optim.AdamW(weights, lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    rows = encoded(pipe)
    for _ in range(steps):
        ids = rows[torch.randint(len(rows), (ROWS,))]
        loss = loss_of(pipe, layers, ids)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    return layers.eval().requires_grad_(False)


def encoded(pipe: TextPipeline) -> Tensor:
    """Rows [n, L] of Python source code that is not held out."""
    texts = sorted(read_files(False).items())
    ids = [i for _, text in texts[::40] for i in pipe.tokenizer(text)["input_ids"]]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


def loss_of(pipe: TextPipeline, layers: Any, ids: Tensor) -> Tensor:
    """How far the drafts of every place are from what the target says there, over ``DEPTH``."""
    with torch.no_grad():
        states = pipe.model.get_decoder()(ids).last_hidden_state  # [B, L, C]
        wanted = pipe.model.lm_head(states).softmax(-1)  # [B, L, V]
    embeddings = pipe.model.get_input_embeddings()(ids)
    places = torch.arange(ids.shape[1])[None]
    turned = layers.rotary_emb(states, position_ids=places)
    loss = states.new_zeros(())
    for depth in range(DEPTH):
        layer = layers.layers[min(depth, len(layers.layers) - 1)]
        before = F.pad(states[:, :-1], (0, 0, 1, 0))  # of the token before each
        states = layer(embeddings, before, turned, None, places, None)
        said = pipe.model.lm_head(states[:, depth + 1 :]).log_softmax(-1)
        loss = loss + F.kl_div(said, wanted[:, depth + 1 :], reduction="none").sum(-1).mean()
    return loss / DEPTH
