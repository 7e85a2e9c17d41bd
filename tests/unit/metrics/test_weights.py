from pathlib import Path

import pytest
import torch

from specmm.metrics.weights import KNOWN, fingerprint, locate, main_file, weights_table

FIDELITY = "weights-inception-2015-12-05-6726825d.pth"


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECMM_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights")
    return path


def test_local_folder_before_torch_hub(tmp_path: Path) -> None:
    hub = put(tmp_path / "hub/checkpoints" / FIDELITY)
    assert locate("inception-fidelity") == hub
    local = put(tmp_path / "weights/inception-fidelity" / FIDELITY)
    assert locate("inception-fidelity") == local
    assert locate("inception-fidelity", hub) == hub == locate("inception-fidelity", hub.parent)


def test_hub_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "snapshot"
    for name in ("config.json", "tokenizer_config.json"):
        put(folder / name)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda repository, file: str(folder / file)
    )
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        locate("clip")
    put(folder / "model.safetensors")
    assert locate("clip") == folder and main_file(folder).name == "model.safetensors"


def test_missing_says_which_file_goes_where(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        locate("inception-fidelity")
    for part in (
        FIDELITY,
        "https://github.com/toshas/torch-fidelity",
        str(tmp_path / "weights/inception-fidelity"),
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=f"in {tmp_path}, got none"):
        locate("inception-fidelity", tmp_path)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'dinov2'"):
        locate("dino2")


def test_table_lists_all_and_how_to_get_them(tmp_path: Path) -> None:
    put(tmp_path / "hub/checkpoints" / FIDELITY)
    rows = {row["name"]: row for row in weights_table()}
    assert set(rows) == set(KNOWN) and rows["dinov2"]["found"] == "no"
    assert rows["inception-fidelity"]["found"].endswith(FIDELITY)
    assert all(row["licence"] and row["what"] and row["get"] for row in rows.values())


def test_fingerprint(tmp_path: Path) -> None:
    assert fingerprint(put(tmp_path / "w")) == "sha256:9a129038d9a00aed"
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, got neither"):
        main_file(tmp_path)
