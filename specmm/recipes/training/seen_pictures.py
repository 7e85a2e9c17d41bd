"""Pictures that a model of transformers drew, as it reads them: what a drafter of it learns from.

Shape letters: M pictures, B batch, T tokens of a picture, L longest prompt of a batch, N places, C
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.hf.aux_states import AuxStates
from specmm.hf.picture_tokens import PictureTarget
from specmm.recipes.training.block_drafter import Seen

NEVER = -1e4  # logit of what may not come somewhere: no probability, and no NaN times it


class SeenPictures:
    """``tokens`` [M, T] with the ids of their ``prompts`` and of what guidance leads ``away`` from,
    one row of each a picture; the inputs of ``layers`` are read beside the last states.
    """

    def __init__(
        self,
        target: PictureTarget,
        prompts: Sequence[Sequence[int]],
        away: Sequence[Sequence[int]],
        tokens: Tensor,
        layers: Sequence[int],
    ) -> None:
        self.target = target
        self.rows = (prompts, away)
        self.tokens = tokens
        self.aux = AuxStates([target.family.layers[layer - 1] for layer in layers])

    @torch.no_grad()
    def batch(self, rows: Tensor, dropped: Tensor) -> Seen:
        """The pictures of ``rows`` [B], after what guidance leads away from where ``dropped`` [B]
        says so.
        """
        pairs = zip(rows.tolist(), dropped.tolist(), strict=True)
        ids, mask = _at_left([self.rows[int(other)][row] for row, other in pairs])
        tokens = self.tokens[rows]
        embedded = self.target.embed(tokens)  # [B, T, C]
        words = self.target.model.get_input_embeddings()(ids)  # [B, L, C]
        where = self._places(mask, tokens.shape[1] - 1)
        mask = F.pad(mask, (0, tokens.shape[1] - 1), value=True)
        states = self.target.family.decoder(
            inputs_embeds=torch.cat([words, embedded[:, :-1]], dim=1),
            attention_mask=mask.long(),
            position_ids=where,
            use_cache=False,
        ).last_hidden_state
        hidden = states if not self.aux.seen else torch.cat([states, self.aux.context()], dim=-1)
        drawn = slice(ids.shape[1] - 1, None)  # the prompt's last place predicts the first token
        order = torch.arange(tokens.shape[1])[None]
        logits = self.logits(states[:, drawn], order)
        places = self.target.drawable(tokens)
        return Seen(logits, hidden[:, drawn], embedded, places)

    def _places(self, mask: Tensor, drawn: int) -> Tensor:
        """Positions [B, L + T - 1] after prompts of ``mask`` [B, L], or [3, B, L + T - 1] where the
        model counts a picture's by its grid.
        """
        words = (mask.long().cumsum(1) - 1).clamp(min=0)
        begins = mask.sum(1, keepdim=True)
        grid = self.target.grid
        if grid is None:
            return torch.cat([words, begins + torch.arange(drawn)], dim=1)
        places = begins + grid[:, None, :drawn]  # [3, B, T - 1]
        return torch.cat([words.expand(3, -1, -1), places], dim=2)

    def logits(self, states: Tensor, drawn: Tensor) -> Tensor:
        """Logits [B, N, V] of ``states`` [B, N, C] that predict the ``drawn``-th tokens [1 or B,
        N].
        """
        logits = self.target.head(states).float()
        if self.target.allowed_tokens.everything:
            return logits
        return logits.masked_fill(~self.target.allowed_tokens.at(drawn), NEVER)


def _at_left(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids [B, L] with their padding at the left, and which are no padding."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width) >= width - lengths[:, None]
