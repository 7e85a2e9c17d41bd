"""The multi-token prediction (MTP) layers of a target's own checkpoint, as transformers has them.

A checkpoint stores them beside its other weights: as further layers (DeepSeek-V3, GLM-4 MoE, Step)
or under ``mtp`` (Qwen 3.5, Mellum). transformers' ``MtpModel`` builds them from the target's own
layer class and reads either layout. This module tells it the number of layers if the config has
that under another name, and the names of their weights for any depth of the target. Layouts that
``MtpModel`` does not read are in ``mtp_layouts``.

Shape letters: B rows, N tokens, C width, S slots.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import MtpCache

from specmm.core.cache import Cache, LayerSize
from specmm.core.derived import fact
from specmm.hf.drafters.files import cast, check_target
from specmm.hf.drafters.mtp_layouts import MtpModel, count_of, layout_of
from specmm.hf.models.cache_layers import as_transformers
from specmm.hf.models.families import FULL, SLIDING, cache_name, stored_sizes
from specmm.loading.checkpoints import (
    check_weights,
    embeddings_of,
    fingerprint,
    load_strict,
    read_checkpoint,
    read_json,
    some_names,
    write_checkpoint,
)
from specmm.loading.hardware import prepack

OWN = ("layers", "shared_post_norm")  # the others are the target's
TUNED = "mtp"  # the model type of folders that hold fine-tuned layers
ADVICE = "use a checkpoint that holds them, or another method such as prompt-lookup"


@dataclass
class MtpLayers:
    """The loaded ``model`` of transformers, and the ``sizes`` of its layers' cache entries.

    Unless ``chained``, each layer reads the target's own states, which the layers before it pass
    on.
    """

    model: Any
    sizes: tuple[LayerSize, ...]
    chained: bool = True
    method = "mtp"

    @classmethod
    def of(cls, model: MtpModel) -> MtpLayers:
        """Layers from a loaded ``model``; runs a token to find the sizes of cache entries."""
        layout = layout_of(model.config)
        return cls(model, _sizes(model), layout is None or layout.chained)

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.sizes)

    def predicted(self, states: Tensor) -> Tensor:
        """The predictions [B, N, C] among the ``states`` that a layer returns."""
        return states[..., : self.model.config.hidden_size]

    def windows(self) -> list[int]:
        """Positions that each layer attends to, itself included; 0 for all.

        Raises ``ValueError`` for layers that have states.
        """
        config = self.model.config
        types = getattr(config, "layer_types", None) or [FULL] * self.count
        strange = sorted(set(types) - {FULL, SLIDING})
        if strange:
            raise ValueError(
                f"MTP layers must attend to all tokens or a window, got {strange[0]}; use another "
                "method such as prompt-lookup"
            )
        configs = config.per_layer_config if config.is_heterogeneous else [config] * self.count
        return [
            int(configs[number].sliding_window) if kind == SLIDING else 0
            for number, kind in zip(range(self.count), types, strict=True)
        ]


class LayerSlots:
    """The ``layers`` with their ``cache``, in which slot s belongs to the token at place s + 1.

    Layer k has no input for a text's first k slots: its entries there are masked.
    """

    def __init__(self, layers: MtpLayers, windows: Sequence[int], cache: Cache) -> None:
        self.model = layers.model
        self.chained = layers.chained
        self.windows = windows
        self.cache_name = cache_name(layers.model.layers[0])
        self.past = as_transformers(cache.layers)
        slots = torch.arange(cache.slots, device=cache.lengths.device)
        self.places = slots.repeat(cache.size.rows, 1)  # [B, S]
        self.first = cache.layers[0]

    def aim(self, slots: Tensor, positions: Tensor, bias: Tensor) -> None:
        """The next :meth:`run` reads tokens of ``slots`` [1 or B, N] in their texts.

        ``positions`` [1 or B, N] or [parts, B, N] are for the rotary embeddings, ``bias``
        [B, 1, N, S] is the mask of full attention.
        """
        self.slots = slots
        self.positions = positions
        self.bias = bias
        start = self.first.first
        self.places[:, start : start + slots.shape[1]] = slots
        self.turned: dict[str, Any] = {}

    def run(self, number: int, embeddings: Tensor, states: Tensor) -> Tensor:
        """States [B, N, C] that layer ``number`` predicts after tokens with ``embeddings``.

        ``states`` [B, N, C]: the state before each token. Layers that are not chained return them,
        unchanged, after their predictions: [B, N, C + C].
        """
        layer = self.model.layers[number]
        states = states[..., -embeddings.shape[-1] :]
        text = self.positions if self.positions.ndim == 2 else self.positions[0]
        output: Tensor = layer(
            embeddings,
            states,
            position_embeddings=self._rotary(number, embeddings),
            attention_mask=self._mask(number),
            position_ids=text,
            **{self.cache_name: self.past},
        )
        if self.model.use_shared_post_norm:
            output = self.model.shared_post_norm(output)
        return output if self.chained else torch.cat([output, states], -1)

    def _rotary(self, number: int, like: Tensor) -> Any:
        """Position embeddings of a layer; layers of one kind share them."""
        model = self.model
        if model.rotary_emb is None:
            return None
        kind = model.config.layer_types[number] if model.has_per_layer_rope else ""
        if kind not in self.turned:
            options = {"layer_type": kind} if kind else {}
            self.turned[kind] = model.rotary_emb(like, position_ids=self.positions, **options)
        return self.turned[kind]

    def _mask(self, number: int) -> Tensor:
        """A layer's mask: full attention, without slots outside its window and its first slots."""
        window = self.windows[number]
        if not window and not number:
            return self.bias
        queries = self.slots[:, None, :, None]
        keys = self.places[:, None, None, : self.bias.shape[-1]]
        hidden = (keys < number) & (keys != queries)  # seeing nothing would give NaN
        if window:
            hidden = hidden | (queries - keys >= window)
        return self.bias.masked_fill(hidden, float("-inf"))


def layers_of(target: PreTrainedModel) -> MtpLayers:
    """The MTP layers of the ``target``'s checkpoint; read at the first call.

    Raises as :func:`load_layers` does.
    """
    path = target.config.name_or_path
    if not path:
        raise ValueError(
            "method 'mtp' reads layers of the target's checkpoint, got a model that was not "
            f"loaded from one; give drafter=FOLDER, where it is, or {ADVICE}"
        )
    return fact(target, "MTP layers", partial(load_layers, Path(path), target))


def load_layers(folder: Path, target: PreTrainedModel, method: str = "mtp") -> MtpLayers:
    """The MTP layers that ``folder`` holds for the ``target`` model, on its device.

    Raises ``ValueError`` for a folder or a config without them, and for weights that are missing,
    of another shape or not finite.
    """
    config = folder / "config.json"  # not there for a hub's name, which transformers resolves
    if config.is_file() and read_json(config).get("model_type") == TUNED:
        return _load_tuned(folder, target)
    main = named_layers(target, folder)
    try:
        model: Any = MtpModel.from_pretrained(main)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{folder} must hold the MTP layers of a {type(target).__name__}, {_reason(error)}; "
            f"{ADVICE}"
        ) from error
    layer_state = {name: x for name, x in model.state_dict().items() if name.startswith("layers.")}
    check_weights(layer_state, folder)
    return _prepared(model, target)


def named_layers(target: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A copy of ``target`` from which transformers' ``MtpModel`` can read the layers in ``folder``:
    it has a separate config with their number, and the names of their weights, and shares the rest.
    """
    main = copy.copy(target)
    main.config = told_layers(target.config, folder)
    main.config.name_or_path = str(folder)
    main.config.dtype = target.dtype
    main._keys_to_ignore_on_load_unexpected = _names(main)
    return main


def save_layers(layers: MtpLayers, folder: Path, target: PreTrainedModel) -> None:
    """Write fine-tuned ``layers`` of ``target`` under their names in transformers' ``MtpModel``."""
    facts = {
        "model_type": TUNED,
        "architectures": ["MtpModel"],
        "num_mtp_layers": layers.count,
        "target_fingerprint": fingerprint(embeddings_of(target)),
    }
    write_checkpoint(own_weights(layers.model), facts, folder, torch.bfloat16)


def own_weights(model: Any) -> dict[str, Tensor]:
    """The weights of ``model`` that are not the target's."""
    return {k: x for k, x in model.state_dict().items() if k.split(".")[0] in OWN}


def own_parts(model: Any) -> list[nn.Module]:
    """The modules of ``model`` that are not the target's."""
    return [part for name, part in model.named_children() if name in OWN]


def _load_tuned(folder: Path, target: PreTrainedModel) -> MtpLayers:
    """Layers that were fine-tuned for ``target``, as :func:`save_layers` writes them."""
    check_target(read_json(folder / "config.json"), target, folder)
    main = copy.copy(target)
    main.config = told_layers(target.config, target.config.name_or_path)
    count = main.config.get_text_config(decoder=True).num_mtp_layers
    model: Any = MtpModel(main, count)
    state = read_checkpoint(folder)
    shared = {k: x for k, x in model.state_dict().items() if k not in own_weights(model)}
    load_strict(model, {**shared, **state}, source=folder)
    return _prepared(model, target)


def _prepared(model: Any, target: PreTrainedModel) -> MtpLayers:
    """The loaded ``model`` as it drafts for ``target``."""
    for part in own_parts(model):
        part.to(target.device).eval().requires_grad_(False)
        prepack(cast(part, target.dtype))
    return MtpLayers.of(model)


def told_layers(config: PreTrainedConfig, folder: str | Path | None) -> PreTrainedConfig:
    """A copy of ``config`` with the number and kinds of the MTP layers in ``folder``.

    If neither the config nor a layout names the kinds, the layers have full attention, as in Qwen
    3.5, and the last layer's kind of feed-forward. Raises ``ValueError`` if there are none.
    """
    told = copy.deepcopy(config)
    text: Any = told.get_text_config(decoder=True)
    count = count_of(told, folder)
    if not count:
        raise ValueError(
            f"method 'mtp' needs MTP layers in the target's checkpoint, got a {text.model_type} "
            f"config that names none; {ADVICE}"
        )
    text.num_mtp_layers = count
    layout = layout_of(told)
    for name, value in layout.told(count).items() if layout else ():
        setattr(text, name, value)
    for name, kind in (("layer_types", FULL), ("mlp_layer_types", None)):
        kinds = getattr(text, name, None)
        if kinds and getattr(text, f"mtp_{name}", None) is None:
            setattr(text, f"mtp_{name}", [kind or kinds[-1]] * count)
    return told


def _names(main: PreTrainedModel) -> list[str]:
    """Patterns of the names of the layers' weights, for any depth of the ``main`` model."""
    text: Any = main.config.get_text_config(decoder=True)
    first = text.num_hidden_layers
    further = range(first, first + text.num_mtp_layers)
    known = main._keys_to_ignore_on_load_unexpected or ()
    patterns = [pattern for pattern in known if "mtp" in pattern]
    return patterns + [rf"(^|\.)(model|language_model)\.layers\.{number}\." for number in further]


def _reason(error: Exception) -> str:
    """A short reason from an ``error`` of transformers, which may list every weight."""
    missing = re.findall(r"'(layers\.[\w.]+)'", str(error))
    if missing:
        return f"missing are {some_names(missing)}"
    return f"got: {next(iter(str(error).strip().splitlines()), type(error).__name__)}"


@torch.inference_mode()
def _sizes(model: Any) -> tuple[LayerSize, ...]:
    """Size of each layer's cache entry for a token, found by running one."""
    cache = MtpCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    states = model.embed_tokens(token)
    for number in range(len(model.layers)):
        states = model.forward_layer(number, states, token, cache, input_ids=token)
    sizes = stored_sizes(cache)
    return tuple(size for size in sizes if size is not None)
