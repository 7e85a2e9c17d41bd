"""Models, tokenizers, processors and configs from transformers' folders: whole, without their code.

``from_pretrained`` itself makes weights up where a folder lacks them, and asks whether to run the
Python files that a folder names under ``auto_map``. Here a weight that is missing is an error, and
nothing of a folder ever runs: what needs its own code is refused, unless transformers has a class
that reads the same files.

Shape letters: none.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from specmm.checkpoints import check_names, read_json, some_names

LOGGER = logging.getLogger(__name__)
REPORTS = "transformers.modeling_utils"  # the logger of loading reports
CODE = "auto_map"  # where a config names Python files
TOKENIZER, WHOLE_TOKENIZER = "tokenizer_config.json", "tokenizer.json"
SAME_TOKENIZERS = {"DreamTokenizer": "Qwen2Tokenizer"}  # a folder's class, one that reads alike
TEMPLATES = "additional_chat_templates"
ADVICE = "fetch it again, or name its weights as save_pretrained does"


def load_model(kind: Any, folder: str | Path, **options: Any) -> Any:
    """The model in ``folder`` by ``kind``, a model class of transformers or an auto class.

    ``options`` are those of ``from_pretrained``. Raises ``ValueError`` naming weights that are
    missing, of another shape or unreadable, or those of further layers than the config counts.
    Missing are none that the class ties to others. Weights of other kinds than the class has (a
    head for another task, say) are left out with a warning.
    """
    from safetensors import SafetensorError

    try:
        with _no_reports():
            model, told = kind.from_pretrained(
                folder,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, SafetensorError) as error:  # damaged files, weights that do not join
        found = _first_line(error)
        raise ValueError(f"{folder} must hold readable weights, got: {found}; {ADVICE}") from error
    except ValueError as error:
        raise _explained(error, folder) from error
    _check_loaded(model, told, folder)
    return model


def load_config(folder: str | Path) -> Any:
    """The config in ``folder``; ``ValueError`` for a model type that only its code knows."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        raise _explained(error, folder) from error


def load_tokenizer(folder: str | Path, **options: Any) -> Any:
    """The tokenizer in ``folder``; ``options`` are those of ``from_pretrained``.

    A class that the folder brings is not used: its ``tokenizer.json`` says the same, or a class of
    transformers is known to read its files alike (Dream's are Qwen 2's). Raises ``ValueError``
    where neither is so.
    """
    from transformers import AutoTokenizer

    return _without_code(AutoTokenizer, folder, options)


def load_processor(folder: str | Path, **options: Any) -> Any:
    """The processor in ``folder``, its tokenizer as by :func:`load_tokenizer`."""
    from transformers import AutoProcessor

    return _without_code(AutoProcessor, folder, options)


def _without_code(kind: Any, folder: str | Path, options: dict[str, Any]) -> Any:
    with _plain(Path(folder)) as view:
        try:
            return kind.from_pretrained(view or folder, trust_remote_code=False, **options)
        except (OSError, ValueError) as error:
            raise _explained(error, folder, view is not None) from error


@contextmanager
def _plain(folder: Path) -> Iterator[Path | None]:
    """A view of ``folder`` whose configs name no code; None where they do not anyway."""
    configs = {file: _json(file) for file in sorted(folder.glob("*.json"))}
    if not any(CODE in text for text in configs.values()):
        yield None
        return
    with TemporaryDirectory(prefix="specmm-") as made:
        view = Path(made)
        for file in folder.iterdir():
            if CODE in configs.get(file, ""):
                facts = _known_classes(_stripped(read_json(file)), folder, file.name == TOKENIZER)
                (view / file.name).write_text(json.dumps(facts))
            elif file.suffix != ".py" and (file.is_file() or file.name == TEMPLATES):
                (view / file.name).symlink_to(file.resolve())
        yield view


def _json(file: Path) -> str:
    """The text of a config; a vocabulary, which may be large, is none."""
    return file.read_text() if file.name.endswith("config.json") else ""


def _stripped(facts: Any) -> Any:
    """``facts`` without any mention of code."""
    if not isinstance(facts, dict):
        return facts
    return {name: _stripped(value) for name, value in facts.items() if name != CODE}


def _known_classes(facts: dict[str, Any], folder: Path, tokenizer: bool) -> dict[str, Any]:
    """``facts`` of a config with classes of transformers; ``ValueError`` where none is the same."""
    import transformers

    processor, said = facts.get("processor_class"), facts.get("tokenizer_class")
    if processor is not None and not hasattr(transformers, str(processor)):
        raise _brought(folder, str(processor))
    if not tokenizer or (said is not None and hasattr(transformers, str(said))):
        return facts
    if (folder / WHOLE_TOKENIZER).is_file():
        return facts | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if said in SAME_TOKENIZERS:
        return facts | {"tokenizer_class": SAME_TOKENIZERS[said]}
    raise ValueError(
        f"{folder} must hold a tokenizer that transformers has a class for, got {said} in Python "
        f"files, which never run here; put a {WHOLE_TOKENIZER} of the same vocabulary beside them"
    )


def _explained(error: Exception, folder: str | Path, brought: bool = False) -> Exception:
    """``error`` itself; where code was ``brought`` or wanted to run, what to do instead."""
    if not brought and "trust_remote_code" not in str(error):
        return error
    return _brought(folder, "one")


def _brought(folder: str | Path, what: str) -> ValueError:
    return ValueError(
        f"{folder} must be of a kind that transformers has classes for, got {what} with Python "
        "files of its own (auto_map), which never run here; use a conversion whose configs name "
        "classes of transformers"
    )


def _check_loaded(model: Any, told: dict[str, Any], folder: str | Path) -> None:
    """Raise ``ValueError`` naming weights of ``model`` that are not those of the ``folder``."""
    missing, extra = sorted(told["missing_keys"]), sorted(told["unexpected_keys"])
    other = sorted(told["mismatched_keys"])
    shapes = [f"{name} {list(theirs)} for {list(ours)}" for name, theirs, ours in other]
    kinds = {_numberless(name) for name in model.state_dict()}
    layers = [name for name in extra if missing or _numberless(name) in kinds]
    problems = {"missing": missing, "unexpected": layers, "wrong-shaped": shapes}
    check_names(problems, type(model).__name__, folder, ADVICE)
    if extra:
        LOGGER.warning("%s: not used by %s: %s", folder, type(model).__name__, some_names(extra))


def _numberless(name: str) -> str:
    """The name of a weight in any layer."""
    return re.sub(r"\b\d+\b", "*", name)


@contextmanager
def _no_reports() -> Iterator[None]:
    """Without the tables that transformers logs of what we say on one line."""

    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger(REPORTS)
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
