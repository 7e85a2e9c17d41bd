"""Vision-language models, processors and drafters from folders.

A folder holds a transformers model or a composed model: a LLaVA whose parts come in packages, with
EfficientNet-lite0 as vision tower, SmolLM2-135M-Instruct as language model and our own projector.
A composed folder has ``projector.safetensors`` and a ``config.json`` that names the language model;
the whole is transformers' own ``LlavaForConditionalGeneration``.

Drafters are in ``drafters/``: ``text`` holds a language model, ``vlm`` a small vision-language
model (else the first expert drafts), ``msd`` an MSD head, and ``experts`` a folder for each model
of Speculative Verdict and, optionally, ``prompts.json`` with their prompts.

Shape letters: B pictures, N patches, D channels, S pixels a side that the tower sees.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from specmm.core.randomness import seeded
from specmm.hf.drafters.small_model import SmallModel
from specmm.hf.loading import pretrained
from specmm.hf.loading.pretrained import (
    find_target,
    is_packaged,
    load_target,
    missing_packages,
    weights_folder,
)
from specmm.loading.checkpoints import (
    check_fingerprint,
    embeddings_of,
    fingerprint,
    load_strict,
    read_checkpoint,
    read_json,
)
from specmm.loading.hardware import prepack
from specmm.zoo import efficientnet

PROJECTOR = "projector.safetensors"
LANGUAGE = "pocket/smollm2"
IMAGE = "<file_sep>"  # a token that no chat holds is the placeholder of a picture's patch
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<file_sep>' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)
FINE_BLOCK = 10  # the tower's last block at stride 16; the last of all is at stride 32
MEAN = 127 / 255  # a pixel's mean in [0, 1], each channel
STD = 128 / 255


def load_model(folder: Path, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """The vision-language model in ``folder``; ``ValueError`` if it holds none.

    ``options`` go to transformers' ``from_pretrained``.
    """
    if is_composed(folder):
        if options:
            raise ValueError(
                f"{' and '.join(options)} must be left out for {folder}, a model of two packages"
            )
        return _compose(folder, dtype)
    try:
        config = pretrained.load_config(folder)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} must hold a transformers model ({error})") from error
    if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ValueError(
            f"{folder} must hold a vision-language model, got model type {config.model_type!r}"
        )
    kind = AutoModelForImageTextToText
    return pretrained.load_model(kind, folder, dtype=dtype or "auto", **options).eval()


def load_processor(folder: Path) -> Any:
    """The processor beside the model; ``ValueError`` if there is none."""
    if is_composed(folder):
        return build_processor(read_json(folder / "config.json")["language_model"])
    try:
        processor = pretrained.load_processor(folder)
    except ImportError as error:  # some processors need packages of their own
        reason = " ".join(str(error).split())
        raise ValueError(f"the processor of {folder} needs a package: {reason}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder} must hold a processor beside the model ({error})") from error
    if not hasattr(processor, "tokenizer"):
        raise ValueError(
            f"{folder} must hold a processor of pictures and text, got a {type(processor).__name__}"
        )
    return processor


def load_small(folder: Path, target: PreTrainedModel, method: str) -> SmallModel:
    """The small vision-language model in ``folder``, placed as ``target`` is, and its processor."""
    processor = load_processor(folder) if (folder / "processor_config.json").is_file() else None
    return SmallModel(prepack(load_model(folder, target.dtype).to(target.device)), processor)


def is_composed(folder: Path) -> bool:
    """Whether ``folder`` holds only the projector between two packages' models."""
    return (folder / PROJECTOR).is_file()


def missing_parts(folder: Path) -> list[str]:
    """The packages of the composed model in ``folder`` that are not installed."""
    language = find_target(read_json(folder / "config.json")["language_model"])
    missing = missing_packages(language) if is_packaged(language) else []
    tower = (efficientnet.CODE, efficientnet.WEIGHTS)
    return [*missing, *(name for name in tower if importlib.util.find_spec(name) is None)]


def _compose(folder: Path, dtype: torch.dtype | None) -> LlavaForConditionalGeneration:
    """The composed model of ``folder``, in ``dtype`` or float32.

    Raises ``ValueError`` for packages that are missing, a projector of another language model and
    weights that do not fit.
    """
    facts = read_json(folder / "config.json")
    model: Any = untrained(facts["language_model"])
    check_fingerprint(facts.get("target_fingerprint"), fingerprint(embeddings_of(model)), folder)
    projector = read_checkpoint(folder / PROJECTOR)
    load_strict(model.model.multi_modal_projector, projector, source=folder)
    return model.to(dtype or torch.float32).eval()


def untrained(language: str = LANGUAGE, seed: int = 0) -> LlavaForConditionalGeneration:
    """The packages' models with a random projector between them, float32."""
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
    model.model.vision_tower = tower
    model.model.language_model = speaker.model
    model.lm_head = speaker.lm_head
    with seeded(seed):
        projector = model.model.multi_modal_projector.to_empty(device="cpu")
        for layer in (projector.linear_1, projector.linear_2):
            layer.reset_parameters()
    model.generation_config = speaker.generation_config
    return model.eval()


def build_processor(language: str = LANGUAGE) -> LlavaProcessor:
    """The processor of a composed model, with the tokenizer of the ``language`` model."""
    sizes = TowerConfig()
    tokenizer = pretrained.load_tokenizer(
        weights_folder(find_target(language)),
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    pictures = CLIPImageProcessor(
        size={"height": sizes.image_size, "width": sizes.image_size},
        do_center_crop=False,
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
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
    """Write the projector of ``model`` (bf16), and a config that names the models it belongs to."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = model.model.multi_modal_projector.state_dict()
    tensors = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in weights.items()}
    save_file(tensors, folder / PROJECTOR)
    vision: Any = model.config.vision_config
    facts = {
        "model_type": "llava",
        "vision_config": {"model_type": vision.model_type},
        "language_model": language,
        "target_fingerprint": fingerprint(embeddings_of(model)),
    }
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")


class TowerConfig(PreTrainedConfig):
    """Sizes: ``hidden_size`` D = 112 + 320, ``image_size`` S, ``patch_size`` of a token."""

    model_type = "efficientnet_lite0"

    def __init__(
        self, hidden_size: int = 432, image_size: int = 256, patch_size: int = 32, **rest: Any
    ) -> None:
        self.hidden_size = hidden_size
        self.image_size = image_size
        self.patch_size = patch_size
        super().__init__(**rest)


class Tower(PreTrainedModel):
    """EfficientNet-lite0, pretrained on ImageNet, as the vision tower of a transformers LLaVA.

    The outputs of its last blocks at strides 16 (fine positions) and 32 (more meaning) are
    concatenated. Raises ``ValueError`` if its package is missing.
    """

    config_class = TowerConfig
    main_input_name = "pixel_values"

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config)
        self.network = efficientnet.new_network()
        start: Any = self.post_init
        start()

    def _init_weights(self, module: Any) -> None:
        """Does nothing: the weights come from the package."""

    @classmethod
    def pretrained(cls) -> Tower:
        """The tower with the package's weights; raises ``ValueError`` saying how to get them."""
        from specmm.metrics.weights import locate  # other models need nothing of the metrics

        tower: Any = cls(TowerConfig())
        tower.network = efficientnet.load_network(locate("efficientnet-lite0"))
        return tower.eval()

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutput:
        """Features [B, N, D] of pictures [B, 3, S, S], row by row, as the only hidden state."""
        net: Any = self.network
        x = net._swish(net._bn0(net._conv_stem(pixel_values)))
        fine = x
        for place, block in enumerate(net._blocks):
            x = block(x)
            fine = x if place == FINE_BLOCK else fine
        joined = torch.cat([F.avg_pool2d(fine, 2), x], dim=1)  # [B, D, S / 32, S / 32]
        features = joined.flatten(2).transpose(1, 2)
        return BaseModelOutput(last_hidden_state=features, hidden_states=(features,))


AutoConfig.register(TowerConfig.model_type, TowerConfig)
AutoModel.register(TowerConfig, Tower)
