import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from specmm.cli import app
from specmm.metrics.inputs import open_pictures
from specmm.metrics.networks import CLIP
from specmm.metrics.paired import clip_score
from tests import odd_files
from tests.commands import as_json

TEXTS = ["a cat", "dog", "the green house", "x", "abc def"]


def pictures() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [
        generator.integers(0, 256, (32 + 3 * i, 40, 3), dtype=np.uint8) for i in range(len(TEXTS))
    ]


class TensorFeatures:
    """The model as torchmetrics expects it: features as tensors, which transformers 5 wraps."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config

    def to(self, device: torch.device) -> "TensorFeatures":
        return self

    def get_image_features(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model.get_image_features(pixels).pooler_output.detach()

    def get_text_features(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model.get_text_features(tokens, mask).pooler_output.detach()


def test_agrees_with_torchmetrics(tiny_clip: Path) -> None:
    functional = pytest.importorskip("torchmetrics.functional.multimodal.clip_score")
    from transformers import AutoProcessor, CLIPModel

    model = CLIPModel.from_pretrained(tiny_clip).eval()
    processor = AutoProcessor.from_pretrained(tiny_clip)
    given = [torch.from_numpy(p).permute(2, 0, 1) for p in pictures()]
    scores, _ = functional._clip_score_update(given, TEXTS, TensorFeatures(model), processor)
    found = clip_score(pictures(), TEXTS, CLIP(weights=tiny_clip), batch=2)
    assert found.value == pytest.approx(float(scores.clamp(min=0).mean()), rel=1e-5)
    assert found.parts["paper_scale_2.5"] == pytest.approx(found.value / 40)
    assert found.protocol["counts"] == [5] and found.protocol["scale"] == 100
    assert found.interval is not None and found.interval.low < found.value < found.interval.high


@pytest.mark.parametrize(
    ("texts", "kind"), [(TEXTS[:3], "first"), ([*TEXTS, "more"], "second"), ([], "first")]
)
def test_counts_must_match(tiny_clip: Path, texts: list[str], kind: str) -> None:
    with pytest.raises(ValueError, match=rf"no partner for number \d of the {kind}"):
        clip_score(pictures(), texts, CLIP(weights=tiny_clip))


def test_nothing_is_refused(tiny_clip: Path) -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        clip_score([], [], CLIP(weights=tiny_clip))


def clip(folder: Path, prompts: Path, weights: Path) -> Any:
    command = ["eval", "clip", folder, "--prompts", prompts, "--weights", weights, "--json"]
    return CliRunner().invoke(app, [str(part) for part in command])


def test_prompts_find_their_pictures(tiny_clip: Path, tmp_path: Path) -> None:
    """Pictures 0 to 11 come as 0, 1, 10, 11, 2, …: lines in the order of the numbers miss them."""
    (tmp_path / "results").mkdir()
    generator = np.random.default_rng(0)
    shown = [generator.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(12)]
    texts = [f"{'a' * n} cat" for n in range(12)]
    for number, pixels in enumerate(shown):
        Image.fromarray(pixels).save(tmp_path / f"results/{number}.png")
    lines, index = tmp_path / "prompts.txt", tmp_path / "index.jsonl"
    lines.write_text("\n".join(texts))
    rows = [{"file": f"results/{n}.png", "prompt": text} for n, text in enumerate(texts)]
    index.write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = clip_score(shown, texts, CLIP(weights=tiny_clip)).value
    found = json.loads(clip(tmp_path / "results", index, tiny_clip).stdout)
    assert found["value"] == pytest.approx(right) and "note" not in found["protocol"]
    wrong = json.loads(clip(tmp_path / "results", lines, tiny_clip).stdout)
    assert wrong["value"] != pytest.approx(right)
    assert "11.png is before 2.png" in wrong["protocol"]["note"]
    index.write_text("".join(json.dumps(row) + "\n" for row in rows[:-2]))
    assert "10.png of 2 without" in clip(tmp_path / "results", index, tiny_clip).stderr
    index.write_text(json.dumps({"file": "results/0.png", "class": "cat"}))
    message = clip(tmp_path / "results", index, tiny_clip).stderr
    assert "line 1 must hold texts file and prompt, got file, class" in message


@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_prompts_of_odd_files_and_odd_lines(tiny_clip: Path, tmp_path: Path, kind: str) -> None:
    """Every picture has its prompt, whatever lies beside it and whatever the prompt holds."""
    place = tmp_path / f"odd.{kind}"
    expected = getattr(odd_files, f"fill_{kind}")(place, with_bad=False)
    source = open_pictures(place)
    texts = [(odd_files.ODD_TEXTS[i % 5] + f" {i}") for i in range(len(source.files))]
    rows = [
        {"file": str(file.path.relative_to(tmp_path)), "member": file.member, "prompt": text}
        for file, text in zip(source.files, texts, strict=True)
    ]
    index, lines = tmp_path / "index.ndjson", tmp_path / "prompts.txt"
    index.write_bytes(odd_files.lines_of(rows))
    lines.write_bytes(("\ufeff" + "\r\n".join(texts)).encode())
    wanted = clip_score(source, texts, CLIP(weights=tiny_clip)).value
    for prompts in (index, lines):
        found = json.loads(clip(place, prompts, tiny_clip).stdout)
        assert found["value"] == pytest.approx(wanted, rel=1e-6)
        assert found["protocol"]["files"] == {str(place): expected}
    index.write_bytes(odd_files.lines_of([{**rows[0], "member": ["a"]}]))
    assert "line 1 must hold texts" in clip(place, index, tiny_clip).stderr


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_pictures_that_cannot_be_read_leave_their_prompts_out(
    tiny_clip: Path, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "some").mkdir()
    lines = [("a", 0), ("b", None), ("c", 1), ("d", 2), ("e", None)]
    for name, number in lines:
        file = tmp_path / f"some/{name}.png"
        file.write_bytes(b"no picture")
        if number is not None:
            Image.fromarray(pictures()[number]).save(file)
    prompts = tmp_path / f"prompts.{kind}"
    row = {"txt": "{0}", "jsonl": '{{"file": "some/{0}.png", "prompt": "{0}"}}'}[kind]
    prompts.write_text("".join(f"{row}\n".format(name) for name, _ in lines))
    words = [tmp_path / "some", "--prompts", prompts, "--weights", tiny_clip]
    found = as_json("eval clip", *words, "--skip-bad")
    whole = clip_score(pictures()[:3], ["a", "c", "d"], CLIP(weights=tiny_clip))
    assert found["value"] == pytest.approx(whole.value, abs=1e-9)
    counts = {"files": 5, "pictures": 3, "unreadable": 2}
    assert found["protocol"]["files"] == {str(tmp_path / "some"): counts}
    assert "b.png must be a picture" in clip(tmp_path / "some", prompts, tiny_clip).stderr
