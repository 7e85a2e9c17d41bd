"""A walk through the pocket LlamaGen: one class, every method, what each run kept of the model's
distribution.

Run it from anywhere: ``python demos/llamagen_pocket.py [MODEL] [OUT]``.
"""

import sys
import time
from pathlib import Path

import torch
from PIL import Image

import specmm

model = sys.argv[1] if len(sys.argv) > 1 else "pocket/llamagen"
out = Path(sys.argv[2] if len(sys.argv) > 2 else "out/demos")
out.mkdir(parents=True, exist_ok=True)

pipe = specmm.ImagePipeline.from_pretrained(model)
pipe.set_progress_bar_config(disable=True)

for method in (
    "ar",
    "sjd",
    "speculative",
    specmm.methods.LanternPP(lambda_=2.0),
    specmm.methods.LanternPP(lambda_=4.0),
):
    pipe(classes=["heart"], method=method)  # warm up: caches and plans
    start = time.perf_counter()
    made = pipe(
        classes=["heart"],
        num_images_per_prompt=4,
        method=method,
        generator=torch.Generator().manual_seed(7),
    )
    seconds = time.perf_counter() - start
    row = Image.new("RGB", (4 * made.images[0].width, made.images[0].height))
    for i, picture in enumerate(made.images):
        row.paste(picture, (i * picture.width, 0))
    strength = getattr(method, "lambda_", "")
    row.resize((row.width * 3, row.height * 3)).save(out / f"{made.method}{strength}.png")
    tokens = f"{made.stats.tau:.2f} tokens a round"
    sys.stdout.write(f"{made.method}{strength}: {seconds:.2f} s, {tokens}; {made.certificate}\n")
