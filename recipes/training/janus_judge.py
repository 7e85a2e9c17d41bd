"""A small classifier of kinds and styles, trained on real emoji: the judge of drawn ones.

It knows nothing of the model that draws, nor of its tokenizer, and sees pictures at half their
size, so that it judges what is shown and not how a decoder blurs it.

Shape letters: B pictures, R pixels a side, K kinds, S styles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.captioned import KINDS, STYLES, Captioned
from specmm.recipes.training.encoding import to_float
from specmm.training import Losses, batch_rows, fit, seeded

WIDTHS = (32, 64, 128, 192)  # channels of each halving
DROPOUT = 0.3


class Judge(nn.Module):
    """Convolutions and two linear heads."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip((3, *WIDTHS), WIDTHS, strict=False):
            for step in range(2):
                layers.append(nn.Conv2d(width if step else before, width, 3, padding=1, bias=False))
                layers += [nn.BatchNorm2d(width), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.body = nn.Sequential(*layers)
        self.dropout = nn.Dropout(DROPOUT)
        self.head = nn.Linear(2 * WIDTHS[-1], len(KINDS) + len(STYLES))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of kinds [B, K] and styles [B, S] of ``pictures`` [B, 3, R, R] in [-1, 1]."""
        maps = self.body(F.avg_pool2d(pictures, 2)).flatten(2)
        seen = torch.cat([maps.mean(-1), maps.amax(-1)], dim=-1)
        kinds, styles = self.head(self.dropout(seen)).split([len(KINDS), len(STYLES)], dim=-1)
        return kinds, styles


def train_judge(
    model: Judge,
    pictures: Captioned,
    views: Tensor,
    out: Path,
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
) -> None:
    """Train ``model`` in place on ``views`` [N, views, R, R, 3] uint8; resumes from ``out``."""
    kinds, styles = (torch.from_numpy(rows) for rows in (pictures.kinds, pictures.styles))
    with seeded(seed):
        fresh: Any = Judge()
    model.load_state_dict(fresh.state_dict())

    def step(i: int) -> Losses:
        rows = batch_rows(i, batch, len(pictures), seed)
        generator = torch.Generator().manual_seed(seed + i)
        shown = torch.randint(views.shape[1], rows.shape, generator=generator)
        with torch.autocast("cpu", torch.bfloat16), seeded(seed + i):  # of the dropout
            found = model(to_float(views[rows, shown]))
        of_kinds = F.cross_entropy(found[0].float(), kinds[rows], label_smoothing=0.1)
        of_styles = F.cross_entropy(found[1].float(), styles[rows], label_smoothing=0.1)
        return {"loss": of_kinds + of_styles, "kinds": of_kinds, "styles": of_styles}

    fit(model.train(), step, out=out, steps=steps, lr=lr)


@torch.no_grad()
def right(model: Judge, images: Tensor, kinds: Any, styles: Any) -> dict[str, Tensor]:
    """Whether the judge sees in each of ``images`` [N, R, R, 3] uint8 the kind and style given [N]:
    bools [N] by "kinds" and "styles".
    """
    parts = [model.eval()(to_float(part)) for part in images.split(64)]
    found = [torch.cat(rows).argmax(-1) for rows in zip(*parts, strict=True)]
    wanted = (torch.as_tensor(kinds), torch.as_tensor(styles))
    return {
        name: seen == asked
        for name, seen, asked in zip(("kinds", "styles"), found, wanted, strict=True)
    }
