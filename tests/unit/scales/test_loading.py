"""Model files of every shape: what is inferred, what is asked for, what is refused, and the way
back to a file.
"""

import json

import pytest
import torch

from specmm.image_ar.files import save_module
from specmm.image_ar.scales.loading import load_var, load_vqvae, tokenizer_fingerprint
from specmm.image_ar.scales.vqvae import phi_of_scale
from tests.tiny.parts import same_weights

SIDES = (1, 2, 3, 4, 6)


def nested(state):
    trainer = {"config": {"bs": 1}, "var_wo_ddp": state, "vae_local": state}
    return {"epoch": 3, "iter": 0, "trainer": trainer}


@pytest.mark.parametrize(
    "wrap", [lambda s: s, nested, lambda s: {f"trainer.var_wo_ddp.{k}": v for k, v in s.items()}]
)
def test_official_transformers(large, make, tmp_path, wrap):
    for model in (large, make.var(1, shared_aln=True)):
        torch.save(wrap(model.state_dict()), tmp_path / "var.pth")
        again = load_var(tmp_path / "var.pth")
        assert same_weights(again, model) and again.config == model.config and not again.training


@pytest.mark.parametrize("wrap", [lambda s: s, nested])
def test_official_tokenizers(vqvae, tmp_path, wrap):
    torch.save(wrap(vqvae.state_dict()), tmp_path / "vae.pth")
    again = load_vqvae(tmp_path / "vae.pth", patch_nums=SIDES)
    assert same_weights(again, vqvae) and again.config == vqvae.config
    for given in (None, (1, 2, 3)):
        said = r"patch_nums must be the sides of the 5 scales .*, got"
        with pytest.raises(ValueError, match=said):
            load_vqvae(tmp_path / "vae.pth", patch_nums=given)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_save_and_load(large, vqvae, tmp_path, dtype):
    save_module(large, tmp_path / "var", dtype)
    save_module(vqvae, tmp_path / "vae", dtype)
    loaded = load_var(tmp_path / "var"), load_vqvae(tmp_path / "vae")
    for model, again in zip((large, vqvae), loaded, strict=True):
        assert again.config == model.config
        for name, weight in model.state_dict().items():
            wanted = weight.to(dtype).float() if dtype and weight.is_floating_point() else weight
            assert torch.equal(again.state_dict()[name], wanted), name


def test_wrong_files_are_named(large, vqvae, tmp_path):
    torch.save(vqvae.state_dict(), tmp_path / "vae.pth")
    torch.save(large.state_dict(), tmp_path / "var.pth")
    with pytest.raises(ValueError, match=r"must hold word_embed\.weight, got a file without it"):
        load_var(tmp_path / "vae.pth")
    with pytest.raises(ValueError, match=r"must hold quantize\.embedding\.weight"):
        load_vqvae(tmp_path / "var.pth")
    for change, message in (
        ({"blocks.1.ffn.fc3.weight": torch.zeros(1)}, r"1 unexpected: blocks\.1\.ffn\.fc3\.weight"),
        ({"head.bias": torch.zeros(5)}, r"wrong-shaped: head\.bias \[5\] for \[32\]"),
        ({"head.bias": torch.full((32,), torch.nan)}, r"NaN or infinity in head\.bias"),
        ({"lvl_1L": large.lvl_1L.flip(1)}, "must hold the levels of patch_nums"),
    ):
        torch.save(large.state_dict() | change, tmp_path / "var.pth")
        with pytest.raises(ValueError, match=message):
            load_var(tmp_path / "var.pth")
    torch.save(
        {k: v for k, v in large.state_dict().items() if k != "head.bias"}, tmp_path / "var.pth"
    )
    with pytest.raises(ValueError, match=r"1 missing: head\.bias"):
        load_var(tmp_path / "var.pth")
    torch.save({"trainer": {"step": 1}}, tmp_path / "var.pth")
    said = r"must hold tensors by name .*, got other things named step"
    with pytest.raises(ValueError, match=said):
        load_var(tmp_path / "var.pth")


def test_heads_that_nobody_tells(make, tmp_path):
    model = make.var(1, attn_l2_norm=False, embed_dim=32, num_heads=2)
    torch.save(model.state_dict(), tmp_path / "var.pth")
    with pytest.raises(ValueError, match="num_heads must be given"):
        load_var(tmp_path / "var.pth")
    assert same_weights(load_var(tmp_path / "var.pth", model.config), model)
    # another program's, and none of ours
    (tmp_path / "config.json").write_text('{"from": "elsewhere"}')
    with pytest.raises(ValueError, match="num_heads must be given"):
        load_var(tmp_path / "var.pth")


def test_configs_that_do_not_fit(large, tmp_path):
    save_module(large, tmp_path)
    with pytest.raises(ValueError, match="must describe a VQVAEConfig, got a VARConfig"):
        load_vqvae(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layers": 3}))
    with pytest.raises(ValueError, match="must hold sizes of VARConfig, got layers"):
        load_var(tmp_path)
    for sizes, message in (
        (dict(patch_nums=[2, 1]), "growing sides"),
        (dict(num_heads=5), "multiple of num_heads"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | sizes))
        with pytest.raises(ValueError, match=message):
            load_var(tmp_path)


def test_fingerprints_tell_tokenizers_apart(make, vqvae):
    assert tokenizer_fingerprint(vqvae) == tokenizer_fingerprint(make.vqvae())
    assert tokenizer_fingerprint(vqvae) != tokenizer_fingerprint(make.vqvae(seed=1))


def test_phi_of_one_scale():
    assert phi_of_scale(4, 1) == [0] and phi_of_scale(0, 3) == [0, 1, 2]
