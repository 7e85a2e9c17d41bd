"""MAR: a masked autoregressive transformer over continuous image tokens.

Source: MAR (arXiv 2406.11838); parameter names are the official ones. Shape letters: R rows (batch,
doubled under guidance), L tokens a picture, K known ones, M wanted ones, C token width, D width, H
heads, P buffer slots in front, all holding the class.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.image_ar.continuous.diffusion_head import DiffLoss, SimpleMLPAdaLN

EPS = 1e-6


@dataclass(frozen=True)
class MARConfig:
    """Sizes of a model; defaults: MAR-B."""

    img_size: int = 256
    vae_stride: int = 16
    patch_size: int = 1
    vae_embed_dim: int = 16
    encoder_embed_dim: int = 768
    encoder_depth: int = 12
    encoder_num_heads: int = 12
    decoder_embed_dim: int = 768
    decoder_depth: int = 12
    decoder_num_heads: int = 12
    mlp_ratio: float = 4.0
    class_num: int = 1000
    buffer_size: int = 64
    diffloss_d: int = 6
    diffloss_w: int = 1024
    fake_latent: bool = True  # whether there is an embedding of "no class", which guidance needs

    def __post_init__(self) -> None:
        for side in ("encoder", "decoder"):
            dim = getattr(self, f"{side}_embed_dim")
            heads = getattr(self, f"{side}_num_heads")
            if dim % heads:
                raise ValueError(
                    f"{side}_embed_dim must be a multiple of its heads, got {dim} and {heads} heads"
                )
        if self.img_size % (self.vae_stride * self.patch_size):
            raise ValueError(
                f"img_size must be a multiple of vae_stride times patch_size, got {self.img_size}, "
                f"{self.vae_stride} and {self.patch_size}"
            )

    @property
    def num_classes(self) -> int:
        """Classes, as other families call them."""
        return self.class_num

    @property
    def grid(self) -> int:
        """Tokens along a side of the picture."""
        return self.img_size // self.vae_stride // self.patch_size

    @property
    def seq_len(self) -> int:
        """L."""
        return self.grid**2

    @property
    def token_dim(self) -> int:
        """C: latent channels times the cells of a patch."""
        return self.vae_embed_dim * self.patch_size**2


def _published(
    dim: int, depth: int, heads: int, head_width: int, head_depth: int
) -> dict[str, int]:
    sizes = {"embed_dim": dim, "depth": depth, "num_heads": heads}
    per_side = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()}
    return per_side | {"diffloss_w": head_width, "diffloss_d": head_depth}


PUBLISHED = {
    "MAR-B": _published(768, 12, 12, 1024, 6),
    "MAR-L": _published(1024, 16, 16, 1280, 8),
    "MAR-H": _published(1280, 20, 16, 1536, 12),
}


class MARAttention(nn.Module):
    """Self-attention, of all queries or of some."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, wanted: Tensor | None) -> Tensor:
        """[R, T, D] -> [R, T or M, D]: queries at ``wanted`` [R, M]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [R, T, H, D/H] each
        if wanted is not None:
            q = q.gather(1, wanted[:, :, None, None].expand(-1, -1, *q.shape[2:]))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers with an exact GELU between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.fc2(F.gelu(self.fc1(x)))


class MARBlock(nn.Module):
    """Pre-norm attention and MLP, each with a residual (a ViT block)."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.attn = MARAttention(dim, heads)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, wanted: Tensor | None = None) -> Tensor:
        """[R, T, D] -> [R, T or M, D]: only the ``wanted`` [R, M] rows when they are given."""
        y = self.attn(self.norm1(x), wanted)
        x = (x if wanted is None else pick(x, wanted)) + y
        return x + self.mlp(self.norm2(x))


class MAR(nn.Module):
    """An encoder of the known tokens, a decoder of all positions, and a diffusion head."""

    step_rows = 64  # see specmm.choose.threads

    def __init__(self, config: MARConfig) -> None:
        super().__init__()
        self.config = config
        enc = config.encoder_embed_dim
        dec = config.decoder_embed_dim
        slots = config.buffer_size + config.seq_len
        self.class_emb = nn.Embedding(config.class_num, enc)
        if config.fake_latent:
            self.fake_latent = _positions(1, enc)
        self.z_proj = nn.Linear(config.token_dim, enc)
        self.z_proj_ln = nn.LayerNorm(enc, eps=EPS)
        self.encoder_pos_embed_learned = _positions(1, slots, enc)
        self.encoder_blocks = nn.ModuleList(
            MARBlock(enc, config.encoder_num_heads, config.mlp_ratio)
            for _ in range(config.encoder_depth)
        )
        self.encoder_norm = nn.LayerNorm(enc, eps=EPS)
        self.decoder_embed = nn.Linear(enc, dec)
        self.mask_token = _positions(1, 1, dec)
        self.decoder_pos_embed_learned = _positions(1, slots, dec)
        self.decoder_blocks = nn.ModuleList(
            MARBlock(dec, config.decoder_num_heads, config.mlp_ratio)
            for _ in range(config.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(dec, eps=EPS)
        self.diffusion_pos_embed_learned = _positions(1, config.seq_len, dec)
        self.apply(_initialise)
        self.diffloss = DiffLoss(
            SimpleMLPAdaLN(config.token_dim, config.diffloss_w, dec, config.diffloss_d)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype (diffusers asks)."""
        return self.z_proj.weight.dtype

    @property
    def head(self) -> SimpleMLPAdaLN:
        """The diffusion head."""
        return self.diffloss.net

    def embed_classes(self, labels: Tensor | None, rows: int = 0) -> Tensor:
        """Conditions [R, D] of class ids [R], or of "no class" for ``rows`` rows.

        Raises ``ValueError`` when the model has no embedding of "no class".
        """
        if labels is not None:
            return self.class_emb(labels)
        if not self.config.fake_latent:
            raise ValueError(
                "cfg must be 1 for a model without fake_latent, got another: "
                "it has no 'no class' rows"
            )
        return self.fake_latent.expand(rows, -1)

    def forward(
        self, tokens: Tensor, known: Tensor, condition: Tensor, wanted: Tensor | None = None
    ) -> Tensor:
        """Conditions z [R, M, D] of the head at positions ``wanted`` [R, M] (None: all of them).

        ``tokens`` [R, L, C]; positions ``known`` [R, K] of them are seen; ``condition`` [R, D] from
        ``embed_classes``.
        """
        return self.decode(self.encode(tokens, known, condition), known, wanted)

    def encode(self, tokens: Tensor, known: Tensor, condition: Tensor) -> Tensor:
        """Encoder states [R, P + K, D] of the buffer and the known tokens; see ``forward``."""
        buffer = self.config.buffer_size
        embedded = self.z_proj(pick(tokens, known).to(self.dtype))
        x = torch.cat([condition[:, None].expand(-1, buffer, -1), embedded], dim=1)
        x = self.z_proj_ln(x + self._positions(self.encoder_pos_embed_learned, known))
        for block in self.encoder_blocks:
            x = block(x)
        return self.encoder_norm(x)

    def decode(self, x: Tensor, known: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Conditions z [R, M, D] from encoder states ``x`` [R, P + K, D]; see ``forward``."""
        x = self.decoder_embed(x)
        buffer = self.config.buffer_size
        length = self.config.seq_len
        full = self.mask_token.to(x.dtype).repeat(len(x), buffer + length, 1)
        full[:, :buffer] = x[:, :buffer]
        full.scatter_(1, (known + buffer)[:, :, None].expand(-1, -1, x.shape[-1]), x[:, buffer:])
        x = full + self.decoder_pos_embed_learned
        if wanted is None:
            wanted = torch.arange(length, device=x.device).expand(len(x), -1)
        for block in self.decoder_blocks[:-1]:
            x = block(x)
        x = self.decoder_blocks[-1](x, wanted=wanted + buffer)
        return self.decoder_norm(x) + self.diffusion_pos_embed_learned[0][wanted]

    def _positions(self, table: Tensor, known: Tensor) -> Tensor:
        """Rows [R, P + K, D] of a table [1, P + L, D] of the buffer and ``known`` positions."""
        buffer = self.config.buffer_size
        front = table[:, :buffer].expand(len(known), -1, -1)
        return torch.cat([front, table[0, buffer:][known]], dim=1)


def pick(x: Tensor, where: Tensor) -> Tensor:
    """Rows ``where`` [R, M] of ``x`` [R, T, D]: [R, M, D]."""
    return x.gather(1, where[:, :, None].expand(-1, -1, x.shape[-1]))


def patchify(latents: Tensor, patch: int = 1) -> Tensor:
    """Tokens [B, L, C] in raster order of latents [B, c, h, h]; C is channel, row, column."""
    x = latents.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [B, c, h, p, w, q]
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(tokens: Tensor, patch: int = 1) -> Tensor:
    """The inverse of ``patchify``."""
    side = round(tokens.shape[1] ** 0.5)
    x = tokens.unflatten(2, (-1, patch, patch)).unflatten(1, (side, side))  # [B, h, w, c, p, q]
    return x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def _positions(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.02)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
