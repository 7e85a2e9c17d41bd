"""Published models by name, from a hub on this machine: only the files they need are fetched, and
they draw what the same weights draw from our own folders.
"""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from typer.testing import CliRunner

import specmm
from specmm import zoo
from specmm.cli import app
from specmm.zoo import POCKET, hub, published
from tests.hub_server import Hub, attached

LLAMAGEN, VAR, CODE, MAR = (
    "FoundationVision/LlamaGen",
    "FoundationVision/var",
    "Zigeng/VAR_CoDe",
    "jadechoghari/mar",
)


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
    return {str(f.relative_to(root)): f for f in root.glob("*/*") if f.is_dir()}


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    """The registry with the sizes of the pocket models, which its files are here."""
    read = json.loads(published.REGISTRY.read_text())
    transformers = {"llamagen": "llamagen/transformer", "mar": "mar/transformer"}
    vaes = {"var": "var/vae", "mar": "mar/vae"}
    for facts in read["models"].values():
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


@pytest.mark.parametrize("name", FAMILIES)
def test_a_name_draws_what_its_weights_draw_and_fetches_its_files_alone(name, server):
    same, options, files = FAMILIES[name]
    pipe = specmm.ImagePipeline.from_pretrained(name, torch_dtype=torch.float32)
    assert sorted(f.rpartition("/")[2] for f in server.fetched) == sorted(files)
    own = specmm.ImagePipeline.from_pretrained(same, torch_dtype=torch.float32)
    for part in ("transformer", "vq", "vae", "small"):
        if part in pipe.components:
            pairs = zip(*(getattr(p, part).state_dict().values() for p in (pipe, own)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), part
    if name in DRAWN:
        assert torch.equal(drawn(pipe, **options), drawn(own, **options))
    assert pipe.settings.classes[207] == "golden retriever"
    assert pipe.settings.cfg == published.published_models()[name].settings["cfg"]


def test_a_file_of_a_repository_is_a_model(server):
    pipe = specmm.ImagePipeline.from_pretrained(VAR, file="var_d30.pth", torch_dtype=torch.float32)
    assert pipe.transformer.config.depth == sizes("var/transformer")["depth"]
    with pytest.raises(ValueError, match=r"did you mean 'var_d30.pth'\?"):
        specmm.ImagePipeline.from_pretrained(VAR, file="var_d30.pt")
    with pytest.raises(ValueError, match=r"holds several models, give file=…, one of var_d16"):
        specmm.ImagePipeline.from_pretrained(VAR)


def test_the_command_line_draws_by_name(server, tmp_path):
    given = ["generate", "var-d30", "--class", "7", "--cfg", "1.5", "--dtype", "float32", "--json"]
    run = CliRunner().invoke(app, [*given, "--seed", "1", "--out", str(tmp_path / "out")])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["pictures"] == 1


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
    with pytest.raises(ValueError, match=r"hub http.* cannot be reached .*cache lacks var_d16"):
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
    run = CliRunner().invoke(app, ["zoo", "--published", "--json"])
    models = {one["name"]: one for one in json.loads(run.stdout)}
    assert len(models) > 40
    for one in models.values():
        assert one["licence"] and one["repositories"] and one["what"]
        assert set(one["with"]) <= set(models)
        assert all(models[other]["name"] for other in one["with"])
    table = CliRunner().invoke(app, ["zoo", "--published"]).stdout
    assert all(f"{name} " in table for name in models)


def test_files_become_a_folder_of_ours(server, releases, tmp_path):
    out = tmp_path / "out"
    source = tmp_path / "mine.pth"
    shutil.copy(releases[VAR] / "var_d16.pth", source)
    other = f"vae={releases[VAR] / 'vae_ch160v4096z32.pth'}"
    given = ["convert", str(source), str(out), "--like", "var-d16", "--with", other, "--json"]
    run = CliRunner().invoke(app, given)
    assert run.exit_code == 0, run.output
    assert not server.fetched
    pipe = specmm.ImagePipeline.from_pretrained(out, torch_dtype=torch.float32)
    zoo.LOCATED.clear()
    named = specmm.ImagePipeline.from_pretrained("var-d16", torch_dtype=torch.float32)
    assert torch.equal(drawn(pipe), drawn(named))
    assert not list(out.rglob("*.pth"))
