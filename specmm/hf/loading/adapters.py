"""Models with PEFT adapters: a ``PeftModel``, or the folder that one wrote.

Adapters such as LoRA become part of their base's layers, which run like any model. Virtual tokens
(prompt tuning, p-tuning, prefix tuning) do not: PEFT's own ``generate`` adds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from specmm.loading.checkpoints import read_json
from specmm.loading.extras import needed

CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"


def base_of(name: str | Path) -> tuple[str | Path, Path | None]:
    """The base model of the adapter ``name`` and the adapter's folder; ``name`` and None otherwise.

    Raises ``ValueError`` for an adapter that does not name its base.
    """
    if not isinstance(name, str | Path) or not (Path(name) / CONFIG).is_file():
        return name, None
    folder = Path(name)
    base = read_json(folder / CONFIG).get(BASE)
    if not base or not isinstance(base, str):
        raise ValueError(
            f"{folder / CONFIG} must name its base as {BASE!r}, got {base!r}; put its folder or "
            "hub id there"
        )
    relative = folder / base  # a path relative to the adapter
    return (relative if not Path(base).is_absolute() and relative.is_dir() else base), folder


def with_adapter(model: Any, folder: Path | None) -> Any:
    """A ``PeftModel`` of ``model`` with the adapter in ``folder``; ``model`` if that is None.

    Raises ``ValueError`` if the adapter is damaged or for another base, and without peft.
    """
    if folder is None:
        return model
    with needed(f"{folder}, an adapter,", "peft"):
        from peft import PeftModel
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"{folder} must hold an adapter of {type(model).__name__} with the sizes of its base "
            f"{model.config.name_or_path!r}, got: {reason}"
        ) from error


def split(model: Any) -> tuple[Any, Any]:
    """The transformers model inside ``model``, and the PEFT model around it, or None.

    Raises ``ValueError`` for virtual tokens.
    """
    if not type(model).__module__.startswith("peft."):
        return model, None
    kind = model.active_peft_config
    if kind.is_prompt_learning:
        raise ValueError(
            f"adapters must live in the model's layers, as LoRA, got {kind.peft_type.value}, whose "
            "virtual tokens PEFT adds in its own generate; let that answer"
        )
    return model.get_base_model(), model
