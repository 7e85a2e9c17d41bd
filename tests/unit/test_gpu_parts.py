"""The GPU benchmark's parts, rehearsed on a CPU: resumed, skipped, cut short and refused."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlavaForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3ForCausalLM,
)

from benchmarks.gpu import published, report, rounds, running
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parts import PARTS, Bench, Case, Part
from specmm.image_ar.continuous.mar import MAR
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.var import published as var_sizes
from specmm.image_ar.tokens.gpt import Transformer
from specmm.loading.mapped import META, size_of

ROOT = Path(__file__).parents[2]
ROUNDS = {"model", "batch", "mode", "method", "nodes", "depth", "round_ms", "peak_mib"}
LOOPS = ROUNDS | {"draft_ms", "verify_ms", "host_share", "repeats"}
REAL = {"model", "batch", "mode", "method", "seconds", "speedup", "repeats", "dtype"}
RACED = REAL | {"tau", "host_overhead", "certificate", "peak_mib"}
RACED |= {"speedup_low", "speedup_high"}
COLUMNS = {
    "kernels": {"check", "error", "model", "S", "T", "batch", "contender", "ms", "bytes"},
    "mar": ROUNDS | {"fixed_ms", "rounds", "seconds"},
    "var": REAL | {"pixels", "peak_mib"},
    "pocket-var": REAL | {"pixels", "peak_mib"},
    "pocket-llamagen": REAL
    | {"tau", "draft_ms", "verify_ms", "host_overhead", "pictures_per_second", "tv", "peak_mib"},
    **{name: LOOPS for name in ("llamagen-b", "llamagen-xl", "llava", "qwen-vl", "text")},
    "training": {"model", "batch", "tokens", "steps", "parameters", "rows_s", "target_share"}
    | {"peak_gib", "gib_at_20", "gib_at_end"},
    **{f"pocket-{name}": RACED for name in ("mar", "llava", "coder")},
}
FACTS = {"machine", "gpu", "torch", "git", "date", "part", "dtype"}
CALLS: list[str] = []
STOPS = {"at": "", "dead at": ""}


def three_cases(bench):
    """Cases of which one may fail."""

    def measure(name):
        CALLS.append(name)
        if STOPS["at"] == name:
            raise RuntimeError("no memory\nleft")
        if STOPS["dead at"] == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"x": len(CALLS)}]

    return [Case(name, lambda name=name: measure(name)) for name in "abc"]


THREE = Part("three", "a test", f"{__name__}:three_cases")


@pytest.fixture
def bench(tmp_path):
    CALLS.clear()
    STOPS["at"] = ""
    return Bench.at("cpu", True, tmp_path)


def facts(folder, name):
    return json.loads((folder / f"{name}.json").read_text())["environment"]


def read(folder, name):
    """The comment lines' names, and the rows."""
    lines = (folder / f"{name}.csv").read_text().splitlines()
    head = {line[2:].split(":")[0] for line in lines if line.startswith("# ")}
    return head, list(csv.DictReader(line for line in lines if not line.startswith("# ")))


def check_csv(folder, name):
    head, rows = read(folder, name)
    assert head >= FACTS
    assert rows and set(rows[0]) == COLUMNS[name] | {"case"}, name
    for row in rows:
        # what was measured; MAR's rounds are differences, which another process may turn around
        number = row.get("seconds") or row.get("round_ms") or row.get("ms") or 1
        assert float(number) > 0 and math.isfinite(float(row.get("round_ms") or 1)), row


def test_every_part_has_its_columns_here():
    assert set(COLUMNS) == set(PARTS)


def test_the_list(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*PARTS, "all", "report"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["kernels", "--device", "cuda"],
            "device must be auto, cuda or cpu and be here, got 'cuda'",
        ),
        (["kernels", "--device", "tpu"], "got 'tpu'"),
        (["kernel"], "unknown part 'kernel'; did you mean 'kernels'?"),
    ],
)
def test_a_mistake_is_a_sentence(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_part_writes_its_columns_and_is_not_run_again(tmp_path, capsys):
    name = "kernels"
    options = [name, "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert main(options) == 0, capsys.readouterr().err
    check_csv(tmp_path, name)
    before = (tmp_path / f"{name}.csv").stat().st_mtime_ns
    assert main(options) == 0 and "is there" in capsys.readouterr().out
    assert (tmp_path / f"{name}.csv").stat().st_mtime_ns == before
    assert main([*options, "--again"]) == 0
    assert (tmp_path / f"{name}.csv").stat().st_mtime_ns > before


def test_a_killed_part_goes_on_where_it_was(bench):
    STOPS["dead at"] = "b"
    child = os.fork()
    if not child:
        running.run(THREE, bench)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not facts(bench.out, "three")["finished"]
    STOPS["dead at"] = ""
    assert facts(bench.out, "three")["at"] == "b"
    assert report._state(facts(bench.out, "three"))[-1] == "- **Stopped, incomplete**, at: b."
    assert running.run(THREE, bench) and CALLS == ["c", "b"]  # what stopped it is last
    assert [row["case"] for row in read(bench.out, "three")[1]] == ["a", "c", "b"]
    assert "Stopped" not in "".join(report._state(facts(bench.out, "three")))


def test_a_file_cut_in_two_is_measured_again(bench):
    assert running.run(THREE, bench)
    file = bench.out / "three.json"
    file.write_text(file.read_text()[:40])
    assert running.run(THREE, bench) and list("abcabc") == CALLS


def test_a_failed_case_leaves_its_error_and_the_others_go_on(bench, capsys):
    STOPS["at"] = "b"
    assert not running.run(THREE, bench) and CALLS == ["a", "b", "c"]
    assert facts(bench.out, "three")["errors"] == {"b": "RuntimeError: no memory left"}
    assert "three: b failed: RuntimeError" in capsys.readouterr().err
    STOPS["at"] = ""
    assert running.run(THREE, bench) and CALLS == ["a", "b", "c", "b"]
    assert facts(bench.out, "three")["errors"] == {}


def test_another_commit_is_measured_again(bench, monkeypatch):
    assert running.run(THREE, bench)
    assert running.run(THREE, bench) and list("abc") == CALLS
    monkeypatch.setattr(running, "git_sha", lambda: "another")
    assert running.run(THREE, bench) and list("abcabc") == CALLS


def test_what_there_is_no_time_for_is_left_for_another_run(bench, capsys):
    bench.minutes = 0.0
    assert not running.run(THREE, bench) and not CALLS
    assert facts(bench.out, "three")["left"] == ["a", "b", "c"]
    bench.minutes = 1.0
    assert running.run(THREE, bench) and CALLS == ["a", "b", "c"]


def test_a_part_that_hangs_is_stopped_and_the_exit_says_so(bench, capsys):
    options = ["--tiny", "--device", "cpu", "--out", str(bench.out)]
    assert not running.every([PARTS["kernels"]], options, minutes=0.001)
    assert "kernels: stopped after 0.001 minutes" in capsys.readouterr().err


def test_fewer_repetitions_when_time_is_short(bench):
    bench.tiny = False
    assert bench.repeats == 20
    bench.started -= 60 * bench.minutes / 2 + 1
    assert bench.repeats == 5
    bench.most = 3
    assert bench.repeats == 3


@pytest.mark.parametrize(
    ("make", "millions"),
    [  # what the releases' pages say
        (lambda: Transformer(published.llamagen("GPT-B", 256)), 111),
        (lambda: Transformer(published.llamagen("GPT-XL", 384)), 775),
        (lambda: MAR(published.mar("MAR-L")), 478),
        (lambda: VAR(var_sizes(16)), 310),
        (lambda: VAR(var_sizes(30)), 2010),
        (lambda: LlavaForConditionalGeneration._from_config(published.llava()), 7063),
        (lambda: Qwen2_5_VLForConditionalGeneration._from_config(published.qwen_vl()), 8292),
        (lambda: Qwen3ForCausalLM._from_config(published.qwen3()), 8191),
        (published.dflash(published.qwen3(), published.DFLASH_LAYERS, published.DFLASH), 1049),
    ],
)
def test_published_sizes(make, millions):
    model = published.unfilled(make)
    assert any(weight.device == META for weight in model.parameters())
    assert size_of(model) == pytest.approx(1e6 * millions, rel=0.005)


class Allocated(TorchDispatchMode):
    """Counts the bytes of all memory that operators make."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "cpu":
            self.storages[id(made.untyped_storage())] = made.untyped_storage()
        return made


def test_weights_are_made_once_in_their_dtype():
    config = published.GPTConfig(256, 4, 4, 2048, 64)
    with Allocated() as counted:
        model = published.filled(lambda: Transformer(config), torch.device("cpu"), torch.bfloat16)
    weights = sum(x.nbytes for x in model.parameters())
    made = sum(storage.nbytes() for storage in counted.storages.values())
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    assert weights < made < 1.1 * weights
    assert float(model.output.weight.float().std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(model.norm.weight.float(), torch.ones(256))


PLAIN = {"method": "plain", "round_ms": 4.0}


def test_gain_by_tau():
    row = {"method": "m", "round_ms": 6.0}
    assert report.gain(row, PLAIN, 3.0) == 2.0
    assert report.break_even(row, PLAIN) == 1.5
    assert report.fastest_plain([PLAIN | {"round_ms": 5.0}, PLAIN, row]) is PLAIN
    fixed = {"fixed_ms": 40.0, "rounds": 10}
    assert report.gain(row | fixed, PLAIN | fixed, 6.0) == 80 / 50
    assert report.break_even(row | fixed, PLAIN | fixed) == 1.5


def test_the_clock_is_read_at_the_ends_of_all_steps_alone():
    """Reading it waits for the device, which the loop itself would not."""
    order = []

    def steps():
        for number in range(9):
            order.append(number)
            yield number

    def now():
        order.append("now")
        return float(len(order))

    assert rounds.loop_seconds(now, steps(), 4) == 5 / 4  # from the 5th to the 10th entry
    assert order == [0, 1, 2, 3, "now", 4, 5, 6, 7, "now"]
    with pytest.raises(ValueError, match="must have more than 4 rounds, got 4"):
        rounds.loop_seconds(now, iter(range(4)), 4)


def test_a_round_faster_than_a_plain_step_is_pointed_out(tmp_path):
    facts = {"model": "m", "batch": 1, "mode": "graph", "nodes": 1, "depth": 0}
    rows = [facts | PLAIN, facts | {"method": "slow", "round_ms": 6.0}]
    assert "mismeasured" not in "".join(report._rounds("text", rows, tmp_path))
    rows.append(facts | {"method": "odd", "round_ms": 3.0})
    assert "mismeasured: odd.**" in "".join(report._rounds("text", rows, tmp_path))


@pytest.mark.slow
def test_two_parts_in_one_command_and_what_the_page_says_of_all(tmp_path, capsys):
    options = ["--tiny", "--device", "cpu", "--out", str(tmp_path)]
    command = [str(ROOT / "benchmarks/gpu/run.sh"), "text", "var", "report", *options]
    env = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("text", "var"):
        check_csv(tmp_path, name)
    assert main(["text", "var", *options]) == 0
    assert capsys.readouterr().out.count("is there") == 2
    page = (tmp_path / report.NAME).read_text()
    assert "A rehearsal with small shapes" in page and "## var: VAR-d30 and d16" in page
    assert "Not there yet: kernels, " in page and "arXiv 2602.06036" in page
    assert "such ratios are mostly over eager plain decoding" in page
    shown = [line for line in page.splitlines() if line.startswith("![")]
    files = {line.split("(")[1].rstrip(")") for line in shown}
    assert len(files) == 2 and all((tmp_path / name).stat().st_size > 5000 for name in files)


def test_a_page_says_the_dtype_that_rows_were_measured_in(bench):
    rows = running.Progress([{"case": "a", "dtype": "float32"}], at="b")
    running._write(THREE, bench, rows, running.environment(dtype=str(bench.dtype)))
    assert facts(bench.out, "three")["dtype"] == "float32" and bench.dtype == torch.bfloat16
    assert report._state(facts(bench.out, "three"))[0].startswith("- float32, ")
