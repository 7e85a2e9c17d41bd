"""Makes the heads and numbers of ``speculators`` in this folder (see README.md).

Run in an environment of its own: ``pip install speculators==0.9.0``, then
``python make_speculators.py``. Every head is a folder as ``save_pretrained`` writes it, tiny and
random, and ``numbers.safetensors`` holds what its own forward gave.

Shape letters: T positions, C width, F layers read, v drafter's vocabulary, V the target's, K steps.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

HERE = Path(__file__).parent
VOCABULARY = 40  # V
FEW = 24  # v
WIDTH = 16  # C
LENGTH = 9  # T
STEPS = 4  # K

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def sizes(kind: type, **other: Any) -> Any:
    config = kind(**{**SIZES, **other})
    config._attn_implementation = "eager"
    return config


def heads() -> dict[str, tuple[type, type, dict[str, Any]]]:
    """Model, config and the config's fields by the name of a folder."""
    eagle = (Eagle3DraftModel, Eagle3SpeculatorConfig)
    parallel = (PEagleDraftModel, PEagleSpeculatorConfig)
    llama = sizes(LlamaConfig)
    return {
        "llama": (*eagle, {"transformer_layer_config": llama}),
        "norm_before_residual": (
            *eagle,
            {
                "transformer_layer_config": sizes(LlamaConfig, rope_parameters=LLAMA3),
                "norm_before_residual": True,
                "norm_before_fc": True,
            },
        ),
        "eagle31": (
            *eagle,
            {
                "transformer_layer_config": sizes(LlamaConfig, attention_bias=True),
                "fc_norm": True,
                "norm_output": True,
                "eagle_aux_hidden_state_layer_ids": [1, 3],
            },
        ),
        "qwen3_two_layers": (
            *eagle,
            {"transformer_layer_config": sizes(Qwen3Config, num_hidden_layers=2)},
        ),
        "whole_vocabulary": (
            *eagle,
            {"transformer_layer_config": llama, "draft_vocab_size": VOCABULARY},
        ),
        "peagle": (
            *parallel,
            {
                "transformer_layer_config": sizes(LlamaConfig, num_hidden_layers=2),
                "mask_token_id": VOCABULARY - 1,
                "norm_before_residual": True,
            },
        ),
    }


def make(name: str) -> tuple[Any, dict[str, Tensor]]:
    """The head and its inputs: ``hidden`` [1, T, F·C], ``tokens`` [1, T]."""
    model, kind, fields = heads()[name]
    algorithm = "peagle" if model is PEagleDraftModel else "eagle3"
    described = SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    fields = {"draft_vocab_size": FEW, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]} | fields
    torch.manual_seed(sum(map(ord, name)))
    head = model(kind(**fields, speculators_config=described)).eval()
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.3)
    for key, weight in head.named_parameters():
        if "norm" in key and weight.ndim == 1:
            nn.init.uniform_(weight, 0.5, 1.5)
    if head.use_draft_vocab:
        ids = torch.randperm(VOCABULARY)[:FEW].sort().values
        t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
        t2d[ids] = True
        head.load_vocab_mappings(t2d, ids - torch.arange(FEW))
    read = len(fields["eagle_aux_hidden_state_layer_ids"])
    hidden = torch.randn(1, LENGTH, read * WIDTH)
    return head, {"hidden": hidden, "tokens": torch.randint(0, VOCABULARY, (1, LENGTH))}


def target_ids(head: Any, drafts: Tensor) -> Tensor:
    return drafts + head.d2t[drafts] if head.use_draft_vocab else drafts


@torch.no_grad()
def steps(head: Any, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [K, T, v] and what goes on to the next step [K, T, C] of ``tokens``' own drafts.

    Step k's tokens are those k further on, as in training.
    """
    seen = {"logits": [], "states": []}
    last = head.norm if head.config.norm_output else head.layers[-1]
    handles = [
        head.lm_head.register_forward_hook(lambda *a: seen["logits"].append(a[-1][0])),
        last.register_forward_hook(lambda *a: seen["states"].append(a[-1][0])),
    ]
    document = torch.zeros_like(tokens)
    head(hidden, tokens, document, ttt_steps=STEPS)
    for handle in handles:
        handle.remove()
    return torch.stack(seen["logits"]), torch.stack(seen["states"])


def chain(head: Any, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The greedy chain of a round after all ``tokens``: drafts [K] in the target's ids and their
    logits [K, v].
    """
    drafts: list[int] = []
    last = tokens.shape[1] - 1
    for step in range(STEPS):
        filled = torch.tensor([drafts + [0] * (STEPS - len(drafts))])
        longer = torch.cat([tokens, filled], dim=1)
        logits, _ = steps(head, nn.functional.pad(hidden, (0, 0, 0, STEPS)), longer)
        drafts.append(int(target_ids(head, logits[step, last].argmax())))
    return torch.tensor(drafts), logits[:, last]


@torch.no_grad()
def parallel(head: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Logits [K, T, v] at every anchor, all depths in one pass."""
    length = tokens.shape[1]
    anchors = torch.arange(length).repeat(STEPS)
    depths = torch.arange(STEPS).repeat_interleave(length)
    inside = anchors + depths < length  # the class reads inputs at each place, masked or not
    seen = []
    handle = head.lm_head.register_forward_hook(lambda *a: seen.append(a[-1][0]))
    chosen = (anchors[inside], depths[inside])
    with (
        mock.patch.object(peagle, "generate_cod_sample_indices", return_value=chosen),
        mock.patch.object(peagle, "compute_metrics", return_value=(None, {})),
    ):
        last = hidden[..., :WIDTH]  # of the verifier, for a loss that nobody asks for
        head(hidden, tokens, torch.zeros_like(tokens), verifier_last_hidden_states=last)
    handle.remove()
    found = torch.zeros(STEPS, length, seen[0].shape[-1])
    found[depths[inside], anchors[inside]] = seen[0]
    return found


def numbers(head: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    hidden, tokens = given.values()
    if isinstance(head, PEagleDraftModel):
        return {"logits": parallel(head, hidden, tokens)}
    logits, states = steps(head, hidden, tokens)
    drafts, drawn = chain(head, hidden, tokens)
    return {"logits": logits, "states": states, "drafts": drafts, "chain_logits": drawn}


def main() -> None:
    for name in heads():
        head, given = make(name)
        found = numbers(head, given)
        head.save_pretrained(HERE / name)
        (HERE / name / "config.py").unlink()  # a copy of the class's source
        save_file(
            {k: v.contiguous() for k, v in {**given, **found}.items()},
            HERE / name / "numbers.safetensors",
        )


if __name__ == "__main__":
    main()
