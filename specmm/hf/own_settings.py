"""What a checkpoint's ``generation_config`` asks of all its answers, whatever is sampled: the
repetition penalty and texts that end, which pipelines apply, and what they leave to generate of
transformers.
"""

from __future__ import annotations

import logging
from typing import Any

UNAPPLIED = (  # settings that change scores, whatever the temperature
    "no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "min_length",
    "min_new_tokens",
    "watermarking_config",
)
LOGGER = logging.getLogger(__name__)


def own_penalty(model: Any) -> float:
    """The repetition penalty that ``model`` was published with, as in generate; 1 is off."""
    found = getattr(model.generation_config, "repetition_penalty", None)
    return 1.0 if found is None else float(found)


def own_stops(model: Any) -> tuple[str, ...]:
    """The texts that end an answer of ``model`` as it was published."""
    found = getattr(model.generation_config, "stop_strings", None) or ()
    return (found,) if isinstance(found, str) else tuple(found)


def warn_of_unapplied(model: Any, name: str) -> None:
    """Log which settings of ``model``, called ``name``, only generate applies."""
    asked = [one for one in UNAPPLIED if getattr(model.generation_config, one, None)]
    if asked:
        LOGGER.warning(
            "%s asks for %s in its generation_config, which pipelines do not apply; for answers as "
            "generate's call model.generate(…, custom_generate=specmm.custom_generate(…))",
            name,
            ", ".join(asked),
        )
