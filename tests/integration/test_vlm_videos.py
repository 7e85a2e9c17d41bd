"""Questions about pictures, videos and neither in one batch, on a tiny random Qwen2.5-VL: from the
pipeline, the command line and a batch job.
"""

import json

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image

import specmm
from specmm.hf.drafters.small_model import SmallModel
from tests.commands import as_json, succeed
from tests.noisy import noisy
from tests.tiny import parts
from tests.tiny.processors import SMALL, WORDS, word_tokenizer

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|image_pad|>", "<|video_pad|>", "<v>", "</v>"]
TEMPLATE = (
    "<s>{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<v><|image_pad|></v>"
    "{% elif c['type'] == 'video' %}<v><|video_pad|></v>"
    "{% else %} {{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)
VOCABULARY = len(SPECIAL) + len(WORDS)


def processor():
    made = word_tokenizer(SPECIAL, WORDS)
    films = tf.Qwen2VLVideoProcessor(**SMALL, cap_pixels_per_frame=False)
    pictures = tf.Qwen2VLImageProcessor(**SMALL)
    return tf.Qwen2_5_VLProcessor(pictures, made, films, chat_template=TEMPLATE)


def model(seed=0):
    config = tf.Qwen2_5_VLConfig(
        vision_config=parts.WINDOWED,
        text_config=parts.TEXT | dict(vocab_size=VOCABULARY, rope_parameters=parts.MROPE),
        image_token_id=4,
        video_token_id=5,
        vision_start_token_id=6,
        vision_end_token_id=7,
    )
    torch.manual_seed(seed)
    made = tf.Qwen2_5_VLForConditionalGeneration(config)
    return parts.ending(parts.shaken(made, seed), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    model().save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pipe(folder):
    return specmm.VQAPipeline.from_pretrained(folder, torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def frames():
    return [noisy((20, 12), 40 + 20 * i).convert("RGB") for i in range(7)]


@pytest.fixture
def gif(frames, tmp_path):
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:4], duration=500)
    return tmp_path / "a.gif"


def generated(pipe, text, **shown):
    """What transformers itself answers to a prompt with placeholders, greedily."""
    inputs = pipe.processor(
        text=[text], return_tensors="pt", add_special_tokens=False, do_sample_frames=False, **shown
    )
    out = pipe.model.generate(**inputs, max_new_tokens=9, do_sample=False)[0]
    return out[inputs["input_ids"].shape[1] :]


def film(frames):
    return np.stack([np.asarray(frame) for frame in frames])


@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_rows_of_every_kind_are_answered_as_generate_answers_them(pipe, frames, gif, method):
    """Two pictures, a list of frames, none, a picture and a film together."""
    shown, films = [frames[:2], None, None, frames[2]], [None, frames[3:], None, gif]
    asked = ["what is this", "how many red dog", "where is the box a", "one two"]
    out = pipe(shown, asked, videos=films, max_new_tokens=9, method=method)
    picture, clip = "<v><|image_pad|></v>", "<v><|video_pad|></v>"
    moving = film(frames[3:])
    shown = film(gif_frames(gif))
    times = {
        "video_metadata": [{"total_num_frames": 4, "fps": 2.0, "frames_indices": [0, 1, 2, 3]}]
    }
    wanted = [
        generated(pipe, f"<s>{picture * 2} what is this ", images=[frames[:2]]),
        generated(pipe, f"<s>{clip} how many red dog ", videos=[moving]),
        generated(pipe, "<s> where is the box a "),
        generated(
            pipe, f"<s>{picture}{clip} one two ", images=[frames[2]], videos=[shown], **times
        ),
    ]
    for ours, theirs in zip(out.tokens, wanted, strict=True):
        assert torch.equal(ours, theirs[: len(ours)])
        assert len(ours) == len(theirs) or int(ours[-1]) == 2


def gif_frames(file):
    with Image.open(file) as image:
        found = []
        for i in range(image.n_frames):
            image.seek(i)
            found.append(image.convert("RGB"))
        return found


def test_waiting_rows_bring_their_videos(pipe, frames):
    """Rows that end take the next question with what belongs to it."""
    asked = [[frames[0]], None, None], ["what is", "how many red dog", "where"]
    clips = [None, frames[1:3], None]
    together = pipe(*asked, videos=clips, max_new_tokens=6, method="prompt-lookup")
    refilled = pipe(*asked, videos=clips, max_new_tokens=6, method="prompt-lookup", batch_size=1)
    assert refilled.answers == together.answers


def test_a_stream_sees_the_video(pipe, frames):
    said = pipe.stream(None, "what is", frames[:4], max_new_tokens=6)
    whole = pipe(None, "what is", videos=frames[:4], max_new_tokens=6).answers[0]
    assert "".join(row[0] for row in said).strip() == whole


def test_ask_takes_a_video(folder, pipe, frames, gif):
    args = ["ask", str(folder), "--video", str(gif), "-q", "what is", "--max-new-tokens", "6"]
    report = as_json(*args, "--dtype", "float32")
    assert report["videos"] == [str(gif)] and report["images"] == []
    assert report["outputs"] == pipe(None, "what is", videos=gif, max_new_tokens=6).answers
    assert report["outputs"] != pipe(None, "what is", max_new_tokens=6).answers


def test_a_job_of_pictures_and_videos(folder, pipe, frames, gif, tmp_path):
    frames[5].save(tmp_path / "b.png")
    jobs = tmp_path / "jobs.jsonl"
    rows = [
        {"id": "film", "question": "what is", "video": "a.gif"},
        {"id": "both", "question": "where is", "video": ["a.gif"], "image": "b.png"},
        {"id": "text", "question": "how many"},
    ]
    jobs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    args = ["batch", str(jobs), "--out", str(out), "--model", str(folder), "--dtype", "float32"]
    succeed(*args, "--max-new-tokens", "6", "--temperature", "0")
    lines = [json.loads(line) for f in out.rglob("*.jsonl") for line in f.read_text().splitlines()]
    said = {line["id"]: line["answer"] for line in lines if "answer" in line}
    wanted = {
        "film": pipe(None, "what is", videos=gif, max_new_tokens=6),
        "both": pipe(tmp_path / "b.png", "where is", videos=gif, max_new_tokens=6),
        "text": pipe(None, "how many", max_new_tokens=6),
    }
    assert said == {name: out.answers[0] for name, out in wanted.items()}


@pytest.mark.parametrize("method", ["vlm-draft", "text-draft"])
def test_small_models_draft_for_questions_about_videos(pipe, frames, method):
    """One that sees the video, too, and one that reads its placeholders as nothing."""
    if method == "vlm-draft":
        drafter = SmallModel(model(1), processor())
    else:
        sizes = parts.SIZES | dict(num_hidden_layers=1, vocab_size=VOCABULARY)
        torch.manual_seed(0)
        drafter = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).eval()
    drafted = specmm.VQAPipeline(pipe.model, pipe.processor, method, drafter)
    asked = [[frames[0]], None, None], ["what is", "how many red dog", "where"]
    options = dict(videos=[None, frames[1:5], None], max_new_tokens=9)
    wanted = pipe(*asked, **options)
    found = drafted(*asked, **options)
    assert found.method == method and found.answers == wanted.answers


def test_a_drafter_that_takes_no_videos_is_named(pipe, frames):
    blind = tf.LlavaProcessor(
        tf.CLIPImageProcessor(), processor().tokenizer, patch_size=4, chat_template=TEMPLATE
    )
    drafter = SmallModel(model(1), blind)
    drafted = specmm.VQAPipeline(pipe.model, pipe.processor, "vlm-draft", drafter)
    with pytest.raises(ValueError, match="need a model that takes them, got a LlavaProcessor"):
        drafted(None, "what is", videos=frames, max_new_tokens=4)


def test_a_verdict_is_about_pictures(pipe, frames):
    with pytest.raises(ValueError, match="'verdict' takes only pictures, got videos"):
        pipe(None, "what is", videos=frames, method="verdict")
