"""specmm: draft-verify acceleration for autoregressive models that are not plain text LLMs."""

from pathlib import Path

# A checkout without symlinks (a zip download, Windows) lacks the links to the five sibling packages.
if not (Path(__file__).parent / "image_ar" / "tokens").exists():
    __path__.append(str(Path(__file__).parent.parent))

__version__ = "0.1.0"
