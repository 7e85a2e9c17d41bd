"""MSD heads on disk: the released layout, padded vocabularies, heads without embeddings, and what
is wrong.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from specmm.vlm.msd import MSDConfig, MSDHead, drafted_embeddings, load_msd, save_msd
from tests.tiny.parts import same_weights

SIZES = dict(vocab_size=20, hidden_size=16, intermediate_size=24, bias=False)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(params=[False, True], ids=["llava", "qwen"])
def head(request):
    torch.manual_seed(0)
    return MSDHead(MSDConfig(**SIZES, qwen=request.param))


def released(head, folder, **changes):
    """As the release has it: a pickled state dict, a config of the language model."""
    folder.mkdir(exist_ok=True)
    torch.save({**head.state_dict(), **changes}, folder / "pytorch_model.bin")
    kind = "qwen2_vl" if head.config.qwen else "llava"
    (folder / "config.json").write_text(
        json.dumps(SIZES | {"model_type": kind, "architectures": ["X"]})
    )
    return folder


def test_released_and_own_files_load(head, tmp_path):
    assert same_weights(load_msd(released(head, tmp_path / "released")), head)
    save_msd(head, tmp_path / "own")
    loaded = load_msd(tmp_path / "own", head.embed_tokens.weight)
    assert same_weights(loaded, head) and loaded.config == head.config and not loaded.training


def test_a_padded_target_lends_its_rows(head, tmp_path):
    padded = torch.cat([head.embed_tokens.weight.data, torch.randn(4, 16)])
    loaded = load_msd(released(head, tmp_path), padded)
    assert loaded.config.vocab_size == 24
    assert torch.equal(loaded.embed_tokens.weight, padded)


class Scaled(torch.nn.Embedding):
    """As Gemma's: the decoder reads twice what the table holds."""

    def forward(self, ids):
        return 2 * super().forward(ids)


def test_embeddings_are_those_of_the_heads_tokens_as_the_decoder_reads_them():
    """Some tables have rows of placeholders that no head gives (Mllama's)."""
    table, output = Scaled(28, 16), torch.nn.Linear(16, 20, bias=False)
    model = SimpleNamespace(
        get_input_embeddings=lambda: table, get_output_embeddings=lambda: output, device="cpu"
    )
    assert torch.equal(drafted_embeddings(model), 2 * table.weight[:20])


def test_embeddings_may_be_left_out(head, tmp_path):
    save_msd(head, tmp_path, embeddings=False, dtype=torch.bfloat16)
    weight = head.embed_tokens.weight.bfloat16()
    assert torch.equal(load_msd(tmp_path, weight).embed_tokens.weight, weight)
    with pytest.raises(ValueError, match="must be loaded with its target's embeddings"):
        load_msd(tmp_path)
    with pytest.raises(ValueError, match="must be of this target"):
        load_msd(tmp_path, torch.randn(20, 16))


def test_drafters_of_other_targets_are_refused(head, tmp_path):
    folder = released(head, tmp_path)
    for embeddings in (torch.randn(20, 17), torch.randn(19, 16)):
        with pytest.raises(ValueError, match="must have the target's embeddings"):
            load_msd(folder, embeddings)
    with pytest.raises(ValueError, match="got other token embeddings"):
        load_msd(folder, torch.randn(20, 16))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("fc.weight"), "1 missing: fc.weight"),
        (lambda s: s.update({"norm.weight": torch.ones(16)}), "1 unexpected: norm.weight"),
        (
            lambda s: s.update({"fc.weight": torch.ones(16, 16)}),
            r"1 wrong-shaped: fc.weight \[16, 16\] for \[16, 32\]",
        ),
        (lambda s: s["fc.weight"].fill_(float("nan")), "NaN or infinity in fc.weight"),
        (lambda s: s.pop("embed_tokens.weight"), "must hold embed_tokens.weight"),
        (
            lambda s: s.update({"embed_tokens.weight": torch.ones(3, 16)}),
            r"embed_tokens.weight must be \[20, 16\]",
        ),
    ],
)
def test_damaged_weights_are_named(head, tmp_path, damage, message):
    embeddings = head.embed_tokens.weight.detach().clone()
    state = {k: v.clone() for k, v in head.state_dict().items()}
    damage(state)
    folder = released(head, tmp_path)
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        load_msd(folder, embeddings)


def test_damaged_configs_are_named(head, tmp_path):
    folder = released(head, tmp_path)
    for text, message in (
        ("{", "must be JSON"),
        ("[]", "must hold an object"),
        ("{}", "must give vocab_size"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_msd(folder)
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match=r"config\.json"):
        load_msd(folder)
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"must be a whole \.bin file"):
        released_config(head, folder)


def released_config(head, folder):
    (folder / "config.json").write_text(json.dumps(SIZES))
    return load_msd(folder)
