"""Chats about a picture, and shipped models without their drafters, to train some."""

import json
import shutil

import numpy as np
from PIL import Image


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
