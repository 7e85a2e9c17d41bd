"""The files that snippets of the pages read: tiny random models under published names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from transformers import JanusForConditionalGeneration

from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from tests.tiny import chameleon
from tests.tiny.picture_kinds import TEMPLATE, janus, loud, tokenizer

SIDES = (1, 2, 3)
Maker = Callable[..., LlamaGenPipeline]


def write_files(text: str, make_tiny: Maker) -> None:
    """Write into the current folder what ``text`` names and does not make itself."""
    Image.new("RGB", (96, 96), "seagreen").save("picture.png")
    for name, write in FILES.items():
        if name in text:
            write(Path(name), make_tiny)


def _llamagen(place: Path, make_tiny: Maker) -> None:
    make_tiny(drafters=False).save_pretrained(place)


def _gpt_file(place: Path, make_tiny: Maker) -> None:
    """With the table of rotations that old files hold, which tells the number of heads."""
    gpt = make_tiny(drafters=False).transformer
    width = gpt.config.dim // gpt.config.n_head
    table = torch.zeros(1 + gpt.config.block_size, width // 2, 2)
    torch.save({"model": {**gpt.state_dict(), "freqs_cis": table}}, place)


def _vq_file(place: Path, make_tiny: Maker) -> None:
    torch.save({"model": make_tiny(drafters=False).vq.state_dict()}, place)


def _var_file(depth: int) -> Callable[[Path, Maker], None]:
    def write(place: Path, make_tiny: Maker) -> None:
        sizes = dict(embed_dim=64, num_heads=4, vocab_size=32, z_channels=8, num_classes=10)
        model = VAR(VARConfig(depth=depth, patch_nums=SIDES, **sizes))
        torch.save(model.state_dict(), place)

    return write


def _vae_file(place: Path, make_tiny: Maker) -> None:
    model = VQVAE(VQVAEConfig(32, 8, 32, (1, 2), 1, SIDES, 4))
    torch.save(model.state_dict(), place)


def _janus(place: Path, make_tiny: Maker) -> None:
    """With pictures of 16 tokens, more than a usual window of drafts."""
    small = janus()
    small.config.vision_config.image_size = 16
    small.config.vision_config.num_image_tokens = 16
    model = loud(JanusForConditionalGeneration(small.config))
    model.generation_config = small.generation_config
    model.save_pretrained(place)
    tokenizer(TEMPLATE).save_pretrained(place)


def _anole(place: Path, make_tiny: Maker) -> None:
    place.mkdir()
    chameleon.save_writer(place)


def _prompts(place: Path, make_tiny: Maker) -> None:
    place.write_text("a red barn\nblue tree\n")


FILES: dict[str, Callable[[Path, Maker], None]] = {
    "llamagen-folder": _llamagen,
    "c2i_B_256.pt": _gpt_file,
    "vq_ds16_c2i.pt": _vq_file,
    "var_d30.pth": _var_file(2),
    "var_d16.pth": _var_file(1),
    "vae_ch160v4096z32.pth": _vae_file,
    "janus-folder": _janus,
    "anole-folder": _anole,
    "prompts.txt": _prompts,
}
