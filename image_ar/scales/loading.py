"""Reads and writes VAR and VQVAE files, and checks which models may be used together.

Reads published, trainer-made and our own files; writes under the official names. Sizes come from a
``config.json`` beside the weights, else from the weights' shapes where these determine them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specmm import zoo
from specmm.image_ar.files import check_shared, count, load_module, shape_of, stack_sizes
from specmm.image_ar.scales.scale_schedule import PATCHES_256
from specmm.image_ar.scales.var import PUBLISHED_HEAD_DIM, VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.loading.checkpoints import NESTING, FileError, State, fingerprint, read_checkpoint
from specmm.loading.hardware import gpu_has_bfloat16

MASK = "attn_bias_for_masking"  # holds -inf by design
TRAINER_NAMES = {VARConfig: ("var_wo_ddp", "var"), VQVAEConfig: ("vae_local", "vae_wo_ddp", "vae")}
COMMON = ("patch_nums", "vocab_size", "z_channels")  # to models and their tokenizer
SHARED_BY_MODELS = ("patch_nums", "num_classes", "vocab_size", "z_channels")


def load_var(
    path: str | Path, config: VARConfig | None = None, *, dtype: torch.dtype = torch.float32
) -> VAR:
    """The transformer in the file or folder ``path``, in evaluation mode, with weights ``dtype``.

    Without ``config`` the sizes come from ``config.json`` beside the weights, else from the
    weights' shapes. Also reads training checkpoints (``trainer.var_wo_ddp``). Raises ``ValueError``
    when sizes are missing and, naming them, when weights are missing, extra or misshapen.
    """
    state = _read(path, VARConfig)
    if MASK in state:
        state[MASK] = state[MASK].nan_to_num(neginf=0.0)
    common = (path, VAR, VARConfig, infer_var_config, config)
    model = load_module(*common, state=state, leftovers=(), dtype=dtype)
    if not torch.equal(model.lvl_1L, model.config.schedule.levels):
        raise FileError(
            path,
            f"must hold the levels of patch_nums {model.config.patch_nums} in lvl_1L, got others",
        )
    model.reset_mask()
    return model


def load_vqvae(
    path: str | Path,
    config: VQVAEConfig | None = None,
    *,
    patch_nums: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> VQVAE:
    """The image tokenizer in ``path``, in evaluation mode; sizes and errors as in ``load_var``.

    The weights do not contain the sides of the scales. Without ``patch_nums`` or ``config.json``,
    ten scales are assumed to be those for 256 px (give ``PATCHES_512`` for 512 px, which uses the
    same file).
    """

    def make(sizes: VQVAEConfig) -> VQVAE:
        return VQVAE(replace(sizes, patch_nums=patch_nums or sizes.patch_nums))

    common = (path, make, VQVAEConfig, partial(infer_vqvae_config, patch_nums=patch_nums), config)
    return load_module(*common, state=_read(path, VQVAEConfig), leftovers=(), dtype=dtype)


def _read(path: str | Path, kind: type[VARConfig] | type[VQVAEConfig]) -> State:
    """The tensors of ``path``; of a training checkpoint those under ``trainer``."""
    names = TRAINER_NAMES[kind]
    state = read_checkpoint(path, ("trainer", *names, *NESTING))
    for name in names:
        start = f"trainer.{name}."
        if any(key.startswith(start) for key in state):
            return {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
    return state


def infer_var_config(state: Mapping[str, Tensor], source: str | Path = "") -> VARConfig:
    """The config of a VAR ``state``, from its tensors' shapes and the tokens of each level.

    Without attn_l2_norm, heads are assumed to be 64 wide. Raises ``ValueError`` for narrower
    models.
    """
    width, codes = shape_of(state, "word_embed.weight", source)
    shape_of(state, "lvl_1L", source)
    counts = state["lvl_1L"].flatten().bincount().tolist()
    factors = state.get("blocks.0.attn.scale_mul_1H11")
    heads = width // PUBLISHED_HEAD_DIM if factors is None else factors.shape[1]
    if not heads:
        raise ValueError(
            f"num_heads must be given, because {source} does not contain it; pass a config, or "
            "put a config.json beside the file"
        )
    return VARConfig(
        depth=count(state, r"blocks\.(\d+)\."),
        embed_dim=width,
        num_heads=heads,
        mlp_ratio=shape_of(state, "blocks.0.ffn.fc1.weight", source)[0] / width,
        vocab_size=shape_of(state, "head.weight", source)[0],
        z_channels=codes,
        num_classes=shape_of(state, "class_emb.weight", source)[0] - 1,
        patch_nums=tuple(round(n**0.5) for n in counts),
        shared_aln="shared_ada_lin.1.weight" in state,
        attn_l2_norm=factors is not None,
    )


def infer_vqvae_config(
    state: Mapping[str, Tensor], patch_nums: tuple[int, ...] | None = None, source: str | Path = ""
) -> VQVAEConfig:
    """Sizes of a VQVAE ``state`` by its shapes; ``patch_nums`` are needed unless it has ten."""
    vocab_size, width = shape_of(state, "quantize.embedding.weight", source)
    scales = shape_of(state, "quantize.ema_vocab_hit_SV", source)[0]
    sides = patch_nums or (PATCHES_256 if scales == len(PATCHES_256) else ())
    if len(sides) != scales:
        raise FileError(
            source,
            f"needs other sizes: patch_nums must be the sides of the {scales} scales in it, got "
            f"{patch_nums}",
        )
    shared = "quantize.quant_resi.qresi.weight" in state
    return VQVAEConfig(
        vocab_size=vocab_size,
        z_channels=width,
        patch_nums=tuple(sides),
        share_quant_resi=1 if shared else count(state, r"quantize\.quant_resi\.qresi_ls\.(\d+)"),
        quant_conv_ks=shape_of(state, "quant_conv.weight", source)[-1],
        **stack_sizes(state, source),
    )


def check_tokenizer(model: VAR, vqvae: VQVAE) -> None:
    """Raise ``ValueError`` naming a size in which ``model`` and its tokenizer differ."""
    message = "transformer and tokenizer must share {name}, got {ours} and {theirs}"
    check_shared(message, {name: [name] for name in COMMON}, model.config, vqvae.config)


def check_models(large: VAR, small: VAR) -> None:
    """Raise ``ValueError`` naming a size in which two models for one picture differ."""
    message = "the two models must share {name}, got {ours} (large) and {theirs} (small)"
    check_shared(message, {name: [name] for name in SHARED_BY_MODELS}, large.config, small.config)


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` when ``device`` cannot compute in the half precision ``dtype``."""
    if dtype == torch.float16 and device.type == "cpu":
        raise ValueError("float16 must run on a GPU, got a CPU, use bfloat16 or float32")
    if dtype == torch.bfloat16 and device.type == "cuda" and not gpu_has_bfloat16():
        raise ValueError(
            "bfloat16 must run on a GPU that has it, got one without, use float16 or float32"
        )


def load_small_var(name: str | Path, vqvae: VQVAE, dtype: torch.dtype = torch.float32) -> VAR:
    """The transformer of a model folder, pocket name or hub id, or of a weights file or folder.

    Raises ``ValueError`` when a tokenizer lies beside it that is not ``vqvae``.
    """
    file = Path(name)
    weights = file if file.name == "model.safetensors" else file / "model.safetensors"
    if weights.is_file():
        file = weights.parent
        folder = weights.resolve().parents[1]  # of a whole model, if the weights are in one
    elif file.is_file():
        return load_var(file, dtype=dtype)
    else:
        folder = zoo.find(name)
        file = folder / "transformer"
    if (folder / "vae").is_dir():
        check_same_tokenizer(load_vqvae(folder / "vae"), vqvae, folder)
    return load_var(file, dtype=dtype)


def check_same_tokenizer(theirs: VQVAE, ours: VQVAE, folder: Path) -> None:
    """Raise ``ValueError`` when the tokenizer in ``folder`` is not ``ours``."""
    if tokenizer_fingerprint(theirs) != tokenizer_fingerprint(ours):
        raise ValueError(
            f"the two models must share their tokenizer, got another one in {folder / 'vae'}"
        )


def tokenizer_fingerprint(vqvae: VQVAE) -> str:
    """Tells tokenizers apart by codes, φ and the decoder's first layer."""
    phi = [w for _, w in vqvae.quantize.named_parameters() if w.ndim == 4]
    return fingerprint(vqvae.quantize.embedding.weight, *phi, vqvae.post_quant_conv.weight)
