import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from specmm.metrics.features import FeatureSet
from specmm.metrics.frechet import FeatureStatistics, frechet_distance
from specmm.metrics.references import Layout, Reference, read_reference, write_reference

PROTOCOL = {"features": "toy 12", "weights": "sha256:ab"}


def features(seed: int = 0, width: int = 12) -> FeatureSet:
    values = torch.rand(90, width, generator=torch.Generator().manual_seed(seed))
    return FeatureSet(values, dict(PROTOCOL))


@pytest.fixture
def statistics() -> FeatureStatistics:
    return FeatureStatistics.of(features())


def write(found: FeatureStatistics, folder: Path, layout: Layout) -> Path:
    path = folder / f"{layout}{'.pt' if layout == 'torch-fidelity' else '.npz'}"
    spatial = FeatureStatistics.of(features(3, width=7)) if layout == "adm" else None
    write_reference(found, path, layout, spatial=spatial)
    return path


@pytest.mark.parametrize("layout", ["specmm", "clean-fid", "adm", "torch-fidelity"])
def test_round_trip_gives_the_same_distance(statistics, tmp_path, layout):
    found = read_reference(write(statistics, tmp_path, layout))
    other = features(1)
    expected = frechet_distance(other, statistics)
    result = frechet_distance(other, found)
    assert result.value == pytest.approx(expected.value, rel=1e-9)
    own = layout == "specmm"
    assert found.count == (90 if own else None)
    assert result.protocol["counts"] == [90, 90 if own else None]
    assert found.protocol == (PROTOCOL if own else {"source": f"{layout} statistics"})


def test_spatial_pair_of_adm(statistics, tmp_path):
    found = read_reference(write(statistics, tmp_path, "adm"), spatial=True)
    torch.testing.assert_close(found.mean, FeatureStatistics.of(features(3, width=7)).moments()[0])


def test_files_are_what_the_other_projects_read(statistics, tmp_path):
    mean, covariance = (m.numpy() for m in statistics.moments())
    for layout in ("specmm", "clean-fid", "adm"):
        with np.load(write(statistics, tmp_path, layout), allow_pickle=False) as data:
            np.testing.assert_array_equal(data["mu"], mean)
            np.testing.assert_array_equal(data["sigma"], covariance)
            assert ("mu_s" in data.files and data["sigma_s"].shape == (7, 7)) == (layout == "adm")


def test_torch_fidelity_reads_ours_and_we_its_own(statistics, tmp_path):
    utils = pytest.importorskip("torch_fidelity.utils")
    fid = pytest.importorskip("torch_fidelity.metric_fid")
    write(statistics, tmp_path, "torch-fidelity").rename(tmp_path / "cached.pt")
    options = {"cache": True, "cache_root": str(tmp_path), "verbose": False}
    theirs = utils.cache_lookup_one_recompute_on_miss("cached", lambda: 1 / 0, **options)
    computed = utils.cache_lookup_one_recompute_on_miss(
        "made", lambda: fid.fid_features_to_statistics(features(1).values.double()), **options
    )
    expected = fid.fid_statistics_to_metric(theirs, computed, False)["frechet_inception_distance"]
    made = read_reference(tmp_path / "made.pt")
    assert frechet_distance(made, read_reference(tmp_path / "cached.pt")).value == pytest.approx(
        expected, rel=1e-6
    )


def test_single_precision_and_pytorch_fid_files_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", mu=np.zeros(3, np.float32), sigma=np.eye(3, dtype=np.float32))
    found = read_reference(tmp_path / "a.npz")
    assert found.covariance.dtype == torch.float64
    assert found.protocol == {"source": "clean-fid statistics"}


def test_a_reference_of_other_features_is_refused(statistics, tmp_path):
    found = read_reference(write(statistics, tmp_path, "specmm"))
    with pytest.raises(ValueError, match="same width, got 9 and 12"):
        frechet_distance(torch.rand(30, 9), found)
    with pytest.raises(ValueError, match="weights='sha256:cd' and 'sha256:ab'"):
        frechet_distance(FeatureSet(torch.rand(30, 12), {"weights": "sha256:cd"}), found)


def test_nothing_is_unpickled(tmp_path):
    class Boom:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "boom",))

    torch.save({"mu": Boom(), "sigma": np.eye(2)}, tmp_path / "a.pt")
    np.savez(tmp_path / "b.npz", mu=np.array([Boom()], dtype=object), sigma=np.eye(1))
    (tmp_path / "c.npz").write_bytes(pickle.dumps({"mu": Boom()}))
    for name in ("a.pt", "b.npz", "c.npz"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            read_reference(tmp_path / name)
    assert not (tmp_path / "boom").exists()


def test_bad_files(tmp_path):
    np.savez(tmp_path / "pictures.npz", np.zeros((2, 4, 4, 3), np.uint8))
    np.savez(tmp_path / "kid.npz", feats=np.zeros((2, 4)))
    torch.save(torch.zeros(3), tmp_path / "features.pt")
    whole = (tmp_path / "kid.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    for name, said in {
        "a.npz": "there is none",
        "pictures.npz": "got arr_0; these are pictures",
        "kid.npz": "these are features",
        "features.pt": "expected a dictionary of mu and sigma, got Tensor",
        "half.npz": "got BadZipFile; copy it again",
    }.items():
        with pytest.raises(ValueError, match=said):
            read_reference(tmp_path / name)


MEAN, UNEVEN = torch.zeros(2), torch.tensor([[1.0, 0], [0.5, 1]])


@pytest.mark.parametrize(
    ("mean", "covariance", "message"),
    [
        (torch.zeros(3), torch.eye(2), r"got \[3\] and \[2, 2\]"),
        (MEAN / 0, torch.eye(2), "finite"),
        (MEAN, UNEVEN, "symmetric, got a difference of 0.5"),
    ],
)
def test_bad_moments(mean, covariance, message):
    with pytest.raises(ValueError, match=message):
        Reference(mean, covariance)


def test_bad_writing(statistics, tmp_path):
    for layout, said in {
        "fid": "layout must be one of specmm",
        "torch-fidelity": r"must end in \.pt",
        "adm": "adm, which needs them",
    }.items():
        with pytest.raises(ValueError, match=said):
            write_reference(statistics, tmp_path / "a.npz", layout)
