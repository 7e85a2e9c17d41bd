"""Models of transformers that draw pictures, by the command line: a drafter trained from prompts
and used; pictures, benches and jobs of prompts.
"""

import json
import shutil
from itertools import product

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import specmm
from specmm.drafter import Feedback
from specmm.hf.picture_tokens import picture_prompt
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockDrafter, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleDrafter, EagleHead
from specmm.randomness import Uniforms
from specmm.recipes.pictures import captioned
from specmm.recipes.training.block_drafter import block_loss
from specmm.recipes.training.eagle_drafter import eagle_loss
from specmm.recipes.training.encoding import to_float
from specmm.recipes.training.seen_pictures import SeenPictures
from specmm.stats import Clock
from specmm.tree import TreeShape
from specmm.verify.rule import VerifyResult
from tests.cases import some
from tests.commands import as_json, refused, run, succeed
from tests.tiny.picture_kinds import KINDS, PROMPTS, reference, saved, sized


@pytest.fixture(scope="module", params=["janus", "emu3"])
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    """Without a drafter."""
    return saved(kind, tmp_path_factory)


@pytest.fixture
def eager(monkeypatch):
    """Trainings of a few steps without a compiler."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)


DRAFTED = {"block": "speculative", "eagle": "eagle"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "trained"),
    some(product(["janus", "emu3"], DRAFTED), [("janus", "block"), ("emu3", "eagle")]),
    indirect=["kind"],
)
def test_a_drafter_is_trained_and_drafts(kind, folder, trained, tmp_path, eager):
    """From prompts alone, by the command line; then it draws."""
    model = shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red barn\n\nblue tree\na hill\n")
    train = ["train", "drafter", model, "--out", tmp_path / "run"]
    settings = dict(prompts=tmp_path / "prompts.txt", steps=3, batch=2, levels=3, layers=1)
    settings |= dict(kind=trained, drawn=5, aux_layers="1", inner=32, **sized(kind))
    sets = [f"--set={name}={value}" for name, value in settings.items()]
    succeed(*train, *sets)
    pipe = specmm.ImagePipeline.from_pretrained(model)
    assert set(pipe.parts.drafters) == {trained}
    assert len(pipe.settings.acceptance) == (3 if trained == "block" else 0)
    assert pipe.settings.cfg == pipe.facts.cfg
    out = tmp_path / "out"
    words = ["generate", model, "--prompt", "a tree", "--method", DRAFTED[trained], "--out", out]
    found = as_json(*words, *sizes(kind), "--seed", 0)
    assert found["certificate"]["kind"] == "exact" and found["tau"] > 1
    assert Image.open(found["outputs"][0]).size == kind.size[::-1]
    alone = shutil.move(model / "drafters" / trained, tmp_path / "alone")
    given = run(*words, *sizes(kind), "--seed", 0, "--json", "--drafter", alone)
    assert json.loads(given.stdout)["tau"] == found["tau"]
    lacking = run(*words, *sizes(kind))
    assert lacking.exit_code == 2 and f"no '{trained}' drafter" in lacking.output
    shutil.move(alone, model / "drafters" / trained)
    assert "replace=true" in refused(*train, *sets)


def test_what_training_lacks_is_told(kind, folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "empty").write_text("\n")
    train = ["train", "drafter", model, "--out", tmp_path / "run"]
    for settings, message in (
        ([], "--set prompts=FILE"),
        ([f"--set=data={tmp_path}"], "a folder with a metadata.jsonl"),
        ([f"--set=data={tmp_path}", "--set=drawn=2"], "drawn needs what to draw"),
        ([f"--set=prompts={tmp_path / 'empty'}"], "a prompt a line, got none"),
        ([f"--set=prompts={tmp_path / 'empty'}", "--set=kind=eagle"], "a prompt a line, got none"),
        (["--set=drawn=2", "--set=only_drawn=true"], "only_drawn is of models that draw classes"),
        ([f"--set=prompts={tmp_path / 'empty'}", "--set=aux_layers=0"], "layers from 1 to 1"),
    ):
        said = refused(*train, *settings)
        assert message in said.replace("\n", " ")


def test_a_drafter_learns_from_pictures_of_ones_own(kind, folder, tmp_path, eager):
    """With their texts; their tokens are those of the model's own tokenizer."""
    model = shutil.copytree(folder, tmp_path / "model")
    rows = [
        {"file_name": f"{colour}.png", "text": f"a {colour} hill"} for colour in ("red", "blue")
    ]
    data = tmp_path / "data"
    data.mkdir()
    for row in rows:
        Image.new("RGB", (40, 30), row["text"].split()[1]).save(data / row["file_name"])
    (data / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = dict(data=data, steps=2, batch=2, levels=2, layers=1, **sized(kind))
    sets = [f"--set={name}={value}" for name, value in settings.items()]
    succeed("train", "drafter", model, "--out", tmp_path / "run", *sets)
    pipe = specmm.ImagePipeline.from_pretrained(model, torch_dtype=torch.float32)
    assert set(pipe.parts.drafters) == {"block"}
    layout = pipe._layout(*kind.size)
    size, encode = pipe.facts.encode(pipe.transformer, layout)
    images, texts = captioned(data, size)
    assert size == kind.size and texts == ["a red hill", "a blue hill"]
    with torch.no_grad():
        tokens = encode(to_float(torch.from_numpy(images)))
    assert tokens.shape == (2, layout.length)
    for place in range(layout.length):
        assert bool(layout.allowed.at(torch.tensor(place))[tokens[:, place]].all())


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_what_is_learnt_from_is_what_the_target_reads(name, tmp_path):
    """Of prompts of several lengths, one of them what guidance leads away from."""
    kind = KINDS[name]
    kind.save(tmp_path)
    pipe = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    given = dict(output_type="latent", cfg=1.0, generator=torch.Generator().manual_seed(0))
    tokens = pipe(PROMPTS, **given, **sized(kind)).tokens
    target = pipe.target(cfg=1.0, layout=pipe._layout(*kind.size))
    ids = [pipe._ids(text, target.layout) for text in PROMPTS]
    away = [pipe._away(row, None, target.layout) for row in ids]
    seen = SeenPictures(target, ids, away, tokens, (1,))
    read = seen.batch(torch.tensor([1, 0]), torch.tensor([False, True]))
    assert read.hidden.shape == (2, target.length, 2 * target.sizes.dim)
    asked = picture_prompt(target, [ids[1], away[0]], away)
    for row, picture in enumerate(tokens.flip(0).tolist()):
        for place in (0, 1, 4, target.length - 1):
            wanted = reference(target, asked, row, picture[:place], kind)
            torch.testing.assert_close(read.logits[row, place].softmax(-1), wanted)


@torch.no_grad()
def test_what_is_learnt_is_what_is_drafted(tmp_path):
    """For pictures of another size than usual, whose places turn by other factors."""
    KINDS["emu3"].save(tmp_path)
    pipe = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    target = pipe.target(cfg=1.0, temperature=1.0, layout=pipe._layout(16, 4))
    ids = [pipe._ids(PROMPTS[0], target.layout)]
    generator = torch.Generator().manual_seed(0)
    given = dict(height=16, width=4, cfg=1.0, generator=generator, output_type="latent")
    tokens = pipe(PROMPTS[0], **given).tokens
    seen = SeenPictures(target, ids, ids, tokens, ())
    read = seen.batch(torch.tensor([0]), torch.tensor([False]))
    torch.manual_seed(1)
    head = BlockHead(BlockConfig(2, 1, pipe.owner.sizes))
    asked = picture_prompt(target, ids, ids)
    drafted = after(2, target, BlockDrafter(head, target, TreeShape.chain(2)), asked, tokens)
    wanted = torch.minimum(read.logits[0, 2].softmax(-1), drafted).sum()

    def overlap(rotary):
        return block_loss(head, read, seen.logits, torch.tensor([[1]]), rotary)[1][0]

    torch.testing.assert_close(overlap(head.rotary_for(target.sizes)), wanted)
    assert (overlap(head.rotary) - wanted).abs() > 1e-3
    eagle = EagleHead(EagleConfig(pipe.owner.sizes))
    for weight in eagle.layers[0].self_attn.parameters():  # the layer is to see where tokens are
        weight.mul_(4)
    # a row later: the places of the tokens that it reads differ from the third on
    drafted = after(4, target, EagleDrafter(eagle, target, TreeShape.chain(2)), asked, tokens)

    def learnt(rotary):
        found = []

        def output(states, drawn):
            found.append(seen.logits(states, drawn))
            return found[0]

        eagle_loss(eagle, read, output, torch.zeros(()), rotary)
        return found[0][0, 3].softmax(-1)

    torch.testing.assert_close(learnt(eagle.rotary_for(target.sizes)), drafted)
    assert (learnt(eagle.rotary) - drafted).abs().max() > 1e-3


def after(count, target, drafter, asked, tokens):
    """The distribution drafted of the token after so many of ``tokens``, kept one a round."""
    feedback = Feedback(target.prefill(asked, drafter.max_nodes), tokens[:, 0])
    drafter.begin(feedback, Clock())
    uniforms = Uniforms.from_seeds([0])
    tree = drafter.propose(feedback, uniforms)
    for place in range(1, count):
        token = tokens[:, place]
        result = VerifyResult(torch.tensor([[0, -1, -1]]), torch.tensor([1]), token)
        output = target.score(tree)
        target.commit(result)
        feedback = Feedback(output, token, tree, result, tokens[:, place : place + 3])
        tree = drafter.propose(feedback, uniforms)
    return tree.probs[0, 1]


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
    for model, *option in wrong:
        said = refused("generate", model, *words, *option)
        assert "leave" in said and option[0] in said


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


@pytest.mark.parametrize("name", KINDS)
def test_inspect_says_that_it_draws_and_by_which_methods(name, tmp_path):
    KINDS[name].save(tmp_path)
    found = as_json("inspect", tmp_path)
    assert found["format"] == "picture model of transformers"
    assert {"sjd", "speculative", "eagle", "gsd", "self"} <= set(found["takes"]["draws"])
    assert ("zipar" in found["takes"]["draws"]) == (name != "glm_image")
    assert list(found["takes"]) == ["draws"] and "specmm generate" in found["use"]
    assert any("need a drafter" in note for note in found["notes"])
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
        (("plan", tmp_path, "--prompt", "a", "--prompt", "b"), "of one --prompt, got 2"),
    ):
        assert said in refused(*words)
