"""The peak memory of opening and converting releases' files, over their size.

    python -m benchmarks.loading --only llamagen-c2i-xl-384

Files of the published sizes are made with random weights in the releases' containers, one at a
time, and deleted. Each reading is a process of its own: the most memory that it had resident, less
what it had before it opened the file (Linux).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.common import CACHE, RESULTS, Out, Row, environment, write_results
from specmm import mapped
from specmm.image_ar.autoencoder import VQConfig, VQModel
from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.mar import MAR, MARConfig
from specmm.image_ar.continuous.mar import PUBLISHED as MARS
from specmm.image_ar.scales.var import VAR, published
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.vlm.msd import MSDConfig, MSDHead
from specmm.zoo.published import published_models

BLOCK = 2**20  # random weights that are repeated
STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Release:
    """A model by its modules, each with its file and the ``nest`` of its weights there."""

    files: Mapping[str, tuple[Callable[[], nn.Module], tuple[str, ...]]]
    dtype: torch.dtype = torch.float32


def _gpt(name: str) -> Callable[[], nn.Module]:
    facts = {**published_models()[name].configs["transformer"]}
    facts.pop("model")
    return lambda: Transformer(GPTConfig(**facts))


def _var(depth: int) -> Callable[[], nn.Module]:
    return lambda: VAR(published(depth))


def _mar(name: str) -> Callable[[], nn.Module]:
    return lambda: MAR(MARConfig(**MARS[name]))


VQ = (lambda: VQModel(VQConfig()), ("model",))
VQ_VAE = (lambda: VQVAE(VQVAEConfig()), ())
KL = (lambda: AutoencoderKL(KLConfig()), ("model",))
LLAVA_7B = MSDConfig(32064, 4096, 11008, 32, 32)
RELEASES = {
    **{
        name: Release({"transformer": (_gpt(name), ("model",)), "vq": VQ})
        for name in ("llamagen-c2i-l-384", "llamagen-c2i-xl-384", "llamagen-t2i-xl-256")
    },
    **{
        f"var-d{depth}": Release({"transformer": (_var(depth), ()), "vae": VQ_VAE})
        for depth in (16, 30)
    },
    **{
        name: Release({"transformer": (_mar(name.upper()), ("model", "model_ema")), "vae": KL})
        for name in ("mar-b", "mar-h")
    },
    "msd-llava-1.5-7b": Release({"": (lambda: MSDHead(LLAVA_7B), ())}, torch.float16),
}


def most(now: bool = False) -> int:
    """The most bytes that this process had resident, or those that it has ``now``."""
    wanted = "VmRSS" if now else "VmHWM"
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(wanted))


def measured(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of ``run`` and the most memory it took beside what was there before."""
    RESET.write_text("5")  # the peak begins anew
    before = most(now=True)
    begin = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - begin
    peak = most() - before
    del kept
    return {"peak": peak, "seconds": seconds}


def state_of(make: Callable[[], nn.Module], dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights of a module; what it computes of itself is kept."""
    with mapped.WithoutWeights():
        module = make()
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    found = {}
    for name, tensor in module.state_dict().items():
        if tensor.is_meta:
            flat = torch.empty(tensor.numel(), dtype=dtype)
            for part in flat.split(BLOCK):
                part.copy_(block[: len(part)])
            found[name] = flat.view(tensor.shape)
        else:
            found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return found


def write(name: str, folder: Path) -> dict[str, Path]:
    """The files of a release in ``folder``, by part."""
    release = RELEASES[name]
    parts = published_models()[name].parts
    found = {}
    for place, (make, nest) in release.files.items():
        file = folder / (parts[place].file if place else "pytorch_model.bin")
        tree: Any = state_of(make, release.dtype)
        if nest:  # MAR's two are not the same memory
            tree = {key: {k: v.clone() for k, v in tree.items()} for key in nest[1:]} | {
                nest[0]: tree
            }
        torch.save(tree, file)
        found[place] = file
        if not place:
            facts = LLAVA_7B.to_json()
            (folder / "config.json").write_text(json.dumps(facts))
    return found


def read(name: str, files: Mapping[str, Path], dtype: torch.dtype) -> list[object]:
    """The modules of a release, as pipelines load them."""
    from specmm.runs.convert import CONVERTERS
    from specmm.vlm.msd import load_msd

    if "" in files:
        return [load_msd(files[""].parent, dtype=dtype)]
    entry = published_models()[name]
    sizes = entry.configs.get("transformer", {})
    options = {"block_size": sizes["block_size"]} if "block_size" in sizes else {}
    loaded = []
    for place, file in files.items():
        load, _ = CONVERTERS[entry.family, place]
        wanted = dtype if place == "transformer" else torch.float32
        loaded.append(load(file, dtype=wanted, **(options if place == "transformer" else {})))
    return loaded


def child(name: str, what: str, folder: Path) -> dict[str, float]:
    """One reading, in a process that has opened a small model before."""
    from specmm.image_ar.pipeline import ImagePipeline
    from specmm.runs.convert import convert

    ImagePipeline.from_pretrained("pocket/llamagen")
    parts = published_models()[name].parts
    files = {place: folder / part.file for place, part in parts.items()}
    files = files or {"": folder / "pytorch_model.bin"}
    if what == "convert":
        others = [f"{place}={file}" for place, file in files.items() if place != "transformer"]
        source = files["transformer"]
        return measured(lambda: convert(source, folder / "out", name, others))
    return measured(lambda: read(name, files, getattr(torch, what)))


def rows_of(name: str) -> list[Row]:
    """The readings of a release, whose files are made and deleted."""
    rows = []
    CACHE.mkdir(parents=True, exist_ok=True)
    readings = ["float32", "bfloat16"]
    if "transformer" in RELEASES[name].files:
        readings.append("convert")
    with TemporaryDirectory(prefix="specmm-", dir=CACHE) as made:
        folder = Path(made)
        script = f"from benchmarks import loading; loading.make({name!r}, {made!r})"
        subprocess.run([sys.executable, "-c", script], check=True)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.suffix != ".json")
        for what in readings:
            script = f"from benchmarks import loading; loading.tell({name!r}, {what!r}, {made!r})"
            run = subprocess.run(
                [sys.executable, "-c", script], check=True, capture_output=True, text=True
            )
            found = json.loads(run.stdout.splitlines()[-1])
            rows.append(
                {
                    "model": name,
                    "read as": what,
                    "file, GB": round(size / 1e9, 3),
                    "peak, GB": round(found["peak"] / 1e9, 3),
                    "over file": round(found["peak"] / size, 2),
                    "seconds": round(found["seconds"], 1),
                }
            )
            print(rows[-1])
    return rows


def make(name: str, folder: str) -> None:
    """:func:`write`, for a process of its own."""
    write(name, Path(folder))


def tell(name: str, what: str, folder: str) -> None:
    """:func:`child`, for a process of its own."""
    print(json.dumps(child(name, what, Path(folder))))


def main(
    only: Annotated[str, typer.Option(help="Releases, with commas.")] = ",".join(RELEASES),
    out: Out = RESULTS,
) -> None:
    """Measure and write ``loading.csv`` and ``loading.json``."""
    rows = [row for name in only.split(",") for row in rows_of(name)]
    write_results(out, "loading", rows, environment())


if __name__ == "__main__":
    typer.run(main)
