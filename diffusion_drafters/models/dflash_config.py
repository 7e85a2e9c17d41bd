"""Reads the configuration of a DFlash drafter from the ``config.json`` of any release.

z-lab and SpecForge nest the fields in ``dflash_config`` that transformers' assistants and
DeepSeek's DSpark have at the top level; speculators nests a layer's config and counts layers from
the embeddings. They differ in the state that they read of a target's last layer, in the reach of
layers with a window, and in whether the anchor's own place drafts; see the readers below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specmm.hf.drafters.files import QWEN_SIZES, STATES, Facts, layers_named, plain_rope, read_sizes

SPECULATORS = "speculators_model_type"
SLIDING = "sliding_attention"
NEEDED = ("block_size", "mask_token_id", "target_layer_ids")
OWN = ("draft_vocab_size", "markov_rank", "recurrent_size")
PROJECTORS = {
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "DominoDraftModel": "domino",
}


@dataclass(frozen=True)
class Reach:
    """The places that a place of a block attends to in one layer.

    These are ``past`` context tokens (None: all), counted back from the place itself if the window
    is ``moving``, else from the anchor; and, within the block, the places up to its own if
    ``causal``, else all at most ``past`` away.
    """

    past: int | None = None
    moving: bool = True
    causal: bool = False


@dataclass(frozen=True)
class HeadSizes:
    """A release's head that makes drafts depend on earlier ones: DSpark's ``kind`` "vanilla",
    "gated" or "rnn" of rank ``size``, or "domino" with a GRU of ``size``, a layer of width
    ``inner``, and ``pure`` first drafts without it.
    """

    kind: str
    size: int
    inner: int = 0
    pure: int = 0


@dataclass(frozen=True)
class DFlashConfig:
    """``sizes`` of the layers, the ``block`` K, the ``mask`` id and the target ``layers`` read,
    counted from 0.

    ``tokens`` is the size v of the drafter's own vocabulary (0: the target's), ``markov`` the rank
    of its table of pairs (0: none), ``recurrent`` the size of its memory along a block (0: none).
    With ``anchor`` the anchor's place drafts, too, and place i drafts the token after its own
    position. If ``normed``, the target's last layer is read after the final norm. ``reaches``: each
    layer's reach (empty: unlimited); ``head``: a release's head; ``confidence``: the input of its
    confidence head, "" (there is none), "states", or "markov" (also the Markov head's token).
    Raises ``ValueError`` for a block without a draft, a mask outside the vocabulary, no or repeated
    layers and sizes that cannot be.
    """

    sizes: Qwen3Config
    block: int
    mask: int
    layers: tuple[int, ...]
    tokens: int = 0
    markov: int = 0
    recurrent: int = 0
    anchor: bool = False
    normed: bool = True
    reaches: tuple[Reach, ...] = ()
    head: HeadSizes | None = None
    confidence: str = ""

    def __post_init__(self) -> None:
        vocabulary = self.sizes.vocab_size
        if self.block < 2 - self.anchor:
            raise ValueError(
                f"block_size must be at least 2 (the anchor and a mask), got {self.block}"
            )
        if not 0 <= self.mask < vocabulary:
            raise ValueError(f"mask_token_id must be in [0, {vocabulary}), got {self.mask}")
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) < len(self.layers):
            raise ValueError(
                f"target_layer_ids must be different layers counted from 0, got {list(self.layers)}"
            )
        if not 0 <= self.tokens <= vocabulary:
            raise ValueError(
                f"draft_vocab_size must be 0 to vocab_size {vocabulary}, got {self.tokens}"
            )
        if min(self.markov, self.recurrent) < 0:
            raise ValueError(
                f"markov_rank and recurrent_size must be at least 0, got {self.markov} and "
                f"{self.recurrent}"
            )
        if self.reaches and len(self.reaches) != self.sizes.num_hidden_layers:
            raise ValueError(
                f"layer_types must name each of {self.sizes.num_hidden_layers} layers, got "
                f"{len(self.reaches)}"
            )
        self._check_heads()

    def _check_heads(self) -> None:
        """Raise ``ValueError`` for a release's head with impossible sizes or options."""
        head = self.head
        if head is None:
            if self.confidence == "markov":
                raise ValueError("confidence_head_with_markov needs a markov_rank, got 0")
            return
        if min(head.size, head.pure + 1) < 1 or (head.kind == "domino" and head.inner < 1):
            raise ValueError(f"the head's sizes must be at least 1, got {head}")
        if self.markov or self.recurrent:
            raise ValueError(f"a drafter must have one head along its blocks, got {head} and more")
        if head.kind == "rnn" and not self.anchor:
            raise ValueError(
                "a recurrent Markov head must draft from its anchor, got sample_from_anchor false; "
                "use a vanilla or gated one"
            )

    @property
    def longest(self) -> int:
        """The number of drafts of a block."""
        return self.block if self.anchor else self.block - 1

    @classmethod
    def from_json(cls, facts: Facts, source: object = "config.json") -> DFlashConfig:
        """Read a ``config.json`` of any of these layouts.

        Raises ``ValueError`` for other kinds of drafters, and for missing or impossible values.
        """
        read = _speculators if SPECULATORS in facts else _on_top
        values, convention = read(facts, source)
        if missing := [name for name in NEEDED if values.get(name) is None]:
            raise ValueError(
                f"{source} must describe a DFlash drafter, got no {', '.join(missing)}"
            )
        counts = {name: values.get(name) or 0 for name in (*NEEDED[:2], *OWN)}
        strange = [f"{name} {value!r}" for name, value in counts.items() if type(value) is not int]
        if strange:
            raise ValueError(f"{source} must give whole numbers, got {', '.join(strange)}")
        values = {"vocab_size": counts["mask_token_id"] + 1, **values}
        sizes = _layer_sizes(values)
        tokens = counts["draft_vocab_size"]
        return cls(
            sizes,
            counts["block_size"],
            counts["mask_token_id"],
            tuple(values["target_layer_ids"]),
            tokens=0 if tokens == sizes.vocab_size and SPECULATORS in facts else tokens,
            # a release's rank belongs to its own head
            markov=0 if "head" in convention else counts["markov_rank"],
            recurrent=counts["recurrent_size"],
            reaches=_reaches(values, sizes.num_hidden_layers, source),
            **convention,
        )


def _layer_sizes(values: Facts) -> Any:
    """The drafter's layers as a Qwen3 config, from the ``values`` of its config."""
    kind: Any = Qwen3Config
    width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return kind(
        **read_sizes(values, {name: name for name in QWEN_SIZES}, "DFlash"),
        **plain_rope(values, 1e6, windows=True),
        head_dim=width,
        hidden_act=values.get("hidden_act") or "silu",
        attention_bias=bool(values.get("attention_bias")),
        attn_implementation="sdpa",
    )


def _on_top(facts: Facts, source: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read z-lab's, SpecForge's, transformers', DeepSeek's and our own layout: its values,
    and the fields of :class:`DFlashConfig` that follow from the layout.
    """
    nested = facts.get("dflash_config") or {}
    values = {**facts, **nested, "window": "moving"}
    if str(facts.get("model_type")).endswith("_assistant"):
        values["window"] = "both"
    names = [PROJECTORS.get(str(name)) for name in facts.get("architectures") or ()]
    projector = values.get("projector_type") or next(filter(None, names), None)
    if projector is None:
        anchor = bool(values.get("sample_from_anchor", values.get("shift_label")))
        return values, {"anchor": anchor}
    if projector == "domino":
        return values, {"anchor": bool(values.get("shift_label")), "head": _domino(values, source)}
    if projector != "dspark":
        raise ValueError(
            f"{source} must have projector_type dspark or domino or none, got {projector!r}"
        )
    # SpecForge trains each place on the token after its own, as DeepSeek's release does.
    anchor = bool(values.get("sample_from_anchor", values.get("shift_label") or True))
    sure = values.get("enable_confidence_head", (values.get("confidence_head_alpha") or 0) > 0)
    return values, {"anchor": anchor, **_dspark(values, bool(sure), False)}


def _speculators(facts: Facts, source: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """speculators' layout; see :func:`_on_top`."""
    kind = facts[SPECULATORS]
    if kind not in ("dflash", "dspark"):
        raise ValueError(
            f"{source} must be a speculators dflash or dspark drafter for method 'block', "
            f"got {kind!r}; see specmm inspect"
        )
    layer = facts.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError(f"{source} must have a transformer_layer_config, got {layer!r}")
    model_type = layer.get("model_type", "qwen3")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{source} must have layers of a type that transformers knows, got {model_type!r}"
        )
    config = CONFIG_MAPPING[model_type](**layer).to_dict()  # a release leaves defaults out
    numbers = facts.get(STATES)
    values = {**config, **facts, "window": "anchor"}
    values["target_layer_ids"] = None if numbers is None else layers_named(facts)
    if numbers and min(numbers) < 1:
        raise ValueError(
            f"{source} must read layers, counted from 1 by {STATES}, got "
            f"{list(numbers)}, of which 0 is the embeddings"
        )
    spark = kind == "dspark"
    convention = {"anchor": bool(facts.get("sample_from_anchor", spark)), "normed": False}
    if spark:
        sure = bool(facts.get("enable_confidence_head", True))
        convention |= _dspark({"markov_rank": 256, **facts}, sure, True)
    return values, convention


def _dspark(values: Facts, sure: bool, with_markov: bool) -> dict[str, Any]:
    rank = values.get("markov_rank") or 0
    kind = str(values.get("markov_head_type") or "vanilla").lower()
    reads = "markov" if values.get("confidence_head_with_markov", with_markov) else "states"
    return {"head": HeadSizes(kind, rank) if rank else None, "confidence": reads if sure else ""}


def _domino(values: Facts, source: object) -> HeadSizes:
    names = ("gru_hidden_dim", "emb_dim")
    if missing := [name for name in names if not isinstance(values.get(name), int)]:
        raise ValueError(f"{source} must give sizes of a Domino head, got no {', '.join(missing)}")
    pure = int(values.get("pure_draft_prefix_len") or 0)
    return HeadSizes("domino", values["gru_hidden_dim"], values["emb_dim"], pure)


def _reaches(values: Facts, layers: int, source: object) -> tuple[Reach, ...]:
    """The reach of each layer.

    speculators' windows begin at the anchor and hold ``sliding_window`` context tokens; z-lab's
    move along the block and include the place itself; transformers' extend equally to both sides.
    If ``layer_types`` names the window, a block is causal unless ``causal`` or
    ``sliding_window_non_causal`` says otherwise.
    """
    types = list(values.get("layer_types") or ["full_attention"] * layers)
    named = SLIDING in types
    if values.get("use_swa") and not named:
        types = [SLIDING] * layers
    if SLIDING not in types:
        causal = bool(values.get("causal"))
        return (Reach(causal=True),) * layers if causal else ()
    size = values.get("swa_window_size") or values.get("sliding_window")
    if not isinstance(size, int) or size < 1 or values.get("use_sliding_window") is False:
        raise ValueError(
            f"{source} must give a sliding_window for its layers of {SLIDING}, got {size!r} with "
            f"use_sliding_window {values.get('use_sliding_window')!r}"
        )
    window = {
        "anchor": Reach(size, False, not values.get("sliding_window_non_causal")),
        "moving": Reach(size - 1, True, bool(values.get("causal", named))),
        "both": Reach(size),
    }[values["window"]]
    full = Reach(causal=bool(values.get("causal")))
    return tuple(window if kind == SLIDING else full for kind in types)
