"""Models of transformers that draw pictures, by the command line: pictures, benches and jobs of
prompts.
"""

import json

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from specmm.programs.batch_invariant import batch_invariant
from specmm.runs.again import draw_again
from tests.commands import as_json, refused, run, succeed
from tests.tiny.picture_kinds import KINDS, opened, saved, sized


@pytest.fixture(scope="module", params=["janus", "emu3"])
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    """Without a drafter."""
    return saved(kind, tmp_path_factory)


def test_a_drafter_is_trained_for_a_llamagen_alone(folder):
    said = refused("train", "drafter", folder, "--set=drawn=2")
    assert "drafters are trained for LlamaGens, got" in said


def sizes(kind):
    return [word for name, pixels in sized(kind).items() for word in (f"--{name}", pixels)]


def drawn(folder, out, *words):
    succeed("generate", folder, "--prompt", "a tree", "--seed", 0, "--out", out, *words)
    return next(out.glob("*.png")).read_bytes()


def test_pictures_are_led_away_from_what_is_said(kind, folder, tmp_path):
    words = [*sizes(kind), "--dtype", "float32", "--temperature", 0]
    plain = drawn(folder, tmp_path / "plain", *words)
    other = drawn(folder, tmp_path / "other", *words, "--negative-prompt", "red barn hill")
    assert plain != other
    facts = json.loads((tmp_path / "other/run.json").read_text())
    assert facts["negative_prompt"] == "red barn hill" and facts["height"] == kind.size[0]


def test_what_others_do_not_take_is_told(tmp_path):
    words = ["--class", "heart", "--out", tmp_path]
    tokens, scales = "pocket/llamagen", "pocket/var"
    wrong = [(tokens, "--height", 48), (tokens, "--steps", 3), (scales, "--drafter", tmp_path)]
    wrong += [(scales, "--steps", 3)]
    for model, *option in wrong:
        said = refused("generate", model, *words, *option)
        assert "leave" in said and option[0] in said


def test_steps_are_a_mars_iterations(tmp_path):
    words = ["--class", 1, "--seed", 0, "--out", tmp_path]
    succeed("generate", "pocket/mar", *words, "--steps", 3)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["sampling"]["num_iter"] == 3 and facts["rounds"] == 3
    assert "num_iter must be" in refused("generate", "pocket/mar", *words, "--steps", 0)


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """A Janus, whose pictures have one size."""
    found = tmp_path_factory.mktemp("squares")
    KINDS["janus"].save(found)
    return found


def test_methods_are_compared_on_prompts(squares):
    words = ["bench", squares, "--methods", "sjd,prompt-lookup", "-n", 1, "--json"]
    found = succeed(*words, "--prompt", "a tree", "--prompt", "blue hill")
    assert [row["method"] for row in json.loads(found.stdout)] == ["ar", "sjd", "prompt-lookup"]
    assert "give --prompt" in refused(*words)
    planned = succeed("plan", squares, "--json")
    assert json.loads(planned.stdout)["reason"]


def test_jobs_of_prompts(squares, tmp_path):
    rows = [{"id": str(i), "prompt": text} for i, text in enumerate(("a tree", "red barn"))]
    (tmp_path / "job.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["batch", tmp_path / "job.jsonl", "--model", squares, "--out", tmp_path / "out"]
    succeed(*words, "--method", "sjd", "--seed", 0)
    pictures = sorted((tmp_path / "out").rglob("*.png"))
    assert len(pictures) == 2 and Image.open(pictures[0]).size == (12, 12)


def test_a_prompts_file_is_the_same_whatever_is_made_beside_it(squares, tmp_path):
    """Byte for byte, also where prompts of other lengths are in the job."""
    texts = ("a tree", "red barn", "blue hill on a tree", "a hill")
    (tmp_path / "job.jsonl").write_text("".join(json.dumps({"prompt": x}) + "\n" for x in texts))
    words = ["batch", tmp_path / "job.jsonl", "--model", squares, "--dtype", "float32"]
    made = []
    for size in (1, 4):
        out = tmp_path / str(size)
        given = [*words, "--method", "sjd", "--out", out, "--batch-size", size]
        succeed(*given)
        made.append({file.name: file.read_bytes() for file in out.rglob("*.png")})
    assert made[0] == made[1] and len(made[0]) == 4
    next(out.rglob("*.png")).unlink()
    assert "made again, bit for bit" in succeed(*given, "--repair").stdout


def test_a_record_names_the_prompts_that_lengthened_its_own(squares):
    pipe = opened(squares)
    with batch_invariant():
        alike, padded = (
            pipe(prompt=texts, seed=[1, 2], temperature=1.0)
            for texts in (["a tree", "red barn"], ["a tree", "blue hill on a tree"])
        )
        away = pipe(prompt=["a tree"] * 2, negative_prompt=["a", "red barn on a"], seed=[1, 2])
    assert not any("batch" in record for record in alike.records)
    for out in (padded, away):
        assert [len(record["batch"]) for record in out.records] == [2, 2]
        for image, record in zip(out.images, out.records, strict=True):
            assert draw_again(record, pipe).tobytes() == image.tobytes()


@pytest.mark.parametrize("name", KINDS)
def test_inspect_says_that_it_draws_and_by_which_methods(name, tmp_path):
    KINDS[name].save(tmp_path)
    found = as_json("inspect", tmp_path)
    assert found["format"] == "picture model of transformers"
    assert {"sjd", "gsd"} <= set(found["takes"]["draws"])
    assert list(found["takes"]) == ["draws"] and "specmm generate" in found["use"]
    said = run("inspect", tmp_path).stdout
    assert "  draws     by ar, sjd" in said and "vision-language" not in said


def test_inspect_says_that_it_answers_and_when_it_only_writes(tmp_path):
    KINDS["janus"].save(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    found = as_json("inspect", tmp_path)
    assert list(found["takes"]) == ["draws", "answers"] and "msd" in found["takes"]["answers"]
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "generation" not in k}, file)
    found = as_json("inspect", tmp_path)
    assert list(found["takes"]) == ["answers"] and "specmm ask" in found["use"]
    assert "it does not draw" in found["notes"][0]


@pytest.mark.slow
def test_bench_and_plan_of_a_size_and_of_a_prompt(tmp_path):
    KINDS["emu3"].save(tmp_path)
    layout = ("--prompt", "a tree", "--height", 16, "--width", 32, "--json")
    rows = succeed("bench", tmp_path, "--methods", "sjd", "-n", 1, *layout)
    rows = json.loads(rows.stdout)
    assert rows[0]["height"] == 16 and rows[0]["kind"] == "images"
    half = run("bench", tmp_path, "--methods", "sjd", "-n", 1, *layout, "--width", 16)
    assert rows[0]["tokens"] > json.loads(half.stdout)[0]["tokens"]
    planned = succeed("plan", tmp_path, *layout)
    assert json.loads(planned.stdout)["reason"]
    for words, said in (
        (("plan", tmp_path, "--height", 16), "give both height and width"),
        (("plan", tmp_path, "--prompt", "a", "--prompt", "b"), "takes one --prompt, got 2"),
    ):
        assert said in refused(*words)
