"""Reads and writes the released layouts of EAGLE-3 heads: speculators, SafeAILab and SpecForge.

All hold the same weights. speculators nests the layers' sizes in its config and numbers states
(state i is the input of the target's layer i). SpecForge numbers layers. SafeAILab's heads always
read the same three layers. SafeAILab and SpecForge name the first layer ``midlayer`` and leave out
the target's embeddings. ``d2t`` holds differences of ids; ``t2d`` marks the target's tokens that
the head can draft. A P-EAGLE head also has ``mask_hidden``.

Shape letters: C width, F layers of the target that are read, V vocabulary, v the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from specmm.extending.registry import unknown
from specmm.hf.drafters.eagle3_head import READ, Eagle3Config, Eagle3Head, layers_read
from specmm.hf.drafters.files import (
    HEAD,
    Facts,
    cast,
    check_ids,
    layers_named,
    read_acceptance,
    read_state,
    renamed,
    write_acceptance,
)
from specmm.loading.checkpoints import (
    State,
    embeddings_of,
    fingerprint,
    load_strict,
    read_json,
    write_checkpoint,
)
from specmm.loading.hardware import dtype_name
from specmm.loading.mapped import WithoutWeights

EMBEDDINGS = "embed_tokens.weight"
MASK = "mask_hidden"
FIRST, FLAT = "layers.0.", "midlayer."  # the first layer's name
MASK_IDS = ("mask_token_id", "ptd_token_id", "pard_token")  # as speculators and vLLM call it
LAYOUTS = ("speculators", "eagle", "specforge")
SPECULATORS = ("eagle3", "peagle")
SPECULATORS_VERSION = "0.9.0"  # the version of the written configuration
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
LEFTOVERS = ("rotary_emb", "verifier_lm_head", "verifier_norm")  # constants, or the target's own
SIZES = (
    *NEEDED,
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Fields of Eagle3Config, their names in every layout, and what they are; left out they are 0.
FIELDS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("target_width", "target_hidden_size", int),
    *((name, name, bool) for name in (*FLAGS, "picture_embeddings")),
)
TURNED = ("default", "linear", "llama3", "yarn")  # rotary positions that no text's length changes


def is_eagle3(facts: Facts) -> bool:
    """Whether a ``config.json`` is of an EAGLE-3 head in any of the layouts."""
    kind = facts.get("speculators_model_type")
    if kind is not None:
        return kind in SPECULATORS
    names = [str(name).lower() for name in facts.get("architectures") or ()]
    if any("eagle3" in name or name.startswith("peagle") for name in names):
        return True
    others = ("block_size", "dflash_config")
    return "draft_vocab_size" in facts and not any(name in facts for name in others)


def load_eagle3(folder: str | Path) -> Eagle3Head:
    """The head in ``folder``, of any layout, in evaluation mode and in the file's dtype.

    Raises ``ValueError`` naming missing, extra, misshapen or non-finite weights, missing sizes, and
    tables of tokens that contradict one another.
    """
    file = Path(folder) / "config.json"
    facts = read_json(file)
    state = renamed(read_state(folder), {FLAT: FIRST})
    if facts.get("tie_word_embeddings") and EMBEDDINGS in state:
        state.setdefault(HEAD, state[EMBEDDINGS])
    config = read_config(facts, state, file)
    with WithoutWeights():
        head = Eagle3Head(config)
    dtype = state["fc.weight"].dtype if "fc.weight" in state else None
    load_strict(head, _with_tables(state, head.config, folder), LEFTOVERS, folder, dtype)
    head.acceptance = read_acceptance(file.parent)
    return cast(head, state["fc.weight"].dtype).eval()


def _with_tables(state: State, config: Eagle3Config, source: object) -> State:
    """``state`` with ``d2t`` and ``t2d`` if the head's vocabulary is not the target's.

    Raises ``ValueError`` if ``d2t`` is missing or does not name the config's number of different
    tokens, and if ``t2d`` marks other tokens.
    """
    state = dict(state)
    d2t = state.pop("d2t", None)
    t2d = state.pop("t2d", None)
    vocabulary = int(config.sizes.vocab_size)
    if d2t is None and config.whole:
        return state
    if d2t is None:
        raise ValueError(
            f"{source} must hold d2t, the target's ids of the drafter's {config.tokens} tokens "
            f"(its target has {vocabulary}), got none; use a whole checkpoint"
        )
    ids = d2t.long() + torch.arange(len(d2t))
    check_ids(ids, config.tokens, vocabulary, f"d2t in {source}")
    drafted = torch.zeros(vocabulary, dtype=torch.bool)
    drafted[ids] = True
    if t2d is not None and not torch.equal(t2d.bool(), drafted):
        raise ValueError(f"t2d in {source} must name the tokens of d2t, got others")
    if config.whole:
        if bool(d2t.any()):
            raise ValueError(f"d2t in {source} must be 0 for a whole vocabulary, got another order")
        return state
    return state | {"d2t": d2t.long(), "t2d": drafted}


def read_config(facts: Facts, state: State, source: object = "config.json") -> Eagle3Config:
    """A head's configuration, from the ``facts`` in ``config.json`` and its weights in ``state``.

    Raises ``ValueError`` if this is not an EAGLE-3 head, and for missing sizes.
    """
    if not is_eagle3(facts):
        raise ValueError(
            f"{source} must describe an EAGLE-3 head, got architectures "
            f"{facts.get('architectures')} and no draft_vocab_size; use the method it is for"
        )
    nested = facts.get("transformer_layer_config")
    layer_facts = nested if isinstance(nested, Mapping) else facts
    sizes = _sizes(layer_facts, any(".q_norm." in name for name in state), source)
    rope = _rope(layer_facts)
    sections = tuple(rope.get("mrope_section") or ())
    fields = {ours: kind(facts.get(theirs) or 0) for ours, theirs, kind in FIELDS}
    fields["norm_before_fc"] |= "input_norm.weight" in state
    return Eagle3Config(
        sizes,
        layers_named(facts),
        int(facts.get("draft_vocab_size") or sizes.vocab_size),
        own_embeddings=EMBEDDINGS in state,
        own_head=HEAD in state,
        mask=_mask(facts, source) if MASK in state else None,
        sections=sections,
        interleaved=bool(rope.get("mrope_interleaved")),
        **fields,
    )


def _sizes(facts: Facts, qwen: bool, source: object) -> PreTrainedConfig:
    """The sizes of the layers: Qwen3's form if queries and keys are normed, else Llama's."""
    missing = [name for name in NEEDED if type(facts.get(name)) is not int]
    if missing:
        raise ValueError(
            f"{source} must give {', '.join(NEEDED)} as whole numbers, got none for "
            f"{', '.join(missing)}"
        )
    kind: Any = Qwen3Config if qwen else LlamaConfig
    named = {name: facts[name] for name in SIZES if facts.get(name) is not None}
    defaults = {
        "num_hidden_layers": 1,
        "num_key_value_heads": facts["num_attention_heads"],
        "head_dim": facts["hidden_size"] // facts["num_attention_heads"],
    }
    if "sliding_attention" in (facts.get("layer_types") or ()):
        raise ValueError(
            f"layers of {source} must have full attention, got some with a sliding window"
        )
    rope = {k: v for k, v in _rope(facts).items() if not k.startswith("mrope_")}
    if rope["rope_type"] not in TURNED:
        raise ValueError(
            f"{source} must have rotary positions of type {', '.join(TURNED)}, got "
            f"{rope['rope_type']!r}"
        )
    return kind(**{**defaults, **named}, rope_parameters=rope, attn_implementation="sdpa")


def _rope(facts: Facts) -> dict[str, Any]:
    """Rotary positions as transformers 5 writes them, whichever version wrote ``facts``."""
    parameters = dict(facts.get("rope_parameters") or facts.get("rope_scaling") or {})
    kind = parameters.pop("type", "default")
    parameters.setdefault("rope_type", kind)
    if parameters["rope_type"] == "mrope":
        parameters["rope_type"] = "default"
    parameters.setdefault("rope_theta", float(facts.get("rope_theta") or 10000.0))
    return parameters


def _mask(facts: Facts, source: object) -> int:
    """The mask token of a P-EAGLE head."""
    mask = next((facts[name] for name in MASK_IDS if facts.get(name) is not None), None)
    if type(mask) is not int:
        raise ValueError(
            f"{source} must name the mask token of a head with mask_hidden by {MASK_IDS[0]}, got "
            f"{mask}"
        )
    return mask


def save_eagle3(
    head: Eagle3Head,
    folder: str | Path,
    target: PreTrainedModel | None = None,
    *,
    layout: str = "speculators",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write ``head`` in a ``layout``: ``speculators``, ``eagle`` (SafeAILab's) or ``specforge``.

    If ``target`` is given, speculators' layout names it, and every layout holds the fingerprint of
    its embeddings. Raises ``ValueError`` for a layout that is unknown or cannot hold this head.
    """
    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS)
    check_layout(head.config, layout, target)
    state: State = dict(head.state_dict())
    if layout == "speculators":
        facts = _speculators_facts(head.config, target)
    else:
        facts = _flat_facts(head.config, layout, dtype)
        state = _flat_state(state, head.config)
    if target is not None:
        facts["target_fingerprint"] = fingerprint(embeddings_of(target))
    fields = {theirs: getattr(head.config, ours) for ours, theirs, _ in FIELDS}
    facts = {name: value for name, value in fields.items() if value} | facts
    write_checkpoint(state, facts, folder, dtype)
    write_acceptance(head.acceptance, Path(folder))


def _rewrite(folder: Path, target: PreTrainedModel | None, out: Path, *, layout: str) -> None:
    """Write the head in ``folder`` to ``out`` in a ``layout``, in its own dtype."""
    head = load_eagle3(folder)
    save_eagle3(head, out, target, layout=layout, dtype=head.fc.weight.dtype)


to_speculators, to_eagle, to_specforge = (partial(_rewrite, layout=name) for name in LAYOUTS)


def check_layout(config: Eagle3Config, layout: str, target: PreTrainedModel | None = None) -> None:
    """Raise ``ValueError`` naming features of ``config`` that ``layout`` cannot express."""
    sizes: Any = config.sizes
    flat = layout != "speculators"
    eagle = layout == "eagle"
    deep = sizes.num_hidden_layers > 1
    lacks = {
        "target_hidden_size": not flat and config.state_width != sizes.hidden_size,
        "norm_before_fc": flat and config.norm_before_fc,
        "attention_bias": flat and bool(sizes.attention_bias),
        "normed queries and keys": flat and sizes.model_type == "qwen3",
        "norm_before_residual": flat and config.norm_before_residual and config.mask is None,
        "several layers": flat and deep and config.mask is None,
        "fc_norm": eagle and config.fc_norm,
        "norm_output": eagle and config.norm_output,
        "mask_hidden": eagle and config.mask is not None,
        "mrope_section": eagle and bool(config.sections),
        "scaled rotary positions": eagle and sizes.rope_parameters["rope_type"] != "default",
        "layers of its own choice": eagle and not _usual(config, target),
    }
    if lacking := [name for name, without in lacks.items() if without]:
        raise ValueError(
            f"a head in layout {layout} must do without {', '.join(lacking)}; write another "
            f"layout: {', '.join(name for name in LAYOUTS if name != layout)}"
        )


def _usual(config: Eagle3Config, target: PreTrainedModel | None) -> bool:
    """Whether the head reads EAGLE-3's usual layers."""
    if not config.layers or target is None:
        return not config.layers
    count = int(target.config.get_text_config().num_hidden_layers)
    return config.layers == layers_read(count) and len(config.layers) == READ


def _speculators_facts(config: Eagle3Config, target: PreTrainedModel | None) -> dict[str, Any]:
    """The ``config.json`` of speculators' layout."""
    kind = "eagle3" if config.mask is None else "peagle"
    sizes: Any = config.sizes
    layer = sizes.to_diff_dict() | {"model_type": sizes.model_type, "head_dim": sizes.head_dim}
    layer["rope_parameters"] = dict(sizes.rope_parameters) | _mrope(config)
    facts = {
        "architectures": ["PEagleSpeculator" if config.mask is not None else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.tokens,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.layers] or None,
        "transformer_layer_config": layer,
        "speculators_config": speculators_facts(kind, target),
        **{name: getattr(config, name) for name in FLAGS},
    }
    return facts if config.mask is None else facts | {"mask_token_id": config.mask}


def speculators_facts(
    algorithm: str, target: PreTrainedModel | None, tokens: int = 5
) -> dict[str, Any]:
    """The ``speculators_config`` of a drafter that proposes chains of ``tokens``."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    name = "" if target is None else target.config.name_or_path
    if name and Path(name).is_dir():  # do not publish a local path
        name = Path(name).resolve().name
    verifier = {
        "name_or_path": name or None,
        "architectures": [] if target is None else [type(target).__name__],
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }


def _flat_facts(config: Eagle3Config, layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of SafeAILab's or SpecForge's layout."""
    sizes: Any = config.sizes
    scaled = dict(sizes.rope_parameters)
    base = scaled.pop("rope_theta")
    if config.sections:
        scaled = {"type": "mrope"} | _mrope(config)
    plain = len(scaled) == 1  # its type alone
    parallel = config.mask is not None
    names = {"eagle": "LlamaForCausalLM"}
    facts = {name: getattr(sizes, name) for name in SIZES} | {
        "architectures": [
            "PEagleDraftModel" if parallel else names.get(layout, "LlamaForCausalLMEagle3")
        ],
        "model_type": "llama",
        "draft_vocab_size": config.tokens,
        "rope_theta": base,
        "rope_scaling": None if plain else scaled,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "torch_dtype": dtype_name(dtype),
    }
    if config.layers:
        facts["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.layers)}
    return facts | ({"mask_token_id": config.mask} if parallel else {})


def _mrope(config: Eagle3Config) -> dict[str, Any]:
    """The keys of M-RoPE, if the head has it."""
    if not config.sections:
        return {}
    rope: dict[str, Any] = {"mrope_section": list(config.sections)}
    return rope | ({"mrope_interleaved": True} if config.interleaved else {})


def _flat_state(state: State, config: Eagle3Config) -> State:
    """``state`` under the names of SafeAILab's and SpecForge's layouts, with token tables."""
    if config.whole:
        vocabulary = int(config.sizes.vocab_size)
        state["d2t"] = torch.zeros(vocabulary, dtype=torch.int64)
        state["t2d"] = torch.ones(vocabulary, dtype=torch.bool)
    if config.mask is not None:
        return state
    return renamed(state, {FIRST: FLAT})
