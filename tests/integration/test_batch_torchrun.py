"""``torchrun … specmm batch``: two real processes share a job, and the results are those of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import as_json, succeed

BIN = Path(sys.executable).parent


def pictures(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in (folder / "results").rglob("*.png")}


@pytest.mark.slow
def test_two_ranks_make_every_item_once(tiny: Path, tmp_path: Path) -> None:
    jobs, out, alone = tmp_path / "jobs.jsonl", tmp_path / "shared", tmp_path / "alone"
    jobs.write_text("".join(json.dumps({"id": f"i{n}", "class": "heart"}) + "\n" for n in range(5)))
    given = ("batch", jobs, "--model", tiny, "--method", "speculative", "--dtype", "float32")
    ranks = ("torchrun", "--nproc-per-node", 2, "--no-python")
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    launched = subprocess.run(
        [str(word) for word in (*ranks, "specmm", *given, "--engine", "accelerate", "--out", out)],
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert launched.returncode == 0, launched.stderr
    journals = sorted(f.name.rpartition("-")[0] for f in (out / "journal").glob("rank-*.log"))
    assert journals == ["rank-00000", "rank-00001"]
    wanted = {"items": 5, "done": 5, "failed": 0, "left": 0, "problems": []}
    assert as_json("batch", jobs, "--out", out, "--verify") == wanted
    succeed(*given, "--out", alone)
    assert len(pictures(alone)) == 5 and pictures(out) == pictures(alone)
