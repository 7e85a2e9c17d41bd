"""What drafters learn from, as people have it: looked through, split by content, answered by the
target, and kept by all that made it.
"""

import base64
import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.config
from PIL import Image
from transformers import AutoTokenizer

from specmm import TextPipeline, zoo
from specmm.chats.forms import Unusable, chat_of
from specmm.hf.loading.pretrained import load_tokenizer
from specmm.recipes import recipe as recipes
from specmm.recipes.answers import answered
from specmm.recipes.conversations import Opening, conversations
from specmm.recipes.recipe import Places, train
from specmm.recipes.settings import Targeted
from specmm.recipes.source import Source
from specmm.recipes.training.drawn_rows import drawn_rows
from specmm.recipes.training.seen import SeenRows
from specmm.recipes.training.texts import Rows, split
from tests.commands import succeed
from tests.tiny.chats import undrafted

LLAVA, CODER = zoo.POCKET / "llava", zoo.POCKET / "coder"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return undrafted(LLAVA, tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """pocket/coder with a chat template."""
    folder = undrafted(CODER, tmp_path_factory.mktemp("coder") / "model")
    words = AutoTokenizer.from_pretrained(folder)
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    return folder


def begun(model, out):
    """A training of an EAGLE-3 head in ``out``."""
    training = Targeted(
        steps=2, batch=2, lr=1e-3, warmup=1, accumulate=1, seed=0, replace=True, out=out,
        save_every=100, tracker="", device=None, loss="kl", epochs=None, scenes=4, measure_every=0,
        keep=1, dtype=None, device_map=None,
    )  # fmt: skip
    return training.begun(str(model), "eagle3", recipes.Recipe("eagle3", "", {}))


def test_a_warm_up_is_short_where_none_is_given(talker, tmp_path):
    training = begun(talker, tmp_path / "run").training
    assert training.run({}).warmup == 1
    free = dataclasses.replace(training, warmup=None)
    assert [free.run({}, steps=n).warmup for n in (9, 240, 5000)] == [0, 24, 100]


def jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asked(count, folder):
    """Questions about pictures that all differ."""
    for i in range(count):
        Image.new("RGB", (48, 48), (5 * i, 0, 0)).save(folder / f"{i}.png")
    return [{"question": f"Is it {i}?", "answer": "yes", "image": f"{i}.png"} for i in range(count)]


@pytest.fixture
def opened(llava, tmp_path):
    """Opens rows of data for pocket/llava."""
    data = Source(None, 0.25, None, "skip", None, [], False, None, 0.0, 96)

    def found(rows, **changes):
        reader = data.reader(llava)
        for name, value in changes.items():
            setattr(reader, name, value)
        file = jsonl(tmp_path / "d.jsonl", rows)
        return conversations([str(file)], Opening(reader, None, tmp_path, 0.25, 0))

    return found


def test_bad_rows_are_set_aside_and_said(opened, tmp_path, capsys):
    rows = asked(12, tmp_path)
    (tmp_path / "torn.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])
    bad = [
        dict(rows[0], image="nope.png"),
        dict(rows[0], image="torn.png"),
        dict(rows[0], image="no.png"),
        dict(rows[0], answer=None),
        dict(rows[0], answer="a <image> b"),
        dict(rows[0], answer="a long one. " * 900),
        dict(rows[0], video="no.mp4"),
        dict(rows[0], question="is <image><image> it?"),
    ]
    found = opened([*rows, *bad])
    said = capsys.readouterr().err
    for line in (
        f"d.jsonl:13: no picture at {tmp_path / 'nope.png'} (2 such)",
        "d.jsonl:14: ",
        "d.jsonl:16: an answer that is no text, but None\n",
        "d.jsonl:17: a picture in an answer\n",
        "d.jsonl:18: ",
        "d.jsonl:19: no video at ",
        "d.jsonl:20: more <image> than there are images\n",
        "⟦yes</s>⟧",
        "9 chats to learn from, 3 held out",
    ):
        assert line in said
    assert "d.jsonl:15" not in said
    assert len(found.rows(None)) == 9 and len(found.rows(4)) == 4


def test_what_is_held_out_is_never_learnt(opened, tmp_path):
    """Nor are its copies, whatever their answers and the names of their pictures."""
    rows = asked(12, tmp_path)
    for i in range(12):
        shutil.copy(tmp_path / f"{i}.png", tmp_path / f"again{i}.png")
    copies = [dict(row, answer="no", image=f"again{i}.png") for i, row in enumerate(rows)]
    found = opened([*rows, *copies])
    learnt = [found.rows(None)[i].messages[0]["content"][-1]["text"] for i in range(18)]
    prompts = found.prompts(10)
    held = [found.reader.words.decode(ids) for ids in prompts.rows()]
    assert len(held) == 6 and len(set(learnt)) == 9
    assert not any(question in text for question in learnt for text in held)
    for epoch in (0, 1):  # all of them once an epoch
        drawn = [found.draw(18 * epoch + i, True).place for i in range(18)]
        assert len(set(drawn)) == 18
    assert [found.draw(i, True).place for i in range(18)] != drawn
    assert list(found.sorts) == [True]


def test_pictures_that_no_file_holds(opened, tmp_path):
    rows = asked(2, tmp_path)
    data = [base64.b64encode((tmp_path / f"{i}.png").read_bytes()).decode() for i in range(2)]
    rows[0]["image"], rows[1]["image"] = data[0], f"data:image/png;base64,{data[1]}"
    found = opened(rows)
    [one] = found.rows(None)
    assert [Image.open(tmp_path / f"{i}.png").tobytes() for i in range(2)]
    prompt, learnt = found.read([one])
    assert "pixel_values" in prompt.vision and bool(learnt.any())


def test_nothing_that_can_be_used(opened, tmp_path, capsys):
    for rows in ([dict(question="a", answer="")], asked(1, tmp_path), asked(1, tmp_path) * 3):
        with pytest.raises(ValueError, match="two different questions that can be used"):
            opened(rows)
    with pytest.raises(ValueError, match=r"d.jsonl:1 has 'context', which is not read"):
        opened([dict(question="a", answer="b", context="c")])


SMALL = dict(steps=2, batch=2, rollout=1, inner=32, scenes=2)


def test_settings_of_another_kind_of_model(llava, talker, tmp_path):
    data = jsonl(tmp_path / "d.jsonl", asked(3, tmp_path))
    for model, given, message in (
        (llava, dict(text=data), "got text, which is for models that read text alone"),
        (llava, dict(chats=True), "got chats, which is for models that read text alone"),
        (llava, dict(data=data, text=data), "give data or text, not both"),
        (llava, {}, "data must be chats that show pictures, got none"),
        (talker, dict(data=tmp_path / "no"), "got nothing at"),
        (talker, dict(data=data, chats=True), "give data or chats, not both"),
        (talker, dict(data=data), "two different questions that can be used"),
        (talker, dict(data=data, too_long="fold"), "too_long"),
    ):
        with pytest.raises(ValueError, match=message):
            train("eagle3", model=model, out=tmp_path / "run", **SMALL, **given)
    with pytest.raises(ValueError, match="data must hold pictures or videos for an MSD drafter"):
        text = jsonl(tmp_path / "t.jsonl", [dict(question=q, answer="a") for q in "qrs"])
        train("msd", model=llava, data=text, steps=1, out=tmp_path / "run")


@pytest.fixture
def talks(tmp_path):
    """Chats of several turns in two files."""
    for name in "ab":
        rows = [
            {
                "messages": [
                    {"role": "system", "content": name},
                    {"role": "user", "content": f"def f{i}"},
                    {"role": "assistant", "content": f"return {i}"},
                    {"role": "user", "content": "more"},
                    {"role": "assistant", "content": f"x = {i}\ny = {i}\n"},
                ]
            }
            for i in range(6)
        ]
        jsonl(tmp_path / f"{name}.jsonl", rows)
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


@pytest.mark.slow
def test_text_models_learn_from_chats(talker, talks, tmp_path):
    model = shutil.copytree(talker, tmp_path / "model")
    options = SMALL | dict(drawn=0.5, answer_tokens=8, epochs=1, vocabulary=50)
    train("eagle3", model=model, data=talks, out=tmp_path / "run", **options)
    curve = (tmp_path / "run" / "loss.csv").read_text().splitlines()
    assert curve[-1].startswith("5,")  # one epoch of eleven
    [kept] = (tmp_path / "run" / "answers").iterdir()
    answers = {}
    for file in kept.iterdir():
        answers |= json.loads(file.read_text())
    assert 0 < len(answers) < 11 and all(len(texts) == 2 for texts in answers.values())
    pipe = TextPipeline.from_pretrained(model, method="eagle3", torch_dtype=torch.float32)
    drafted = pipe("def f", chat=True, max_new_tokens=8).texts
    assert drafted == pipe("def f", chat=True, method="ar", max_new_tokens=8).texts
    with torch._dynamo.config.patch(disable=True):
        block = dict(layers=1, block=4, mask=5, batch=2, drawn=0, steps=2, inner=32, read=2)
        train("dflash", model=model, data=talks, out=tmp_path / "dflash", **block)
        del block["read"]
        train("deer", model=model, data=talks, out=tmp_path / "deer", **block)
    assert "nan" not in (tmp_path / "dflash" / "loss.csv").read_text()
    assert "nan" not in (tmp_path / "deer" / "loss.csv").read_text()


class Answering:
    """A pipeline that notes what it is asked; one that ``fails`` answers a single batch."""

    def __init__(self):
        self.model, self.asked, self.fails = torch.nn.Linear(2, 2), [], False

    def __call__(self, texts, **options):
        if self.fails and "more" not in texts[0] and self.asked:
            raise KeyboardInterrupt
        self.asked += texts
        return SimpleNamespace(texts=[f"said {len(text)}" for text in texts])


def test_answers_are_kept_by_their_questions(talker, tmp_path):
    reader = Source(None, 0.1, None, "skip", None, [], False, None, 0.0, 96).reader(talker)
    turns = [{"role": "user", "content": "more"}, {"role": "assistant", "content": "b"}]

    def chat(word):
        asked = [{"role": "user", "content": f"{word}"}, {"role": "assistant", "content": "a"}]
        return chat_of({"messages": [*asked, *turns]}, None)

    def said(pipe, some):
        found = answered(pipe, reader, some, 1.0, 8, tmp_path)
        return [[m["content"][0]["text"] for m in talk.messages[1::2]] for talk in found]

    first, pipe = [chat(i) for i in range(40)], Answering()
    pipe.fails = True
    with pytest.raises(KeyboardInterrupt):
        said(pipe, first)
    kept = len(pipe.asked)
    again = Answering()
    again.model = pipe.model
    texts = said(again, first)
    assert all(len(pair) == 2 and pair[0].startswith("said") for pair in texts)
    assert texts[0][0] in next(text for text in again.asked if "more" in text)  # its own answer
    count = len(again.asked)
    assert kept > 0 and count + kept == 80  # what was answered is not asked again
    assert said(again, first[::-1]) == texts[::-1] and len(again.asked) == count
    assert said(again, [*first, chat("other")])[:40] == texts and len(again.asked) == count + 2
    new = Answering()
    said(new, first)
    assert len(new.asked) == 80  # another model's


def test_empty_answers_are_the_targets_to_give(talker, tmp_path):
    """And a chat whose answer is not given is not learnt from."""
    reader = Source(None, 0.1, None, "skip", None, [], False, None, 0.0, 96).reader(talker)
    rows = [{"question": f"q{i}", "answer": ""} for i in range(3)]
    with pytest.raises(Unusable, match="an empty answer"):
        chat_of(rows[0], None)
    chats = [chat_of(row, None, "", True) for row in rows]
    found = list(answered(Answering(), reader, chats, 1.0, 8, tmp_path))
    assert [talk.messages[1]["content"][0]["text"][:4] for talk in found] == ["said"] * 3
    assert not list(answered(Answering(), reader, chats, 0.0, 8, tmp_path))


def test_the_command_takes_data(talker, talks, tmp_path):
    model = shutil.copytree(talker, tmp_path / "model")
    words = ["--data", talks[0], "--data", talks[1], "--set", "drawn=0", "steps=1", "batch=2"]
    words += ["inner=32", "scenes=1", "rollout=1", f"out={tmp_path / 'run'}"]
    assert "drafters/eagle3" in succeed("train", "eagle3", model, *words).output


def test_given_text_is_split_by_place():
    stream = torch.arange(1000).int()
    learnt, held = split(stream, 0.1, 50, 20)
    assert len(held) == 100 and not set(learnt.tolist()) & set(held.tolist())
    rows = Rows.of(learnt, 17, 50, 3)
    assert len(rows[:17].unique()) == 17 * 50  # an epoch takes no token twice
    assert torch.equal(rows[:], Rows.of(learnt, 17, 50, 3)[:])
    assert not torch.equal(rows[:], Rows.of(learnt, 17, 50, 4)[:])
    assert len(Rows.of(learnt, 40, 50, 3)) == 40
    first = torch.zeros(5, 50, dtype=torch.long)
    both = rows.after(first)
    assert len(both) == 17 and torch.equal(both[:5], first) and torch.equal(both[5:], rows[5:])
    assert torch.equal(both.said(), both[:].flatten().bincount(minlength=len(both.said())))
    with pytest.raises(ValueError, match="at least 50 tokens and some to measure on, got 60"):
        split(stream[:60], 0.1, 50, 20)


def test_held_out_rows_of_text_are_not_learnt(tmp_path):
    model, file = undrafted(CODER, tmp_path / "model"), tmp_path / "a.txt"
    file.write_text("".join(f"def add{i}(a, b):\n    return a + b + {i}\n" for i in range(300)))
    data = Source(Places([], conversations), 0.1, None, "skip", None, [file], False, 16, 0, 96)
    lessons = data.lessons(begun(model, tmp_path))
    held = [load_tokenizer(model).decode(row) for row in lessons.prompt.rows()]
    learnt = "".join(load_tokenizer(model).decode(row) for row in lessons.rows)
    assert len(held) == 4 and not any(text in learnt for text in held)


def test_chats_of_like_length_are_a_batch(talker, tmp_path):
    """Every chat once an epoch, and hardly anything padded, where half would be."""
    rows = [
        {"question": f"add {i}?", "answer": "a = b + c\n" * (1 + 37 * i % 60)} for i in range(80)
    ]
    file = jsonl(tmp_path / "d.jsonl", rows)
    data = Source(
        Places([str(file)], conversations), 0.1, None, "skip", None, [], False, None, 0.0, 96
    )
    own = begun(talker, tmp_path)
    lessons = data.lessons(own)
    every = range(len(lessons.rows) // 8)
    wasted = []
    for lengths in (lessons.lengths, ()):
        options = (own.target, lessons.rows, lessons.read, (), 8, 0, tmp_path / f"{len(lengths)}")
        seen = SeenRows(*options, 1.0, lengths)
        batches = [seen.batch(step).tokens for step in every]
        assert len({tuple(row.tolist()) for batch in batches for row in batch}) == 72
        wasted.append(1 - sum(lessons.lengths) / sum(batch.numel() for batch in batches))
    assert wasted[0] < 0.1 and wasted[1] > 0.3


def test_rows_are_kept_by_what_made_them(talker, tmp_path):
    target = begun(talker, tmp_path / "out").target
    prompts = torch.arange(20).view(2, 10)
    one = drawn_rows(target, prompts, 14, (0.0,), tmp_path)
    assert torch.equal(one, drawn_rows(target, prompts, 14, (0.0,), tmp_path))
    other = drawn_rows(target, prompts + 20, 14, (0.0,), tmp_path)
    assert torch.equal(other[:, :10].long(), prompts + 20)
    with torch.no_grad():
        target.family.layers[0].mlp.down_proj.weight.neg_()
    drawn_rows(target, prompts, 14, (0.0,), tmp_path)
    assert len(list(tmp_path.glob("drawn-*"))) == 3
