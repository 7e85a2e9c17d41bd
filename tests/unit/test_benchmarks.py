"""The benchmarks' own code: arithmetic, names, resumable samples, bars and report, on a tiny random
model.
"""

import numpy as np
import pytest
import torch

from benchmarks import arithmetic, quality, serving
from benchmarks.acceptance import measure_acceptance, through_rank_one, widths_for
from benchmarks.bars import server_bars
from benchmarks.common import (
    balanced_labels,
    label,
    load_pipeline,
    merged,
    parse,
    read_results,
    write_results,
)
from benchmarks.report import write_report
from benchmarks.run import main, read_arguments
from benchmarks.samples import SampleSet, Setting
from benchmarks.settings import CONTENDERS, Options
from benchmarks.single import single_position
from benchmarks.speed import measure_speed
from recipes.emoji import EmojiSet
from specmm import methods
from specmm.core.decode import decode_plain
from specmm.core.randomness import Uniforms
from specmm.core.stats import Stats
from specmm.image_ar.autoencoder import VQConfig, VQModel
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline, LlamaGenSettings
from specmm.image_ar.tokens.target import Prompt, StaticTarget, log_likelihood
from specmm.metrics.features import FeatureSet

GPT = GPTConfig(16, 1, 2, 64, 16, num_classes=3, multiple_of=16)


class Thumbnails:
    """A stand-in for Inception: eight numbers a picture; counts the pictures it is shown."""

    def __init__(self):
        self.seen = 0

    def features(self, pictures, *, batch=32, progress=True):
        self.seen += len(pictures)
        flat = torch.as_tensor(pictures).float().flatten(1) / 255
        return FeatureSet(flat[:, :8] + flat.mean(1, keepdim=True), {"features": "thumbnails"})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    heads = {"block": BlockHead(BlockConfig(3, 2, GPT, aux_layers=(0,)))}
    vq = VQModel(VQConfig(64, 8, 32, (1, 2), 1, 16))
    trees = {"speculative": (2, 1, 1), "lantern++": (2, 1)}
    settings = LlamaGenSettings(cfg=1.5, acceptance=((0.4, 0.2, 0.1),) * 3, trees=trees)
    folder = tmp_path_factory.mktemp("model")
    LlamaGenPipeline(Transformer(GPT), vq, heads, settings).save_pretrained(folder)
    return folder


@pytest.fixture
def options(model, tmp_path):
    contenders = (methods.AR(), methods.Speculative(), methods.LanternPP(lambda_=3.0, k=5))
    sizes = dict(repeats=2, samples=6, batch=2, pictures=2, budgets=(4,))
    places = dict(model=model, out=tmp_path / "out", cache=tmp_path / "cache")
    return Options(**places, **sizes, threads=1, dtype=torch.float32, methods=contenders)


@pytest.fixture
def emoji(monkeypatch):
    def load(folder, split="train", size=48):
        count = {"train": 12, "test": 4}[split]
        pictures = np.random.default_rng(count).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        return EmojiSet(pictures, np.arange(count) % 3, [""] * count, ["a", "b", "c"])

    monkeypatch.setattr(quality.emoji, "load", load)


def test_ideal_and_realised():
    stats = Stats(
        tokens=80, rounds=20, batch_rounds=20, seconds=1.0, draft_seconds=0.2, verify_seconds=0.6
    )
    found = arithmetic.round_times(stats, baseline_seconds=3.0, baseline_tokens=100)
    assert found["tau"] == 4 and found["draft_ms"] == pytest.approx(10)
    assert found["verify_ms"] == pytest.approx(30)
    assert found["ideal"] == pytest.approx(4 * 0.03 / 0.04)
    assert found["loop_speedup"] == pytest.approx(0.03 / (1.0 / 80))
    assert found["realised"] == pytest.approx(0.8) == pytest.approx(1 - found["host_overhead"])
    assert arithmetic.speedup([2.0, 4.0, 9.0], [1.0, 2.0, 2.0]) == 2
    assert arithmetic.quartiles([2.0], [1.0]) == (2, 2)
    assert arithmetic.level_rates([5, 3, 2]) == [0.5, 0.4]


def test_methods_as_text():
    contenders = [method for own in CONTENDERS.values() for method in own]
    for method in (*contenders, methods.Speculative(tree=(3, 2, 1))):
        assert parse(label(method)) == method
    with pytest.raises(ValueError, match="read name"):
        parse("lantern++(lambda_=")
    with pytest.raises(ValueError, match="did you mean 'lambda_'"):
        parse("lantern++(lamda_=2)")


def test_every_prefix_of_the_labels_is_balanced():
    real = np.repeat([0, 1, 2], [60, 30, 10])
    long = balanced_labels(real, 50)
    short = balanced_labels(real, 20)
    assert (long[:20] == short).all()
    for n in range(1, 51):
        assert (
            np.abs(np.bincount(long[:n], minlength=3) - n * np.array([0.6, 0.3, 0.1])).max() <= 1.5
        )


def test_samples_resume_and_are_the_same_whoever_made_them(model, tmp_path):
    pipe = load_pipeline(model, torch.float32)
    labels = np.array([0, 1, 2, 0])
    method = methods.Speculative()
    found = SampleSet.of(tmp_path, pipe, model, method, 2)
    parts = ((labels[:2], 0), (labels[2:], 2))
    setting = Setting("speculative", pipe, {"method": method})
    assert all(found.make(setting, *part, pipe.target()) for part in parts)
    assert found.count() == 4 and found.counts()["certificate"] == "exact"
    tokens, loglik = found.arrays("tokens", "log_likelihood")
    again = log_likelihood(
        pipe.target(), Prompt(torch.from_numpy(labels)), torch.from_numpy(tokens).long()
    )
    assert torch.allclose(again, torch.from_numpy(loglik), atol=1e-5)
    assert not found.make(setting, *parts[0])
    found.file(0).unlink()
    assert found.count() == 0  # a gap: what lies after it waits
    found.make(setting, *parts[0], pipe.target())
    assert (found.arrays("tokens")[0] == tokens).all()
    other = SampleSet.of(tmp_path, pipe, model, methods.Speculative(rule="recursive"), 2)
    assert other.folder != found.folder


def test_the_nearest_training_picture_is_by_all_pixels():
    grey = np.stack([np.full((4, 4, 3), value, np.uint8) for value in (0, 51, 255)])
    assert quality.nearest(grey, grey).tolist() == [0, 0, 0]
    assert quality.nearest(grey[:1], grey[1:]).tolist() == pytest.approx([0.2])


def test_quality_stops_in_time_and_goes_on_later(options, emoji):
    network = Thumbnails()
    options.minutes = 0.0
    assert quality.measure_quality(options, network) == []
    options.minutes = None
    rows = {r["method"]: r for r in quality.measure_quality(options, network)}
    assert rows["ar"]["samples"] == 6 and rows["ar"]["fid_ratio"] == 1
    assert rows["ar"]["compared_at"] == 6
    assert rows["speculative"]["certificate"] == "exact" and rows["speculative"]["tau"] > 1
    seen = network.seen
    quality.measure_quality(options, network)
    assert network.seen == seen  # everything was kept
    assert read_results(options.out, "quality")["rows"][-1]["method"] == "real against real"


def test_static_step_gives_the_plain_tokens(model):
    pipe = load_pipeline(model, torch.float32)
    plain = pipe(
        classes=[1], generator=[torch.Generator().manual_seed(3)], method="ar", output_type="latent"
    )
    target = StaticTarget(pipe.target())
    target.run = target.logits_of  # as it is
    for _ in range(2):
        uniforms = Uniforms([torch.Generator().manual_seed(3)])
        *_, found = decode_plain(target, Prompt(torch.tensor([1])), target.length, uniforms)
        assert torch.equal(found.tokens, plain.tokens)


@pytest.mark.slow
def test_speed_acceptance_and_their_report(options):
    rows = measure_speed(options)
    assert [r["method"] for r in rows] == ["ar", "ar", "speculative", "lantern++(lambda_=3.0, k=5)"]
    assert sum(r["baseline"] for r in rows) == 1 and all(r["pictures"] == 2 for r in rows)
    assert rows[3]["certificate"] == "bounded" and rows[3]["tv"] >= 0
    found = measure_acceptance(options)
    assert {"block", "point mass", "traversal", "greedy multi-draft"} <= {r["rule"] for r in found}
    assert all(len(r["tree"]) - 1 == r["nodes"] for r in found if r["form"] != "sequoia")
    text = write_report(options.out).read_text()
    titles = ("Bars", "Speed", "Acceptance by rule", "One position")
    assert "tau.png" in text and all(f"## {title}" in text for title in titles)


def test_single_position_stays_below_the_bound():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(16, 12, generator=generator).pow(3) for _ in range(2))
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    rows = single_position(p, q, None, drafts=(1, 3))
    for row in rows:
        bound = row["bound (independent drafts)"]
        assert row["recursive, with replacement"] <= bound + 0.03
    assert rows[0]["bound (independent drafts)"] == pytest.approx(rows[0]["overlap"], abs=1e-5)


def test_spines():
    assert through_rank_one((2, 1)).parents[0].tolist() == [-1, 0, 0, 2]
    for budget in (4, 8, 16, 26):
        widths = widths_for(budget, 5, 0.7)
        assert sum(widths) == budget and list(widths) == sorted(widths, reverse=True)
        assert min(widths) >= 1


def test_command_line(tmp_path, capsys):
    asked = ["quality", "--samples", "64", "--dtype", "float32"]
    found = read_arguments([*asked, "--methods", "ar", "--methods", "lantern++(k=5)"])
    assert found.part == "quality" and found.samples == 64 and found.dtype == torch.float32
    assert found.methods[1].k == 5
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert main(["speed", "--model", "pocket/nothing", "--out", str(tmp_path)]) == 2
    assert "unknown pocket model" in capsys.readouterr().err


def test_results_read_back(tmp_path):
    write_results(tmp_path, "x", [{"a": 1, "b": [1, 2]}, {"a": 2, "c": "y"}], {"machine": "m"})
    assert read_results(tmp_path, "x")["rows"][1] == {"a": 2, "c": "y"}
    assert (tmp_path / "x.csv").read_text().splitlines() == ["# machine: m", "a,c", "1,", "2,y"]
    assert read_results(tmp_path, "y") is None


def test_rows_of_other_parts_stay(tmp_path):
    def row(drafter, batch, ms):
        return {"drafter": drafter, "batch": batch, "ms": ms}

    new = [row("dflash", 1, 7), row("dflash", 4, 8)]
    assert merged(tmp_path, "x", new, ("drafter", "batch")) == new
    write_results(tmp_path, "x", [row("mtp", 1, 5), row("dflash", 1, 5)], {})
    assert merged(tmp_path, "x", new, ("drafter", "batch")) == [row("mtp", 1, 5), *new]


def test_bars_of_a_server_hold_it_against_the_faster_of_two():
    own = {"server": "specmm serve", "clients": 8, "answers": 4, "equal": 4, "over_plain": 1.2}
    row = own | {"over_theirs": 9.0, "over_batched": 1.5}
    late = {"server": "specmm serve", "clients": "8, long prompts", "longest_pause_rounds": 2.5}
    late |= {"first_token_p50_over_batched": 0.4, "long_first_token_over_batched": 0.6}
    found = {bar.what: bar for bar in server_bars([row, late], "pocket/coder")}
    name = "tokens/s of specmm serve over transformers serve, pocket/coder, {} clients"
    assert found[name.format(8)].found == "1.50×" and found[name.format(8)].met is False
    assert found[name.format(16)].met is None
    assert found["the same over --method ar, pocket/coder, 8 clients"].met
    [equal] = (bar for what, bar in found.items() if what.startswith("answers"))
    assert equal.met and equal.found == "4 of 4"
    assert [bar.met for bar in list(found.values())[-2:]] == [False, True]


def test_no_server_is_asked_the_same_twice():
    found = serving.heads("def", 3)
    assert len(set(found)) == len(found) > 400
    asked = serving.Asked(iter({"prompt": head} for head in found[:3]), lambda body: "a")
    assert [body["prompt"] for body in asked.take(2)] == found[:2]
    with pytest.raises(ValueError, match="not so many"):
        asked.take(2)
    assert asked.equal({}, " a") and not asked.equal({}, "b")
