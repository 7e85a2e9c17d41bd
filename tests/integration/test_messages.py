"""Chats as ``messages``: tokens are those of apply_chat_template and generate."""

import base64
import io
import json

import pytest
import torch

import specmm
from specmm.hf.drafters.drafting import load_drafter
from specmm.hf.prompts.messages import Chat
from specmm.vlm import wording
from tests.commands import as_json, refused
from tests.noisy import noisy
from tests.tiny.processors import FILMS, PROCESSORS
from tests.tiny.saying import saying
from tests.tiny.vlm_folders import save

LONGEST = 9
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm")
    save("qwen2.5-vl", folder)
    return specmm.VQAPipeline.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def pictures():
    return [noisy((20, 12), 60 + 20 * i).convert("RGB") for i in range(4)]


def png(picture):
    stream = io.BytesIO()
    picture.save(stream, "png")
    return stream.getvalue()


def image_of(form, picture, folder):
    """A part with a ``picture`` in one of the forms that people write."""
    data = png(picture)
    coded = base64.b64encode(data).decode()
    (folder / "a.png").write_bytes(data)
    return {
        "pil": {"type": "image", "image": picture},
        "path": {"type": "image", "path": str(folder / "a.png")},
        "bytes": {"type": "image", "image": data},
        "base64": {"type": "image", "base64": coded},
        "openai": {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{coded}", "detail": "low"},
        },
        "url": {"type": "image", "url": f"data:image/png;base64,{coded}"},
    }[form]


def talk(*shown):
    """Several turns, as parts throughout: the form that this template takes."""
    first, *later = [{"type": "image", "image": picture} for picture in shown]
    said = [
        ("system", [{"type": "text", "text": "one two"}]),
        ("user", [first, {"type": "text", "text": "what is this"}]),
        ("assistant", [{"type": "text", "text": "a red dog"}]),
        ("user", [{"type": "text", "text": "and"}, *later, {"type": "text", "text": "how many"}]),
    ]
    return [{"role": role, "content": content} for role, content in said]


def generated(pipe, messages):
    """What transformers itself answers, greedily."""
    inputs = pipe.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    out = pipe.model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)[0]
    return out[inputs["input_ids"].shape[1] :].tolist()


def answers(out):
    return [ids.tolist() for ids in out.tokens]


@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_turns_of_a_batch_are_answered_as_by_generate(pipe, pictures, method):
    chats = [talk(*pictures[:2]), talk(pictures[2]), talk(pictures[3], pictures[0])[:2]]
    out = pipe(messages=chats, method=method, max_new_tokens=LONGEST)
    assert answers(out) == [generated(pipe, chat) for chat in chats]
    assert answers(pipe(messages=chats[1], max_new_tokens=LONGEST)) == answers(out)[1:2]
    streamed = pipe.stream(messages=chats[1], max_new_tokens=LONGEST)
    assert "".join(part[0] for part in streamed).strip() == out.answers[1]


@pytest.mark.parametrize("form", ["path", "bytes", "base64", "openai", "url", "plain"])
def test_forms_of_contents(pipe, pictures, tmp_path, form):
    wanted = answers(pipe(messages=talk(pictures[0]), max_new_tokens=LONGEST))
    found = talk(pictures[0])
    if form == "plain":
        for one in (found[0], *found[2:]):
            one["content"] = "".join(part["text"] for part in one["content"])
    else:
        found[1]["content"][0] = image_of(form, pictures[0], tmp_path)
    assert answers(pipe(messages=found, max_new_tokens=LONGEST)) == wanted


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_processor_gets_what_its_template_makes(name, pictures):
    if name == "smolvlm":
        pytest.importorskip("num2words")
    processor = PROCESSORS[name]()
    messages = talk(pictures[0])
    if wording.template_of(processor) is None:
        with pytest.raises(ValueError, match="messages need a chat template"):
            wording.conversation(processor, Chat.of(messages))
        return
    found = wording.conversation(processor, Chat.of(messages))
    own = getattr(processor, "chat_template", None)
    given = {} if own else {"chat_template": wording.template_of(processor)}
    chat = [{**one, "content": wording.content(processor, one["content"])} for one in messages]
    assert found == processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False, **given
    )
    film = [{"role": "user", "content": [{"type": "video", "video": pictures}]}]
    if name not in FILMS:
        with pytest.raises(ValueError, match="videos need a model that takes them"):
            wording.conversation(processor, Chat.of(film))


@pytest.fixture(scope="module")
def talker():
    model, tokenizer = saying(["x", "y", "z", "u", "a", "s"])
    tokenizer.chat_template = TEMPLATE
    return specmm.TextPipeline(model, tokenizer)


TURNS = [
    {"role": "system", "content": "x y"},
    {"role": "user", "content": [{"type": "text", "text": "z "}, {"type": "text", "text": "u"}]},
    {"role": "assistant", "content": "s"},
    {"role": "user", "content": "y"},
]


@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_turns_of_text(talker, method):
    plain = [{**TURNS[1], "content": "z u"} if i == 1 else one for i, one in enumerate(TURNS)]
    inputs = talker.tokenizer.apply_chat_template(
        plain, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    wanted = talker.model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)[0]
    wanted = wanted[inputs["input_ids"].shape[1] :].tolist()
    options = dict(method=method, max_new_tokens=LONGEST)
    assert answers(talker(messages=TURNS, **options)) == [wanted]
    both = talker(messages=[TURNS[3:], TURNS], **options)
    alone = talker("y", chat=True, **options)
    assert answers(both) == [*answers(alone), wanted]
    assert both.prompt_tokens == [*alone.prompt_tokens, inputs["input_ids"].shape[1]]
    assert "".join(p[0] for p in talker.stream(messages=TURNS, **options)) == both.texts[1]


MISTAKES = {
    "not a list": ("hello", "messages must be a list of"),
    "empty": ([], "messages must be a list of .* got nothing"),
    "no role": ([{"content": "x"}], "each of messages must have a role and a content"),
    "no content": ([{"role": "user"}], "content of a message must be a text or a list of parts"),
    "strange part": (
        [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}],
        "of type text, image or video, and hold it, got 'audio'",
    ),
    "nothing to see": (
        [{"role": "user", "content": [{"type": "image"}]}],
        "a part of type image must hold image, image_url, url, path or base64, got type",
    ),
    "a picture": (
        [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}],
        "messages must hold only text, got pictures or videos; use VQAPipeline",
    ),
}


@pytest.mark.parametrize("messages, said", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_a_sentence(talker, messages, said):
    with pytest.raises(ValueError, match=said):
        talker(messages=messages)


def test_what_does_not_go_together(talker, pipe, pictures):
    with pytest.raises(ValueError, match="give prompts or messages, got both"):
        talker("x", messages=TURNS)
    with pytest.raises(
        ValueError, match="give messages, or questions with their pictures and videos"
    ):
        pipe(pictures[0], "what", messages=talk(pictures[0]))
    with pytest.raises(ValueError, match="takes one question at a time, got messages"):
        pipe(messages=talk(pictures[0]), method="verdict")
    marked = [{"role": "user", "content": "what <image>"}]
    with pytest.raises(
        ValueError,
        match="must show all texts and a placeholder for each picture and video, got others",
    ):
        pipe(messages=marked)


# ---- frames and their rate


def test_frames_come_at_their_rate(pipe, pictures):
    """M-RoPE counts seconds: other rates are other answers, each generate's."""
    question = "what is this"

    def theirs(fps):
        text = wording.prompt(pipe.processor, question, {"image": 0, "video": 1}, True)
        about = dict(fps=fps, total_num_frames=4, frames_indices=[0, 1, 2, 3])
        inputs = pipe.processor(
            text=[text],
            videos=[pictures],
            video_metadata=[about],
            do_sample_frames=False,
            add_special_tokens=False,
            return_tensors="pt",
        )
        out = pipe.model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)[0]
        return inputs["second_per_grid_ts"], out[inputs["input_ids"].shape[1] :].tolist()

    seconds = {}
    for fps in (0.5, 2.0):
        out = pipe(None, question, videos=pictures, fps=fps, max_new_tokens=LONGEST)
        seconds[fps], wanted = theirs(fps)
        assert answers(out) == [wanted]
        part = {"type": "video", "video": pictures, "fps": fps}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": question}]}]
        assert answers(pipe(messages=messages, max_new_tokens=LONGEST)) == [wanted]
        _, prompt = pipe.prepared(messages=messages)
        assert prompt.inputs["second_per_grid_ts"].tolist() == list(map(float, seconds[fps]))
    assert seconds[0.5] != seconds[2.0]


def test_rates_that_cannot_be(pipe, talker, pictures, tmp_path):
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:])
    for fps, videos, said in (
        (0, pictures, "fps must be finite and above 0, got 0"),
        ("fast", pictures, "fps must be a number, got 'fast'"),
        (2, tmp_path / "a.gif", "fps is for videos given as frames"),
        (2, None, "fps is for videos given as frames, got none"),
    ):
        with pytest.raises(ValueError, match=said):
            pipe(None, "what is this", videos=videos, fps=fps)
    with pytest.raises(ValueError, match="fps is for videos, which only VQAPipeline takes"):
        talker("x", fps=2)


# ---- the command line


def test_a_file_of_messages(text_folder, pipe, tmp_path, pictures):
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "x"}]))
    tail = ["--max-new-tokens", 4]
    vlm = pipe.drafters.folder
    (tmp_path / "a.png").write_bytes(png(pictures[0]))
    part = {"type": "image", "path": str(tmp_path / "a.png")}
    seen = [{"role": "user", "content": [part, {"type": "text", "text": "what is this"}]}]
    (tmp_path / "seen.json").write_text(json.dumps({"messages": seen}))
    found = as_json("ask", vlm, "--messages", tmp_path / "seen.json", *tail, "--dtype", "float32")
    assert found["outputs"] == pipe(pictures[0], "what is this", max_new_tokens=4).answers
    assert found["messages"] == str(tmp_path / "seen.json")
    assert "give --question or --messages" in refused("ask", vlm)
    assert "give --prompt or --messages" in refused("complete", text_folder)
    said = refused("complete", text_folder, "--messages", file, "--prompt", "x")
    assert "give prompts or messages, got both" in said
    assert "must have a chat template" in refused("complete", text_folder, "--messages", file)
    file.write_text("{")
    assert "must hold JSON" in refused("complete", text_folder, "--messages", file)


# ---- text of a vision-language model


def test_a_model_that_sees_is_asked_for_text(pipe):
    """Its template takes parts alone, and no picture stands in the way."""
    texts = specmm.TextPipeline.from_pretrained(pipe.drafters.folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "what is this"}]
    wanted = answers(pipe(None, "what is this", max_new_tokens=LONGEST))
    for method in ("ar", "prompt-lookup"):
        options = dict(method=method, max_new_tokens=LONGEST)
        assert answers(texts("what is this", chat=True, **options)) == wanted
        assert answers(texts(messages=messages, **options)) == wanted
    inputs = texts.tokenizer("what", return_tensors="pt")
    theirs = texts.model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)[0]
    length = inputs["input_ids"].shape[1]
    assert answers(texts("what", max_new_tokens=LONGEST)) == [theirs[length:].tolist()]


@pytest.mark.parametrize("method", ["msd", "eagle3", "text-draft"])
def test_a_drafter_of_another_kind_is_one_sentence(pipe, method):
    folder = pipe.drafters.folder
    said = f"'{method}' needs a drafter of its own, got a vision-language model .* for vlm-draft"
    with pytest.raises(ValueError, match=said):
        specmm.VQAPipeline.from_pretrained(folder, method=method, drafter=folder)


def test_a_model_in_parts_is_no_drafter(pipe):
    """Its folder has no checkpoint that a head could be read from."""
    said = "'msd' needs a drafter of its own, got a vision-language model in .*smollava"
    with pytest.raises(ValueError, match=said):
        load_drafter("msd", specmm.zoo.POCKET / "smollava", pipe.model)
