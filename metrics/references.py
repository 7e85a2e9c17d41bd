"""Files of reference statistics, ours and other projects'; nothing in them is unpickled.

| layout | file | holds |
|---|---|---|
| ``specmm`` | .npz | ``mu``, ``sigma``, ``count``, ``protocol`` (JSON) |
| ``clean-fid`` (pytorch-fid, TTUR too) | .npz | ``mu``, ``sigma`` |
| ``adm`` (guided-diffusion) | .npz | ``mu``, ``sigma``, ``mu_s``, ``sigma_s`` (spatial features) |
| ``torch-fidelity`` | .pt | a dictionary of the arrays ``mu`` and ``sigma`` |

Readers of clean-fid's layout read ours, too. The other layouts do not record the feature network.

Shapes: ``mu`` [F]; ``sigma`` [F, F].
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from specmm.metrics.features import Protocol
from specmm.metrics.frechet import Gaussian

Layout = Literal["specmm", "clean-fid", "adm", "torch-fidelity"]
ASYMMETRY = 1e-6  # rounding's asymmetry of sigma, relative to its largest entry
ARRAYS = {"mu", "sigma", "mu_s", "sigma_s", "count", "protocol"}  # the arrays read from an .npz


@dataclass(frozen=True)
class Reference:
    """Finite mean [F] and symmetric covariance [F, F], float64; ``count`` None: not in the file."""

    mean: Tensor
    covariance: Tensor
    count: int | None = None
    protocol: Protocol = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mean.ndim != 1 or self.covariance.shape != (len(self.mean),) * 2:
            got = f"{list(self.mean.shape)} and {list(self.covariance.shape)}"
            raise ValueError(f"a reference must have mu [F] and sigma [F, F], got {got}")
        if not (self.mean.isfinite().all() and self.covariance.isfinite().all()):
            raise ValueError("a reference must be finite, got NaN or inf; write it again")
        apart = (self.covariance - self.covariance.T).abs().max()
        if apart > ASYMMETRY * self.covariance.abs().max():
            raise ValueError(f"sigma must be symmetric, got a difference of {float(apart):.3g}")

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean [F] and a copy of the covariance [F, F]."""
        return self.mean, self.covariance.clone()


def read_reference(path: Path, *, spatial: bool = False) -> Reference:
    """The reference in ``path`` (.npz, .pt) of any layout; ``spatial``: an ADM file's second pair.

    Raises ``ValueError`` for any other file.
    """
    arrays = _arrays(path)
    names = ("mu_s", "sigma_s") if spatial else ("mu", "sigma")
    if not set(names) <= set(arrays):
        present = ", ".join(sorted(arrays))
        raise ValueError(f"{path} must hold {' and '.join(names)}, got {present}{_hint(arrays)}")
    mean, covariance = (torch.as_tensor(np.asarray(arrays[n]), dtype=torch.float64) for n in names)
    if "protocol" in arrays:
        protocol = json.loads(str(arrays["protocol"]))
    else:
        npz = "adm" if "mu_s" in arrays else "clean-fid"
        protocol = {"source": f"{npz if path.suffix == '.npz' else 'torch-fidelity'} statistics"}
    count = int(arrays["count"]) if "count" in arrays else None
    return Reference(mean, covariance, count, protocol)


def write_reference(
    found: Gaussian, path: Path, layout: Layout = "specmm", *, spatial: Gaussian | None = None
) -> None:
    """Write the moments of ``found`` to ``path``; ``adm`` also needs ``spatial`` moments."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    suffix = ".pt" if layout == "torch-fidelity" else ".npz"
    if path.suffix != suffix:
        raise ValueError(f"a file of {layout} must end in {suffix}, got {path.name!r}; rename it")
    if (spatial is not None) != (layout == "adm"):
        raise ValueError("spatial statistics belong to the layout adm, which needs them")
    mean, covariance = found.moments()
    arrays = {"mu": mean.cpu().numpy(), "sigma": covariance.cpu().numpy()}
    if layout == "specmm":
        arrays["protocol"] = np.array(json.dumps(found.protocol))
        if found.count is not None:
            arrays["count"] = np.array(found.count)
    if spatial is not None:
        mean, covariance = spatial.moments()
        arrays |= {"mu_s": mean.cpu().numpy(), "sigma_s": covariance.cpu().numpy()}
    with path.open("wb") as file:
        torch.save(arrays, file) if suffix == ".pt" else np.savez(file, **arrays)  # type: ignore[arg-type]


def _arrays(path: Path) -> dict[str, Any]:
    """The arrays of a file of statistics, by name."""
    if not path.is_file():
        raise ValueError(f"{path} must be a file of statistics (.npz or .pt), there is none")
    try:
        return _tensors(path) if path.suffix in (".pt", ".pth") else _npz(path)
    except ValueError as error:
        raise ValueError(f"{path} must be .npz or .pt with arrays only: {error}") from error
    except Exception as error:  # a broken zip or pickle raises whatever it likes
        got = f"{type(error).__name__}; copy it again"
        raise ValueError(f"{path} must be a whole .npz or .pt file, got {got}") from error


def _npz(path: Path) -> dict[str, Any]:
    if not zipfile.is_zipfile(path):
        raise zipfile.BadZipFile(str(path))
    with np.load(path, allow_pickle=False) as data:  # pictures beside the statistics are not read
        return {name: data[name] if name in ARRAYS else None for name in data.files}


def _tensors(path: Path) -> dict[str, Any]:
    """The dictionary in a torch file; only arrays and tensors are loaded from it."""
    make = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    floats = [type(np.dtype(kind)) for kind in (np.float64, np.float32)]
    in_numpy_1 = (make, "numpy.core.multiarray._reconstruct")  # the name in older files
    allowed: list[Any] = [np.ndarray, np.dtype, *floats, make, in_numpy_1]
    with torch.serialization.safe_globals(allowed):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(f"expected a dictionary of mu and sigma, got {type(content).__name__}")
    return content


def _hint(arrays: Mapping[str, Any]) -> str:
    if "arr_0" in arrays or "images" in arrays:
        return "; these are pictures, extract their features first"
    return "; these are features, load them as such" if {"feats", "values"} & set(arrays) else ""
