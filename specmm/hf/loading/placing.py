"""How a transformers model is loaded: device, dtype, device map, quantisation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from specmm import zoo
from specmm.extending.kinds import shown
from specmm.loading import mapped
from specmm.loading.checkpoints import read_json, stored_dtype
from specmm.loading.hardware import Place, choose_dtype

T = TypeVar("T")
FREQUENCIES = "inv_freq"  # rotary embeddings' frequencies, float32 in every dtype
ELSEWHERE = ("cpu", "disk", "meta")  # where accelerate keeps weights until a layer runs


def moved(
    model: Any, device: torch.device | str, dtype: torch.dtype, files: Sequence[Path] = ()
) -> Any:
    """``model`` on ``device`` in ``dtype``, except :func:`uncast` buffers.

    Weights that are still mapped from ``files`` are copied one by one, within the memory of the
    copies.
    """
    float_buffers = uncast(model, dtype)
    with warnings.catch_warnings(), mapped.marked([*model.parameters(), *model.buffers()], files):
        warnings.filterwarnings("ignore", "Casting complex values to real")
        if files:
            model._apply(lambda tensor: mapped.moved(tensor, device, dtype))
        else:
            model = model.to(device, dtype)
    for name, buffer in float_buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to(device))
    return model


def uncast(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Buffers, by name, that must not be cast when ``model`` is put in ``dtype``.

    These are complex numbers, of which a cast would keep only the real part (Llama 4's vision tower
    has such rotary factors), and values that transformers computes in a wider dtype than the
    weights', above all the frequencies of rotary embeddings.
    """
    stored = model.state_dict().keys()
    weights = next((weight.dtype for weight in model.parameters()), dtype)
    buffers = {}
    for name, buffer in model.named_buffers():
        keeps_dtype = buffer.dtype != weights or name.endswith(FREQUENCIES)
        wider = buffer.is_floating_point() and buffer.dtype.itemsize > dtype.itemsize
        if buffer.is_complex() or (name not in stored and keeps_dtype and wider):
            buffers[name] = buffer
    return buffers


def is_quantised(model: Any) -> bool:
    """Whether transformers quantised the weights of ``model``."""
    return getattr(model, "hf_quantizer", None) is not None


@dataclass(frozen=True)
class Placing:
    """A ``place`` of the model in ``folder``, and ``options`` for ``from_pretrained``."""

    place: Place
    folder: Path
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        folder: Path,
        place: Place,
        device_map: str | dict[str, Any] | None = None,
        quantization_config: Any = None,
        variant: str | None = None,
    ) -> Placing:
        """How to load the model in ``folder``; a quantised one is loaded directly onto its device.

        Raises ``ValueError`` if ``quantization_config`` is not a config.
        """
        if quantization_config is not None and not hasattr(quantization_config, "to_dict"):
            raise ValueError(
                "quantization_config must be a config of transformers, such as TorchAoConfig or "
                f"BitsAndBytesConfig, got {shown(quantization_config)}"
            )
        file = folder / zoo.TRANSFORMERS
        quantised = quantization_config is not None or (
            file.is_file() and "quantization_config" in read_json(file)
        )
        if quantised and device_map is None and place.where.type != "cpu":
            device_map = {"": str(place.where)}
        options = dict(
            device_map=device_map, quantization_config=quantization_config, variant=variant
        )
        return cls(
            place, folder, {name: value for name, value in options.items() if value is not None}
        )

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype to load in: the files' dtype, so that :meth:`put` makes the only copy; the
        wanted dtype if the files' dtypes differ or transformers places the model; None: the
        config's.
        """
        stored = None if self.options else stored_dtype(self._files)
        return stored or self.place.dtype

    def loaded(
        self, load: Callable[[torch.dtype | None], T], model_of: Callable[[T], Any] = lambda x: x
    ) -> T:
        """Call ``load`` with :attr:`dtype`; load again in the wanted dtype if the model, which
        ``model_of`` takes from the result, is :meth:`rounded`.
        """
        result = load(self.dtype)
        return load(self.place.dtype) if self.rounded(model_of(result)) else result

    def rounded(self, model: Any) -> bool:
        """Whether ``model``, loaded in :attr:`dtype`, computed a buffer with less precision than
        the wanted dtype has, such as the scale of its embeddings.
        """
        kind = self.place.dtype
        if kind is None or self.dtype == kind:
            return False
        stored = model.state_dict().keys()
        computed = [buffer for name, buffer in model.named_buffers() if name not in stored]
        floats = [buffer.dtype for buffer in computed if buffer.is_floating_point()]
        return any(dtype != kind and dtype.itemsize <= kind.itemsize for dtype in floats)

    @property
    def _files(self) -> list[Path]:
        # as transformers names them: a folder may hold a part of a model only
        return sorted(self.folder.glob("model*.safetensors"))

    def put(self, model: Any) -> Any:
        """``model`` on its device, in the wanted dtype or the fastest one there.

        A model that a device map or a quantiser has placed is not moved. Raises ``ValueError`` for
        a model on several devices: keys and values are stored on one.
        """
        if "device_map" in self.options or is_quantised(model):
            _check_one_device(model)
            return model
        device = self.place.where
        size = sum(p.numel() for p in model.parameters())
        kind = self.place.dtype or choose_dtype(size, device=device)
        return moved(model, device, kind, self._files)


def _check_one_device(model: Any) -> None:
    """Raise ``ValueError`` for a model that a device map put on several devices."""
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if len(devices - {*ELSEWHERE}) > 1:
        raise ValueError(
            "device_map must leave the whole model on one device, got "
            f"{', '.join(sorted(devices))}; give device_map='cuda:0', or a quantization_config "
            "where it does not fit"
        )
