"""What each loss of a drafter's training gives on pocket models.

    OMP_NUM_THREADS=1 python -m benchmarks.losses

An EAGLE-3 head of pocket/coder, an MSD head of pocket/llava and a block drafter of pocket/llamagen
learn by each loss: short trainings, the same first weights, rows and rate. Then they draft chains
of five (of the picture's: four) for what was held out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import EMOJI, RESULTS, Out, Row, environment, merged, write_results
from benchmarks.training import ANSWER, HELD, LENGTH, PROMPT, Data, drafted
from recipes.data import emoji_pictures, scene_conversations
from specmm.core.decode import decode
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Stats
from specmm.core.tree import TreeShape
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.image_ar.files import read_settings
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockDrafter
from specmm.image_ar.tokens.loading import load_gpt, load_vq
from specmm.image_ar.tokens.pipeline import LlamaGenSettings
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.recipes.conversations import Opening
from specmm.recipes.drafter import picture_tokens, train_block
from specmm.recipes.features import CLIP, RolledEagle3, build_eagle3, head_rate, rollout_loss
from specmm.recipes.loop import Losses, Run
from specmm.recipes.losses import LOSSES
from specmm.recipes.msd import build_msd, train_msd
from specmm.recipes.recipe import Places
from specmm.recipes.settings import load_frozen
from specmm.recipes.source import Data as Chats
from specmm.recipes.training.seen import Seen, learn
from specmm.recipes.training.texts import text_stream, windows
from specmm.text.pipeline import TextPipeline
from specmm.verify import Recursive
from specmm.zoo import POCKET

WARMUP = 12
PICTURES = 24  # that a block drafter helps to draw
Trained = Callable[[float], Stats]  # what a trained drafter's decoding did at a temperature


def coder(folder: Path, steps: int, losses: list[str]) -> Iterator[tuple[str, Trained]]:
    """EAGLE-3 heads of 1,024 tokens, on rows of Python."""
    target = load_frozen(POCKET / "coder", dtype="float32")
    pipe = TextPipeline.from_pretrained(POCKET / "coder", torch_dtype=torch.float32)
    stream = text_stream(pipe.tokenizer, folder)
    held = windows(text_stream(pipe.tokenizer, folder, held_out=True), 0, HELD, PROMPT, 0)
    rows = windows(stream, 0, 512, LENGTH, 0)
    ids = torch.bincount(rows.flatten(), minlength=target.family.vocabulary).topk(1024).indices
    data = Data(target, rows, build_eagle3(target, 1, 0, ids).config.layers)
    prompt = VLMPrompt(padded(held.tolist()), ANSWER)
    output = target.family.logits_of(ids.sort().values)
    for name in losses:
        head = build_eagle3(target, 1, 0, ids)

        def loss(seen: Seen, _: int, name: str = name, head: Any = head) -> Losses:
            return rollout_loss(RolledEagle3(head), output, seen, 4, loss=name)

        run = Run(folder / name, steps, head_rate(head), WARMUP)
        learn(head, loss, data.seen, run, clip=CLIP)
        yield name, lambda t, head=head: drafted(target.model, head, prompt, pipe.ends(), t)


def llava(folder: Path, steps: int, losses: list[str]) -> Iterator[tuple[str, Trained]]:
    """MSD heads, on questions about scenes of emoji."""
    target = load_frozen(POCKET / "llava", dtype="float32")
    chats = Chats(Places([str(EMOJI)], scene_conversations), 0.1, None, "skip", None)
    reader = chats.reader(POCKET / "llava")
    opened = scene_conversations([str(EMOJI)], Opening(reader, lambda: target, folder, 0.1, 0))
    prompt = opened.prompts(HELD)
    options: dict[str, Any] = dict(noise=0.05, probs_weight=1.0, passes=2, ramp=steps // 2)
    options |= dict(read=opened.read, sorts=opened.sorts)
    for name in losses:
        head = build_msd(target)
        run = Run(folder / name, steps, 2e-3, WARMUP)
        train_msd(target, head, opened.draw, run, loss=name, **options)
        yield name, lambda t, head=head: drafted(target.model, head, prompt, reader.stops, t)


def llamagen(folder: Path, steps: int, losses: list[str]) -> Iterator[tuple[str, Trained]]:
    """Block drafters, on emoji; of ``overlap_weight`` 0, for it would add total variation."""
    place = POCKET / "llamagen"
    target, vq = load_gpt(place / "transformer"), load_vq(place / "vq")
    settings = read_settings(LlamaGenSettings, place)
    side = round(target.config.block_size**0.5) * vq.config.downsampling
    pictures = emoji_pictures(str(EMOJI), settings.classes, target.config.num_classes, side)
    tokens = picture_tokens(vq, pictures.images, folder)
    config = BlockConfig(4, 2, target.config, (4, 9, 14))
    for name in losses:
        run = Run(folder / name, steps, 2e-3, WARMUP)
        options: dict[str, Any] = dict(overlap_weight=0.0, dropout=0.3, loss=name)
        head = train_block(
            target, tokens, torch.from_numpy(pictures.labels), config, run, **options
        )

        def used(temperature: float, head: Any = head) -> Stats:
            guided = Guidance(settings.cfg, settings.cfg_interval)
            judge = LlamaGenTarget(target, guided, Processor(temperature))
            drafter = BlockDrafter(head.eval(), judge, TreeShape.chain(4))
            prompt = Prompt(torch.arange(PICTURES) % target.config.num_classes)
            uniforms = Uniforms.from_seeds(range(PICTURES))
            *_, end = decode(judge, drafter, Recursive(), prompt, judge.length, uniforms)
            return end.stats

        yield name, used


MODELS = {"pocket/coder": ("eagle3", coder), "pocket/llava": ("msd", llava)}
MODELS["pocket/llamagen"] = ("drafter", llamagen)


def depths(stats: Stats, count: int = 4) -> Row:
    """How often a draft of a depth was accepted where the one before was."""
    kept = [sum(stats.kept[depth:]) for depth in range(count + 1)]
    return {f"depth {d + 1}": round(kept[d + 1] / max(1, kept[d]), 3) for d in range(count)}


def main(
    steps: Annotated[int, typer.Option(min=20)] = 120,
    models: Annotated[str, typer.Option(help="With commas between.")] = ",".join(MODELS),
    losses: Annotated[str, typer.Option(help="With commas between.")] = ",".join(LOSSES),
    out: Out = RESULTS,
) -> None:
    """Train with each loss, and draft; rows of others stay."""
    found: list[Row] = []
    for model in models.split(","):
        kind, train = MODELS[model]
        with TemporaryDirectory() as folder:
            for name, used in train(Path(folder), steps, losses.split(",")):
                greedy, drawn = used(0.0), used(1.0)
                taus = {"τ greedy": round(greedy.tau, 3), "τ at T = 1": round(drawn.tau, 3)}
                row: Row = {"model": model, "training": kind, "loss": name, "steps": steps}
                found.append(row | taus | depths(drawn))
                print(found[-1], flush=True)
    rows = merged(out, "losses", found, ("model", "loss"))
    write_results(out, "losses", rows, environment())


if __name__ == "__main__":
    typer.run(main)
