"""Model files of every shape: what is inferred, what is asked for, what is refused, and the way
back to a file.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from specmm.image_ar.autoencoder import VQConfig, VQModel
from specmm.image_ar.files import save_module
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer, rotary_table
from specmm.image_ar.tokens.loading import infer_gpt_config, load_gpt, load_vq, to_lantern
from tests.tiny.parts import same_weights

C2I = GPTConfig(dim=64, n_layer=3, n_head=4, vocab_size=128, block_size=16, num_classes=10)
T2I = replace(C2I, num_classes=1000, model_type="t2i", cls_token_num=6, caption_dim=24)
VQ = VQConfig(codebook_size=64, ch=32, ch_mult=(1, 2), num_res_blocks=1, z_channels=16)
USAGE = {"quantize.codebook_used": torch.zeros(65536)}


def seeded(make, config):
    torch.manual_seed(0)
    return make(config).eval()


@pytest.fixture(scope="module")
def c2i():
    return seeded(Transformer, C2I)


@pytest.fixture(scope="module")
def t2i():
    return seeded(Transformer, T2I)


@pytest.fixture(scope="module")
def vq():
    return seeded(VQModel, VQ)


def test_official_files_load_by_their_shapes(tmp_path, c2i, t2i, vq):
    torch.save({"model": c2i.state_dict()}, tmp_path / "c2i.pt")
    torch.save(
        {"module": t2i.state_dict() | {"freqs_cis": rotary_table(4, 16, 6)}}, tmp_path / "t2i.pt"
    )
    torch.save({"model": vq.state_dict() | USAGE, "steps": 1}, tmp_path / "vq.pt")
    save_file(
        to_lantern(t2i.state_dict()) | {"model.rotary_emb.inv_freq": torch.zeros(4)},
        tmp_path / "lantern.safetensors",
    )
    assert same_weights(load_gpt(tmp_path / "c2i.pt", n_head=4, block_size=16), c2i)
    from_table = load_gpt(tmp_path / "t2i.pt")
    assert same_weights(from_table, t2i) and from_table.config == t2i.config
    loaded_vq = load_vq(tmp_path / "vq.pt")
    assert same_weights(loaded_vq, vq) and loaded_vq.config == vq.config
    assert same_weights(load_gpt(tmp_path / "lantern.safetensors", n_head=4, block_size=16), t2i)


def test_missing_sizes_are_named(tmp_path, c2i):
    torch.save(c2i.state_dict(), tmp_path / "c2i.pt")
    with pytest.raises(ValueError, match="n_head must be given"):
        load_gpt(tmp_path / "c2i.pt")
    with pytest.raises(ValueError, match=r"block_size .* must be given"):
        load_gpt(tmp_path / "c2i.pt", n_head=4)


def test_published_sizes_are_known():
    shapes = {f"layers.{i}.feed_forward.w1.weight": (2048, 768) for i in (0, 11)}
    shapes["tok_embeddings.weight"] = (16384, 768)
    shapes["cls_embedding.embedding_table.weight"] = (1001, 768)
    state = {k: torch.empty(v, device="meta") for k, v in shapes.items()}
    assert infer_gpt_config(state, block_size=256) == GPTConfig()


def test_wrong_model_is_named(tmp_path, c2i, vq):
    torch.save(c2i.state_dict(), tmp_path / "c2i.pt")
    torch.save(vq.state_dict(), tmp_path / "vq.pt")
    with pytest.raises(ValueError, match=r"must hold tok_embeddings\.weight"):
        load_gpt(tmp_path / "vq.pt")
    with pytest.raises(ValueError, match=r"must hold quantize\.embedding\.weight"):
        load_vq(tmp_path / "c2i.pt")
    said = r"wrong-shaped: tok_embeddings.weight \[128, 64\] for \[99, 64\]"
    with pytest.raises(ValueError, match=said):
        load_gpt(
            tmp_path / "c2i.pt",
            GPTConfig(dim=64, n_layer=3, n_head=4, vocab_size=99, block_size=16),
        )
    with pytest.raises(ValueError, match=r"1 unexpected: quantize\.used_codes"):
        torch.save(vq.state_dict() | {"quantize.used_codes": torch.zeros(1)}, tmp_path / "vq.pt")
        load_vq(tmp_path / "vq.pt")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_save_and_load(tmp_path, c2i, vq, dtype):
    save_module(c2i, tmp_path / "gpt", dtype)
    save_module(vq, tmp_path / "vq", dtype)
    for model, again in ((c2i, load_gpt(tmp_path / "gpt")), (vq, load_vq(tmp_path / "vq"))):
        assert again.config == model.config and not again.training
        for name, weight in model.state_dict().items():
            wanted = weight.to(dtype or weight.dtype).float()
            assert torch.equal(again.state_dict()[name], wanted), name


@torch.no_grad()
def test_casting_keeps_the_rotary_table(tmp_path, c2i):
    save_module(c2i, tmp_path)
    half = load_gpt(tmp_path, dtype=torch.bfloat16)
    assert half.output.weight.dtype == torch.bfloat16
    assert torch.equal(half.rotary.table, c2i.rotary.table)
    x = c2i.embed(torch.tensor([3, 10]), torch.arange(32).view(2, 16))
    wanted, _ = c2i(x)
    logits, _ = half(x.bfloat16())
    assert (logits.float() - wanted).norm() < 0.02 * wanted.norm()
    assert torch.equal(half.double().rotary.table, c2i.rotary.table)


def test_bad_configs(tmp_path, c2i):
    save_module(c2i, tmp_path)
    sizes = json.loads((tmp_path / "config.json").read_text())
    for content, message in (
        ("{", "must be JSON"),
        (json.dumps(sizes | {"n_heads": 3}), "must hold sizes of GPTConfig, got n_heads"),
        (json.dumps(sizes | {"model": "VQConfig"}), "must describe a GPTConfig"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_gpt(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')  # another program's
    assert same_weights(load_gpt(tmp_path, n_head=4, block_size=16), c2i)


@pytest.mark.parametrize("ffn_dim", [64, 192, 200, 4096])
def test_any_feed_forward_width_is_said_exactly(c2i, ffn_dim):
    state = c2i.state_dict() | {
        "layers.0.feed_forward.w1.weight": torch.empty(ffn_dim, 64, device="meta")
    }
    assert infer_gpt_config(state, n_head=4, block_size=16).ffn_dim == ffn_dim
