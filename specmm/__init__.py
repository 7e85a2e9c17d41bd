"""specmm: draft-verify acceleration for autoregressive models that are not plain text LLMs."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specmm import methods as methods
    from specmm import structured as structured
    from specmm.choose.threads import threads as threads
    from specmm.extending.extension import register as register
    from specmm.hf.answers.generate import custom_generate as custom_generate
    from specmm.image_ar.pipeline import ImagePipeline as ImagePipeline
    from specmm.image_ar.pipeline import custom_pipeline as custom_pipeline
    from specmm.serving.conversation import Conversation as Conversation
    from specmm.text.pipeline import TextPipeline as TextPipeline
    from specmm.vlm.pipeline import VQAPipeline as VQAPipeline

# A checkout without symlinks (a zip download, Windows) lacks those to the five sibling packages.
if not (Path(__file__).parent / "image_ar" / "tokens").exists():
    __path__.append(str(Path(__file__).parent.parent))

__version__ = "0.1.0"

_LAZY = {  # heavy names, imported on first use
    "Conversation": "specmm.serving.conversation",
    "ImagePipeline": "specmm.image_ar.pipeline",
    "TextPipeline": "specmm.text.pipeline",
    "VQAPipeline": "specmm.vlm.pipeline",
    "custom_generate": "specmm.hf.answers.generate",
    "custom_pipeline": "specmm.image_ar.pipeline",
    "register": "specmm.extending.extension",
    "threads": "specmm.choose.threads",
}
__all__ = [
    "Conversation",
    "ImagePipeline",
    "TextPipeline",
    "VQAPipeline",
    "__version__",
    "custom_generate",
    "custom_pipeline",
    "methods",
    "register",
    "structured",
    "threads",
]


def __getattr__(name: str) -> Any:
    if name in ("methods", "structured"):
        return import_module(f"specmm.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'specmm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
