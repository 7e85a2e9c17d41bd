"""Published models by name, from a hub on this machine: only the files they need are fetched, and
they draw what the same weights draw from our own folders.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import specmm
from specmm import zoo
from specmm.image_ar.autoencoder import VQConfig, VQModel
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.loading import to_lantern
from specmm.zoo import POCKET, hub, published
from tests.cases import some
from tests.commands import as_json, refused, run, succeed
from tests.hub_server import Hub, attached
from tests.unit.test_captions import save_t5

LLAMAGEN, VAR = "FoundationVision/LlamaGen", "FoundationVision/var"
CODE, MAR = "Zigeng/VAR_CoDe", "jadechoghari/mar"
T2I = GPTConfig(32, 2, 2, 64, 16, model_type="t2i", cls_token_num=6, caption_dim=16, multiple_of=32)


def weights(folder):
    return load_file(POCKET / folder / "model.safetensors")


def sizes(folder):
    return json.loads((POCKET / folder / "config.json").read_text())


@pytest.fixture(scope="session")
def releases(tmp_path_factory):
    """Repositories of pocket models in the releases' layouts, by their names on the hub."""
    root = tmp_path_factory.mktemp("hub")
    files = {
        f"{LLAMAGEN}/c2i_B_256.pt": {"model": weights("llamagen/transformer")},
        f"{LLAMAGEN}/c2i_XL_384.pt": {"module": weights("llamagen/transformer")},
        f"{LLAMAGEN}/c2i_3B_384.pt": weights("llamagen/transformer"),
        f"{LLAMAGEN}/vq_ds16_c2i.pt": {"model": weights("llamagen/vq")},
        f"{VAR}/var_d16.pth": weights("var/small"),
        f"{VAR}/var_d30.pth": weights("var/transformer"),
        f"{VAR}/vae_ch160v4096z32.pth": weights("var/vae"),
        f"{CODE}/drafter_8.pth": weights("var/transformer"),
        f"{CODE}/refiner_8.pth": weights("var/small"),
        f"{MAR}/checkpoint-last.pth": {
            "model": {"wrong": torch.zeros(1)},
            "model_ema": weights("mar/transformer"),
        },
        f"{MAR}/kl16.ckpt": {"model": weights("mar/vae")},
    }
    for name, tree in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(tree, root / name)
        (root / name).with_name("README.md").write_text("a card that nobody needs")
    write_captioned(root)
    return {str(f.relative_to(root)): f for f in root.glob("*/*") if f.is_dir()}


def write_captioned(root):
    """A tiny model of captions as LlamaGen and as LANTERN publish it, a head and a T5."""
    torch.manual_seed(0)
    state = Transformer(T2I).state_dict()
    for name in ("peizesun/llamagen_t2i", "jadohu/LlamaGen-T2I", "jadohu/llamagen_drafter"):
        (root / name).mkdir(parents=True)
    torch.save({"model": state}, root / "peizesun/llamagen_t2i/t2i_XL_stage1_256.pt")
    vq = VQModel(VQConfig(T2I.vocab_size, 8, 32, (1, 1, 1), 1, 32)).state_dict()
    torch.save({"model": vq}, root / "peizesun/llamagen_t2i/vq_ds16_t2i.pt")
    named = {k: v.contiguous() for k, v in to_lantern(state).items()}
    save_file(named, root / "jadohu/LlamaGen-T2I/model.safetensors")
    head = EagleHead(EagleConfig(T2I)).state_dict()
    torch.save(head, root / "jadohu/llamagen_drafter/pytorch_model.bin")
    (root / "google/flan-t5-xl").mkdir(parents=True)
    save_t5(root / "google/flan-t5-xl")


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    """The registry with the sizes of the pocket models, which its files are here."""
    read = json.loads(published.REGISTRY.read_text())
    transformers = {"llamagen": "llamagen/transformer", "mar": "mar/transformer"}
    vaes = {"var": "var/vae", "mar": "mar/vae"}
    for facts in read["models"].values():
        if "captions" in facts["what"]:
            facts["configs"] = {"transformer": {"model": "GPTConfig", **asdict(T2I)}}
            continue
        facts["configs"] = {}
        for place, known in (("transformer", transformers), ("vae", vaes)):
            if facts["family"] in known and place in facts.get("parts", {}):
                facts["configs"][place] = sizes(known[facts["family"]])
    for part in read["files"].values():
        part.pop("sha256", None)
        part.pop("revision", None)
    file = tmp_path_factory.mktemp("registry") / "published.json"
    file.write_text(json.dumps(read))
    return file


@pytest.fixture
def server(releases, registry, tmp_path, monkeypatch):
    """The hub, and this process as one that has it for its hub and an empty cache."""
    with attached(Hub(dict(releases)), tmp_path, monkeypatch, registry) as hub:
        yield hub


def drawn(pipe, **options):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    return pipe(classes=[1], cfg=1.5, temperature=1.0, generator=generator, **options).tokens


FAMILIES = {
    "llamagen-c2i-b-256": ("pocket/llamagen", {"top_k": 0}, ("c2i_B_256.pt", "vq_ds16_c2i.pt")),
    "llamagen-c2i-xl-384": ("pocket/llamagen", {"top_k": 0}, ("c2i_XL_384.pt", "vq_ds16_c2i.pt")),
    "llamagen-c2i-3b-384": ("pocket/llamagen", {"top_k": 0}, ("c2i_3B_384.pt", "vq_ds16_c2i.pt")),
    "var-d30": ("pocket/var", {"top_k": 0, "top_p": 1.0}, ("var_d30.pth", "vae_ch160v4096z32.pth")),
    "var-code-8": (
        "pocket/var",
        {"top_k": 0, "top_p": 1.0, "method": specmm.methods.CoDe(n=2)},
        ("drafter_8.pth", "refiner_8.pth", "vae_ch160v4096z32.pth"),
    ),
    "mar-b": (
        "pocket/mar",
        {"num_iter": 4, "head_steps": "10"},
        ("checkpoint-last.pth", "kl16.ckpt"),
    ),
}


DRAWN = ("llamagen-c2i-b-256", "var-code-8", "mar-b")  # one of each family


@pytest.mark.parametrize("name", some(FAMILIES, DRAWN))
@pytest.mark.slow
def test_a_name_draws_what_its_weights_draw_and_fetches_its_files_alone(name, server):
    same, options, files = FAMILIES[name]
    pipe = specmm.ImagePipeline.from_pretrained(name, torch_dtype=torch.float32)
    assert sorted(f.rpartition("/")[2] for f in server.fetched) == sorted(files)
    own = specmm.ImagePipeline.from_pretrained(same, torch_dtype=torch.float32)
    for part in ("transformer", "vq", "vae", "small"):
        if pipe.components.get(part) is not None:
            pairs = zip(*(getattr(p, part).state_dict().values() for p in (pipe, own)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), part
    if name in DRAWN:
        assert torch.equal(drawn(pipe, **options), drawn(own, **options))
    assert pipe.settings.classes[207] == "golden retriever"
    assert pipe.settings.cfg == published.published_models()[name].settings["cfg"]


def test_a_model_of_captions_with_its_text_encoder_and_lanterns_head(server):
    given = {"torch_dtype": torch.float32, "text_encoder": "flan-t5-xl"}
    drawn = {}
    for name, method in {"": "ar", "-lantern": "eagle"}.items():
        name = f"llamagen-t2i-xl-256{name}"
        pipe = specmm.ImagePipeline.from_pretrained(name, **given)
        pipe.set_progress_bar_config(disable=True)
        call = {"temperature": 0.0, "cfg": 2.0, "top_k": 0}
        call["generator"] = torch.Generator().manual_seed(0)
        drawn[name] = pipe(prompt="a red cat", method="ar", **call).tokens
        assert pipe(prompt="a red cat", method=method, **call).tokens.shape == (1, 16)
    first, second = drawn.values()
    assert torch.equal(first, second)


def test_a_file_of_a_repository_is_a_model(server):
    pipe = specmm.ImagePipeline.from_pretrained(VAR, file="var_d30.pth", torch_dtype=torch.float32)
    assert pipe.transformer.config.depth == sizes("var/transformer")["depth"]
    with pytest.raises(ValueError, match=r"did you mean 'var_d30.pth'\?"):
        specmm.ImagePipeline.from_pretrained(VAR, file="var_d30.pt")
    with pytest.raises(ValueError, match=r"holds several models, give file=…, one of var_d16"):
        specmm.ImagePipeline.from_pretrained(VAR)


def test_the_command_line_draws_by_name(server, tmp_path):
    words = "generate var-d30 --class 7 --cfg 1.5 --dtype float32 --seed 1"
    assert as_json(words, "--out", tmp_path / "out")["pictures"] == 1


@pytest.mark.slow
def test_a_process_fetches_from_the_hub_of_its_environment(server, tmp_path):
    places = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", "from specmm.cli import main; main()", "fetch", "var-d16"]

    def run(**more):
        return subprocess.run(
            command, env=os.environ | places | more, capture_output=True, text=True
        )

    first = run()
    assert first.returncode == 0, first.stderr
    assert (Path(first.stdout.strip()) / "transformer" / "model.pth").is_file()
    assert len(server.fetched) == 2
    again = run(HF_HUB_OFFLINE="1")
    assert again.stdout == first.stdout and len(server.fetched) == 2
    nowhere = run(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty"))
    assert nowhere.returncode == 2
    assert nowhere.stderr.count("\n") == 1 and "HF_HUB_OFFLINE is set" in nowhere.stderr


def test_nothing_large_is_fetched_unasked(server, monkeypatch):
    monkeypatch.setattr(hub, "LARGE", 10**6)
    wanted = r"var-d30 must be fetched first, 0\.\d+ GB are missing: var_d30\.pth \(.* specmm fetch"
    with pytest.raises(ValueError, match=wanted):
        specmm.ImagePipeline.from_pretrained("var-d30")
    assert not server.fetched
    specmm.ImagePipeline.from_pretrained("var-d30", download=True)
    assert len(server.fetched) == 2
    zoo.LOCATED.clear()
    specmm.ImagePipeline.from_pretrained("var-d30")  # it is there
    monkeypatch.setenv(hub.AGREED, "1")
    specmm.ImagePipeline.from_pretrained("var-d16")


def test_the_cache_serves_without_a_network(server, monkeypatch):
    first = zoo.fetched("mar-b")
    zoo.LOCATED.clear()
    server.stop()
    assert zoo.fetched("mar-b") == first
    lacks = (
        r"hub http.* cannot be reached .*cache lacks var_d16.pth \(about 1.2 GB\) of "
        rf"{VAR}, vae_ch160v4096z32.pth \(about 0.4 GB\) of {VAR};"
    )
    with pytest.raises(ValueError, match=lacks):
        zoo.fetched("var-d16")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    zoo.LOCATED.clear()
    assert zoo.fetched("mar-b") == first
    with pytest.raises(ValueError, match=r"cannot be reached \(HF_HUB_OFFLINE is set\)"):
        zoo.fetched("var-d16")


def test_a_broken_download_is_resumed(server, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    server.broken["kl16.ckpt"] = 300_000
    zoo.fetched("mar-b")
    assert server.began["kl16.ckpt"][0] == 0
    assert server.began["kl16.ckpt"][1] > 0


def test_a_file_that_arrives_damaged_is_refused_and_removed(server):
    server.spoilt.add("var_d16.pth")
    with pytest.raises(ValueError, match=r"var_d16.pth must have the SHA-256 .* it was removed"):
        zoo.fetched("var-d16")
    server.spoilt.clear()
    assert zoo.fetched("var-d16").is_dir()


def test_a_hash_of_the_registry_is_checked(server, registry, tmp_path, monkeypatch):
    read = json.loads(registry.read_text())
    read["files"]["kl16"]["sha256"] = "0" * 64
    other = tmp_path / "published.json"
    other.write_text(json.dumps(read))
    monkeypatch.setattr(published, "REGISTRY", other)
    published.published_models.cache_clear()
    with pytest.raises(ValueError, match=r"kl16.ckpt must be the release's \(000000000000…\)"):
        zoo.fetched("mar-b")


def test_names_and_places_that_are_not_there(server):
    for name, hint in {
        "llamagen-c2i-xl-348": "did you mean 'llamagen-c2i-xl-384'",
        "FoundationVision/vra": "did you mean 'FoundationVision/var'",
        "var-d30 ": "did you mean 'var-d30'",
    }.items():
        with pytest.raises(ValueError, match=hint):
            zoo.fetched(name)
    with pytest.raises(ValueError, match="revision must be one of FoundationVision/var's, got 'x'"):
        zoo.fetched("var-d16", zoo.Source(revision="x"))
    with pytest.raises(ValueError, match="var-d16 draws pictures"):
        specmm.VQAPipeline.from_pretrained("var-d16")
    with pytest.raises(ValueError, match=r"mar-l must be fetched by hand.*dropbox"):
        zoo.fetched("mar-l")
    server.refused[VAR] = 403
    with pytest.raises(ValueError, match=f"accept its licence at .*/{VAR}"):
        zoo.fetched("var-d16")


def test_the_registry_is_shown_and_whole():
    models = {one["name"]: one for one in as_json("zoo --published")}
    assert len(models) > 40
    for one in models.values():
        assert one["licence"] and one["repositories"] and one["what"]
        assert set(one["with"]) <= set(models)
        assert all(models[other]["name"] for other in one["with"])
    table = run("zoo --published").stdout
    assert all(f"{name} " in table for name in models)


def test_files_become_a_folder_of_ours(server, releases, tmp_path):
    out = tmp_path / "out"
    source = tmp_path / "mine.pth"
    shutil.copy(releases[VAR] / "var_d16.pth", source)
    other = f"vae={releases[VAR] / 'vae_ch160v4096z32.pth'}"
    succeed(f"convert {source} {out} --like var-d16 --with {other} --json")
    assert not server.fetched
    pipe = specmm.ImagePipeline.from_pretrained(out, torch_dtype=torch.float32)
    zoo.LOCATED.clear()
    named = specmm.ImagePipeline.from_pretrained("var-d16", torch_dtype=torch.float32)
    assert torch.equal(drawn(pipe), drawn(named))
    assert not list(out.rglob("*.pth"))


def test_mistakes_in_files_are_told_by_their_own_names(server, releases, tmp_path):
    whole = releases[VAR] / "var_d16.pth"
    cut, other = tmp_path / "cut.pth", tmp_path / "other.pth"
    cut.write_bytes(whole.read_bytes()[:-900])
    torch.save({"x": torch.zeros(2)}, other)
    counts, unknown = tmp_path / "counts.pth", tmp_path / "unknown.dat"
    torch.save({"x": torch.zeros(2, dtype=torch.int64)}, counts)
    unknown.write_bytes(b"0")
    vae = releases[VAR] / "vae_ch160v4096z32.pth"
    pairs = ((cut, vae, cut), (other, vae, other), (whole, other, other))
    for file, beside, at_fault in (*pairs, (counts, vae, counts), (whole, unknown, unknown)):
        words = f"convert {file} {tmp_path / 'out'} --like var-d16 --with vae={beside}"
        line = refused(words)
        assert line.startswith(f"error: {at_fault} must ") and "specmm-" not in line
        assert not (tmp_path / "out").exists()


def test_a_published_name_becomes_a_folder_with_its_drafter(server, tmp_path):
    out = tmp_path / "out"
    name = "llamagen-t2i-xl-256-lantern"
    words = f"convert {name} {out} --dtype bfloat16 --json"
    succeed(words)
    pipe = specmm.ImagePipeline.from_pretrained(out, torch_dtype=torch.float32)
    own = specmm.ImagePipeline.from_pretrained(name, torch_dtype=torch.bfloat16)
    assert pipe.parts.drafters.keys() == own.parts.drafters.keys() == {"eagle"}
    theirs = own.transformer.float().state_dict()
    for key, value in pipe.transformer.state_dict().items():
        assert torch.equal(value, theirs[key]), key
    again = run(words)
    assert again.exit_code == 2 or "must be a new folder" in str(again.exception)
