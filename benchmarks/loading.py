"""The peak memory of opening and converting releases' files, over their size.

    python -m benchmarks.loading --only llamagen-c2i-xl-384

Files of the published sizes are made with random weights in the releases' containers, one release
at a time, and deleted; LLaVA has two of its 32 layers. A reading is the most memory that a process
had resident, less what it had before it opened the files (Linux; as root, who may begin a peak
anew). A row "as it runs" is of a whole pipeline, which stores a network of up to 2^30 weights twice
where the processor multiplies in bfloat16 (``specmm.loading.hardware.prepack``).
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import transformers as tf
import typer
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from benchmarks.common import CACHE, RESULTS, Out, Row, environment, merged, write_results
from benchmarks.gpu.published import llava
from specmm.hf.loading.placing import Placing
from specmm.image_ar.autoencoder import VQConfig, VQModel
from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.mar import MAR, MARConfig
from specmm.image_ar.continuous.mar import PUBLISHED as MARS
from specmm.image_ar.pipeline import ImagePipeline
from specmm.image_ar.scales.var import VAR, published
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.loading import mapped
from specmm.loading.hardware import Place, dtype_name
from specmm.runs.convert import READERS, convert
from specmm.vlm.loading import load_model, load_processor
from specmm.vlm.msd import MSDConfig, MSDHead, load_msd
from specmm.vlm.pipeline import VQAPipeline
from specmm.zoo import pocket_models
from specmm.zoo.published import published_models

BLOCK = 2**20  # random weights that are repeated
STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Release:
    """A model by its modules, each with its file and the ``nest`` of its weights there, or a
    folder of transformers by its ``config``.
    """

    files: Mapping[str, tuple[Callable[[], nn.Module], tuple[str, ...]]]
    dtype: torch.dtype = torch.float32
    config: Callable[[], tf.PreTrainedConfig] | None = None


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
WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


def _llava() -> tf.PreTrainedConfig:
    """Two layers as wide as LLaVA-1.5-7B's, and its whole vision tower."""
    config = llava()
    config.text_config.num_hidden_layers = 2
    return config


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
    "llava-1.5-7b": Release({}, torch.float16, _llava),
}
# what transformers calls the parts of LLaVA, and the release
NAMES = {
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.language_model.": "language_model.model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}


def most(now: bool = False) -> int:
    """The most bytes that this process had resident, or those that it has ``now``."""
    wanted = "VmRSS" if now else "VmHWM"
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(wanted))


def measured(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of ``run`` and the most memory it took beside what was there before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier reading freed goes back to the system
    RESET.write_text("5")  # the peak begins anew
    before = most(now=True)
    begin = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - begin
    peak = most() - before
    del kept
    return {"peak": peak, "seconds": seconds}


def state_of(make: Callable[[], nn.Module], dtype: torch.dtype, folder: Path) -> dict[str, Tensor]:
    """Random weights of a module, in files of ``folder``; what it computes of itself is kept."""
    with mapped.WithoutWeights():
        module = make()
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    found = {}
    for number, (name, tensor) in enumerate(module.state_dict().items()):
        found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if tensor.is_meta:
            file = str(folder / f"{number}.part")
            flat = torch.from_file(file, shared=True, size=tensor.numel(), dtype=dtype)
            for part in flat.split(BLOCK):
                part.copy_(block[: len(part)])
            found[name] = flat.view(tensor.shape)
    return found


def write(name: str, folder: Path) -> None:
    """The files of a release, in ``folder``."""
    release = RELEASES[name]
    if release.config is not None:
        return write_folder(release, folder)
    for place, (make, nest) in release.files.items():
        tree: Any
        with TemporaryDirectory(dir=folder) as made:
            for key in ("", *nest):  # each of MAR's two has memory of its own
                (Path(made) / key).mkdir(exist_ok=True)
            states = [state_of(make, release.dtype, Path(made) / key) for key in nest or ("",)]
            tree = dict(zip(nest, states, strict=True)) if nest else states[0]
            torch.save(tree, folder / file_of(name, place))
    if not published_models()[name].parts:
        (folder / "config.json").write_text(json.dumps(LLAVA_7B.to_json()))


def write_folder(release: Release, folder: Path) -> None:
    """The folder of a LLaVA, its weights in shards, with the processor of pocket/llava."""
    assert release.config is not None
    config = release.config()
    kind = tf.LlavaForConditionalGeneration
    with TemporaryDirectory(dir=folder) as made:
        state = state_of(lambda: kind._from_config(config), release.dtype, Path(made))
        save_torch_state_dict(
            {published_name(name): tensor for name, tensor in state.items()},
            folder,
            max_shard_size="1GB",
        )
    facts = config.to_dict() | {"architectures": [kind.__name__], "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(facts))
    load_processor(pocket_models()["pocket/llava"]).save_pretrained(folder)


def published_name(name: str) -> str:
    """What the release calls a weight of LLaVA."""
    ours = next(ours for ours in NAMES if name.startswith(ours))
    return NAMES[ours] + name.removeprefix(ours)


def file_of(name: str, place: str) -> str:
    """What a part of a release is called there."""
    parts = published_models()[name].parts
    return parts[place].file if parts else "pytorch_model.bin"


def read(name: str, folder: Path, dtype: torch.dtype) -> list[object]:
    """The modules of a release, as pipelines load them."""
    if RELEASES[name].config is not None:
        placing = Placing.of(folder, Place.named("cpu", dtype))
        return [placing.put(placing.loaded(partial(load_model, folder)))]
    entry = published_models()[name]
    if not entry.parts:
        return [load_msd(folder, dtype=dtype)]
    facts = {**entry.configs.get("transformer", {})}
    options = {"block_size": facts["block_size"]} if facts else {}
    loaded = []
    for place in RELEASES[name].files:
        load = READERS[entry.family, place]
        given = {"dtype": dtype, **options} if place == "transformer" else {}
        loaded.append(load(folder / file_of(name, place), **given))
    return loaded


def write_ours(name: str, folder: Path) -> None:
    """Convert a release."""
    first, *others = RELEASES[name].files
    given = [f"{place}={folder / file_of(name, place)}" for place in others]
    convert(folder / file_of(name, first), folder / "out", name, given)


def tell(name: str, made: str) -> None:
    """All readings of a release, for a process of its own."""
    folder = Path(made)
    ImagePipeline.from_pretrained("pocket/llamagen")  # whatever is imported and made once
    size = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in WEIGHTS)
    runs: dict[str, Callable[[], object]] = {
        dtype: partial(read, name, folder, getattr(torch, dtype))
        for dtype in (dtype_name(RELEASES[name].dtype), "bfloat16")
    }
    if RELEASES[name].config is not None:
        open_folder = VQAPipeline.from_pretrained
        runs["bfloat16, as it runs"] = partial(open_folder, folder, dtype="bfloat16", device="cpu")
    if published_models()[name].parts:
        runs["convert"] = partial(write_ours, name, folder)
    for what, run in runs.items():
        found = measured(run)
        row = {
            "model": name,
            "read as": what,
            "file, GB": round(size / 1e9, 3),
            "peak, GB": round(found["peak"] / 1e9, 3),
            "over file": round(found["peak"] / size, 2),
            "seconds": round(found["seconds"], 1),
        }
        print(json.dumps(row), flush=True)


def rows_of(name: str) -> list[Row]:
    """The readings of a release, whose files are made and deleted."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="specmm-", dir=CACHE) as made:
        _run(f"write({name!r}, Path({made!r}))")
        lines = _run(f"tell({name!r}, {made!r})").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def _run(call: str) -> str:
    """What ``call`` prints in a process of its own."""
    script = f"from benchmarks.loading import *; {call}"
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    run.check_returncode()
    return run.stdout


def main(
    only: Annotated[str, typer.Option(help="Releases, with commas.")] = ",".join(RELEASES),
    out: Out = RESULTS,
) -> None:
    """Measure and write ``loading.csv`` and ``loading.json``, which keep what is not measured."""
    for name in only.split(","):
        rows = merged(out, "loading", rows_of(name), ("model",))
        write_results(out, "loading", rows, environment())


if __name__ == "__main__":
    typer.run(main)
