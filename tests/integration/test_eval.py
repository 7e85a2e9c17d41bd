"""``specmm eval`` end to end on a network small enough for a test: what it prints, writes and
refuses.
"""

import json
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from specmm.cli.evaluate.sources import SourceReader, is_file_of_numbers
from specmm.metrics.extractors import Extractor
from specmm.metrics.features import FeatureSet
from specmm.metrics.measurement import Interval, Measurement
from tests import commands, odd_files
from tests.commands import run, succeed

SIDE = 8


def evaluate(command, *words):
    return succeed(f"eval {command}", *words)


def as_json(command, *words):
    return commands.as_json(f"eval {command}", *words)


def refused(command, *words):
    """The last line of a command that must fail as a user's mistake; others are of its progress."""
    result = run(f"eval {command}", *words)
    assert result.exit_code == 2 and result.stdout == "", (result.output, result.exception)
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features: a and b of one distribution, c of another, other of another network."""
    folder = tmp_path_factory.mktemp("features")
    generator = torch.Generator().manual_seed(0)
    for name, shift in (("a", 0.0), ("b", 0.0), ("c", 0.7)):
        values = torch.randn(96, 6, generator=generator) + shift
        FeatureSet(values, {"features": "inception made up"}).save(folder / f"{name}.npz")
    FeatureSet(torch.randn(96, 6, generator=generator), {"features": "another"}).save(
        folder / "other.npz"
    )
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve pictures."""
    (tmp_path / "pictures").mkdir()
    for i, pixels in enumerate(noise()):
        Image.fromarray(pixels).save(tmp_path / f"pictures/{i:02d}.png")
    return tmp_path / "pictures"


def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (12, SIDE, SIDE, 3), np.uint8)


@pytest.fixture
def tiny_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A network of four pixels in place of every other; the names asked for."""
    asked = []

    def extractor(name: str, **_: Any) -> Extractor:
        asked.append(name)
        return Extractor(
            name, {"features": f"{name} pixels"}, lambda x: x.flatten(1)[:, :4].float(), lambda x: x
        )

    monkeypatch.setattr(
        Extractor, "_run", lambda self, rows, network: network(self.prepare(torch.stack(rows)))
    )
    monkeypatch.setattr("specmm.metrics.extractors.extractor", extractor)
    return asked


# ---- distances


def test_every_distance_of_stored_features(sets):
    one = sets / "a.npz"
    two = sets / "c.npz"
    found = as_json("fid", one, two)
    assert found["metric"] == "fid" and found["name"] == "a"
    assert found["protocol"]["counts"] == [96, 96]
    assert as_json("fid", one, one)["value"] == pytest.approx(0, abs=1e-6)
    with_interval = as_json("fid", one, two, "--interval", "--name", "mine")
    assert with_interval["value"] == pytest.approx(found["value"])
    assert with_interval["name"] == "mine"
    assert with_interval["interval"]["low"] < found["value"] < with_interval["interval"]["high"]
    assert as_json("fd", one, two)["metric"] == "fd"
    kid = as_json("kid", one, two, "--subset-size", 32, "--subsets", 5)
    assert kid["protocol"]["subset_size"] == 32 and "subsets_std" in kid["parts"]
    only = as_json("kid", one, two, "--subset-size", 32, "--subsets", 5, "--subsets-only")
    assert kid["protocol"]["estimate"] == "whole sets"
    assert only["protocol"]["estimate"] == "mean over subsets" and only["protocol"]["subsets"] == 5
    assert only["value"] == pytest.approx(kid["parts"]["subsets_mean"])
    said = evaluate("kid", one, two, "--subset-size", 32, "--subsets", 5, "--subsets-only").stdout
    assert "mean over subsets" in said and "subset size  32" in said
    assert "--interval needs the whole-set estimate" in refused(
        "kid", one, two, "--subsets-only", "--interval"
    )
    assert [m["metric"] for m in as_json("pr", one, two)["results"]] == ["precision", "recall"]
    np.savez(sets / "logits.npz", FeatureSet.load(one).values.numpy())
    assert as_json("is", sets / "logits.npz", "--splits", 2)["protocol"]["splits"] == 2


def test_the_table_says_what_was_measured(sets, tmp_path):
    few = FeatureSet.load(sets / "a.npz")
    FeatureSet(few.values[:5], few.protocol).save(tmp_path / "few.npz")
    text = evaluate("fid", tmp_path / "few.npz", sets / "b.npz", "--json").stdout
    assert "5 samples of 6 features" in json.loads(text)["protocol"]["note"]
    text = evaluate("fid", tmp_path / "few.npz", sets / "b.npz").stdout
    assert text.startswith("FID ") and "counts    5, 96" in text and "inception made up" in text
    assert "note      covariance of rank < 6: 5 samples of 6 features" in text
    assert "95% bootstrap of 1000" in evaluate("pr", sets / "a.npz", sets / "b.npz").stdout


def test_pictures_of_every_kind_are_read_alike(folder, tmp_path, tiny_network):
    np.savez(tmp_path / "pictures.npz", images=noise())
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, file.name)
    for other in (tmp_path / "pictures.npz", tmp_path / "pictures.zip", f"{folder}/*.png"):
        found = as_json("fid", folder, other, "--workers", 0)
        assert found["value"] == pytest.approx(0, abs=1e-5)
        assert found["protocol"]["counts"] == [12, 12]
    assert tiny_network == ["inception"] * 3  # loaded once for both sides
    assert as_json("fd", folder, folder, "--features", "efficientnet-lite0")["metric"] == "fd"
    np.savez(tmp_path / "bare.npz", noise().reshape(12, -1)[:, :4].astype(np.float32))
    assert as_json("fid", folder, tmp_path / "bare.npz")["value"] == pytest.approx(0, abs=1e-5)


def test_bad_pictures_are_named_and_left_out_on_request(folder, tiny_network):
    (folder / "05.png").write_bytes(b"no picture")
    assert "05.png" in refused("fid", folder, folder)
    result = evaluate("fid", folder, folder, "--skip-bad", "--json")
    found = json.loads(result.stdout)
    assert found["protocol"]["counts"] == [11, 11]
    numbers = {"files": 12, "pictures": 11, "unreadable": 1}
    assert found["protocol"]["files"] == {str(folder): numbers}
    assert "left out" in result.stderr and "05.png" in result.stderr


@pytest.mark.parametrize("command", ["fid", "kid"])
@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_every_file_is_counted_or_named(command, kind, folder, tmp_path, tiny_network):
    """Some forty of each kind that people have."""
    place = tmp_path / f"odd.{kind}"
    expected = getattr(odd_files, f"fill_{kind}")(place)
    assert "must be a whole picture" in refused(command, place, folder)
    result = evaluate(command, place, folder, "--skip-bad", "--json", "--workers", 0)
    protocol = json.loads(result.stdout)["protocol"]
    assert protocol["counts"] == [expected["pictures"], 12]
    assert protocol["files"] == {str(place): expected, str(folder): {"files": 12, "pictures": 12}}
    assert f"{place}: {expected['files']} files, " in result.stderr  # before anything is read
    assert result.stderr.count("left out ") == expected["unreadable"]
    text = evaluate(command, place, folder, "--skip-bad", "--workers", 0).stdout
    assert f"{expected['hidden']} hidden, " in text and f"{folder}: 12 files, 12 pictures" in text


def test_features_and_statistics_are_written(folder, sets, tmp_path, tiny_network):
    assert as_json("features", folder, "--out", tmp_path / "f.npz")["width"] == 4
    assert as_json("fid", folder, tmp_path / "f.npz")["value"] == pytest.approx(0, abs=1e-5)
    for layout, name in (("ours", "s.npz"), ("clean-fid", "c.npz"), ("torch-fidelity", "t.pt")):
        facts = as_json("stats", sets / "a.npz", "--out", tmp_path / name, "--format", layout)
        assert facts["count"] == 96 and facts["width"] == 6
        value = as_json("fid", sets / "a.npz", tmp_path / name)["value"]
        assert value == pytest.approx(0, abs=1e-6)
    told = evaluate("stats", sets / "a.npz", "--out", tmp_path / "x.npz").stderr
    assert "96 samples of 6 features" in told
    out = f"--out {tmp_path}/y.npz --format"
    assert "spatial" in refused(f"stats {sets}/a.npz {out} adm")
    assert "did you mean 'clean-fid'" in refused(f"stats {folder} {out} cleanfid")
    assert "written to .npz" in refused("features", folder, "--out", tmp_path / "f.txt")


def test_mistakes_about_sources(sets, folder, tmp_path, tiny_network):
    told = refused("fid", sets / "a.npz", sets / "other.npz")
    assert "same protocol, got features='inception made up' and 'another'" in told
    assert "same width, got 4 and 6" in refused("kid", folder, sets / "a.npz")
    tiny_network.clear()
    for sides in ((tmp_path / "nothing", folder), (folder, tmp_path / "nothing")):
        assert "nothing must be or hold pictures" in refused("fid", *sides)
    assert "got an address; pass a folder" in refused("fid", "s3://bucket/job", folder)
    assert not tiny_network  # found out before a network is loaded
    (tmp_path / "empty").mkdir()
    assert "got none" in refused("fid", tmp_path / "empty", folder)
    (tmp_path / "broken.npz").write_bytes(b"PK nonsense")
    assert "got a broken one" in refused("fid", tmp_path / "broken.npz", folder)
    assert "use specmm eval fd" in refused("fid", folder, folder, "--features", "dinov2")
    assert "device must be" in refused("fid", folder, folder, "--device", "tpu9")
    assert SourceReader().device == "auto"  # as of every other command
    single = tmp_path / "single"
    single.mkdir()
    (folder / "00.png").rename(single / "00.png")
    assert "at least 2 samples" in refused("fid", single, folder)


def test_damaged_and_odd_archives_are_named(sets, tmp_path):
    data = bytearray((sets / "a.npz").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "flipped.npz").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "odd.npz", "w") as odd:
        odd.writestr("readme.txt", "hello")
    for sides in (f"{tmp_path}/flipped.npz {sets}/c.npz", f"{sets}/c.npz {tmp_path}/flipped.npz"):
        assert "flipped.npz must be a whole numpy file" in refused(f"fd {sides}")
    assert "odd.npz must hold an array" in refused("kid", tmp_path / "odd.npz", sets / "c.npz")


def test_pictures_in_an_archive_are_not_read_to_see_what_they_are(tmp_path):
    """50,000 samples as ADM saves them are 10 GB, which were read whole four times."""
    np.savez(tmp_path / "samples.npz", np.zeros((64, 256, 256, 3), np.uint8))
    np.savez(tmp_path / "features.npz", np.zeros((512, 2048), np.float32))
    tracemalloc.start()
    assert not is_file_of_numbers(str(tmp_path / "samples.npz"))
    assert is_file_of_numbers(str(tmp_path / "features.npz"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


def test_unknown_networks_are_suggested(folder):
    assert "did you mean 'inception'" in refused("kid", folder, folder, "--features", "inceptoin")


# ---- comparing


def test_compare_tests_and_says_it_in_a_sentence(sets):
    a, b, c = (sets / f"{n}.npz" for n in "abc")
    same = as_json("compare", a, b)
    assert not same["differ"] and same["p_value"] > 0.05
    assert same["verdict"].startswith("No difference beyond")
    worse = as_json("compare", c, a, "--reference", b, "--permutations", 99)
    assert worse["differ"] and worse["p_value"] == 0.01
    assert worse["loss"]["interval"]["low"] > 0
    assert "B is closer to the reference" in worse["verdict"]
    text = evaluate("compare", a, c, "--reference", b, "--seed", 1).stdout
    assert text.startswith("The two sets differ by more than sampling noise")
    assert "A is closer" in text
    assert "permute more" in refused("compare", a, b, "--permutations", 5)


def test_compare_of_results(sets, tmp_path):
    def result(name: str, value: float, **protocol: Any) -> Path:
        interval = Interval(value - 1, value + 1, 0.95, "jackknife")
        found = Measurement("fid", value, {"resize": "none", **protocol}, interval=interval)
        (tmp_path / name).write_text(json.dumps(found.to_json()))
        return tmp_path / name

    one = result("one.json", 10.0)
    two = result("two.json", 13.0)
    found = as_json("compare", one, two)["differences"][0]
    assert found["value"] == -3 and found["interval"]["high"] < 0
    assert "more than sampling noise" in evaluate("compare", one, two).stdout
    other = result("other.json", 10.0, resize="antialias")
    assert "same protocol, got resize='none' and 'antialias'" in refused("compare", one, other)
    assert "two results" in refused("compare", one, sets / "a.npz")
    (tmp_path / "odd.json").write_text("[]")
    assert "odd.json must hold one result" in refused("compare", one, tmp_path / "odd.json")


# ---- answers


def test_answers(tmp_path):
    given = [
        {"question_id": i, "answers": [{"answer": a} for a in ["two"] * 8 + ["3"] * 2]}
        for i in range(4)
    ]
    (tmp_path / "answers.json").write_text(json.dumps({"annotations": given}))
    told = [{"question_id": i, "answer": a} for i, a in enumerate(("2", "Two.", "3", ""))]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, told)))
    common = ("vqa", tmp_path / "p.jsonl", "--answers", tmp_path / "answers.json")
    found = as_json(*common)
    assert found["value"] == pytest.approx((1 + 1 + 0.6 + 0) / 4) and found["name"] == "p"
    assert as_json(*common, "--metric", "exact")["value"] == 0.25
    assert as_json(*common, "--metric", "anls")["metric"] == "anls"
    assert as_json(*common, "--metric", "relaxed")["protocol"]["tolerance"] == 0.05
    text = evaluate(*common).stdout
    assert text.startswith("VQA accuracy 0.6500  [") and "1 of 4 predictions are empty" in text
    assert "did you mean 'anls'" in refused(*common, "--metric", "anl")
    assert "did you mean 'protocol'" in refused(*common, "--variant", "protocoll")
    (tmp_path / "p.jsonl").write_text('{"question_id": 0, "answer": "2"}\nnot json')
    assert "line 2 must be JSON" in refused(*common)
    assert "No such file" in refused(f"vqa {tmp_path}/none --answers {tmp_path}/answers.json")


# ---- the rest


def test_report_draws_what_bench_and_eval_said(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"method": m, "speedup": s, "certificate": {"kind": k}}
        for m, s, k in (("ar", 1.0, "exact"), ("x", 2.0, "b"))
    ]
    (tmp_path / "bench.json").write_text(json.dumps(rows))
    for name, value in (("ar", 10.0), ("x", 11.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(Measurement("fid", value, {}).to_json()))
    files = [tmp_path / f"{n}.json" for n in ("bench", "ar", "x")]
    found = as_json("report", *files, "--out", tmp_path / "out")
    assert [r["fid_ratio"] for r in found["rows"]] == [1, pytest.approx(1.1)]
    assert "| x | 2.000 | b | 11.0 | 1.100 |" in (tmp_path / "out/report.md").read_text()
    assert Image.open(tmp_path / "out/report.png").size == (1080, 660)
    assert "with --name" in refused("report", files[0], "--out", tmp_path / "out")


def test_weights_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECMM_WEIGHTS", str(tmp_path))
    text = evaluate("weights").stdout
    assert str(tmp_path) in text and "dinov2" in text and "efficientnet-lite0" in text
    assert {r["name"] for r in as_json("weights")["weights"]} >= {"inception", "clip"}


def test_clip_takes_a_prompt_a_picture(folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n\nb\n")
    words = f"clip {folder} --prompts {tmp_path}/prompts.txt"
    assert "line 2 must hold a prompt" in refused(words)
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    line = refused(words, "--weights", tmp_path)
    assert "clip" in line and "model.safetensors" in line
    assert "needs CLIP's features, got --features dinov2" in refused(words, "--features", "dinov2")


def test_reconstruction_of_pairs(tmp_path, tiny_network):
    pictures = np.random.default_rng(1).integers(0, 256, (8, 16, 16, 3), np.uint8)
    for name, images in (("a", pictures), ("b", pictures // 2)):
        np.savez(tmp_path / f"{name}.npz", images=images)
    common = ("reconstruction", tmp_path / "b.npz", tmp_path / "a.npz")
    assert [m["metric"] for m in as_json(*common)["results"]] == ["psnr", "ssim", "rfid"]
    assert [m["metric"] for m in as_json(*common, "--no-rfid")["results"]] == ["psnr", "ssim"]
    assert "in pairs" in refused(*common, "--skip-bad")


def test_fid_and_is_refuse_what_they_are_not_of(sets):
    assert "use specmm eval fd" in refused("fid", sets / "other.npz", sets / "other.npz")
    assert "must hold class logits" in refused("is", sets / "a.npz")
    line = refused(f"compare {sets}/a.npz {sets}/b.npz --paired --skip-bad")
    assert "would shift the pairs" in line
