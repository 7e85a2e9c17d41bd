"""``specmm bench`` and ``plan`` of texts and answers, and of a drafter of one's own."""

from pathlib import Path

import pytest

from specmm.extending.registry import REGISTERED
from specmm.runs.figures import BENCH
from tests.commands import as_json, refused, run

ECHO = Path(__file__).parents[2] / "demos" / "own" / "drafter.py"
SHORT = ("-n", 2, "--max-new-tokens", 8, "--dtype", "float32", "--seed", 0)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    for kind in REGISTERED:
        monkeypatch.setitem(REGISTERED, kind, {})


@pytest.mark.slow
def test_bench_of_texts_compares_what_drafts_with_plain_decoding(text_folder):
    rows = as_json("bench", text_folder, *SHORT, "-p", "def add", "-p", "def sub(a")
    names = [row["method"] for row in rows]
    assert names[0] == "ar" and {"block", "deer", "text-draft", "prompt-lookup"} <= set(names[1:])
    assert "verdict" not in names
    for row in rows:
        assert row["kind"] == "text" and row["certificate"]["kind"] == "exact"
        low, high = row["quartiles"]
        assert low <= high and row["runs"] == 2 and row["seconds_per_token"] > 0
        assert row["tokens"] == rows[0]["tokens"], "greedy texts are the same"
    assert rows[0]["speedup"] == 1 and rows[0]["tau"] == 1
    by_tokens = rows[0]["seconds_per_token"] / rows[1]["seconds_per_token"]
    assert rows[1]["speedup"] == pytest.approx(by_tokens)
    shown = run("bench", text_folder, *SHORT, "-p", "def add", "--methods", "block(length=2)")
    head = shown.stdout.splitlines()[0].split()
    assert head == ["method", "ms/token", *BENCH, "certificate"]


def test_bench_of_a_drafter_in_a_folder_or_of_ones_own(text_folder):
    folder = text_folder / "drafters" / "deer"
    rows = as_json("bench", text_folder, *SHORT, "-p", "def add", "--drafter", folder)
    assert [row["method"] for row in rows] == ["ar", "deer"]
    words = ("--load", ECHO, "bench", text_folder, *SHORT, "-p", "def add", "--drafter", "echo")
    rows = as_json(*words, "--temperature", 1)
    assert [row["label"] for row in rows] == ["ar", "draft(drafter=echo)"]
    assert "drew from what it recorded" in rows[1]["certificate"]["reason"]
    assert rows[1]["tau"] >= 1


def test_bench_and_plan_of_questions():
    asked = ("pocket/llava", "-q", "Say hello.", "--max-new-tokens", 4, "--dtype", "float32")
    rows = as_json("bench", *asked, "-n", 1, "--methods", "prompt-lookup")
    assert [row["method"] for row in rows] == ["ar", "prompt-lookup"]
    assert {row["kind"] for row in rows} == {"questions"}


@pytest.mark.slow
def test_bench_of_questions_compares_what_answers_in_words():
    rows = as_json("bench", "pocket/llava", *SHORT, "-q", "What is it?")
    names = {row["method"] for row in rows}
    assert {"ar", "msd", "text-draft", "prompt-lookup"} <= names and "sjd" not in names


@pytest.mark.slow
def test_plan_of_texts_says_what_auto_measures_and_takes(text_folder):
    found = as_json("plan", text_folder, "-p", "def add", "--dtype", "float32")
    assert found["batch"] == 1 and found["dtype"] == "float32" and found["choice"]
    assert found["costs"]["step"] > 0 and "beside plain decoding" in found["reason"]
    tried = {row["choice"].partition("(")[0]: row["speedup"] for row in found["candidates"]}
    assert tried.keys() == {"block", "deer", "suffix"} and all(tried.values())
    shown = run("plan", text_folder, "-p", "def add").stdout.splitlines()
    assert shown[-1].startswith("choice  ") and shown[0].startswith(str(text_folder))


@pytest.mark.parametrize("temperature", [0, 1])
def test_plan_of_ones_own_drafter_measures_it(text_folder, temperature):
    words = ("--load", ECHO, "plan", text_folder, "-p", "def add", "--drafter", "echo")
    found = as_json(*words, "--temperature", temperature)
    assert found["costs"]["step"] > 0 and found["plain_seconds_per_token"] > 0
    sizes = found["costs"]["verify"].keys()  # greedy texts keep none of the drafts
    assert sizes >= ({"2", "3", "4"} if temperature else {"2"})
    assert found["choice"].startswith(("ar", "draft("))


def test_plan_of_ones_own_drafter_of_pictures(make_tiny, tmp_path):
    make_tiny(tokens=64, drafters=False).save_pretrained(tmp_path)
    found = as_json("--load", ECHO, "plan", tmp_path, "--drafter", "echo")
    assert found["costs"]["draft"] and found["choice"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench"], "continues texts, give --prompt"),
        (["plan"], "continues texts, give --prompt"),
        (["bench", "-p", "a", "--height", "8"], "--height is for drawn pictures; leave it out"),
        (["bench", "-p", "a", "--methods", "blok"], "unknown method 'blok'"),
        (["bench", "-p", "a", "--methods", "lantern"], "method 'lantern' is for image tokens"),
    ],
)
def test_what_cannot_be_measured(text_folder, words, said):
    assert said in refused(words[0], text_folder, *words[1:])


PICTURES, TEXTS = "models that draw, such as", "texts and answers of"
BOTH = "is a method of its own; leave --methods out, or give --methods ar,draft(drafter=echo)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench pocket/llamagen --image x.png", f"--image does not serve {PICTURES}"),
        ("bench pocket/llamagen --max-new-tokens 5", f"--max-new-tokens does not serve {PICTURES}"),
        ("bench pocket/var --temperature 0", f"--temperature does not serve {PICTURES}"),
        ("bench pocket/llamagen --methods ar --drafter echo", BOTH),
        ("bench pocket/coder -p hi --methods ar --drafter echo", BOTH),
        ("bench pocket/llava -q hi --methods ar --drafter echo", BOTH),
        ("bench pocket/llava -q hi -p hi", "give --prompt to continue texts or --question to ask"),
        ("plan pocket/llamagen --image x.png", f"--image does not serve {PICTURES}"),
        ("plan pocket/coder -p hi --cfg 3", f"--cfg does not serve {TEXTS} pocket/coder"),
        ("plan pocket/llava -q hi --batch 1", f"--batch does not serve {TEXTS} pocket/llava"),
        ("complete pocket/coder -p hi --method ar --drafter pocket/llava", "ar needs no drafter"),
        (
            "complete pocket/coder -p hi --method prompt-lookup --drafter pocket/coder",
            "method prompt-lookup needs no drafter",
        ),
        ("complete pocket/var -p hi", "of another kind, this needs one like pocket/coder"),
        (
            "generate pocket/llamagen --class 0 --method lantern --drafter echo",
            "drafter echo must make trees that grow, got 'Dynamic' object has no attribute 'size'",
        ),
        ("demo --port 3000", "--port does not serve the page (give --app)"),
        ("demo --app --seed 0", "--seed does not serve the app"),
        ("convert var-d30 OUT --like var-d16", "--like says what a file is, got var-d30, a name"),
        ("convert no.pt OUT --like var-d16", "no.pt must be a file of weights, it is not there"),
        ("convert no.pt OUT", "no.pt must be a file of weights, it is not there"),
    ],
)
def test_options_of_another_kind_are_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused("--load", ECHO, *words.split())


def test_questions_need_to_be_asked():
    for words, said in (
        ((), "answers questions, give --question"),
        (("-q", "a", "-q", "b", "--image", "1", "--image", "2", "--image", "3"), "got 3"),
    ):
        assert said in refused("bench", "pocket/llava", *words)


def test_a_method_of_another_family_is_told_so():
    said = "method 'msd' is for questions about pictures, not for image tokens; choose from: ar"
    assert said in refused("generate pocket/llamagen --class heart --method msd")
