"""MTP layers of ERNIE 4.5 and MiMo-V2, which transformers does not run: every draft as by a plain
reference written from their configs and shapes, and what is refused.

Shape letters: S slots of a text, D width of a head, H heads, C width, V vocabulary.
"""

import dataclasses
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specmm import TextPipeline
from specmm.core.tree import TreeShape
from specmm.hf.drafters.inspection import inspect
from specmm.hf.drafters.mtp_layers import layers_of
from specmm.hf.drafters.mtp_layouts import has_mtp_layers
from specmm.hf.loading.pretrained import load_model
from tests.integration.mtp_rounds import PROMPTS, Watched, greedy
from tests.tiny.mtp_models import save

RELEASED = [("ernie", 1), ("ernie", 2), ("mimo", 1), ("mimo", 3)]


def norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def feed_forward(x, w):
    return (F.silu(x @ w["gate_proj"].T) * (x @ w["up_proj"].T)) @ w["down_proj"].T


def attention(x, w, turn, window=None, scale=1.0, sinks=None):
    """Causal attention of ``x`` [S, C] in 4 heads, key and query turned by ``turn``."""
    count = len(x)
    parts = [(x @ w[f"{part}_proj"].T) for part in "qkv"]
    heads = [4, w["k_proj"].shape[0] // 8]
    q, k = (turn(y.view(count, n, 8).transpose(0, 1)) for y, n in zip(parts, heads, strict=False))
    v = scale * parts[2].view(count, heads[1], -1).transpose(0, 1)  # [H, S, D]
    k, v = (y.repeat_interleave(4 // heads[1], 0) for y in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(8)
    back = torch.arange(count)[:, None] - torch.arange(count)
    scores = scores.masked_fill((back < 0) | (back >= (window or count)), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, count, 1)], -1)
    weights = scores.softmax(-1)[..., :count]
    return (weights @ v).transpose(0, 1).flatten(1) @ w["o_proj"].T


def turned(x, theta, size, pairs):
    """``x`` [H, S, D] of which ``size`` numbers turn, by neighbours (``pairs``) or by halves."""
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    z = torch.polar(torch.ones_like(angles), angles)
    own, rest = x[..., :size], x[..., size:]
    axis = own.unflatten(-1, (-1, 2)) if pairs else own.unflatten(-1, (2, -1)).transpose(-1, -2)
    found = torch.view_as_real(torch.view_as_complex(axis.contiguous()) * z)
    found = found if pairs else found.transpose(-1, -2)
    return torch.cat([found.flatten(-2), rest], -1)


@dataclasses.dataclass
class Plain:
    """The layers of a checkpoint, from its ``state`` alone."""

    state: dict
    kind: str
    count: int

    def layer(self, number, embeddings, hidden):
        """What layer ``number`` predicts [S, C] from all its slots at once."""
        ernie = self.kind == "ernie"
        names = ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj", "mtp_block")
        at = {name: f"model.{name}.{number}." for name in names}
        own = f"model.mtp.layers.{number}."
        block = at["mtp_block"] if ernie else own
        w = {k[len(block) :]: x for k, x in self.state.items() if k.startswith(block)}
        beside = [
            self.state[(f"{at[name]}" if ernie else f"{own}{short}.") + "weight"]
            for name, short in zip(names, ("enorm", "hnorm", "eh_proj"), strict=False)
        ]
        both = torch.cat([norm(embeddings, beside[0]), norm(hidden, beside[1])], -1)
        x = both @ beside[2].T
        part = {name.split(".")[1]: y for name, y in w.items() if name.endswith("_proj.weight")}
        theta, size = (500.0, 8) if ernie else (100.0, 4)
        extra = (
            {} if ernie else dict(window=5, scale=0.707, sinks=w["self_attn.attention_sink_bias"])
        )
        y = norm(x, w["input_layernorm.weight"])
        x = x + attention(y, part, lambda z: turned(z, theta, size, ernie), **extra)
        y = norm(x, w[("post_attention" if ernie else "pre_mlp") + "_layernorm.weight"])
        x = x + feed_forward(y, part)
        last = "model.norm.weight" if ernie else f"{own}final_layernorm.weight"
        return norm(x, self.state[last])

    def drafts(self, ids, states, depth):
        """A chain of ``depth`` drafts after ``ids`` [S + 1], and their logits [depth, V].

        ``states`` [S, C] are the target's, of all but the last token. Layer k has no slot for a
        text's first k tokens.
        """
        table = self.state["model.embed_tokens.weight"]
        head = self.state.get("lm_head.weight", table)
        given, found = [], []
        hidden = states
        for k in range(depth):
            if k < self.count:  # a new layer, whose last slot is the latest draft's
                given = [table[ids[k + 1 :]], hidden]
            else:
                more = [table[ids[-1:]], hidden[-1:]]
                given = [torch.cat(pair) for pair in zip(given, more, strict=True)]
            out = self.layer(min(k, self.count - 1), *given)
            if self.kind == "ernie":
                hidden = out  # MiMo's go on from the target's own
            found.append(out[-1] @ head.T)
            ids = torch.cat([ids, found[-1].argmax()[None]])
        return ids[-depth:], torch.stack(found)


@pytest.fixture(scope="module", params=RELEASED, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def released(request, tmp_path_factory):
    name, count = request.param
    folder = save(name, tmp_path_factory.mktemp("mtp"), count)
    return name, count, folder, load_model(AutoModelForCausalLM, folder)


@torch.inference_mode()
def test_every_round_is_the_plain_references(released):
    """Tokens equal and logits within 1e-4, of the layers in turn and the last one twice more."""
    name, count, folder, model = released
    plain = Plain(load_file(folder / "model.safetensors"), name, count)
    end, drafter = greedy(model, Watched, TreeShape.chain(count + 2), PROMPTS[:1], 24)
    text = torch.tensor(PROMPTS[0] + end.tokens[0].tolist())
    states = model.model(text[None]).last_hidden_state[0]
    assert len(drafter.found) > 4
    for before, (tokens, logits) in drafter.found.items():
        wanted = plain.drafts(text[:before], states[: before - 1], count + 2)
        assert torch.equal(tokens, wanted[0])
        torch.testing.assert_close(logits, wanted[1], rtol=0, atol=1e-4)


def test_inspect_and_auto_know_them(released):
    """MiMo's config does not say how many there are."""
    _, count, folder, model = released
    assert layers_of(model).count == count
    assert has_mtp_layers(model)
    assert f"its checkpoint has {count} MTP layers" in " ".join(inspect(folder).notes)


@pytest.mark.parametrize(
    ("name", "gone", "said"),
    [
        ("mimo", r"model\.mtp\.", "config that names none"),
        ("mimo", r"model\.mtp\.layers\.0\.final", "missing are layers.0.post_norm"),
        ("ernie", r"model\.mtp_block", "missing are layers.0.mtp_block"),
    ],
)
def test_checkpoints_without_them_are_refused(tmp_path, name, gone, said):
    file = save(name, tmp_path) / "model.safetensors"
    kept = {key: x for key, x in load_file(file).items() if not re.match(gone, key)}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(said)):
        TextPipeline.from_pretrained(tmp_path, method="mtp")("abc", max_new_tokens=4)


@pytest.mark.parametrize("brought", [False, True])
def test_types_that_transformers_has_no_class_for_are_refused(tmp_path, brought):
    """MiMo-7B's, with and without its code, which never runs."""
    config = save("ernie", tmp_path) / "config.json"
    facts = json.loads(config.read_text()) | {"model_type": "mimo"}
    if brought:
        facts["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    config.write_text(json.dumps(facts))
    said = "that transformers has classes for" if brought else "has a class for, got mimo; install"
    with pytest.raises(ValueError, match=said):
        TextPipeline.from_pretrained(tmp_path, method="mtp")
