"""What a round costs on models with states, against a model of attention alone of the same size.

    python -m benchmarks.hybrids

The model of attention is pocket/coder with its block drafter. The others have its sizes, its tokens
and a drafter of the same sizes. They are trained for minutes on the same source code: enough that
drafts are kept, and thus that states go back to places within a chain. Rounds and plain steps of
all models are played in turn, so that drift affects all alike. Trainings are kept in the cache; one
that was stopped goes on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import transformers as tf
import typer
from tqdm import tqdm

from benchmarks.common import CACHE, RESULTS, Out, Row, Threads, environment, write_results
from recipes.training.coder import evaluate, train_target
from specmm import methods
from specmm.decode import Progress, decode, decode_plain
from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.files import writable
from specmm.hf.drafting import assemble
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.recipes.text import text_stream
from specmm.recipes.training.dflash import build_block, train_block
from specmm.recipes.training.drawn_rows import Rows
from specmm.recipes.training.small_qwen import LENGTH
from specmm.recipes.training.texts import windows
from specmm.text.pipeline import TextPipeline
from specmm.training import seeded

MODEL = "pocket/coder"
ATTENTION = "attention"
TRAININGS = "lfm2:150:80,qwen3_5:53:3,granite:2:2"
PROMPT = 96  # tokens read
WRITTEN = 96  # tokens of an answer
DRAFTS = 6  # of a round
LAYERS = 20
WIDTH = 128
HEAD = 32  # width of a head
SIZES: dict[str, Any] = dict(
    hidden_size=WIDTH,
    intermediate_size=352,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    initializer_range=0.04,
    tie_word_embeddings=True,
)
SSM: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_head=HEAD, mamba_n_groups=1, mamba_expand=2)
SSM |= dict(mamba_d_state=HEAD)
DRAFTER: dict[str, int] = dict(layers=2, block=9, read=4, inner=512, markov=64, recurrent=128)


def mixed(other: str) -> list[str]:
    """Three layers of the ``other`` kind, then one of attention, and so on."""
    return [other if (i + 1) % 4 else "full_attention" for i in range(LAYERS)]


def lfm2(**given: Any) -> Any:
    """Short convolutions, and attention in each fourth layer."""
    options = dict(block_auto_adjust_ff_dim=False, layer_types=mixed("conv"))
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**SIZES, **options, **given))


def qwen3_5(**given: Any) -> Any:
    """Gated delta nets, and attention in each fourth layer."""
    delta: dict[str, Any] = dict(linear_num_key_heads=4, linear_num_value_heads=4)
    delta |= dict(linear_key_head_dim=HEAD, linear_value_head_dim=HEAD, head_dim=HEAD)
    config = tf.Qwen3_5TextConfig(**SIZES, **delta, layer_types=mixed("linear_attention"), **given)
    return tf.Qwen3_5ForCausalLM(config)


def granite(**given: Any) -> Any:
    """Mamba 2, and attention in each fourth layer."""
    options: dict[str, Any] = dict(num_local_experts=0, shared_intermediate_size=352)
    options |= dict(layer_types=mixed("linear_attention"))
    return tf.GraniteMoeHybridForCausalLM(
        tf.GraniteMoeHybridConfig(**SIZES, **SSM, **options, **given)
    )


KINDS: dict[str, Callable[..., Any]] = {"lfm2": lfm2, "qwen3_5": qwen3_5, "granite": granite}


@dataclass
class Player:
    """A model and its drafter, with milliseconds of rounds and of plain steps."""

    name: str
    target: VLMTarget
    drafter: DFlash
    steps: int
    loss: float
    rounds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # tokens of each round

    def add(self, took: float, kept: int, drafts: bool) -> None:
        """Count a round, or a plain step, of ``took`` milliseconds that committed ``kept``."""
        (self.rounds if drafts else self.plain).append(took)
        if drafts:
            self.kept.append(kept)

    def begin(self, ids: torch.Tensor, drafts: bool) -> Iterator[Progress]:
        """Rounds, or plain steps, after a prompt ``ids`` [1, L]."""
        prompt = VLMPrompt({"input_ids": ids}, WRITTEN)
        uniforms = Uniforms.from_seeds([0])
        if not drafts:
            return decode_plain(self.target, prompt, WRITTEN, uniforms)
        method = methods.Block(length=DRAFTS)
        drafter, rule = assemble(method, self.target, self.drafter)
        return decode(self.target, drafter, rule, prompt, WRITTEN, uniforms)


def trained(kind: str, coder: TextPipeline, cache: Path, steps: int, drafting: int) -> Player:
    """A model of a ``kind``, after ``steps`` of training, and a drafter after ``drafting`` more."""
    out = writable(cache / kind)
    words = coder.tokenizer
    with seeded(0):
        model = KINDS[kind](
            vocab_size=len(words), eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id
        )
    learnt, held_out = (text_stream(words, cache, held_out=side) for side in (False, True))
    folder = writable(out / "target")
    options: dict[str, Any] = dict(compiled=False, evaluate_every=steps)
    train_target(model, learnt, held_out, folder, steps=steps, **options)
    loss = float(evaluate(model.eval(), held_out))
    target = VLMTarget(model, Processor(0), kind)
    with seeded(0):
        drafter = build_block(target, mask=words.mask_token_id, **DRAFTER)
    rows = Rows(target, windows(learnt, 0, 512, LENGTH, 0), drafter.config.layers)
    train_block(target, drafter, rows, writable(out / "block"), steps=drafting, compiled=False)
    return Player(kind, target, drafter.eval(), steps, loss)


def attention(coder: TextPipeline, cache: Path) -> Player:
    """pocket/coder."""
    loss = float(evaluate(coder.model, text_stream(coder.tokenizer, cache, held_out=True)))
    target = VLMTarget(coder.model, Processor(0), ATTENTION)
    return Player(ATTENTION, target, coder.drafter("block"), 3000, loss)


def play(players: list[Player], ids: torch.Tensor, drafts: bool) -> None:
    """A round of each in turn until all have written an answer; those that have begin it again.

    A round is counted if it is not a prompt's first, which reads it.
    """
    going = {p.name: p.begin(ids, drafts) for p in players}
    before = {p.name: 0 for p in players}
    left = set(going)
    while left:
        for player in players:
            start = time.perf_counter()
            progress = next(going[player.name])
            took = 1e3 * (time.perf_counter() - start)
            count = int(progress.counts[0])
            if before[player.name]:
                player.add(took, count - before[player.name], drafts)
            before[player.name] = count
            if count >= WRITTEN:
                left.discard(player.name)
                going[player.name] = player.begin(ids, drafts)
                before[player.name] = 0


def row(player: Player, baseline: Player) -> Row:
    """Quartiles of a player, and its medians over those of the ``baseline``."""
    low, median, high = statistics.quantiles(player.rounds, n=4)
    plain_low, plain, plain_high = statistics.quantiles(player.plain, n=4)
    parameters = sum(p.numel() for p in player.target.model.parameters())
    mixers = player.target.recurrent.mixers if player.target.recurrent else ()
    return {
        "model": player.name,
        "parameters": parameters,
        "mixers": "+".join(sorted({mixer.way for mixer in mixers})) or None,
        "training_steps": player.steps,
        "held_out_loss": player.loss,
        "tau": statistics.mean(player.kept),
        "rounds": len(player.rounds),
        "round_ms": median,
        "round_ms_low": low,
        "round_ms_high": high,
        "round_ratio": median / statistics.median(baseline.rounds),
        "step_ms": plain,
        "step_ms_low": plain_low,
        "step_ms_high": plain_high,
        "step_ratio": plain / statistics.median(baseline.plain),
    }


def main(
    kinds: Annotated[
        str, typer.Option(help="KIND:STEPS:STEPS of model and drafter, with commas between.")
    ] = TRAININGS,
    prompts: Annotated[int, typer.Option(min=1, help="Places in held-out files.")] = 6,
    cache: Annotated[Path, typer.Option(help="Where trainings are kept.")] = CACHE / "hybrids",
    threads: Threads = 1,
    out: Out = RESULTS,
) -> None:
    """Train what is missing, measure, and write ``hybrids.json`` and ``.csv``."""
    torch.set_num_threads(threads)
    tf.logging.set_verbosity_error()
    coder = TextPipeline.from_pretrained(MODEL, torch_dtype=torch.float32, device="cpu")
    players = [attention(coder, writable(cache))]
    for chosen in kinds.split(","):
        kind, steps, drafting = chosen.split(":")
        players.append(trained(kind, coder, cache, int(steps), int(drafting)))
    held_out = text_stream(coder.tokenizer, cache, held_out=True)
    random = Random("hybrids")
    for _ in tqdm(range(prompts), desc="prompts"):
        first = random.randrange(len(held_out) - PROMPT)
        ids = held_out[first : first + PROMPT].long()[None]
        for drafts in (True, False):
            play(players, ids, drafts)
    facts = environment(model=MODEL, kinds=kinds, drafts=DRAFTS, transformers=tf.__version__)
    rows = [row(player, players[0]) for player in players]
    write_results(out, "hybrids", rows, facts)
    for found in rows:
        print(found)


if __name__ == "__main__":
    typer.run(main)
