"""A small classifier of kinds and styles, trained on real emoji: the judge of drawn ones.

It knows nothing of the model that draws, nor of its tokenizer: linear heads on what a frozen
EfficientNet-lite0 (extra ``fid``) makes of a picture, early layers for the style and late ones
for the kind.

Shape letters: B pictures, R pixels a side, D features, K kinds, S styles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from recipes.captioned import KINDS, STYLES, Captioned
from specmm.recipes.training.encoding import to_float
from specmm.training import Losses, batch_rows, fit, seeded
from specmm.zoo.efficientnet import load_network

SIDE = 128  # pixels a side that the network sees
TAPS = {0: 16, 2: 24, 4: 40, 10: 112, 15: 320}  # blocks that are read, and their channels
LAST = 1280  # channels of the network's last layer
DROPOUT = 0.5
SMOOTHING = 0.1  # of the labels
WEIGHTS = "model.safetensors"


class Heads(nn.Module):
    """Features [B, D] to logits of kinds [B, K] and styles [B, S]."""

    def __init__(self) -> None:
        super().__init__()
        width = 2 * sum(TAPS.values()) + LAST
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.dropout = nn.Dropout(DROPOUT)
        self.head = nn.Linear(width, len(KINDS) + len(STYLES))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        logits = self.head(self.dropout(self.norm(features)))
        kinds, styles = logits.split([len(KINDS), len(STYLES)], dim=-1)
        return kinds, styles


@torch.no_grad()
def features(network: Any, images: Tensor) -> Tensor:
    """What ``network`` sees in ``images`` [B, R, R, 3] uint8, [B, D]: means and deviations over the
    picture after the blocks ``TAPS``, and means of the last layer.
    """
    x = F.interpolate(to_float(images), (SIDE, SIDE), mode="bicubic", antialias=True)
    x = network._swish(network._bn0(network._conv_stem(x)))
    found = []
    for number, block in enumerate(network._blocks):
        x = block(x)
        if number in TAPS:
            found += [x.mean((2, 3)), x.std((2, 3))]
    last = network._swish(network._bn1(network._conv_head(x)))
    return torch.cat([*found, last.mean((2, 3))], dim=-1)


def all_features(images: Tensor, network: Any = None) -> Tensor:
    """Features [N, D] of ``images`` [N, R, R, 3] uint8, by EfficientNet-lite0 or ``network``."""
    network = network or load_network()
    bar = tqdm(images.split(32), desc="look", mininterval=5)
    return torch.cat([features(network, part) for part in bar])


def train_judge(
    model: Heads,
    pictures: Captioned,
    seen: Tensor,
    out: Path,
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
) -> None:
    """Train ``model`` in place on the features ``seen`` [N, views, D] of ``pictures``; resumes from
    ``out``.
    """
    kinds, styles = (torch.from_numpy(rows) for rows in (pictures.kinds, pictures.styles))

    def step(i: int) -> Losses:
        rows = batch_rows(i, batch, len(pictures), seed)
        generator = torch.Generator().manual_seed(seed + i)
        view = torch.randint(seen.shape[1], rows.shape, generator=generator)
        with seeded(seed + i):  # of the dropout
            found = model(seen[rows, view])
        of_kinds = F.cross_entropy(found[0], kinds[rows], label_smoothing=SMOOTHING)
        of_styles = F.cross_entropy(found[1], styles[rows], label_smoothing=SMOOTHING)
        return {"loss": of_kinds + of_styles, "kinds": of_kinds, "styles": of_styles}

    fit(model.train(), step, out=out, steps=steps, lr=lr)
    model.eval()


@torch.no_grad()
def right(model: Heads, seen: Tensor, kinds: Any, styles: Any) -> dict[str, Tensor]:
    """Whether the judge finds the kind and style given [N] in the features ``seen`` [N, D]: bools
    [N] by "kinds" and "styles".
    """
    found = model.eval()(seen)
    wanted = (torch.as_tensor(kinds), torch.as_tensor(styles))
    return {
        name: logits.argmax(-1) == asked
        for name, logits, asked in zip(("kinds", "styles"), found, wanted, strict=True)
    }
