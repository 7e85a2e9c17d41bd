"""CLIP's features of pictures and texts (Radford et al. 2021), for CLIP-FD and CLIPScore, by
transformers.

Pictures are prepared by the model's own processor, as it was saved with the weights.

Shapes: features [N, F], F = 512 for ViT-B/32, before they are normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.metrics.extractors.base import Extractor
from specmm.metrics.weights import fingerprint, locate, main_file


class CLIP(Extractor):
    """A CLIP as an extractor of picture features, and with ``texts`` of text features.

    ``weights`` is a folder that ``save_pretrained`` of the model and its processor filled. Raises
    ``ValueError`` where there is none.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        weights: Path | None = None,
    ) -> None:
        from transformers import CLIPModel

        from specmm.hf.pretrained import load_model, load_processor

        folder = locate("clip", weights)
        self._processor: Any = load_processor(folder, local_files_only=True)
        model = load_model(CLIPModel, folder, local_files_only=True, dtype=dtype)
        self.model = model.to(device).eval()
        settings = self._processor.image_processor
        protocol = {
            "features": f"CLIP ViT patch {model.config.vision_config.patch_size} image {model.config.projection_dim}",
            "weights": fingerprint(main_file(folder)),
            "resize": f"{dict(settings.size)} {settings.resample!r}, crop {dict(settings.crop_size)}, by transformers",
        }
        super().__init__("clip", protocol, self._pixels, self._pictures, device=device, dtype=dtype)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Features [N, F] float32, on the CPU, of ``texts``; each is cut at the model's longest."""
        longest = self.model.config.text_config.max_position_embeddings
        given = self._processor.tokenizer(
            list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt"
        )
        found = self.model.get_text_features(
            given["input_ids"].to(self.device), given["attention_mask"].to(self.device)
        )
        return found.pooler_output.float().cpu()

    def _pixels(self, pictures: Tensor) -> Tensor:
        rows = list(pictures.permute(0, 3, 1, 2).cpu())
        return self._processor.image_processor(rows, return_tensors="pt")["pixel_values"].to(
            self.device
        )

    def _pictures(self, x: Tensor) -> Tensor:
        return self.model.get_image_features(x).pooler_output
