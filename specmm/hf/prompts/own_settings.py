"""Settings of a checkpoint's ``generation_config`` that apply to all its answers, sampled or not:
the repetition penalty, stop strings, and further settings of generate.
"""

from __future__ import annotations

from typing import Any

ALWAYS = (  # settings that change scores, whatever the temperature
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


def own_penalty(model: Any) -> float:
    """The repetition penalty that ``model`` was published with, as in generate; 1 is off."""
    found = getattr(model.generation_config, "repetition_penalty", None)
    return 1.0 if found is None else float(found)


def own_stops(model: Any) -> tuple[str, ...]:
    """The texts that end an answer of ``model`` as it was published."""
    found = getattr(model.generation_config, "stop_strings", None) or ()
    return (found,) if isinstance(found, str) else tuple(found)


def own_scores(model: Any) -> dict[str, Any]:
    """The settings that change scores, whatever is sampled, that ``model`` was published with."""
    asked = {name: getattr(model.generation_config, name, None) for name in ALWAYS}
    return {name: value for name, value in asked.items() if value}
