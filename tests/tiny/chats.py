"""Chats about a picture, and shipped models without their drafters, to train some."""

import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from specmm.chats.forms import chat_of


def picture_chats(folder):
    """A file of eleven questions about a picture and one about none."""
    pixels = np.random.default_rng(0).integers(0, 255, (96, 96, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    rows = [{"question": f"Is it {i}?", "answer": f"yes, {i}", "image": "a.png"} for i in range(11)]
    rows.append({"question": "What is a fish?", "answer": "an animal"})
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "lines.jsonl"


def undrafted(model, folder):
    """A copy of ``model`` in ``folder`` without drafters."""
    return shutil.copytree(model, folder, ignore=shutil.ignore_patterns("drafters"))


def one_turn(question, answer, images=None, videos=None):
    """A question, after what it is about, with its answer."""
    row = {"question": question, "answer": answer, "images": images, "videos": videos}
    return chat_of(row, Path())
