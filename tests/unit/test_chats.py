"""Chats in all the forms that people keep them in are read alike; what cannot be used is said."""

import base64
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from specmm.chats.forms import Unusable, chat_of, rows_of

CALL = {"name": "add", "arguments": '{"a": 1}'}
TEXT = {"type": "text", "text": "q"}


def picture():
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(stream, "png")
    return stream.getvalue()


ADDRESS = "data:image/png;base64," + base64.b64encode(picture()).decode()


def said(chat):
    """A chat as text, with <image> for what is shown."""
    parts = [
        "".join(p.get("text", f"<{p['type']}>") for p in message["content"])
        for message in chat.messages
    ]
    return [(m["role"], text) for m, text in zip(chat.messages, parts, strict=True)]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": "a", "image": "x.png"},
        {"question": "q", "answer": "a", "images": ["x.png"], "id": 7, "video": None},
        {
            "conversations": [
                {"from": "human", "value": "<image>\nq"},
                {"from": "gpt", "value": "a"},
            ],
            "image": "x.png",
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, TEXT]},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
                {"role": "user", "content": "never answered"},
            ],
            "images": [{"path": "x.png", "bytes": None}],
        },
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "file:x.png"}}, TEXT],
            },
            {"role": "assistant", "content": "a"},
        ],
        {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}, "image": "x.png"},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": "x.png", "text": None}, TEXT],
                },
                {"role": "assistant", "content": "a", "tool_calls": None},
            ]
        },
    ],
)
def test_forms(row, tmp_path):
    chat = chat_of(row, tmp_path)
    assert said(chat) == [("user", "<image>q"), ("assistant", "a")]
    assert list(chat.images) == [str(tmp_path / "x.png")] and chat.visual


def test_systems_tools_and_history():
    row = {"question": "q", "answer": "a", "system": "s", "history": [["b", "c"]], "image": "x.png"}
    wanted = [("system", "s"), ("user", "b"), ("assistant", "c"), ("user", "<image>q")]
    assert said(chat_of(row, Path()))[:4] == wanted
    talk = [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": CALL}],
        },
        {"role": "tool", "content": "2", "name": "add"},
        {"role": "assistant", "content": "2", "reasoning_content": "so"},
    ]
    chat = chat_of({"messages": talk, "tools": json.dumps([{"name": "add"}])}, Path())
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert list(chat.tools) == [{"name": "add"}] and chat.messages[3]["reasoning_content"] == "so"


def test_copies_have_one_key_whatever_their_answers_and_pictures_count(tmp_path):
    for name, colour in (("a.png", "red"), ("b.png", "red"), ("c.png", "blue")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / name)
    rows = [("q", "a", "a.png"), ("q", "b", "b.png"), ("q", "a", "c.png"), ("r", "a", "a.png")]
    each = [dict(zip(("question", "answer", "image"), row, strict=True)) for row in rows]
    keys = [chat_of(row, tmp_path).keyed().key for row in each]
    assert keys[0] == keys[1] and len(set(keys)) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": None}, "an answer that is no text, but None"),
        ({"question": "q", "answer": 3}, "an answer that is no text, but 3"),
        ({"question": "q", "answer": " "}, "an empty answer"),
        ({"question": 3, "answer": "a"}, "a user message that is no text, but 3"),
        ({"question": "q", "answer": "a <image> b"}, "a picture in an answer"),
        ({"question": "q"}, "an answer that is no text, but None"),
        ("{", "no chat, but '{'"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no answer"),
        ({"messages": [{"role": "assistant", "content": "q"}]}, "no question"),
        ({"messages": [{"role": "pirate", "content": "q"}]}, "no role 'pirate'"),
        ({"messages": "q"}, "messages is 'q', not a list"),
        (
            {"conversations": [{"from": "human", "value": "<image><image>"}], "image": "a"},
            "more <image> than there are images",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "<image>"},
                    {"from": "gpt", "value": "a"},
                ],
                "images": ["a", "b"],
            },
            "fewer <image> than there are images",
        ),
        ({"question": "q", "answer": "a", "image": 3}, "a picture is 3"),
    ],
)
def test_rows_that_cannot_be_used(row, message, tmp_path):
    with pytest.raises(Unusable) as error:
        chat_of(row, tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "a", "context": "c"}, "d:1 has 'context', which is not read"),
        (
            {"messages": [{"role": "user", "content": "q", "weight": 0}]},
            "d:1 has 'weight', which is not read",
        ),
        ({"prompt": "q", "completion": "a"}, "must hold messages, conversations, or question and"),
    ],
)
def test_keys_that_are_not_read_are_refused(row, message):
    with pytest.raises(ValueError, match=message) as error:
        chat_of(row, Path(), "d:1")
    assert not isinstance(error.value, Unusable)


ROWS = [{"question": f"q{i}", "answer": "one\u2028two\u0085three"} for i in range(3)]


def test_files_of_json(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    files = {
        "lines.jsonl": "\n".join(lines) + "\n",
        "marked.jsonl": "\ufeff" + "\n\n".join(lines) + "\n \n\n",
        "crlf.jsonl": "\r\n".join(lines),
        "array.json": json.dumps(ROWS, indent=1),
        "marked.json": "\ufeff" + json.dumps(ROWS),
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
        assert [row for row, *_ in rows_of([tmp_path / name])] == ROWS
    assert [place for *_, place in rows_of([tmp_path / "marked.jsonl"])][2] == "marked.jsonl:5"
    assert len(list(rows_of([tmp_path]))) == 15
    (tmp_path / "more/.ipynb_checkpoints").mkdir(parents=True)
    copy = tmp_path / "more/.ipynb_checkpoints/marked-checkpoint.jsonl"  # not a second time
    copy.write_bytes((tmp_path / "marked.jsonl").read_bytes())
    (tmp_path / "more/above").symlink_to(tmp_path)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/again").symlink_to(tmp_path / "more")
    assert len(list(rows_of([tmp_path]))) == 15
    copy.rename(tmp_path / "more/MARKED.JSONL")
    assert len(list(rows_of([tmp_path / "linked"]))) == 3 + 15
    talks = [[{"role": "user", "content": "q"}]] * 2
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    (tmp_path / "talk.json").write_text(json.dumps(talks[0]))
    assert [row for row, *_ in rows_of([tmp_path / "talks.jsonl"])] == talks
    assert [row for row, *_ in rows_of([tmp_path / "talk.json"])] == talks[:1]
    (tmp_path / "bad.jsonl").write_bytes(lines[0].encode() + b"\n{\n\xff\n")
    assert [row for row, *_ in rows_of([tmp_path / "bad.jsonl"])] == [ROWS[0], "{", "\ufffd"]


def test_tables(tmp_path):
    """Parquet, and folders as ``datasets`` saves them."""
    rows = [row | {"image": {"bytes": picture(), "path": "a.png"}} for row in ROWS]
    rows[0]["tools"] = [{"name": "add"}]  # of which the others have none
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "d.parquet")
    saved = tmp_path / "saved"
    (saved / "train").mkdir(parents=True)
    with pa.ipc.new_stream(str(saved / "train" / "data.arrow"), table.schema) as stream:
        stream.write_table(table, 2)
    (saved / "train" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for place in (tmp_path / "d.parquet", saved, saved / "train"):
        found = list(rows_of([place]))
        assert [row for row, *_ in found] == rows
        chat = chat_of(*found[0])
        assert chat.images == [picture()] and chat.keyed().key
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=f"one split of {saved}, give one of {saved / 'train'}, "):
        list(rows_of([saved]))
    (tmp_path / "no.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="must be a table of chats"):
        list(rows_of([tmp_path / "no.parquet"]))


def test_pictures_in_all_forms(tmp_path):
    (tmp_path / "x.png").write_bytes(picture())
    plain = base64.b64encode(picture()).decode()
    each = ["x.png", str(tmp_path / "x.png"), (tmp_path / "x.png").as_uri(), ADDRESS, plain]
    each += [
        {"bytes": picture()},
        {"base64": plain},
        {"url": ADDRESS},
        Image.open(tmp_path / "x.png"),
    ]
    chat = chat_of({"question": "q", "answer": "a", "images": each}, tmp_path)
    path = str(tmp_path / "x.png")
    assert list(chat.images[:3]) == [path] * 3 and chat.images[3] == ADDRESS == chat.images[7]
    assert chat.images[4] == chat.images[5] == chat.images[6] == picture()


def test_places_without_chats(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    with pytest.raises(
        ValueError, match=r"got a folder of \.png at .*; write questions and answers"
    ):
        list(rows_of([tmp_path]))
    with pytest.raises(ValueError, match="got nothing at"):
        list(rows_of([tmp_path / "nothing"]))
