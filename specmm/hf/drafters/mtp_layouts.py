"""Released layouts of MTP layers that transformers' ``MtpModel`` does not know.

ERNIE 4.5 stores its layer in lists of the model (``mtp_block.0``, ``mtp_emb_norm.0``, …) and
applies the decoder's last norm to its output, as in Baidu's FastDeploy. MiMo-V2 stores several
layers under ``model.mtp.layers``, each with its own norm, and its config does not give their
number. Its layers read the target's own states at every depth (as SGLang's chains for MiMo-V2 do),
where other models' layers read the predictions of the layer before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, modeling_layers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, WeightTransform

from specmm.core.derived import Derived
from specmm.hf.drafters.drafter_formats import ModelFolder, mtp_layers
from specmm.hf.loading.pretrained import mtp_layers_of
from specmm.hf.models.families import SLIDING


@dataclass(frozen=True)
class MtpLayout:
    """How the checkpoints of one model type store their MTP layers.

    ``names``: patterns of names in a checkpoint, in order, and their replacements in ``MtpModel``.
    ``told(layers)``: the config entries for ``layers`` layers. Unless ``normed``, the decoder's
    last norm is applied to a layer's predictions. Unless ``chained``, layers read the target's
    states and never predicted ones.
    """

    names: tuple[tuple[str, str], ...]
    told: Callable[[int], Mapping[str, Any]]
    normed: bool = True
    chained: bool = True


SHARED = [r"^shared_head\.", r"^embed_tokens\."]  # the target's own, with what adapters put there
UNDER = r"^model\.mtp\.layers\.(\d+)\."
LAYOUTS: Mapping[str, MtpLayout] = {
    "ernie4_5_moe": MtpLayout(
        (
            (r"^model\.mtp_emb_norm\.(\d+)\.", r"layers.\1.enorm."),
            (r"^model\.mtp_hidden_norm\.(\d+)\.", r"layers.\1.hnorm."),
            (r"^model\.mtp_linear_proj\.(\d+)\.", r"layers.\1.eh_proj."),
            (r"^model\.mtp_block\.(\d+)\.", r"layers.\1.mtp_block."),
        ),
        lambda count: {"moe_layer_start_index": count},  # without experts
        normed=False,
    ),
    "mimo_v2_flash": MtpLayout(
        (
            *((rf"{UNDER}{name}\.", rf"layers.\1.{name}.") for name in ("enorm", "hnorm")),
            (rf"{UNDER}eh_proj\.", r"layers.\1.eh_proj."),
            (rf"{UNDER}final_layernorm\.", r"layers.\1.post_norm."),
            (rf"{UNDER}pre_mlp_layernorm\.", r"layers.\1.mtp_block.post_attention_layernorm."),
            (UNDER, r"layers.\1.mtp_block."),
        ),
        lambda count: {
            "mtp_layer_types": [SLIDING] * count,
            "mtp_mlp_layer_types": ["dense"] * count,
        },
        chained=False,
    ),
}


def layout_of(config: PreTrainedConfig) -> MtpLayout | None:
    """The layout of a model's checkpoints; an empty one if transformers' own class reads them."""
    return LAYOUTS.get(config.get_text_config(decoder=True).model_type)


class MtpModel(modeling_layers.MtpModel):
    """transformers' class, extended to the model types in ``LAYOUTS``. It keeps the class name, by
    which transformers finds the conversions of weights' names.
    """

    _keys_to_ignore_on_load_missing = SHARED

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, so that transformers' conversions of names apply."""
        return False

    def tie_with_main_model(self, main_model: PreTrainedModel) -> None:
        """Also take a copy of the decoder's last norm, if the layers have none."""
        super().tie_with_main_model(main_model)
        layout = layout_of(main_model.config)
        self._norm: Derived[None] | None = None
        if layout is not None and not layout.normed:
            self._keys_to_ignore_on_load_missing = [*SHARED, "post_norm"]
            for layer in self.layers:
                layer.post_norm = copy.deepcopy(main_model.get_decoder().norm)
            self._norm = Derived()
            self.follow(main_model)

    def follow(self, main_model: PreTrainedModel) -> None:
        """Copy the decoder's last norm again if its weights have changed since."""
        if self._norm is None:
            return
        norm: Any = main_model.get_decoder().norm
        layers: Any = self.layers

        def copied() -> None:
            for layer in layers:
                layer.post_norm.load_state_dict(norm.state_dict())

        self._norm.of(list(norm.parameters()), copied)

    def get_weight_conversions(self, main_model: PreTrainedModel) -> list[WeightTransform]:
        """The layout's renamings, and the model type's conversions within a layer."""
        layout = layout_of(main_model.config)
        if layout is None:
            conversions: list[WeightTransform] = super().get_weight_conversions(main_model)
            return conversions
        named: list[WeightTransform] = [WeightRenaming(*pair) for pair in layout.names]
        return named + get_model_conversion_mapping(main_model)


def count_of(config: PreTrainedConfig, folder: str | Path | None) -> int:
    """The number of MTP layers in the checkpoint of ``config`` in ``folder`` (None: unknown)."""
    count = mtp_layers_of(config)
    if count or layout_of(config) is None or not folder or not Path(folder).is_dir():
        return count
    return mtp_layers(ModelFolder(Path(folder)))


def has_mtp_layers(model: PreTrainedModel) -> bool:
    """Whether the checkpoint of ``model`` holds MTP layers."""
    return count_of(model.config, model.config.name_or_path) > 0
