"""Makes the heads and numbers of SafeAILab's EAGLE and SGLang's SpecForge in this folder.

Run with ``make_speculators.py``'s environment and checkouts of both repositories (README.md has the
commits): ``TORCHDYNAMO_DISABLE=1 python make_eagle.py EAGLE SPECFORGE``. What their own forwards
and, for EAGLE, ``topK_genrate`` gave is in ``numbers.safetensors``.

Shape letters: T positions, C width, v drafter's vocabulary, V the target's, K steps, N nodes.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from make_speculators import FEW, HERE, LENGTH, LLAMA3, SIZES, STEPS, VOCABULARY, WIDTH
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

TOP_K = 4
DEPTH = 3
TOTAL = 12
MROPE = [1, 2, 1]  # thirds of half a head
MARK = {  # keys that the two have on top of a Llama's config
    "model_type": "llama",
    "torch_dtype": "float16",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "pad_token_id": 0,
}


def randomized(head: Any, seed: int, width: int = WIDTH) -> dict[str, Tensor]:
    """Random weights and vocabulary for ``head``; inputs ``hidden`` [1, T, 3·C], ``tokens``."""
    torch.manual_seed(seed)
    for key, weight in head.named_parameters():
        nn.init.normal_(weight.data, std=0.3)
        if "norm" in key and weight.ndim == 1:
            nn.init.uniform_(weight.data, 0.5, 1.5)
    if head.config.draft_vocab_size < VOCABULARY:
        ids = torch.randperm(VOCABULARY)[:FEW].sort().values
        head.t2d.zero_()[ids] = True
        head.d2t.copy_(ids - torch.arange(FEW))
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH))
    return {"hidden": torch.randn(1, LENGTH, 3 * width), "tokens": tokens}


def write(
    name: str,
    facts: dict[str, Any],
    state: dict[str, Tensor],
    found: dict[str, Tensor],
    pickled: bool = False,
) -> None:
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
    state = {k: v.detach().contiguous() for k, v in state.items()}
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    save_file(
        {k: v.detach().contiguous() for k, v in found.items()}, folder / "numbers.safetensors"
    )


@torch.no_grad()
def eagle(source: Path) -> None:
    """A head of SafeAILab's: prefix states, one chain and one dynamic tree after ``tokens``."""
    sys.path.insert(0, str(source / "eagle/model"))
    cnets = importlib.import_module("cnets")
    facts = {**SIZES, **MARK, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": FEW}
    del facts["head_dim"]
    config = types.SimpleNamespace(**facts, pretraining_tp=1)
    head = cnets.Model(config, total_tokens=TOTAL, depth=DEPTH, top_k=TOP_K).eval()
    given = randomized(head, 1)
    head.init_tree()
    head.reset()
    # as in ea_model: the prompt's tokens and the one sampled after it; the first is dropped
    whole = torch.cat([torch.zeros(1, 1, dtype=torch.long), given["tokens"]], dim=1)
    states, cache = head(given["hidden"], input_ids=given["tokens"], use_cache=True)
    logits = head.lm_head(head.norm(states))
    drafts: list[Tensor] = []
    drawn = [logits[:, -1]]
    state = states[:, -1:]
    for step in range(STEPS):
        best = drawn[-1].argmax(-1)
        drafts.append(best + head.d2t[best])
        where = torch.tensor([[LENGTH + step]])
        state, cache = head(
            state,
            input_ids=drafts[-1][None],
            past_key_values=cache,
            position_ids=where,
            use_cache=True,
        )
        drawn.append(head.lm_head(head.norm(state))[:, -1])
    head.reset_kv()
    nodes, _, mask, depths = head.topK_genrate(given["hidden"], whole, None, None)
    found = {
        "states": states[0],
        "logits": logits[0],
        "drafts": torch.cat(drafts),
        "chain_logits": torch.cat(drawn[:STEPS]),
        "tree": nodes[0],
        "depths": depths,
        "ancestors": mask[0, 0].bool(),
    }
    state_dict = {k: v for k, v in head.state_dict().items() if k != "embed_tokens.weight"}
    found["embeddings"] = head.embed_tokens.weight  # the target's; its files have none
    write("safeailab", facts, state_dict, {**given, **found}, pickled=True)


@torch.no_grad()
def specforge(source: Path) -> None:
    """Heads of SpecForge's: its training rollout, with plain, scaled and multimodal positions."""
    sys.path.insert(0, str(source))
    llama = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    kinds: dict[str, dict[str, Any]] = {
        "specforge": {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            "rope_scaling": {**LLAMA3, "rope_theta": None},
        },
        "specforge_fc_norm": {
            "fc_norm": True,
            "draft_vocab_size": VOCABULARY,
            "target_hidden_size": 12,
        },
        "specforge_mrope": {
            "rope_scaling": {"type": "mrope", "mrope_section": MROPE},
            "target_model_type": "qwen2_5_vl",
        },
    }
    for seed, (name, extra) in enumerate(kinds.items()):
        facts = {
            **SIZES,
            **MARK,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": FEW,
            **extra,
        }
        if facts["rope_scaling"]:
            facts["rope_scaling"] = {
                k: v for k, v in facts["rope_scaling"].items() if v is not None
            }
        config = LlamaConfig(**facts)
        head = llama.LlamaForCausalLMEagle3(config, attention_backend="sdpa").eval()
        given = randomized(head, seed + 2, facts.get("target_hidden_size", WIDTH))
        places = torch.arange(LENGTH)[None]
        if name == "specforge_mrope":  # three words, a picture of 2 x 2, two words
            places = torch.tensor(
                [
                    [0, 1, 2, 3, 3, 3, 3, 5, 6],
                    [0, 1, 2, 3, 3, 4, 4, 5, 6],
                    [0, 1, 2, 3, 4, 3, 4, 5, 6],
                ]
            )[:, None]
            given["positions"] = places
        found = rollout(head, given, places)
        dropped = ("embed_tokens.weight",)
        state = {k: v for k, v in head.state_dict().items() if k not in dropped}
        if name != "specforge_fc_norm":
            found["embeddings"] = head.embed_tokens.weight
        else:
            state = head.state_dict()
        write(name, facts, state, {**given, **found})


def rollout(head: Any, given: dict[str, Tensor], places: Tensor) -> dict[str, Tensor]:
    """Logits [K, T, v] and states [K, T, C]; step k's tokens are those k further on."""
    tokens = given["tokens"]
    states = head.project_hidden_states(given["hidden"])
    mask = head.prepare_decoder_attention_mask(torch.ones_like(tokens), states, 1, LENGTH, 0)
    cache: list[list[Tensor]] = [[], []]
    seen: dict[str, list[Tensor]] = {"states": [], "logits": []}
    for _ in range(STEPS):
        states = head.backbone(head.embed_input_ids(tokens), states, cache, mask, places)
        seen["states"].append(states[0])
        seen["logits"].append(head.compute_logits(states)[0])
        tokens = nn.functional.pad(tokens[:, 1:], (0, 1))
    return {name: torch.stack(values) for name, values in seen.items()}


if __name__ == "__main__":
    eagle(Path(sys.argv[1]))
    specforge(Path(sys.argv[2]))
