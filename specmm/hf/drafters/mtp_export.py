"""Fine-tuned MTP layers under the names of their target's own checkpoint, where vLLM and SGLang
look for them.

For these layers transformers cannot undo the conversions of loading (renaming, stacking experts,
splitting). So it loads a copy of the checkpoint whose entries are consecutive numbers: the place
where a number ends up shows where its entry belongs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from specmm.hf.drafters.files import read_state
from specmm.hf.drafters.mtp_layers import load_layers, named_layers, own_weights
from specmm.hf.drafters.mtp_layouts import MtpModel
from specmm.loading.checkpoints import State, save_readable, some_names

CONFIGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def to_checkpoint(folder: Path, target: PreTrainedModel, out: Path) -> str:
    """Write the layers in ``folder``, fine-tuned for ``target``, to ``out``; return a note for
    users.

    Raises ``ValueError`` unless reading ``out`` gives back the same weights.
    """
    source = Path(str(target.config.name_or_path))
    tuned = own_weights(load_layers(folder, target).model)
    main = named_layers(target, source)
    pattern: Any = MtpModel.get_mtp_weights_regex(main)
    stored = {name: x for name, x in read_state(source).items() if pattern.search(name)}
    written = _placed(tuned, _numbered(stored, target, source), stored)
    out.mkdir(parents=True, exist_ok=True)
    for name in CONFIGS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    save_readable(written, out / "model.safetensors", {"format": "pt"})
    again = own_weights(load_layers(out, target).model)
    if wrong := [k for k, x in tuned.items() if not torch.equal(again[k].to(x.dtype), x)]:
        shutil.rmtree(out)
        raise ValueError(
            f"MTP layers cannot be written in the layout of {source}: {some_names(wrong)} would "
            f"change; use drafter={folder}"
        )
    return (
        f"{some_names(sorted(written))}, as the checkpoint of {source.name} has them: where an "
        f"engine reads that, {out / 'model.safetensors'} takes their place"
    )


def _numbered(stored: State, target: PreTrainedModel, source: Path) -> State:
    """For each weight of the loaded layers, the numbers of its entries among all entries of the
    ``stored`` weights, counted in the order of :func:`_order`.
    """
    numbers: State = {}
    begin = 0
    for name in _order(stored):
        size = stored[name].numel()
        counted = torch.arange(begin, begin + size, dtype=torch.float64)
        numbers[name] = counted.view(stored[name].shape)
        begin += size
    with TemporaryDirectory() as folder:
        path = Path(folder)
        save_file(numbers, path / "model.safetensors", {"format": "pt"})
        shutil.copyfile(source / "config.json", path / "config.json")
        main = named_layers(target, path)
        main.config.dtype = torch.float64
        weights = own_weights(MtpModel.from_pretrained(main))
    # weights that do not come from the checkpoint have fractions or repeated numbers
    return {k: x for k, x in weights.items() if len(x.unique()) == x.numel() and not (x % 1).any()}


def _order(weights: State) -> list[str]:
    """The names of ``weights``, small ones first: some must stay float32, which
    represents only small integers exactly.
    """
    return sorted(weights, key=lambda name: (weights[name].numel(), name))


def _placed(tuned: State, numbers: State, stored: State) -> State:
    """The ``stored`` weights, with the ``tuned`` weights at the positions in ``numbers``."""
    widest = max((x.dtype for x in tuned.values()), key=lambda dtype: torch.finfo(dtype).bits)
    flat = torch.cat([stored[name].flatten().to(widest) for name in _order(stored)])
    for name, places in numbers.items():
        flat[places.long().flatten()] = tuned[name].flatten().to(flat)
    sizes = [stored[name].numel() for name in _order(stored)]
    parts = zip(_order(stored), flat.split(sizes), strict=True)
    return {name: x.view(stored[name].shape).to(stored[name].dtype).clone() for name, x in parts}
