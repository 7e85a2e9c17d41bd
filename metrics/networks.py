"""The feature networks, each with its preparation of pictures and its protocol.

Nothing is downloaded: the ``ValueError`` for missing weights or packages says how to get them.

Shapes: pictures [n, H, W, 3] uint8; features [N, F]; logits [N, C].
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, float32

from specmm.loading.extras import install
from specmm.metrics.extractors import Extractor, channels_first
from specmm.metrics.features import Protocol
from specmm.metrics.weights import fingerprint, locate, main_file
from specmm.zoo.efficientnet import load_network

INCEPTION_SIDE = 299  # pixels
INCEPTION_RESIZE = f"{INCEPTION_SIDE} bilinear tensorflow-1, no antialias"
SIDE = 224  # pixels: EfficientNet-lite0 and DINOv2 (16 patches of 14)
MEAN = (0.485, 0.456, 0.406)  # the mean of ImageNet's pictures in [0, 1]
STD = (0.229, 0.224, 0.225)
Device = torch.device | str


class Inception(Extractor):
    """The FID Inception of 2015-12-05, as TorchScript: features [N, 2048], for FID and KID.

    Pictures are resized by TensorFlow 1's bilinear without antialias, as FID was published.
    ``dtype`` bfloat16 is twice as fast on CPUs with AMX, but it moved the FID of 250 pictures by up
    to 0.4% and their KID by 1.5%. Raises ``ValueError`` for dtypes other than float32 and bfloat16.
    """

    def __init__(
        self, device: Device = "cpu", dtype: torch.dtype = float32, weights: Path | None = None
    ) -> None:
        if dtype not in (float32, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}")
        path = locate("inception", weights)
        with warnings.catch_warnings():
            deprecated = "`torch.jit.(load|freeze)` is deprecated"
            warnings.filterwarnings("ignore", deprecated, FutureWarning)
            network = torch.jit.load(path, map_location=device).eval()
            network = torch.jit.freeze(network)  # the same bits, a tenth faster
        features = "inception-2015-12-05 pool3 2048"
        protocol = _protocol(features, path, INCEPTION_RESIZE)

        def prepare(pictures: Tensor) -> Tensor:  # to [-1, 1)
            return (tensorflow_resize(channels_first(pictures), INCEPTION_SIDE) - 128) / 128

        super().__init__("inception", protocol, prepare, network, device=device, dtype=dtype)


def tensorflow_resize(pictures: Tensor, side: int) -> Tensor:
    """[N, C, H, W] resized as TensorFlow 1's bilinear: pixel i samples the input at i H / side."""
    rows, columns = (_interpolation(n, side).to(pictures) for n in pictures.shape[2:])
    return rows @ pictures @ columns.T


def _interpolation(size: int, side: int) -> Tensor:
    """Weights [side, size], float64, of each input pixel in each output pixel."""
    at = torch.arange(side, dtype=torch.float64) * (size / side)
    low = at.floor().long().clamp(max=size - 1)
    high = (low + 1).clamp(max=size - 1)
    fraction = at - low
    weights = torch.zeros(side, size, dtype=torch.float64)
    row = torch.arange(side)
    weights.index_put_((row, low), 1 - fraction, accumulate=True)
    weights.index_put_((row, high), fraction, accumulate=True)
    return weights


class FidelityInception(Extractor):
    """torch-fidelity's FID Inception with class logits [N, 1008] without the bias; float32 only."""

    def __init__(
        self, device: Device = "cpu", dtype: torch.dtype = float32, weights: Path | None = None
    ) -> None:
        if dtype != float32:
            raise ValueError(f"torch-fidelity's Inception runs in torch.float32, got {dtype}")
        path = locate("inception-fidelity", weights)
        module = _package(
            "torch_fidelity.feature_extractor_inceptionv3", "pip install torch-fidelity"
        )
        model = module.FeatureExtractorInceptionV3(
            "inception", ["2048", "logits_unbiased"], feature_extractor_weights_path=path
        ).to(device)
        features = "inception-2015-12-05 pool3 2048 by torch-fidelity"
        protocol = _protocol(features, path, INCEPTION_RESIZE)
        # it takes [n, 3, H, W] uint8, and resizes and scales by itself
        steps = (
            lambda pictures: pictures.permute(0, 3, 1, 2),
            lambda x: model(x.byte())[0],
            lambda x: model(x.byte())[1],
        )
        super().__init__("inception-fidelity", protocol, *steps, device=device)


class EfficientNetLite0(Extractor):
    """EfficientNet-lite0 (Tan and Le 2019), TensorFlow's weights; comparable only to itself."""

    def __init__(
        self, device: Device = "cpu", dtype: torch.dtype = float32, weights: Path | None = None
    ) -> None:
        path = locate("efficientnet-lite0", weights)
        model = load_network(path).to(device, dtype)

        def pooled(x: Tensor) -> Tensor:
            return model.extract_features(x).mean((2, 3))  # forward() would print

        features = "efficientnet-lite0 pooled 1280"
        protocol = _protocol(features, path, f"{SIDE} bicubic, antialias")

        def prepare(pictures: Tensor) -> Tensor:
            return (pillow_bicubic(channels_first(pictures), SIDE) - 127) / 128

        steps = (prepare, pooled, lambda x: model._fc(pooled(x)))
        super().__init__("efficientnet-lite0", protocol, *steps, device=device, dtype=dtype)


def pillow_bicubic(pictures: Tensor, side: int) -> Tensor:
    """[n, 3, H, W] of 0..255 resized to [n, 3, side, side] as Pillow's bicubic on floats does."""
    size = (side, side)
    resized = torch.nn.functional.interpolate(pictures, size, mode="bicubic", antialias=True)
    return resized.clamp(0, 255)


class DINOv2(Extractor):
    """timm's DINOv2 for FD-DINOv2 (Stein et al. 2023): the class token [N, F] at 224 pixels.

    ``weights`` is a folder with ``config.json`` and ``model.safetensors``. timm resamples the
    position embedding differently: compare only leading digits with published numbers.
    """

    def __init__(
        self, device: Device = "cpu", dtype: torch.dtype = float32, weights: Path | None = None
    ) -> None:
        folder = locate("dinov2", weights)
        timm = _package("timm", install("fid"))
        options = {"pretrained": True, "num_classes": 0, "img_size": SIDE}
        model = timm.create_model(f"local-dir:{folder}", **options).eval().to(device, dtype)
        name = model.pretrained_cfg.get("architecture", "dinov2")
        features = f"{name} class token {model.num_features}"
        resize = f"{SIDE} bicubic pillow on floats, antialias"
        protocol = _protocol(features, main_file(folder), resize)
        protocol["positions"] = f"resampled by timm {timm.__version__}"

        def prepare(pictures: Tensor) -> Tensor:
            x = pillow_bicubic(channels_first(pictures), SIDE) / 255
            mean, std = (x.new_tensor(v)[:, None, None] for v in (MEAN, STD))
            return (x - mean) / std

        super().__init__("dinov2", protocol, prepare, model, device=device, dtype=dtype)


class CLIP(Extractor):
    """transformers' CLIP (Radford et al. 2021): features [N, F] of pictures, and of ``texts``.

    ``weights`` is a folder of ``save_pretrained`` of the model and its processor, which prepares
    the pictures. Features are not normalised; F = 512 for ViT-B/32.
    """

    def __init__(
        self, device: Device = "cpu", dtype: torch.dtype = float32, weights: Path | None = None
    ) -> None:
        from transformers import CLIPModel

        from specmm.hf.loading.pretrained import load_model, load_processor

        folder = locate("clip", weights)
        self._processor: Any = load_processor(folder, local_files_only=True)
        model = load_model(CLIPModel, folder, local_files_only=True, dtype=dtype)
        self.model = model.to(device).eval()
        config = model.config
        settings = self._processor.image_processor
        size = f"{dict(settings.size)} {settings.resample!r}, crop {dict(settings.crop_size)}"
        patch = config.vision_config.patch_size
        features = f"CLIP ViT patch {patch} image {config.projection_dim}"
        protocol = _protocol(features, main_file(folder), f"{size}, by transformers")
        super().__init__("clip", protocol, self._pixels, self._pictures, device=device, dtype=dtype)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Features [N, F] float32, on the CPU, of ``texts``; each is cut at the model's longest."""
        longest = self.model.config.text_config.max_position_embeddings
        options = {"padding": True, "truncation": True, "max_length": longest}
        encoded = self._processor.tokenizer(list(texts), return_tensors="pt", **options)
        features = self.model.get_text_features(**encoded.to(self.device))
        return features.pooler_output.float().cpu()

    def _pixels(self, pictures: Tensor) -> Tensor:
        rows = list(pictures.permute(0, 3, 1, 2).cpu())
        inputs = self._processor.image_processor(rows, return_tensors="pt")
        return inputs["pixel_values"].to(self.device)

    def _pictures(self, x: Tensor) -> Tensor:
        return self.model.get_image_features(x).pooler_output


def _protocol(features: str, weights: Path, resize: str) -> Protocol:
    return {"features": features, "weights": fingerprint(weights), "resize": resize}


def _package(module: str, line: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(f"{package} must be installed, got none; run: {line}") from None
