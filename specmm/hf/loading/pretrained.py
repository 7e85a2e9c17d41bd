"""Loads models, tokenizers, processors and configs from transformers folders, without their code.

``from_pretrained`` itself initialises missing weights at random, and offers to run the Python files
that a folder names under ``auto_map``. Here a missing weight is an error, and a folder's code never
runs: a model that needs its own code is refused, unless transformers has a class that reads the
same files.

A folder with ``package.json`` holds no weights: it names an installed Python package and the GGUF
file in it, which is unpacked once.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from filelock import FileLock
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specmm import zoo
from specmm.hf.loading.unpacking import unpacking
from specmm.kernels.backend import backend
from specmm.kernels.tree_attention.interface import NAME
from specmm.loading.checkpoints import check_names, no_tensors, read_json, some_names

LOGGER = logging.getLogger(__name__)
REPORTS = "transformers.modeling_utils"  # the logger of loading reports
CODE = "auto_map"  # a config's entry for Python files
TOKENIZER = "tokenizer_config.json"
WHOLE_TOKENIZER = "tokenizer.json"
VOCABULARIES = ("*token*", "vocab*", "*.model", "*tekken*")  # files that hold one
SAME_TOKENIZERS = {"DreamTokenizer": "Qwen2Tokenizer"}  # a folder's class, one that reads alike
TEMPLATES = "additional_chat_templates"
ADVICE = "fetch it again, or name its weights as save_pretrained does"
# what configs call the number of layers for multi-token prediction (MTP)
MTP = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
HELPERS = ("gguf", "accelerate")  # packages that transformers unpacks GGUF files with
CACHE = Path("~/.cache/specmm/unpacked")

ModelT = TypeVar("ModelT", bound=PreTrainedModel)


def find(name: str | Path, **hub: Any) -> Path:
    """The folder of a transformers model: a local one, a pocket name or a hub id.

    ``hub`` is as in :func:`specmm.zoo.find`. Raises ``ValueError`` if there is none.
    """
    return zoo.find(name, zoo.TRANSFORMERS, **hub)


def find_target(name: str | Path, **hub: Any) -> Path:
    """The folder of a text model, which may name a package instead of holding weights."""
    folder = zoo.pocket_models().get(str(name), Path(str(name)))
    return folder if is_packaged(folder) else find(name, **hub)


def weights_folder(folder: Path) -> Path:
    """The folder that transformers can read: ``folder``, or where its package was unpacked."""
    return unpacked(folder) if is_packaged(folder) else folder


def load_target(folder: Path, dtype: torch.dtype | None = None, **options: Any) -> tuple[Any, Any]:
    """The causal language model in ``folder`` and its tokenizer.

    ``options`` go to ``from_pretrained``. Raises ``ValueError`` if the folder holds no such model.
    """
    folder = weights_folder(folder)
    try:
        model = load_model(AutoModelForCausalLM, folder, dtype=dtype or "auto", **options)
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\nModel type should be")[0]  # not all the types
        raise ValueError(
            f"{folder} must hold a causal language model and its tokenizer ({reason})"
        ) from error
    return model.eval(), tokenizer


def own_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the drafter in ``folder``; None if it reads the target's tokens."""
    return load_tokenizer(folder) if (folder / TOKENIZER).is_file() else None


def use_tree_attention(model: ModelT) -> ModelT:
    """``model``, with its language model's attention set to the tree kernel if Triton runs, else to
    attention by groups of rows of similar lengths.

    Nothing changes for models with another kind of attention (sliding windows, capped scores,
    sinks, or an implementation that the user chose): their trees are scored with dense masks of all
    rows. A vision tower keeps its attention.
    """
    text = model.config.get_text_config()
    if text._attn_implementation == NAME:
        return model
    if reason := _unsuited(text):
        if backend(model.device) == "triton":
            kind = type(model).__name__
            LOGGER.warning("%s: trees are scored with dense masks, because %s", kind, reason)
        return model
    parts = [n for n in model.config.sub_configs if getattr(model.config, n, None) is text]
    model.set_attn_implementation({part: NAME for part in parts} if parts else NAME)
    return model


def _unsuited(text: PreTrainedConfig) -> str:
    """Why the kernel cannot replace the attention of a model with the config ``text``."""
    if text._attn_implementation != "sdpa":
        return f"its attention is {text._attn_implementation}"
    if getattr(text, "attn_logit_softcapping", None):
        return "its attention scores are capped"
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return "it has layers that see a window" if window or kinds - {"full_attention"} else ""


def load_model(kind: Any, folder: str | Path, unneeded: str | None = None, **options: Any) -> Any:
    """The model in ``folder`` by ``kind``, a model class of transformers or an auto class.

    ``options`` go to ``from_pretrained``; weights whose names begin with ``unneeded`` may be
    missing. Raises ``ValueError`` naming weights that are missing (unless tied), of another shape,
    unreadable, or of more layers than the config has. Weights that the class does not have, such as
    another task's head, are ignored with a warning.
    """
    from safetensors import SafetensorError

    try:
        with unlogged(REPORTS, "LOAD REPORT"):  # our errors name the same weights on one line
            model, report = kind.from_pretrained(
                folder,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:  # a quantiser's, in many lines
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} needs a package that is not installed: {reason}") from error
    except pickle.UnpicklingError as error:
        # torch's own words advise to run it
        unsafe = f"{folder} must hold tensors only, got a pickle of other things; {ADVICE}"
        raise no_tensors(folder, error) or ValueError(unsafe) from error
    # damaged or missing files, weights that do not join
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _unreadable(folder, error) from error
    except ValueError as error:
        raise _explained(error, folder) from error
    _check_loaded(model, report, folder, unneeded)
    return model


def _unreadable(folder: str | Path, error: Exception) -> ValueError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    return ValueError(f"{folder} must hold readable weights, got: {reason}; {ADVICE}")


def load_config(folder: str | Path) -> PreTrainedConfig:
    """The config in ``folder``; ``ValueError`` for a model type that needs the folder's code."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        raise _explained(error, folder) from error


def load_tokenizer(folder: str | Path, **options: Any) -> Any:
    """The tokenizer in ``folder``; ``options`` go to ``from_pretrained``.

    If the folder names its own class, ``tokenizer.json`` is read instead, or a transformers class
    that is known to read the same files (Qwen 2's for Dream). Raises ``ValueError`` if neither is
    possible, and without a tokenizer.
    """
    try:
        tokenizer = _without_code(AutoTokenizer, folder, options)
    except (OSError, ValueError) as error:
        if any(file for pattern in VOCABULARIES for file in Path(folder).glob(pattern)):
            raise
        raise _no_vocabulary(folder) from error
    _check_vocabulary(tokenizer, folder)
    return tokenizer


def load_processor(folder: str | Path, **options: Any) -> Any:
    """The processor in ``folder``, with the tokenizer of :func:`load_tokenizer`."""
    from transformers import AutoProcessor  # here, for texts need none

    processor = _without_code(AutoProcessor, folder, options)
    _check_vocabulary(getattr(processor, "tokenizer", None), folder)
    return processor


def _check_vocabulary(tokenizer: Any, folder: str | Path) -> None:
    """Raise ``ValueError`` if ``tokenizer`` has only special tokens, which would drop all text:
    transformers makes such a tokenizer from a ``folder`` without a vocabulary.
    """
    marks = getattr(tokenizer, "added_tokens_encoder", None)
    if marks is not None and len(tokenizer) - len(marks) < 2:  # its own end, too, may be none
        raise _no_vocabulary(folder)


def _no_vocabulary(folder: str | Path) -> ValueError:
    return ValueError(
        f"{folder} must hold a tokenizer with its vocabulary, got no {WHOLE_TOKENIZER} nor files "
        "of another kind; write that of the model into it by tokenizer.save_pretrained"
    )


def _without_code(kind: Any, folder: str | Path, options: dict[str, Any]) -> Any:
    with _codeless(Path(folder)) as view:
        try:
            return kind.from_pretrained(view or folder, trust_remote_code=False, **options)
        except (OSError, ValueError) as error:
            raise _explained(error, folder, view is not None) from error


@contextmanager
def _codeless(folder: Path) -> Iterator[Path | None]:
    """A view of ``folder`` whose configs name no code; None if its own configs name none."""
    files = [f for f in sorted(folder.glob("*config.json")) if CODE in f.read_text()]
    if not files:
        yield None
        return
    with TemporaryDirectory(prefix="specmm-") as temporary:
        view = Path(temporary)
        for file in folder.iterdir():
            if file in files:
                facts = _known_classes(_stripped(read_json(file)), folder, file.name == TOKENIZER)
                (view / file.name).write_text(json.dumps(facts))
            elif file.suffix != ".py" and (file.is_file() or file.name == TEMPLATES):
                (view / file.name).symlink_to(file.resolve())
        yield view


def _stripped(facts: Any) -> Any:
    """``facts`` without any mention of code."""
    if not isinstance(facts, dict):
        return facts
    return {name: _stripped(value) for name, value in facts.items() if name != CODE}


def _known_classes(facts: dict[str, Any], folder: Path, tokenizer: bool) -> dict[str, Any]:
    """A config's ``facts`` with equal classes of transformers; ``ValueError`` if there are none."""
    import transformers

    processor = facts.get("processor_class")
    named = facts.get("tokenizer_class")
    if processor is not None and not hasattr(transformers, str(processor)):
        raise _needs_code(folder, str(processor))
    if not tokenizer or (named is not None and hasattr(transformers, str(named))):
        return facts
    if (folder / WHOLE_TOKENIZER).is_file():
        return facts | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if named in SAME_TOKENIZERS:
        return facts | {"tokenizer_class": SAME_TOKENIZERS[named]}
    raise ValueError(
        f"{folder} must hold a tokenizer that transformers has a class for, got {named} in Python "
        f"files, which never run here; put a {WHOLE_TOKENIZER} of the same vocabulary beside them"
    )


def _explained(error: Exception, folder: str | Path, brought: bool = False) -> Exception:
    """``error``, or what to do instead if the folder ``brought`` code or needs its own.

    A type that transformers does not know gets one line.
    """
    if unknown := re.search("model type `(.+?)` but Transformers does not recognize", str(error)):
        return ValueError(
            f"{folder} must hold a model of a type that transformers has a class for, got "
            f"{unknown[1]}; install another transformers or choose another checkpoint"
        )
    if not brought and "trust_remote_code" not in str(error):
        return error
    return _needs_code(folder, "one")


def _needs_code(folder: str | Path, what: str) -> ValueError:
    return ValueError(
        f"{folder} must be of a kind that transformers has classes for, got {what} with Python "
        "files of its own (auto_map), which never run here; use a conversion whose configs name "
        "classes of transformers"
    )


def _check_loaded(
    model: PreTrainedModel, report: dict[str, Any], folder: str | Path, unneeded: str | None
) -> None:
    """Raise ``ValueError`` naming weights of ``model`` that differ from those in the ``folder``."""

    def numberless(name: str) -> str:
        return re.sub(r"\b\d+\b", "*", name)

    missing = sorted(
        name for name in report["missing_keys"] if unneeded is None or not name.startswith(unneeded)
    )
    extra = sorted(report["unexpected_keys"])
    misshapen = sorted(report["mismatched_keys"])
    shapes = [f"{name} {list(theirs)} for {list(ours)}" for name, theirs, ours in misshapen]
    kinds = {numberless(name) for name in model.state_dict()}
    beyond = _mtp_names(model.config)
    layers = [
        name for name in extra if missing or (numberless(name) in kinds and not beyond.search(name))
    ]
    problems = {"missing": missing, "unexpected": layers, "wrong-shaped": shapes}
    check_names(problems, type(model).__name__, folder, ADVICE)
    unused = [name for name in extra if not beyond.search(name)]
    if unused:
        LOGGER.warning("%s: not used by %s: %s", folder, type(model).__name__, some_names(unused))


def mtp_layers_of(config: PreTrainedConfig) -> int:
    """The number of multi-token prediction layers in checkpoints of ``config``."""
    text = config.get_text_config(decoder=True)
    return next((int(n) for name in MTP if (n := getattr(text, name, None))), 0)


def _mtp_names(config: PreTrainedConfig) -> re.Pattern[str]:
    """A pattern of the names of multi-token prediction layers, which follow the last layer."""
    text = config.get_text_config(decoder=True)
    first = getattr(text, "num_hidden_layers", 0)
    numbers = range(first, first + mtp_layers_of(config))
    return re.compile(rf"(^|\.)layers\.({'|'.join(map(str, numbers)) or 'none'})\.")


@contextmanager
def unlogged(name: str, said: str) -> Iterator[None]:
    """A block in which the logger ``name`` drops messages that contain ``said``."""

    def other(record: logging.LogRecord) -> bool:
        return said not in record.getMessage()

    logger = logging.getLogger(name)
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def is_packaged(folder: Path) -> bool:
    """Whether ``folder`` names a package in place of weights."""
    return (folder / zoo.PACKAGE).is_file()


def missing_packages(folder: Path) -> list[str]:
    """Packages to install before the model of ``folder`` can be unpacked."""
    names = (read_json(folder / zoo.PACKAGE)["package"], *HELPERS)
    return [name for name in names if importlib.util.find_spec(name) is None]


def unpacked(folder: Path, cache: Path | None = None) -> Path:
    """The model that ``folder`` names, as a float32 transformers folder. It is made at first use,
    by one process while others wait.

    Raises ``ValueError`` naming a package that must be installed.
    """
    facts = read_json(folder / zoo.PACKAGE)
    unpacked_folder = (cache or CACHE.expanduser()) / str(facts["file"])
    if (unpacked_folder / "config.json").is_file():
        return unpacked_folder
    missing = missing_packages(folder)
    spec = None if missing else importlib.util.find_spec(facts["package"])
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"this model needs {', '.join(missing)}, run: {facts['install']}")
    unpacked_folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{unpacked_folder}.lock"):
        if not (unpacked_folder / "config.json").is_file():
            with unpacking(folder.name):
                _unpack(Path(spec.submodule_search_locations[0]), facts, unpacked_folder)
    return unpacked_folder


def _unpack(source: Path, facts: dict[str, Any], into: Path) -> None:
    """Write the model of ``source`` ``into`` a folder, completely or not at all."""
    part = into.with_name(f"{into.name}.{os.getpid()}.part")
    kind: Any = AutoModelForCausalLM
    read = load_model(kind, source, gguf_file=facts["file"], dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = kind.from_config(read.config)  # a quantised one could not be written
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    tokenizer = load_tokenizer(source, gguf_file=facts["file"])
    tokenizer.mask_token = facts["mask_token"]
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(into, ignore_errors=True)
    part.rename(into)
