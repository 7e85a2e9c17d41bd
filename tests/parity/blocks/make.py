"""The numbers of this folder, by the releases' own classes: speculators 0.9.0 (PyPI) and SpecForge
(github.com/sgl-project/SpecForge, commit a6b6b023), with torch 2.14 and transformers 5.19.

    python make.py speculators            # in a venv with speculators
    PYTHONPATH=SpecForge python make.py specforge

Each case is an unmodified folder of a tiny drafter of random weights with ``cases.safetensors``:
after ``prompt`` and the ``anchor`` that the tiny target of ``target/`` says next, the block's
``states``, the ``logits`` of each draft after the drafts before it, those ``drafts``, which are the
likeliest, and the ``confidence`` of each where there is a head for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
VOCABULARY = 64
FEW = torch.arange(3, VOCABULARY, 3)  # the tokens of a drafter with a vocabulary of its own
MASK = 63
BLOCK = 6
PROMPT = torch.tensor([[5, 9, 33, 2, 41, 17, 8, 60, 12, 3, 28, 51]])
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
WINDOW = dict(
    layer_types=["sliding_attention", "full_attention"], sliding_window=5, use_sliding_window=True
)


def shaken(model, seed, std=0.3):
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, std, generator=generator)
        else:
            weight.data.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return model.eval()


def target():
    folder = HERE / "target"
    if not folder.is_dir():
        made = shaken(Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=3, **SIZES)), 0)
        made.save_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(folder).eval()


def states_of(model):
    """By transformers: the embeddings, each layer's states; the last layer's before the norm."""
    last = []
    handle = model.model.layers[-1].register_forward_hook(lambda *x: last.append(x[2]))
    found = model(PROMPT, output_hidden_states=True)
    handle.remove()
    return found.hidden_states, last[0], found.logits[0, -1].argmax()


def write(folder, **tensors):
    assert MASK not in tensors["drafts"]  # which we never draft
    kept = {name: x.detach().contiguous() for name, x in tensors.items() if x is not None}
    save_file({"prompt": PROMPT, **kept}, folder / "cases.safetensors")


@torch.no_grad()
def speculators():
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    few = dict(draft_vocab_size=len(FEW))
    spark = dict(markov_rank=7)
    cases = {
        "dflash": ({}, {}),
        "dflash-few": (few | dict(sample_from_anchor=True), {}),
        "dflash-window": ({}, WINDOW),
        "dflash-window-both": (dict(sliding_window_non_causal=True), WINDOW),
        "dspark-vanilla": (spark | few, {}),
        "dspark-gated": (spark | dict(markov_head_type="gated", sample_from_anchor=False), {}),
        "dspark-rnn": (spark | dict(markov_head_type="rnn", confidence_head_with_markov=False), {}),
    }
    model = target()
    hidden, last, anchor = states_of(model)
    for seed, (name, (options, layer)) in enumerate(cases.items()):
        algorithm = name.split("-")[0]
        kind = DSparkDraftModel if algorithm == "dspark" else DFlashDraftModel
        config = DSparkSpeculatorConfig if algorithm == "dspark" else DFlashSpeculatorConfig
        layers = Qwen3Config(num_hidden_layers=2, **SIZES, **layer)
        layers._attn_implementation = "eager"
        drafter = kind(
            config(
                transformer_layer_config=layers,
                block_size=BLOCK,
                aux_hidden_state_layer_ids=[1, 3],
                mask_token_id=MASK,
                speculators_config=SpeculatorsConfig(
                    algorithm=algorithm,
                    proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
                    default_proposal_method="greedy",
                    verifier=VerifierConfig(
                        name_or_path="tiny/target", architectures=["Qwen3ForCausalLM"]
                    ),
                ),
                **{"draft_vocab_size": VOCABULARY, **options},
            )
        )
        shaken(drafter, seed + 61)
        drafter.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
        ids = FEW if options.get("draft_vocab_size") else torch.arange(VOCABULARY)
        drafter.lm_head.weight.copy_(model.lm_head.weight[ids])
        if len(ids) < VOCABULARY:
            drafter.lm_head.weight.mul_(1.1)  # a head of its own
            mask = torch.zeros(VOCABULARY, dtype=torch.bool)
            mask[ids] = True
            drafter.load_vocab_mappings(mask, ids - torch.arange(len(ids)))
        drafter.save_pretrained(HERE / f"speculators-{name}")
        (HERE / f"speculators-{name}" / "config.py").unlink()  # a copy of their source
        numbers = speculators_round(drafter, torch.cat([hidden[1], last], -1), anchor, ids)
        write(HERE / f"speculators-{name}", anchor=anchor, **numbers)


def speculators_round(drafter, context, anchor, ids):
    length = PROMPT.shape[1]
    rest = BLOCK + 2  # unseen tokens after the anchor
    context = torch.cat([context, torch.ones(1, rest, context.shape[-1])], 1)
    tokens = torch.cat([PROMPT, anchor.expand(1, 1), torch.ones(1, rest - 1, dtype=torch.long)], 1)
    loss_mask = torch.zeros(tokens.shape)
    loss_mask[0, length] = 1
    states, logits, *_ = drafter._backbone_forward(
        context,
        tokens,
        loss_mask,
        context[..., : drafter.hidden_size],
        torch.zeros_like(tokens),
        max_anchors=1,
    )
    first = 0 if drafter.config.sample_from_anchor else 1
    count = BLOCK - first
    drafts, scores, sure = [], [], []
    before = torch.full((1, BLOCK), int(anchor))
    for k in range(count):
        added = 0.0
        if getattr(drafter, "markov_head", None) is not None:
            added = drafter.markov_head.block_bias(prev_token_ids=before, hidden_states=states)
            added = added[0, k + first]
        scores.append(logits[0, k + first] + added)
        head = getattr(drafter, "confidence_head", None)
        if head is not None:
            features = states[0, k + first]
            if drafter.config.confidence_head_with_markov:
                seen = drafter.markov_head.prev_embeddings(before[0, k + first])
                features = torch.cat([features, seen])
            sure.append(head(features).sigmoid())
        drafts.append(ids[scores[-1].argmax()])
        if k + first + 1 < BLOCK:
            before[0, k + first + 1] = drafts[-1]
    return dict(
        states=states[0, first:],
        logits=torch.stack(scores),
        drafts=torch.stack(drafts),
        confidence=torch.stack(sure) if sure else None,
    )


@torch.no_grad()
def specforge():
    from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask
    from specforge.modeling.draft.dflash import DFlashDraftModel, extract_context_feature
    from specforge.modeling.draft.domino import DominoDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    spark = dict(markov_rank=7, projector_type="dspark", enable_confidence_head=True)
    domino = dict(projector_type="domino", emb_dim=9, gru_hidden_dim=10, pure_draft_prefix_len=1)
    cases = {
        "dflash": (DFlashDraftModel, {}, {}),
        "dflash-window": (DFlashDraftModel, {}, WINDOW),
        "dspark-vanilla": (DSparkDraftModel, spark | dict(confidence_head_with_markov=True), {}),
        "dspark-gated": (DSparkDraftModel, spark | dict(markov_head_type="gated"), {}),
        "dspark-rnn": (DSparkDraftModel, spark | dict(markov_head_type="rnn"), {}),
        "domino": (DominoDraftModel, domino | dict(shift_label=False), {}),
        "domino-shift": (DominoDraftModel, domino | dict(shift_label=True), {}),
    }
    model = target()
    hidden, _, anchor = states_of(model)
    length = PROMPT.shape[1]
    block = torch.full((1, BLOCK), MASK)
    block[0, 0] = anchor
    for seed, (name, (kind, options, layer)) in enumerate(cases.items()):
        nested = {"mask_token_id": MASK, "target_layer_ids": [0, 2], **options}
        config = Qwen3Config(num_hidden_layers=2, **SIZES, **layer)
        config.block_size = BLOCK
        config.num_target_layers = 3
        config.dflash_config = nested
        config._attn_implementation = "eager"
        drafter = shaken(kind(config), seed + 21)
        drafter.save_pretrained(HERE / f"specforge-{name}")
        masks = {
            kind: create_dflash_sdpa_mask(
                torch.tensor([[length]]),
                torch.ones(1, 1, dtype=torch.bool),
                length,
                BLOCK,
                "cpu",
                w,
            )
            for kind, w in (("full_attention", None), ("sliding_attention", 5))
        }
        states = drafter(
            position_ids=torch.arange(length + BLOCK)[None],
            attention_mask=masks,
            noise_embedding=model.model.embed_tokens(block),
            target_hidden=extract_context_feature(hidden, drafter.target_layer_ids),
        )
        numbers = specforge_round(drafter, model, states, block, options)
        write(HERE / f"specforge-{name}", anchor=anchor, **numbers)


def specforge_round(drafter, model, states, block, options):
    base = model.lm_head(states)
    projector = options.get("projector_type")
    if projector is None:
        logits = base[0, 1:]
        return dict(states=states[0, 1:], logits=logits, drafts=logits.argmax(-1))
    if projector == "dspark":  # each place is trained on the token after its own
        drafts, logits = drafter.markov_head.sample_block_tokens(
            base, first_prev_token_ids=block[:, 0], hidden_states=states
        )
        before = torch.cat([block[:, :1], drafts[:, :-1]], 1)
        sure = drafter.predict_confidence(states, prev_token_ids=before).sigmoid()[0]
        return dict(states=states[0], logits=logits[0], drafts=drafts[0], confidence=sure)
    drafts = drafter._sample_draft_tokens(model, states, block)
    whole = torch.cat([block[:, :1], drafts], 1)
    logits = drafter.apply_logits_head(
        base[:, None],
        prev_token_embeddings=model.model.embed_tokens(whole)[:, None],
        hidden_states=states[:, None],
    )[0, 0]
    first = 0 if options["shift_label"] else 1
    return dict(states=states[0, first:], logits=logits[first:], drafts=logits[first:].argmax(-1))


if __name__ == "__main__":
    {"speculators": speculators, "specforge": specforge}[sys.argv[1]]()
